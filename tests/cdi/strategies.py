"""Hosts as Hypothesis makes them up: odd, contradictory, in the middle of a change."""

from typing import Any, Final

from hypothesis import strategies as st

from agent.host.model import (
    Address,
    Environment,
    Function,
    Hold,
    HoldMode,
    Inventory,
    Link,
    Node,
    NodeRole,
    NodeState,
    Orphan,
)
from tests.cdi.worlds import function, inventory, node, shared, vfio

ADDRESSES: Final = tuple(
    Address(text)
    for text in (
        "0000:00:02.0",
        "0000:03:00.0",
        "0000:03:00.1",
        "0000:04:00.0",
        "0000:04:00.7",
        "10000:e1:00.0",
    )
)
_IDS: Final = (
    (0x8086, 0xE212, 0x030000),
    (0x8086, 0x643E, 0x120000),
    (0x8086, 0xE2F7, 0x040300),
    (0x1002, 0x744C, 0x030000),
    (0x10DE, 0x2684, 0x030000),
    (0x1AF4, 0x1050, 0x038000),
    (0x1A03, 0x2000, 0x030000),
    (0x17CB, 0xA100, 0xFF0000),
    (0x1DA3, 0x1020, 0x120000),
    (0x15AD, 0x0405, 0x030000),
)
_DRIVERS: Final = (
    None,
    "xe",
    "i915",
    "amdgpu",
    "nouveau",
    "nvidia",
    "vfio-pci",
    "xe-vfio-pci",
    "virtio-pci",
    "intel_vpu",
    "snd_hda_intel",
)
# Seldom, so that most hosts have something to publish.
_STATES: Final = st.sampled_from((*[NodeState.PRESENT] * 8, *NodeState))


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """A node with few different paths, so that two functions often want the same."""
    role = draw(st.sampled_from([*NodeRole][:-1]))
    number = draw(st.integers(0, 3))
    return node(role, number, state=draw(_STATES), settled=draw(st.booleans()))


@st.composite
def functions(draw: st.DrawFn, address: Address) -> Function:
    """A function at that address."""
    vendor, device, class_code = draw(st.sampled_from(_IDS))
    others = [each for each in ADDRESSES if each != address]
    own = draw(st.lists(nodes(), max_size=4, unique_by=lambda each: each.path))
    return Function(
        address=address,
        devpath=f"/devices/pci0000:00/{address}",
        vendor=vendor,
        device=device,
        class_code=class_code,
        driver=draw(st.sampled_from(_DRIVERS)),
        iommu_group=draw(st.none() | st.integers(0, 3)),
        physfn=draw(st.none() | st.sampled_from(others)),
        virtfns=tuple(draw(st.lists(st.sampled_from(others), max_size=1))),
        nodes=tuple(own),
        links=tuple(Link(f"/dev/dri/by-path/pci-{address}-{each.name}", each.path) for each in own),
        has_vfio_dev=draw(st.booleans()),
        inode=draw(st.integers(1, 3)),
    )


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    """A host."""
    present = draw(st.lists(st.sampled_from(ADDRESSES), unique=True))
    host_nodes = [
        shared(path, state=draw(_STATES))
        for path in draw(st.sets(st.sampled_from(("/dev/kfd", "/dev/iommu", "/dev/vfio/vfio"))))
    ]
    orphan = Orphan(node(NodeRole.CARD, 9), "/devices/platform/x/drm/card9", "simpledrm")
    return Inventory(
        functions={address: draw(functions(address)) for address in present},
        shared={each.path: each for each in host_nodes},
        orphans=draw(st.sampled_from(((), (orphan,)))),
        dropped={
            address: "gone"
            for address in draw(st.sets(st.sampled_from(ADDRESSES), max_size=1))
            if address not in present
        },
        environment=Environment(devtmpfs=draw(st.sampled_from((True, True, True, False)))),
    )


_PLACES: Final = tuple(map(Address, ("0000:03:00.0", "0000:03:00.1", "0000:04:00.0")))
_STAGES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"driver": None},
    {"driver": "snd_hda_intel", "nodes": (), "class_code": 0x040300},
    {"number": 1},
    {"inode": 8},
)


@st.composite
def histories(draw: st.DrawFn) -> list[Inventory]:
    """What looks at a small host find: in each step one function or the shared nodes change.

    They may share an IOMMU group, and have the same card: what changes at one matters to the
    others, which stay the same objects.
    """
    hosts = [inventory()]
    for address in draw(st.lists(st.sampled_from((None, *_PLACES)), min_size=3, max_size=16)):
        before = hosts[-1]
        functions = dict(before.functions)
        shared_nodes = before.shared
        if address is None:
            shared_nodes = draw(st.sampled_from(({}, inventory().shared)))
        elif draw(st.integers(0, 5)) == 0:
            functions.pop(address, None)
        elif draw(st.booleans()):
            functions[address] = vfio(address, draw(st.sampled_from((1, 1, 2))))
        else:
            fields = draw(st.sampled_from(_STAGES))
            group = draw(st.sampled_from((None, 1)))
            functions[address] = function(address, iommu_group=group, **fields)
        changed = [a for a in _PLACES if functions.get(a) is not before.functions.get(a)]
        environment = Environment(devtmpfs=draw(st.integers(0, 15)) > 0)
        hosts.append(
            Inventory(
                functions if changed else before.functions,
                shared_nodes,
                environment=environment,
                since=draw(st.sampled_from((None, (before, changed)))),
            )
        )
    return hosts[1:]


@st.composite
def holds(draw: st.DrawFn) -> tuple[Hold, ...]:
    """What claims hold."""
    return tuple(
        Hold(
            address,
            "claim",
            draw(st.sampled_from(HoldMode)),
            settled=draw(st.booleans()),
            dead=draw(st.booleans()),
        )
        for address in draw(st.sets(st.sampled_from(ADDRESSES), max_size=2))
    )
