"""Profiles: data that says which functions belong to a kind and what a container gets.

Pure: the schema, which profiles a function has, and what may not be in them. The same schema
reads the profiles that come with the program (``agent/cdi/profiles/*.yaml``) and those of a
user's configuration.

**Which profile a function has.** Profiles stand in order of precedence: a user's before those
that come with the program, and within each the more specific first (device ids, then drivers,
then the longer class, then a vendor). Walking them in that order, a function takes every profile
that matches it and gives none of the node roles that an earlier one already gives. So one profile
may give the GPU's DRM nodes and another its MEI nodes, and a user's profile replaces the one that
comes with the program, for the functions that it matches. Two of the same rank that could take
one function from each other are refused by ``merge``: nothing depends on the order of files.

A *fallback* takes only what no other profile matches, be that one switched off: who switches the
profile of a GPU off does not want the GPU under another name. Else one that is off has no say.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from agent.cdi.spec import ContainerEdits, DeviceNode, Hook, Kind, Mount
from agent.host.model import Function, NodeRole, is_vfio_driver, normalise_driver
from agent.host.settings import DevicePath

HexId = Annotated[
    str,
    Meta(pattern=r"\A[0-9a-f]{4}\Z", description='four hex digits in lower case, such as "8086"'),
]
ClassPrefix = Annotated[
    str,
    Meta(
        pattern=r"\A(?:[0-9a-f]{2}){1,3}\Z",
        description='2, 4 or 6 hex digits in lower case, such as "0300"',
    ),
]
FileMode = Annotated[
    str,
    Meta(pattern=r"\A0?[0-7]{3}\Z", description='a mode in octal, such as "0660"'),
]
DriverName = Annotated[
    str,
    Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z", description="the name of a driver"),
]
OwnRole = Annotated[NodeRole, Meta(description="one of card, render, accel, mei")]
"""``merge`` refuses the others, which have a driver of their own."""
Id = Annotated[int, Meta(ge=0, le=2**32 - 2)]


class Naming(enum.StrEnum):
    """What a device is called in its kind."""

    MACHINE = "machine"
    """Address and device id: ``0000-03-00-0-0xe212``."""
    ADDRESS = "address"
    """``0000:03:00.0``."""
    INDEX = "index"
    """``0``, ``1``, …: its place among the functions of the kind, by address."""
    CARD = "card"
    """The kernel's name of its first node, which changes with reboots; on VFIO as ``machine``."""


class SrIov(enum.StrEnum):
    """Which functions are published where a PF has VFs."""

    PF = "pf"
    """No VFs."""
    VF = "vf"
    """No PF that has VFs."""
    BOTH = "both"


