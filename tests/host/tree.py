"""A host in a folder, changed step by step, for the tests of what reads it.

Deliberately plain: each method writes the files that the kernel or udev would have left, and says
what the kernel would have said, by `hints`. It keeps no rule of the kernel (two functions may be
given one card): the tests of a reader need worlds that are wrong, too.
"""

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from agent.host.devnodes import NodeStat
from agent.host.hints import Hint
from agent.host.model import DeviceNumber
from agent.host.scan import Scanner
from agent.host.uevent import Message, hint_of

ROOT = "/devices/pci0000:00"
FOLDERS = {"card": "drm", "renderD": "drm", "accel": "accel", "vfio": "vfio-dev", "mei": "mei"}
DEVICES = {
    "card": "dri/",
    "renderD": "dri/",
    "accel": "accel/",
    "vfio": "vfio/devices/",
    "mei": "",
}
MAJORS = {"card": 226, "renderD": 226, "accel": 261, "vfio": 510, "mei": 240}


def stat_node(path: str, /) -> NodeStat | None:
    """Stand in for lstat where there is no mknod: a file holds the number of its node."""
    try:
        with open(path) as file:
            words = file.read(40).split(":")
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(words) != 2:
        return NodeStat(None)
    return NodeStat(DeviceNumber(int(words[0]), int(words[1])))


@dataclasses.dataclass
class Pci:
    """What the tree keeps in mind of a function."""

    devpath: str
    nodes: dict[str, str] = dataclasses.field(default_factory=dict)
    """By name: the path of its sysfs entry."""
    group: int | None = None
    driver: str | None = None
    pf: str | None = None
    vfs: list[str] = dataclasses.field(default_factory=list)


