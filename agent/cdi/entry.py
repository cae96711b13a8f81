"""One function and one profile: its entry, or why it has none.

Pure, and by the function's own facts and the shared nodes alone. What other functions have to say
about it is ``cdi.desired``'s.
"""

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from agent.cdi import rules
from agent.cdi.offers import Fingerprint, Offer, Reason
from agent.cdi.profile import Access, Backend, Naming, Profile, knows
from agent.cdi.spec import ContainerEdits, Device, Kind, Mount
from agent.host.model import ADDRESS_PATTERN, Address, Function, Node, NodeRole, NodeState

VFIO_CONTAINER: Final = "/dev/vfio/vfio"
"""The legacy back end's shared node."""
IOMMUFD: Final = "/dev/iommu"
"""The newer back end's shared node."""

# bind: it is a node, not a file system; no nodev, or it could not be opened.
_LINK_OPTIONS: Final = ("bind", "nosuid", "noexec")
_MACHINE: Final = re.compile(
    r"([0-9a-f]{4,8})-([0-9a-f]{2})-([0-9a-f]{2})-([0-7])-0x[0-9a-f]{4}", re.ASCII
)
_STATES: Final = {
    NodeState.MISSING: (Reason.NODE_MISSING, "does not exist"),
    NodeState.MISMATCH: (Reason.NODE_MISMATCH, "is not the node that sysfs lists"),
    NodeState.UNREADABLE: (Reason.UNREADABLE, "cannot be examined"),
}


_Given = tuple[Node, Access]


class Refusal(msgspec.Struct, frozen=True):
    """Why there is no offer."""

    reason: Reason
    detail: str
    """One sentence for people."""


class Case(msgspec.Struct, frozen=True):
    """A function and one of its profiles, and what is clear before its nodes are looked at."""

    function: Function
    profile: Profile
    on_vfio: bool
    kind: Kind
    """The kind in which it would be published as it is driven now."""
    name: str | None
    """What it is called there; None if that is its place among others."""
    shared: tuple[str, ...]
    """Paths of the nodes of no single function that its entry may give."""


def case_of(function: Function, profile: Profile) -> Case:
    """Tell what a profile would make of a function."""
    on_vfio = function.on_vfio
    return Case(
        function=function,
        profile=profile,
        on_vfio=on_vfio,
        kind=(profile.vfio_kind if on_vfio else None) or profile.own_kind,
        name=_name(function, profile, on_vfio=on_vfio),
        shared=(VFIO_CONTAINER, IOMMUFD) if on_vfio else tuple(n.path for n in profile.shared),
    )


def address_in_name(name: str) -> Address | None:
    """The address that a device's name tells, whether it is published or not; None if it does not.

    That is so for names by address: ``0000-03-00-0-0xe212``, and the address itself.
    """
    machine = _MACHINE.fullmatch(name)
    address = name if machine is None else "{}:{}:{}.{}".format(*machine.groups())
    return Address(address) if ADDRESS_PATTERN.fullmatch(address) else None


def _name(function: Function, profile: Profile, *, on_vfio: bool) -> str | None:
    match profile.naming:
        case Naming.INDEX:
            return None
        case Naming.ADDRESS:
            return function.address
        case Naming.CARD if not on_vfio and (
            nodes := function.nodes_of(*(each.role for each in profile.nodes))
        ):
            return nodes[0].name
        case _:
            place = function.address.replace(":", "-").replace(".", "-")
            return f"{place}-0x{function.device:04x}"


def offer_of(case: Case, name: str, shared: tuple[Node | None, ...]) -> Offer | Refusal:
    """Offer a function by its own facts and the shared nodes, or say why not.

    Args:
        case: The function and the profile.
        name: What it is called.
        shared: The nodes at the paths that the case names, in that order.
    """
    function, profile = case.function, case.profile
    given = (_on_vfio if case.on_vfio else _on_own_driver)(function, profile, shared)
    if isinstance(given, Refusal):
        return given
    nodes = tuple(node for node, _ in given)
    device_nodes = tuple(access.to_node(node.path) for node, access in given)
    edits = ContainerEdits(device_nodes)
    if not case.on_vfio:
        edits = profile.edits(device_nodes, _mounts(function, nodes) if profile.links else ())
    device = Device(name, edits, profile.sorted_annotations)
    if problems := rules.device_problems(device):
        return Refusal(Reason.INVALID, "; ".join(problems))
    return Offer(
        kind=case.kind,
        address=function.address,
        device=device,
        fingerprint=Fingerprint(
            inode=function.inode,
            driver=function.driver,
            nodes=tuple((node.path, node.number) for node in sorted(nodes, key=_path)),
        ),
        unsettled=tuple(node for node in nodes if not node.settled),
        in_all=not case.on_vfio and not function.is_vf,
    )


