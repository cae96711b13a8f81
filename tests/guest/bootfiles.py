"""The two files that QEMU boots: an uncompressed kernel, and a tiny initrd.

Under emulation both of Debian's own take long: the kernel unpacks itself and its initramfs starts
a udev of its own. QEMU enters an uncompressed kernel directly (PVH), and this initrd only loads
the modules that the root file system needs, mounts it and hands over to systemd.
"""

import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT_MODULES: Final = ("virtio_pci", "virtio_blk", "virtio_console", "crc32c_generic", "ext4")
"""What it takes to mount / and to answer the rig; modules built into the kernel drop out."""

_INIT: Final = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t devtmpfs dev /dev
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
for m in {modules}; do $b insmod /m/$m; done
i=0
while ! [ -b /dev/vda ] && [ $i -lt 200 ]; do $b sleep 0.05; i=$((i+1)); done
$b mount -t ext4 -o rw,noatime /dev/vda /root || exec $b sh
$b umount /proc /sys
$b mount --move /dev /root/dev
exec $b switch_root /root /sbin/init
"""

_XZ: Final = b"\xfd7zXZ\x00"
_ELF: Final = b"\x7fELF"


def uncompressed_kernel(vmlinuz: bytes) -> bytes:
    """The ELF kernel inside a bzImage as Debian 12 builds it, compressed by xz.

    Raises:
        ValueError: No such kernel is inside.
    """
    at = vmlinuz.find(_XZ)
    while at >= 0:
        try:
            kernel = lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(vmlinuz[at:])
        except lzma.LZMAError:
            kernel = b""  # the magic can also occur by chance
        if kernel.startswith(_ELF):
            return kernel
        at = vmlinuz.find(_XZ, at + 1)
    raise ValueError("no xz-compressed ELF kernel inside this vmlinuz")


def initrd(tree: Path) -> bytes:
    """The initrd, from busybox and the kernel modules of a root file system's tree."""
    (modules,) = (tree / "lib/modules").iterdir()
    paths = _in_load_order((modules / "modules.dep").read_text(), ROOT_MODULES)
    archive = _Cpio()
    for folder in ("dev", "proc", "sys", "root", "bin", "m"):
        archive.add(folder, mode=0o040755)
    archive.add("dev/console", mode=0o020600, number=(5, 1))
    archive.add("bin/busybox", (tree / "bin/busybox").read_bytes(), mode=0o100755)
    for path in paths:
        archive.add(f"m/{Path(path).name}", (modules / path).read_bytes())
    init = _INIT.format(modules=" ".join(Path(path).name for path in paths))
    archive.add("init", init.encode(), mode=0o100755)
    return archive.finish()


def _in_load_order(modules_dep: str, names: Sequence[str]) -> list[str]:
    """Paths of the named modules, each after all that it depends on (depmod's modules.dep)."""
    known: dict[str, list[str]] = {}
    for line in modules_dep.splitlines():
        path, _, needs = line.partition(":")
        name = Path(path).name.partition(".")[0].replace("-", "_")
        # modules.dep lists the direct needs first: reversed, it is an order of loading
        known[name] = [*reversed(needs.split()), path]
    return list(dict.fromkeys(path for name in names for path in known.get(name, ())))


class _Cpio:
    """An archive in the "new ASCII" format that the kernel unpacks as its initramfs."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._inode = 0

    def add(
        self,
        name: str,
        data: bytes = b"",
        *,
        mode: int = 0o100644,
        number: tuple[int, int] = (0, 0),
    ) -> None:
        self._inode += 1
        raw = name.encode() + b"\0"
        fields = (self._inode, mode, 0, 0, 1, 0, len(data), 0, 0, *number, len(raw), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields) + raw
        self._parts += [header, b"\0" * (-len(header) % 4), data, b"\0" * (-len(data) % 4)]

    def finish(self) -> bytes:
        self.add("TRAILER!!!", mode=0)
        return b"".join(self._parts)
