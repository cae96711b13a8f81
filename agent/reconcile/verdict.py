"""What becomes of each offer: its entry stays, may be written, or waits, and for what. Pure.

An entry on disk stays while it is true: it gives the nodes that the offer gives, and the device's
fingerprint (driver, nodes, identity) has not changed since. What is not on disk waits until udev
has dealt with its nodes (bounded by ``udev_timeout``) and its facts have been the same for
``settle`` (bounded by ``settle_max``).

Of hundreds of devices nearly all are at rest: the file of their kind is what the last plan wanted,
and their offers are the same objects. Those stay without being looked at.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import structs

from agent.cdi.desired import Desired, Offer, Reason
from agent.cdi.entry import Case, case_of
from agent.cdi.files import PREFIX, Disk
from agent.cdi.profile import Naming, Profile, profiles_of
from agent.cdi.sheet import Sheet
from agent.cdi.spec import Device, Kind
from agent.host.model import Function, HoldMode
from agent.reconcile.rules import Layout, Timing
from agent.reconcile.state import Memory, Recheck, Track

CONTRADICTIONS: Final = frozenset(
    {Reason.PATH_CONFLICT, Reason.NODE_MISMATCH, Reason.UNREADABLE},
)
"""Reasons that may be a look at a moving host: looked at again without an event."""


class Situation(msgspec.Struct, frozen=True):
    """The inputs of one plan, with memory brought up to date."""

    desired: Desired
    disk: Disk
    memory: Memory
    layout: Layout
    timing: Timing
    now: float
    udevd: bool
    path_of: Mapping[Kind, str]
    """The file of each kind in which something is offered."""
    at_rest: Mapping[Kind, Sequence[Offer]]
    """What stays for certain; in order of address."""

    def entry_on_disk(self, offer: Offer) -> Device | None:
        """The entry of its name in the file of its kind."""
        file = self.disk.ours.get(self.path_of[offer.kind])
        return None if file is None else file.devices.get(offer.device.name)


class Verdict(msgspec.Struct, frozen=True):
    """What becomes of an offer."""

    stays: bool = False
    """It is on disk, gives the same nodes, and is still true."""
    ready: bool = False
    """It may be written if it is not on disk."""
    confirmed: bool = True
    """udev has dealt with its nodes, or there is no udev."""
    reason: Reason | None = None
    """Why it is not published; None if it is."""
    detail: str = ""
    wake_at: float | None = None
    adopt: str | None = None
    """The foreign file that stands in its way and may be set aside."""


Verdicts = Sequence[tuple[Offer, Verdict]]
"""On the offers that are not at rest."""


def situation_of(
    desired: Desired,
    disk: Disk,
    memory: Memory,
    *,
    layout: Layout,
    timing: Timing,
    now: float,
    heard: float,
    udevd: bool,
) -> Situation:
    """Bring memory up to date, and tell what is at rest."""
    path_of = {kind: layout.path(kind) for kind in {offer.kind for offer in desired.offers}}
    memory = _remember(desired, disk, memory, path_of, timing, now, heard)
    at_rest = _at_rest(desired, disk, memory.sheets, path_of)
    return Situation(desired, disk, memory, layout, timing, now, udevd, path_of, at_rest)


def _remember(
    desired: Desired,
    disk: Disk,
    memory: Memory,
    path_of: Mapping[Kind, str],
    timing: Timing,
    now: float,
    heard: float,
) -> Memory:
    """Carry the tracks over: facts that changed start anew, devices that went are forgotten."""
    tracks = dict(memory.tracks)
    for offer in _not_among(memory.offers, desired.offers):
        del tracks[offer.key]
    for offer in _not_among(desired.offers, memory.offers):
        track = memory.tracks.get(offer.key)
        if track is None:
            track = Track(offer.fingerprint, since=now, first=now, heard=heard)
        elif track.fingerprint != offer.fingerprint:
            file = disk.ours.get(path_of[offer.kind])
            was_published = file is not None and offer.device.name in file.devices
            first = now if was_published else track.first
            track = Track(offer.fingerprint, now, first, heard, trusted=False)
        tracks[offer.key] = track
    nodes = (
        {(node.path, node.number) for offer in desired.offers for node in offer.unsettled}
        if memory.udev_done
        else set()
    )
    return dataclasses.replace(
        memory,
        offers=desired.offers,
        tracks=tracks,
        udev_done=frozenset(node for node in memory.udev_done if node in nodes),
        recheck=_recheck(desired, memory.recheck, now, timing),
    )


def _not_among(offers: Sequence[Offer], others: Sequence[Offer]) -> list[Offer]:
    """Those that are not the same objects as any of the others."""
    if offers is others:
        return []
    known = set(map(id, others))
    return [offer for offer in offers if id(offer) not in known]


def _at_rest(
    desired: Desired, disk: Disk, sheets: Mapping[Kind, Sheet], path_of: Mapping[Kind, str]
) -> Mapping[Kind, Sequence[Offer]]:
    """The offers on sheets that are on disk, where no foreign file has a say."""
    occupied = {file.path for file in disk.foreign}
    doubled = {file.kind for file in disk.foreign if file.same_directory}
    offered = set(map(id, desired.offers))
    at_rest: dict[Kind, Sequence[Offer]] = {}
    for kind, path in path_of.items():
        sheet, file = sheets.get(kind), disk.ours.get(path)
        if sheet is None or file is None or path in occupied or kind in doubled:
            continue
        if file.content == sheet.content:
            at_rest[kind] = [offer for offer in sheet.offers if id(offer) in offered]
    return at_rest


def judge(situation: Situation, stuck: frozenset[str] = frozenset()) -> Verdicts:
    """Give a verdict on every offer that is not at rest.

    Args:
        situation: What is offered, what is on disk, and what is remembered.
        stuck: Node paths that entries still give whose withdrawal waits to be tried again.
    """
    if stuck:
        users = Counter(path for o in situation.desired.offers for path in o.device.paths)
        stuck = frozenset(path for path in stuck if users[path] <= 1)  # a shared node stays true
    occupied = {file.path for file in situation.disk.foreign}
    doubled = {
        (file.kind, name): file.path
        for file in situation.disk.foreign
        if file.same_directory
        for name in file.names
    }
    verdicts = []
    at_rest = [offer for offers in situation.at_rest.values() for offer in offers]
    for offer in _not_among(situation.desired.offers, at_rest):
        verdict = _readiness(situation, offer)
        path = situation.path_of[offer.kind]
        if path in occupied:
            verdict = Verdict(reason=Reason.FOREIGN_FILE, detail=_occupied(path))
        elif (other := doubled.get((offer.kind, offer.device.name))) is not None:
            detail = _doubled(other, offer.kind, offer.device.name)
            may_adopt = verdict.reason is None and _is_adopted(other, situation.layout)
            adopt = other if may_adopt else None
            verdict = Verdict(reason=Reason.FOREIGN_DUPLICATE, detail=detail, adopt=adopt)
        elif verdict.ready and offer.device.paths & stuck:
            detail = "an old entry with one of its nodes could not be withdrawn yet"
            verdict = Verdict(reason=Reason.BLOCKED, detail=detail)
        verdicts.append((offer, verdict))
    return verdicts


def foreign_obstacle(
    function: Function, mode: HoldMode, disk: Disk, profiles: Sequence[Profile], layout: Layout
) -> str | None:
    """Why a function could not be published in a mode, whatever driver it has: a foreign file.

    It is known before the function is moved, unless the function's name comes with its nodes.

    Args:
        function: As it is now.
        mode: How it would be held.
        disk: The spec directories.
        profiles: In order of precedence.
        layout: Which file is whose.
    """
    driver = "vfio-pci" if mode is HoldMode.VFIO else None
    moved = structs.replace(function, driver=driver, has_vfio_dev=False)
    cases = [
        case_of(moved, profile)
        for profile in profiles_of(function, profiles)
        if (profile.vfio_kind if mode is HoldMode.VFIO else profile.nodes)
    ]
    found = [_foreign_file(case, disk, layout) for case in cases]
    return next(iter(found), None) if all(found) else None


def _foreign_file(case: Case, disk: Disk, layout: Layout) -> str | None:
    """The foreign file that stands in the way of an entry, and how; not one that is set aside."""
    path = layout.path(case.kind)
    is_named = case.on_vfio or case.profile.naming is not Naming.CARD
    for file in disk.foreign:
        if file.path == path:
            return _occupied(path)
        if _is_adopted(file.path, layout):
            continue
        if is_named and file.same_directory and file.kind == case.kind and case.name in file.names:
            return _doubled(file.path, case.kind, case.name)
    return None


def _occupied(path: str) -> str:
    return f"{path} exists and was not written by cdi-agent"


def _doubled(path: str, kind: Kind, name: str | None) -> str:
    return f"{path} defines {kind}={name} too"


def _is_adopted(path: str, layout: Layout) -> bool:
    """Whether a foreign file is set aside if it is in the way: none that has a name of ours is."""
    return layout.adopt and not path.rpartition("/")[2].startswith(PREFIX)


def _readiness(situation: Situation, offer: Offer) -> Verdict:
    timing, now = situation.timing, situation.now
    track = situation.memory.tracks[offer.key]
    entry = situation.entry_on_disk(offer)
    if entry is not None and track.trusted and entry.paths == offer.device.paths:
        return Verdict(stays=True)
    waiting = [
        node
        for node in offer.unsettled
        if node.number is None or (node.path, node.number) not in situation.memory.udev_done
    ]
    udev_at = track.since + timing.udev_timeout
    if waiting and situation.udevd and now < udev_at:
        names = ", ".join(node.path for node in waiting)
        detail = f"udev has not dealt with {names} yet"
        return Verdict(reason=Reason.UDEV, detail=detail, wake_at=udev_at)
    settle_at = min(track.since + timing.settle, track.first + timing.settle_max)
    if now < settle_at:
        detail = "its facts are too new"
        return Verdict(reason=Reason.SETTLING, detail=detail, wake_at=settle_at)
    return Verdict(ready=True, confirmed=not (waiting and situation.udevd))


def _recheck(desired: Desired, before: Recheck, now: float, timing: Timing) -> Recheck:
    """When to look again at facts that contradict each other; no event may come to say so."""
    addresses = frozenset(w.address for w in desired.withheld if w.reason in CONTRADICTIONS)
    if not addresses:
        return Recheck()
    if addresses == before.addresses and now < before.at:
        return before
    attempts = before.attempts + 1 if addresses == before.addresses else 0
    delay = min(timing.recheck_first * 2 ** min(attempts, 30), timing.recheck_max)
    return Recheck(addresses=addresses, attempts=attempts, at=now + delay)
