"""Ready-made hardware, named after what it stands for.

Ids, classes and shapes are those of the real things. Each function takes the address of the slot,
and gives the functions in it for `Kernel.plug`. Numbers in them are deliberately not those of the
addresses, so that nothing can be right by accident.
"""

from typing import Final

from msgspec import structs

from agent.host.model import Address, slot_of
from agent.simulate.hardware import Hardware, Makes

INTEL: Final = 0x8086
AMD: Final = 0x1002
NVIDIA: Final = 0x10DE
ASPEED: Final = 0x1A03

AUDIO: Final = 0x040300
USB: Final = 0x0C0330
NETWORK: Final = 0x020000
NVME: Final = 0x010802
COMPUTE: Final = 0x038000
"""Display controller without VGA, as data-centre GPUs are."""
ACCELERATOR: Final = 0x120000

SCREENS: Final = Makes(card=True, render=True, connectors=("DP", "DP", "HDMI-A"), framebuffer=True)
HEADLESS: Final = Makes(card=True, render=True)


def arc_b50(address: str = "0000:03:00.0", *, boot_vga: bool = False) -> tuple[Hardware, ...]:
    """Intel Arc Pro B50, below the two bridges that are on the card; it can have 12 VFs."""
    return (_battlemage(address, 0xE212, 0x1114, 12, boot_vga=boot_vga),)


def arc_b60(address: str = "0000:07:00.0", *, boot_vga: bool = False) -> tuple[Hardware, ...]:
    """Intel Arc Pro B60, likewise."""
    return (_battlemage(address, 0xE211, 0x1111, 24, boot_vga=boot_vga),)


def arc_with_audio(address: str = "0000:03:00.0") -> tuple[Hardware, ...]:
    """Intel Arc A770 with its audio function next door, both in one IOMMU group of their own.

    The bridges on the card give each endpoint its own bus, as on the real one.
    """
    domain, bus, _ = address.split(":")
    (gpu,) = arc_b50(address)
    *above, _ = gpu.bridges
    behind = f"{int(bus, 16) + 1:02x}"
    group = f"card at {address}"
    audio_bridge = Address(f"{domain}:{int(bus, 16) - 1:02x}:04.0")
    return (
        structs.replace(
            gpu,
            device=0x56A0,
            drivers=("i915", "xe"),
            group=group,
            total_vfs=0,
            makes=structs.replace(SCREENS, mei=("mei-gscfi",)),
        ),
        Hardware(
            Address(f"{domain}:{behind}:00.0"),
            INTEL,
            0x4F90,
            AUDIO,
            drivers=("snd_hda_intel",),
            bridges=(*above, audio_bridge),
            group=group,
        ),
    )


def two_functions(address: str = "0000:05:00.0") -> tuple[Hardware, ...]:
    """NVIDIA RTX A4000 on nouveau: display and audio are two functions of one slot and group."""
    slot = slot_of(Address(address))
    return (
        Hardware(
            Address(address),
            NVIDIA,
            0x24B0,
            subsystem_vendor=NVIDIA,
            subsystem_device=0x14AD,
            revision=0xA1,
            drivers=("nouveau",),
            makes=SCREENS,
            group=f"slot {slot}",
        ),
        Hardware(
            Address(f"{slot}.1"),
            NVIDIA,
            0x228B,
            AUDIO,
            subsystem_vendor=NVIDIA,
            subsystem_device=0x14AD,
            revision=0xA1,
            drivers=("snd_hda_intel",),
            group=f"slot {slot}",
        ),
    )


def flex_170(address: str = "0000:4d:00.0", *, numa_node: int = 1) -> tuple[Hardware, ...]:
    """Intel Data Center GPU Flex 170: no screens, second socket, 31 VFs over several slots."""
    return (
        Hardware(
            Address(address),
            INTEL,
            0x56C0,
            COMPUTE,
            subsystem_device=0x4905,
            revision=8,
            numa_node=numa_node,
            drivers=("i915",),
            makes=structs.replace(HEADLESS, mei=("mei-gscfi",)),
            root="pci0000:4c",
            bridges=(Address("0000:4c:01.0"),),
            total_vfs=31,
        ),
    )


def integrated_intel(address: str = "0000:00:02.0") -> tuple[Hardware, ...]:
    """The graphics of an Intel Core processor: on the root bus, the console's display."""
    return (
        Hardware(
            Address(address),
            INTEL,
            0xA780,
            subsystem_device=0x2212,
            revision=4,
            boot_vga=True,
            drivers=("i915",),
            makes=SCREENS,
            total_vfs=7,
        ),
    )


def apu(address: str = "0000:e5:00.0") -> tuple[Hardware, ...]:
    """An AMD processor's graphics, which share their slot with USB and the security processor.

    Each function is in a group of its own: the slot alone says nothing about belonging together.
    """
    slot = slot_of(Address(address))
    bridges = (Address("0000:00:08.1"),)

    def function(number: int, device: int, class_code: int, driver: str) -> Hardware:
        return Hardware(
            Address(f"{slot}.{number}"),
            0x1022,
            device,
            class_code,
            subsystem_vendor=0x1022,
            subsystem_device=device,
            drivers=(driver,),
            bridges=bridges,
        )

    gpu = structs.replace(
        function(0, 0x1900, 0x030000, "amdgpu"), vendor=AMD, makes=SCREENS, boot_vga=True
    )
    return (
        gpu,
        structs.replace(function(1, 0x1640, AUDIO, "snd_hda_intel"), vendor=AMD),
        function(2, 0x15C7, 0x108000, "ccp"),
        function(3, 0x15B9, USB, "xhci_hcd"),
        function(4, 0x15BA, USB, "xhci_hcd"),
    )


