"""A guest as a stage: the scenario files of the simulated host, acted out on a real kernel.

Each verb is what a person would do: writes to sysfs, modprobe, systemctl, hot-plugging. Who plays a
GPU depends on what is asked of it, because QEMU's only GPU with a render node cannot be plugged:

    frozen in     every GPU is there at the start: virtio-gpu, with card and render node
    plugged       GPUs come and go, or are beside other hardware: QEMU's display, with a card alone

Agents are judged by what is published under the played function's own kind and its VFIO kind.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from agent.host.model import NodeRole
from agent.simulate.scenario import Act, Expectation, Kind, Published, Scenario
from agent.simulate.stage import Driver, Part, twin_of
from agent.simulate.udev import UdevMode
from tests.guest.observers import DISPLAY, VIRTIO_GPU, Agreed, DisagreeError, Observers
from tests.guest.rig import Guest
from tests.guest.topology import MANY_GPUS, NO_GPU, ONE_GPU, PORTS, Topology, slot

UDEVD: Final = "systemd-udevd-kernel.socket systemd-udevd-control.socket systemd-udevd.service"


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A kind of hardware that QEMU has."""

    plugged_as: str
    """QEMU's name of it."""
    device_id: str
    driver: str
    """Of the PCI function."""
    module: str
    """The one that makes the nodes."""
    kind: str = ""
    """Under which it is published; empty if it is none of ours."""


GPU: Final = Model("virtio-gpu-pci", "1050", "virtio-pci", "virtio_gpu", VIRTIO_GPU)
CARD: Final = Model("secondary-vga", "1111", "bochs-drm", "bochs", DISPLAY)
NETWORK: Final = Model("virtio-net-pci", "1041", "virtio-pci", "virtio_net")
NEIGHBOUR: Final = Model("virtio-rng-pci", "1044", "virtio-pci", "virtio_rng")
"""What shares a group with a GPU and is none: it has a driver that it can leave."""


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """Who plays a name of the scenario."""

    model: Model
    address: str

    @property
    def path(self) -> str:
        return f"/sys/bus/pci/devices/{self.address}"

    @property
    def device(self) -> str:
        """What it is called in a spec."""
        address = self.address.replace(":", "-").replace(".", "-")
        return f"{address}-0x{self.model.device_id}"


Cast = Mapping[str, Function]


def cannot(scenario: Scenario) -> str:
    """Why no guest can play a scenario; empty if one can."""
    if any(isinstance(step, Act) and step.text.startswith("vfs ") for step in scenario.steps):
        return "QEMU has no display with virtual functions"
    if Part.CHIP in scenario.parts.values():
        return "QEMU has no second display that can be plugged: test_agent has this story"
    return ""


def cast(scenario: Scenario, *, plugged: bool = False) -> tuple[Topology, Cast]:
    """The machine on which to play, and who plays whom.

    Args:
        scenario: What is to be played.
        plugged: Plug the GPUs in though they need not be.
    """
    parts = scenario.parts
    only_gpus = set(parts.values()) == {Part.GPU}
    if only_gpus and set(scenario.start) == set(parts) and not plugged:
        topology = ONE_GPU if len(parts) == 1 else MANY_GPUS
        return topology, {name: Function(GPU, f"{slot(n)}.0") for n, name in enumerate(parts)}
    players: dict[str, Function] = {}
    for port, (name, part) in enumerate(parts.items()):
        model = NETWORK if part is Part.NETWORK else CARD
        players[name] = Function(model, f"{slot(port)}.0")
        if part is Part.TWINS:
            players[twin_of(name)] = Function(NEIGHBOUR, f"{slot(port)}.1")
    assert len(parts) <= PORTS
    return NO_GPU, players


def find_node(function: Function, role: NodeRole) -> str:
    """The arguments of find(1) for the sysfs entry of a node; connectors are card0-Virtual-1."""
    prefix = {NodeRole.CARD: "card", NodeRole.RENDER: "renderD"}[role]
    return f"{function.path}/ -path '*/drm/{prefix}*' -name '{prefix}*' ! -name '*-*'"


