"""Whatever a value is, an entry stays one bounded, harmless entry in each of its forms."""

import json
import struct
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cdi.desired import Reason
from agent.observe import record as records
from agent.observe.record import Plain, Record, plain


class Evil:
    """Raises whatever is done with it."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


class EvilMapping(dict[str, object]):
    """Raises when it is walked through."""

    def items(self) -> None:  # type: ignore[override]
        raise RuntimeError("no")


def deep(levels: int) -> object:
    """A list in a list in a list."""
    value: object = "end"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(None, None, id="none"),
        pytest.param(True, True, id="bool"),
        pytest.param(7, 7, id="int"),
        pytest.param(2**64, "0x10000000000000000", id="int beyond 64 bits"),
        pytest.param(1.5, 1.5, id="float"),
        pytest.param("text", "text", id="str"),
        pytest.param(Reason.UDEV, "udev", id="enum"),
        pytest.param(
            "a\nb\r\tc\x1b[31m\x00\x7f\x9b", r"a\nb\r\tc\x1b[31m\x00\x7f\x9b", id="controls"
        ),
        pytest.param("a\u2028b\u202ec\u2066", r"a\u2028b\u202ec\u2066", id="direction"),
        pytest.param("\udcff", r"\udcff", id="surrogate"),
        pytest.param(b"ab\xff\n", r"ab\xff\n", id="bytes"),
        pytest.param("é日本", "é日本", id="other scripts"),
        pytest.param({"a": (1, {2: "x"})}, {"a": [1, "{2: 'x'}"]}, id="nested"),
        pytest.param({"b", "a"}, ["a", "b"], id="set"),
        pytest.param(Evil(), "<Evil, unprintable: RuntimeError>", id="evil"),
        pytest.param(EvilMapping(), "<EvilMapping, unprintable: RuntimeError>", id="evil mapping"),
        pytest.param([Evil(), 1], ["<Evil, unprintable: RuntimeError>", 1], id="one evil of two"),
    ],
)
def test_any_value_becomes_plain(value: object, expected: Plain) -> None:
    assert plain(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("x" * 10_000_000, id="long text"),
        pytest.param(b"x" * 10_000_000, id="long bytes"),
        pytest.param(10**100_000, id="large number"),
        pytest.param(["x" * 1000] * 100_000, id="long list"),
        pytest.param({str(n): n for n in range(100_000)}, id="large mapping"),
        pytest.param(deep(100_000), id="deep"),
        pytest.param({"x" * 10_000_000: 1}, id="long key"),
    ],
)
def test_a_value_is_bounded(value: object) -> None:
    assert len(json.dumps(plain(value))) <= records.MAX_ITEMS * records.MAX_TEXT * 2


ANY_TEXT = st.text(st.characters(), max_size=40)
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=8,
)


def made(
    fields: Mapping[str, object], *, level: str = "info", name: str = "spec-written"
) -> Record:
    return Record(level, name, {records.harmless(key, 64): plain(v) for key, v in fields.items()})


@given(st.dictionaries(ANY_TEXT, ANY_VALUE, max_size=5))
def test_no_value_makes_a_second_line_or_moves_a_cursor(fields: Mapping[str, object]) -> None:
    record = made(fields)
    for form in (
        records.text_lines(record, 0.0),
        records.prefixed_lines(record),
        records.json_line(record, 0.0),
    ):
        lines = form.decode().splitlines()
        assert len(lines) == 1
        assert not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in lines[0])


@given(st.dictionaries(ANY_TEXT, ANY_VALUE, max_size=5))
def test_json_is_json(fields: Mapping[str, object]) -> None:
    document = json.loads(records.json_line(made(fields), 0.0))
    assert document["event"] == "spec-written"
    assert document["level"] == "info"
    assert document["time"] == "1970-01-01T00:00:00.000Z"


def test_a_field_never_hides_one_of_the_fixed_ones() -> None:
    line = records.json_line(made({"event": "forged", "level": "debug", "time": "never"}), 0.0)
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.000Z",
        "level": "info",
        "event": "spec-written",
        "event_": "forged",
        "level_": "debug",
        "time_": "never",
    }


def parse_journal(entry: bytes) -> dict[str, str]:
    """Read the native protocol as its documentation describes it."""
    fields: dict[str, str] = {}
    while entry:
        line, _, rest = entry.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            (size,) = struct.unpack("<Q", rest[:8])
            value, rest = rest[8 : 8 + size], rest[8 + size :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        assert name.decode() not in fields
        fields[name.decode()] = value.decode()
        entry = rest
    return fields


def test_a_journal_entry_has_each_field_as_one_of_its_own() -> None:
    record = made({"kind": "intel.com/gpu", "count": 2, "paths": ["/a", "/b"], "n-a.me": True})
    assert parse_journal(records.journal_entry(record)) == {
        "MESSAGE": 'spec-written kind=intel.com/gpu count=2 paths=["/a","/b"] n-a.me=true',
        "PRIORITY": "6",
        "SYSLOG_IDENTIFIER": "cdi-agent",
        "CDI_AGENT_EVENT": "spec-written",
        "CDI_AGENT_KIND": "intel.com/gpu",
        "CDI_AGENT_COUNT": "2",
        "CDI_AGENT_PATHS": '["/a","/b"]',
        "CDI_AGENT_N_A_ME": "true",
    }


def test_a_traceback_is_one_journal_field_and_may_have_lines() -> None:
    record = Record("error", "pass-failed", {}, ("Traceback:", "  File x", "ValueError: y"))
    fields = parse_journal(records.journal_entry(record))
    assert fields["CDI_AGENT_TRACEBACK"] == "Traceback:\n  File x\nValueError: y"
    assert fields["PRIORITY"] == "3"


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), ANY_VALUE, max_size=4))
def test_a_journal_entry_can_be_read_back_whatever_is_in_it(fields: Mapping[str, object]) -> None:
    assert parse_journal(records.journal_entry(made(fields)))["CDI_AGENT_EVENT"] == "spec-written"


def test_a_journal_entry_fits_into_a_datagram() -> None:
    record = made({f"f{n}": ["x" * 2000] * 64 for n in range(64)})
    entry = records.journal_entry(record)
    assert len(entry) < 200_000
    fields = parse_journal(entry)
    assert fields["CDI_AGENT_CUT"] == "1"
    assert fields["CDI_AGENT_EVENT"] == "spec-written"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, "x", id="name alone"),
        pytest.param({"path": "/run/cdi"}, "x path=/run/cdi", id="bare"),
        pytest.param({"why": "no room"}, 'x why="no room"', id="quoted"),
        pytest.param({"why": 'a"b'}, r'x why="a\"b"', id="a quote"),
        pytest.param({"why": ""}, 'x why=""', id="empty"),
        pytest.param({"took": 0.001234567}, "x took=0.00123457", id="float"),
        pytest.param({"a": None}, "x a=null", id="none"),
        pytest.param(
            {"kind": "k", "problem": "the disk is full"},
            "x: the disk is full kind=k",
            id="the problem comes first",
        ),
        pytest.param({"problem": 3}, "x problem=3", id="a problem that is no sentence"),
    ],
)
def test_the_line_that_people_read(fields: Mapping[str, object], expected: str) -> None:
    assert records.text(made(fields, name="x")) == expected


def test_text_lines_have_time_and_level_and_an_indented_traceback() -> None:
    record = Record("warning", "x", {}, ("one", "two"))
    assert records.text_lines(record, 1_000_000_000.5) == (
        b"2001-09-09T01:46:40.500Z warning  x\n    one\n    two\n"
    )


def test_every_line_for_a_journals_stream_carries_its_priority() -> None:
    record = Record("error", "x", {}, ("one", "two"))
    assert records.prefixed_lines(record) == b"<3>x\n<3>    one\n<3>    two\n"


def test_colour_is_around_the_words_and_never_in_them() -> None:
    coloured = records.text_lines(made({"k": "v"}), 0.0, records.COLOUR).decode()
    assert "\x1b[1mspec-written\x1b[0m \x1b[36mk\x1b[0m=v" in coloured


@pytest.mark.parametrize(
    ("phrase", "name"),
    [("spec-written", "spec-written"), ("Spec written: x!", "spec-written-x"), ("", "")],
)
def test_an_event_name_can_be_searched_for(phrase: str, name: str) -> None:
    assert records.event_name(phrase) == name
