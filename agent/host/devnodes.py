"""What /dev says of the nodes that sysfs lists, and what udev has made of them.

A node counts if it is a character device with the number that sysfs gives: a path alone can belong
to another device by now. Whether udev has dealt with it is read from udev's database, which has an
entry once the node's permissions and links are done. Links (``by-path``) are read once a look.

Paths of nodes are always ``/dev/...``, whatever folder they are looked up in. ``stat_node`` is a
seam: without root there is no mknod, so a simulated host tells a node's number in another way.
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Collection, Mapping
from typing import Final, Protocol

import msgspec

from agent.host import sysfs
from agent.host.model import (
    DeviceNumber,
    Environment,
    Link,
    Node,
    NodeRole,
    NodeState,
)

_LINK_FOLDERS: Final = ("/dev/accel/by-path", "/dev/dri/by-path")

_COARSE: Final = 100_000_000
"""Nanoseconds; files are stamped at the timer's ticks, of which the slowest are 10 ms apart."""

# Where the kernel puts a node whose ``uevent`` does not say.
_FOLDERS: Final[Mapping[NodeRole, str]] = {
    NodeRole.CARD: "dri/",
    NodeRole.RENDER: "dri/",
    NodeRole.ACCEL: "accel/",
    NodeRole.MEI: "",
    NodeRole.VFIO_GROUP: "vfio/",
    NodeRole.VFIO_CDEV: "vfio/devices/",
    NodeRole.EXTRA: "",
}

_OCTAL: Final = re.compile(r"\\([0-7]{3})")


class NodeStat(msgspec.Struct, frozen=True):
    """What is at a path."""

    number: DeviceNumber | None
    """The number of a character device; None if it is something else, a link to one too."""


class StatNode(Protocol):
    """Says what is at a path on disk, without following a link there."""

    def __call__(self, path: str, /) -> NodeStat | None:
        """What is there; None if nothing is.

        Raises:
            OSError: It cannot be said.
        """


def lstat_node(path: str, /) -> NodeStat | None:
    """Say what is at a path, as ``lstat`` does."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISCHR(found.st_mode):
        return NodeStat(None)
    return NodeStat(DeviceNumber(os.major(found.st_rdev), os.minor(found.st_rdev)))


def node_path(role: NodeRole, name: str, uevent: Mapping[str, str]) -> str:
    """Where the kernel makes the node of a sysfs entry.

    Args:
        role: What the node is for.
        name: The name of the entry.
        uevent: The properties of the entry; DEVNAME decides, if it is a path below /dev.
    """
    devname = uevent.get("DEVNAME", "").removeprefix("/dev/")
    parts = devname.split("/")
    if not devname.isprintable() or any(part in {"", ".", ".."} for part in parts):
        return f"/dev/{_FOLDERS[role]}{name}"
    return f"/dev/{devname}"


class DevNodes:
    """Nodes and what surrounds them, below roots of your choice.

    Args:
        dev: The root of device nodes, ``/dev``.
        run: The root of udev's own files, ``/run``.
        proc: ``/proc``, for what is mounted at ``dev``.
        stat_node: Says what is at a path.
    """

    def __init__(self, *, dev: str, run: str, proc: str, stat_node: StatNode) -> None:
        self._dev = dev.rstrip("/")
        self._udev = f"{run.rstrip('/')}/udev"
        self._mountinfo = f"{proc.rstrip('/')}/self/mountinfo"
        self._stat_node = stat_node
        self._devtmpfs: tuple[tuple[int, int], bool] | None = None

    def on_disk(self, path: str) -> str:
        """Where a path below /dev is to be found."""
        return f"{self._dev}{path.removeprefix('/dev')}"

    def node(self, role: NodeRole, name: str, path: str, number: DeviceNumber | None) -> Node:
        """Look at the node that sysfs says is there."""
        return Node(
            role=role,
            name=name,
            path=path,
            number=number,
            state=self._state(path, number),
            settled=number is not None and self.settled(number),
        )

    def number(self, path: str) -> tuple[NodeState, DeviceNumber | None]:
        """What a path leads to, for a node that is known by its path alone."""
        try:
            found = self._stat_node(self.on_disk(path))
        except (OSError, ValueError):
            return NodeState.UNREADABLE, None
        if found is None:
            return NodeState.MISSING, None
        if found.number is None:
            return NodeState.MISMATCH, None
        return NodeState.PRESENT, found.number

    def settled(self, number: DeviceNumber) -> bool:
        """Whether udev's database has the character device."""
        return sysfs.exists(f"{self._udev}/data/c{number}")

    def environment(self, *, iommu: bool) -> Environment:
        """What the host offers around its devices."""
        return Environment(
            devtmpfs=self._is_devtmpfs(),
            udevd=sysfs.exists(f"{self._udev}/control"),
            udev_queue=sysfs.exists(f"{self._udev}/queue"),
            iommu=iommu,
        )

    def _state(self, path: str, number: DeviceNumber | None) -> NodeState:
        state, found = self.number(path)
        if state is NodeState.PRESENT and found != number:
            return NodeState.MISMATCH
        return state

    def _is_devtmpfs(self) -> bool:
        """Whether the root of nodes is the kernel's own file system.

        The list of mounts can be long: it is read again only if another file system is there.
        """
        try:
            root = os.stat(self._dev)
        except OSError:
            return False
        mark = root.st_dev, root.st_ino
        if self._devtmpfs is None or self._devtmpfs[0] != mark:
            mounts = sysfs.text(self._mountinfo)
            if mounts is None:
                return False
            self._devtmpfs = mark, file_system(mounts, os.path.realpath(self._dev)) == "devtmpfs"
        return self._devtmpfs[1]


