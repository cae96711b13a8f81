"""What is done to a real kernel to learn what it says: the sequences that `record` records.

Data only. Each step is one act on one device; what the kernel and udev said during it, the errno
and the state afterwards are what `recorded/` holds.
"""

from dataclasses import dataclass, field
from typing import Final

from tests.guest.topology import MANY_GPUS, NO_GPU, ONE_GPU, Topology, slot


@dataclass(frozen=True, slots=True)
class Write:
    """One write to a sysfs attribute."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Shell:
    """A command in the guest, as a person types it."""

    text: str


@dataclass(frozen=True, slots=True)
class Plug:
    """A device comes: QEMU's device_add."""

    driver: str
    name: str
    properties: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unplug:
    """It goes."""

    name: str


Step = Write | Shell | Plug | Unplug


@dataclass(frozen=True, slots=True)
class Sequence:
    """A name, what it is to show, and the steps on a freshly resumed guest."""

    name: str
    about: str
    topology: Topology
    steps: tuple[Step, ...]


def device(address: str, attribute: str) -> str:
    """The path of a PCI function's attribute."""
    return f"/sys/bus/pci/devices/{address}/{attribute}"


def driver(name: str, attribute: str) -> str:
    """The path of a PCI driver's attribute."""
    return f"/sys/bus/pci/drivers/{name}/{attribute}"


PROBE: Final = "/sys/bus/pci/drivers_probe"


def to_vfio(address: str, native: str) -> tuple[Step, ...]:
    """The three writes that move a function to vfio-pci."""
    return (
        Write(device(address, "driver_override"), "vfio-pci"),
        Write(driver(native, "unbind"), address),
        Write(PROBE, address),
    )


def from_vfio(address: str) -> tuple[Step, ...]:
    """The three writes that bring it back to whatever driver matches it."""
    return (
        Write(device(address, "driver_override"), "\n"),
        Write(driver("vfio-pci", "unbind"), address),
        Write(PROBE, address),
    )


_GPU0: Final = f"{slot(0)}.0"
_GPU1: Final = f"{slot(1)}.0"
_HOT: Final = f"{slot(3)}.0"
_TWINS: Final = (f"{slot(2)}.0", f"{slot(2)}.1")
_BEHIND: Final = ("0000:08:01.0", "0000:08:02.0")
_LOAD_VFIO: Final = Shell("modprobe vfio-pci")


def _hold(node: str) -> Shell:
    hold = f"exec 3<{node}; exec sleep infinity"
    return Shell(f"systemd-run --quiet --collect --unit=holder sh -c '{hold}'")


_LET_GO: Final = Shell("systemctl stop holder")

