"""The configuration: all of a file or nothing of it, and every fault at once."""

import os
import stat
import typing
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from agent.cdi import rules
from agent.cdi.settings import CdiSettings, Pin
from agent.config import Config, load, parse, profiles
from agent.errors import ConfigError, ExitCode


def faults(text: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, "config.yaml")
    error = caught.value
    assert error.exit_code is ExitCode.CONFIG
    assert "\n" not in error.sentence
    assert error.sentence == f"config.yaml cannot be used: {'; '.join(error.faults)}"
    return list(error.faults)


# --- what is right --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "\n", "# nothing\n", "---\n", "null", "{}", "cdi:\nlog:\n", "cdi:\n  ignore:\n"]
)
def test_nothing_given_means_the_defaults(text: str) -> None:
    assert parse(text) == Config()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50ms", 0.05),
        ("0.5s", 0.5),
        ("1.5 s", 1.5),
        ("'1s'", 1),
        ("0", 0),
        ("0.25", 0.25),
        ("1", 1),
        ("0s", 0),
        ("0.01m", 0.6),
    ],
)
def test_durations_are_numbers_with_or_without_a_unit(text: str, seconds: float) -> None:
    assert parse(
        f"reconcile: {{settle_max: 1h, settle: {text}}}"
    ).reconcile.settle == pytest.approx(seconds)


def test_hours_and_minutes() -> None:
    config = parse("reconcile: {resync: 2h, retry_max: 3m}")
    assert (config.reconcile.resync, config.reconcile.retry_max) == (7200, 180)


def test_what_is_ignored_has_one_form() -> None:
    config = parse(
        'cdi: {ignore: ["03:00.0", "0001:0A:00.1", "00000002:00:00.0", "8086:E212", 1002:744c]}'
    )
    addresses = {"0000:03:00.0", "0001:0a:00.1", "0002:00:00.0"}
    assert config.cdi.ignored == addresses | {"8086:e212", "1002:744c"}


def test_a_path_has_one_form() -> None:
    config = parse(
        "{state_directory: /x/, cdi: {directory: /run/./y/, other_directories: [/z, /z/]}}"
    )
    assert config.state_directory == "/x"
    assert (config.cdi.directory, config.cdi.other_directories) == ("/run/y", ("/z",))


def test_text_is_taken_as_it_was_written() -> None:
    """A bare 8086, 0300 or 1e10 is the text that it looks like, and no number."""
    config = parse(
        """
        cdi:
          profiles:
          - name: plain
            kind: example.com/plain
            match: {vendor: 8086, devices: [1e10, 0300]}
            nodes: [{role: card, fileMode: 0660}]
        """
    )
    (profile, *_) = profiles(config)
    assert profile.match.vendor == "8086"
    assert profile.match.devices == ("1e10", "0300")
    assert profile.nodes[0].file_mode == "0660"


def test_a_profile_of_a_known_name_changes_that_one() -> None:
    before = {profile.name: profile for profile in profiles(Config())}
    config = parse("cdi: {profiles: [{name: intel-gpu, sriov: vf}]}")
    (first, *rest) = profiles(config)
    assert first.name == "intel-gpu"
    assert first.sriov == "vf"
    assert first.match == before["intel-gpu"].match
    assert {profile.name for profile in rest} == before.keys() - {"intel-gpu"}


def test_the_pin_offers_every_version_that_can_carry_our_entries() -> None:
    known = rules.VERSIONS
    assert typing.get_args(Pin) == known[known.index("0.5.0") :]
    assert CdiSettings().version is None


# --- what is wrong --------------------------------------------------------------------------------

ABSOLUTE = "it must be an absolute path below / that has no '..' in it"

NODE = "it must be the path of a node below /dev, without '.' and '..'"

