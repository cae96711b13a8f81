"""What should be published, were every device ready: facts and profiles in, offers out.

Pure. ``desired`` makes one ``Offer`` for each device and kind that a profile publishes, and one
``Withheld`` with its reason for each device that it does not. It knows nothing of time or of the
disk: whether an offer is already published, must settle first, or would double a foreign
definition is decided by ``reconcile.plan``.

A function is judged by three values and nothing else: what it is itself (``Subject``), what others
have to do with it (``Circumstances``), and what holds for all (``Terms``). So whatever is judged
by the same three as in the last pass is not judged again, and its offers stay the same objects.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from agent.cdi import rules
from agent.cdi.entry import Case, Refusal, case_of, offer_of
from agent.cdi.offers import (
    Fingerprint,
    Offer,
    Policy,
    Reason,
    Withheld,
    WithheldNode,
)
from agent.cdi.profile import Naming, Profile, SrIov, profiles_of
from agent.cdi.spec import Kind
from agent.host.model import (
    Address,
    Function,
    Hold,
    HoldMode,
    Inventory,
    Node,
    NodeRole,
    Orphan,
    address_order,
    normalise_driver,
)

__all__ = [
    "Desired",
    "Fingerprint",
    "Offer",
    "Policy",
    "Reason",
    "Withheld",
    "WithheldNode",
    "desired",
]

# Kernel, drivers/vfio and drivers/iommu: drivers that do not keep a group from being viable.
_HARMLESS_DRIVERS: Final = frozenset({"pci-stub", "pcieport"})
_DISPLAY: Final = 0x03
_ACCELERATOR: Final = 0x12
_OWN_ROLES: Final = (NodeRole.CARD, NodeRole.RENDER, NodeRole.ACCEL)


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What holds for all functions of a host."""

    profiles: tuple[Profile, ...]
    policy: Policy
    devtmpfs: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A function, and what the profiles make of it before others are asked."""

    function: Function
    order: tuple[int, str]
    cases: tuple[Case, ...]
    """One for each profile that recognises it."""
    paths: tuple[str, ...]
    """Of its nodes."""
    shared: tuple[str, ...]
    """Of the nodes of no single function that its entries may give."""
    vfio_group: int | None
    """Its IOMMU group, if a VFIO driver has it."""
    is_of_interest: bool
    """Somebody expects a word about it, as about few of a server's hundreds of functions."""


