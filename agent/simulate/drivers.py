"""What a driver makes of a function when it binds, and in what order that comes and goes.

The orders are those recorded on Linux 6.12: a DRM driver registers its render node, then its card,
then connectors and framebuffer; VFIO its group (with the first function of a group), then its
``vfio-dev``. What was made goes in the reverse order, so each probe returns a stack of undos.
"""

import contextlib
import dataclasses
import enum
from collections import defaultdict
from typing import Final, NamedTuple

import msgspec

from agent.host.model import DeviceNumber, slot_of
from agent.simulate.devices import Device, Life, NodeOf, Numbers, Sysfs
from agent.simulate.hardware import Hardware, Makes

DRM_MAJOR: Final = 226
ACCEL_MAJOR: Final = 261
FB_MAJOR: Final = 29


class Majors(msgspec.Struct, frozen=True):
    """The major numbers that a kernel gives out as modules are loaded, from 511 downwards."""

    vfio: int = 511
    vfio_device: int = 510
    mei: int = 509


class Connector(NamedTuple):
    """A plug on a card, or a port of a docking station; each type is counted over all cards."""

    kind: str
    number: int


@dataclasses.dataclass(slots=True)
class Bound:
    """What one binding made."""

    undo: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """Closing it takes everything away again, the last first."""
    card: Device | None = None
    connectors: list[Connector] = dataclasses.field(default_factory=list)
    lives: list[Life] = dataclasses.field(default_factory=list)
    """What processes can hold of it."""

    @property
    def held(self) -> bool:
        """Whether a process holds a node of it."""
        return any(life.holders for life in self.lives)


class VfioKind(enum.Enum):
    """Which nodes VFIO makes: what the kernel was built with."""

    GROUP = enum.auto()
    """Its older back end, ``/dev/vfio/<group>``; as Debian's kernels."""
    CDEV = enum.auto()
    """Its newer back end, ``/dev/vfio/devices/vfioN``."""
    BOTH = enum.auto()
    OLD = enum.auto()
    """As GROUP, on a kernel before 6.0: functions have no ``vfio-dev`` either."""

    @property
    def group(self) -> bool:
        """Whether each group has a node."""
        return self is not VfioKind.CDEV

    @property
    def cdev(self) -> bool:
        """Whether each function has a node."""
        return self in {VfioKind.CDEV, VfioKind.BOTH}


@dataclasses.dataclass(slots=True)
class _GroupNode:
    device: Device
    life: Life
    users: int = 0


