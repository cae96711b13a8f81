#!/usr/bin/python3
"""Watch a spec directory as a container engine would, and write down whatever is wrong with it.

    witness.py FOLDER LOG         until SIGTERM; LOG is JSON lines

Every line has `t` (CLOCK_MONOTONIC) and one of
  ready     the first look is done
  spec      a file has new content: {device name: [hostPath, ...]} of its kind
  gone      a file is no longer there
  fault     what no reader may ever see: a file that is empty, cut off, not YAML, without devices,
            with a device without edits, with a name twice, with a mode other than 0644, one device
            in two files, or a file that was not renamed into place
  dangling  a hostPath that is no character device, and for how many seconds it was not: the
            kernel takes nodes away without asking, so how long is for a test to judge

inotify sees each rename and each write in place, however short; the rest is read at every event
and every 200 ms. Uses Debian's own YAML reader, not the agent's.
"""

import ctypes
import hashlib
import json
import os
import select
import stat
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

import yaml

# linux/inotify.h
IN_MODIFY, IN_MOVED_FROM, IN_MOVED_TO = 0x2, 0x40, 0x80
IN_CREATE, IN_DELETE, IN_IGNORED = 0x100, 0x200, 0x8000
WATCHED = IN_MODIFY | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE
# Not that it is closed: whoever renames a file before closing it closes it under its new name.
IN_PLACE = {IN_MODIFY: "modified", IN_CREATE: "created"}
POLL_MS = 200

libc = ctypes.CDLL(None, use_errno=True)


class Strict(yaml.CSafeLoader):
    """As engines read it: a key that occurs twice is an error."""


