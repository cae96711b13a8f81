"""A captured host, built again: `load` makes a simulated host with the facts of a capture.

It has the same functions, drivers, nodes and numbers, so a look at it gives the capture again; then
it goes on as a kernel would. What a capture cannot say is filled in: which driver a function has
when it comes back from VFIO (the usual one for its vendor and class), how its nodes hang from it,
and that its VFs are all that it can have. Functions that could not be read when the host was
captured are left out, for nothing is known about them; a node that could not be examined becomes
something that is no node.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from msgspec import structs

from agent.errors import CaptureError
from agent.host.capture import Capture, CapturedFunction, CapturedNode, contradictions
from agent.host.model import Address, DeviceNumber, NodeRole, NodeState, is_vfio_driver
from agent.simulate.drivers import Drivers, Majors, VfioKind
from agent.simulate.events import Emit
from agent.simulate.hardware import NOTHING, Hardware, Makes, driver_named
from agent.simulate.kernel import Kernel
from agent.simulate.machine import Features, Machine
from agent.simulate.nodes import MakeNode, make_plain
from agent.simulate.pci import Function
from agent.simulate.tree import Tree
from agent.simulate.udev import QUEUE, UdevMode

_DISPLAY: Final = 0x03
_USUAL: Final = {
    (0x8086, 0x03): "xe",
    (0x1002, 0x03): "amdgpu",
    (0x10DE, 0x03): "nouveau",
}
_USUAL_BY_CLASS: Final = {0x0403: "snd_hda_intel", 0x0604: "pcieport", 0x0C03: "xhci_hcd"}
_MEIS: Final = ("mei-gscfi", "mei-gsc")
_LINK_FOLDERS: Final = ("/dev/accel/by-path", "/dev/dri/by-path")


def load(
    capture: Capture,
    root: Path,
    emit: Emit,
    make_node: MakeNode = make_plain,
    *,
    udev: UdevMode = UdevMode.AUTO,
) -> Kernel:
    """Build a captured host.

    Args:
        capture: Its facts.
        root: An empty or missing folder.
        emit: Takes the messages of what happens from now on.
        make_node: Makes device nodes.
        udev: When udevd deals with messages; without udevd in the capture there is none.

    Raises:
        CaptureError: No kernel makes such a host.
        FileExistsError: The folder is not empty.
    """
    for where, problem in contradictions(capture):
        raise CaptureError(f"this host cannot be simulated: {where}: {problem}")
    kernel = Kernel(root, emit, make_node, features=_features(capture))
    try:
        with kernel.boot(autoload=False) as machine:
            _Loading(capture, machine).run()
    except ValueError as error:
        raise CaptureError(f"this host cannot be simulated: {error}") from error
    _leave_as_captured(capture, kernel)
    kernel.udev = udev if capture.environment.udevd else UdevMode.OFF
    if capture.environment.udev_queue:
        kernel.tree.file(QUEUE, "")
    return kernel


def _features(capture: Capture) -> Features:
    """What kind of host it is."""
    nodes = tuple(_all_nodes(capture))
    roles = {node.role for node in nodes}
    paths = {node.path for node in capture.shared}
    majors = {node.role: _number(node)[0] for node in nodes if node.number is not None}
    usual = Majors()
    group = NodeRole.VFIO_GROUP in roles or "/dev/vfio/vfio" in paths
    cdev = NodeRole.VFIO_CDEV in roles or "/dev/iommu" in paths
    if cdev:
        vfio = VfioKind.BOTH if group else VfioKind.CDEV
    else:
        vfio = VfioKind.GROUP
        on_vfio = [f for f in capture.functions if is_vfio_driver(f.driver)]
        if on_vfio and not any(function.vfio_dev for function in on_vfio):
            vfio = VfioKind.OLD
    return Features(
        iommu=any(function.iommu_group is not None for function in capture.functions),
        vfio=vfio,
        devtmpfs=capture.environment.devtmpfs,
        drivers=(),
        majors=Majors(
            vfio=majors.get(NodeRole.VFIO_GROUP, usual.vfio),
            vfio_device=majors.get(NodeRole.VFIO_CDEV, usual.vfio_device),
            mei=majors.get(NodeRole.MEI, usual.mei),
        ),
        shared={node.path: _number(node) for node in capture.shared},
    )


def _all_nodes(capture: Capture) -> Iterator[CapturedNode]:
    for function in capture.functions:
        yield from function.nodes
    for orphan in capture.orphans:
        yield orphan.node
    yield from capture.shared


def _number(node: CapturedNode) -> DeviceNumber:
    """A node's number; 0:0, which no device has, where none was captured."""
    if node.number is None:
        return DeviceNumber(0, 0)
    major, minor = node.number.split(":")
    return DeviceNumber(int(major), int(minor))