class Backend(enum.StrEnum):
    """How a VM launcher gets a device."""

    LEGACY = "legacy"
    """``/dev/vfio/vfio`` and the group's node."""
    IOMMUFD = "iommufd"
    """``/dev/iommu`` and the device's own node."""
    AUTO = "auto"
    """Legacy where the group's node exists: every launcher knows it, and it comes first."""


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A part of a profile."""


class Match(_Part, frozen=True, kw_only=True):
    """Which functions a profile recognises: all of these must hold; an empty list says nothing."""

    vendor: HexId | None = None
    devices: tuple[HexId, ...] = ()
    classes: tuple[ClassPrefix, ...] = ()
    """The class code, or how it begins: ``03`` for every display, ``0300`` for VGA."""
    drivers: tuple[str, ...] = ()
    """Only while one of these drives it. (What the profile can publish is told by ``drivers``.)"""
    roles: tuple[OwnRole, ...] = ()
    """Only while it has a node of each of these roles."""

    def __call__(self, function: Function) -> bool:
        """Whether a function is meant."""
        return (
            (self.vendor is None or int(self.vendor, 16) == function.vendor)
            and (not self.devices or f"{function.device:04x}" in self.devices)
            and (not self.classes or f"{function.class_code:06x}".startswith(self.classes))
            and (not self.drivers or knows(self.drivers, function.driver))
            and all(function.nodes_of(role) for role in self.roles)
        )

    @property
    def rank(self) -> tuple[bool, bool, int, bool, int]:
        """How specific it is; greater goes first."""
        return (
            bool(self.devices),
            bool(self.drivers),
            max(map(len, self.classes), default=0),
            self.vendor is not None,
            len(self.roles),
        )

    @property
    def reaches_vfio(self) -> bool:
        """Whether a device that is on a VFIO driver could be meant: one has none of the roles."""
        return not self.roles and (not self.drivers or any(map(is_vfio_driver, self.drivers)))

    def overlaps(self, other: "Match") -> bool:
        """Whether some function could be meant by both."""
        return (
            (self.vendor is None or other.vendor is None or self.vendor == other.vendor)
            and _common(self.devices, other.devices)
            and _common(_drivers(self.drivers), _drivers(other.drivers))
            and (
                not self.classes
                or not other.classes
                or any(
                    one.startswith(two) or two.startswith(one)
                    for one in self.classes
                    for two in other.classes
                )
            )
        )


class Access(_Part, frozen=True, kw_only=True):
    """How a container may use a node."""

    permissions: str = "rw"
    file_mode: FileMode = "0666"
    """Of the node in the container; without one, engines differ in what they take."""
    uid: Id | None = None
    gid: Id | None = None

    def to_node(self, path: str) -> DeviceNode:
        """The edit that gives a node under the path that it has on the host."""
        return DeviceNode(
            path=path,
            host_path=path,
            permissions=self.permissions,
            file_mode=int(self.file_mode, 8),
            uid=self.uid,
            gid=self.gid,
        )


class RoleNodes(Access, frozen=True, kw_only=True):
    """The nodes of one role that a function has itself."""

    role: OwnRole
    required: bool = True
    """Without one that is there, the device is withheld."""


class SharedNode(Access, frozen=True, kw_only=True):
    """A node that belongs to no single function: ``/dev/kfd``."""

    path: DevicePath
    required: bool = False


class Vfio(Access, frozen=True, kw_only=True):
    """What a device on a VFIO driver is published as."""

    kind: str | None = None
    """By default the profile's kind with ``-vfio``; the profile's own kind is allowed."""
    backend: Backend = Backend.AUTO
    driver: DriverName | None = None
    """What a claim gives the device to; null is the best that the kernel has for it."""


class HookEdit(_Part, frozen=True, kw_only=True):
    """An OCI hook."""

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


class Partitions(_Part, frozen=True, kw_only=True):
    """Parts of a device that are no PCI functions, known by how their sysfs folder begins."""

    prefix: str
    reason: str


class Profile(_Part, frozen=True, kw_only=True):
    """What a container gets of the functions that a profile recognises."""

    name: str
    match: Match
    kind: str
    nodes: tuple[RoleNodes, ...]
    """What a container gets of a device on its own driver; nothing: it is for VFIO alone."""
    enabled: bool = True
    fallback: bool = False
    """Only for what no other profile recognises, not even one that is switched off."""
    title: str = ""
    """What it is about, for people."""
    naming: Naming = Naming.MACHINE
    drivers: tuple[str, ...] = ()
    """Drivers whose nodes it publishes; none named: any."""
    foreign: dict[str, str] = {}
    """Drivers that belong to another toolkit, each with the sentence that says which."""
    shared: tuple[SharedNode, ...] = ()
    links: bool = False
    """Give udev's by-path links too, as mounts."""
    vfio: Vfio | None = Vfio()
    sriov: SrIov = SrIov.BOTH
    partitions: Partitions | None = None
    env: tuple[str, ...] = ()
    hooks: tuple[HookEdit, ...] = ()
    additional_gids: tuple[Id, ...] = ()
    annotations: dict[str, str] = {}

    @property
    def own_kind(self) -> Kind:
        """The kind of its devices on a driver of their own."""
        return Kind(self.kind)

    @property
    def vfio_kind(self) -> Kind | None:
        """The kind of its devices on a VFIO driver; None if it publishes none."""
        if self.vfio is None or not self.match.reaches_vfio:
            return None
        return Kind(self.vfio.kind or f"{self.kind}-vfio")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Every kind that it can publish in."""
        return tuple(dict.fromkeys(kind for kind in (self.own_kind, self.vfio_kind) if kind))

    @property
    def sorted_annotations(self) -> tuple[tuple[str, str], ...]:
        """The annotations of its devices, as an entry has them."""
        return tuple(sorted(self.annotations.items()))

    def edits(
        self,
        nodes: tuple[DeviceNode, ...],
        mounts: tuple[Mount, ...] = (),
    ) -> ContainerEdits:
        """What an entry has: these, and what is the same for all devices of the profile."""
        return ContainerEdits(
            device_nodes=nodes,
            mounts=mounts,
            env=self.env,
            hooks=tuple(
                Hook(hook.hook_name, hook.path, hook.args, hook.env, hook.timeout)
                for hook in self.hooks
            ),
            additional_gids=self.additional_gids,
        )

    @property
    def roles(self) -> frozenset[NodeRole]:
        """What no other profile may give of the same function; VFIO counts as a group's node."""
        vfio = () if self.vfio_kind is None else (NodeRole.VFIO_GROUP,)
        return frozenset((*(nodes.role for nodes in self.nodes), *vfio))


