"""The metrics of claims, beside those of `observe.metrics` and by the same rules.

Label sets are closed, everything is there from the start, and each number is read from its owner
at the moment of the scrape.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from prometheus_client.core import Metric

from agent.host.model import HoldMode
from agent.observe.metrics import Histogram, counter, gauge, histogram
from agent.reconcile.state import State
from agent.vfio.model import Step
from agent.vfio.state import Outcome, Phase

BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Seconds; a driver that comes or goes takes from milliseconds to half a minute."""
INSPECT: Final = "inspect"


class Desk(Protocol):
    """What is read of ``reconcile.desk.Desk``."""

    @property
    def ended(self) -> Mapping[tuple[str, ...], int]:
        """Claims that have ended, by mode and outcome."""

    @property
    def durations(self) -> list[tuple[str, float]]:
        """Steps that were done since this was emptied last, each with its seconds."""

    @property
    def hung(self) -> int:
        """How many writes did not return in time."""


class ClaimMetrics:
    """What is exported of claims; a collector for `Metrics.add`.

    Args:
        desk: Counts.
        snapshot: The reconciler's state.
    """

    def __init__(self, desk: Desk, snapshot: Callable[[], State]) -> None:
        self._desk = desk
        self._snapshot = snapshot
        self._steps = {step: Histogram(BUCKETS) for step in (INSPECT, *map(str, Step))}

    def observe(self) -> None:
        """Take over how long steps took; called after every pass."""
        for step, seconds in self._desk.durations:
            self._steps[step].observe(seconds)
        self._desk.durations.clear()

    def collect(self) -> Iterator[Metric]:
        """Every metric, one statement each; the registry calls this."""
        claims = self._snapshot().claims
        modes = {"mode": tuple(HoldMode)}
        yield gauge(
            "claims",
            "Claims, by mode and by what they wait for.",
            modes | {"phase": tuple(Phase)},
            Counter(
                (claim.record.request.mode, claim.phase)
                for claim in claims.live.values()
                if not claim.dry_run
            ),
        )
        yield counter(
            "claims_ended",
            "Claims that have ended, by how.",
            modes | {"outcome": tuple(Outcome)},
            self._desk.ended,
        )
        yield histogram(
            "claim_step_duration_seconds",
            "How long one write to sysfs took, or finding out whether a device may be taken.",
            ("step",),
            {(step,): seconds for step, seconds in self._steps.items()},
        )
        yield counter(
            "claim_writes_hung",
            "Writes to sysfs that did not return in time.",
            {},
            {(): self._desk.hung},
        )
        yield gauge(
            "devices_stranded",
            "Functions that could not be brought back to the driver that they came from.",
            {},
            {(): len(claims.strays)},
        )
        yield gauge(
            "devices_hung",
            "Functions to which nothing is written until an earlier write returns.",
            {},
            {(): len(claims.children)},
        )
        yield gauge(
            "claims_paused",
            "Whether no claim may begin to move a device.",
            {},
            {(): float(self._snapshot().paused)},
        )
