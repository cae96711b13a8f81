"""What the simulated kernel and the simulated udevd say, message by message.

A `Uevent` holds what libudev would hand to a listener; a test can send it over real netlink
(`Uevent.payload`), the demo turns it into a hint (`hint_of`). Nothing here keeps state.
"""

import enum
import os
from collections.abc import Callable, Mapping

import msgspec

from agent.host import uevent
from agent.host.hints import Hint
from agent.host.model import DeviceNumber


class Source(enum.StrEnum):
    """Who speaks: the kernel at once, udevd when it has dealt with the device."""

    KERNEL = "kernel"
    UDEV = "udev"


class Uevent(msgspec.Struct, frozen=True):
    """One message about a device."""

    source: Source
    action: str
    """``add``, ``remove``, ``bind``, ``unbind``, ``change``."""
    devpath: str
    """Below /sys: ``/devices/pci0000:00/0000:03:00.0/drm/card0``."""
    subsystem: str
    properties: Mapping[str, str] = msgspec.field(default_factory=dict)
    """What else it says: MAJOR, MINOR, DEVNAME, DEVTYPE, DRIVER, PCI_SLOT_NAME, …

    As the source writes them: DEVNAME is ``dri/card0`` from the kernel and ``/dev/dri/card0`` from
    udevd; an ``unbind`` has neither DRIVER nor MODALIAS. The sender appends SEQNUM.
    """

    @property
    def payload(self) -> dict[str, str]:
        """The whole message as keys and values, in the order in which they are sent."""
        head = {"ACTION": self.action, "DEVPATH": self.devpath, "SUBSYSTEM": self.subsystem}
        return head | dict(self.properties)

    @property
    def node(self) -> str | None:
        """The path of the node that it is about, whoever speaks."""
        name = self.properties.get("DEVNAME")
        return None if name is None else os.path.join("/dev", name)

    @property
    def number(self) -> DeviceNumber | None:
        """The number of that node."""
        if "MAJOR" not in self.properties:
            return None
        return DeviceNumber(int(self.properties["MAJOR"]), int(self.properties["MINOR"]))

    def __str__(self) -> str:
        """``kernel add drm card0``: what a person compares."""
        return f"{self.source} {self.action} {self.subsystem} {os.path.basename(self.devpath)}"


Emit = Callable[[Uevent], None]
"""Takes each message, in the thread that changes the host and in the middle of the change.

It may read the tree (it then sees what a listener can see at that moment), must return soon, and
may not call the kernel.
"""


def hint_of(event: Uevent, received: float) -> Hint:
    """Say where to look after a message, as the monitor does.

    Args:
        event: The message.
        received: Monotonic time in seconds at which it was received.
    """
    message = uevent.Message(event.action, event.devpath, event.subsystem, event.node, event.number)
    return uevent.hint_of(message, event.source.value, received)
