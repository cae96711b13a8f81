"""From what is wanted and what is on disk to the actions that close the gap. Pure.

The rules, in the order in which they matter:

1. **Withdraw at once.** An entry on disk that the facts no longer bear out goes in this pass: it
   is missing from the target, or it gives a node that the target's entry does not, or its
   device's fingerprint (driver, nodes, identity) changed.
2. **Publish when ready.** An offer that is not on disk waits until udev has dealt with its nodes
   (bounded by ``udev_timeout``) and its facts have been the same for ``settle`` (bounded by
   ``settle_max``). An entry that an earlier run left on disk, and that is still true, stays.
3. **All withdrawals come before all publications**, across files. A file that loses and gains is
   therefore written twice; between the two it holds what it had and keeps.
4. **A kind whose devices make no valid spec together** keeps those that are on disk, if these do;
   the others are withheld. Other kinds have nothing to do with it.
5. **A failed withdrawal blocks** every publication that would use the same path. What failed is
   tried again with growing delay, unless the content that is wanted changes.

What an offer has to do with these rules is ``reconcile.verdict``'s; what follows for the files is
here. Time is an argument. What has to be remembered is ``Memory``; when to look again, ``wake_at``.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import structs

from agent.cdi.desired import Desired, Offer, Reason, Withheld
from agent.cdi.files import Action, DeleteSpec, Disk, SetAside, SpecFile, WriteSpec
from agent.cdi.sheet import Sheet, sheet_of
from agent.cdi.spec import Device, Kind
from agent.errors import SpecError
from agent.reconcile.rules import Layout, Timing
from agent.reconcile.state import Key, Memory, Retry
from agent.reconcile.verdict import Situation, Verdicts, judge, situation_of

ALL: Final = "all"

TRANSIENT: Final = frozenset({Reason.SETTLING, Reason.UDEV})
"""Reasons that end by themselves within ``settle_max`` or ``udev_timeout``."""


class Plan(msgspec.Struct, frozen=True):
    """What to do now, and what is waited for."""

    withdrawals: tuple[Action, ...]
    publications: tuple[Action, ...]
    published: Mapping[Key, str]
    """What is on disk once all of it is done, with its CDI device name."""
    withheld: tuple[Withheld, ...]
    memory: Memory
    wake_at: float | None
    """Monotonic time at which to plan again even without news."""
    unconfirmed: tuple[Key, ...] = ()
    """Published without udev's word, since ``udev_timeout`` has passed."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """Every action, in the order in which they have to be done."""
        return self.withdrawals + self.publications


def plan(
    desired: Desired,
    disk: Disk,
    memory: Memory,
    *,
    layout: Layout,
    timing: Timing,
    now: float,
    heard: float | None = None,
    udevd: bool = True,
) -> Plan:
    """Decide what to write and delete.

    Args:
        desired: What should be published, were every device ready.
        disk: The spec directories as they are.
        memory: What the previous plan remembered.
        layout: Where files go.
        timing: How long things are waited for.
        now: Monotonic seconds.
        heard: When the message arrived that led to this look; ``now`` if none did.
        udevd: Whether a udevd will deal with new nodes.
    """
    situation = situation_of(
        desired,
        disk,
        memory,
        layout=layout,
        timing=timing,
        now=now,
        heard=now if heard is None else heard,
        udevd=udevd,
    )
    verdicts = judge(situation)
    files, invalid = _files(situation, verdicts)
    if stuck := frozenset().union(*(file.lost for file in files if file.withdrawal_waits)):
        verdicts = judge(situation, stuck)
        files, invalid = _files(situation, verdicts)
    return _result(situation, verdicts, files, invalid)


def failed(memory: Memory, action: Action, problem: str, *, now: float, timing: Timing) -> Memory:
    """Remember that an action failed, so that the next plan waits before it tries again."""
    before = memory.retries.get(action.path)
    attempts = 1 if before is None else before.attempts + 1
    delay = min(timing.retry_first * 2 ** min(attempts - 1, 30), timing.retry_max)
    retry = Retry(attempts=attempts, at=now + delay, content=_content(action), problem=problem)
    return dataclasses.replace(memory, retries={**memory.retries, action.path: retry})