def file_system(mountinfo: str, path: str) -> str | None:
    """The type of the file system that a path is on, from the text of /proc/self/mountinfo.

    Args:
        mountinfo: As ``man 5 proc`` describes it; lines of another form are left out.
        path: Absolute, without links.
    """
    best, found = "", None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 6:  # noqa: PLR2004 - up to the options of the mount
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        # Of two mounts at one point the later hides the earlier.
        if len(point) >= len(best) and f"{path}/".startswith(f"{point.rstrip('/')}/"):
            best, found = point, after.split(" ", 1)[0]
    return found


class Links:
    """The links that udev makes to nodes, and which node each leads to.

    Every change of a link changes the time of its folder (udev replaces links by renaming), so a
    folder whose time has not changed need not be read again. A time is trusted once it is older
    than the file system's clock is coarse: until then a second change could bear the same.

    Args:
        nodes: Where they are.
    """

    def __init__(self, nodes: DevNodes) -> None:
        self._nodes = nodes
        self.forget()

    def forget(self) -> None:
        """Know nothing: the next reading reads all, and tells of all as changed."""
        self._written: dict[str, Mapping[str, str]] = {folder: {} for folder in _LINK_FOLDERS}
        self._marks: dict[str, sysfs.Mark | None] = {}
        self._by_target: dict[str, dict[str, Link]] = {}

    def to(self, paths: Collection[str]) -> tuple[Link, ...]:
        """The links to these nodes, sorted by path."""
        links = [link for path in paths for link in self._by_target.get(path, {}).values()]
        return tuple(sorted(links, key=lambda link: link.path))

    def read(self, *, afresh: bool) -> set[str]:
        """Read the links.

        Args:
            afresh: Read them even if nothing can have changed.

        Returns:
            The paths of nodes to which other links lead than before.
        """
        changed: set[str] = set()
        for folder in _LINK_FOLDERS:
            now = time.time_ns()
            mark = sysfs.mark(self._nodes.on_disk(folder))
            if not afresh and folder in self._marks and self._marks[folder] == mark:
                continue
            changed |= self._read_folder(folder)
            self._marks.pop(folder, None)
            if mark is None or now - mark.changed > _COARSE:
                self._marks[folder] = mark
        return changed

    def _read_folder(self, folder: str) -> set[str]:
        """Read the links in a folder; a link is optional and never costs a device."""
        before = self._written[folder]
        after: Mapping[str, str] = {}
        with contextlib.suppress(sysfs.UnreadableError):
            after = sysfs.links(self._nodes.on_disk(folder))
        self._written[folder] = after
        changed: set[str] = set()
        # Of a thousand links two have changed: what is not needed is not made for the rest.
        for name in {name for name, _ in before.items() ^ after.items()}:
            if (old := _link(folder, name, before.get(name))) is not None:
                links = self._by_target[old.target]
                del links[old.path]
                if not links:
                    del self._by_target[old.target]
                changed.add(old.target)
            if (new := _link(folder, name, after.get(name))) is not None:
                self._by_target.setdefault(new.target, {})[new.path] = new
                changed.add(new.target)
        return changed


def _link(folder: str, name: str, written: str | None) -> Link | None:
    """The link of this name; None if it leads to nothing that can be a node."""
    if written is None or not f"{name}{written}".isprintable():
        return None
    target = os.path.normpath(os.path.join(folder, written))
    return Link(f"{folder}/{name}", target) if target.startswith("/dev/") else None