def _mounts(function: Function, nodes: Iterable[Node]) -> tuple[Mount, ...]:
    """Udev's links that lead to these nodes; one that leads elsewhere by now is left out."""
    paths = {node.path for node in nodes}
    return tuple(
        Mount(link.path, link.path, _LINK_OPTIONS)
        for link in function.links
        if link.target in paths
    )


def _on_own_driver(
    function: Function,
    profile: Profile,
    shared: tuple[Node | None, ...],
) -> tuple[_Given, ...] | Refusal:
    """The function's nodes, then the shared ones."""
    if refusal := _wrong_driver(function, profile):
        return refusal
    own = _own_nodes(function, profile)
    if isinstance(own, Refusal):
        return own
    for wanted, node in zip(profile.shared, shared, strict=True):
        if node is not None and node.counts:
            own.append((node, wanted))
        elif wanted.required:
            return _shared_refusal(wanted.path, node)
    return tuple(own)


def _own_nodes(function: Function, profile: Profile) -> list[_Given] | Refusal:
    given: list[_Given] = []
    for nodes in profile.nodes:
        found = function.nodes_of(nodes.role)
        if nodes.required:
            if not found:
                return Refusal(Reason.NODE_MISSING, f"it has no {nodes.role} node")
            if refusal := _first_refusal(found):
                return refusal
        given += ((node, nodes) for node in found if node.counts)
    return given or Refusal(Reason.NODE_MISSING, "it has none of the nodes that its profile gives")


def _wrong_driver(function: Function, profile: Profile) -> Refusal | None:
    if not profile.nodes:
        return Refusal(Reason.POLICY, f"profile {profile.name} publishes it only on VFIO")
    if function.driver is None:
        return Refusal(Reason.NO_DRIVER, "no driver has it")
    for name, sentence in profile.foreign.items():
        if knows((name,), function.driver):
            return Refusal(Reason.FOREIGN_DRIVER, sentence)
    if profile.drivers and not knows(profile.drivers, function.driver):
        return _foreign(function, profile)
    return None


def _on_vfio(
    function: Function,
    profile: Profile,
    shared: tuple[Node | None, ...],
) -> tuple[_Given, ...] | Refusal:
    """Exactly one back end."""
    vfio = profile.vfio
    if vfio is None:
        return _foreign(function, profile)
    container, iommufd = shared
    legacy = (VFIO_CONTAINER, container, function.nodes_of(NodeRole.VFIO_GROUP))
    newer = (IOMMUFD, iommufd, function.nodes_of(NodeRole.VFIO_CDEV))
    ways = {
        Backend.LEGACY: (legacy,),
        Backend.IOMMUFD: (newer,),
        Backend.AUTO: (legacy, newer),
    }[vfio.backend]
    refusals = []
    for path, node, own in ways:
        if not own:
            refusals.append(Refusal(Reason.NODE_MISSING, f"it has no node for {path}"))
        elif refusal := _first_refusal(own):
            refusals.append(refusal)
        elif node is None or not node.counts:
            refusals.append(_shared_refusal(path, node))
        else:
            return tuple((each, vfio) for each in (node, *own))
    return refusals[0]


def _foreign(function: Function, profile: Profile) -> Refusal:
    known = ", ".join(profile.drivers) or "a driver of its own"
    detail = f"it is on {function.driver}, and profile {profile.name} publishes it on {known}"
    return Refusal(Reason.FOREIGN_DRIVER, detail)


def _path(node: Node) -> str:
    return node.path


def _shared_refusal(path: str, node: Node | None) -> Refusal:
    """Why a node of no single function, which does not count, cannot be given."""
    reason, sentence = _STATES[NodeState.MISSING if node is None else node.state]
    return Refusal(reason, f"{path} {sentence}")


def _first_refusal(nodes: Iterable[Node]) -> Refusal | None:
    for node in nodes:
        if not node.counts:
            reason, sentence = _STATES[node.state]
            return Refusal(reason, f"{node.path} {sentence}")
    return None
