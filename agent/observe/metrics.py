"""The metrics: counters that live elsewhere, read when somebody scrapes.

Owns its registry (never the library's global one) and what it counts of the reports of passes.
Everything else is read from its owner at the moment of the scrape, in the loop's thread, so no two
numbers of one scrape disagree. Only /proc is read in a thread.

Label sets are closed: every value that can occur is there from the start with 0, so a rate works
from the first event on and nothing that comes in from outside makes a new series. A metric is one
statement in `Metrics.collect`.
"""

import asyncio
import bisect
import itertools
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from agent.cdi.desired import Reason
from agent.host.uevent import ACTIONS, OTHER, SUBSYSTEMS, Source
from agent.observe.health import EventSource, Verdict
from agent.reconcile.messages import Inbox
from agent.reconcile.state import PassReport, State

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `Metrics.render` returns."""

SOURCES: Final[tuple[str, ...]] = get_args(Source)
"""A source that cannot be opened here is down, not absent."""

LEFTOVER: Final = "leftover"
"""The kind of a file of ours that belongs to no kind any more."""

PASS_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
DISK_BUCKETS: Final = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025),
    *(0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
"""Seconds. Narrow around the promises: 3 and 10 ms for a withdrawal, ``settle`` and 5 or 15 ms for
a publication."""

Labels = Mapping[str, Sequence[str]]
Values = Mapping[tuple[str, ...], float]


class Histogram:
    """Observations by upper bound.

    Args:
        bounds: Growing; infinity is added.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add one observation; a clock that went backwards counts as none at all."""
        value = max(0.0, value)
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add this histogram to a family as one of its label sets."""
        cumulated = itertools.accumulate(self._counts)
        bounds = ("+Inf" if math.isinf(bound) else str(float(bound)) for bound in self._bounds)
        family.add_metric(labels, list(zip(bounds, cumulated, strict=True)), self._sum)


