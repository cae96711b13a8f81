"""What a simulated host has before its first device: folders, mounts, and what a boot leaves."""

from typing import Final

from agent.simulate.devices import NodeOf, Sysfs
from agent.simulate.machine import VFIO, Features

BOOT_ID: Final = "6f2b7f3c-0d4e-4a57-9d0c-5a1e6c1d2e3f"

_FOLDERS: Final = (
    "/sys/class/drm",
    "/sys/dev/char",
    "/sys/devices/virtual",
    "/sys/module",
    "/proc/self",
    "/proc/sys/kernel/random",
    "/run/udev",
)


def lay_out(sysfs: Sysfs, features: Features) -> None:
    """Make it."""
    tree = sysfs.tree
    for folder in _FOLDERS:
        tree.folder(folder)
    tree.file("/sys/class/drm/version", "drm 1.1.0 20060810\n")
    tree.file("/proc/sys/kernel/random/boot_id", f"{BOOT_ID}\n")
    tree.file("/proc/self/mountinfo", _mounts(tree.root, features))
    if features.vfio.group and (number := features.shared.get(VFIO)) is not None:
        # systemd makes this node at boot, so that opening it loads the module.
        sysfs.make_node(NodeOf(VFIO.removeprefix("/dev/"), number, 0o666))


def _mounts(root: str, features: Features) -> str:
    """What is mounted where, as ``man 5 proc`` describes it.

    /dev is listed twice: for a reader to whom the root is bound on /, and for one who is given the
    root as it is.
    """
    dev = "devtmpfs udev" if features.devtmpfs else "tmpfs tmpfs"
    here = root.replace("\\", "\\134").replace(" ", "\\040")
    return (
        "28 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "22 28 0:21 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw\n"
        f"24 28 0:6 / /dev rw,nosuid,relatime shared:2 - {dev} rw,mode=755\n"
        f"25 28 0:6 / {here}/dev rw,nosuid,relatime shared:2 - {dev} rw,mode=755\n"
    )
