"""Devices in sysfs: how the driver core makes one and takes it away, step by step.

`Sysfs.add` and `Sysfs.remove` follow ``device_add`` and ``device_del`` of drivers/base/core.c; the
order of their steps is what a reader can meet, and the reason for this module:

- A device appears folder first, then its ``dev`` attribute, its link in /sys/dev/char, its node in
  /dev; then the message ``add``.
- It goes node first, then /sys/dev/char, ``dev``, the links of its class; then the message
  ``remove``; then the folder. So when that message comes, the folder may still be there.

Numbers are the lowest that are free. One whose node a process still holds open stays taken after
its device has gone (`Numbers`, `Life`).
"""

import itertools
import os
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from agent.host.model import DeviceNumber
from agent.simulate.events import Emit, Source, Uevent
from agent.simulate.nodes import MakeNode
from agent.simulate.tree import Tree


class NodeOf(msgspec.Struct, frozen=True):
    """The node that devtmpfs makes for a device."""

    name: str
    """Below /dev: ``dri/card0``."""
    number: DeviceNumber
    mode: int = 0o600

    @property
    def path(self) -> str:
        """On the host: ``/dev/dri/card0``."""
        return f"/dev/{self.name}"


class Device(msgspec.Struct, frozen=True):
    """A device that has a folder in sysfs."""

    devpath: str
    subsystem: str
    parent: str | None = None
    """The device path of the device that it hangs from; None for a virtual one."""
    on_bus: bool = False
    """Its subsystem is a bus, not a class."""
    devtype: str | None = None
    node: NodeOf | None = None
    attributes: Mapping[str, str] = msgspec.field(default_factory=dict)
    """What its files hold, without the newline."""
    properties: Mapping[str, str] = msgspec.field(default_factory=dict)
    """What its messages say beyond what every device's say."""

    @property
    def name(self) -> str:
        """``card0``."""
        return os.path.basename(self.devpath)


class Numbers:
    """One space of numbers, of which the lowest free one is given out.

    Args:
        first: The lowest.
        last: The highest; None if there is no end to them.
        beyond: Where numbers come from when there are no more.
    """

    def __init__(
        self, first: int = 0, last: int | None = None, beyond: "Numbers | None" = None
    ) -> None:
        self._first = first
        self._last = last
        self._beyond = beyond
        self._taken: set[int] = set()
        self._wanted: list[int] = []

    def take(self) -> int:
        """The lowest free number, unless the next one was asked for."""
        if self._wanted and self._wanted[0] not in self._taken:
            number = self._wanted.pop(0)
        else:
            number = next(n for n in itertools.count(self._first) if n not in self._taken)
            if self._beyond is not None and self._last is not None and number > self._last:
                return self._beyond.take()
        self._taken.add(number)
        return number

    def want(self, *numbers: int) -> None:
        """Ask for the numbers that are taken next; those that are taken by then are not given."""
        self._wanted = list(numbers)

    def free(self, number: int) -> None:
        """Give it back."""
        self._taken.discard(number)
        if self._beyond is not None:
            self._beyond.free(number)