class Circumstances(NamedTuple):
    """What others have to do with a function."""

    hold: Hold | None
    rivals: tuple[tuple[Function, ...], ...]
    """For each of its nodes: the other functions that have a node of that path."""
    group: tuple[Function, ...]
    """The members of its IOMMU group, if a VFIO driver has it."""
    shared: tuple[Node | None, ...]
    """The nodes of no single function that its entries may give."""
    places: tuple[int, ...]
    """Its place among the functions of its kind, for each case in which that is its name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """What becomes of a function."""

    subject: Subject
    circumstances: Circumstances
    offers: tuple[Offer, ...]
    withheld: tuple[Withheld, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Desired:
    """The result of ``desired``; at most one offer for a device in a kind."""

    offers: tuple[Offer, ...] = ()
    """In order of address."""
    withheld: tuple[Withheld, ...] = ()
    nodes: tuple[WithheldNode, ...] = ()
    """Display and accelerator nodes that belong to no function."""
    terms: Terms | None = dataclasses.field(default=None, repr=False, compare=False)
    """With ``subjects`` and ``judgements`` what the next pass need not find out again."""
    subjects: Mapping[Address, Subject] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    judgements: Mapping[Address, Judgement] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )


def desired(
    inventory: Inventory,
    profiles: Sequence[Profile],
    holds: Iterable[Hold],
    policy: Policy,
    before: Desired | None = None,
) -> Desired:
    """Tell what should be published of what a look has found.

    Args:
        inventory: What a look has found.
        profiles: In order of precedence, as ``load_builtin`` and ``merge`` give them.
        holds: What claims hold, at most one for a function.
        policy: What the configuration decides beside the profiles.
        before: The result for an earlier look. It changes nothing but the time that this takes.
    """
    terms = Terms(tuple(profiles), policy, inventory.environment.devtmpfs)
    if before is None or before.terms != terms:
        before = Desired()
    subjects = {
        address: subject
        if (subject := before.subjects.get(address)) is not None and subject.function is function
        else _subject(function, terms.profiles)
        for address, function in inventory.functions.items()
    }
    of_interest = [subject for subject in subjects.values() if subject.is_of_interest]
    of_interest.sort(key=attrgetter("order"))
    judgements = _judge_all(of_interest, inventory, holds, terms, before.judgements)
    offers = [offer for judgement in judgements.values() for offer in judgement.offers]
    unique, doubled = _without_doubles(offers)
    withheld = [
        Withheld(address, None, Reason.UNREADABLE, f"it could not be read: {why}")
        for address, why in inventory.dropped.items()
    ]
    withheld += (each for judgement in judgements.values() for each in judgement.withheld)
    withheld += doubled
    withheld.sort(key=lambda each: (address_order(each.address), each.kind or ""))
    return Desired(
        offers=unique,
        withheld=tuple(withheld),
        nodes=tuple(
            _orphan(orphan, terms.profiles)
            for orphan in sorted(inventory.orphans, key=lambda orphan: orphan.node.path)
            if orphan.node.role in _OWN_ROLES
        ),
        terms=terms,
        subjects=subjects,
        judgements=judgements,
    )


# --- what is known of a function before it is judged ----------------------------------------------


def _subject(function: Function, profiles: Sequence[Profile]) -> Subject:
    cases = tuple(case_of(function, profile) for profile in profiles_of(function, profiles))
    return Subject(
        function=function,
        order=address_order(function.address),
        cases=cases,
        paths=tuple(node.path for node in function.nodes),
        shared=tuple(dict.fromkeys(path for case in cases for path in case.shared)),
        vfio_group=function.iommu_group if function.on_vfio else None,
        is_of_interest=bool(cases) or _is_worth_a_word(function),
    )


def _is_worth_a_word(function: Function) -> bool:
    """Whether people expect a word about a function that no profile recognises."""
    is_candidate = function.class_code >> 16 in {_DISPLAY, _ACCELERATOR}
    return is_candidate or any(node.role in _OWN_ROLES for node in function.nodes)


def _judge_all(
    subjects: Sequence[Subject],
    inventory: Inventory,
    holds: Iterable[Hold],
    terms: Terms,
    before: Mapping[Address, Judgement],
) -> dict[Address, Judgement]:
    """Judge each function, unless it was judged by the same values before."""
    hold_of = {hold.address: hold for hold in holds}
    places = _places(subjects)
    judgements = {}
    for subject in subjects:
        address = subject.function.address
        circumstances = Circumstances(
            hold=hold_of.get(address),
            rivals=tuple([_rivals(path, address, inventory) for path in subject.paths]),
            group=() if subject.vfio_group is None else inventory.group(subject.vfio_group),
            shared=tuple(map(inventory.shared.get, subject.shared)),
            places=places.get(address, ()),
        )
        known = before.get(address)
        judgements[address] = (
            known
            if known is not None
            and known.subject is subject
            and known.circumstances == circumstances
            else _judge(subject, circumstances, terms)
        )
    return judgements


def _rivals(path: str, address: Address, inventory: Inventory) -> tuple[Function, ...]:
    owners = inventory.by_node[path]
    return tuple([inventory.functions[a] for a in owners if a != address]) if owners[1:] else ()


def _places(subjects: Iterable[Subject]) -> dict[Address, tuple[int, ...]]:
    """The place of each function in the kinds that count, whether it is published or not."""
    counts: Counter[Kind] = Counter()
    places = {}
    for subject in subjects:
        counting = [case for case in subject.cases if case.profile.naming is Naming.INDEX]
        if counting:
            places[subject.function.address] = tuple(counts[case.kind] for case in counting)
            counts.update(kind for case in counting for kind in case.profile.kinds)
    return places


# --- judging one function -------------------------------------------------------------------------


def _judge(subject: Subject, circumstances: Circumstances, terms: Terms) -> Judgement:
    offers = []
    withheld = []
    places = iter(circumstances.places)
    for case in subject.cases:
        name = str(next(places)) if case.name is None else case.name
        judged = _judge_case(case, name, subject, circumstances, terms)
        if isinstance(judged, Offer):
            offers.append(judged)
        else:
            address = subject.function.address
            withheld.append(Withheld(address, case.kind, judged.reason, judged.detail))
    if not subject.cases:
        withheld.append(_unmatched(subject.function, terms.policy))
    return Judgement(subject, circumstances, tuple(offers), tuple(withheld))


def _judge_case(
    case: Case, name: str, subject: Subject, circumstances: Circumstances, terms: Terms
) -> Offer | Refusal:
    """Offer what a profile gives of a function, or say why not."""
    if refusal := _refusal(case, circumstances, terms):
        return refusal
    shared = dict(zip(subject.shared, circumstances.shared, strict=True))
    offer = offer_of(case, name, tuple(shared[path] for path in case.shared))
    if isinstance(offer, Refusal):
        return offer
    rivals = dict(zip(subject.paths, circumstances.rivals, strict=True))
    for path, _ in offer.fingerprint.nodes:
        if path not in case.shared and (others := _others(path, rivals[path], case.function)):
            return Refusal(Reason.PATH_CONFLICT, f"{path} belongs to {', '.join(others)} too")
    if terms.policy.version is not None and (refusal := _too_new(offer, terms.policy.version)):
        return refusal
    if circumstances.hold is not None:
        return dataclasses.replace(offer, in_all=False)
    return offer


def _others(path: str, rivals: Iterable[Function], function: Function) -> list[str]:
    """Who else has a node path. That of an IOMMU group belongs to all of the group as one."""

    def owner(each: Function) -> Address | int:
        role = next(node.role for node in each.nodes if node.path == path)
        group = each.iommu_group if role is NodeRole.VFIO_GROUP else None
        return each.address if group is None else group

    return sorted({str(owner(each)) for each in rivals} - {str(owner(function))})


def _unmatched(function: Function, policy: Policy) -> Withheld:
    """Say that no profile recognises a function."""
    if _is_ignored(function, policy):
        reason, detail = Reason.IGNORED, "the configuration says so"
    else:
        driver = f"driver {function.driver}" if function.driver else "no driver"
        kind_of = "" if function.nodes_of(NodeRole.RENDER) else ", no render node"
        reason = Reason.UNMATCHED
        detail = f"no profile recognises {function.pci_id} ({driver}{kind_of})"
    return Withheld(function.address, None, reason, detail)


def _too_new(offer: Offer, pin: str) -> Refusal | None:
    needed = max(
        (rules.device_version(offer.device), rules.kind_version(offer.kind)),
        key=rules.VERSIONS.index,
    )
    if rules.fits(needed, pin):
        return None
    detail = f"its entry needs cdiVersion {needed}; the configuration allows no later than"
    return Refusal(Reason.VERSION_PIN, f"{detail} {pin}")


def _refusal(case: Case, circumstances: Circumstances, terms: Terms) -> Refusal | None:
    """Why a function is withheld whatever its nodes are."""
    function, profile = case.function, case.profile
    if _is_ignored(function, terms.policy):
        return Refusal(Reason.IGNORED, "the configuration says so")
    if held := _held(function, circumstances.hold):
        return held
    if not terms.devtmpfs and not terms.policy.static_dev:
        detail = "/dev is not the kernel's own, so its nodes may be those of another time"
        return Refusal(Reason.STATIC_DEV, detail)
    if profile.sriov is SrIov.PF and function.is_vf:
        return Refusal(Reason.POLICY, f"it is a VF, and profile {profile.name} takes none")
    if profile.sriov is SrIov.VF and function.virtfns:
        return Refusal(Reason.POLICY, f"it is a PF with VFs: profile {profile.name} takes those")
    return _unviable(circumstances.group)


def _held(function: Function, hold: Hold | None) -> Refusal | None:
    """What a claim has against it: done, it is published again in the claim's mode."""
    if hold is None:
        return None
    if not hold.settled:
        return Refusal(Reason.HELD, f"claim {hold.claim} is moving it")
    if (hold.mode is HoldMode.VFIO) is not function.on_vfio:
        detail = f"claim {hold.claim} holds it for {hold.mode}, but it is on"
        return Refusal(Reason.HELD, f"{detail} {function.driver or 'no driver'}")
    return None