def mapping_without_doubles(loader: Strict, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    if len(set(keys)) != len(keys):
        raise yaml.YAMLError(f"a key twice among {keys}")
    return {
        key: loader.construct_object(value, deep=True)
        for key, (_, value) in zip(keys, node.value, strict=True)
    }


Strict.add_constructor("tag:yaml.org,2002:map", mapping_without_doubles)


class FaultError(Exception):
    """A spec that an engine would refuse; the text says why."""


@dataclass
class Seen:
    """What the last look found in a file."""

    identity: tuple[int, int, int]
    kind: str = ""
    devices: dict[str, list[str]] = field(default_factory=dict)


def parse(data: bytes) -> tuple[str, dict[str, list[str]]]:
    """(kind, {device name: [hostPath, ...]}) of a spec, or FaultError."""
    if not data:
        raise FaultError("empty")
    try:
        return read(yaml.load(data, Strict))  # noqa: S506 - derived from the safe loader
    except yaml.YAMLError as error:
        raise FaultError(f"not YAML: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise FaultError(f"not built as a spec is: {error!r}") from error


def read(spec: Any) -> tuple[str, dict[str, list[str]]]:  # noqa: ANN401 - whatever is in the file
    """As `parse`; what is not built as a spec is raises whatever it runs into."""
    if not isinstance(spec, dict):
        raise FaultError("not a mapping")
    if not isinstance(spec.get("kind"), str) or not isinstance(spec.get("cdiVersion"), str):
        raise FaultError("no kind or no cdiVersion")
    if not spec.get("devices"):
        raise FaultError("no devices")
    devices: dict[str, list[str]] = {}
    for device in spec["devices"]:
        name, edits = device.get("name"), device.get("containerEdits")
        if not isinstance(name, str):
            raise FaultError(f"a device called {name}")
        if not edits:
            raise FaultError(f"device {name} has no edits")
        if name in devices:
            raise FaultError(f"device {name} twice")
        devices[name] = [n.get("hostPath", n["path"]) for n in edits.get("deviceNodes", ())]
    return spec["kind"], devices


class Witness:
    """One directory, and what was last seen in it."""

    def __init__(self, folder: str, log: TextIO) -> None:
        self.folder = folder
        self.log = log
        self.seen: dict[str, Seen] = {}
        self.dangling: dict[tuple[str, str, str], float] = {}

    def note(self, **what: object) -> None:
        print(json.dumps({"t": round(time.monotonic(), 4), **what}), file=self.log)

    def look(self) -> None:
        try:
            names = [name for name in os.listdir(self.folder) if name.endswith((".yaml", ".json"))]
        except FileNotFoundError:
            names = []
        for name in sorted(self.seen.keys() - set(names)):
            del self.seen[name]
            self.note(gone=name)
        for name in sorted(names):
            self.look_at(name)
        self.look_for_doubles()
        self.look_for_dangling()

    def look_at(self, name: str) -> None:
        try:
            with open(f"{self.folder}/{name}", "rb") as file:
                data = file.read()
                found = os.fstat(file.fileno())
        except FileNotFoundError:
            return  # the next look says so
        identity = (found.st_ino, found.st_mtime_ns, found.st_size)
        if name in self.seen and self.seen[name].identity == identity:
            return
        seen = self.seen[name] = Seen(identity)
        if stat.S_IMODE(found.st_mode) != 0o644:
            self.note(fault=f"mode {stat.S_IMODE(found.st_mode):o}", file=name)
        try:
            seen.kind, seen.devices = parse(data)
        except FaultError as error:
            self.note(fault=str(error), file=name, content=data.decode("utf-8", "replace"))
        else:
            digest = hashlib.sha256(data).hexdigest()[:12]
            self.note(file=name, kind=seen.kind, spec=seen.devices, digest=digest)

    def look_for_doubles(self) -> None:
        where: dict[tuple[str, str], str] = {}
        for name, seen in self.seen.items():
            for device in seen.devices:
                other = where.setdefault((seen.kind, device), name)
                # The two were not read at one moment: they overlap only if both are still so.
                if other != name and self.unchanged(other) and self.unchanged(name):
                    self.note(fault=f"{seen.kind}={device} also in {other}", file=name)

    def unchanged(self, name: str) -> bool:
        try:
            found = os.stat(f"{self.folder}/{name}")
        except FileNotFoundError:
            return False
        return self.seen[name].identity == (found.st_ino, found.st_mtime_ns, found.st_size)

    def look_for_dangling(self) -> None:
        now = time.monotonic()
        dangling = {
            (name, device, path)
            for name, seen in self.seen.items()
            for device, paths in seen.devices.items()
            for path in paths
            if not is_node(path)
        }
        for key in self.dangling.keys() - dangling:
            since = self.dangling.pop(key)
            name, device, path = key
            self.note(dangling=path, file=name, device=device, seconds=round(now - since, 4))
        for key in dangling:
            self.dangling.setdefault(key, now)

    def events(self, data: bytes) -> bool:
        """Note what inotify saw; return whether the directory itself has gone."""
        at = 0
        gone = False
        while at < len(data):
            _, mask, _, length = struct.unpack_from("iIII", data, at)
            name = data[at + 16 : at + 16 + length].rstrip(b"\0").decode("utf-8", "replace")
            at += 16 + length
            gone |= bool(mask & IN_IGNORED)
            if mask in IN_PLACE and name.endswith((".yaml", ".json")):
                self.note(fault=f"{IN_PLACE[mask]} in place", file=name)
        return gone


def is_node(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.lstat(path).st_mode)
    except OSError:
        return False


def main() -> None:
    folder, path = sys.argv[1:]
    inotify = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(inotify, select.POLLIN)
    watched = ready = False
    with open(path, "w", buffering=1) as log:
        witness = Witness(folder, log)
        while True:
            if not watched:
                watched = libc.inotify_add_watch(inotify, folder.encode(), WATCHED) >= 0
            witness.look()
            if not ready:
                ready = True
                witness.note(ready=True)
            if poll.poll(POLL_MS):
                watched = not witness.events(os.read(inotify, 1 << 16))


if __name__ == "__main__":
    main()
