"""Whatever happens to it in whatever order, the simulated host stays one that can be.

Random acts on three cards; after each, what the tree says in one place it says in all others.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from agent.host.model import Address
from agent.simulate import Features, Hold, Kernel, UdevMode, stat_plain
from agent.simulate import host as shapes

GPU, SECOND, THIRD = ADDRESSES = ("0000:03:00.0", "0000:05:00.0", "0000:02:00.0")
HARDWARE: Final = {
    one.address: structs.replace(one, bridges=())
    for one in (*shapes.arc_b50(GPU), shapes.two_functions(SECOND)[0], *shapes.bochs(THIRD))
}
FEATURES: Final = Features(drivers=("xe", "nouveau", "bochs-drm", "vfio-pci"))


class Host:
    """A simulated host, and what can happen to it."""

    def __init__(self, root: Path) -> None:
        self.kernel = Kernel(root, lambda event: None, features=FEATURES)
        self.holds: list[Hold] = []

    def plug(self, address: str) -> None:
        if address not in self.kernel.functions:
            self.kernel.plug(HARDWARE[Address(address)])

    def unplug(self, address: str) -> None:
        if address in self.kernel.functions and not self.held_on_vfio(address):
            self.kernel.unplug(address)

    def toggle(self, address: str) -> None:
        """To VFIO, or back to its own driver."""
        driver = self.kernel.functions.get(Address(address))
        if self.held_on_vfio(address) or address not in self.kernel.functions:
            return
        own = HARDWARE[Address(address)].drivers[0]
        assert self.kernel.move(address, own if driver == "vfio-pci" else "vfio-pci") == 0

    def unbind(self, address: str) -> None:
        if not self.held_on_vfio(address):
            self.kernel.unbind(address)

    def probe(self, address: str) -> None:
        self.kernel.probe(address)

    def fail(self, address: str) -> None:
        if self.kernel.functions.get(Address(address), "none") is None:
            self.kernel.fail_probe(address, 5)
            self.kernel.probe(address)
            assert self.kernel.driver_of(address) is None
            self.kernel.fail_probe(address, 0)

    def vfs(self, address: str) -> None:
        if address == GPU:
            self.kernel.create_vfs(address, 2)

    def no_vfs(self, address: str) -> None:
        if address == GPU and not self.held_on_vfio("0000:03:00.1"):
            self.kernel.create_vfs(address, 0)

    def hold(self, address: str) -> None:
        if address in self.kernel.functions and (paths := self.kernel.node_paths(address)):
            self.holds.append(self.kernel.hold(paths[0]))

    def let_go(self, address: str) -> None:
        if self.holds:
            self.holds.pop(0).release()

    def storm(self, address: str) -> None:
        if any("card" in path for path in self.paths(address)) and address != SECOND:
            self.kernel.storm(address, 2)

    def slow(self, address: str) -> None:
        self.kernel.udev = UdevMode.MANUAL

    def catch_up(self, address: str) -> None:
        self.kernel.udev = UdevMode.AUTO
        self.kernel.udev_settle()

    def paths(self, address: str) -> tuple[str, ...]:
        return self.kernel.node_paths(address) if address in self.kernel.functions else ()

    def held_on_vfio(self, address: str) -> bool:
        """Whether taking its driver away would wait for ever, in one thread."""
        held = {hold.path for hold in self.holds}
        return any(path in held for path in self.paths(address) if "/vfio/" in path)


ACTS: Final[tuple[Callable[[Host, str], None], ...]] = (
    Host.plug,
    Host.unplug,
    Host.toggle,
    Host.unbind,
    Host.probe,
    Host.fail,
    Host.vfs,
    Host.no_vfs,
    Host.hold,
    Host.let_go,
    Host.storm,
    Host.slow,
    Host.catch_up,
)


def check(kernel: Kernel) -> None:
    """Compare what the tree says in one place with what it says in others."""
    sys, dev = kernel.root / "sys", kernel.root / "dev"
    functions = {entry.name for entry in (sys / "bus/pci/devices").iterdir()}
    assert functions == set(kernel.functions)
    for address in functions:
        folder = (sys / "bus/pci/devices" / address).resolve(strict=True)
        driver = kernel.driver_of(address)
        assert (folder / "driver").is_symlink() is (driver is not None)
        if driver is not None:
            assert (folder / "driver").resolve(strict=True).name == driver
            assert (folder / "driver" / address).resolve() == folder
            assert f"DRIVER={driver}\n" in (folder / "uevent").read_text()
        group = (folder / "iommu_group").resolve(strict=True)
        assert (group / "devices" / address).resolve() == folder
    groups = [group.name for group in (sys / "kernel/iommu_groups").iterdir()]
    assert len(groups) == len(functions)
    numbers: Counter[str] = Counter()
    for link in (sys / "dev/char").iterdir():
        device = link.resolve(strict=True)
        assert (device / "dev").read_text() == f"{link.name}\n"
        name = next(
            line.partition("=")[2]
            for line in (device / "uevent").read_text().splitlines()
            if line.startswith("DEVNAME=")
        )
        found = stat_plain(str(dev / name))
        assert found is not None
        assert str(found.number) == link.name
        numbers[name] += 1
    assert max(numbers.values()) == 1
    nodes = {
        os.path.relpath(os.path.join(folder, file), dev)
        for folder, _, files in os.walk(dev)
        for file in files
        if "by-path" not in folder
    }
    assert nodes == set(numbers), "a node for each device, and a device for each node"
    for link in (sys / "class").glob("*/*"):
        assert link.is_file() or link.resolve(strict=True).exists()


@settings(max_examples=12)
@given(st.lists(st.tuples(st.sampled_from(ACTS), st.sampled_from(ADDRESSES)), max_size=25))
def test_a_host_that_can_be(acts: list[tuple[Callable[[Host, str], None], str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        host = Host(Path(folder) / "host")
        host.kernel.plug(*HARDWARE.values())
        for act, address in acts:
            act(host, address)
            check(host.kernel)
        for hold in host.holds:
            hold.release()
        host.kernel.udev_settle()
        host.kernel.unplug(*(a for a in host.kernel.functions if a in ADDRESSES))
        host.kernel.udev_settle()
        check(host.kernel)
        assert not (host.kernel.root / "dev/dri").exists()
        assert sorted(os.listdir(host.kernel.root / "proc")) == ["self", "sys"]
        # Every number is free again.
        host.kernel.plug(HARDWARE[Address(GPU)])
        host.kernel.udev_settle()
        assert set(host.paths(GPU)) == {
            "/dev/dri/card0",
            "/dev/dri/renderD128",
            "/dev/fb0",
            "/dev/mei0",
        }
