"""The simulated udevd: late, separately steppable, or absent.

It answers each message of the kernel some time later, as udevd does: sets the node's permissions,
makes its links, writes its database entry, then sends the message on to its own listeners. What the
entry says is what the *message* said; by then the node may be gone or belong to another device,
which is what a slow udevd is like. It also has the driver of a new function loaded.
"""

import enum
import os
from collections import deque
from collections.abc import Callable
from typing import Final

from agent.host.model import Address, address_in_devpath
from agent.simulate.events import Emit, Source, Uevent
from agent.simulate.tree import Tree

CONTROL: Final = "/run/udev/control"
QUEUE: Final = "/run/udev/queue"

MODES: Final = {"dri/card": 0o660, "dri/renderD": 0o666, "accel/": 0o666, "kfd": 0o666}
"""Permissions by the start of the node's name, as Debian's rules set them."""


class UdevMode(enum.StrEnum):
    """When udevd deals with messages."""

    AUTO = "auto"
    """When the kernel has ended what it was doing."""
    MANUAL = "manual"
    """When it is told to (`Kernel.udev_step`): a slow udevd."""
    OFF = "off"
    """Never: there is no udevd, and no /run/udev/control."""


class Udev:
    """What udevd does with the kernel's messages.

    Args:
        tree: The host's files.
        emit: Takes its own messages.
        load: Asked to load the driver of a new function.
        mode: When it works.
    """

    def __init__(
        self, tree: Tree, emit: Emit, load: Callable[[Address], None], mode: UdevMode
    ) -> None:
        self._tree = tree
        self._emit = emit
        self._load = load
        self._waiting: deque[Uevent] = deque()
        self._usec = 0
        self.mode = UdevMode.OFF
        self.become(mode)

    def __len__(self) -> int:
        """How many messages wait."""
        return len(self._waiting)

    def become(self, mode: UdevMode) -> None:
        """Start, stop, slow down. Messages that come while it is off are lost to it."""
        self.mode = mode
        if mode is UdevMode.OFF:
            self._waiting.clear()
            self._tree.unlink(QUEUE)
            self._tree.unlink(CONTROL)
        elif not self._tree.exists(CONTROL):
            self._tree.folder("/run/udev/data")
            self._tree.file(CONTROL, "")

    def hear(self, event: Uevent) -> None:
        """Take a message of the kernel."""
        if self.mode is UdevMode.OFF:
            return
        if not self._waiting:
            self._tree.file(QUEUE, "")
        self._waiting.append(event)

    def step(self) -> bool:
        """Deal with one message; False if none waits."""
        if not self._waiting:
            return False
        event = self._waiting[0]
        if event.action == "add" and event.subsystem == "pci":
            # kmod returns when the driver's probe has ended; only then comes udev's "add pci".
            address = address_in_devpath(event.devpath)
            if address is not None:
                self._load(address)
        properties = self._remove(event) if event.action == "remove" else self._update(event)
        self._waiting.popleft()
        if not self._waiting:
            self._tree.unlink(QUEUE)
        self._emit(Uevent(Source.UDEV, event.action, event.devpath, event.subsystem, properties))
        return True

    def _update(self, event: Uevent) -> dict[str, str]:
        self._usec += 1000
        properties = dict(event.properties) | {"USEC_INITIALIZED": str(self._usec)}
        links: list[str] = []
        node = event.node
        if node is not None:
            properties["DEVNAME"] = node
            links = list(_links(event))
            if links:
                properties["DEVLINKS"] = " ".join(f"/dev/{link}" for link in links)
            self._make_node_usable(node, links)
        if (path_id := _path_id(event)) is not None:
            properties["ID_PATH"] = path_id
        entry = [f"S:{link}" for link in links]
        entry += [f"I:{self._usec}"]
        if path_id is not None:
            entry += [f"E:ID_PATH={path_id}"]
        if node is not None or path_id is not None:  # else there is nothing to remember
            self._tree.file(_entry(event), "".join(f"{line}\n" for line in [*entry, "V:1"]))
        return properties

    def _remove(self, event: Uevent) -> dict[str, str]:
        properties = dict(event.properties)
        if event.node is not None:
            properties["DEVNAME"] = event.node
            for link in _links(event):
                self._remove_link(f"/dev/{link}", event.node)
        self._tree.unlink(_entry(event))
        return properties

    def _make_node_usable(self, node: str, links: list[str]) -> None:
        name = node.removeprefix("/dev/")
        mode = next((mode for start, mode in MODES.items() if name.startswith(start)), None)
        try:
            if mode is not None:
                os.chmod(self._tree.real(node), mode)
        except FileNotFoundError:
            return  # gone since: udevd makes no links to what is not there
        if not self._tree.exists(node):
            return
        for link in links:
            self._tree.link(f"/dev/{link}", node)

    def _remove_link(self, link: str, node: str) -> None:
        if not self._tree.exists(link):
            return
        leads = os.readlink(self._tree.real(link))
        if os.path.normpath(os.path.join(os.path.dirname(link), leads)) != node:
            return  # another device has claimed the name since
        self._tree.unlink(link)
        self._tree.prune(os.path.dirname(link), stop="/dev")


def _entry(event: Uevent) -> str:
    """Where udev's database keeps a device."""
    if "MAJOR" in event.properties:
        number = f"{event.properties['MAJOR']}:{event.properties['MINOR']}"
        return f"/run/udev/data/c{number}"
    return f"/run/udev/data/+{event.subsystem}:{os.path.basename(event.devpath)}"


def _path_id(event: Uevent) -> str | None:
    """Where a device hangs, as udev's ``path_id`` names it; virtual devices hang nowhere."""
    if (address := address_in_devpath(event.devpath)) is not None:
        return f"pci-{address}"
    parts = event.devpath.split("/")
    return f"platform-{parts[3]}" if parts[2:3] == ["platform"] else None


def _links(event: Uevent) -> tuple[str, ...]:
    """The links below /dev that Debian's rules make for a node."""
    path_id = _path_id(event)
    name = os.path.basename(event.devpath)
    if event.subsystem != "drm" or path_id is None:
        return ()
    kind = "card" if name.startswith("card") else "render"
    return (f"dri/by-path/{path_id}-{kind}",)
