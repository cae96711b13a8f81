"""What a pass has come to: what is on disk now, the report, and the line for the log. Pure."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from agent.cdi.desired import Reason, Withheld
from agent.cdi.files import Action, DeleteSpec, Disk, WriteSpec
from agent.host.hints import Hint, Scope
from agent.host.model import Inventory
from agent.reconcile.plan import TRANSIENT, Plan
from agent.reconcile.rules import Layout
from agent.reconcile.state import Key, Memory, PassReport, State


@dataclasses.dataclass(slots=True)
class Acts:
    """What a pass has done so far; lives for one pass."""

    memory: Memory
    done: list[Action] = dataclasses.field(default_factory=list)
    failures: list[tuple[Action, str]] = dataclasses.field(default_factory=list)
    told: bool = False
    """One of these failures is news."""
    withdrawn_at: float = 0.0


def read_back(
    decision: Plan, disk: Disk, memory: Memory, layout: Layout
) -> tuple[Mapping[Key, str], tuple[Withheld, ...]]:
    """What is published and what is not: read on disk rather than believed of the actions.

    Args:
        decision: What should be on disk.
        disk: What is.
        memory: Why what could not be written could not.
        layout: Which file is whose.
    """
    published: dict[Key, str] = {}
    withheld = list(decision.withheld)
    paths = {kind: layout.path(kind) for kind in {kind for kind, _ in decision.published}}
    devices = {kind: disk.ours[path].devices for kind, path in paths.items() if path in disk.ours}
    for key, name in decision.published.items():
        kind, address = key
        if name in devices.get(kind, ()):
            published[key] = name
        else:
            retry = memory.retries.get(paths[kind])
            detail = "its spec file is not on disk" if retry is None else retry.problem
            withheld.append(Withheld(address, kind, Reason.STORE, detail))
    withheld.sort(key=lambda each: (each.address, each.kind or "", each.reason))
    return published, tuple(withheld)


def is_as_left(disk: Disk, planned: Disk, acts: Acts) -> bool:
    """Whether a reading finds what a pass has left; if not, others have changed it meanwhile.

    Their messages cannot be told from those of our own writes: both came before the reading.

    Args:
        disk: What was read after all was done.
        planned: What the pass went by.
        acts: What was done.
    """
    left: dict[str, bytes | None] = {path: file.content for path, file in planned.ours.items()}
    for action in acts.done:
        left[action.path] = action.content if isinstance(action, WriteSpec) else None
    found = {path: file.content for path, file in disk.ours.items()}
    foreign = tuple(file for file in planned.foreign if file.path not in left)
    present = {path: content for path, content in left.items() if content is not None}
    return (disk.foreign, found) == (foreign, present)


def is_starting(inventory: Inventory, withheld: Iterable[Withheld]) -> bool:
    """Whether something that the start has to wait for is still under way.

    A unit that is ordered after basic.target starts seconds before udev has loaded the DRM
    driver: READY would then come before the spec, and engines would start containers.
    """
    waited = set(TRANSIENT)
    if inventory.environment.udev_queue:
        waited.add(Reason.NO_DRIVER)
    return any(each.reason in waited for each in withheld)


def report_of(
    hints: Sequence[Hint],
    scope: Scope,
    before: State,
    after: State,
    acts: Acts,
    *,
    started: float,
    now: float,
) -> PassReport:
    """The report of a pass.

    Args:
        hints: What it answered.
        scope: What it read.
        before: The state before it.
        after: The state after it.
        acts: What it did.
        started: Monotonic seconds.
        now: Monotonic seconds; the moment at which all of it was on disk.
    """
    withdrew = tuple(sorted(before.published.keys() - after.published.keys()))
    published = tuple(sorted(after.published.keys() - before.published.keys()))
    heard = min((hint.received for hint in hints), default=started)
    tracks = acts.memory.tracks
    return PassReport(
        id=after.passes,
        reasons=Counter(hint.reason for hint in hints),
        started=started,
        duration=now - started,
        looked_at=None if scope.everything else len(scope.addresses),
        wrote=tuple((a.kind, a.path) for a in acts.done if isinstance(a, WriteSpec)),
        deleted=tuple((a.kind, a.path) for a in acts.done if isinstance(a, DeleteSpec)),
        failed=tuple((a.kind, a.path, problem) for a, problem in acts.failures),
        withdrew=withdrew,
        published=published,
        withdraw_latency=acts.withdrawn_at - heard if withdrew else None,
        publish_latencies=tuple(
            now - tracks[key].heard for key in published if key in tracks and acts.done
        ),
    )


def is_news(report: PassReport, acts: Acts) -> bool:
    """Whether a pass is worth a line; one that has only failed again is not."""
    failed_again = bool(acts.failures) and not (acts.done or acts.told)
    return report.changed and not failed_again


def line_of(before: State, after: State, report: PassReport) -> Mapping[str, object]:
    """The fields of the canonical line about a pass."""
    names = {key: after.published[key] for key in report.published}
    names |= {key: before.published[key] for key in report.withdrew}
    return {
        "pass_id": report.id,
        "reasons": dict(report.reasons),
        "looked_at": "all" if report.looked_at is None else report.looked_at,
        "published": [f"{key[0]}={names[key]}" for key in report.published],
        "withdrew": [f"{key[0]}={names[key]}" for key in report.withdrew],
        "wrote": [path for _, path in report.wrote],
        "deleted": [path for _, path in report.deleted],
        "failed": [path for _, path, _ in report.failed],
        "took_ms": round(report.duration * 1000, 3),
        "withdraw_ms": _milliseconds(report.withdraw_latency),
        "publish_ms": _milliseconds(max(report.publish_latencies, default=None)),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
