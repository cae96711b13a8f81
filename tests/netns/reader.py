"""A consumer that loads the spec directories all the while, as an engine might at any moment.

A process of its own: ``python -m tests.netns.reader DIRECTORY...``. It loads until its standard
input ends, then writes one JSON object: how often it looked, how many different states it saw, and
every fault. What it holds against a spec is CDI's word, not the agent's: rules that make an engine
ignore a file or a device (container-device-interface, specs-go and pkg/parser), written down anew.
"""

import dataclasses
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
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


def contents(text: bytes) -> tuple[str, list[str]]:
    """The kind that a sound file is about, and the devices that it defines."""
    spec = yaml.load(text, _LOADER)  # noqa: S506 - it is a safe loader
    return spec["kind"], [f"{spec['kind']}={device['name']}" for device in spec["devices"]]


@dataclasses.dataclass
class Findings:
    """What was seen."""

    looks: int = 0
    states: int = 0
    """How often the directories differed from the look before."""
    faults: list[str] = dataclasses.field(default_factory=list)
    overlaps: list[str] = dataclasses.field(default_factory=list)
    """Devices that two directories defined at once: no fault, as one of them wins."""
    kinds: list[list[str]] = dataclasses.field(default_factory=list)
    """The sets of kinds that were defined at once."""


Files = dict[str, bytes]
"""By path."""


def load(directories: Sequence[str]) -> Files | None:
    """Every file that an engine would take for a spec, as all of them were at one moment.

    That is: none of them had changed when the last was read. None if one had, so that there was
    no such moment.
    """
    files: Files = {}
    marks: dict[str, tuple[int, int]] = {}
    for directory in directories:
        for path in _spec_paths(directory):
            try:
                with open(path, "rb") as file:
                    marks[path] = _mark(os.fstat(file.fileno()))
                    files[path] = file.read()
            except FileNotFoundError:
                return None
    try:
        return files if all(_mark(os.stat(path)) == marks[path] for path in files) else None
    except FileNotFoundError:
        return None


def _spec_paths(directory: str) -> list[str]:
    try:
        return sorted(f"{directory}/{n}" for n in os.listdir(directory) if n.endswith(_SPECS))
    except FileNotFoundError:
        return []


def _mark(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def look(directories: Sequence[str], before: Files | None, findings: Findings) -> Files | None:
    """Load once; only what changed is checked again, so that looks come close together."""
    files = load(directories)
    if files is None:
        return before
    findings.looks += 1
    if files != before:
        findings.states += 1
        faults = [
            fault
            for path, text in files.items()
            for fault in faults_of(os.path.basename(path), text)
        ]
        findings.faults += faults or _check_together(files, findings)
    return files


def _check_together(files: Files, findings: Findings) -> list[str]:
    """What sound files say when they are taken together."""
    kinds: set[str] = set()
    names: Counter[tuple[str, str]] = Counter()
    for path, text in files.items():
        kind, devices = contents(text)
        kinds.add(kind)
        names.update((os.path.dirname(path), device) for device in devices)
    if sorted(kinds) not in findings.kinds:
        findings.kinds.append(sorted(kinds))
    everywhere = Counter(name for _, name in names)
    findings.overlaps += [name for name, count in everywhere.items() if count > 1]
    return [f"{name} defined twice" for (_, name), count in names.items() if count > 1]


def wait_for_end(ended: threading.Event) -> None:
    """Tell when the standard input has ended."""
    sys.stdin.read()
    ended.set()


def main() -> None:
    """Look until the standard input ends."""
    ended = threading.Event()
    threading.Thread(target=wait_for_end, args=(ended,), daemon=True).start()
    findings = Findings()
    files: Files | None = None
    print("ready", flush=True)
    while not ended.is_set():
        files = look(sys.argv[1:], files, findings)
        time.sleep(PAUSE)
    print(json.dumps(dataclasses.asdict(findings)), flush=True)


if __name__ == "__main__":
    main()
