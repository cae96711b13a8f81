"""The facts of a host as immutable values, and the hints that say what to look at.

Pure: nothing here reads anything. ``host.scan`` makes these values, everything above compares
them. Equality covers every field, so ``old == new`` is the diff of two looks. A number that the
kernel may give out again after a rebind or a reboot (card, render, accel, group, VFIO) is a fact
of one look and never an identity: a function is known by its address.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping
from typing import Final, NewType, Self

Address = NewType("Address", str)
"""A PCI address, lower case: ``0000:03:00.0``; the domain has 4 to 8 hex digits."""

_ADDRESS: Final = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
ADDRESS_PATTERN: Final = re.compile(_ADDRESS)
_LAST_ADDRESS: Final = re.compile(rf".*/({_ADDRESS})(?:/|$)", re.DOTALL)
_ADDRESSES: Final = re.compile(rf"(?<![0-9a-f:]){_ADDRESS}(?![0-9a-f])")
_PCIE_ROOT: Final = re.compile(r"/(pci[0-9a-f]{4,8}:[0-9a-f]{2})(?=/)")

_BRIDGE: Final = 0x06
"""The base class of bridges, in the upper 8 bits of the class."""


def parse_address(text: str) -> Address:
    """Read a PCI address as people and tools write it.

    Upper case is accepted, and a missing domain means ``0000``, as in ``lspci``.

    Raises:
        ValueError: The text is not a PCI address.
    """
    candidate = text.strip().lower()
    if candidate.count(":") == 1:
        candidate = f"0000:{candidate}"
    if ADDRESS_PATTERN.fullmatch(candidate) is None:
        msg = f"{text!r} is not a PCI address such as 0000:03:00.0"
        raise ValueError(msg)
    return Address(candidate)


def address_in_devpath(devpath: str) -> Address | None:
    """The function that a sysfs device path belongs to: the deepest PCI address in it.

    ``/devices/pci0000:00/0000:00:01.0/0000:03:00.0/drm/card0`` belongs to ``0000:03:00.0``, not
    to the bridge above it.
    """
    match = _LAST_ADDRESS.match(devpath)
    return None if match is None else Address(match[1])


def pcie_root_of(devpath: str) -> str | None:
    """The root complex in a sysfs device path: its first part such as ``pci0000:00``."""
    match = _PCIE_ROOT.search(devpath)
    return None if match is None else match[1]


def addresses_in(text: str) -> frozenset[Address]:
    """All addresses in a text such as the name of a link: ``pci-0000:03:00.0-card``."""
    return frozenset(map(Address, _ADDRESSES.findall(text)))


def address_order(address: Address) -> tuple[int, str]:
    """Sorts addresses as people count: by the value of the domain, however many digits it has."""
    domain, _, rest = address.partition(":")
    return int(domain, 16), rest


def slot_of(address: Address) -> str:
    """The slot of a function: its address without the function number."""
    return address.rpartition(".")[0]


class NodeRole(enum.StrEnum):
    """What a node is for; taken from its name and folder, never from its minor number."""

    CARD = "card"
    RENDER = "render"
    ACCEL = "accel"
    MEI = "mei"
    VFIO_GROUP = "vfio-group"
    VFIO_CDEV = "vfio-cdev"
    EXTRA = "extra"


class NodeState(enum.StrEnum):
    """What /dev says about a node that sysfs lists."""

    PRESENT = "present"
    """A character device with the number that sysfs gives."""
    MISSING = "missing"
    """Nothing at that path (the kernel takes a node away before its sysfs entry)."""
    MISMATCH = "mismatch"
    """Something else at that path: another number, a link, a file."""
    UNREADABLE = "unreadable"
    """The path could not be examined."""


class DeviceNumber(tuple[int, int]):
    """A character device's (major, minor)."""

    __slots__ = ()

    def __new__(cls, major: int, minor: int) -> Self:
        """Pair the two."""
        return super().__new__(cls, (major, minor))

    def __str__(self) -> str:
        """As sysfs writes it: ``226:0``."""
        return f"{self[0]}:{self[1]}"


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A character device in /dev, as sysfs and /dev described it in one look."""

    role: NodeRole
    name: str
    """The kernel's name: ``card0``, ``renderD128``, ``accel0``, ``mei1``, ``12``, ``vfio0``."""
    path: str
    """The path on the host, always below ``/dev`` whatever root it was looked up under."""
    number: DeviceNumber | None
    state: NodeState
    settled: bool
    """udev's database has this node, so its permissions and links are done."""

    @property
    def counts(self) -> bool:
        """Whether a container could be given this node."""
        return self.state is NodeState.PRESENT


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link that udev made to a node: ``/dev/dri/by-path/pci-…-card``."""

    path: str
    target: str
    """Where it leads, as an absolute path below ``/dev``; perhaps to nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A PCI function. Everything here can be read while another process holds its lock."""

    address: Address
    devpath: str
    """Its path below /sys: ``/devices/pci0000:00/0000:03:00.0``."""
    vendor: int
    device: int
    class_code: int
    """24 bits: class, subclass, programming interface (``0x030000`` is VGA)."""
    subsystem_vendor: int | None = None
    subsystem_device: int | None = None
    revision: int | None = None
    driver: str | None = None
    """The driver that it is bound to. None is a normal state."""
    boot_vga: bool | None = None
    numa_node: int | None = None
    """None where the firmware gives none (sysfs says -1)."""
    pcie_root: str | None = None
    """The root complex: ``pci0000:00``."""
    iommu_group: int | None = None
    physfn: Address | None = None
    """The PF, if this is a VF."""
    virtfns: tuple[Address, ...] = ()
    """Its VFs, if this is a PF with VFs."""
    nodes: tuple[Node, ...] = ()
    """Sorted by role and natural name order."""
    links: tuple[Link, ...] = ()
    has_vfio_dev: bool = False
    """sysfs has ``vfio-dev/`` below it: some VFIO driver drives it, whatever its name."""
    inode: int = 0
    """The sysfs folder's inode: another card in the same slot has another."""

    def __hash__(self) -> int:
        """By address alone: equality covers all, and a deep hash costs what a cache is to save."""
        return hash(self.address)

    @property
    def pci_id(self) -> str:
        """Vendor and device as tools write it: ``8086:e212``."""
        return f"{self.vendor:04x}:{self.device:04x}"

    @property
    def slot(self) -> str:
        """The address without the function number."""
        return slot_of(self.address)

    @property
    def base_class(self) -> int:
        """The upper 16 bits of the class: ``0x0300`` is VGA, ``0x0604`` a PCI bridge."""
        return self.class_code >> 8

    @property
    def is_bridge(self) -> bool:
        """Whether it is a bridge; bridges do not count for the viability of an IOMMU group."""
        return self.class_code >> 16 == _BRIDGE

    @property
    def is_vf(self) -> bool:
        """Whether it is an SR-IOV virtual function."""
        return self.physfn is not None

    @property
    def on_vfio(self) -> bool:
        """Whether a VFIO driver has it.

        Kernels since 6.0 say so by ``vfio-dev/``; before, only the driver's name tells
        (``vfio-pci`` and variants such as ``xe-vfio-pci``).
        """
        return self.has_vfio_dev or is_vfio_driver(self.driver)

    def nodes_of(self, *roles: NodeRole) -> tuple[Node, ...]:
        """Its nodes with one of these roles, in order."""
        return tuple(node for node in self.nodes if node.role in roles)