def _is_ignored(function: Function, policy: Policy) -> bool:
    return not policy.ignore.isdisjoint((function.address, function.pci_id))


def _unviable(group: Iterable[Function]) -> Refusal | None:
    """Who keeps an IOMMU group from being used."""
    in_the_way = [
        member
        for member in group
        if not member.is_bridge
        and not member.on_vfio
        and member.driver is not None
        and normalise_driver(member.driver) not in _HARMLESS_DRIVERS
    ]
    if not in_the_way:
        return None
    names = ", ".join(f"{member.address} ({member.driver})" for member in in_the_way)
    detail = f"in its IOMMU group {in_the_way[0].iommu_group} a driver of the host has"
    return Refusal(Reason.GROUP_NOT_VIABLE, f"{detail} {names}")


# --- what is no function, and what is called the same ---------------------------------------------


def _orphan(orphan: Orphan, profiles: Iterable[Profile]) -> WithheldNode:
    folder = orphan.devpath.split("/")
    for profile in profiles:
        parts = profile.partitions
        if parts is not None and any(name.startswith(parts.prefix) for name in folder):
            return WithheldNode(orphan.node.path, Reason.POLICY, parts.reason)
    driver = f" (driver {orphan.driver})" if orphan.driver else ""
    return WithheldNode(
        orphan.node.path,
        Reason.UNMATCHED,
        f"it belongs to no PCI function{driver}",
    )


def _without_doubles(offers: Sequence[Offer]) -> tuple[tuple[Offer, ...], list[Withheld]]:
    """Withhold every offer whose name another one of its kind has."""
    if len({(offer.kind, offer.device.name) for offer in offers}) == len(offers):
        return tuple(offers), []
    counts = Counter((offer.kind, offer.device.name) for offer in offers)
    unique: list[Offer] = []
    doubled: list[Withheld] = []
    for offer in offers:
        name = offer.device.name
        if counts[offer.kind, name] == 1:
            unique.append(offer)
        else:
            detail = f"another device of {offer.kind} is called {name} too"
            doubled.append(Withheld(offer.address, offer.kind, Reason.INVALID, detail))
    return tuple(unique), doubled
