"""The independent looks tell right from wrong: a judge that cannot say no proves nothing."""

import io
import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.guest.inside import judge, oracle, rig_uevents, witness

SPEC = """cdiVersion: "0.5.0"
kind: "a.org/gpu"
devices:
- name: "one"
  containerEdits: {deviceNodes: [{path: "/dev/null"}]}
"""
HEAD = SPEC.partition("devices")[0]


class Watched:
    """A spec directory, and the witness that looks at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = io.StringIO()
        self.witness = witness.Witness(str(folder), self.log)

    def put(self, text: str, name: str = "a.yaml", mode: int = 0o644) -> None:
        temp = self.folder / "temp"
        temp.write_text(text)
        temp.chmod(mode)
        temp.rename(self.folder / name)

    def look(self) -> list[dict[str, Any]]:
        """What the next look notes, without the times."""
        self.log.truncate(0)
        self.log.seek(0)
        self.witness.look()
        notes = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [{key: value for key, value in note.items() if key != "t"} for note in notes]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_sound_spec_is_noted_once_and_is_no_fault(watched: Watched) -> None:
    watched.put(SPEC)
    (note,) = watched.look()
    assert (note["kind"], note["spec"]) == ("a.org/gpu", {"one": ["/dev/null"]})
    assert watched.look() == []


def test_a_spec_that_goes_is_noted(watched: Watched) -> None:
    watched.put(SPEC)
    watched.look()
    (watched.folder / "a.yaml").unlink()
    assert watched.look() == [{"gone": "a.yaml"}]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        pytest.param("", "empty", id="empty"),
        pytest.param("a: [", "not YAML", id="cut off"),
        pytest.param("- 1\n", "not a mapping", id="a list"),
        pytest.param(HEAD, "no devices", id="without devices"),
        pytest.param(SPEC.replace("{deviceNodes: ", "{} #"), "has no edits", id="without edits"),
        pytest.param(SPEC + SPEC.partition("devices:\n")[2], "twice", id="a name twice"),
        pytest.param(SPEC + "kind: b.org/gpu\n", "twice", id="a key twice"),
        pytest.param(SPEC.replace("kind", "type"), "no kind", id="without kind"),
        pytest.param(SPEC.replace('name: "one"', "name:"), "called None", id="without a name"),
        pytest.param(HEAD + "devices: [one]\n", "not built", id="a name for a device"),
        pytest.param(
            SPEC.replace("{path: ", "").replace("}]", "]"), "not built", id="a path alone"
        ),
    ],
)
def test_a_spec_that_an_engine_refuses_is_a_fault(watched: Watched, text: str, fault: str) -> None:
    watched.put(text)
    (note,) = watched.look()
    assert fault in note["fault"]


def test_a_spec_that_is_cut_off_anywhere_is_a_fault(watched: Watched) -> None:
    """And the witness goes on: one that died of it would have seen nothing wrong."""
    for length in range(len(SPEC.rstrip())):
        watched.put(SPEC[:length])
        (note,) = watched.look()
        assert "fault" in note, SPEC[:length]


def test_a_spec_that_not_everybody_can_read_is_a_fault(watched: Watched) -> None:
    watched.put(SPEC, mode=0o600)
    assert {"fault": "mode 600", "file": "a.yaml"} in watched.look()


def test_a_device_in_two_files_is_a_fault(watched: Watched) -> None:
    watched.put(SPEC, "a.yaml")
    watched.put(SPEC, "b.json")
    assert {"fault": "a.org/gpu=one also in a.yaml", "file": "b.json"} in watched.look()


def test_a_device_that_moved_between_two_reads_is_no_fault(watched: Watched) -> None:
    """Reading two files takes time: only what still is in both afterwards is in both."""
    watched.put(SPEC, "a.yaml")
    watched.look()
    (watched.folder / "a.yaml").rename(watched.folder / "b.yaml")
    watched.witness.look_at("b.yaml")
    assert "fault" not in watched.log.getvalue()
    watched.witness.look_for_doubles()
    assert "fault" not in watched.log.getvalue()


def test_a_node_that_is_gone_is_noted_when_the_spec_no_longer_names_it(watched: Watched) -> None:
    watched.put(SPEC.replace("/dev/null", "/dev/no-such-node"))
    assert [note for note in watched.look() if "dangling" in note] == []
    watched.put(SPEC)
    (note,) = (note for note in watched.look() if "dangling" in note)
    assert (note["dangling"], note["device"]) == ("/dev/no-such-node", "one")
    assert note["seconds"] >= 0


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "renamed"])
def test_a_write_in_place_is_a_fault_and_a_rename_is_none(
    watched: Watched, *, in_place: bool
) -> None:
    inotify = witness.libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    witness.libc.inotify_add_watch(inotify, os.fsencode(watched.folder), witness.WATCHED)
    if in_place:
        (watched.folder / "a.yaml").write_text(SPEC)
    else:
        watched.put(SPEC)
    watched.witness.events(os.read(inotify, 1 << 16))
    os.close(inotify)
    assert ("in place" in watched.log.getvalue()) is in_place


RULES = [{"kind": "a.org/gpu", "vendor": "1af4", "class": "03", "needs": ["card", "render"]}]


def function(**changes: object) -> dict[str, Any]:
    nodes = {"card0": "/dev/dri/card0", "renderD128": "/dev/dri/renderD128"}
    found = {"vendor": "1af4", "device": "1050", "class": "038000", "driver": "virtio-pci"}
    return found | {"group": "7", "vfio": False, "nodes": nodes} | changes


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"vendor": "8086"}, id="of another vendor"),
        pytest.param({"class": "020000"}, id="a network card"),
        pytest.param({"nodes": {"card0": "/dev/dri/card0"}}, id="half of its nodes"),
        pytest.param({"vfio": True, "group": "no-such-group"}, id="on VFIO, without its node"),
    ],
)
def test_what_is_not_ready_is_not_expected(changes: dict[str, object]) -> None:
    assert oracle.expect(RULES, {"0000:01:00.0": function(**changes)}) == {}


def test_what_is_ready_is_expected_with_its_nodes_and_in_all() -> None:
    nodes = ["/dev/dri/card0", "/dev/dri/renderD128"]
    expected = {"a.org/gpu": {"0000-01-00-0-0x1050": nodes, "all": nodes}}
    assert oracle.expect(RULES, {"0000:01:00.0": function()}) == expected


@pytest.mark.parametrize(
    ("neighbour", "is_viable"),
    [
        pytest.param({"vfio": True, "driver": "vfio-pci"}, True, id="on VFIO too"),
        pytest.param({"driver": None}, True, id="without a driver"),
        pytest.param({"class": "060400", "driver": "pcieport"}, True, id="a bridge"),
        pytest.param({}, False, id="on its own driver"),
        pytest.param({"group": "8"}, True, id="in another group"),
    ],
)
def test_a_group_is_viable_as_the_kernel_defines_it(
    neighbour: dict[str, object], *, is_viable: bool
) -> None:
    functions = {
        "0000:01:00.0": function(vfio=True, driver="vfio-pci"),
        "0000:01:00.1": function(**neighbour),
    }
    assert oracle.viable("7", functions) is is_viable


def test_messages_of_kernel_and_udev_are_read_alike() -> None:
    body = b"ACTION=add\0DEVPATH=/devices/x\0DRIVER=\0"
    kernel = b"add@/devices/x\0" + body
    header = b"libudev\0" + bytes.fromhex("feedcafe")
    sizes = b"".join(size.to_bytes(4, "little") for size in (40, 40, len(body)))
    udev = header + sizes + bytes(16) + body
    wanted = {"ACTION": "add", "DEVPATH": "/devices/x", "DRIVER": ""}
    assert rig_uevents.properties(kernel) == rig_uevents.properties(udev) == wanted


SPECS = {"a.org/gpu": {"one": ["/dev/null"], "two": ["/dev/zero"], "all": ["/dev/null"]}}
SAID = {
    "healthy": 1.0,
    "queue_length": 0.0,
    'devices{kind="a.org/gpu",state="published"}': 2.0,
    'devices{kind="a.org/gpu",state="withheld"}': 7.0,
    'devices{kind="b.org/gpu",state="published"}': 0.0,
}


def test_the_judge_believes_an_agent_that_counts_what_is_there() -> None:
    judge.disbelieve(SAID, SPECS)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        pytest.param({"healthy": 0.0}, "unhealthy", id="unhealthy"),
        pytest.param({"queue_length": 1.0}, "wait", id="not done"),
        pytest.param(
            {'devices{kind="a.org/gpu",state="published"}': 1.0}, "counts", id="one too few"
        ),
        pytest.param(
            {'devices{kind="b.org/gpu",state="published"}': 1.0}, "counts", id="a kind too many"
        ),
    ],
)
def test_the_judge_does_not_believe_an_agent_that_says_otherwise(
    changes: dict[str, float], why: str
) -> None:
    with pytest.raises(judge.DisagreementError, match=why):
        judge.disbelieve(SAID | changes, SPECS)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    """Let an agent answer the judge's next question with what is given."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as agent:
        monkeypatch.setattr(judge, "METRICS", server.getsockname())

        def answer(page: bytes) -> None:
            connected, _ = server.accept()
            with connected:
                connected.recv(1 << 16)
                connected.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + page)

        def answer_soon(page: bytes) -> None:
            agent.submit(answer, page)

        yield answer_soon


