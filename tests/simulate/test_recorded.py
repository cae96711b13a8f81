"""The simulated host does what a real one did: recordings of a guest's kernel are played on it.

Each file of ``tests/guest/recorded`` is a sequence of acts on a virtual machine (Linux, systemd and
udev of Debian, QEMU's GPUs), with what the kernel and udev said during each, its errno, and the
state afterwards. The same acts on the simulated host must give the same messages of the kernel in
the same order, the same messages of udev in any order (its workers run side by side), the same
errno and the same state.
"""

import errno
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import structs

from agent.host.model import Address
from agent.simulate import Features, Hardware, Hold, Kernel, Source, UdevMode, Uevent, VfioKind
from agent.simulate import host as shapes
from agent.simulate.drivers import Majors
from agent.simulate.machine import BRIDGE

RECORDED: Final = Path(__file__).parents[1] / "guest/recorded"
SUBSYSTEMS: Final = frozenset({"drm", "pci", "vfio", "vfio-dev", "virtio", "accel"})
# Of the guest's machine: the functions above a bus.
ABOVE: Final = {port + 1: (f"0000:00:{0x10 + port:x}.0",) for port in range(6)} | {
    8: ("0000:00:1c.0", "0000:07:00.0")
}
# What differs from run to run, or what the recorder did not keep.
UNTOLD: Final = frozenset({"CONNECTOR", "SYNTH_UUID"})

Json = dict[str, Any]


def hardware(address: str, group: str | None) -> Hardware:
    """What QEMU plugs in there: the two kinds of GPUs that the guest has."""
    make = shapes.virtio_gpu if address in {"0000:01:00.0", "0000:02:00.0"} else shapes.bochs
    (one,) = make(address)
    bridges = tuple(map(Address, ABOVE[int(address.split(":")[1], 16)]))
    return structs.replace(one, bridges=bridges, group=None if group is None else int(group))


class Guest:
    """The simulated host in the guest's place."""

    def __init__(self, root: Path, record: Json) -> None:
        self.events: list[Uevent] = []
        self._holds: list[Hold] = []
        self._coming: list[str] = []
        self._plugged: list[str] = []
        self.kernel = Kernel(
            root,
            self.events.append,
            features=Features(
                vfio=VfioKind.GROUP,
                drivers=("pcieport", "virtio-pci", "virtio_gpu", "bochs-drm"),
                majors=Majors(vfio=245),
            ),
        )
        with self.kernel.boot() as machine:
            for _ in range(3):  # the guest's disk, channel and console come first
                machine.bus.children.take()
            machine.plug(
                structs.replace(BRIDGE, address=Address(one), bridges=tuple(above[:depth]))
                for above in (tuple(map(Address, bridges)) for bridges in ABOVE.values())
                for depth, one in enumerate(above)
            )
            before = record["before"]["functions"]
            for address in sorted(before, key=lambda one: min(before[one]["nodes"])):
                if address == "0000:02:00.0":  # its monitor and framebuffer were found last
                    machine.drivers.connectors["Virtual"].want(6)
                    machine.drivers.framebuffers.want(5)
                machine.plug([hardware(address, before[address]["group"])])

    def act(self, step: Json) -> int:
        """Do what was done; the errno, or 1 for a command that failed."""
        self.events.clear()
        if "write" in step:
            return self.kernel.write(step["write"]["path"], step["write"]["text"])
        if "plug" in step:
            self._plug(step)
            return 0
        if "unplug" in step:
            self.kernel.unplug(*sorted(self._plugged))
            self._plugged.clear()
            return 0
        return self._shell(step["shell"]["text"])

    def _plug(self, step: Json) -> None:
        properties = step["plug"]["properties"]
        port = int(properties["bus"].removeprefix("rp"))
        function = properties.get("addr", "0.0").partition(".")[2]
        self._coming.append(f"0000:{port + 1:02x}:00.{function}")
        if function == "0":  # the slot's other functions wait for this one
            after = step["after"]["functions"]
            self.kernel.plug(*(hardware(a, after[a]["group"]) for a in sorted(self._coming)))
            self._plugged, self._coming = self._coming, []

    def _shell(self, text: str) -> int:
        match text.split():
            case ["modprobe", "-r", module]:
                return int(self.kernel.rmmod(driver(module)) != 0)
            case ["modprobe", module]:
                return int(self.kernel.modprobe(driver(module)) != 0)
            case ["systemd-run", *_]:
                node = re.search(r"exec 3<(\S+);", text)
                assert node is not None
                self._holds.append(self.kernel.hold(node[1]))
            case ["systemctl", "stop", "holder"]:
                self._holds.pop().release()
            case ["systemctl", "stop", *_] if "systemd-udevd" in text:
                self.kernel.udev = UdevMode.OFF
            case ["systemctl", "start", *_] if "systemd-udevd" in text:
                self.kernel.udev = UdevMode.AUTO
            case ["udevadm", "trigger", *_] if text.endswith("--subsystem-match=drm"):
                for entry in sorted(self.kernel.tree.names("/sys/class/drm")):
                    if entry != "version":
                        self.kernel.write(f"/sys/class/drm/{entry}/uevent", "change")
            case _:
                pytest.fail(f"nobody knows what this does to a simulated host: {text}")
        return 0

    def told(self, source: Source) -> Iterator[Json]:
        """What was said, as the recorder writes it down."""
        for event in self.events:
            if event.source is source and event.subsystem in SUBSYSTEMS:
                yield told(event.action, event.devpath, event.payload)

    def state(self) -> Json:
        """The host as the recorder sees it."""
        tree = self.kernel.tree
        functions = {}
        for address in sorted(self.kernel.functions):
            place = f"/sys/bus/pci/devices/{address}"
            if tree.read(f"{place}/class").startswith("0x03"):
                functions[address] = {
                    "vendor": tree.read(f"{place}/vendor").strip().removeprefix("0x"),
                    "device": tree.read(f"{place}/device").strip().removeprefix("0x"),
                    "class": tree.read(f"{place}/class").strip().removeprefix("0x"),
                    "driver": self.kernel.driver_of(address),
                    "driver_override": tree.read(f"{place}/driver_override").strip(),
                    "group": os.path.basename(tree.resolve(f"{place}/iommu_group")),
                    "vfio": tree.exists(f"{place}/vfio-dev"),
                    "nodes": {
                        os.path.basename(path): path
                        for path in self.kernel.node_paths(address)
                        if not path.startswith("/dev/vfio/")
                    },
                }
        return {"functions": functions, "listing": list(self._listing())}

    def _listing(self) -> Iterator[str]:
        """As ``ls -A`` prints it: first what is not there, then each folder."""
        folders = ("/dev/dri", "/dev/dri/by-path", "/dev/vfio")
        there = [folder for folder in folders if self.kernel.tree.exists(folder)]
        for folder in folders:
            if folder not in there:
                yield f"cannot access '{folder}': No such file or directory"
        for index, folder in enumerate(there):
            if index:
                yield ""
            yield f"{folder}:"
            # No cdev on the guest, but an empty folder would show.
            yield from self.kernel.tree.names(folder)


