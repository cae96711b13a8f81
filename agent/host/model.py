"""The facts of a host as immutable values, and what claims mean for publishing its devices.

Pure: nothing here reads anything. ``host.scan`` makes these values, everything above compares
them. Equality covers every field, so ``old == new`` is the diff of two looks. A number that the
kernel may give out again after a rebind or a reboot (card, render, accel, group, VFIO) is a fact
of one look and never an identity: a function is known by its address.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NewType, Self, TypeVar

import msgspec

Address = NewType("Address", str)
"""A PCI address, lower case: ``0000:03:00.0``; the domain has 4 to 8 hex digits."""

_ADDRESS: Final = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
ADDRESS_PATTERN: Final = re.compile(_ADDRESS)
_LAST_ADDRESS: Final = re.compile(rf".*/({_ADDRESS})(?:/|$)", re.DOTALL)
BETWEEN: Final = re.compile(r"virtio[0-9]+|[^/:.]+\.[^/:.]+\.[0-9]+")
"""The name of a device that a function's own driver makes between the function and its nodes: on
the virtio bus (virtio-gpu) or the auxiliary bus (nova, the management engine of Intel's GPUs)."""
_OWN_NODE: Final = re.compile(
    rf".*/({_ADDRESS})(?:/(?:{BETWEEN.pattern}))?/(?:accel|drm)/[^/:]+(?:/.*)?", re.DOTALL
)
_PCIE_ROOT: Final = re.compile(r"/(pci[0-9a-f]{4,8}:[0-9a-f]{2})(?=/)")

_BRIDGE: Final = 0x06
"""The base class of bridges, in the upper 8 bits of the class."""
_IDLE_DRIVERS: Final = frozenset({"pci-stub", "pcieport"})
"""Drivers that do nothing with a device."""


def parse_address(text: str) -> Address:
    """Read a PCI address as people and tools write it.

    Upper case is accepted, and a missing domain means ``0000``, as in ``lspci``. NVIDIA's tools
    write eight digits of the domain, the kernel four unless it needs more (``%04x``): that is the
    form in which addresses are compared.

    Raises:
        ValueError: The text is not a PCI address.
    """
    candidate = text.strip().lower()
    if candidate.count(":") == 1:
        candidate = f"0000:{candidate}"
    if ADDRESS_PATTERN.fullmatch(candidate) is None:
        msg = f"{text!r} is not a PCI address such as 0000:03:00.0"
        raise ValueError(msg)
    domain, _, rest = candidate.partition(":")
    return Address(f"{int(domain, 16):04x}:{rest}")


def address_in_devpath(devpath: str) -> Address | None:
    """The function that a sysfs device path belongs to: the deepest PCI address in it.

    ``/devices/pci0000:00/0000:00:01.0/0000:03:00.0/drm/card0`` belongs to ``0000:03:00.0``, not
    to the bridge above it.
    """
    match = _LAST_ADDRESS.match(devpath)
    return None if match is None else Address(match[1])


def owner_of_node(devpath: str) -> Address | None:
    """The function that a DRM or accel device is the own one of; None if it is an orphan.

    A card below a function need not be its own: since Linux 6.10 the firmware's framebuffer, which
    simpledrm makes a card of, is a platform device below the GPU that it draws on.
    """
    match = _OWN_NODE.fullmatch(devpath)
    return None if match is None else Address(match[1])


def pcie_root_of(devpath: str) -> str | None:
    """The root complex in a sysfs device path: its first part such as ``pci0000:00``."""
    match = _PCIE_ROOT.search(devpath)
    return None if match is None else match[1]


def address_order(address: Address) -> tuple[int, str]:
    """Sorts addresses as people count: by the value of the domain, however many digits it has."""
    domain, _, rest = address.partition(":")
    return int(domain, 16), rest


def slot_of(address: Address) -> str:
    """The slot of a function: its address without the function number."""
    return address[:-2]  # the number has one digit


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


class Node(msgspec.Struct, frozen=True):
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


class Link(msgspec.Struct, frozen=True):
    """A symbolic link that udev made to a node: ``/dev/dri/by-path/pci-…-card``."""

    path: str
    target: str
    """Where it leads, as an absolute path below ``/dev``; perhaps to nothing."""


class Function(msgspec.Struct, frozen=True):
    """A PCI function. Everything here can be read while another process holds its lock."""

    address: Address
    devpath: str
    """Its path below /sys: ``/devices/pci0000:00/0000:03:00.0``."""
    vendor: int
    device: int
    class_code: int
    """24 bits: class, subclass, programming interface (``0x030000`` is VGA)."""
    subsystem_vendor: int | None = None
    """With ``subsystem_device`` who built it; None for both if nobody is named."""
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

    @property
    def keeps_group(self) -> bool:
        """Whether its driver keeps its IOMMU group from being given to anybody.

        For that every endpoint has to be on VFIO, on a driver that does nothing with it, or on none
        (``vfio_dev_viable`` in drivers/vfio; ``iommu_group_claim_dma_owner`` since 5.19).
        """
        return not (self.is_bridge or self.on_vfio or self.driver is None) and (
            normalise_driver(self.driver) not in _IDLE_DRIVERS
        )

    def nodes_of(self, *roles: NodeRole) -> tuple[Node, ...]:
        """Its nodes with one of these roles, in order."""
        return tuple(node for node in self.nodes if node.role in roles)


def normalise_driver(name: str) -> str:
    """One spelling for a driver and its module: ``vfio_pci`` has the driver ``vfio-pci``."""
    return name.replace("_", "-")


def is_vfio_driver(name: str | None) -> bool:
    """Whether a driver is one of VFIO's, by its name."""
    return name is not None and "vfio" in normalise_driver(name).split("-")


class Orphan(msgspec.Struct, frozen=True):
    """A DRM or accel node that is no PCI function's own: simpledrm, vgem, vkms, a partition."""

    node: Node
    devpath: str
    driver: str | None


class Environment(msgspec.Struct, frozen=True):
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
    environment: Environment = dataclasses.field(default_factory=Environment)
    by_node: Mapping[str | DeviceNumber, tuple[Address, ...]] = dataclasses.field(
        init=False, repr=False, compare=False
    )
    """Who has a node of this path, or of this number."""
    by_group: Mapping[int, tuple[Address, ...]] = dataclasses.field(
        init=False, repr=False, compare=False
    )
    """The members of each IOMMU group."""
    earlier: Mapping[Address, Function] = dataclasses.field(init=False, repr=False, compare=False)
    """The functions of an earlier inventory, none if this one was not made from one; with
    ``changed`` the addresses at which the two differ."""
    changed: frozenset[Address] = dataclasses.field(init=False, repr=False, compare=False)
    since: dataclasses.InitVar[tuple[Inventory, Iterable[Address]] | None] = None
    """An earlier inventory, and the addresses at which this one may differ from it: of thousands of
    functions only those are asked what they have."""

    def __post_init__(self, since: tuple[Inventory, Iterable[Address]] | None) -> None:
        before, addresses = since or (None, self.functions)
        earlier = {} if before is None else before.functions
        pairs = ((a, earlier.get(a), self.functions.get(a)) for a in addresses)
        changes = [(address, old, new) for address, old, new in pairs if old is not new]
        by_node = _indexed({} if before is None else before.by_node, changes, _node_words)
        by_group = _indexed({} if before is None else before.by_group, changes, _group_words)
        object.__setattr__(self, "earlier", earlier)
        object.__setattr__(self, "changed", frozenset(address for address, _, _ in changes))
        object.__setattr__(self, "by_node", by_node)
        object.__setattr__(self, "by_group", by_group)

    def changed_since(self, functions: Mapping[Address, Function]) -> frozenset[Address]:
        """The addresses at which another look found something else, or nothing, or only this one.

        Args:
            functions: Those of the other look. If this one was made from it, that is known.
        """
        if functions is self.functions:
            return frozenset()
        if functions is self.earlier:
            return self.changed
        addresses = functions.keys() | self.functions.keys()
        return frozenset(a for a in addresses if functions.get(a) is not self.functions.get(a))

    def group(self, number: int) -> tuple[Function, ...]:
        """The functions of an IOMMU group, in order of address."""
        return tuple(self.functions[address] for address in self.by_group.get(number, ()))


_Word = TypeVar("_Word")


def _node_words(function: Function) -> set[str | DeviceNumber]:
    numbers = {node.number for node in function.nodes if node.number is not None}
    return {node.path for node in function.nodes} | numbers


def _group_words(function: Function) -> set[int]:
    return set() if function.iommu_group is None else {function.iommu_group}


def _indexed(
    index: Mapping[_Word, tuple[Address, ...]],
    changes: Iterable[tuple[Address, Function | None, Function | None]],
    words: Callable[[Function], set[_Word]],
) -> Mapping[_Word, tuple[Address, ...]]:
    """An index after functions have changed; the same object if they have what they had."""
    leaving: dict[_Word, set[Address]] = {}
    joining: dict[_Word, set[Address]] = {}
    for address, old, new in changes:
        had = set() if old is None else words(old)
        has = set() if new is None else words(new)
        for word in had - has:
            leaving.setdefault(word, set()).add(address)
        for word in has - had:
            joining.setdefault(word, set()).add(address)
    if not leaving and not joining:
        return index
    result = dict(index)
    for word in leaving.keys() | joining.keys():
        members = joining.get(word, set()).union(index.get(word, ())) - leaving.get(word, set())
        if members:
            result[word] = tuple(sorted(members, key=address_order))
        else:
            del result[word]
    return result


class HoldMode(enum.StrEnum):
    """What a claim holds a device for."""

    VFIO = "vfio"
    DRM = "drm"


class Hold(msgspec.Struct, frozen=True):
    """What a claim means for publishing: the function is withheld until its claim is done."""

    address: Address
    claim: str
    mode: HoldMode
    settled: bool
    """The claim is done: the device is published in its mode again."""
    dead: bool = False
    """It came back from its claim and does not answer any more."""