FAULTS: list[tuple[str, str, list[str]]] = [
    (
        "unknown-near",
        "cdi:\n  directroy: /x\n",
        ["line 2: cdi.directroy: there is no such key; did you mean directory?"],
    ),
    (
        "unknown-section",
        "zzz: 1\n",
        [
            (
                "line 1: zzz: there is no such key; there are state_directory, host, cdi,"
                " reconcile, log, metrics, control, vfio"
            )
        ],
    ),
    (
        "twice",
        "log:\n  level: info\n  level: debug\n",
        ["line 3: log.level: it is given twice, first in line 2"],
    ),
    (
        "section-twice",
        "log: {level: info}\ncdi: {}\nlog: {}\n",
        ["line 3: log: it is given twice, first in line 1"],
    ),
    ("number-key", "1: x\n", ["line 1: a key must be text, not 1"]),
    ("true-key", "cdi:\n  true: x\n", ["line 2: cdi: a key must be text, not true"]),
    ("null-key", "cdi:\n  ~: x\n", ["line 2: cdi: a key must be text, not null"]),
    ("list-key", "? [a]\n: x\n", ["line 1: a key must be text, not a list"]),
    ("mapping-key", "? {a: b}\n: x\n", ["line 1: a key must be text, not a mapping"]),
    (
        "on-is-text",
        "cdi:\n  adopt: on\n  on: true\n",
        [
            "line 2: cdi.adopt: it must be true or false, not 'on'",
            (
                "line 3: cdi.on: there is no such key; there are directory, other_directories,"
                " format, version, adopt, remove_on_stop, ignore, profiles"
            ),
        ],
    ),
    ("not-a-mapping", "- cdi\n", ["line 1: it must be a mapping, not a list"]),
    ("text", "cdi\n", ["line 1: it must be a mapping, not 'cdi'"]),
    ("section", "cdi: [1]\n", ["line 1: cdi: it must be a mapping, not a list"]),
    (
        "number-for-choice",
        "log: {level: 3}\n",
        ["line 1: log.level: it must be one of debug, error, info, warning, not 3"],
    ),
    (
        "relative",
        "state_directory: var/lib\n",
        [f"line 1: state_directory: {ABSOLUTE}, not 'var/lib'"],
    ),
    ("root", "host: {dev: /}\n", [f"line 1: host.dev: {ABSOLUTE}, not '/'"]),
    ("null-path", "cdi: {directory: null}\n", [f"line 1: cdi.directory: {ABSOLUTE}, not null"]),
    (
        "upwards",
        "cdi:\n  directory: /a/../b\n  other_directories: [/a/..]\n",
        [
            f"line 2: cdi.directory: {ABSOLUTE}, not '/a/../b'",
            f"line 3: cdi.other_directories[0]: {ABSOLUTE}, not '/a/..'",
        ],
    ),
    (
        "below-dev",
        "host:\n  extra_nodes:\n  - /dev/kfd\n  - /etc/passwd\n  - [1]\n  - /dev/../etc/passwd\n",
        [
            f"line 4: host.extra_nodes[1]: {NODE}, not '/etc/passwd'",
            f"line 5: host.extra_nodes[2]: {NODE}, not a list",
            f"line 6: host.extra_nodes[3]: {NODE}, not '/dev/../etc/passwd'",
        ],
    ),
    (
        "not-a-list",
        "cdi: {ignore: 8086:e212}\n",
        [
            (
                "line 1: cdi.ignore: it must be a list (each item: an address such as"
                ' "0000:03:00.0" or an id such as "8086:e212"), not \'8086:e212\''
            )
        ],
    ),
    (
        "mapping-for-list",
        "vfio: {assign: {id: vm}}\n",
        ["line 1: vfio.assign: it must be a list (each item: a mapping), not a mapping"],
    ),
    (
        "too-small",
        "host: {receive_buffer: 1}\n",
        ["line 1: host.receive_buffer: it must be a whole number, from 65536 to 1073741824, not 1"],
    ),
    (
        "fraction",
        "reconcile: {queue_size: 16.5}\n",
        ["line 1: reconcile.queue_size: it must be a whole number, from 16 to 1000000, not 16.5"],
    ),
    (
        "duration",
        "reconcile:\n  settle: 5 parsecs\n  udev_timeout: -1\n  resync: 10ms\n  settle_max: true\n",
        [
            (
                "line 2: reconcile.settle: it must be a duration such as 50ms, 5s or 5m,"
                " from 0 to 8760h, not '5 parsecs'"
            ),
            (
                "line 3: reconcile.udev_timeout: it must be a duration such as 50ms, 5s or 5m,"
                " from 0 to 8760h, not -1"
            ),
            (
                "line 4: reconcile.resync: it must be a duration such as 50ms, 5s or 5m,"
                " from 1s to 8760h, not '10ms'"
            ),
            (
                "line 5: reconcile.settle_max: it must be a duration such as 50ms, 5s or 5m,"
                " from 0 to 8760h, not true"
            ),
        ],
    ),
    (
        "address",
        "metrics:\n  listen: localhost:80\n",
        [
            (
                "line 2: metrics.listen: 'localhost:80' is not a numeric address with a port, such"
                " as 127.0.0.1:9478 or [::1]:9478, nor the absolute path of a socket"
            )
        ],
    ),
    (
        "no-port-for-orders",
        "control:\n  socket: 127.0.0.1:80\n",
        ["line 2: control.socket: '127.0.0.1:80' is not the absolute path of a socket"],
    ),
    (
        "relative-socket",
        "control:\n  socket: control.sock\n",
        ["line 2: control.socket: 'control.sock' is not the absolute path of a socket"],
    ),
    (
        "claim-of-nothing",
        "vfio:\n  assign:\n  - id: vm\n    devices: []\n",
        ["line 4: vfio.assign[0].devices: the list must not be empty"],
    ),
    (
        "settle-longer-than-its-bound",
        "reconcile:\n  settle: 2s\n",
        [
            (
                "line 2: reconcile.settle: it must not be longer than reconcile.settle_max,"
                " which is 1s"
            )
        ],
    ),
    (
        "bound-shorter-than-settle",
        "reconcile:\n  settle_max: 10ms\n",
        [
            (
                "line 2: reconcile.settle_max: it must not be shorter than reconcile.settle,"
                " which is 50ms"
            )
        ],
    ),
    (
        "one-directory-for-both",
        "state_directory: /var/run/cdi/\n",
        [
            (
                "line 1: state_directory: it must be another path than cdi.directory, which has"
                " /var/run/cdi"
            )
        ],
    ),
    (
        "one-directory-for-both-by-another-name",
        "state_directory: /run/cdi\n",
        [
            (
                "line 1: state_directory: it must be another path than cdi.directory, which has"
                " /var/run/cdi"
            )
        ],
    ),
    (
        "specs-of-others-in-the-state-directory",
        "cdi: {other_directories: [/var/lib/cdi-agent]}\n",
        [
            (
                "line 1: cdi.other_directories: it must be another path than state_directory,"
                " which has /var/lib/cdi-agent"
            )
        ],
    ),
    (
        "one-socket-for-both",
        "metrics: {listen: /var/run/cdi-agent/./control.sock}\n",
        [
            (
                "line 1: metrics.listen: it must be another path than control.socket, which has"
                " /run/cdi-agent/control.sock"
            )
        ],
    ),
    (
        "assigned-twice",
        (
            "vfio:\n  assign:\n  - {id: vm, devices: ['0000:03:00.0']}\n"
            "  - {id: vm, devices: ['0000:04:00.0']}\n  - {id: other, devices: ['03:00.0']}\n"
            "  - {id: third, devices: ['05:00.0', '0000:05:00.0']}\n"
        ),
        [
            "line 4: vfio.assign[1].id: vfio.assign[0] has the id 'vm' too",
            (
                "line 5: vfio.assign[2].devices[0]: 0000:03:00.0 is given twice, first as"
                " vfio.assign[0].devices[0]"
            ),
            (
                "line 6: vfio.assign[3].devices[1]: 0000:05:00.0 is given twice, first as"
                " vfio.assign[3].devices[0]"
            ),
        ],
    ),
    (
        "assigned-as-nobody-can-claim",
        (
            "vfio:\n  assign:\n  - {id: 'recover:vm', devices: ['0000:03:00.0']}\n"
            "  - {id: a, devices: ['0000:04:00.0'], mode: drm, named: ['0000:04:00.1']}\n"
            "  - {id: b, devices: ['0000:05:00.0'], mode: drm, driver: vfio-pci}\n"
        ),
        [
            "line 3: vfio.assign[0]: a claim cannot be called 'recover:vm'",
            "line 4: vfio.assign[1]: a claim in mode drm moves no other function along",
            (
                "line 5: vfio.assign[2]: vfio-pci is a VFIO driver, and mode drm takes a device off"
                " VFIO"
            ),
        ],
    ),
    (
        "assigned-and-ignored",
        (
            "cdi: {ignore: ['03:00.0', '0000:03:00.1']}\nvfio:\n  assign:\n"
            "  - {id: vm, devices: ['0000:03:00.0'], named: ['03:00.1']}\n"
        ),
        [
            (
                "line 4: vfio.assign[0].devices[0]: 0000:03:00.0 is in cdi.ignore too, and so is"
                " never moved"
            ),
            (
                "line 4: vfio.assign[0].named[0]: 0000:03:00.1 is in cdi.ignore too, and so is"
                " never moved"
            ),
        ],
    ),
    (
        "version-that-cannot-carry-us",
        "cdi: {version: 0.4.0}\n",
        [
            (
                "line 1: cdi.version: it must be one of 0.5.0, 0.6.0, 0.7.0, 0.8.0, 1.0.0, 1.1.0,"
                " not '0.4.0'"
            )
        ],
    ),
]