SEQUENCES: Final = (
    Sequence(
        "native-virtio-gpu",
        "The only GPU, a card and a render node below a virtio device: unbind, then bind.",
        ONE_GPU,
        (Write(driver("virtio-pci", "unbind"), _GPU0), Write(driver("virtio-pci", "bind"), _GPU0)),
    ),
    Sequence(
        "native-bochs",
        "A card alone, directly below its PCI function: unbind, then bind.",
        MANY_GPUS,
        (
            Write(driver("bochs-drm", "unbind"), _TWINS[0]),
            Write(driver("bochs-drm", "bind"), _TWINS[0]),
        ),
    ),
    Sequence(
        "only-gpu-to-vfio",
        "The only GPU goes to vfio-pci and comes back, twice: /dev/dri itself goes and comes.",
        ONE_GPU,
        (_LOAD_VFIO, *2 * (*to_vfio(_GPU0, "virtio-pci"), *from_vfio(_GPU0))),
    ),
    Sequence(
        "hot-plug",
        "A card is plugged into a host without one, removed, and plugged again.",
        NO_GPU,
        (
            Plug("secondary-vga", "hot", {"bus": "rp3"}),
            Unplug("hot"),
            Plug("secondary-vga", "hot", {"bus": "rp3"}),
        ),
    ),
    Sequence(
        "hot-plug-two-functions",
        "Two functions of one slot come and go together.",
        NO_GPU,
        (
            Plug("secondary-vga", "one", {"bus": "rp3", "addr": "0.1", "multifunction": "on"}),
            Plug("secondary-vga", "zero", {"bus": "rp3", "addr": "0.0", "multifunction": "on"}),
            Unplug("zero"),
        ),
    ),
    Sequence(
        "pci-remove-rescan",
        "The kernel is told to forget the only GPU, and to look again.",
        ONE_GPU,
        (Write(device(_GPU0, "remove"), "1"), Write("/sys/bus/pci/rescan", "1")),
    ),
    Sequence(
        "driver-unload-bochs",
        "The DRM driver is unloaded with four devices bound, and loaded again.",
        MANY_GPUS,
        (Shell("modprobe -r bochs"), Shell("modprobe bochs")),
    ),
    Sequence(
        "driver-unload-virtio-gpu",
        "The same for the only GPU: its PCI function stays bound to virtio-pci throughout.",
        ONE_GPU,
        (Shell("modprobe -r virtio_gpu"), Shell("modprobe virtio_gpu")),
    ),
    Sequence(
        "driver-unload-held",
        "Something holds the only card: the driver cannot be unloaded.",
        ONE_GPU,
        (_hold("/dev/dri/card0"), Shell("modprobe -r virtio_gpu"), _LET_GO),
    ),
    Sequence(
        "renumbered",
        "Something holds the old node over a rebind: the card comes back under another number.",
        ONE_GPU,
        (
            _hold("/dev/dri/card0"),
            Write(driver("virtio-pci", "unbind"), _GPU0),
            Write(driver("virtio-pci", "bind"), _GPU0),
            _LET_GO,
            Write(driver("virtio-pci", "unbind"), _GPU0),
            Write(driver("virtio-pci", "bind"), _GPU0),
        ),
    ),
    Sequence(
        "swapped",
        "Two GPUs are unbound and bound in the other order: their numbers change places.",
        MANY_GPUS,
        (
            Write(driver("virtio-pci", "unbind"), _GPU0),
            Write(driver("virtio-pci", "unbind"), _GPU1),
            Write(driver("virtio-pci", "bind"), _GPU1),
            Write(driver("virtio-pci", "bind"), _GPU0),
        ),
    ),
    Sequence(
        "group-of-one-slot",
        "Two functions of one slot are one IOMMU group: to VFIO one by one, and back.",
        MANY_GPUS,
        (
            _LOAD_VFIO,
            *(step for address in _TWINS for step in to_vfio(address, "bochs-drm")),
            *(step for address in _TWINS for step in from_vfio(address)),
        ),
    ),
    Sequence(
        "group-behind-bridge",
        "Two slots behind a PCIe-PCI bridge are one IOMMU group: to VFIO one by one, and back.",
        MANY_GPUS,
        (
            _LOAD_VFIO,
            *(step for address in _BEHIND for step in to_vfio(address, "bochs-drm")),
            *(step for address in _BEHIND for step in from_vfio(address)),
        ),
    ),
    Sequence(
        "unplugged-on-vfio",
        "A hot-plugged card goes to VFIO and is then pulled out.",
        NO_GPU,
        (
            _LOAD_VFIO,
            Plug("secondary-vga", "hot", {"bus": "rp3"}),
            *to_vfio(_HOT, "bochs-drm"),
            Unplug("hot"),
        ),
    ),
    Sequence(
        "refusals",
        "What the kernel answers to writes that cannot work, or that do nothing.",
        ONE_GPU,
        (
            Write(driver("virtio-pci", "bind"), _GPU0),  # bound already
            Write(driver("virtio-pci", "bind"), "0000:77:00.0"),  # no such function
            _LOAD_VFIO,
            Write(driver("vfio-pci", "bind"), _GPU0),  # bound to another, and no match
            Write(driver("vfio-pci", "unbind"), _GPU0),  # bound to another
            Write(PROBE, _GPU0),  # bound already
            Write(driver("virtio-pci", "unbind"), _GPU0),
            Write(driver("virtio-pci", "unbind"), _GPU0),  # not bound
            Write(driver("vfio-pci", "bind"), _GPU0),  # no match, no override
            Write(device(_GPU0, "driver_override"), "no-such-driver"),
            Write(PROBE, _GPU0),  # nothing takes it, and that is no error
            Write(driver("virtio-pci", "bind"), _GPU0),  # the override forbids it
            Write(device(_GPU0, "driver_override"), ""),  # a write of no bytes changes nothing
            Write(device(_GPU0, "driver_override"), "\n"),  # clears it
            Write(PROBE, _GPU0),
        ),
    ),
    Sequence(
        "without-udevd",
        "udevd is stopped: the kernel speaks, udev does not, until it is started again.",
        ONE_GPU,
        (
            Shell(
                "systemctl stop systemd-udevd-kernel.socket systemd-udevd-control.socket "
                "systemd-udevd.service"
            ),
            Write(driver("virtio-pci", "unbind"), _GPU0),
            Write(driver("virtio-pci", "bind"), _GPU0),
            Shell("systemctl start systemd-udevd.service"),
            Shell("udevadm trigger --settle --subsystem-match=drm"),
        ),
    ),
)
"""In the order in which they are recorded; the cold plug of a boot is recorded beside them."""
