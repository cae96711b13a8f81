"""A look: which functions are read, and how what was read becomes one inventory.

A full look reads every function. A partial one reads those of its scope, and then whatever sysfs
says belongs to them now (slot, IOMMU group, PF, VFs), until nothing new turns up; the rest is as
it was. If the scope covers all that changed, both give the same inventory. What was read and is as
it was stays the same *object*, so whoever comes after sees at once what there is nothing to do for.

Two functions that list one path were read before and after it moved from one to the other: both
are read again. One that still does, or that never holds still, is left to the next look.

Read in every look, because it is cheap: nodes that belong to no function and are known by their
path (``/dev/vfio/vfio``, ``/dev/kfd``), and what the host offers around its devices. Orphans (DRM
and accel nodes that are no function's own) need a listing of all cards and connectors: only if the
scope says so, or one is below a function that is read.

No asyncio, no thread, no lock: the caller runs a look in one thread, and one look at a time.
"""

import os
from collections.abc import Iterable, KeysView, Mapping
from pathlib import Path
from typing import Final

from agent.errors import LookError
from agent.host import sysfs
from agent.host.devnodes import DevNodes, Links, StatNode, lstat_node, node_path
from agent.host.function import (
    ATTEMPTS,
    DEVICES,
    FunctionReader,
    node_order,
    role_of,
)
from agent.host.hints import Scope, widen
from agent.host.model import (
    ADDRESS_PATTERN,
    Address,
    DeviceNumber,
    Environment,
    Function,
    Inventory,
    Node,
    NodeRole,
    NodeState,
    Orphan,
    address_in_devpath,
    address_order,
    owner_of_node,
)
from agent.host.sysfs import Folder, UnreadableError

SHARED: Final = ("/dev/iommu", "/dev/kfd", "/dev/vfio/vfio")
"""The nodes that devices share and that are looked at on every host."""

_CLASSES: Final = ("accel", "drm")