class _Process(ProcessCollector):
    """The library's metrics of a process, where /proc shows nothing but processes too.

    It reads the time of boot from /proc/stat and without it says nothing at all; a service that is
    confined by ``ProcSubset=pid`` has no such file.
    """

    def _boot_time(self) -> float:
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class Metrics:
    """Everything that is exported, and how to render it.

    Args:
        version: Of the agent.
        sources: The sources of events.
        inbox: The reconciler's queue.
        snapshot: The reconciler's state.
        health: The present verdict.
        log_dropped: How many log entries were lost.
        proc: Where procfs is mounted.
        clock: Seconds since 1970.
    """

    def __init__(
        self,
        *,
        version: str,
        sources: Sequence[EventSource],
        inbox: Inbox,
        snapshot: Callable[[], State],
        health: Callable[[], Verdict],
        log_dropped: Callable[[], int] = lambda: 0,
        proc: str = "/proc",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.kinds: tuple[str, ...] = ()
        """The kinds that the configuration knows; to be set again when it changes."""
        self.watched: Callable[[], bool] = lambda: False
        """Whether changes of the spec directory by others are heard of."""
        self._version = version
        self._sources = sources
        self._inbox = inbox
        self._snapshot = snapshot
        self._health = health
        self._log_dropped = log_dropped
        self._clock = clock

        self._passes: Counter[tuple[str, ...]] = Counter()
        self._writes: Counter[tuple[str, ...]] = Counter()
        self._deletes: Counter[tuple[str, ...]] = Counter()
        self._failures: Counter[tuple[str, ...]] = Counter()
        self._pass_duration = Histogram(PASS_BUCKETS)
        self._to_disk = {action: Histogram(DISK_BUCKETS) for action in ("withdraw", "publish")}
        self._last_pass = 0.0
        self._last_success = 0.0

        self._process = _Process(proc=proc, registry=None)
        self._process_metrics: list[Metric] = []
        self._rendering: asyncio.Task[bytes] | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def observe(self, report: PassReport) -> None:
        """Count a pass."""
        self._last_pass = self._clock()
        if report.result == "ok":
            self._last_success = self._last_pass
        self._passes[report.result,] += 1
        self._pass_duration.observe(report.duration)
        self._writes.update((kind,) for kind, _ in report.wrote)
        self._deletes.update((kind or LEFTOVER,) for kind, _ in report.deleted)
        self._failures.update((kind or LEFTOVER,) for kind, _, _ in report.failed)
        if report.withdraw_latency is not None:
            self._to_disk["withdraw"].observe(report.withdraw_latency)
        for latency in report.publish_latencies:
            self._to_disk["publish"].observe(latency)

    def add(self, collector: Collector) -> None:
        """Export what another collector has, too."""
        self._registry.register(collector)

    async def render(self) -> bytes:
        """Everything in Prometheus' text format (`CONTENT_TYPE`), as of now or later.

        Whoever asks while an answer is being made gets that one: it costs some milliseconds of the
        loop, in which nothing is withdrawn, and anybody on this host may ask as often as they like.
        """
        if self._rendering is None or self._rendering.done():
            self._rendering = asyncio.create_task(self._render(), name="metrics-page")
        return await asyncio.shield(self._rendering)

    async def _render(self) -> bytes:
        self._process_metrics = await asyncio.to_thread(lambda: list(self._process.collect()))
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every metric, one statement each; the registry calls this."""
        state = self._snapshot()
        sources = {source.source: source for source in self._sources}
        per_source = {"source": SOURCES}
        kinds = self._known_kinds(state)
        per_kind = {"kind": kinds}
        per_file_kind = {"kind": (*kinds, LEFTOVER)}

        yield gauge(
            "build_info",
            "What runs; always 1.",
            {"version": (self._version,), "python": (platform.python_version(),)},
            {(self._version, platform.python_version()): 1},
        )
        yield gauge(
            "healthy",
            "Whether what is on disk is what should be there, and the loop looks often enough.",
            {},
            {(): float(self._health().ok)},
        )
        yield counter(
            "events",
            "Messages of the kernel and of udev that were read.",
            per_source
            | {"subsystem": (*sorted(SUBSYSTEMS), OTHER), "action": (*sorted(ACTIONS), OTHER)},
            {
                (name, subsystem, action): count
                for name, source in sources.items()
                for (subsystem, action), count in source.events.items()
            },
        )
        yield counter(
            "event_overflows",
            "How often the kernel dropped messages because they came too fast; each led to a look "
            "at everything.",
            per_source,
            {(name,): source.overflows for name, source in sources.items()},
        )
        yield counter(
            "event_malformed",
            "Messages that could not be read.",
            per_source,
            {(name,): source.malformed for name, source in sources.items()},
        )
        yield gauge(
            "source_up",
            "Whether the source of events hears anything (0: looking regularly instead).",
            per_source,
            {(name,): float(source.state == "up") for name, source in sources.items()},
        )
        yield gauge(
            "spec_watch_up",
            "Whether changes of the spec directory by others are heard of (0: found by looking "
            "regularly instead).",
            {},
            {(): float(self.watched())},
        )
        yield counter(
            "queue_overflows",
            "How often the reconciler's queue was full; each led to a look at everything.",
            {},
            {(): self._inbox.overflows},
        )
        yield gauge("queue_length", "Messages that wait.", {}, {(): len(self._inbox)})
        yield counter(
            "passes", "Passes of the reconciler.", {"result": ("ok", "failed")}, self._passes
        )
        yield histogram(
            "pass_duration_seconds",
            "How long a pass took.",
            (),
            {(): self._pass_duration},
        )
        yield histogram(
            "message_to_disk_seconds",
            "From the message about a change to the entry on disk, or off it. A publication "
            "includes the time in which the device settles.",
            ("action",),
            {(action,): seconds for action, seconds in self._to_disk.items()},
        )
        yield gauge(
            "last_pass_timestamp_seconds",
            "When the last pass ended, in seconds since 1970; 0 before the first.",
            {},
            {(): self._last_pass},
        )
        yield gauge(
            "last_success_timestamp_seconds",
            "When the last pass ended that left nothing undone; 0 before the first.",
            {},
            {(): self._last_success},
        )
        yield counter("spec_writes", "Spec files written.", per_file_kind, self._writes)
        yield counter("spec_deletes", "Spec files deleted.", per_file_kind, self._deletes)
        yield counter(
            "spec_failures",
            "Spec files that could not be written or deleted; tried again with growing delay.",
            per_file_kind,
            self._failures,
        )
        yield gauge(
            "devices",
            "Devices by kind and by whether a container can be given them.",
            per_kind | {"state": ("published", "withheld")},
            Counter(
                itertools.chain(
                    ((kind, "published") for kind, _ in state.published),
                    ((w.kind, "withheld") for w in state.withheld if w.kind is not None),
                )
            ),
        )
        yield gauge(
            "withheld",
            "Devices that are not published, by reason.",
            {"reason": tuple(Reason)},
            Counter((withheld.reason,) for withheld in state.withheld),
        )
        yield counter(
            "log_dropped",
            "Log entries that were lost because whoever reads them was too slow.",
            {},
            {(): self._log_dropped()},
        )
        yield from self._process_metrics

    def _known_kinds(self, state: State) -> tuple[str, ...]:
        """The configured kinds, and any that has ever been counted: a counter never goes away."""
        seen: set[str] = {kind for kind, _ in state.published}
        seen.update(withheld.kind for withheld in state.withheld if withheld.kind is not None)
        counted = itertools.chain(self._writes, self._deletes, self._failures)
        seen.update(kind for (kind,) in counted)
        return tuple(sorted(seen.union(self.kinds) - {LEFTOVER}))


def _label_sets(labels: Labels, values: Values) -> Iterable[tuple[str, ...]]:
    """Every combination, in order, and whatever else has a value."""
    return dict.fromkeys((*itertools.product(*labels.values()), *values))


def counter(name: str, help_text: str, labels: Labels, values: Values) -> Metric:
    """A counter (``_total`` is added) with every label set."""
    family = CounterMetricFamily(f"cdi_agent_{name}", help_text, labels=list(labels))
    for label_set in _label_sets(labels, values):
        family.add_metric(label_set, values.get(label_set, 0))
    return family


def gauge(name: str, help_text: str, labels: Labels, values: Values) -> Metric:
    """A gauge with every label set."""
    family = GaugeMetricFamily(f"cdi_agent_{name}", help_text, labels=list(labels))
    for label_set in _label_sets(labels, values):
        family.add_metric(label_set, values.get(label_set, 0))
    return family


def histogram(
    name: str,
    help_text: str,
    labels: Sequence[str],
    histograms: Mapping[tuple[str, ...], Histogram],
) -> Metric:
    """A histogram with every label set."""
    family = HistogramMetricFamily(f"cdi_agent_{name}", help_text, labels=list(labels))
    for label_set, each in histograms.items():
        each.add_to(family, label_set)
    return family