class Host:
    """The tree.

    Args:
        root: An empty folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.functions: dict[str, Pci] = {}
        self.hints: list[Hint] = []
        for folder in (
            "sys/bus/pci/devices",
            "sys/devices",
            "sys/dev/char",
            "sys/kernel/iommu_groups",
            "dev",
            "run/udev/data",
            "proc/self",
        ):
            (root / folder).mkdir(parents=True)
        self.write("run/udev/control", "")
        self.write(
            "proc/self/mountinfo",
            f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n24 1 0:6 / {root}/dev rw - devtmpfs udev rw\n",
        )

    def scanner(self, *extra_nodes: str) -> Scanner:
        """A scanner of this host that knows nothing yet."""
        return Scanner(
            sys=self.root / "sys",
            dev=self.root / "dev",
            run=self.root / "run",
            proc=self.root / "proc",
            stat_node=stat_node,
            extra_nodes=extra_nodes,
        )

    # --- files ------------------------------------------------------------------------------------

    def write(self, path: str, content: str) -> None:
        """Write a file."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)

    def link(self, path: str, target: str) -> None:
        """Make or replace a link to another path of the tree."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(os.path.relpath(self.root / target.lstrip("/"), place.parent))

    def unlink(self, path: str) -> None:
        """Remove a file or link, if it is there."""
        (self.root / path.lstrip("/")).unlink(missing_ok=True)

    def sys(self, address: str, name: str = "") -> Path:
        """A file of a function."""
        return self.root / f"sys{self.functions[address].devpath}" / name

    def say(self, action: str, devpath: str, subsystem: str, node: str | None = None) -> None:
        """Say what the kernel says, twice: it does, and udev says it again."""
        number = None
        if node is not None and (found := stat_node(f"{self.root}{node}")) is not None:
            number = found.number
        for source in ("kernel", "udev"):
            message = Message(action, devpath, subsystem, node, number)
            self.hints.append(hint_of(message, source, 0.0))

    # --- functions --------------------------------------------------------------------------------

    def add(
        self,
        address: str,
        *,
        ids: str = "8086:e212",
        class_code: int = 0x030000,
        group: int | None = None,
        bridges: Sequence[str] = (),
        pf: str | None = None,
    ) -> None:
        """A function appears."""
        devpath = "/".join((ROOT, *bridges, address))
        self.functions[address] = Pci(devpath)
        vendor, device = ids.split(":")
        for name, value in {
            "vendor": f"0x{vendor}",
            "device": f"0x{device}",
            "class": f"0x{class_code:06x}",
            "subsystem_vendor": "0x8086",
            "subsystem_device": "0x1100",
            "revision": "0x00",
            "numa_node": "-1",
        }.items():
            self.write(f"sys{devpath}/{name}", f"{value}\n")
        if class_code >> 8 == 0x0300:
            self.write(f"sys{devpath}/boot_vga", "1\n")
        self.link(f"sys/bus/pci/devices/{address}", f"sys{devpath}")
        if pf is not None:
            self.functions[address].pf = pf
            vfs = self.functions[pf].vfs
            self.link(f"sys{self.functions[pf].devpath}/virtfn{len(vfs)}", f"sys{devpath}")
            self.link(f"sys{devpath}/physfn", f"sys{self.functions[pf].devpath}")
            vfs.append(address)
            self.say("change", self.functions[pf].devpath, "pci")
        self.say("add", devpath, "pci")
        if group is not None:
            self.move_to_group(address, group)

    def remove(self, address: str) -> None:
        """A function vanishes with all that it has, and its VFs before it."""
        function = self.functions[address]
        for vf in tuple(function.vfs):
            self.remove(vf)
        self.unbind(address)
        self.move_to_group(address, None)
        if function.pf is not None:
            pf = self.functions[function.pf]
            self.unlink(f"sys{pf.devpath}/virtfn{pf.vfs.index(address)}")
            # The links of a PF have no gaps.
            for index, vf in enumerate(v for v in pf.vfs if v != address):
                self.link(f"sys{pf.devpath}/virtfn{index}", f"sys{self.functions[vf].devpath}")
            self.unlink(f"sys{pf.devpath}/virtfn{len(pf.vfs) - 1}")
            pf.vfs.remove(address)
            self.say("change", pf.devpath, "pci")
        self.unlink(f"sys/bus/pci/devices/{address}")
        shutil.rmtree(self.root / f"sys{function.devpath}")
        del self.functions[address]
        self.say("remove", function.devpath, "pci")

    def move_to_group(self, address: str, group: int | None) -> None:
        """A function gets another IOMMU group, or none."""
        function = self.functions[address]
        if function.group is not None:
            old = self.root / f"sys/kernel/iommu_groups/{function.group}"
            (old / "devices" / address).unlink()
            if not list((old / "devices").iterdir()):
                shutil.rmtree(old)
            self.unlink(f"sys{function.devpath}/iommu_group")
        function.group = group
        if group is not None:
            place = f"sys/kernel/iommu_groups/{group}"
            self.link(f"{place}/devices/{address}", f"sys{function.devpath}")
            self.link(f"sys{function.devpath}/iommu_group", place)
        self.say("change", function.devpath, "pci")

    def bind(self, address: str, driver: str, *nodes: str, by_path: bool = True) -> None:
        """A driver binds and makes nodes."""
        function = self.functions[address]
        function.driver = driver
        self.link(f"sys{function.devpath}/driver", f"sys/bus/pci/drivers/{driver}")
        self.root.joinpath(f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
        for name in nodes:
            self.add_node(address, name, by_path=by_path)
        self.say("bind", function.devpath, "pci")

    def unbind(self, address: str) -> None:
        """A driver lets go; its nodes vanish."""
        function = self.functions[address]
        for name in tuple(function.nodes):
            self.remove_node(address, name)
        function.driver = None
        self.unlink(f"sys{function.devpath}/driver")
        self.say("unbind", function.devpath, "pci")

    # --- nodes ------------------------------------------------------------------------------------

    def add_node(
        self, address: str, name: str, *, below: str = "", by_path: bool = True, minor: int = -1
    ) -> None:
        """A node of a function appears, in sysfs and in /dev, and udev deals with it."""
        kind = name.rstrip("0123456789")
        devpath = f"{self.functions[address].devpath}{below}/{FOLDERS[kind]}/{name}"
        self.functions[address].nodes[name] = devpath
        self.entry(devpath, name, minor)
        if by_path and kind in {"card", "renderD"}:
            link = f"/dev/dri/by-path/pci-{address}-{kind.removesuffix('D')}"
            self.link(link, f"/dev/dri/{name}")
        self.say("add", devpath, FOLDERS[kind], f"/dev/{DEVICES[kind]}{name}")

    def remove_node(self, address: str, name: str) -> None:
        """A node of a function vanishes."""
        kind = name.rstrip("0123456789")
        devpath = self.functions[address].nodes.pop(name)
        node = f"/dev/{DEVICES[kind]}{name}"
        self.say("remove", devpath, FOLDERS[kind], node)
        self.no_entry(devpath, name)
        link = f"/dev/dri/by-path/pci-{address}-{kind.removesuffix('D')}"
        if os.path.basename(os.path.realpath(f"{self.root}{link}")) == name:
            self.unlink(link)

    def add_orphan(self, name: str, device: str = "/devices/platform/vkms") -> None:
        """A card appears that no function has."""
        kind = name.rstrip("0123456789")
        devpath = f"{device}/{FOLDERS[kind]}/{name}"
        self.entry(devpath, name)
        self.link(f"sys{devpath}/device", f"sys{device}")
        self.say("add", devpath, FOLDERS[kind], f"/dev/{DEVICES[kind]}{name}")

    def remove_orphan(self, name: str, device: str = "/devices/platform/vkms") -> None:
        """A card vanishes that no function has."""
        kind = name.rstrip("0123456789")
        devpath = f"{device}/{FOLDERS[kind]}/{name}"
        self.say("remove", devpath, FOLDERS[kind], f"/dev/{DEVICES[kind]}{name}")
        self.no_entry(devpath, name)

    def entry(self, devpath: str, name: str, minor: int = -1) -> None:
        """What sysfs, /dev and udev's database have of a node."""
        kind = name.rstrip("0123456789")
        number = f"{MAJORS[kind]}:{int(name.removeprefix(kind)) if minor < 0 else minor}"
        self.write(f"sys{devpath}/dev", f"{number}\n")
        devtype = "DEVTYPE=drm_minor\n" if FOLDERS[kind] == "drm" else ""
        self.write(f"sys{devpath}/uevent", f"DEVNAME={DEVICES[kind]}{name}\n{devtype}")
        self.link(f"sys/class/{FOLDERS[kind]}/{name}", f"sys{devpath}")
        self.link(f"sys/dev/char/{number}", f"sys{devpath}")
        self.write(f"dev/{DEVICES[kind]}{name}", number)
        self.write(f"run/udev/data/c{number}", "")

    def no_entry(self, devpath: str, name: str) -> None:
        """Take away what `entry` made."""
        kind = name.rstrip("0123456789")
        number = (self.root / f"sys{devpath}/dev").read_text().strip()
        self.unlink(f"dev/{DEVICES[kind]}{name}")
        self.unlink(f"sys/dev/char/{number}")
        self.unlink(f"sys/class/{FOLDERS[kind]}/{name}")
        self.unlink(f"run/udev/data/c{number}")
        shutil.rmtree(self.root / f"sys{devpath}")
        folder = (self.root / f"sys{devpath}").parent
        if not list(folder.iterdir()):
            folder.rmdir()

    def add_group_node(self, group: int) -> None:
        """The node of an IOMMU group appears: a VFIO driver has a function of it."""
        self.shared(f"vfio/{group}", f"511:{group}", f"virtual/vfio/{group}")
        self.link(f"sys/class/vfio/{group}", f"sys/devices/virtual/vfio/{group}")
        self.say("add", f"/devices/virtual/vfio/{group}", "vfio", f"/dev/vfio/{group}")

    def remove_group_node(self, group: int) -> None:
        """The node of an IOMMU group vanishes."""
        self.say("remove", f"/devices/virtual/vfio/{group}", "vfio", f"/dev/vfio/{group}")
        self.unlink(f"sys/class/vfio/{group}")
        self.unlink(f"sys/dev/char/511:{group}")
        self.unlink(f"dev/vfio/{group}")
        shutil.rmtree(self.root / f"sys/devices/virtual/vfio/{group}")

    def shared(self, name: str, number: str, device: str) -> None:
        """A node that belongs to no function: ``kfd``, ``vfio/vfio``."""
        self.write(f"sys/devices/{device}/dev", f"{number}\n")
        self.write(f"sys/devices/{device}/uevent", f"DEVNAME={name}\n")
        self.link(f"sys/dev/char/{number}", f"sys/devices/{device}")
        self.write(f"dev/{name}", number)
        self.write(f"run/udev/data/c{number}", "")