@pytest.mark.parametrize(
    ("text", "expected"), [pytest.param(text, expected, id=name) for name, text, expected in FAULTS]
)
def test_a_fault_is_named_with_its_line_its_key_and_what_is_allowed(
    text: str, expected: list[str]
) -> None:
    assert faults(text) == expected


PROFILE = (
    "cdi:\n  profiles:\n  - name: mine\n    kind: example.com/gpu\n    nodes: [{role: card}]\n"
)

PROFILE_FAULTS: list[tuple[str, str, list[str]]] = [
    (
        "unknown-key",
        PROFILE + "    match: {vendor: '8086'}\n    knd: x\n",
        ["line 7: cdi.profiles[0].knd: there is no such key; did you mean kind?"],
    ),
    (
        "deep",
        PROFILE + "    match:\n      vendr: '8086'\n",
        ["line 7: cdi.profiles[0].match.vendr: there is no such key; did you mean vendor?"],
    ),
    (
        "several",
        PROFILE + "    match: {vendor: xyz}\n    links: 5\n    env: {A: b}\n",
        [
            (
                "line 6: cdi.profiles[0].match.vendor: it must be four hex digits in lower case,"
                " such as \"8086\", not 'xyz'"
            ),
            "line 7: cdi.profiles[0].links: it must be true or false, not 5",
            "line 8: cdi.profiles[0].env: it must be a list (each item: text), not a mapping",
        ],
    ),
    (
        "number-as-annotation-key",
        PROFILE + "    match: {vendor: '8086'}\n    annotations: {1: x}\n",
        ["line 7: cdi.profiles[0].annotations: a key must be text, not 1"],
    ),
    ("not-a-mapping", "cdi:\n  profiles: [x]\n", ["line 2: cdi.profiles[0]: it must be a mapping"]),
    (
        "no-match",
        PROFILE,
        [
            (
                "line 3: cdi.profiles[0]: the key match is missing, which only a profile with the"
                " name of one that comes with the program may leave out"
            )
        ],
    ),
    (
        "mistyped-name",
        "cdi:\n  profiles:\n  - name: intel-gpuu\n    sriov: pf\n",
        [
            (
                "line 3: cdi.profiles[0]: the keys match, kind and nodes are missing, which only a"
                " profile with the name of one that comes with the program may leave out; did you"
                " mean intel-gpu?"
            )
        ],
    ),
    (
        "shared-outside-of-dev",
        PROFILE + "    match: {vendor: '8086'}\n    shared: [{path: /etc/passwd}]\n",
        [f"line 7: cdi.profiles[0].shared[0].path: {NODE}, not '/etc/passwd'"],
    ),
    (
        "mode",
        PROFILE.replace("card}", "card, fileMode: rw}") + "    match: {vendor: '8086'}\n",
        [
            (
                "line 5: cdi.profiles[0].nodes[0].fileMode: it must be a mode in octal, such as"
                " \"0660\", not 'rw'"
            )
        ],
    ),
    (
        "role",
        PROFILE.replace("card}", "gpu}, {}") + "    match: {vendor: '8086', roles: [gpu]}\n",
        [
            (
                "line 5: cdi.profiles[0].nodes[0].role: it must be one of card, render, accel, mei,"
                " not 'gpu'"
            ),
            (
                "line 5: cdi.profiles[0].nodes[1]: the key role is missing; it must be one of card,"
                " render, accel, mei"
            ),
            (
                "line 6: cdi.profiles[0].match.roles[0]: it must be one of card, render, accel,"
                " mei, not 'gpu'"
            ),
        ],
    ),
    (
        "pin-and-kind",
        PROFILE.replace("com/gpu", "com/gpu.x") + "    match: {vendor: '8086'}\n  version: 0.5.0\n",
        [
            (
                "line 3: cdi.profiles[0]: its entries need cdiVersion 0.6.0, and cdi.version allows"
                " 0.5.0 at most"
            )
        ],
    ),
    (
        "out-of-reach",
        PROFILE + "    match: {drivers: [xe]}\n    vfio: {kind: example.com/vm}\n",
        ["line 7: cdi.profiles[0].vfio: match.drivers recognises no device that is on a VFIO"],
    ),
    (
        "name-taken-twice",
        PROFILE + "    match: {vendor: '8086'}\n" + PROFILE[16:] + "    match: {vendor: '1002'}\n",
        ["line 3: cdi.profiles[0].name: the name 'mine'", "line 8: cdi.profiles[1].name: the name"],
    ),
    (
        "no-kind-of-cdi",
        PROFILE.replace("example.com/gpu", "gpu") + "    match: {vendor: '8086'}\n",
        ["line 4: cdi.profiles[0].kind: "],
    ),
    (
        "pin",
        PROFILE + "    match: {vendor: '8086'}\n    additionalGids: [44]\n  version: 0.6.0\n",
        [
            (
                "line 3: cdi.profiles[0]: its entries need cdiVersion 0.7.0,"
                " and cdi.version allows 0.6.0 at most"
            )
        ],
    ),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [pytest.param(text, expected, id=name) for name, text, expected in PROFILE_FAULTS],
)
def test_a_fault_in_a_profile_is_named_as_precisely(text: str, expected: list[str]) -> None:
    found = faults(text)
    assert len(found) == len(expected)
    for fault, start in zip(found, expected, strict=True):
        assert fault.startswith(start)


