"""Reads one PCI function with its nodes, so that what is read belongs together.

A function is read through its open folder, then its driver and its nodes' numbers are read again:
if they differ, it changed meanwhile and is read anew. One that never holds still, or has something
that cannot be read, is an ``UnreadableError`` and drops out of this look alone.

A function's own nodes are in its folder (``drm/card0``, ``accel/accel0``, ``vfio-dev/vfio0``), or
below the one device in between that its driver makes (``model.owner_of_node``). The node of an
IOMMU group belongs to each function of the group that a VFIO driver has.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from agent.host import sysfs
from agent.host.devnodes import DevNodes, Links, node_path
from agent.host.model import (
    ADDRESS_PATTERN,
    BETWEEN,
    Address,
    DeviceNumber,
    Function,
    Node,
    NodeRole,
    address_order,
    is_vfio_driver,
    pcie_root_of,
)
from agent.host.sysfs import Folder, UnreadableError, printable

ATTEMPTS: Final = 4
"""How often a function is read that changes meanwhile, before it is dropped."""

DEVICES: Final = "bus/pci/devices"
"""Where all PCI functions are, below /sys."""

_NAME: Final = re.compile(r"(card|renderD|accel|vfio|mei)[0-9]+")
# By folder and beginning of the name: what the node is for, and its DEVTYPE if the class has one.
_KINDS: Final = {
    ("accel", "accel"): (NodeRole.ACCEL, "accel_minor"),
    ("drm", "card"): (NodeRole.CARD, "drm_minor"),
    ("drm", "renderD"): (NodeRole.RENDER, "drm_minor"),
    ("mei", "mei"): (NodeRole.MEI, ""),
    ("vfio-dev", "vfio"): (NodeRole.VFIO_CDEV, ""),
}
_OWN_FOLDERS: Final = ("accel", "drm", "vfio-dev")
_BETWEEN_FOLDERS: Final = ("accel", "drm", "mei")
_VIRTFN: Final = re.compile(r"virtfn([0-9]+)")
_GROUP: Final = re.compile(r"[0-9]{1,9}")
_DIGITS: Final = re.compile(r"([0-9]+)$")
_ROLES: Final = {role: rank for rank, role in enumerate(NodeRole)}


class _VanishedError(Exception):
    """The function is not there (any more)."""


class _Entry(msgspec.Struct, frozen=True):
    """A node as sysfs lists it."""

    role: NodeRole
    name: str
    place: str
    """Its folder: below that of the function, or absolute."""
    number: DeviceNumber
    path: str


def role_of(folder: str, name: str, devtype: str = "") -> NodeRole | None:
    """What a node is for, by its name and the class in whose folder it is.

    Neither minor numbers nor the DEVTYPE alone tell: ``controlD64`` and ``accel_controlD0`` are
    links without a node, and a connector (``card0-DP-1``) has a DEVTYPE of its own.
    """
    match = _NAME.fullmatch(name)
    kind = None if match is None else _KINDS.get((folder, match[1]))
    if kind is None or (devtype and kind[1] and devtype != kind[1]):
        return None
    return kind[0]


def node_order(node: Node) -> tuple[int, int, str]:
    """Sorts nodes by role, then as people count: ``card10`` after ``card2``."""
    digits = _DIGITS.search(node.name)
    return _ROLES[node.role], -1 if digits is None else int(digits[1]), node.name


class FunctionReader:
    """Reads functions below ``sys``.

    Args:
        sys: The root of sysfs, ``/sys``.
        nodes: Looks at nodes.
        links: Knows the links to nodes.
    """

    def __init__(self, sys: str, nodes: DevNodes, links: Links) -> None:
        self._sys = sys.rstrip("/")
        self._nodes = nodes
        self._links = links

    def read(self, address: Address) -> Function | None:
        """Read a function; None if there is none.

        Raises:
            UnreadableError: It is there, and cannot be read.
            LookError: This process lacks something.
        """
        reason = UnreadableError("keeps changing while it is read")
        for _ in range(ATTEMPTS):
            try:
                function = self._read_once(address)
            except _VanishedError:
                return None
            except UnreadableError as error:
                reason = error  # perhaps only of this moment
            else:
                if function is not None:
                    return function
        raise reason

    def neighbours(self, function: Function) -> Iterator[Address]:
        """The functions that sysfs says belong to this one, itself included."""
        bus = f"{self._sys}/{DEVICES}"
        for number in range(8):
            address = Address(f"{function.slot}.{number}")
            if sysfs.exists(f"{bus}/{address}"):
                yield address
        if function.iommu_group is not None:
            members = f"{self._sys}/kernel/iommu_groups/{function.iommu_group}/devices"
            with contextlib.suppress(UnreadableError):  # a look at everything does without, too
                yield from _addresses(sysfs.names(members) or ())
        if function.physfn is not None:
            yield function.physfn
        yield from function.virtfns

    def _devpath(self, address: Address) -> str:
        """Where the function is below /sys.

        Raises:
            _VanishedError: Nowhere.
            UnreadableError: What is at its address is no function.
        """
        entry = f"{self._sys}/{DEVICES}/{address}"
        target = sysfs.link(entry)
        if target is None:
            if os.path.lexists(entry):
                raise UnreadableError("its entry is not a link")
            raise _VanishedError
        devpath = os.path.normpath(f"/{DEVICES}/{target}")
        is_place = devpath.startswith("/devices/") and devpath.endswith(f"/{address}")
        if not is_place or not devpath.isprintable():
            raise UnreadableError(f"its entry leads to {printable(target)}")
        return devpath

    def _read_once(self, address: Address) -> Function | None:
        """Read a function; None if it changed meanwhile."""
        devpath = self._devpath(address)
        try:
            folder = Folder(f"{self._sys}{devpath}")
        except FileNotFoundError:
            raise _VanishedError from None
        with folder:
            names = frozenset(folder.names())
            driver = folder.leads_to("driver")
            group = _group(folder)
            entries = tuple(self._entries(folder, names))
            if group is not None and ("vfio-dev" in names or is_vfio_driver(driver)):
                place = f"{self._sys}/class/vfio/{group}"
                entries += tuple(_entry(folder, NodeRole.VFIO_GROUP, str(group), place))
            nodes = sorted(
                (self._nodes.node(e.role, e.name, e.path, e.number) for e in entries),
                key=node_order,
            )
            numa_node = folder.decimal("numa_node")
            # Zeros: it has none (bridges, mostly).
            subsystem_vendor = folder.hexadecimal("subsystem_vendor") or None
            subsystem_device = folder.hexadecimal("subsystem_device")
            boot_vga = folder.decimal("boot_vga") if "boot_vga" in names else None
            function = Function(
                address=address,
                devpath=devpath,
                vendor=self._required(folder.hexadecimal, "vendor", address, folder),
                device=self._required(folder.hexadecimal, "device", address, folder),
                class_code=self._required(folder.hexadecimal, "class", address, folder),
                subsystem_vendor=subsystem_vendor,
                subsystem_device=None if subsystem_vendor is None else subsystem_device,
                revision=folder.hexadecimal("revision"),
                driver=printable(driver) if driver else None,
                boot_vga=None if boot_vga is None else bool(boot_vga),
                numa_node=None if numa_node is None or numa_node < 0 else numa_node,
                pcie_root=pcie_root_of(devpath),
                iommu_group=group,
                physfn=_physfn(folder) if "physfn" in names else None,
                virtfns=_virtfns(folder, names),
                nodes=tuple(nodes),
                links=self._links.to([node.path for node in nodes]) if nodes else (),
                has_vfio_dev="vfio-dev" in names,
                inode=folder.inode(),
            )
            # The second reading.
            if folder.leads_to("driver") != driver:
                return None
            if any(folder.number(f"{e.place}/dev") != e.number for e in entries):
                return None
        return function

    def _required(
        self,
        read: Callable[[str], int | None],
        name: str,
        address: Address,
        folder: Folder,
    ) -> int:
        """Read an attribute that every function has."""
        value = read(name)
        if value is not None:
            return value
        try:
            with Folder(f"{self._sys}/{DEVICES}/{address}") as now:
                if now.inode() != folder.inode():
                    raise UnreadableError("another took its place while it was read")
        except FileNotFoundError:
            raise _VanishedError from None
        raise UnreadableError(f"it has no {name}")

    def _entries(self, folder: Folder, names: frozenset[str]) -> Iterator[_Entry]:
        """The nodes that sysfs lists below the function."""
        for below in _OWN_FOLDERS:
            if below in names:
                yield from _entries_in(folder, below, below)
        # A folder has some 60 names: two cheap questions before the pattern's.
        for between in [name for name in names if "." in name or name[0] == "v"]:
            if not BETWEEN.fullmatch(between):
                continue
            inside = folder.names(between)
            for below in _BETWEEN_FOLDERS:
                if below in inside:
                    yield from _entries_in(folder, below, f"{between}/{below}")


def _entries_in(folder: Folder, kind: str, place: str) -> Iterator[_Entry]:
    """The nodes in a class's folder below the function."""
    for name in folder.names(place):
        role = role_of(kind, name)
        if role is not None:
            yield from _entry(folder, role, name, f"{place}/{name}", kind)


