"""Whether the agent keeps its promise, judged anew after every pass. Pure.

*Healthy* means: what is on disk is what should be there, and the loop looks often enough to know.
A source of events that is down is a note and no fault: the loop then looks more often, and a
container without netlink would otherwise be restarted for ever. A host without a GPU is healthy.
*Ready* means: the first looks are done, so whoever needs the specs may start.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec


class EventSource(Protocol):
    """What is read of ``host.monitor.Monitor``."""

    @property
    def source(self) -> str:
        """Its name: ``kernel``, ``udev``."""

    @property
    def state(self) -> str:
        """``up``, ``deaf`` or ``down``."""

    @property
    def events(self) -> Mapping[tuple[str, str], int]:
        """Messages by subsystem and action."""

    @property
    def overflows(self) -> int:
        """How often the kernel dropped messages."""

    @property
    def malformed(self) -> int:
        """Messages that could not be read."""


class Verdict(msgspec.Struct, frozen=True):
    """An answer for a probe: yes, or no with the reasons."""

    ok: bool
    problems: tuple[str, ...] = ()
    """Why not, one sentence each."""
    notes: tuple[str, ...] = ()
    """What is not as it could be, and does no harm by itself."""

    @property
    def document(self) -> Mapping[str, object]:
        """For JSON."""
        return {"ok": self.ok, "problems": self.problems, "notes": self.notes}


def health(
    *,
    problems: Iterable[str],
    sources: Iterable[EventSource],
    last_pass: float | None,
    now: float,
    patience: float,
    unavailable: Iterable[str] = (),
) -> Verdict:
    """Judge whether the specs on this host can be relied on.

    Args:
        problems: What the last pass left undone (``State.problems``).
        sources: The sources of events.
        last_pass: Monotonic time at which the last pass ended; None before the first.
        now: Monotonic time.
        patience: Seconds that may pass between two passes before the loop counts as stuck; more
            than ``resync``.
        unavailable: Sources that this process can never have.
    """
    found = list(problems)
    if last_pass is None:
        found.append("no pass has ended yet")
    elif now - last_pass > patience:
        found.append(f"the last pass ended {now - last_pass:.0f} s ago: the loop is stuck")
    states = {source.source: source.state for source in sources}
    states |= dict.fromkeys(unavailable, "unavailable")
    notes = tuple(
        f"the source {source} is {state}: changes are found by looking regularly"
        for source, state in states.items()
        if state != "up"
    )
    return Verdict(not found, tuple(found), notes)


def readiness(*, ready: bool, stopping: bool) -> Verdict:
    """Judge whether those that wait for the specs may start."""
    if stopping:
        return Verdict(ok=False, problems=("the agent is stopping",))
    if not ready:
        return Verdict(ok=False, problems=("the first looks are not done yet",))
    return Verdict(ok=True)