class Life:
    """How long numbers stay taken: until their devices are gone *and* nobody holds a node of them.

    Args:
        end: Gives the numbers back.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._gone = False
        self.holders = 0

    def gone(self) -> None:
        """The devices are gone."""
        self._gone = True
        self._check()

    def hold(self) -> None:
        """A process opened one of the nodes."""
        self.holders += 1

    def release(self) -> None:
        """A process closed it."""
        self.holders -= 1
        self._check()

    def _check(self) -> None:
        if self._gone and self.holders == 0:
            self._end()


class Sysfs:
    """The devices that are there, and the messages about them.

    Args:
        tree: Their files.
        make_node: Makes the nodes below /dev.
        send: Takes the kernel's messages.
    """

    def __init__(self, tree: Tree, make_node: MakeNode, send: Emit) -> None:
        self.tree: Final = tree
        self._make_node = make_node
        self._send = send
        self._drivers: dict[str, str] = {}
        self.devices: Final[dict[str, Device]] = {}
        """By device path."""
        self.lives: Final[dict[str, Life]] = {}
        """By the node's path: what holds its numbers."""

    def add(self, device: Device, life: Life | None = None) -> None:
        """Add a device, its node and its links, and say so."""
        self.appear(device)
        if device.node is not None:
            self._add_node(device, device.node)
            if life is not None:
                self.lives[device.node.path] = life
        self.say("add", device)

    def appear(self, device: Device) -> None:
        """The first half of `add`: the folder with what is in it, and its links; no message."""
        tree, place = self.tree, f"/sys{device.devpath}"
        self.devices[device.devpath] = device
        tree.folder(place)
        self.write_uevent(device)
        subsystem = f"/sys/{'bus' if device.on_bus else 'class'}/{device.subsystem}"
        tree.folder(subsystem)
        tree.link(f"{place}/subsystem", subsystem)
        if not device.on_bus:
            tree.link(f"{subsystem}/{device.name}", place)
            if device.parent is not None:
                tree.link(f"{place}/device", f"/sys{device.parent}")
        for name, value in device.attributes.items():
            tree.file(f"{place}/{name}", f"{value}\n")
        if device.on_bus:
            tree.link(f"{subsystem}/devices/{device.name}", place)

    def remove(self, device: Device) -> None:
        """Take a device away, node first and folder last, and say so between."""
        tree, place = self.tree, f"/sys{device.devpath}"
        if device.node is not None:
            self._remove_node(device, device.node)
        subsystem = f"/sys/{'bus' if device.on_bus else 'class'}/{device.subsystem}"
        tree.unlink(f"{subsystem}/{'devices/' if device.on_bus else ''}{device.name}")
        tree.unlink(f"{place}/subsystem")
        tree.unlink(f"{place}/uevent")
        self.say("remove", device)
        del self.devices[device.devpath]
        tree.remove(place, keep_inode=device.on_bus)
        # The folder between a class device and its parent (``drm/``) goes with the last in it.
        if device.parent is not None and not device.on_bus:
            tree.prune(os.path.dirname(place), stop=f"/sys{device.parent}")

    def say(self, action: str, device: Device, **more: str) -> None:
        """Send a message about a device."""
        properties = self.properties(device) | more
        if action == "unbind":
            properties.pop("MODALIAS", None)  # zap_modalias_env in lib/kobject_uevent.c
        self._send(Uevent(Source.KERNEL, action, device.devpath, device.subsystem, properties))

    def tell(self, action: str, devpath: str, subsystem: str) -> None:
        """Send a message about what is no device: a module, a driver."""
        self._send(Uevent(Source.KERNEL, action, devpath, subsystem))

    def properties(self, device: Device) -> dict[str, str]:
        """What each message about it says now, and its ``uevent`` file."""
        says: dict[str, str] = {}
        if device.node is not None:
            major, minor = device.node.number
            says |= {"MAJOR": str(major), "MINOR": str(minor), "DEVNAME": device.node.name}
        if device.devtype is not None:
            says["DEVTYPE"] = device.devtype
        if (driver := self._drivers.get(device.devpath)) is not None:
            says["DRIVER"] = driver
        return says | dict(device.properties)

    def write_uevent(self, device: Device) -> None:
        """Write its ``uevent`` file as it is now."""
        lines = (f"{key}={value}\n" for key, value in self.properties(device).items())
        self.tree.file(f"/sys{device.devpath}/uevent", "".join(lines))

    def driver_links(self, device: Device, driver: str) -> None:
        """Before a driver's probe: the links between it and the device."""
        folder = f"/sys/bus/{device.subsystem}/drivers/{driver}"
        self._drivers[device.devpath] = driver
        self.write_uevent(device)
        self.tree.link(f"{folder}/{device.name}", f"/sys{device.devpath}")
        self.tree.link(f"/sys{device.devpath}/driver", folder)

    def no_driver_links(self, device: Device) -> None:
        """Before a driver's removal, and after a failed probe: the links go."""
        driver = self._drivers[device.devpath]
        self.tree.unlink(f"/sys/bus/{device.subsystem}/drivers/{driver}/{device.name}")
        self.tree.unlink(f"/sys{device.devpath}/driver")

    def no_driver(self, device: Device) -> None:
        """After a driver's removal: the device has none."""
        del self._drivers[device.devpath]
        self.write_uevent(device)

    def lose_node(self, node: NodeOf) -> None:
        """Take a node from /dev; devtmpfs takes the folders that it made, once they are empty."""
        self.tree.unlink(node.path)
        self.tree.prune(os.path.dirname(node.path), stop="/dev")

    def make_node(self, node: NodeOf) -> None:
        """Make a node in /dev."""
        self.tree.folder(os.path.dirname(node.path))
        self._make_node(self.tree.real(node.path), node.number, node.mode)
        self.tree.announce()

    def _add_node(self, device: Device, node: NodeOf) -> None:
        self.tree.file(f"/sys{device.devpath}/dev", f"{node.number}\n")
        self.tree.link(f"/sys/dev/char/{node.number}", f"/sys{device.devpath}")
        self.make_node(node)

    def _remove_node(self, device: Device, node: NodeOf) -> None:
        self.lose_node(node)
        self.tree.unlink(f"/sys/dev/char/{node.number}")
        self.tree.unlink(f"/sys{device.devpath}/dev")
        self.lives.pop(node.path, None)
