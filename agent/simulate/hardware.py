"""What can be plugged into a simulated host, and which drivers there are: data only.

A `Hardware` is a PCI function as it was built: what it says of itself, which drivers know it, and
what its own driver makes of it. Numbers (card, group, …) are not part of it: the kernel gives them.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import structs

from agent.host.model import Address, normalise_driver, parse_address


class Makes(msgspec.Struct, frozen=True):
    """What a function's own driver makes when it binds."""

    card: bool = False
    render: bool = False
    accel: bool = False
    mei: tuple[str, ...] = ()
    """Auxiliary devices with a MEI node below each, as discrete Intel GPUs have: ``mei-gscfi``."""
    mei_node: bool = False
    """A MEI node of its own, as the management engine at 00:16.0 has."""
    connectors: tuple[str, ...] = ()
    """Their types: ``DP``, ``HDMI-A``; each brings messages of its own."""
    framebuffer: bool = False
    via: str | None = None
    """Not the function's driver makes it, but that of a device on another bus: ``virtio_gpu``."""

    @property
    def drm(self) -> bool:
        """Whether it is a DRM device."""
        return self.card or self.render


NOTHING: Final = Makes()
VGA: Final = 0x0300
"""The upper 16 bits of the class of a VGA controller."""


class Hardware(msgspec.Struct, frozen=True):
    """A PCI function.

    Raises:
        ValueError: The address is none.
    """

    address: Address
    vendor: int
    device: int
    class_code: int = 0x030000
    subsystem_vendor: int = 0x8086
    subsystem_device: int = 0x1020
    revision: int = 0
    boot_vga: bool | None = None
    """Only VGA controllers have this attribute; None there means 0."""
    numa_node: int = -1
    drivers: tuple[str, ...] = ()
    """The drivers whose tables name it; the first that is loaded gets it."""
    makes: Makes = NOTHING
    bridges: tuple[Address, ...] = ()
    """The bridges above it, from the root down; made with it where they are missing."""
    root: str | None = None
    """The folder of its root complex, if that is not ``pci<domain>:00``; VMD nests its own."""
    group: int | str | None = ""
    """Its IOMMU group: a number if the kernel can give it, a label that its members share, empty
    for a group of its own, None for none."""
    total_vfs: int = 0
    vfs: tuple["Hardware", ...] = ()
    """Its VFs, if `virtual_function` would not describe them rightly."""

    def __post_init__(self) -> None:
        parse_address(self.address)

    def virtual_function(self, index: int) -> "Hardware":
        """One of its VFs: in a group of its own, without what hangs from the card's plugs."""
        if self.vfs:
            return self.vfs[index]
        bus, _, rest = self.address.rpartition(":")
        slot, _, function = rest.partition(".")
        number = (int(slot, 16) << 3 | int(function)) + 1 + index
        return structs.replace(
            self,
            # VFs follow the PF, over the borders of slots.
            address=Address(f"{bus}:{number >> 3:02x}.{number & 7}"),
            makes=structs.replace(self.makes, connectors=(), framebuffer=False, mei=()),
            boot_vga=None,
            group="",
            total_vfs=0,
        )

    @property
    def devpath(self) -> str:
        """Its path below /sys."""
        domain = self.address.partition(":")[0]
        return "/".join(("/devices", self.root or f"pci{domain}:00", *self.bridges, self.address))

    @property
    def modalias(self) -> str:
        """As ``modules.alias`` matches it."""
        code = self.class_code
        return (
            f"pci:v{self.vendor:08X}d{self.device:08X}"
            f"sv{self.subsystem_vendor:08X}sd{self.subsystem_device:08X}"
            f"bc{code >> 16:02X}sc{code >> 8 & 0xFF:02X}i{code & 0xFF:02X}"
        )

    @property
    def properties(self) -> Mapping[str, str]:
        """What the kernel's messages say of it; the class there has no leading zeros."""
        return {
            "PCI_CLASS": f"{self.class_code:X}",
            "PCI_ID": f"{self.vendor:04X}:{self.device:04X}",
            "PCI_SUBSYS_ID": f"{self.subsystem_vendor:04X}:{self.subsystem_device:04X}",
            "PCI_SLOT_NAME": self.address,
            "MODALIAS": self.modalias,
        }

    @property
    def attributes(self) -> Mapping[str, str]:
        """What its files in sysfs hold that nothing changes."""
        files = {
            "vendor": f"0x{self.vendor:04x}",
            "device": f"0x{self.device:04x}",
            "subsystem_vendor": f"0x{self.subsystem_vendor:04x}",
            "subsystem_device": f"0x{self.subsystem_device:04x}",
            "class": f"0x{self.class_code:06x}",
            "revision": f"0x{self.revision:02x}",
            "numa_node": str(self.numa_node),
            "modalias": self.modalias,
            "driver_override": "(null)",
        }
        if self.class_code >> 8 == VGA:
            files["boot_vga"] = str(int(bool(self.boot_vga)))
        if self.total_vfs:
            files |= {
                "sriov_totalvfs": str(self.total_vfs),
                "sriov_numvfs": "0",
                "sriov_drivers_autoprobe": "1",
            }
        return files


class Driver(msgspec.Struct, frozen=True):
    """A driver of the PCI bus, and of what it makes."""

    name: str
    kfd: bool = False
    """Its module brings AMD's one compute node."""

    @property
    def module(self) -> str:
        """The module's name: ``vfio_pci`` has the driver ``vfio-pci``."""
        return self.name.replace("-", "_")

    @property
    def vfio(self) -> bool:
        """Whether it is one of VFIO's."""
        return "vfio" in normalise_driver(self.name).split("-")

    @property
    def child_bus(self) -> str | None:
        """The bus that it drives on, if that is not PCI."""
        return "virtio" if self.name == "virtio_gpu" else None

    @property
    def devpath(self) -> str:
        """Where it is below /sys."""
        return f"/bus/{self.child_bus or 'pci'}/drivers/{self.name}"

    @property
    def takes_anything(self) -> bool:
        """Whether it works with whatever function ``driver_override`` gives it."""
        return self.vfio or self.name == "pci-stub"


def driver_named(name: str) -> Driver:
    """The driver or module of that name."""
    spelling = normalise_driver(name) if name in MODULES_WITH_DASH else name
    return Driver(spelling, kfd=spelling == "amdgpu")


MODULES_WITH_DASH: Final = frozenset(
    {"vfio_pci", "xe_vfio_pci", "mlx5_vfio_pci", "nvgrace_gpu_vfio_pci", "pci_stub", "virtio_pci"}
)
"""Modules whose driver is spelt with a dash."""