def succeeded(memory: Memory, action: Action) -> Memory:
    """Forget the failures of a file that could be written or deleted."""
    rest = {path: retry for path, retry in memory.retries.items() if path != action.path}
    return dataclasses.replace(memory, retries=rest)


class _FilePlan(msgspec.Struct, frozen=True):
    """What becomes of one path."""

    withdrawal: Action | None
    publication: Action | None
    lost: frozenset[str]
    target: Sheet | None = None
    """What it should hold in the end."""
    withdrawal_waits: bool = False
    publication_waits: bool = False


def _content(action: Action) -> bytes | None:
    return action.content if isinstance(action, WriteSpec) else None


def _files(
    situation: Situation, verdicts: Verdicts
) -> tuple[tuple[_FilePlan, ...], Mapping[Kind, str]]:
    """What becomes of each file; and what is wrong with kinds that cannot have all of theirs."""
    # Mostly one of the two is what was wanted in the last plan, or both are the same.
    before = situation.memory.sheets
    staying, _ = _sheets(situation, [o for o, v in verdicts if v.stays], before)
    wanted = [o for o, v in verdicts if v.reason is None]
    target, invalid = _sheets(situation, wanted, {**before, **staying})
    target |= {kind: staying[kind] for kind in invalid if kind in staying}
    path_of = situation.path_of
    staying_in = {path_of[kind]: sheet for kind, sheet in staying.items()}
    wanted_in = {path_of[kind]: sheet for kind, sheet in target.items()}
    ours = situation.disk.ours
    plans = [
        _FilePlan(DeleteSpec(path, None), None, frozenset()) for path in situation.disk.leftovers
    ]
    # What a foreign file leaves is published by the next plan, which sees that it is gone.
    plans += [
        _FilePlan(SetAside(path, kind), None, frozenset())
        for path, kind in sorted({(v.adopt, o.kind) for o, v in verdicts if v.adopt})
    ]
    plans += [
        _file(situation, path, ours.get(path), staying_in.get(path), wanted_in.get(path))
        for path in sorted({*ours, *wanted_in})
    ]
    files = tuple(
        structs.replace(
            plan,
            withdrawal_waits=_waits(situation, plan.withdrawal),
            publication_waits=_waits(situation, plan.publication),
        )
        for plan in plans
    )
    return files, invalid


def _waits(situation: Situation, action: Action | None) -> bool:
    """Whether just this was tried in vain, and its time to be tried again has not come."""
    retry = None if action is None else situation.memory.retries.get(action.path)
    if action is None or retry is None:
        return False
    return retry.content == _content(action) and situation.now < retry.at


def _sheets(
    situation: Situation, offers: Iterable[Offer], before: Mapping[Kind, Sheet]
) -> tuple[dict[Kind, Sheet], dict[Kind, str]]:
    """What the files should hold of what is at rest and of these offers; and why some cannot."""
    foreign = situation.disk.foreign
    without_all = {file.kind for file in foreign if file.same_directory and ALL in file.names}
    members = {kind: list(offers) for kind, offers in situation.at_rest.items() if offers}
    for offer in offers:
        members.setdefault(offer.kind, []).append(offer)
    sheets, invalid = {}, {}
    for kind in sorted(members):
        try:
            sheets[kind] = sheet_of(
                kind,
                members[kind],
                before.get(kind),
                suffix=situation.layout.format,
                with_all=kind not in without_all,
            )
        except SpecError as error:
            invalid[kind] = error.sentence
    return sheets, invalid


def _file(
    situation: Situation,
    path: str,
    file: SpecFile | None,
    staying: Sheet | None,
    target: Sheet | None,
) -> _FilePlan:
    before = {} if file is None else file.devices
    after = {} if target is None else target.entries
    content = None if file is None else file.content
    lost = _lost_paths(file, target)
    withdrawal: Action | None = None
    if file is not None and (lost or target is None or before.keys() - after.keys()):
        kind = file.spec.kind if file.spec is not None else None
        if staying is None:
            withdrawal = DeleteSpec(path, kind, withdraws=tuple(sorted(before)), loses=lost)
            content = None
        else:
            content = staying.content
            withdrawal = WriteSpec(
                path,
                staying.spec.kind,
                content,
                withdraws=tuple(sorted(before.keys() - staying.entries.keys())),
                loses=lost,
                delete_if_unwritable=_is_offered_elsewhere(situation, lost, before),
                spec=staying.spec,
            )
    publication: Action | None = None
    if target is not None and target.content != content:
        kept = {} if withdrawal is not None and staying is None else before
        publication = WriteSpec(
            path,
            target.spec.kind,
            target.content,
            publishes=tuple(sorted(after.keys() - kept.keys())),
            spec=target.spec,
        )
    return _FilePlan(withdrawal, publication, lost, target)