def normalise_driver(name: str) -> str:
    """One spelling for a driver and its module: ``vfio_pci`` has the driver ``vfio-pci``."""
    return name.replace("_", "-")


def is_vfio_driver(name: str | None) -> bool:
    """Whether a driver is one of VFIO's, by its name."""
    return name is not None and "vfio" in normalise_driver(name).split("-")


@dataclasses.dataclass(frozen=True, slots=True)
class Orphan:
    """A DRM or accel node that is no PCI function's own: simpledrm, vgem, vkms, a partition."""

    node: Node
    devpath: str
    driver: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Environment:
    """What the host offers around its devices; each has a consequence that is said once."""

    devtmpfs: bool = True
    """/dev is the kernel's own; if not, it may be a container's snapshot of nodes."""
    udevd: bool = True
    """``/run/udev/control`` exists: udevd will deal with new nodes."""
    udev_queue: bool = False
    """``/run/udev/queue`` exists: udevd has not yet dealt with all it was told."""
    iommu: bool = False
    """At least one IOMMU group exists."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """The result of a look: what the host has, and what could not be read."""

    functions: Mapping[Address, Function] = dataclasses.field(default_factory=dict)
    """Every PCI function, in order of address."""
    shared: Mapping[str, Node] = dataclasses.field(default_factory=dict)
    """Nodes that belong to no single function, by path: ``/dev/kfd``, ``/dev/vfio/vfio``, …"""
    orphans: tuple[Orphan, ...] = ()
    """In natural order of their names."""
    dropped: Mapping[Address, str] = dataclasses.field(default_factory=dict)
    """Functions that could not be read in this look, each with its reason."""
    environment: Environment = Environment()

    def group(self, number: int) -> tuple[Function, ...]:
        """The functions of an IOMMU group."""
        return tuple(f for f in self.functions.values() if f.iommu_group == number)


@dataclasses.dataclass(frozen=True, slots=True)
class Hint:
    """That something may have changed, and where; never what.

    A message of the kernel or of udev becomes one on its first line. So do timers and signals.
    """

    reason: str
    """A short closed word for log and metrics: ``kernel``, ``udev``, ``overflow``, ``timer``, …"""
    address: Address | None = None
    group: int | None = None
    node_path: str | None = None
    node_number: DeviceNumber | None = None
    orphan: bool = False
    """A DRM or accel message whose device path leads through no PCI function."""
    udev_done: bool = False
    """udev has dealt with this node (its message came, and it was no removal)."""
    everything: bool = False
    received: float = 0.0
    """Monotonic time in seconds at which the message was read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """What a look has to read."""

    everything: bool = False
    addresses: frozenset[Address] = frozenset()
    orphans: bool = False
    """The DRM and accel nodes that belong to no function."""

    def __or__(self, other: Scope) -> Scope:
        """The union of two scopes."""
        return Scope(
            everything=self.everything or other.everything,
            addresses=self.addresses | other.addresses,
            orphans=self.orphans or other.orphans,
        )