class Scanner:
    """Reads the facts of a host.

    Args:
        sys: The root of sysfs.
        dev: The root of device nodes; they are reported as ``/dev/...`` whatever it is.
        run: The root of udev's files.
        proc: Says what is mounted at ``dev``.
        stat_node: Says what is at a path below ``dev``.
        extra_nodes: Paths below /dev that belong to no function, beyond those always looked at.
    """

    def __init__(
        self,
        *,
        sys: Path = Path("/sys"),
        dev: Path = Path("/dev"),
        run: Path = Path("/run"),
        proc: Path = Path("/proc"),
        stat_node: StatNode = lstat_node,
        extra_nodes: tuple[str, ...] = (),
    ) -> None:
        self._sys = str(sys).rstrip("/")
        self._shared = tuple(sorted({*SHARED, *extra_nodes}))
        self._nodes = DevNodes(dev=str(dev), run=str(run), proc=str(proc), stat_node=stat_node)
        self._links = Links(self._nodes)
        self._functions = FunctionReader(self._sys, self._nodes, self._links)

    def scan(self, scope: Scope, previous: Inventory) -> Inventory:
        """Look at the host.

        Args:
            scope: What to read, closed as ``model.widen`` closes it.
            previous: The result of the latest look, which the rest is taken from.

        Raises:
            LookError: Nothing can be said about the host.
        """
        try:
            look = _Look(self._functions, previous, afresh=scope.everything)
            changed = self._links.read(afresh=scope.everything)
            if scope.everything:
                look.read(self._listed())
            else:
                look.read(_with_links_to(changed, previous, scope.addresses))
                look.read(previous.dropped.keys() - look.done)
                look.close_over()
            look.reread_conflicts()
            orphans = previous.orphans
            if scope.everything or scope.orphans or look.touches(orphans):
                orphans = self._orphans(look)
            functions = look.functions()
            shared = self._shared_nodes()
            has_group = any(each.iommu_group is not None for each in functions.values())
            return Inventory(
                functions=functions,
                shared=previous.shared if shared == previous.shared else shared,
                orphans=orphans,
                dropped=dict(sorted(look.dropped.items(), key=lambda d: address_order(d[0]))),
                environment=self._environment(iommu=has_group),
                since=(previous, look.changed()),
            )
        except BaseException:
            self._links.forget()  # what they told of as changed has reached no inventory
            raise

    def _listed(self) -> list[Address]:
        """The addresses of all functions."""
        try:
            names = sysfs.names(f"{self._sys}/{DEVICES}")
        except UnreadableError as error:
            raise LookError(f"cannot list the PCI functions: {error}") from error
        if names is None:
            if not sysfs.exists(f"{self._sys}/devices"):
                raise LookError(
                    f"{self._sys} is not sysfs: it has no devices",
                    hint="mount sysfs there, or name its place",
                )
            return []  # a machine without PCI
        return sorted(
            (Address(name) for name in names if ADDRESS_PATTERN.fullmatch(name)),
            key=address_order,
        )

    def _shared_nodes(self) -> dict[str, Node]:
        """The nodes that are known by their path alone; those that are not there are left out."""
        nodes = {}
        for path in self._shared:
            state, number = self._nodes.number(path)
            if number is not None:
                state = self._state_behind(path, number)
            if state is NodeState.MISSING:
                continue
            nodes[path] = Node(
                role=NodeRole.EXTRA,
                name=path.rpartition("/")[2],
                path=path,
                number=number,
                state=state,
                settled=number is not None and self._nodes.settled(number),
            )
        return nodes

    def _state_behind(self, path: str, number: DeviceNumber) -> NodeState:
        """Whether the kernel has a device for a node that is there, and makes it at that path.

        A node in /dev can be older than its device: systemd makes some at boot, so that opening
        one loads its module.
        """
        place = f"{self._sys}/dev/char/{number}"
        try:
            with Folder(place) as folder:
                uevent = folder.properties("uevent")
            name = os.path.basename(sysfs.link(place) or "")
        except FileNotFoundError:
            return NodeState.MISSING
        except UnreadableError:
            return NodeState.UNREADABLE
        # A slash in a device's name is an exclamation mark in sysfs (``dev_set_name``).
        is_here = node_path(NodeRole.EXTRA, name.replace("!", "/"), uevent) == path
        return NodeState.PRESENT if is_here else NodeState.MISMATCH

    def _orphans(self, look: "_Look") -> tuple[Orphan, ...]:
        """DRM and accel nodes that no function has."""
        places: dict[str, str] = {}
        for name in _CLASSES:
            try:
                entries = sysfs.names(f"{self._sys}/class/{name}") or ()
            except UnreadableError as error:
                raise LookError(f"cannot list the devices of {name}: {error}") from error
            places |= {entry: name for entry in entries if role_of(name, entry) is not None}
        taken = {node.name for each in look.functions().values() for node in each.nodes}
        found: dict[str, tuple[str, str]] = {}
        for entry in places.keys() - taken:
            target = _link(f"{self._sys}/class/{places[entry]}/{entry}")
            if target is not None:
                found[entry] = os.path.normpath(f"/class/{places[entry]}/{target}"), places[entry]
        # A function's own node that it did not list: made since it was read.
        owners = {owner_of_node(devpath) for devpath, _ in found.values()} - {None}
        look.read(owner for owner in owners if owner is not None)
        orphans = (
            self._orphan(entry, kind, devpath)
            for entry, (devpath, kind) in found.items()
            if owner_of_node(devpath) is None
        )
        return tuple(
            sorted(
                (orphan for orphan in orphans if orphan is not None),
                key=lambda orphan: node_order(orphan.node),
            )
        )

    def _orphan(self, name: str, kind: str, devpath: str) -> Orphan | None:
        """Read an orphan; None if it vanished or makes no sense."""
        if not devpath.startswith("/devices/") or not devpath.isprintable():
            return None
        try:
            with Folder(f"{self._sys}{devpath}") as folder:
                number = folder.number("dev")
                uevent = folder.properties("uevent")
                role = role_of(kind, name, uevent.get("DEVTYPE", ""))
                if number is None or role is None:
                    return None
                node = self._nodes.node(
                    role, name, node_path(role, name, uevent), DeviceNumber(*number)
                )
                driver = folder.leads_to("device/driver")
        except (FileNotFoundError, UnreadableError):
            return None
        return Orphan(node, devpath, sysfs.printable(driver) if driver else None)

    def _environment(self, *, iommu: bool) -> Environment:
        """What is around; the groups are listed (a long list) only if no function has one."""
        try:
            groups = iommu or bool(sysfs.names(f"{self._sys}/kernel/iommu_groups"))
        except UnreadableError:
            groups = False
        return self._nodes.environment(iommu=groups)


