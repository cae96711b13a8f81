"""A consumer of the spec directory that looks all the while, and holds every promise against it.

What makes a spec unusable for an engine is `tests.netns.reader`'s to say. Beyond that no device may
be published as a GPU and for VFIO at once, and no entry may name a node that is not there: whatever
a claim moves is withdrawn before it is touched, and published when its nodes have come. Only where
a test takes a device away under the agent may its entry outlive it, by no more than a pass.
"""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import yaml

from tests.netns import reader

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
PAUSE: Final = 0.002
"""Seconds between two looks; it leaves the others some of the machine."""


class Reader:
    """Looks until it is closed.

    Args:
        directory: Where the specs are.
        dev: Where the nodes are.
        passes: How many passes the agent has done.
    """

    def __init__(self, directory: Path, dev: Path, passes: Callable[[], int]) -> None:
        self.findings: Final = reader.Findings()
        self.patience = 0
        """How many passes may end before an entry is gone whose node is. The node goes before its
        message comes; the pass that is under way may have looked before, and passes that answer
        messages about other functions may still end in between."""
        self._passes = passes
        self._missing: dict[str, int] = {}
        self._directory = str(directory)
        self._dev = str(dev)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="reader of specs")
        self._thread.start()

    @property
    def faults(self) -> list[str]:
        """What was wrong so far."""
        return self.findings.faults

    def close(self) -> None:
        """Look no more."""
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        files: reader.Files | None = None
        while not self._end.wait(PAUSE):
            before = files
            files = reader.look([self._directory], files, self.findings)
            if files is None:
                continue
            faults = self._of_nodes(files)
            if files != before:
                faults += _both_ways(files)
            # What was withdrawn while we looked is no fault.
            if faults and reader.load([self._directory]) == files:
                self.findings.faults += faults

    def _of_nodes(self, files: reader.Files) -> list[str]:
        passes = self._passes()
        missing = [
            f"{device} names {path}, which is not there"
            for text in files.values()
            for device, path in _nodes(text)
            if not os.path.lexists(self._dev + path.removeprefix("/dev"))
        ]
        self._missing = {fault: self._missing.get(fault, passes) for fault in missing}
        return [f for f, since in self._missing.items() if passes - since >= self.patience]


def _nodes(text: bytes) -> Iterator[tuple[str, str]]:
    spec = yaml.load(text, _LOADER)  # noqa: S506 - it is a safe loader
    for device in spec["devices"]:
        for node in device["containerEdits"].get("deviceNodes") or ():
            yield f"{spec['kind']}={device['name']}", node.get("hostPath", node["path"])


def _both_ways(files: reader.Files) -> Iterator[str]:
    """Devices that are given as what they are, and for VFIO."""
    kinds: dict[str, set[str]] = {}
    for text in files.values():
        kind, devices = reader.contents(text)
        kinds[kind] = {name.partition("=")[2] for name in devices} - {"all"}
    for kind, names in kinds.items():
        if kind.endswith("-vfio"):
            for other, theirs in kinds.items():
                if not other.endswith("-vfio"):
                    yield from (f"{name} in {kind} and {other}" for name in names & theirs)
