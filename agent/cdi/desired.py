"""What should be published, were every device ready: facts and profiles in, offers out.

Pure. ``desired`` makes one ``Offer`` for each device and kind that a profile publishes, and one
``Withheld`` with its reason for each device that it does not. It knows nothing of time or of the
disk: whether an offer is already published, must settle first, or would double a foreign
definition is decided by ``reconcile.plan``.

A function is judged by itself, by its circumstances and by what holds for all (``cdi.judge``).
Whatever is judged by the same as in the last pass is not judged again, and its offers stay the same
objects. Nor is it looked at, unless it has changed, or a claim on it, or a function that it shares
a node or an IOMMU group with: one change costs the same among hundreds of devices.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import msgspec

from agent.cdi.judge import (
    OWN_ROLES,
    Circumstances,
    Judgement,
    Subject,
    Terms,
    judge,
    subject_of,
)
from agent.cdi.offers import (
    Fingerprint,
    Offer,
    Policy,
    Reason,
    Withheld,
    WithheldNode,
)
from agent.cdi.profile import Naming, Profile, enabled
from agent.cdi.spec import Kind
from agent.host.model import (
    Address,
    Function,
    Hold,
    Inventory,
    Node,
    Orphan,
    address_order,
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


@dataclasses.dataclass(frozen=True, slots=True)
class Desired:
    """The result of ``desired``; at most one offer for a device in a kind."""

    offers: tuple[Offer, ...] = ()
    """In order of address."""
    withheld: tuple[Withheld, ...] = ()
    nodes: tuple[WithheldNode, ...] = ()
    """Display and accelerator nodes that belong to no function."""
    basis: "Basis | None" = dataclasses.field(default=None, repr=False, compare=False)
    """What it was made from, and what the next one need not find out again."""


class Basis(msgspec.Struct, frozen=True):
    """What a result was made from, and what was found out of each function."""

    terms: Terms
    functions: Mapping[Address, Function] = msgspec.field(default_factory=dict)
    shared: Mapping[str, Node] = msgspec.field(default_factory=dict)
    holds: Mapping[Address, Hold] = msgspec.field(default_factory=dict)
    subjects: Mapping[Address, Subject] = msgspec.field(default_factory=dict)
    judgements: Mapping[Address, Judgement] = msgspec.field(default_factory=dict)
    """Of those that are of interest."""
    offers: tuple[Offer, ...] = ()
    withheld: tuple[Withheld, ...] = ()


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
    known = None if before is None else before.basis
    if known is None or known.terms != terms:
        known = Basis(terms)
    basis = _judge_all(inventory, {hold.address: hold for hold in holds}, known)
    unread = (
        Withheld(address, None, Reason.UNREADABLE, f"it could not be read: {why}")
        for address, why in inventory.dropped.items()
    )
    return Desired(
        offers=basis.offers,
        withheld=tuple(
            sorted(
                (*unread, *basis.withheld),
                key=lambda each: (address_order(each.address), each.kind or ""),
            ),
        ),
        nodes=tuple(
            _orphan(orphan, enabled(terms.profiles))
            for orphan in sorted(inventory.orphans, key=lambda orphan: orphan.node.path)
            if orphan.node.role in OWN_ROLES
        ),
        basis=basis,
    )


# --- all functions, or those that need it ---------------------------------------------------------


def _judge_all(inventory: Inventory, holds: Mapping[Address, Hold], known: Basis) -> Basis:
    """Judge every function that is of interest, unless the same would come of it as before."""
    terms = known.terms
    changed = inventory.changed_since(known.functions)
    subjects = known.subjects
    if changed:
        now = (f for a in changed if (f := inventory.functions.get(a)) is not None)
        new = {function.address: subject_of(function, terms.profiles) for function in now}
        subjects = {a: s for a, s in subjects.items() if a not in changed} | new
    places = _places(subjects.values(), terms.profiles)
    if inventory.shared != known.shared or (places and changed):
        affected = known.judgements.keys() | subjects.keys()
    else:
        affected = _affected(changed, inventory, holds, known)
    judgements = dict(known.judgements)
    for address in affected:
        judgement = judgements.pop(address, None)
        subject = subjects.get(address)
        if subject is None or not subject.is_of_interest:
            continue
        circumstances = _circumstances(subject, inventory, holds, places)
        if (
            judgement is None
            or judgement.subject is not subject
            or judgement.circumstances != circumstances
        ):
            judgement = judge(subject, circumstances, terms)
        judgements[address] = judgement
    offers, withheld = known.offers, known.withheld
    if affected:
        in_order = sorted(judgements.values(), key=attrgetter("order"))
        offers, doubled = _without_doubles([o for each in in_order for o in each.offers])
        withheld = (*(w for each in in_order for w in each.withheld), *doubled)
    return Basis(
        terms,
        inventory.functions,
        inventory.shared,
        holds,
        subjects,
        judgements,
        offers,
        withheld,
    )


def _affected(
    changed: Iterable[Address],
    inventory: Inventory,
    holds: Mapping[Address, Hold],
    known: Basis,
) -> set[Address]:
    """What has changed, is held or no longer, or has what one of those has or had."""
    affected = {a for a in holds.keys() | known.holds.keys() if holds.get(a) != known.holds.get(a)}
    affected.update(changed)
    for address in changed:
        for functions in (known.functions, inventory.functions):
            if (function := functions.get(address)) is None:
                continue
            for node in function.nodes:
                affected.update(inventory.by_node.get(node.path, ()))
            if function.iommu_group is not None:
                affected.update(inventory.by_group.get(function.iommu_group, ()))
    return affected


def _circumstances(
    subject: Subject,
    inventory: Inventory,
    holds: Mapping[Address, Hold],
    places: Mapping[Address, tuple[int, ...]],
) -> Circumstances:
    address = subject.function.address
    others = ([a for a in inventory.by_node[path] if a != address] for path in subject.paths)
    return Circumstances(
        hold=holds.get(address),
        rivals=tuple(tuple(inventory.functions[a] for a in addresses) for addresses in others),
        group=() if subject.vfio_group is None else inventory.group(subject.vfio_group),
        shared=tuple(inventory.shared.get(path) for path in subject.shared),
        places=places.get(address, ()),
    )


def _places(
    subjects: Iterable[Subject], profiles: Iterable[Profile]
) -> dict[Address, tuple[int, ...]]:
    """The place of each function in the kinds that count, whether it is published or not."""
    if all(profile.naming is not Naming.INDEX for profile in profiles):
        return {}
    counts: Counter[Kind] = Counter()
    places = {}
    for subject in sorted(subjects, key=lambda each: address_order(each.function.address)):
        counting = [case for case in subject.cases if case.profile.naming is Naming.INDEX]
        if counting:
            places[subject.function.address] = tuple(counts[case.kind] for case in counting)
            counts.update(kind for case in counting for kind in case.profile.kinds)
    return places


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
