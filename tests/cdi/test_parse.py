"""Reading spec files: strictly what is ours, leniently what is foreign, safely both."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cdi.parse import Peek, parse, peek
from agent.cdi.render import render
from agent.cdi.spec import ContainerEdits, Device, DeviceNode, Kind, Spec
from agent.cdi.tree import MAX_SIZE
from agent.errors import SpecError

SPEC = Spec(
    Kind("intel.com/gpu"),
    (
        Device("all", ContainerEdits((DeviceNode("/dev/dri/card0"),))),
        Device("gpu0", ContainerEdits((DeviceNode("/dev/dri/card0"),))),
    ),
)
OURS = render(SPEC)

HEAD = "cdiVersion: 0.5.0\nkind: vendor.com/gpu\n"
EDITS = "containerEdits: {deviceNodes: [{path: /dev/x}]}"


def foreign(devices: str, head: str = HEAD) -> bytes:
    return f"{head}devices:\n{devices}\n".encode()


def test_a_file_of_ours_is_read_as_the_spec_that_it_was() -> None:
    assert parse(OURS) == SPEC


NESTED = b"l0: &l0 [x, x]\n" + b"".join(
    b"l%d: &l%d [*l%d, *l%d, *l%d, *l%d]\n" % (level, level, *[level - 1] * 4)
    for level in range(1, 60)
)

HOSTILE = {
    "nothing": b"",
    "blank": b" " * 100_000,
    "a comment": b"# x\n" * 100_000,
    "binary": bytes(range(256)) * 100,
    "NULs": b"\0" * 4096,
    "latin-1": "kind: ä".encode("latin-1"),
    "utf-16": "kind: a".encode("utf-16"),
    "a scalar": b"x",
    "a list": b"[1, 2]",
    "flow sequences in each other": b"[" * 1_000_000,
    "flow mappings in each other": b"{a: " * 1_000_000,
    "block sequences in each other": b"- " * 1_000_000,
    "complex keys in each other": b"? " * 1_000_000,
    "a bomb of aliases": NESTED,
    "an alias of itself": b"&a {kind: *a, devices: *a, cdiVersion: *a}",
    "an alias of nothing": b"kind: *a",
    "a bomb of merges": b"b: &b {"
    + b"".join(b"k%d: 1, " % n for n in range(9000))
    + b"}\n"
    + b"".join(b"m%d: {<<: *b}\n" % n for n in range(100)),
    "a key that is a list": b"[a]: b",
    "a key given twice": b"kind: a.b/cc\nkind: a.b/cc\n",
    "too large": b"x" * (MAX_SIZE + 1),
    "many keys": b"".join(b"k%d: 1\n" % n for n in range(150_000)),
    "a tag of Python's": b"!!python/object/apply:os.system [exit]",
    "unclosed": b'kind: "a',
    "another YAML": b"%YAML 9.9\n---\nx",
    "an escape sequence in a key": b'"\\e[31m\\n": 1',
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_whatever_is_in_a_file_there_is_one_sentence_about_it(content: bytes) -> None:
    found = peek(content)
    assert (found.kind, found.names) == (None, frozenset())
    assert found.problem
    assert found.problem.isprintable()
    assert len(found.problem) < 300
    with pytest.raises(SpecError) as caught:
        parse(content)
    assert caught.value.sentence.isprintable()
    assert len(caught.value.sentence) < 300


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too large", "MiB"),
        ("many keys", "too many values"),
        ("block sequences in each other", "nests more than"),
        ("flow mappings in each other", "nests more than"),
        ("a bomb of merges", "merges too much"),
        ("a key given twice", "twice"),
        ("a key that is a list", "no scalar"),
        ("an alias of nothing", "alias"),
        ("nothing", "empty"),
        ("latin-1", "UTF-8"),
    ],
)
def test_a_bound_of_the_reader_is_named_when_it_is_passed(name: str, words: str) -> None:
    assert words in (peek(HOSTILE[name]).problem or "")


def test_what_an_alias_repeats_costs_no_more_than_once() -> None:
    """A thousand million values, were each alias a copy; the time-out would end this test."""
    head = HEAD + "containerEdits: &edits {env: [" + "A=b, " * 50_000 + "]}\n"
    devices = "\n".join(
        f"- {{name: d{number}, containerEdits: *edits}}" for number in range(20_000)
    )
    assert len(peek(foreign(devices, head)).names) == 20_000


@given(st.binary(max_size=400))
def test_any_bytes_are_read_without_an_accident(content: bytes) -> None:
    peek(content)
    with contextlib.suppress(SpecError):
        parse(content)


@given(
    st.integers(0, len(OURS) - 1),
    st.one_of(st.just(b""), st.binary(min_size=1, max_size=3)),
)
def test_a_damaged_file_of_ours_is_valid_or_refused(place: int, damage: bytes) -> None:
    content = OURS[:place] + damage + OURS[place + 1 :]
    try:
        spec = parse(content)
    except SpecError:
        return
    render(spec)


@pytest.mark.parametrize(
    "content",
    [
        OURS.replace(b"kind:", b"knd:"),
        OURS.replace(b'"0.5.0"', b'"9.9.9"').replace(b'"0.3.0"', b'"9.9.9"'),
        OURS.replace(b'name: "gpu0"', b'name: "all"'),
        OURS.replace(b'"/dev/dri/card0"', b'"card0"'),
        OURS.replace(b"path", b"pfad"),
        OURS + b"---\nkind: x\n",
        OURS.replace(b'name: "gpu0"', b'name: &a "gpu0"'),
        OURS.replace(b'name: "gpu0"', b"name: 7"),
        OURS.replace(b'name: "gpu0"', b"name: " + b"7" * 5000),
    ],
)
def test_a_file_of_ours_that_somebody_changed_is_refused(content: bytes) -> None:
    assert content != OURS
    with pytest.raises(SpecError):
        parse(content)


GPU = Peek(Kind("vendor.com/gpu"), frozenset({"a", "b"}))
ONE = Peek(Kind("vendor.com/gpu"), frozenset({"a"}))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(OURS, Peek(Kind("intel.com/gpu"), frozenset({"all", "gpu0"})), id="ours"),
        pytest.param(foreign(f"- {{name: a, {EDITS}}}\n- {{name: b, {EDITS}}}"), GPU, id="two"),
        pytest.param(
            b'{"cdiVersion": "0.5.0", "kind": "vendor.com/gpu", "devices": [{"name": "a",'
            b' "containerEdits": {"env": ["A=\\u00e4"]}}]}',
            ONE,
            id="JSON",
        ),
        pytest.param(
            b"\xef\xbb\xbf" + foreign(f"- {{name: a, {EDITS}}}"), ONE, id="byte order mark"
        ),
        pytest.param(
            foreign(f"- {{name: a, {EDITS}}}") + b"---\n[not, a spec\n",
            ONE,
            id="only the first document counts",
        ),
        pytest.param(
            foreign(f"- {{Name: a, {EDITS}}}", "CDIVersion: v0.5.0\nKind: vendor.com/gpu\n"),
            ONE,
            id="older consumers ignore case",
        ),
        pytest.param(
            foreign(f"- &d {{name: a, {EDITS}}}\n- {{<<: *d, name: b}}"),
            GPU,
            id="anchors and merges",
        ),
        pytest.param(
            foreign("- {name: a, containerEdits: {brandNew: [x]}}", HEAD.replace("0.5.0", "7.0.0")),
            ONE,
            id="a version yet to come",
        ),
        pytest.param(
            foreign(
                f"- {{name: a, {EDITS}}}",
                HEAD + "containerEdits: {hooks: [{hookName: x, path: y}]}\n",
            ),
            ONE,
            id="edits for all devices",
        ),
    ],
)
def test_what_some_consumer_accepts_defines_its_devices(content: bytes, expected: Peek) -> None:
    assert peek(content) == expected


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("0", "0"),
        ("'012'", "012"),
        ("yes", "true"),
        ("Off", "false"),
        ("1_000", "1000"),
        ("x.y", "x.y"),
    ],
)
def test_a_bare_name_is_read_as_consumers_convert_it(written: str, read: str) -> None:
    assert peek(foreign(f"- {{name: {written}, {EDITS}}}")).names == {read}


@pytest.mark.parametrize(
    ("content", "word"),
    [
        pytest.param(HEAD.encode() + b"devices: []\n", "no devices", id="no devices"),
        pytest.param(HEAD.encode(), "no devices", id="devices missing"),
        pytest.param(foreign("- {name: a}"), "no edits", id="a device without edits"),
        pytest.param(foreign("- {name: a, containerEdits: {}}"), "no edits", id="empty edits"),
        pytest.param(
            foreign("- {name: a, containerEdits: {env: []}}"), "no edits", id="edits of nothing"
        ),
        pytest.param(
            foreign(f"- {{name: a, {EDITS}}}\n- {{name: a, {EDITS}}}"), "twice", id="a name twice"
        ),
        pytest.param(foreign(f"- {{name: a, nmae: b, {EDITS}}}"), "nmae", id="an unknown field"),
        pytest.param(
            foreign("- {name: a, containerEdits: {deviceNodes: [{paht: /x}]}}"),
            "paht",
            id="an unknown field of a node",
        ),
        pytest.param(foreign(f"- {{name: a b, {EDITS}}}"), "name", id="a name that is none"),
        pytest.param(foreign(f"- {{name: ~, {EDITS}}}"), "name", id="no name"),
        pytest.param(foreign(f"- {{name: [a], {EDITS}}}"), "name", id="a name that is a list"),
        pytest.param(
            foreign(f"- {{name: a, {EDITS}}}", "cdiVersion: 0.5.0\nkind: gpu\n"), "kind", id="kind"
        ),
        pytest.param(
            foreign(f"- {{name: a, {EDITS}}}", "kind: vendor.com/gpu\n"),
            "cdiVersion",
            id="no version",
        ),
        pytest.param(
            foreign(f"- {{name: a, {EDITS}}}", HEAD.replace("0.5.0", "0.5.7")),
            "never released",
            id="a version that never was",
        ),
        pytest.param(foreign(f"- {{name: a, {EDITS}}}")[:-9], "line", id="cut off"),
        pytest.param(foreign("- [name, a]"), "form", id="a device that is a list"),
        pytest.param(HEAD.encode() + b"devices: {name: a}\n", "list", id="devices that are none"),
    ],
)
def test_what_every_consumer_refuses_defines_nothing(content: bytes, word: str) -> None:
    found = peek(content)
    assert found.kind is None
    assert word in (found.problem or "")