def _index(node: CapturedNode) -> int:
    """The number in a node's name, by which the kernel counts: ``renderD128``, ``vfio0``."""
    match = re.search(r"[0-9]+$", node.name)
    if match is None:
        raise ValueError(f"{node.name} is no name of a node")
    return int(match[0])


class _Loading:
    """Plugs in, function by function, and asks for each number before it is given.

    Args:
        capture: What to load.
        machine: The host that it becomes.
    """

    def __init__(self, capture: Capture, machine: Machine) -> None:
        self._capture = capture
        self._machine = machine
        self._by_address = {function.address: function for function in capture.functions}

    def run(self) -> None:
        """Load all."""
        machine = self._machine
        bound = [f for f in self._capture.functions if f.driver]
        between = [via for f in bound if (via := _makes(f.nodes, f.driver).via)]
        for name in dict.fromkeys([*(f.driver for f in bound if f.driver), *between]):
            machine.bus.register(driver_named(name))
        for path in machine.features.shared:
            machine.share(path)
        # A bridge before what is below it; VFs with their PF.
        for function in sorted(self._capture.functions, key=lambda f: f.devpath.count("/")):
            if function.physfn not in self._by_address:
                self._plug(function)
        self._plug_orphans()
        for name in ("vfio-pci", "pcieport"):
            if name not in machine.bus.loaded:
                machine.bus.register(driver_named(name))

    def _plug(self, captured: CapturedFunction) -> None:
        vfs = tuple(
            _hardware(self._by_address[address])
            for address in captured.virtfns
            if address in self._by_address
        )
        function = self._machine.bus.add(
            structs.replace(_hardware(captured), vfs=vfs, total_vfs=len(vfs))
        )
        self._bind(function, captured)
        if vfs:
            self._machine.add_vfs(
                function, len(vfs), lambda vf: self._bind(vf, self._by_address[vf.address])
            )

    def _bind(self, function: Function, captured: CapturedFunction) -> None:
        if captured.driver is None:
            return
        bus, drivers = self._machine.bus, self._machine.drivers
        if is_vfio_driver(captured.driver):
            self._machine.override(function, captured.driver)
        _want(drivers, captured.nodes)
        driver = driver_named(captured.driver)
        if bus.bind(function, bus.loaded[driver.name]) != 0:
            raise ValueError(f"{captured.address} cannot be bound to {captured.driver}")
        _want(drivers, ())

    def _plug_orphans(self) -> None:
        by_parent: dict[tuple[str, str | None], list[CapturedNode]] = {}
        for orphan in self._capture.orphans:
            parent, _, _ = orphan.devpath.rsplit("/", 2)
            by_parent.setdefault((parent, orphan.driver), []).append(orphan.node)
        for (parent, driver), nodes in by_parent.items():
            _want(self._machine.drivers, nodes)
            self._machine.plug_platform(parent, driver, _makes(nodes, driver))
            _want(self._machine.drivers, ())


