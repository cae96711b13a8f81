"""What a message of the kernel or of udev means: where to look, never what is there.

Pure. A message is news of a moment that has passed when it is read; what is true is read from /sys
and /dev by a look. So a message that is lost, doubled, reordered or forged costs a look, no more.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from agent.host.hints import Hint
from agent.host.model import DeviceNumber, address_in_devpath, owner_of_node

Source = Literal["kernel", "udev"]
"""``kernel``: early, ahead of permissions and links. ``udev``: late, when udev is done with it."""

SUBSYSTEMS: Final = frozenset({"accel", "drm", "kfd", "mei", "misc", "pci", "vfio", "vfio-dev"})
"""What a device's nodes and driver show in. ``misc`` has the nodes that VFIO devices share."""

ACTIONS: Final = frozenset(
    {"add", "bind", "change", "move", "offline", "online", "remove", "unbind"}
)
"""The kernel's actions (``kobject_actions`` in lib/kobject_uevent.c); others count as ``other``."""

OTHER: Final = "other"

_HAVE_ORPHANS: Final = frozenset({"accel", "drm"})

_VFIO_GROUP: Final = re.compile(r"/devices/virtual/vfio/([0-9]{1,9})")


class Message(NamedTuple):
    """What is read of a message. Equal messages are equal hints."""

    action: str
    devpath: str
    """Below /sys: ``/devices/pci0000:00/0000:03:00.0/drm/card0``."""
    subsystem: str
    node: str | None = None
    number: DeviceNumber | None = None


def hint_of(message: Message, source: Source, received: float) -> Hint:
    """Say where to look after a message.

    A function's address is in its device path, and in that of everything below it. An IOMMU
    group's node (``/devices/virtual/vfio/4``) names the group. A DRM or accel device that is
    no function's own is an orphan: a virtual card's connectors must not cost a full look each. What
    names none of them (kfd, the nodes that all VFIO devices share, the DEVPATH=/card0 that
    virtio-gpu once sent, what a future kernel sends) means everything. The action decides one
    thing only: a removal is no sign that udev has dealt with the node.
    """
    address = address_in_devpath(message.devpath)
    group = None
    if message.subsystem == "vfio" and (match := _VFIO_GROUP.fullmatch(message.devpath)):
        group = int(match[1])
    orphan = (
        message.subsystem in _HAVE_ORPHANS
        and owner_of_node(message.devpath) is None
        and message.devpath.startswith("/devices/")
    )
    return Hint(
        reason=source,
        address=address,
        group=group,
        node_path=message.node,
        node_number=message.number,
        udev_done=source == "udev" and message.node is not None and message.action != "remove",
        orphan=orphan,
        everything=address is None and group is None and not orphan,
        received=received,
    )