def _entry(
    folder: Folder, role: NodeRole, name: str, place: str, kind: str = ""
) -> Iterator[_Entry]:
    """The node of one entry; none if the entry has no number (any more), or is something else."""
    number = folder.number(f"{place}/dev")
    if number is None:
        return
    uevent = folder.properties(f"{place}/uevent")
    if kind and role_of(kind, name, uevent.get("DEVTYPE", "")) is None:
        return
    yield _Entry(role, name, place, DeviceNumber(*number), node_path(role, name, uevent))


def _group(folder: Folder) -> int | None:
    name = folder.leads_to("iommu_group")
    if name is None:
        return None
    if not _GROUP.fullmatch(name):
        raise UnreadableError(f"its IOMMU group is called {printable(name)}")
    return int(name)


def _physfn(folder: Folder) -> Address | None:
    name = folder.leads_to("physfn")
    if name is None:
        return None
    if not ADDRESS_PATTERN.fullmatch(name):
        raise UnreadableError(f"its PF is called {printable(name)}")
    return Address(name)


def _virtfns(folder: Folder, names: frozenset[str]) -> tuple[Address, ...]:
    """The VFs of a PF, by their links: ``sriov_numvfs`` can hang."""
    links = [name for name in names if name[0] == "v" and _VIRTFN.fullmatch(name)]
    return tuple(_addresses(target for link in links if (target := folder.leads_to(link))))


def _addresses(names: Iterable[str]) -> list[Address]:
    """Those names that are addresses, in order."""
    return sorted(
        (Address(name) for name in names if ADDRESS_PATTERN.fullmatch(name)), key=address_order
    )