def test_all_faults_are_told_at_once_in_the_order_of_lines() -> None:
    text = """
state_directory: relative
reconcile:
  settle: 2s
cdi:
  format: xml
  profiles:
  - {name: Mine, kind: example.com/gpu, match: {vendor: '8086'}, nodes: [{role: card}]}
log: {levle: info}
metrics: {listen: nowhere}
"""
    assert [fault.partition(": ")[0] for fault in faults(text)] == [
        f"line {line}" for line in (2, 4, 6, 8, 9, 10)
    ]


def test_what_a_faulty_value_would_contradict_is_not_guessed_at() -> None:
    assert len(faults("reconcile: {settle: 20s, settle_max: never}")) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &x 1", "line 1: anchors (&name) are not supported"),
        ("a: {}\nb: *x", "line 2: aliases (*name) are not supported"),
        ("a: !!python/object/apply:os.system [id]", "line 1: tags (!name) are not supported"),
        ("\na: !!str 5", "line 2: tags (!name) are not supported"),
        ("log: {}\n---\nlog: {}", "line 3: it has a second document"),
        ("[" * 500, "line 1: it nests more than 24 deep"),
        ("{a: " * 500, "line 1: it nests more than 24 deep"),
        ("- " * 500, "line 1: it nests more than 24 deep"),
        ("[" * 500_000, "line 1: it "),
        ("{a: " * 200_000, "line 1: it "),
        ("- " * 500_000, "line 1: it "),
        ("a: b: c", "line 1: it is not YAML: mapping values are not allowed in this context"),
        ("log: {level: info", "line 2: it is not YAML: while parsing a flow mapping"),
        ("log:\n\tlevel: info", "line 2: it is not YAML: while scanning for the next token"),
        ("a: \0", "line 1: it is not YAML: the character U+0000 is not allowed"),
        ("a: 1\nb: \x1b[0m", "line 2: it is not YAML: the character U+001B is not allowed"),
        ("a: é\n\nb: \ufffe", "line 3: it is not YAML: the character U+FFFE is not allowed"),
        (b"log:\n  level: \xff", "line 2: it is not text in UTF-8"),
        ("[" + "1," * 200_000 + "]", "line 1: it has too many values"),
        ("x" * (2**20 + 1), "it has more than 1 MiB"),
    ],
)
def test_a_hostile_document_is_one_clear_fault(text: str | bytes, expected: str) -> None:
    (fault,) = faults(text)
    assert fault.startswith(expected)


