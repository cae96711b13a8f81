"""The guest's machine as data: what is plugged in when it starts, and where more can be plugged.

Every topology is the same q35 machine with a vIOMMU:

    rp0 ... rp5     root ports, one hot-pluggable slot each; the slot of rpN is 0000:0(N+1):00
    bridge          a conventional PCI bus behind a PCIe-PCI bridge, 0000:08; only used at start,
                    and all that is behind it is one IOMMU group

A root port needs its memory windows reserved, or the kernel finds no room for the BARs of what is
plugged later. Two functions of a slot are plugged one by one, function 0 last, and both must say
multifunction=on: the kernel groups them when it adds them, by what their own headers say.

What can be plugged: `secondary-vga` (driver bochs-drm: a card, no render node) at any time;
`virtio-gpu-pci` (its PCI driver is virtio-pci: a card and a render node) only at start.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

PORTS: Final = 6


def slot(port: int) -> str:
    """The PCI slot behind root port `port`: an address without its function."""
    return f"0000:{port + 1:02x}:00"


@dataclass(frozen=True, slots=True)
class Topology:
    """A machine: one frozen guest each."""

    name: str
    devices: tuple[str, ...] = ()
    """What is plugged in at start, as QEMU's -device takes it."""
    memory_mib: int = 1024
    cpus: int = 2

    def arguments(self) -> Iterator[str]:
        """QEMU's arguments for the machine, apart from disk, channel and kernel."""
        # One translation buffer that a whole boot fits in; QEMU fills it only as far as it must.
        yield from ("-machine", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "Nehalem")
        yield from ("-smp", str(self.cpus), "-m", str(self.memory_mib))
        yield from ("-device", "intel-iommu,intremap=on,caching-mode=on")
        room = "pref32-reserve=32M,mem-reserve=64M"
        for port in range(PORTS):
            place = f"bus=pcie.0,chassis={port + 1},slot={port + 1},addr={0x10 + port:#x}.0"
            yield from ("-device", f"pcie-root-port,id=rp{port},{place},{room}")
        place = "bus=pcie.0,chassis=100,slot=100,addr=0x1c.0"
        yield from ("-device", f"pcie-root-port,id=rpb,{place},pref32-reserve=64M,mem-reserve=16M")
        yield from ("-device", "pcie-pci-bridge,id=bridge,bus=rpb")
        for device in self.devices:
            yield from ("-device", device)


NO_GPU: Final = Topology("no-gpu")
ONE_GPU: Final = Topology("one-gpu", ("virtio-gpu-pci,id=gpu0,bus=rp0",))
MANY_GPUS: Final = Topology(
    "many-gpus",
    (
        "virtio-gpu-pci,id=gpu0,bus=rp0",
        "virtio-gpu-pci,id=gpu1,bus=rp1",
        # two functions of one slot: one IOMMU group, both may move
        "secondary-vga,id=twin1,bus=rp2,addr=0.1,multifunction=on",
        "secondary-vga,id=twin0,bus=rp2,addr=0.0,multifunction=on",
        # two slots behind one bridge: one IOMMU group, but not one slot
        "secondary-vga,id=behind1,bus=bridge,addr=1.0",
        "secondary-vga,id=behind2,bus=bridge,addr=2.0",
    ),
)
TOPOLOGIES: Final = (NO_GPU, ONE_GPU, MANY_GPUS)
