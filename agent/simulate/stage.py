"""Where a scenario is played: what can be done to a host, in words that a real one obeys too.

`Stage` has the verbs. `SimulatedStage` does them to a simulated host; a driver of a virtual machine
can do the same by writes to sysfs, modprobe and hot-plugging, for no verb needs more than that
(but for udevd's slowness, which a real udevd shows when it is stopped and continued).
Functions have names of the scenario's (``gpu``, ``other``); the stage knows their addresses.
"""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from agent.host.model import Address, NodeRole
from agent.simulate import host
from agent.simulate.hardware import Hardware
from agent.simulate.kernel import Kernel
from agent.simulate.processes import Hold
from agent.simulate.udev import UdevMode


class Part(enum.StrEnum):
    """What a name in a scenario stands for."""

    GPU = "gpu"
    """A GPU with a card and a render node, in a slot and an IOMMU group of its own."""
    TWINS = "twins"
    """A GPU that shares its group with another function, named ``<name>'s twin``."""
    CHIP = "chip"
    """The display chip of a management controller: a card and no render node."""
    NETWORK = "network"
    """A network card."""


class Driver(enum.StrEnum):
    """Which driver a function has."""

    OWN = "own"
    VFIO = "vfio"


def twin_of(name: str) -> str:
    """What the other function in the group of a `Part.TWINS` is called."""
    return f"{name}'s twin"


def vf_of(name: str, index: int) -> str:
    """What a VF of a function is called."""
    return f"{name}'s VF {index}"


class Stage(Protocol):
    """A host on which a scenario can be played. Every verb returns when it is done.

    What the host refuses is an OSError, but for what may be refused: see each verb.
    """

    def plug(self, names: Sequence[str]) -> None:
        """Plug functions in, together."""

    def unplug(self, names: Sequence[str]) -> None:
        """Pull them out."""

    def remove(self, name: str) -> None:
        """Tell the kernel to forget a function."""

    def rescan(self) -> None:
        """Tell it to look for functions."""

    def move(self, name: str, driver: Driver) -> None:
        """Give a function to another driver, as people do it: override, unbind, probe."""

    def unbind(self, name: str) -> None:
        """Take its driver away."""

    def bind(self, name: str) -> None:
        """Give it its own driver back."""

    def unload(self, name: str) -> None:
        """Unload the module of a function's own driver, from all functions that it drives."""

    def load(self, name: str) -> None:
        """Load it."""

    def hold(self, name: str, role: NodeRole) -> None:
        """Let a process open a node of a function."""

    def let_go(self) -> None:
        """End all such processes."""

    def storm(self, name: str, times: int) -> None:
        """Let a card's connectors come and go."""

    def lose(self, name: str, role: NodeRole) -> None:
        """Remove a node from /dev behind everybody's back."""

    def restore(self, name: str) -> None:
        """Make the nodes again that were lost."""

    def trigger(self, name: str) -> None:
        """Repeat the messages about a function's nodes (``udevadm trigger``)."""

    def create_vfs(self, name: str, count: int) -> None:
        """Let a function have VFs, or none."""

    def udev(self, mode: UdevMode) -> None:
        """Stop udevd, slow it down until `udev_catches_up`, or let it work as usual."""

    def udev_catches_up(self) -> None:
        """Let a slow udevd deal with all that waits."""


