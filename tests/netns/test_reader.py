"""The consumer that watches each scenario sees what an engine would stumble over."""

import os
import threading
from pathlib import Path

import pytest

from tests.netns.reader import Findings, faults_of, load, look

GOOD = """\
cdiVersion: "0.5.0"
kind: "intel.com/gpu"
devices:
- name: "0000-03-00-0-0xe212"
  containerEdits:
    deviceNodes:
    - path: "/dev/dri/card0"
      hostPath: "/dev/dri/card0"
      fileMode: 0666
"""
SECOND = GOOD[GOOD.index("- name") :]

BAD = {
    "empty": ("", "not a mapping"),
    "cut off within a word": (GOOD[:-30], ""),
    "cut off before the devices": (GOOD[: GOOD.index("devices")], "no devices"),
    "no devices": (GOOD[: GOOD.index("- name")], "no devices"),
    "an empty list of devices": (GOOD[: GOOD.index("\n- name")] + " []\n", "no devices"),
    "a device without edits": (GOOD[: GOOD.index("  containerEdits")], "edits None"),
    "a device with empty edits": (GOOD[: GOOD.index("\n    deviceNodes")] + " {}\n", "edits {}"),
    "an unknown key": (GOOD + "colour: red\n", "unknown keys"),
    "a name that begins with a dash": (GOOD.replace('"0000-', '"-0000-'), "device name"),
    "a kind without a class": (GOOD.replace("intel.com/gpu", "intel.com"), "kind"),
    "no version": (GOOD.partition("\n")[2], "version"),
    "a node twice": (GOOD + GOOD[GOOD.index("    - path") :], "/dev/dri/card0 twice"),
    "a node without a path": (GOOD.replace("- path", "- root"), "node"),
    "no text at all": ("\x00\x01\x02", ""),
}


def test_a_good_spec_has_no_faults() -> None:
    assert list(faults_of("good.yaml", GOOD.encode())) == []


@pytest.mark.parametrize(("text", "fault"), BAD.values(), ids=BAD.keys())
def test_a_bad_spec_has_faults(text: str, fault: str) -> None:
    faults = list(faults_of("bad.yaml", text.encode()))
    assert faults
    assert fault in faults[0]


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"a.yaml": GOOD + SECOND}, id="in one file"),
        pytest.param({"a.yaml": GOOD, "b.json": GOOD}, id="in two files"),
    ],
)
def test_a_device_that_is_defined_twice_is_a_fault(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    findings = Findings()
    look([str(tmp_path)], None, findings)
    assert findings.faults == ["intel.com/gpu=0000-03-00-0-0xe212 defined twice"]


def test_a_device_that_two_directories_define_is_an_overlap(tmp_path: Path) -> None:
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "a.yaml").write_text(GOOD)
    findings = Findings()
    look([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "c")], None, findings)
    assert findings.overlaps == ["intel.com/gpu=0000-03-00-0-0xe212"]
    assert findings.faults == []


def test_kinds_that_are_defined_at_once_are_noted(tmp_path: Path) -> None:
    findings = Findings()
    files = look([str(tmp_path)], None, findings)
    (tmp_path / "a.yaml").write_text(GOOD)
    files = look([str(tmp_path)], files, findings)
    (tmp_path / "b.yaml").write_text(GOOD.replace("intel.com/gpu", "intel.com/npu"))
    look([str(tmp_path)], files, findings)
    assert findings.kinds == [[], ["intel.com/gpu"], ["intel.com/gpu", "intel.com/npu"]]


def test_temporary_files_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "cdi-agent_intel.com-gpu.yaml.tmp").write_text("half")
    hidden = tmp_path / ".cdi-agent_intel.com-gpu.yaml"
    hidden.write_text(GOOD)
    assert load([str(tmp_path)]) == {str(hidden): GOOD.encode()}


def test_what_changes_while_it_is_read_was_at_no_moment_so(tmp_path: Path) -> None:
    """Reading one file takes another away: together they never were."""
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(GOOD)
    os.mkfifo(second)

    def move() -> None:
        """Give the reader the second file, once the first has gone."""
        with second.open("wb") as pipe:
            first.unlink()
            pipe.write(GOOD.encode())

    mover = threading.Thread(target=move)
    mover.start()
    assert load([str(tmp_path)]) is None
    mover.join()
