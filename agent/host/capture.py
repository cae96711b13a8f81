"""A host as a file: the facts of one look, as YAML that a person can read, mail and correct.

``scan --capture`` writes it, ``tests/hosts`` collects such files, ``simulate`` builds the host
again from one. It holds what ``host.model`` knows of every PCI function and no more: no serial
number, no host name, no network address, no inode. What follows from something else is not
written (the PCIe root from the path, a modalias from the ids), and what is usual is left out, so
a bridge takes one line.

Reading is strict: an unknown key, a wrong type, or anything given twice is a ``CaptureError`` that
names the line and the key. What a look can find is read again, though, even what no sound host has:
a broken one, or one caught while it changed, is what a bug report is about. ``contradictions``
finds that, for those who need a host that could be.
"""

import os
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec
import yaml

from agent.errors import CaptureError
from agent.host import captured_text
from agent.host.document import DocumentError
from agent.host.files import read_regular
from agent.host.model import (
    ADDRESS_PATTERN,
    Address,
    DeviceNumber,
    Environment,
    Function,
    Inventory,
    Link,
    Node,
    NodeRole,
    NodeState,
    Orphan,
    pcie_root_of,
)

VERSION: Final = 1
_AddressText = Annotated[str, msgspec.Meta(pattern=rf"\A{ADDRESS_PATTERN.pattern}\Z")]
# No device has more digits than four and six; a broken attribute may.
_IdText = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{4,8}:[0-9a-f]{4,8}\Z")]
_ClassText = Annotated[str, msgspec.Meta(pattern=r"\A0x[0-9a-f]{6,8}\Z")]
_NumberText = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,4}:[0-9]{1,7}\Z")]
_PART: Final = r"(?!\.{1,2}(?:/|\Z))[^/\x00]+"
_Devpath = Annotated[str, msgspec.Meta(pattern=rf"\A/devices(?:/{_PART})+\Z", max_length=4096)]
_DevPath = Annotated[str, msgspec.Meta(pattern=rf"\A/dev(?:/{_PART})+\Z", max_length=4096)]
# As it is printed: what is no text in it is spelt out.
_Name = Annotated[str, msgspec.Meta(pattern=rf"\A{_PART}\Z", max_length=4096)]
_Natural = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class _Part(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What all parts of a capture have in common: immutable, strict, brief."""


class CapturedNode(_Part, frozen=True):
    """A node in /dev; by default it is there and udev has dealt with it."""

    role: NodeRole
    name: _Name
    path: _DevPath
    number: _NumberText | None = None
    state: NodeState = NodeState.PRESENT
    settled: bool = True

    def fact(self) -> Node:
        """The fact that it was written from."""
        number = None
        if self.number is not None:
            major, minor = map(int, self.number.split(":"))
            number = DeviceNumber(major, minor)
        return Node(self.role, self.name, self.path, number, self.state, self.settled)


class CapturedLink(_Part, frozen=True):
    """A link that udev made to a node."""

    path: _DevPath
    target: _DevPath


class CapturedFunction(_Part, frozen=True):
    """A PCI function."""

    address: _AddressText
    devpath: _Devpath
    id: _IdText
    """Vendor and device: ``8086:e212``."""
    class_code: _ClassText = msgspec.field(name="class")
    subsystem: _IdText | None = None
    revision: _Natural | None = None
    driver: _Name | None = None
    vfio_dev: bool = False
    """sysfs has ``vfio-dev/`` below it."""
    boot_vga: bool | None = None
    numa_node: _Natural | None = None
    iommu_group: _Natural | None = None
    physfn: _AddressText | None = None
    virtfns: tuple[_AddressText, ...] = ()
    nodes: tuple[CapturedNode, ...] = ()
    """Nodes below it, and the node of its IOMMU group while a VFIO driver has it."""
    links: tuple[CapturedLink, ...] = ()

    def fact(self, inode: int) -> Function:
        """The fact that it was written from, with an inode, which no capture holds."""
        vendor, device = (int(part, 16) for part in self.id.split(":"))
        sub_vendor, sub_device = None, None
        if self.subsystem is not None and not self.subsystem.startswith("0000:"):
            sub_vendor, sub_device = (int(part, 16) for part in self.subsystem.split(":"))
        return Function(
            address=Address(self.address),
            devpath=self.devpath,
            vendor=vendor,
            device=device,
            class_code=int(self.class_code, 16),
            subsystem_vendor=sub_vendor,
            subsystem_device=sub_device,
            revision=self.revision,
            driver=self.driver,
            boot_vga=self.boot_vga,
            numa_node=self.numa_node,
            pcie_root=pcie_root_of(self.devpath),
            iommu_group=self.iommu_group,
            physfn=None if self.physfn is None else Address(self.physfn),
            virtfns=tuple(map(Address, self.virtfns)),
            nodes=tuple(node.fact() for node in self.nodes),
            links=tuple(Link(link.path, link.target) for link in self.links),
            has_vfio_dev=self.vfio_dev,
            inode=inode,
        )


class CapturedOrphan(_Part, frozen=True):
    """A DRM or accel node without a PCI function."""

    node: CapturedNode
    devpath: _Devpath
    """The path of the node's own folder below /sys."""
    driver: _Name | None = None


class CapturedDrop(_Part, frozen=True):
    """A function that could not be read."""

    address: _AddressText
    reason: str


class CapturedEnvironment(_Part, frozen=True):
    """What the host offers around its devices."""

    devtmpfs: bool = True
    udevd: bool = True
    udev_queue: bool = False
    iommu: bool = False


class Capture(_Part, frozen=True):
    """The facts of a host."""

    version: int
    description: str = ""
    """What host this is, in a person's words."""
    kernel: str | None = None
    """The kernel's release as far as it names no build: ``6.12.48``."""
    environment: CapturedEnvironment = CapturedEnvironment()
    functions: tuple[CapturedFunction, ...] = ()
    shared: tuple[CapturedNode, ...] = ()
    """Nodes that belong to no single function: ``/dev/vfio/vfio``, ``/dev/kfd``, …"""
    orphans: tuple[CapturedOrphan, ...] = ()
    dropped: tuple[CapturedDrop, ...] = ()

    def inventory(self) -> Inventory:
        """The inventory that it was written from, with other inodes."""
        return Inventory(
            functions={
                Address(function.address): function.fact(inode)
                for inode, function in enumerate(self.functions, start=1)
            },
            shared={node.path: node.fact() for node in self.shared},
            orphans=tuple(
                Orphan(orphan.node.fact(), orphan.devpath, orphan.driver) for orphan in self.orphans
            ),
            dropped={Address(drop.address): drop.reason for drop in self.dropped},
            environment=Environment(
                devtmpfs=self.environment.devtmpfs,
                udevd=self.environment.udevd,
                udev_queue=self.environment.udev_queue,
                iommu=self.environment.iommu,
            ),
        )


# --- writing --------------------------------------------------------------------------------------


def capture(inventory: Inventory, *, description: str = "", kernel: str | None = None) -> Capture:
    """Put the facts of a full look into the form of a file.

    Args:
        inventory: The facts.
        description: What host this is, in a person's words.
        kernel: The kernel's release; what follows its numbers may name a host and is cut off.
    """
    release = None if kernel is None else re.match(r"[0-9]+(\.[0-9]+)*", kernel)
    environment = inventory.environment
    return Capture(
        version=VERSION,
        description=description,
        kernel=None if release is None else release[0],
        environment=CapturedEnvironment(
            devtmpfs=environment.devtmpfs,
            udevd=environment.udevd,
            udev_queue=environment.udev_queue,
            iommu=environment.iommu,
        ),
        functions=tuple(map(_captured_function, inventory.functions.values())),
        shared=tuple(map(_captured_node, inventory.shared.values())),
        orphans=tuple(
            CapturedOrphan(
                node=_captured_node(orphan.node), devpath=orphan.devpath, driver=orphan.driver
            )
            for orphan in inventory.orphans
        ),
        dropped=tuple(
            CapturedDrop(address=address, reason=reason)
            for address, reason in inventory.dropped.items()
        ),
    )


def dump(captured: Capture) -> str:
    """Write a capture as YAML: the same facts give the same text."""
    data = msgspec.to_builtins(captured)
    if data.get("environment") == {}:
        del data["environment"]  # msgspec leaves out what is equal to its default but for Structs
    text: str = yaml.dump(
        data,
        Dumper=_Dumper,
        default_flow_style=None,  # what holds no other collection takes one line
        sort_keys=False,
        allow_unicode=True,
        width=2**20,
    )
    return "# The facts of a host, written by `cdi-agent scan --capture`.\n" + text


class _Dumper(yaml.CSafeDumper):
    """Writes no aliases: a file that repeats itself stays readable, and ours refuses them."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - PyYAML hands it over
        return True


def _captured_node(node: Node) -> CapturedNode:
    return CapturedNode(
        role=node.role,
        name=node.name,
        path=node.path,
        number=None if node.number is None else str(node.number),
        state=node.state,
        settled=node.settled,
    )


def _captured_function(function: Function) -> CapturedFunction:
    subsystem = None
    if function.subsystem_vendor is not None and function.subsystem_device is not None:
        subsystem = f"{function.subsystem_vendor:04x}:{function.subsystem_device:04x}"
    return CapturedFunction(
        address=function.address,
        devpath=function.devpath,
        id=function.pci_id,
        class_code=f"0x{function.class_code:06x}",
        subsystem=subsystem,
        revision=function.revision,
        driver=function.driver,
        vfio_dev=function.has_vfio_dev,
        boot_vga=function.boot_vga,
        numa_node=function.numa_node,
        iommu_group=function.iommu_group,
        physfn=function.physfn,
        virtfns=function.virtfns,
        nodes=tuple(map(_captured_node, function.nodes)),
        links=tuple(CapturedLink(path=link.path, target=link.target) for link in function.links),
    )


# --- reading --------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> Capture:
    """Read the capture in a file.

    Raises:
        CaptureError: It cannot be read, or does not have the form of a capture.
    """
    name = os.fspath(path)
    try:
        content = read_regular(name, captured_text.MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CaptureError(f"{name!r} cannot be read: {reason}") from error
    return parse(content, origin=name)


def parse(content: bytes | str, *, origin: str = "capture") -> Capture:
    """Read a capture.

    Args:
        content: What ``dump`` wrote, perhaps edited.
        origin: What to call it in an error.

    Raises:
        CaptureError: It does not have the form of a capture; the sentence names the key.
    """
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    try:
        data, lines = captured_text.read(raw)
    except DocumentError as error:
        where = origin if error.line is None else f"{origin}:{error.line}"
        raise CaptureError(f"{where}: {error}") from error
    version = data.get("version") if isinstance(data, dict) else None
    if version != str(VERSION):
        found = "has none" if version is None else f"has {str(version)[:20]!r}"
        raise CaptureError(
            f"{origin}: a captured host begins with `version: {VERSION}`, this {found}",
            hint=None if version is None else "a newer cdi-agent may have written it",
        )
    try:
        captured = msgspec.convert(data, Capture, strict=False)
    except msgspec.ValidationError as error:
        # "… unknown field `x` - at `$.functions[0]`": what is wrong where is told as text only
        problem, _, key = str(error).partition(" - at `$")
        key = key.strip(".`")
        unknown = re.search(r"unknown field `(.*)`", problem, re.DOTALL)
        place = f"{key}.{unknown[1]}".lstrip(".") if unknown else key
        raise CaptureError(
            f"{origin}:{lines.get(place, 1)}: {key}{': ' if key else ''}{problem}"
        ) from error
    for where, problem in _repeated(captured):
        raise CaptureError(f"{origin}: {where}: {problem}")
    return captured


def _repeated(captured: Capture) -> Iterator[tuple[str, str]]:
    """Find what would be lost, as a look finds it once, as (key, why)."""
    for word, index in _twice(function.address for function in captured.functions):
        yield f"functions[{index}].address", f"{word} is there twice"
    for path, number in _twice(node.path for node in captured.shared):
        yield f"shared[{number}].path", f"{path} is there twice"


def contradictions(captured: Capture) -> Iterator[tuple[str, str]]:
    """Find what no sound host has, as (key, why)."""
    known = {function.address: function for function in captured.functions}
    for index, function in enumerate(captured.functions):
        where = f"functions[{index}]"
        if function.devpath.rpartition("/")[2] != function.address:
            yield f"{where}.devpath", f"does not end in {function.address}"
        physfn = None if function.physfn is None else known.get(function.physfn)
        if physfn is not None and function.address not in physfn.virtfns:
            yield f"{where}.physfn", f"{physfn.address} has no such VF"
        for place, address in enumerate(function.virtfns):
            virtfn = known.get(address)
            if virtfn is not None and virtfn.physfn != function.address:
                yield f"{where}.virtfns[{place}]", f"{address} is no VF of {function.address}"
        for path, place in _twice(node.path for node in function.nodes):
            yield f"{where}.nodes[{place}].path", f"{path} is there twice"


def _twice(words: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Each word that came before, with its position."""
    seen: set[str] = set()
    for index, word in enumerate(words):
        if word in seen:
            yield word, index
        seen.add(word)