class Drivers:
    """Makes what drivers make, with the numbers of this host.

    Args:
        sysfs: Where it is made.
        majors: Its major numbers.
        vfio: Which nodes VFIO makes.
    """

    def __init__(self, sysfs: Sysfs, majors: Majors, vfio: VfioKind) -> None:
        self._sysfs = sysfs
        self._majors = majors
        self._vfio = vfio
        # `drm_minor_alloc`: 64 of each, then (Linux 6.12) as many as one likes, of both together.
        more_drm = Numbers(192)
        self.cards: Final = Numbers(0, 63, more_drm)
        self.renders: Final = Numbers(128, 191, more_drm)
        self.accels: Final = Numbers()
        self.meis: Final = Numbers()
        self.group_minors: Final = Numbers()
        self.vfio_devices: Final = Numbers()
        self.framebuffers: Final = Numbers()
        self.connectors: Final[dict[str, Numbers]] = defaultdict(lambda: Numbers(1))
        self._group_nodes: dict[int, _GroupNode] = {}

    def native(self, hardware: Hardware, driver: str, makes: Makes) -> Bound:
        """What a function's own driver makes of it."""
        bound = Bound()
        for name in makes.mei:
            self._auxiliary_mei(bound, hardware, f"{driver}.{name}")
        if makes.mei_node:
            self._mei(bound, hardware.devpath)
        self.display(bound, hardware.devpath, makes)
        return bound

    def display(self, bound: Bound, parent: str, makes: Makes) -> None:
        """Make the DRM and accel devices below a device path."""
        if makes.accel:
            self._accel(bound, parent)
        if makes.drm:
            self._drm(bound, parent, makes)

    def vfio(self, hardware: Hardware, group: int) -> Bound:
        """What any driver of VFIO makes of a function."""
        bound = Bound()
        if self._vfio.group:
            self._join_group(bound, group)
        if self._vfio is VfioKind.OLD:
            return bound
        index = self.vfio_devices.take()
        life = Life(lambda: self.vfio_devices.free(index))
        node = NodeOf(f"vfio/devices/vfio{index}", DeviceNumber(self._majors.vfio_device, index))
        device = Device(
            f"{hardware.devpath}/vfio-dev/vfio{index}",
            "vfio-dev",
            parent=hardware.devpath,
            node=node if self._vfio.cdev else None,
        )
        self._make(bound, device, life)
        return bound

    def _make(self, bound: Bound, device: Device, life: Life | None) -> None:
        if life is not None:
            bound.lives.append(life)
            bound.undo.callback(life.gone)
        self._sysfs.add(device, life)
        bound.undo.callback(self._sysfs.remove, device)

    def _drm(self, bound: Bound, parent: str, makes: Makes) -> None:
        # All of its numbers stay taken until the last file is closed: one life.
        taken = contextlib.ExitStack()
        life = Life(taken.close)
        bound.lives.append(life)
        bound.undo.callback(life.gone)
        card = self._take(self.cards, taken) if makes.card else None
        if card is not None and makes.via is not None:
            # virtio-gpu up to Linux 6.1 says this before the card has a place in sysfs.
            early = Device(
                f"/card{card}", "drm", devtype="drm_minor", node=_node(f"card{card}", card)
            )
            self._sysfs.say("change", early, HOTPLUG="1")
        if makes.render:
            render = self._take(self.renders, taken)
            self._minor(bound, parent, f"renderD{render}", render, life)
        if card is None:
            return
        bound.card = self._minor(bound, parent, f"card{card}", card, life)
        bound.undo.callback(self._remove_connectors, bound)
        for kind in makes.connectors:
            self.connect(bound, Connector(kind, self._take(self.connectors[kind], taken)))
        if makes.connectors:
            self._sysfs.say("change", bound.card, HOTPLUG="1")
        if makes.framebuffer:
            self._framebuffer(bound, parent)

    def _take(self, numbers: Numbers, until: contextlib.ExitStack) -> int:
        number = numbers.take()
        until.callback(numbers.free, number)
        return number

    def _minor(self, bound: Bound, parent: str, name: str, minor: int, life: Life) -> Device:
        node = _node(name, minor)
        device = Device(
            f"{parent}/drm/{name}", "drm", parent=parent, devtype="drm_minor", node=node
        )
        self._sysfs.add(device, life)
        bound.undo.callback(self._sysfs.remove, device)
        return device

    def connect(self, bound: Bound, connector: Connector) -> None:
        """Add a connector to a card."""
        self._sysfs.add(_connector_device(bound, connector))
        bound.connectors.append(connector)

    def disconnect(self, bound: Bound) -> Connector | None:
        """Take the last connector of a card away; None if there is none."""
        if not bound.connectors:
            return None
        connector = bound.connectors.pop()
        self._sysfs.remove(_connector_device(bound, connector))
        return connector

    def _remove_connectors(self, bound: Bound) -> None:
        while self.disconnect(bound) is not None:
            pass

    def _framebuffer(self, bound: Bound, parent: str) -> None:
        number = self.framebuffers.take()
        node = NodeOf(f"fb{number}", DeviceNumber(FB_MAJOR, number))
        device = Device(f"{parent}/graphics/fb{number}", "graphics", parent=parent, node=node)
        self._make(bound, device, Life(lambda: self.framebuffers.free(number)))

    def _accel(self, bound: Bound, parent: str) -> None:
        number = self.accels.take()
        device = Device(
            f"{parent}/accel/accel{number}",
            "accel",
            parent=parent,
            devtype="accel_minor",
            node=NodeOf(f"accel/accel{number}", DeviceNumber(ACCEL_MAJOR, number)),
        )
        self._make(bound, device, Life(lambda: self.accels.free(number)))

    def _mei(self, bound: Bound, parent: str) -> None:
        number = self.meis.take()
        node = NodeOf(f"mei{number}", DeviceNumber(self._majors.mei, number))
        device = Device(f"{parent}/mei/mei{number}", "mei", parent=parent, node=node)
        self._make(bound, device, Life(lambda: self.meis.free(number)))

    def _auxiliary_mei(self, bound: Bound, hardware: Hardware, name: str) -> None:
        # Named as drivers/gpu/drm/xe/xe_heci_gsc.c does: domain, then bus and function.
        domain, bus, _ = slot_of(hardware.address).split(":")
        slot, function = hardware.address.rpartition(":")[2].split(".")
        number = int(domain, 16) << 16 | int(bus, 16) << 8 | int(slot, 16) << 3 | int(function)
        device = Device(
            f"{hardware.devpath}/{name}.{number}",
            "auxiliary",
            parent=hardware.devpath,
            on_bus=True,
            properties={"MODALIAS": f"auxiliary:{name}"},
        )
        self._make(bound, device, None)
        self._sysfs.driver_links(device, "mei_gsc")
        bound.undo.callback(self._unbound, device)
        self._mei(bound, device.devpath)
        bound.undo.callback(self._sysfs.no_driver_links, device)
        self._sysfs.say("bind", device)

    def _unbound(self, device: Device) -> None:
        self._sysfs.no_driver(device)
        self._sysfs.say("unbind", device)

    def _join_group(self, bound: Bound, group: int) -> None:
        """Make a group's node with the first function of the group; remove it with the last."""
        node = self._group_nodes.get(group)
        if node is None:
            minor = self.group_minors.take()
            device = Device(
                f"/devices/virtual/vfio/{group}",
                "vfio",
                node=NodeOf(f"vfio/{group}", DeviceNumber(self._majors.vfio, minor)),
            )
            life = Life(lambda: self.group_minors.free(minor))
            node = self._group_nodes[group] = _GroupNode(device, life)
            self._sysfs.add(device, life)
        node.users += 1
        bound.lives.append(node.life)
        bound.undo.callback(self._leave_group, group)

    def _leave_group(self, group: int) -> None:
        node = self._group_nodes[group]
        node.users -= 1
        if node.users == 0:
            del self._group_nodes[group]
            self._sysfs.remove(node.device)
            node.life.gone()


def _node(name: str, minor: int) -> NodeOf:
    return NodeOf(f"dri/{name}", DeviceNumber(DRM_MAJOR, minor))


def _connector_device(bound: Bound, connector: Connector) -> Device:
    card = bound.card
    if card is None:
        raise ValueError("only a card has connectors")
    return Device(
        f"{card.devpath}/{card.name}-{connector.kind}-{connector.number}",
        "drm",
        parent=card.devpath,
        devtype="drm_connector",
        attributes={"status": "disconnected", "enabled": "disabled"},
    )