class GuestStage:
    """A guest as a `Stage`.

    Args:
        guest: Resumed with the topology that `cast` chose.
        cast: Who plays whom.
    """

    def __init__(self, guest: Guest, cast: Cast) -> None:
        self.guest: Final = guest
        self.cast: Final = cast
        self.udev_mode = UdevMode.AUTO
        self._waiting: list[str] | None = None

    def start(self, scenario: Scenario) -> None:
        """Make the host what it is when the scenario begins."""
        there = self.guest.sh("ls /sys/bus/pci/devices").out.split()
        self.plug([name for name in scenario.start if self.cast[name].address not in there])
        if scenario.udev is not UdevMode.AUTO:
            self.udev(scenario.udev)

    def plug(self, names: Sequence[str]) -> None:
        # A slot is seen when its function 0 comes, so that comes last.
        for name in sorted(names, key=lambda name: self.cast[name].address, reverse=True):
            one = self.cast[name]
            bus, function = int(one.address[5:7], 16) - 1, one.address[-1]
            shared = any(o.address[:-1] == one.address[:-1] for o in self._others(name))
            properties = {"bus": f"rp{bus}", "addr": f"0.{function}"}
            if shared:
                properties["multifunction"] = "on"
            self.guest.plug(one.model.plugged_as, _id(one), **properties)
        for name in names:
            # Its driver is loaded by udevd, unless it was loaded before.
            self.guest.wait_until(f"test -e {self.cast[name].path}/driver")
        self._settle()

    def unplug(self, names: Sequence[str]) -> None:
        for name in names:
            one = self.cast[name]
            if one.address.endswith(".0"):  # the slot's others go with it
                self.guest.unplug(_id(one))

    def remove(self, name: str) -> None:
        self.run(f"echo 1 >{self.cast[name].path}/remove")

    def rescan(self) -> None:
        self.run("echo 1 >/sys/bus/pci/rescan")

    def move(self, name: str, driver: Driver) -> None:
        one = self.cast[name]
        override = "vfio-pci" if driver is Driver.VFIO else ""
        wanted = override or one.model.driver
        self.run(
            "test -d /sys/bus/pci/drivers/vfio-pci || modprobe vfio-pci",
            f"echo {override} >{one.path}/driver_override",
            f"if test -e {one.path}/driver; then echo {one.address} >{one.path}/driver/unbind; fi",
            f"echo {one.address} >/sys/bus/pci/drivers_probe",
            f"test {one.path}/driver -ef /sys/bus/pci/drivers/{wanted}",
        )

    def unbind(self, name: str) -> None:
        one = self.cast[name]
        self.run(f"echo {one.address} >{one.path}/driver/unbind")

    def bind(self, name: str) -> None:
        one = self.cast[name]
        self.run(f"echo {one.address} >/sys/bus/pci/drivers/{one.model.driver}/bind")

    def unload(self, name: str) -> None:
        self.run(f"modprobe -r {self.cast[name].model.module}")

    def load(self, name: str) -> None:
        self.run(f"modprobe {self.cast[name].model.module}")

    def hold(self, name: str, role: NodeRole) -> None:
        node = self._node(name, role)
        sleep = "sleep infinity </dev/null >/dev/null 2>&1 & echo $! >>/run/holders"
        self.run(f"exec 3<{node}", sleep)

    def let_go(self) -> None:
        # Dead is not enough: what it held is closed when its process is gone.
        self.run(
            "for pid in $(cat /run/holders); do kill $pid",
            "while kill -0 $pid 2>/dev/null; do sleep 0.02; done; done",
            "rm /run/holders",
        )

    def storm(self, name: str, times: int) -> None:
        card = f"/sys/class/drm/{self._node(name, NodeRole.CARD).rpartition('/')[2]}"
        self.run(f"for i in $(seq {times}); do echo change >{card}/uevent; done")

    def lose(self, name: str, role: NodeRole) -> None:
        node = self._node(name, role)
        self.run(f"stat -c '%n c %Hr %Lr' {node} >>/run/lost.{name}", f"rm {node}")

    def restore(self, name: str) -> None:
        lost = f"/run/lost.{name}"
        self.run(f"while read node; do mknod $node; done <{lost}", f"rm {lost}")

    def trigger(self, name: str) -> None:
        path = self.cast[name].path
        group = f"/sys/class/vfio/$(basename $(readlink {path}/iommu_group))/uevent"
        nodes = f"$(find {path}/ -path '*/drm/*/uevent') {group} /sys/class/misc/vfio/uevent"
        self.run(f"for each in {nodes}; do test ! -e $each || echo change >$each; done")
        self._settle()

    def create_vfs(self, name: str, count: int) -> None:
        raise NotImplementedError(f"no {count} VFs for {name}: see `cannot`")

    def udev(self, mode: UdevMode) -> None:
        match mode:
            case UdevMode.OFF:
                self.run(f"systemctl stop {UDEVD}")
            case UdevMode.MANUAL:
                self.run("systemctl kill --signal=STOP systemd-udevd.service")
            case UdevMode.AUTO:
                self.run(f"systemctl start {UDEVD}", "udevadm settle")
        self.udev_mode = mode

    def udev_catches_up(self) -> None:
        kill = "systemctl kill --signal={} systemd-udevd.service"
        self.run(kill.format("CONT"), "udevadm settle", kill.format("STOP"))

    def _others(self, name: str) -> list[Function]:
        return [function for other, function in self.cast.items() if other != name]

    def _settle(self) -> None:
        if self.udev_mode is UdevMode.AUTO:
            self.run("udevadm settle")

    def _node(self, name: str, role: NodeRole) -> str:
        """The node of a function in /dev."""
        found = self.guest.sh(f"find {find_node(self.cast[name], role)}").out
        (entry,) = found.split()
        return f"/dev/dri/{entry.rpartition('/')[2]}"

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Do what is done in here by one command, so that no verb waits for the one before it."""
        self._waiting = []
        yield
        lines, self._waiting = self._waiting, None
        self.run(*lines)

    def run(self, *lines: str) -> None:
        """Run commands, the first that fails being the last.

        Raises:
            CommandFailedError: One did fail.
        """
        if self._waiting is not None:
            self._waiting += lines
        else:
            self.guest.sh("\n".join(("set -e", *lines)))


class GuestWitness:
    """What is published in a guest, as judge, oracle, agent and scenario must agree on it."""

    def __init__(self, stage: GuestStage, observers: Observers) -> None:
        self._stage = stage
        self._observers = observers
        self.writes = 0.0
        """How many spec files had been written or deleted by the last expectation."""

    def wait_quiet(self) -> None:
        self._agree(quiet=True)

    def expect(self, expected: Expectation) -> None:
        kinds = self._kinds()
        holds = {
            kinds[kind]: [self._stage.cast[name].device for name in names]
            for kind, names in expected.published.items()
        }
        without = [kinds[kind] for kind in expected.deleted]
        try:
            agreed = self._agree(holds=holds, without=without, quiet=expected.unwritten)
        except DisagreeError as error:
            error.add_note(f"expected: {expected}")
            raise
        # The judge has compared; this compares again in the scenario's own words.
        fault = expected.fault(self._published(agreed))
        assert not fault, fault
        if expected.unwritten:
            assert agreed.writes == self.writes, "a spec file was written"
        self.writes = agreed.writes

    def _agree(self, **wanted: object) -> Agreed:
        usual = self._stage.udev_mode is UdevMode.AUTO
        return self._observers.agree(udev=usual, **wanted)

    def _kinds(self) -> dict[Kind, str]:
        (own,) = {one.model.kind for one in self._stage.cast.values()} - {""}
        return {Kind.OWN: own, Kind.VFIO: f"{own}-vfio"}

    def _published(self, agreed: Agreed) -> Published:
        names = {one.device: name for name, one in self._stage.cast.items()}
        return {
            kind: frozenset(names.get(d, d) for d in agreed.specs[cdi] if d != "all")
            for kind, cdi in self._kinds().items()
            if cdi in agreed.specs
        }


def _id(function: Function) -> str:
    """What QEMU calls it: letters and digits, beginning with a letter."""
    return "f" + "".join(filter(str.isalnum, function.address))
