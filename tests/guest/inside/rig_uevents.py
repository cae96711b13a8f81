#!/usr/bin/python3
r"""Record uevents, the kernel's own and udev's, as JSON lines with the time each arrived.

    rig-uevents FILE [SUBSYSTEM...]        until SIGTERM; all subsystems if none is named

The first line is {"ready": <monotonic seconds>}. Each other line has `t` (CLOCK_MONOTONIC),
`from` ("kernel" or "udev"), `action`, `devpath` and the message's properties.

Reads the netlink socket itself, so that what it says does not depend on libudev:
  kernel    "ACTION@DEVPATH\0" and then "KEY=VALUE\0" each (lib/kobject_uevent.c)
  udev      a header "libudev\0", 0xfeedcafe, header size, properties' offset and length ..., and
            then the same properties (systemd, src/libsystemd/sd-device/device-monitor.c)
"""

import json
import os
import select
import signal
import socket
import struct
import sys
import time

NETLINK_KOBJECT_UEVENT = 15
SO_RCVBUFFORCE = 33
GROUPS = {"kernel": 1, "udev": 2}
UDEV_PREFIX = b"libudev\0"


def subscribe(group: int) -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_KOBJECT_UEVENT)
    sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    sock.bind((0, group))
    return sock


def properties(message: bytes) -> dict[str, str]:
    if message.startswith(UDEV_PREFIX):
        offset, length = struct.unpack_from("=II", message, 16)
        body = message[offset : offset + length]
    else:
        body = message.partition(b"\0")[2]
    pairs = (item.partition(b"=") for item in body.split(b"\0") if item)
    return {key.decode(): value.decode("utf-8", "replace") for key, _, value in pairs}


def notify_ready() -> None:
    """Tell systemd that the sockets listen, if it asked to be told."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"READY=1", address.replace("@", "\0", 1))


def main() -> None:
    path, *wanted = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sources = {subscribe(group): name for name, group in GROUPS.items()}
    poll = select.poll()
    by_fd = {sock.fileno(): sock for sock in sources}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    with open(path, "w", buffering=1) as file:
        print(json.dumps({"ready": time.monotonic()}), file=file)
        notify_ready()
        while True:
            for fd, _ in poll.poll():
                message = by_fd[fd].recv(1 << 16)
                now = time.monotonic()
                found = properties(message)
                if wanted and found.get("SUBSYSTEM") not in wanted:
                    continue
                line = {
                    "t": round(now, 6),
                    "from": sources[by_fd[fd]],
                    "action": found.pop("ACTION", ""),
                    "devpath": found.pop("DEVPATH", ""),
                    "properties": found,
                }
                print(json.dumps(line), file=file)


if __name__ == "__main__":
    main()
