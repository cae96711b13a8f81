"""The consumer that watches each scenario sees what an engine would stumble over."""

from pathlib import Path

import pytest

from tests.netns.reader import Findings, faults_of, look

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
    look(str(tmp_path), None, findings)
    assert findings.faults == ["intel.com/gpu=0000-03-00-0-0xe212 defined twice"]


def test_temporary_files_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "cdi-agent_intel.com-gpu.yaml.tmp").write_text("half")
    (tmp_path / ".cdi-agent_intel.com-gpu.yaml").write_text(GOOD)
    findings = Findings()
    assert look(str(tmp_path), None, findings).keys() == {".cdi-agent_intel.com-gpu.yaml"}
    assert findings.faults == []