def _lost_paths(file: SpecFile | None, target: Sheet | None) -> frozenset[str]:
    """The node paths that a file gives and that its new content would no longer give.

    Counted per entry: a path that moves from one device to another is lost by the first.
    """
    lost: set[str] = set()
    after = {} if target is None else target.entries
    for name, device in {} if file is None else file.devices.items():
        entry = after.get(name)
        if entry is None:
            lost |= device.paths
        elif entry.device is not device:
            lost |= device.paths - entry.device.paths
    return frozenset(lost)


def _is_offered_elsewhere(
    situation: Situation, lost: frozenset[str], before: Mapping[str, Device]
) -> bool:
    """Whether one of these paths now belongs to another device than the one that a file names."""
    for offer in situation.desired.offers:
        if not lost.isdisjoint(offer.device.paths):
            entry = before.get(offer.device.name)
            if entry is None or not lost & offer.device.paths <= entry.paths:
                return True
    return False


def _result(
    situation: Situation,
    verdicts: Verdicts,
    files: Sequence[_FilePlan],
    invalid: Mapping[Kind, str],
) -> Plan:
    withdrawals = [f.withdrawal for f in files if f.withdrawal and not f.withdrawal_waits]
    publications = [
        f.publication
        for f in files
        # A file whose withdrawal waits is not published over: both are one content to its readers.
        if f.publication and not f.publication_waits and not f.withdrawal_waits
    ]
    postponed = {
        action.path
        for f in files
        for action, waits in (
            (f.withdrawal, f.withdrawal_waits),
            (f.publication, f.publication_waits or f.withdrawal_waits),
        )
        if action is not None and waits
    }
    withheld = list(situation.desired.withheld)
    published: dict[Key, str] = {}
    for file in files:
        if file.target is not None:
            published.update(file.target.names)
    tracks = dict(situation.memory.tracks)
    for offer, verdict in verdicts:
        reason, detail = verdict.reason, verdict.detail
        if verdict.ready:
            tracks[offer.key] = structs.replace(tracks[offer.key], trusted=True)
            if (path := situation.path_of[offer.kind]) in postponed:
                reason = Reason.STORE
                detail = situation.memory.retries[path].problem
        if reason is not None:
            published.pop(offer.key, None)
            withheld.append(Withheld(offer.address, offer.kind, reason, detail))
    if invalid:
        told = published.keys() | {(w.kind, w.address) for w in withheld}
        withheld += [
            Withheld(offer.address, offer.kind, Reason.INVALID, invalid[offer.kind])
            for offer in situation.desired.offers
            if offer.kind in invalid and offer.key not in told
        ]
    retries = {
        path: retry
        for path, retry in situation.memory.retries.items()
        if path in postponed or any(path == a.path for a in (*withdrawals, *publications))
    }
    recheck = situation.memory.recheck
    wakes = [verdict.wake_at for _, verdict in verdicts if verdict.wake_at is not None]
    wakes += [retries[path].at for path in postponed]
    if recheck.addresses:
        wakes.append(recheck.at)
    if any(isinstance(action, SetAside) for action in withdrawals):
        wakes.append(situation.now)
    return Plan(
        withdrawals=tuple(withdrawals),
        publications=tuple(publications),
        published=published,
        withheld=tuple(sorted(withheld, key=lambda w: (w.address, w.kind or "", w.reason))),
        memory=dataclasses.replace(
            situation.memory,
            tracks=tracks,
            retries=retries,
            sheets={f.target.spec.kind: f.target for f in files if f.target is not None},
        ),
        wake_at=min(wakes, default=None),
        unconfirmed=tuple(o.key for o, v in verdicts if v.ready and not v.confirmed),
    )
