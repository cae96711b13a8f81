"""Device events over real netlink, as the kernel and udevd send them. Needs root.

Two multicast groups, two ways in. libudev drops messages of the kernel's group (1) that come from
user space, so `KernelSender` has the kernel itself broadcast: it sends a netlink message to port 0,
and `uevent_net_rcv` of lib/kobject_uevent.c passes it on to the listeners of this namespace, with a
SEQNUM of its own. `UdevSender` multicasts to group 2 with the header that libudev and its socket
filter read: `struct monitor_netlink_header` of systemd's device-monitor.c.
"""

import functools
import itertools
import socket
import struct
from collections.abc import Mapping
from typing import Final

Properties = Mapping[str, str]

_KOBJECT_UEVENT: Final = 15  # NETLINK_KOBJECT_UEVENT
_UDEV_GROUP: Final = 2
_UDEV_MAGIC: Final = 0xFEEDCAFE
_REQUEST: Final = 1  # NLM_F_REQUEST
_FIRST_FREE_TYPE: Final = 16  # NLMSG_MIN_TYPE: below are netlink's own
_HEADER_LENGTH: Final = 40


def _socket() -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _KOBJECT_UEVENT)


def body(properties: Properties) -> bytes:
    """The part of a message that both senders have: each property with a NUL behind it."""
    return b"".join(
        f"{key}={value}".encode(errors="surrogateescape") + b"\0"
        for key, value in properties.items()
    )


@functools.cache
def hash_of(text: str) -> int:
    """MurmurHash2 with seed 0: how libudev's filter compares a subsystem or a device type."""
    mask, factor = 0xFFFFFFFF, 0x5BD1E995
    data = text.encode()
    value = len(data)
    whole = len(data) // 4 * 4
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        mixed = word * factor & mask
        mixed = (mixed ^ mixed >> 24) * factor & mask
        value = value * factor & mask ^ mixed
    if rest := data[whole:]:
        value = (value ^ int.from_bytes(rest, "little")) * factor & mask
    value = (value ^ value >> 13) * factor & mask
    return value ^ value >> 15


class KernelSender:
    """Makes the kernel broadcast."""

    def __init__(self) -> None:
        self._socket = _socket()

    def send(self, properties: Properties) -> None:
        """Broadcast one event; it needs ACTION, DEVPATH and SUBSYSTEM."""
        head = f"{properties['ACTION']}@{properties['DEVPATH']}".encode() + b"\0"
        self.send_raw(head + body(properties))

    def send_raw(self, payload: bytes) -> None:
        """Broadcast any bytes; the kernel looks at none of them."""
        length = 16 + len(payload)
        header = struct.pack("=IHHII", length, _FIRST_FREE_TYPE, _REQUEST, 0, 0)
        self._socket.sendto(header + payload, (0, 0))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class UdevSender:
    """Multicasts as udevd does."""

    def __init__(self) -> None:
        self._socket = _socket()
        self._sequence = itertools.count(1)

    def send(self, properties: Properties) -> None:
        """Multicast one event; it needs ACTION, DEVPATH and SUBSYSTEM."""
        self.send_raw(
            body({**properties, "SEQNUM": str(next(self._sequence))}),
            properties["SUBSYSTEM"],
            properties.get("DEVTYPE"),
        )

    def send_raw(self, payload: bytes, subsystem: str, devtype: str | None = None) -> None:
        """Multicast any bytes behind a sound header, which passes libudev's filter."""
        header = struct.pack(">8sI", b"libudev\0", _UDEV_MAGIC) + struct.pack(
            "=III", _HEADER_LENGTH, _HEADER_LENGTH, len(payload)
        )
        header += struct.pack(">IIII", hash_of(subsystem), hash_of(devtype) if devtype else 0, 0, 0)
        self._socket.sendto(header + payload, (0, _UDEV_GROUP))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
