"""QEMU's command line, and the files of a guest that it names.

A frozen guest is a folder: its disk, its memory as one file, and the state of its devices. Who
resumes it maps the memory privately, so only what a guest needs is read, and only what it changes
is copied.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.guest import settings
from tests.guest.image import Image
from tests.guest.topology import Topology

_KERNEL_ARGUMENTS: Final = (
    "root=/dev/vda ro console=ttyS0 quiet loglevel=4 systemd.show_status=false net.ifnames=0 "
    "intel_iommu=on "
    # what emulation makes slow and no test needs
    "mitigations=off nokaslr audit=0 nowatchdog no_timer_check tsc=reliable clocksource=tsc "
    "cryptomgr.notests random.trust_cpu=1 "
    # what runs at the same addresses again QEMU need not translate again: a fifth of its work
    "norandmaps"
)

PROGRAM: Final = "qemu-system-x86_64"

# In the folder of a frozen guest.
DISK: Final = "disk.qcow2"
MEMORY: Final = "memory"
DEVICES: Final = "devices"


def arguments(
    image: Image, topology: Topology, disk: Path, folder: Path, kernel_arguments: str = ""
) -> Iterator[str]:
    """What QEMU is started with.

    Args:
        image: Kernel and initrd.
        topology: The machine.
        disk: The overlay that takes the guest's writes.
        folder: Gets QEMU's sockets, `qmp.sock` and `channel.sock`, and the guest's console.
        kernel_arguments: More of them than every guest gets.
    """
    yield from ("-nodefaults", "-no-user-config", "-display", "none")
    yield from topology.arguments()
    yield from ("-kernel", str(image.kernel), "-initrd", str(image.initrd))
    yield from ("-append", f"{_KERNEL_ARGUMENTS} {kernel_arguments}".strip())
    yield from ("-serial", f"file:{folder}/console.log")
    yield from ("-qmp", f"unix:{folder}/qmp.sock,server=on,wait=off")
    # Nobody needs the overlay after a crash of the host: its flushes are not waited for.
    yield from ("-drive", f"file={disk},format=qcow2,if=none,id=root,cache=unsafe")
    yield from ("-device", "virtio-blk-pci,drive=root,addr=02.0")
    yield from ("-device", "virtio-serial-pci,id=serial,addr=03.0")
    yield from ("-chardev", f"socket,id=rig,path={folder}/channel.sock,server=on,wait=off")
    yield from ("-device", "virtserialport,bus=serial.0,chardev=rig,name=cdi.rig")
    yield from ("-device", "virtio-rng-pci,addr=04.0")


def memory(topology: Topology, folder: Path, *, private: bool) -> Iterator[str]:
    """QEMU's arguments for memory in a file: of a guest to be frozen, or private to a resumed one.

    QEMU calls the first sort shared, and saves and loads no memory that is.
    """
    where = f"size={topology.memory_mib}M,mem-path={folder / MEMORY}"
    share = "off" if private else "on"
    yield from ("-object", f"memory-backend-file,id=memory,{where},share={share}")
    yield from ("-machine", "memory-backend=memory")
    if private:
        yield from ("-incoming", "defer")


def version() -> str:
    """What QEMU calls itself: another one may not take what this one has frozen.

    Raises:
        CannotRunError: There is none.
    """
    argv = [settings.program(PROGRAM), "--version"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def make_overlay(base: Path, disk: Path) -> None:
    """Make a disk that takes the writes to another, which stays as it is."""
    kind = "raw" if base.suffix == ".ext4" else "qcow2"
    program = settings.program("qemu-img")
    names = ["-b", str(base.absolute()), "-F", kind, str(disk)]
    settings.run_logged([program, "create", "-q", "-f", "qcow2", *names])
