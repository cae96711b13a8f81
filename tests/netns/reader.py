"""A consumer that loads the spec directory all the while, as an engine might at any moment.

A process of its own: ``python -m tests.netns.reader DIRECTORY``. It loads until its standard input
ends, then writes one JSON object: how often it looked, how many different states it saw, and every
fault. What it holds against a spec is CDI's word, not the agent's: rules that make an engine ignore
a file or a device (container-device-interface, specs-go and pkg/parser), written down here anew.
"""

import dataclasses
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

import yaml

PAUSE: Final = 0.001  # leaves the other processes some of the machine
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SPECS: Final = (".yaml", ".json")
_VENDOR: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_CLASS: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_KEYS: Final = {"cdiVersion", "kind", "devices", "containerEdits", "annotations"}
_DEVICE_KEYS: Final = {"name", "containerEdits", "annotations"}
_EDIT_KEYS: Final = {"env", "deviceNodes", "mounts", "hooks", "additionalGids", "intelRdt"}
_NODE_KEYS: Final = {
    "path",
    "hostPath",
    "type",
    "major",
    "minor",
    "fileMode",
    "permissions",
    "uid",
    "gid",
}


def faults_of(name: str, text: bytes) -> Iterator[str]:
    """What is wrong with one file."""
    try:
        spec = yaml.load(text, _LOADER)  # noqa: S506 - it is a safe loader
    except yaml.YAMLError as error:
        yield f"{name}: {error}"
        return
    if not isinstance(spec, dict):
        yield f"{name}: not a mapping: {text!r}"
        return
    if unknown := spec.keys() - _KEYS:
        yield f"{name}: unknown keys {sorted(unknown)}"
    if not re.fullmatch(r"0\.[0-9]+\.[0-9]+", str(spec.get("cdiVersion"))):
        yield f"{name}: version {spec.get('cdiVersion')!r}"
    vendor, _, class_name = str(spec.get("kind")).partition("/")
    if not (_VENDOR.fullmatch(vendor) and _CLASS.fullmatch(class_name)):
        yield f"{name}: kind {spec.get('kind')!r}"
    devices = spec.get("devices") or []
    if not devices:
        yield f"{name}: no devices"
    for device in devices:
        for fault in _faults_of_device(device):
            yield f"{name}: {fault}"


def _faults_of_device(device: object) -> Iterator[str]:
    if not isinstance(device, dict) or device.keys() - _DEVICE_KEYS:
        yield f"device {device!r}"
        return
    name = device.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield f"device name {name!r}"
    edits = device.get("containerEdits")
    if not isinstance(edits, dict) or not any(edits.values()) or edits.keys() - _EDIT_KEYS:
        yield f"{name}: edits {edits!r}"
        return
    nodes = edits.get("deviceNodes") or []
    for node in nodes:
        if not isinstance(node, dict) or "path" not in node or node.keys() - _NODE_KEYS:
            yield f"{name}: node {node!r}"
    paths = Counter(node.get("path") for node in nodes if isinstance(node, dict))
    yield from (f"{name}: {path} twice" for path, count in paths.items() if count > 1)


def qualified_names(text: bytes) -> list[str]:
    """The devices that a sound file defines."""
    spec = yaml.load(text, _LOADER)  # noqa: S506 - it is a safe loader
    return [f"{spec['kind']}={device['name']}" for device in spec["devices"]]


@dataclasses.dataclass
class Findings:
    """What was seen."""

    looks: int = 0
    states: int = 0
    """How often the directory differed from the look before."""
    faults: list[str] = dataclasses.field(default_factory=list)


def load(directory: str) -> dict[str, bytes]:
    """Every file that an engine would take for a spec; one that goes meanwhile is not there."""
    files: dict[str, bytes] = {}
    for name in sorted(os.listdir(directory)):
        if name.endswith(_SPECS):
            try:
                with open(os.path.join(directory, name), "rb") as file:
                    files[name] = file.read()
            except FileNotFoundError:
                continue
    return files


def look(directory: str, before: dict[str, bytes] | None, findings: Findings) -> dict[str, bytes]:
    """Load once; only what changed is checked again, so that looks come close together."""
    files = load(directory)
    findings.looks += 1
    if files != before:
        findings.states += 1
        faults = [fault for name, text in files.items() for fault in faults_of(name, text)]
        if not faults:
            names = Counter(name for text in files.values() for name in qualified_names(text))
            faults = [f"{name} defined twice" for name, count in names.items() if count > 1]
        findings.faults += faults
    return files


def wait_for_end(ended: threading.Event) -> None:
    """Tell when the standard input has ended."""
    sys.stdin.read()
    ended.set()


def main() -> None:
    """Look until the standard input ends."""
    ended = threading.Event()
    threading.Thread(target=wait_for_end, args=(ended,), daemon=True).start()
    findings = Findings()
    files: dict[str, bytes] | None = None
    print("ready", flush=True)
    while not ended.is_set():
        files = look(sys.argv[1], files, findings)
        time.sleep(PAUSE)
    print(json.dumps(dataclasses.asdict(findings)), flush=True)


if __name__ == "__main__":
    main()