class SimulatedStage:
    """A simulated host as a stage.

    Args:
        kernel: The host.
        parts: What the scenario's names stand for.
    """

    def __init__(self, kernel: Kernel, parts: Mapping[str, Part]) -> None:
        self.kernel: Final = kernel
        self.hardware: Final[dict[str, Hardware]] = dict(_hardware(parts))
        self._holds: list[Hold] = []
        self._lost: dict[str, list[str]] = {}

    def address(self, name: str) -> Address:
        """The address of a function."""
        return self.hardware[name].address

    @property
    def names(self) -> Mapping[Address, str]:
        """The names of all functions that the scenario can speak of, by address."""
        return {one.address: name for name, one in self.hardware.items()} | {
            one.virtual_function(index).address: vf_of(name, index)
            for name, one in self.hardware.items()
            for index in range(one.total_vfs)
        }

    def start(self, names: Sequence[str]) -> None:
        """Plug in what is there when the host boots."""
        with self.kernel.boot() as machine:
            machine.plug(self.hardware[name] for name in names)

    def plug(self, names: Sequence[str]) -> None:
        """Plug functions in, together."""
        self.kernel.plug(*(self.hardware[name] for name in names))

    def unplug(self, names: Sequence[str]) -> None:
        """Pull them out."""
        self.kernel.unplug(*(self.address(name) for name in names))

    def remove(self, name: str) -> None:
        """Tell the kernel to forget a function."""
        self._write(self._of(name, "remove"), "1")

    def rescan(self) -> None:
        """Tell it to look for functions."""
        self._write("/sys/bus/pci/rescan", "1")

    def move(self, name: str, driver: Driver) -> None:
        """Give a function to another driver, as people do it: override, unbind, probe."""
        wanted = self._own(name) if driver is Driver.OWN else "vfio-pci"
        _check(self.kernel.move(self.address(name), wanted))

    def unbind(self, name: str) -> None:
        """Take its driver away."""
        _check(self.kernel.unbind(self.address(name)))

    def bind(self, name: str) -> None:
        """Give it its own driver back."""
        _check(self.kernel.bind(self.address(name), self._own(name)))

    def unload(self, name: str) -> None:
        """Unload the module of a function's own driver."""
        _check(self.kernel.rmmod(self._own(name)))

    def load(self, name: str) -> None:
        """Load it."""
        _check(self.kernel.modprobe(self._own(name)))

    def hold(self, name: str, role: NodeRole) -> None:
        """Let a process open a node of a function."""
        self._holds.append(self.kernel.hold(self._node(name, role)))

    def let_go(self) -> None:
        """End all such processes."""
        while self._holds:
            self._holds.pop().release()

    def storm(self, name: str, times: int) -> None:
        """Let a card's connectors come and go."""
        self.kernel.storm(self.address(name), times)

    def lose(self, name: str, role: NodeRole) -> None:
        """Remove a node from /dev behind everybody's back."""
        path = self._node(name, role)
        self.kernel.lose(path)
        self._lost.setdefault(name, []).append(path)

    def restore(self, name: str) -> None:
        """Make the nodes again that were lost."""
        for path in self._lost.pop(name, ()):
            self.kernel.restore(path)

    def trigger(self, name: str) -> None:
        """Repeat the messages about a function's nodes."""
        self.kernel.trigger(self.address(name))

    def create_vfs(self, name: str, count: int) -> None:
        """Let a function have VFs, or none."""
        self._write(self._of(name, "sriov_numvfs"), str(count))

    def udev(self, mode: UdevMode) -> None:
        """Stop udevd, slow it down, or let it work as usual."""
        self.kernel.udev = mode

    def udev_catches_up(self) -> None:
        """Let a slow udevd deal with all that waits."""
        self.kernel.udev_settle()

    def _own(self, name: str) -> str:
        return self.hardware[name].drivers[0]

    def _of(self, name: str, attribute: str) -> str:
        return f"/sys/bus/pci/devices/{self.address(name)}/{attribute}"

    def _node(self, name: str, role: NodeRole) -> str:
        start = _STARTS[role]
        for path in self.kernel.node_paths(self.address(name)):
            if path.startswith(start):
                return path
        raise FileNotFoundError(f"{name} has no node {start}N")

    def _write(self, path: str, text: str) -> None:
        _check(self.kernel.write(path, text))


_STARTS: Final = {
    NodeRole.CARD: "/dev/dri/card",
    NodeRole.RENDER: "/dev/dri/renderD",
    NodeRole.ACCEL: "/dev/accel/accel",
    NodeRole.MEI: "/dev/mei",
    NodeRole.VFIO_GROUP: "/dev/vfio/",
    NodeRole.VFIO_CDEV: "/dev/vfio/devices/vfio",
}


def _check(error: int) -> None:
    if error:
        raise OSError(error, "the kernel refuses it")


def _hardware(parts: Mapping[str, Part]) -> Iterator[tuple[str, Hardware]]:
    """Different hardware for each name, each in a slot of its own."""
    bus = 3
    for name, part in parts.items():
        one, *others = _SHAPES[part](f"0000:{bus:02x}:00.0")
        yield name, one
        for other in others:
            yield twin_of(name), other
        bus += 4


_SHAPES: Final[Mapping[Part, Callable[[str], tuple[Hardware, ...]]]] = {
    Part.GPU: host.arc_b50,
    Part.TWINS: host.arc_with_audio,
    Part.CHIP: host.bmc,
    Part.NETWORK: host.network_card,
}