def _want(drivers: Drivers, nodes: Iterable[CapturedNode]) -> None:
    """Ask for the numbers of these nodes, each from its own space."""
    wanted: dict[NodeRole, list[int]] = {}
    for node in nodes:
        # A group's node is named after the group and counted by its minor.
        by_minor = node.role is NodeRole.VFIO_GROUP
        index = _number(node)[1] if by_minor else _index(node)
        wanted.setdefault(node.role, []).append(index)
    for role, space in (
        (NodeRole.CARD, drivers.cards),
        (NodeRole.RENDER, drivers.renders),
        (NodeRole.ACCEL, drivers.accels),
        (NodeRole.MEI, drivers.meis),
        (NodeRole.VFIO_GROUP, drivers.group_minors),
        (NodeRole.VFIO_CDEV, drivers.vfio_devices),
    ):
        space.want(*wanted.get(role, ()))


def _hardware(captured: CapturedFunction) -> Hardware:
    """The function as it was built."""
    fact = captured.fact(inode=0)
    base = fact.class_code >> 16
    on_vfio = is_vfio_driver(captured.driver)
    own = captured.driver
    if own is None or on_vfio:
        own = _USUAL.get((fact.vendor, base)) or _USUAL_BY_CLASS.get(fact.class_code >> 8)
    makes = _makes(captured.nodes, own)
    if on_vfio or captured.driver is None:
        # What it makes when it is back; a display that has no driver is taken for a usual one.
        makes = Makes(card=True, render=True) if base == _DISPLAY else NOTHING
    root, bridges = _place(captured)
    return Hardware(
        address=Address(captured.address),
        vendor=fact.vendor,
        device=fact.device,
        class_code=fact.class_code,
        subsystem_vendor=fact.subsystem_vendor or 0,
        subsystem_device=fact.subsystem_device or 0,
        revision=fact.revision or 0,
        boot_vga=fact.boot_vga,
        numa_node=-1 if fact.numa_node is None else fact.numa_node,
        drivers=() if own is None else (own,),
        makes=makes,
        root=root,
        bridges=bridges,
        group=fact.iommu_group,
    )


def _place(captured: CapturedFunction) -> tuple[str, tuple[Address, ...]]:
    """The folder of a function's root complex below /sys/devices, and the bridges below that."""
    *above, last = captured.devpath.removeprefix("/devices/").split("/")
    roots = [index for index, name in enumerate(above) if name.startswith("pci")]
    if last != captured.address or not roots:
        raise ValueError(f"{captured.address} is not at {captured.devpath}")
    first = roots[-1] + 1
    return "/".join(above[:first]), tuple(map(Address, above[first:]))


def _makes(nodes: Iterable[CapturedNode], driver: str | None) -> Makes:
    """What a driver must make for these nodes to appear."""
    roles = [node.role for node in nodes]
    for role in (NodeRole.CARD, NodeRole.RENDER, NodeRole.ACCEL):
        if roles.count(role) > 1:
            raise ValueError(f"a function with more than one node for {role}")
    meis = roles.count(NodeRole.MEI)
    if meis > len(_MEIS):
        raise ValueError(f"a function with {meis} nodes of management engines")
    return Makes(
        card=NodeRole.CARD in roles,
        render=NodeRole.RENDER in roles,
        accel=NodeRole.ACCEL in roles,
        mei=_MEIS[:meis],
        via="virtio_gpu" if driver == "virtio-pci" and roles else None,
    )


def _leave_as_captured(capture: Capture, kernel: Kernel) -> None:
    """What only udevd or a person can have done: nodes that are missing, links, the database."""
    tree = kernel.tree
    for node in _all_nodes(capture):
        if not node.settled and node.number is not None:
            tree.unlink(f"/run/udev/data/c{node.number}")
        if node.state is NodeState.MISSING:
            kernel.lose(node.path)
        elif node.state is not NodeState.PRESENT:
            kernel.lose(node.path)
            tree.file(node.path, "")
    _set_links(tree, {link.path: link.target for f in capture.functions for link in f.links})


def _set_links(tree: Tree, wanted: dict[str, str]) -> None:
    for folder in _LINK_FOLDERS:
        for name in tree.names(folder):
            if f"{folder}/{name}" not in wanted:
                tree.unlink(f"{folder}/{name}")
        tree.prune(folder, stop="/dev")
    for path, target in wanted.items():
        tree.link(path, target)