def knows(drivers: Iterable[str], driver: str | None) -> bool:
    """Whether a driver is among these, however the two spell it."""
    return driver is not None and normalise_driver(driver) in _drivers(drivers)


def _drivers(drivers: Iterable[str]) -> frozenset[str]:
    return frozenset(map(normalise_driver, drivers))


def _common(one: Iterable[str], two: Iterable[str]) -> bool:
    one, two = set(one), set(two)
    return not one or not two or not one.isdisjoint(two)


# --- which profiles a function has ----------------------------------------------------------------


def ordered(profiles: Iterable[Profile]) -> tuple[Profile, ...]:
    """Those of one rank, the more specific first."""
    return tuple(
        sorted(
            profiles,
            key=lambda profile: (tuple(-part for part in profile.match.rank), profile.name),
        ),
    )


def profiles_of(function: Function, profiles: Sequence[Profile]) -> tuple[Profile, ...]:
    """The profiles of a function: those that match it and take nothing from an earlier one.

    Args:
        function: What they are asked about.
        profiles: In order of precedence; one that is switched off is none of a function's.
    """
    found: list[Profile] = []
    taken: set[NodeRole] = set()
    for profile in _recognising(function, profiles):
        if profile.enabled and taken.isdisjoint(profile.roles):
            found.append(profile)
            taken |= profile.roles
    return tuple(found)


def switched_off(function: Function, profiles: Sequence[Profile]) -> str | None:
    """Say which profile would give what no other gives of a function, were it not switched off."""
    taken = {role for profile in profiles_of(function, profiles) for role in profile.roles}
    for profile in _recognising(function, profiles):
        if not profile.enabled and taken.isdisjoint(profile.roles):
            return f"profile {profile.name}, which recognises it, is switched off"
    return None


def passed_over(function: Function, profiles: Sequence[Profile]) -> str | None:
    """Say which profile would give nodes that no other gives, had not one for other nodes VFIO."""
    found = profiles_of(function, profiles)
    given = {nodes.role for profile in found for nodes in profile.nodes}
    for profile in _recognising(function, profiles):
        own = [nodes.role for nodes in profile.nodes if function.nodes_of(nodes.role)]
        if not (profile.enabled and own) or given.intersection(n.role for n in profile.nodes):
            continue
        taker = next(each for each in found if not each.roles.isdisjoint(profile.roles))
        if taker.nodes:  # else it is for VFIO alone, and says so itself
            return (
                f"profile {taker.name} takes VFIO from profile {profile.name}, and with it its"
                f" {' and '.join(own)} nodes: `vfio: null` there leaves it both"
            )
    return None


def _recognising(function: Function, profiles: Sequence[Profile]) -> list[Profile]:
    """The profiles that match a function; a fallback only if no other does."""
    matching = [profile for profile in profiles if profile.match(function)]
    return [profile for profile in matching if not profile.fallback] or matching


def enabled(profiles: Iterable[Profile]) -> tuple[Profile, ...]:
    """Those that are not switched off."""
    return tuple(profile for profile in profiles if profile.enabled)


def shared_paths(profiles: Iterable[Profile]) -> frozenset[str]:
    """The nodes of no single function that a look has to include, beside those of VFIO."""
    return frozenset(node.path for profile in enabled(profiles) for node in profile.shared)