EVERYTHING: Final = Scope(everything=True)
NOTHING: Final = Scope()


def scope_of(hints: Iterable[Hint], inventory: Inventory) -> Scope:
    """Join hints into what must be looked at, given what is known.

    A function brings every function whose last known node path or device number the message
    mentions; a group brings its members. A message that cannot be mapped means everything.
    The slot, group, PF and VFs of each function are added by ``widen``.
    """
    hints = tuple(hints)
    if any(hint.everything for hint in hints):
        return EVERYTHING
    # A burst repeats itself: what differs only in its time is looked up once.
    news = {dataclasses.replace(hint, reason="", udev_done=False, received=0.0) for hint in hints}
    mentions = _mentions(inventory) if any(map(_words, news)) else {}
    concerned: set[Address | None] = set()
    for hint in news:
        found = _concerned(hint, mentions)
        if not found:
            return EVERYTHING
        concerned |= found
    addresses = frozenset(owner for owner in concerned if owner is not None)
    return widen(Scope(addresses=addresses, orphans=None in concerned), inventory)


_Mentions = dict[str | DeviceNumber | int, set[Address | None]]

_ORPHANS_IN: Final = ("/dev/dri/", "/dev/accel/")


def _words(hint: Hint) -> list[str | DeviceNumber | int]:
    """What a hint says of somebody whom it does not name."""
    words = (hint.group, hint.node_path, hint.node_number)
    return [word for word in words if word is not None]


def _concerned(hint: Hint, mentions: _Mentions) -> set[Address | None]:
    """Whom a hint is about; None stands for the orphans, nobody means that it cannot be told."""
    found: set[Address | None] = set()
    if hint.address is not None:
        found.add(hint.address)
    if hint.orphan:
        found.add(None)
    for word in _words(hint):
        if word in mentions:
            found |= mentions[word]
        elif found and word is hint.node_path and hint.node_path.startswith(_ORPHANS_IN):
            # A new card below a function may be none of its own: simpledrm's framebuffer.
            found.add(None)
    return found


def _mentions(inventory: Inventory) -> _Mentions:
    """Who had this node path, device number or IOMMU group; None stands for the orphans."""
    owners: _Mentions = {}
    for function in inventory.functions.values():
        if function.iommu_group is not None:
            owners.setdefault(function.iommu_group, set()).add(function.address)
        for node in function.nodes:
            owners.setdefault(node.path, set()).add(function.address)
            if node.number is not None:
                owners.setdefault(node.number, set()).add(function.address)
    for orphan in inventory.orphans:
        owners.setdefault(orphan.node.path, set()).add(None)
        if orphan.node.number is not None:
            owners.setdefault(orphan.node.number, set()).add(None)
    return owners


class Neighbours:
    """Who belongs to whom in an inventory: same slot, same IOMMU group, PF and VFs.

    For one walk: each slot and group is told of once, so that a group of all functions costs no
    more than many small ones.

    Args:
        inventory: What is known.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._functions = inventory.functions
        self._by_slot: dict[str, list[Address]] = {}
        self._by_group: dict[int | None, list[Address]] = {}
        for address, function in inventory.functions.items():
            self._by_slot.setdefault(slot_of(address), []).append(address)
            self._by_group.setdefault(function.iommu_group, []).append(address)
        self._by_group.pop(None, None)

    def of(self, address: Address) -> set[Address]:
        """The functions that belong to this one, as far as the walk does not know them yet."""
        found = set(self._by_slot.pop(slot_of(address), ()))
        function = self._functions.get(address)
        if function is not None:
            found.update(self._by_group.pop(function.iommu_group, ()))
            found.update(function.virtfns)
            if function.physfn is not None:
                found.add(function.physfn)
        return found


def widen(scope: Scope, inventory: Inventory) -> Scope:
    """Add what belongs to each function of a scope: its slot, IOMMU group, PF and VFs.

    The result is closed: widening it again adds nothing.
    """
    if scope.everything or not scope.addresses:
        return scope
    neighbours = Neighbours(inventory)
    done: set[Address] = set()
    todo = set(scope.addresses)
    while todo:
        address = todo.pop()
        done.add(address)
        todo |= neighbours.of(address) - done
    return dataclasses.replace(scope, addresses=frozenset(done))


class HoldMode(enum.StrEnum):
    """What a claim holds a device for."""

    VFIO = "vfio"
    DRM = "drm"


@dataclasses.dataclass(frozen=True, slots=True)
class Hold:
    """What a claim means for publishing: the function is withheld until its claim is done."""

    address: Address
    claim: str
    mode: HoldMode
    settled: bool
    """The claim is done: the device is published in its mode again."""