@hypothesis.given(
    st.text(alphabet="abc:-[]{}'\"&*!?#|>%@\n \t,~0159.\\\0\x85\ufeff\ud800", max_size=60)
    | st.binary(max_size=60)
)
def test_any_text_is_a_configuration_or_an_error(text: str | bytes) -> None:
    try:
        parse(text)
    except ConfigError as error:
        found = error.faults
    else:
        return
    assert "; ".join(found).encode()


# --- files ----------------------------------------------------------------------------------------


def test_the_default_file_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.config.DEFAULT_PATH", tmp_path / "config.yaml")
    assert load() == Config()
    (tmp_path / "config.yaml").write_text("log: {level: debug}")
    assert load().log.level == "debug"


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
def test_a_link_that_leads_nowhere_is_not_a_wish_for_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_folder: bool
) -> None:
    """Devices that are to be ignored would be published until what it leads to is mounted."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "srv")
    file = link / "config.yaml" if is_folder else link
    monkeypatch.setattr("agent.config.DEFAULT_PATH", file)
    for path in (None, file):
        with pytest.raises(ConfigError, match="leads nowhere"):
            load(path)


def test_a_file_that_was_asked_for_may_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml does not exist"):
        load(tmp_path / "missing.yaml")


def test_a_link_is_followed(tmp_path: Path) -> None:
    """A mounted ConfigMap is one."""
    (tmp_path / "data").write_text("log: {level: debug}")
    (tmp_path / "config.yaml").symlink_to("data")
    assert load(tmp_path / "config.yaml").log.level == "debug"


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("lg: 1")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.sentence == (
        f"{path} cannot be used: line 1: lg: there is no such key; did you mean log?"
    )


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 * 2**20)


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(os.mkfifo, "it is not a regular file", id="fifo"),
        pytest.param(Path.mkdir, "it is not a regular file", id="directory"),
        pytest.param(make_socket, "it is not a regular file", id="socket"),
        pytest.param(
            lambda path: path.symlink_to("/dev/zero"), "it is not a regular file", id="device"
        ),
        pytest.param(lambda path: path.symlink_to(path), "symbolic links", id="loop"),
        pytest.param(make_large, "it is larger than 1 MiB", id="large"),
    ],
)
def test_what_is_no_file_is_refused_without_waiting(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    path = tmp_path / "config.yaml"
    make(path)
    with pytest.raises(ConfigError, match=f"config.yaml cannot be read: .*{reason}"):
        load(path)


def test_a_path_that_is_no_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Path("a\0b"))