class _Look:
    """What one look has read so far."""

    def __init__(self, reader: FunctionReader, previous: Inventory, *, afresh: bool) -> None:
        self._reader = reader
        self._previous = previous
        self._unread = {} if afresh else previous.functions
        """What is believed of functions that are not read."""
        self._read: dict[Address, Function | None] = {}
        self.dropped: dict[Address, str] = {}

    @property
    def done(self) -> KeysView[Address]:
        """The addresses that were read."""
        return self._read.keys()

    def read(self, addresses: Iterable[Address]) -> None:
        """Read these functions, again if they were read before."""
        for address in addresses:
            self.dropped.pop(address, None)
            self._read[address] = None
            try:
                function = self._reader.read(address)
            except UnreadableError as error:
                self.dropped[address] = str(error)
            else:
                known = self._previous.functions.get(address)
                self._read[address] = known if known == function else function

    def close_over(self) -> None:
        """Read what belongs to the functions that were read, until nothing new turns up."""
        todo = set(self.done)
        while todo:
            found: set[Address] = set()
            for address in todo:
                function = self._read[address]
                if function is not None:
                    found.update(self._reader.neighbours(function))
            todo = found - self.done
            if todo:  # rare: the scope has brought all that were known to belong to it
                todo.update(widen(Scope(addresses=frozenset(todo)), self._previous).addresses)
                todo -= self.done
                self.read(todo)

    def reread_conflicts(self) -> None:
        """Read functions again that list one path, while that helps."""
        for _ in range(ATTEMPTS):
            read = [function for function in self._read.values() if function is not None]
            owners: dict[str, set[Address]] = {
                node.path: self._others_with(node.path)
                for function in read
                for node in function.nodes
                if node.role is not NodeRole.VFIO_GROUP
            }
            for function in read:
                for node in function.nodes:
                    if node.path in owners:
                        owners[node.path].add(function.address)
            conflict = {a for addresses in owners.values() if len(addresses) > 1 for a in addresses}
            if not conflict:
                return
            self.read(conflict)

    def _others_with(self, path: str) -> set[Address]:
        """The functions that were not read, and are believed to have this node."""
        known = self._previous.by_node.get(path, ())
        return {address for address in known if address in self._unread} - self.done

    def touches(self, orphans: Iterable[Orphan]) -> bool:
        """Whether one of these is below a function that was read."""
        return any(address_in_devpath(orphan.devpath) in self._read for orphan in orphans)

    def changed(self) -> set[Address]:
        """The addresses at which there is something else than before, or nothing more."""
        before = self._previous.functions
        changed = {a for a, each in self._read.items() if before.get(a) is not each}
        return changed | (before.keys() - self._unread.keys() - self.done)

    def functions(self) -> Mapping[Address, Function]:
        """The functions in order of address; the same object if nothing has changed."""
        if not self.changed():
            return self._previous.functions
        functions = dict(self._unread)
        for address, function in self._read.items():
            if function is None:
                functions.pop(address, None)
            else:
                functions[address] = function
        if functions.keys() <= self._unread.keys():
            return functions
        return {address: functions[address] for address in sorted(functions, key=address_order)}


def _with_links_to(
    paths: set[str], inventory: Inventory, addresses: frozenset[Address]
) -> Iterable[Address]:
    """These functions, and those to whose nodes a link leads or led that has changed."""
    return addresses | {a for path in paths for a in inventory.by_node.get(path, ())}


def _link(path: str) -> str | None:
    try:
        return sysfs.link(path)
    except UnreadableError:
        return None