PAGE = b"""cdi_agent_healthy 1.0
cdi_agent_queue_length 0.0
python_info 1.0
"""


@pytest.mark.parametrize(
    ("page", "found"),
    [
        pytest.param(PAGE, {"healthy": 1.0, "queue_length": 0.0}, id="whole"),
        pytest.param(PAGE[:30], None, id="cut off in a name"),
        pytest.param(PAGE[:45], None, id="cut off before a value"),
        pytest.param(b"", None, id="empty"),
        pytest.param(b"it cannot be had\n", None, id="an error"),
    ],
)
def test_the_judge_takes_an_answer_that_is_not_whole_for_none(
    answering: Callable[[bytes], None], page: bytes, found: dict[str, float] | None
) -> None:
    """An agent that is killed while it answers."""
    answering(page)
    assert judge.metrics() == found


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spec directory before a judge: the oracle sees one ready function, the agent says so."""
    found = {"0000:01:00.0": function()}
    said = SAID | {'devices{kind="a.org/gpu",state="published"}': 1.0}
    monkeypatch.setattr(judge, "SPECS", str(tmp_path))
    monkeypatch.setattr(judge, "dealt_with", oracle.every)
    monkeypatch.setattr(oracle, "facts", lambda: found)
    monkeypatch.setattr(judge, "metrics", lambda: said)
    nodes = "[{path: /dev/dri/card0}, {path: /dev/dri/renderD128}]"
    devices = "".join(
        f'- name: "{name}"\n  containerEdits: {{deviceNodes: {nodes}}}\n'
        for name in ("0000-01-00-0-0x1050", "all")
    )
    text = f'cdiVersion: "0.5.0"\nkind: "a.org/gpu"\ndevices:\n{devices}'
    (tmp_path / "a.yaml").write_text(text)
    return tmp_path


ASKED = {
    "rules": RULES,
    "udev": False,
    "there": ["0000:01:00.0"],
    "holds": {"a.org/gpu": ["0000-01-00-0-0x1050"]},
    "without": ["a.org/gpu-vfio"],
    "gone": ["0000:02:00.0"],
}


def test_the_judge_agrees_when_all_is_as_wanted(judged: Path) -> None:
    answer: dict[str, Any] = {}
    judge.look(ASKED, answer)
    assert answer["specs"] == answer["expected"]


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param({"there": ["0000:02:00.0"]}, id="a function that is not there"),
        pytest.param({"gone": ["0000:01:00.0"]}, id="a function that is there"),
        pytest.param({"holds": {"a.org/gpu": []}}, id="an empty kind"),
        pytest.param({"holds": {"b.org/gpu": []}}, id="another kind"),
        pytest.param({"without": ["a.org/gpu"]}, id="no such kind"),
        pytest.param({"rules": []}, id="other rules"),
    ],
)
def test_the_judge_does_not_agree_when_something_else_is_wanted(
    judged: Path, wanted: dict[str, object]
) -> None:
    with pytest.raises(judge.DisagreementError):
        judge.look(ASKED | wanted, {})


@pytest.mark.parametrize("text", ["", "a: [", SPEC], ids=["empty", "cut off", "of another device"])
def test_the_judge_does_not_agree_with_another_spec(judged: Path, text: str) -> None:
    (judged / "a.yaml").write_text(text)
    with pytest.raises(judge.DisagreementError):
        judge.look(ASKED, {})
