"""What becomes of one function: what it is offered as, or why not. Pure.

Three values decide and nothing else: what the function is itself (``Subject``), what others have to
do with it (``Circumstances``), and what holds for all (``Terms``). So a judgement holds for as long
as these three do.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from agent.cdi import rules
from agent.cdi.entry import Case, Refusal, case_of, offer_of
from agent.cdi.offers import Offer, Policy, Reason, Withheld
from agent.cdi.profile import Profile, SrIov, passed_over, profiles_of, switched_off
from agent.host.model import (
    Address,
    Function,
    Hold,
    HoldMode,
    Node,
    NodeRole,
    address_order,
)

_DISPLAY: Final = 0x03
_ACCELERATOR: Final = 0x12
OWN_ROLES: Final = (NodeRole.CARD, NodeRole.RENDER, NodeRole.ACCEL)
"""Of the nodes that make a device of a function, or an orphan worth a word."""


class Terms(msgspec.Struct, frozen=True):
    """What holds for all functions of a host."""

    profiles: tuple[Profile, ...]
    policy: Policy
    devtmpfs: bool


class Subject(msgspec.Struct, frozen=True):
    """A function, and what the profiles make of it before others are asked."""

    function: Function
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


class Judgement(msgspec.Struct, frozen=True):
    """What becomes of a function."""

    order: tuple[int, str]
    """The place of its function by address."""
    subject: Subject
    circumstances: Circumstances
    offers: tuple[Offer, ...]
    withheld: tuple[Withheld, ...]


def subject_of(function: Function, profiles: Sequence[Profile]) -> Subject:
    """Tell what the profiles make of a function before others are asked."""
    cases = tuple(case_of(function, profile) for profile in profiles_of(function, profiles))
    return Subject(
        function=function,
        cases=cases,
        paths=tuple(node.path for node in function.nodes),
        shared=tuple(dict.fromkeys(path for case in cases for path in case.shared)),
        vfio_group=function.iommu_group if function.on_vfio else None,
        is_of_interest=bool(cases) or _is_worth_a_word(function),
    )


def _is_worth_a_word(function: Function) -> bool:
    """Whether people expect a word about a function that no profile recognises."""
    is_candidate = function.class_code >> 16 in {_DISPLAY, _ACCELERATOR}
    return is_candidate or any(node.role in OWN_ROLES for node in function.nodes)


def judge(subject: Subject, circumstances: Circumstances, terms: Terms) -> Judgement:
    """Judge a function."""
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
    excluded = _excluded(subject.function, terms.policy)
    if not (subject.cases and excluded) and (rest := _rest(subject, excluded, terms)):
        withheld.append(Withheld(subject.function.address, None, rest.reason, rest.detail))
    order = address_order(subject.function.address)
    return Judgement(order, subject, circumstances, tuple(offers), tuple(withheld))


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


def _rest(subject: Subject, excluded: Refusal | None, terms: Terms) -> Refusal | None:
    """Why more could be expected of a function than its profiles make of it."""
    function = subject.function
    if excluded is not None:
        return excluded
    if off := switched_off(function, terms.profiles):
        return Refusal(Reason.POLICY, off)
    if subject.cases:
        over = passed_over(function, terms.profiles)
        return None if over is None else Refusal(Reason.POLICY, over)
    driver = f"driver {function.driver}" if function.driver else "no driver"
    kind_of = "" if function.nodes_of(NodeRole.RENDER) else ", no render node"
    detail = f"no profile recognises {function.pci_id} ({driver}{kind_of})"
    return Refusal(Reason.UNMATCHED, detail)


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
    if excluded := _excluded(function, terms.policy):
        return excluded
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
    if hold.dead:
        return Refusal(Reason.DEAD, "it does not answer any more since it came back from a claim")
    if not hold.settled:
        return Refusal(Reason.HELD, f"claim {hold.claim} is moving it")
    if (hold.mode is HoldMode.VFIO) is not function.on_vfio:
        detail = f"claim {hold.claim} holds it for {hold.mode}, but it is on"
        return Refusal(Reason.HELD, f"{detail} {function.driver or 'no driver'}")
    return None


def _excluded(function: Function, policy: Policy) -> Refusal | None:
    """What the configuration has against a device, whatever it is."""
    if not policy.publish:
        return Refusal(Reason.POLICY, "all that was published is taken back")
    if not policy.ignore.isdisjoint((function.address, function.pci_id)):
        return Refusal(Reason.IGNORED, "the configuration says so")
    return None


def _unviable(group: Iterable[Function]) -> Refusal | None:
    """Who keeps an IOMMU group from being used."""
    in_the_way = [member for member in group if member.keeps_group]
    if not in_the_way:
        return None
    names = ", ".join(f"{member.address} ({member.driver})" for member in in_the_way)
    detail = f"in its IOMMU group {in_the_way[0].iommu_group} a driver of the host has"
    return Refusal(Reason.GROUP_NOT_VIABLE, f"{detail} {names}")