def driver(module: str) -> str:
    """The driver of a module."""
    return {"bochs": "bochs-drm"}.get(module, module)


def told(action: str, devpath: str, payload: dict[str, str]) -> Json:
    """A message as both sides can be compared."""
    fixed = {"ACTION", "DEVPATH"} | UNTOLD
    return {
        "action": action,
        "devpath": devpath,
        "properties": {key: value for key, value in payload.items() if key not in fixed},
    }


def records() -> Iterator[Path]:
    """The recordings of acts; that of a boot has none."""
    for path in sorted(RECORDED.glob("*.json")):
        if "before" in json.loads(path.read_text()):
            yield path


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in records()])
def test_a_recorded_sequence(path: Path, tmp_path: Path) -> None:
    record = json.loads(path.read_text())
    guest = Guest(tmp_path / "host", record)
    assert guest.state() == record["before"]
    for step in record["steps"]:
        act = next(iter(step))
        failure = guest.act(step)
        if "rc" in step:
            assert failure == step["rc"], step[act]
        else:
            assert errno.errorcode.get(failure) == step.get("errno"), step[act]
        recorded = {
            source: [
                told(event["action"], event["devpath"], event["properties"])
                for event in step["events"]
                if event["from"] == source
            ]
            for source in Source
        }
        assert list(guest.told(Source.KERNEL)) == recorded[Source.KERNEL], step[act]
        assert Counter(without_properties(guest.told(Source.UDEV))) == Counter(
            without_properties(recorded[Source.UDEV])
        ), step[act]
        assert guest.state() == step["after"], step[act]


def without_properties(events: Iterable[Json]) -> list[tuple[str, str]]:
    """What udev adds to a message depends on its rules and hardware database."""
    return [(event["action"], event["devpath"]) for event in events]


def test_there_are_recordings() -> None:
    """A wrong path would otherwise pass as no test at all."""
    assert len(list(records())) >= 10