def instinct(address: str = "0001:c1:00.0") -> tuple[Hardware, ...]:
    """AMD Instinct MI210, in a PCI domain of its own; /dev/kfd is shared by all."""
    return (
        Hardware(
            Address(address),
            AMD,
            0x740F,
            COMPUTE,
            subsystem_vendor=AMD,
            subsystem_device=0x0C34,
            revision=2,
            numa_node=0,
            drivers=("amdgpu",),
            makes=HEADLESS,
        ),
    )


def bmc(address: str = "0000:06:00.0", *, boot_vga: bool = True) -> tuple[Hardware, ...]:
    """The display chip of a server's management controller: a card and no render node."""
    bridges = (Address("0000:00:1c.0"), Address("0000:05:1f.0"))
    return (
        Hardware(
            Address(address),
            ASPEED,
            0x2000,
            subsystem_vendor=ASPEED,
            subsystem_device=0x2000,
            revision=0x52,
            boot_vga=boot_vga,
            drivers=("ast",),
            makes=Makes(card=True, connectors=("VGA",), framebuffer=True),
            bridges=bridges,
        ),
    )


def npu(address: str = "0000:00:0b.0") -> tuple[Hardware, ...]:
    """An Intel processor's NPU."""
    return (
        Hardware(
            Address(address),
            INTEL,
            0x7D1D,
            ACCELERATOR,
            subsystem_device=0x7D1D,
            revision=4,
            drivers=("intel_vpu",),
            makes=Makes(accel=True),
        ),
    )


def management_engine(address: str = "0000:00:16.0") -> tuple[Hardware, ...]:
    """A processor's management engine: a MEI node that belongs to no GPU."""
    return (
        Hardware(
            Address(address),
            INTEL,
            0x7AE8,
            0x078000,
            drivers=("mei_me",),
            makes=Makes(mei_node=True),
        ),
    )


def virtio_gpu(address: str = "0000:01:00.0") -> tuple[Hardware, ...]:
    """QEMU's virtio-gpu: its nodes are made by the driver of its virtio device, another one."""
    return (
        Hardware(
            Address(address),
            0x1AF4,
            0x1050,
            0x038000,
            subsystem_vendor=0x1AF4,
            subsystem_device=0x1100,
            revision=1,
            drivers=("virtio-pci",),
            makes=Makes(
                card=True,
                render=True,
                connectors=("Virtual",),
                framebuffer=True,
                via="virtio_gpu",
            ),
            bridges=(Address("0000:00:02.0"),),
        ),
    )


def bochs(address: str = "0000:02:00.0") -> tuple[Hardware, ...]:
    """QEMU's secondary-vga, the one that can be hot-plugged: a card and no render node."""
    return (
        Hardware(
            Address(address),
            0x1234,
            0x1111,
            COMPUTE,
            subsystem_vendor=0x1AF4,
            subsystem_device=0x1100,
            revision=2,
            drivers=("bochs-drm",),
            makes=Makes(card=True, connectors=("Virtual",), framebuffer=True),
            bridges=(Address("0000:00:02.1"),),
        ),
    )


def network_card(address: str = "0000:0a:00.0", *, group: int | str = "") -> tuple[Hardware, ...]:
    """An Intel I225 network card: what must never be moved along with a GPU."""
    return (Hardware(Address(address), INTEL, 0x15F3, NETWORK, drivers=("igc",), group=group),)


def disk(address: str = "10000:e1:00.0") -> tuple[Hardware, ...]:
    """An NVMe disk behind Intel's VMD, which has a PCI domain of five digits below a function."""
    vmd = Hardware(Address("0000:00:0e.0"), INTEL, 0xA77F, 0x010400, drivers=("vmd",))
    return (
        vmd,
        Hardware(
            Address(address),
            0x144D,
            0xA80A,
            NVME,
            subsystem_vendor=0x144D,
            subsystem_device=0xA801,
            drivers=("nvme",),
            root=f"pci0000:00/{vmd.address}/pci10000:e0",
            bridges=(Address("10000:e0:01.0"),),
        ),
    )


def _battlemage(
    address: str, device: int, subsystem: int, total_vfs: int, *, boot_vga: bool
) -> Hardware:
    domain, bus, _ = address.split(":")
    number = int(bus, 16)
    return Hardware(
        Address(address),
        INTEL,
        device,
        subsystem_device=subsystem,
        boot_vga=boot_vga,
        drivers=("xe",),
        makes=structs.replace(SCREENS, mei=("mei-gscfi",)),
        bridges=(
            Address(f"{domain}:00:{number % 0x20:02x}.0"),
            Address(f"{domain}:{number - 2:02x}:00.0"),
            Address(f"{domain}:{number - 1:02x}:01.0"),
        ),
        total_vfs=total_vfs,
    )
