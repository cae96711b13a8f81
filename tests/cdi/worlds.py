"""Functions, nodes and inventories for tests of what is published: by default all is well."""
# ruff: noqa: ANN401 - the fields are those of the class that is made, which checks nothing

from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import structs

from agent.cdi.desired import Desired, Offer, Policy, Reason, desired
from agent.cdi.profile import Profile
from agent.cdi.profiles import load_builtin
from agent.cdi.sheet import Sheet, sheet_of
from agent.cdi.spec import Kind
from agent.host.model import (
    Address,
    DeviceNumber,
    Environment,
    Function,
    Hold,
    Inventory,
    Node,
    NodeRole,
    NodeState,
)

BUILTIN: Final = load_builtin()
B50: Final = Address("0000:03:00.0")
B60: Final = Address("0000:04:00.0")
AUDIO: Final = Address("0000:03:00.1")

_MAJORS: Final = {NodeRole.CARD: 226, NodeRole.RENDER: 226, NodeRole.ACCEL: 261, NodeRole.MEI: 239}
_NAMES: Final = {
    NodeRole.CARD: ("card{}", "/dev/dri/card{}"),
    NodeRole.RENDER: ("renderD{}", "/dev/dri/renderD{}"),
    NodeRole.ACCEL: ("accel{}", "/dev/accel/accel{}"),
    NodeRole.MEI: ("mei{}", "/dev/mei{}"),
    NodeRole.VFIO_GROUP: ("{}", "/dev/vfio/{}"),
    NodeRole.VFIO_CDEV: ("vfio{}", "/dev/vfio/devices/vfio{}"),
}


def node(
    role: NodeRole,
    number: int,
    *,
    state: NodeState = NodeState.PRESENT,
    settled: bool = True,
) -> Node:
    """A node as the kernel names it."""
    name, path = (text.format(number) for text in _NAMES[role])
    device = DeviceNumber(_MAJORS.get(role, 510), number)
    return Node(role, name, path, device, state, settled)


def shared(path: str, number: tuple[int, int] = (10, 196), **fields: Any) -> Node:
    """A node of no single function."""
    state = fields.pop("state", NodeState.PRESENT)
    return Node(
        NodeRole.EXTRA,
        path.rpartition("/")[2],
        path,
        DeviceNumber(*number),
        state,
        fields.pop("settled", True),
    )


def drm(number: int, **fields: Any) -> tuple[Node, ...]:
    """A card and its render node."""
    return (node(NodeRole.CARD, number, **fields), node(NodeRole.RENDER, 128 + number, **fields))


def function(address: str = B50, number: int = 0, **fields: Any) -> Function:
    """An Arc B50 on xe, or what the fields make of it."""
    fields.setdefault("driver", "xe")
    fields.setdefault("nodes", drm(number) if fields["driver"] else ())
    return Function(
        address=Address(address),
        devpath=f"/devices/pci0000:00/{address}",
        vendor=fields.pop("vendor", 0x8086),
        device=fields.pop("device", 0xE212),
        class_code=fields.pop("class_code", 0x030000),
        inode=fields.pop("inode", 7),
        **fields,
    )


def vfio(address: str = B50, group: int = 12, **fields: Any) -> Function:
    """The same on vfio-pci, with both back ends' nodes."""
    fields.setdefault("nodes", (node(NodeRole.VFIO_GROUP, group), node(NodeRole.VFIO_CDEV, 0)))
    fields.setdefault("driver", "vfio-pci")
    return function(address, iommu_group=group, has_vfio_dev=True, **fields)


VFIO_SHARED: Final = (shared("/dev/vfio/vfio"), shared("/dev/iommu", (10, 62)))


def inventory(
    *functions: Function,
    nodes: Iterable[Node] = VFIO_SHARED,
    environment: Environment | None = None,
    **fields: Any,
) -> Inventory:
    """A host with these functions and shared nodes."""
    return Inventory(
        functions={each.address: each for each in functions},
        shared={each.path: each for each in nodes},
        environment=environment or Environment(),
        **fields,
    )


def decide(
    what: Inventory | Function,
    *,
    profiles: Iterable[Profile] = BUILTIN,
    holds: Iterable[Hold] = (),
    policy: Policy | None = None,
) -> Desired:
    """What should be published of a host, or of one function."""
    host = inventory(what) if isinstance(what, Function) else what
    return desired(host, tuple(profiles), tuple(holds), policy or Policy())


def sheets(
    offers: Iterable[Offer], before: Mapping[Kind, Sheet] | None = None, **how: Any
) -> dict[Kind, Sheet]:
    """A sheet for each kind."""
    by_kind: dict[Kind, list[Offer]] = {}
    for offer in offers:
        by_kind.setdefault(offer.kind, []).append(offer)
    return {
        kind: sheet_of(kind, members, (before or {}).get(kind), **how)
        for kind, members in sorted(by_kind.items())
    }


def published(result: Desired) -> dict[str, list[str]]:
    """The names in each kind."""
    kinds: dict[str, list[str]] = {}
    for offer in result.offers:
        kinds.setdefault(offer.kind, []).append(offer.device.name)
    return kinds


def reasons(result: Desired) -> Mapping[str, Reason]:
    """The reason by address; a device withheld in two kinds has the later one's."""
    return {each.address: each.reason for each in result.withheld}


def changed(profile_name: str, **fields: Any) -> tuple[Profile, ...]:
    """The profiles of the program with one of them changed."""
    return tuple(
        _replace(profile, fields) if profile.name == profile_name else profile
        for profile in BUILTIN
    )


def _replace(profile: Profile, fields: Mapping[str, Any]) -> Profile:
    values = {name: getattr(profile, name) for name in profile.__struct_fields__}
    return Profile(**{**values, **fields})


def with_inode(each: Function, inode: int) -> Function:
    """Another card in the same slot."""
    return structs.replace(each, inode=inode)
