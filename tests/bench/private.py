"""Measures the unmodified agent on a private host; prints one JSON object.

    unshare --net --mount --pid --fork --propagation private python -m tests.bench.private FOLDER

Real netlink, real libudev, real files; simulated is only the kernel behind them, which runs in this
process and competes for the same cores. Times are taken here, outside the agent: from the moment at
which a message is sent to the moment at which inotify tells that the spec file changed.
"""

import json
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from agent.reconcile.rules import Timing
from agent.simulate.events import Source, Uevent
from agent.simulate.host import arc_b50
from tests.netns.inside import METRICS, SPECS, Inside

SETTINGS = {"host": {"static_dev": True}, "log": {"level": "warning"}}
GPU = "cdi-agent_intel.com-gpu.yaml"
ROUNDS = 100
BURST = 100_000
TICKS = os.sysconf("SC_CLK_TCK")


class Bench(Inside):
    """A private host with a stop-watch."""

    def __init__(self, work: str) -> None:
        super().__init__(work)
        self.first_message = 0.0
        self.last_message = 0.0

    def _emit(self, event: Uevent) -> None:
        super()._emit(event)
        now = time.monotonic()
        self.first_message = self.first_message or now
        self.last_message = now

    def time_change(self, name: str, action: Callable[[], object]) -> float:
        """When the last change that an action makes to a spec file was seen (monotonic)."""
        self.writes()
        self.first_message = 0.0
        seen: list[float] = []

        def watch() -> None:
            while not seen:
                select.select([self._watch.fileno()], [], [], 10.0)
                now = time.monotonic()
                if any(write.name == name for write in self.writes()):
                    seen.append(now)

        thread = threading.Thread(target=watch)
        thread.start()
        action()
        thread.join()
        return seen[0]

    def agent_cpu(self) -> float:
        """CPU seconds that the agent has used."""
        stat = Path(f"/proc/{self._running_agent().pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICKS

    def agent_switches(self) -> int:
        """How often the agent has gone to sleep."""
        status = Path(f"/proc/{self._running_agent().pid}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        text = self.get(METRICS)
        return sum(
            float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (.*)$", text, re.MULTILINE)
        )

    @contextmanager
    def agent(self) -> Iterator[None]:
        """Run the agent meanwhile."""
        self.start_agent(SETTINGS)
        yield
        self.end_agent()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so."""
        while not condition():
            time.sleep(0.02)


def spread(values: list[float]) -> dict[str, float]:
    """The middle and the far end, in milliseconds."""
    ordered = sorted(values)
    last = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"p50": 1000 * median(ordered), "p99": 1000 * last}


def address(number: int) -> str:
    """A place for a GPU, with room for the bridges above it."""
    return f"{number // 80:04x}:{number % 80 * 3 + 3:02x}:00.0"


def changes(bench: Bench, which: str) -> dict[str, Any]:
    """Unbind and bind one GPU again and again: times to withdrawal and entry, and CPU for both."""
    settle = Timing().settle
    removals, arrivals = [], []
    before = bench.agent_cpu()
    for _ in range(ROUNDS):
        gone = bench.time_change(GPU, lambda: bench.kernel.unbind(which))
        removals.append(gone - bench.first_message)
        back = bench.time_change(GPU, lambda: bench.kernel.bind(which, "xe"))
        arrivals.append(back - bench.last_message - settle)
    cpu = (bench.agent_cpu() - before) / ROUNDS
    return {"removal": spread(removals), "arrival": spread(arrivals), "cpu_ms": 1000 * cpu}


def burst(bench: Bench, which: str) -> dict[str, float]:
    """A flood of connector events, and in the middle of it the GPU goes."""
    storm = {
        "ACTION": "change",
        "DEVPATH": f"/devices/pci0000:00/{which}/drm/card0/card0-DP-1",
        "SUBSYSTEM": "drm",
        "DEVTYPE": "drm_connector",
    }
    looks, overflows = bench.metric("cdi_agent_passes_total"), 0.0
    before = bench.agent_memory()
    peak = before
    began = time.monotonic()
    for number in range(BURST):
        if number == BURST // 2:
            bench.kernel.unbind(which)
        bench.send(Source.KERNEL, storm)
        if number % 5000 == 0:
            peak = max(peak, bench.agent_memory())
    sent = time.monotonic()
    bench.wait_for(lambda: not Path(SPECS, GPU).exists())
    over = time.monotonic()
    overflows = bench.metric("cdi_agent_event_overflows_total")
    return {
        "sent_seconds": sent - began,
        "over_after_seconds": over - sent,
        "overflows": overflows,
        "passes": bench.metric("cdi_agent_passes_total") - looks,
        "grown_mib": (max(peak, bench.agent_memory()) - before) / 1024,
    }


def measure(work: str) -> dict[str, Any]:
    """Everything, in one run."""
    bench = Bench(work)
    result: dict[str, Any] = {}
    bench.kernel.plug(*arc_b50(address(0)))
    with bench.agent():
        result["one_of_1"] = changes(bench, address(0))
        result["burst"] = burst(bench, address(0))
        bench.kernel.bind(address(0), "xe")
    for number in range(1, 8):
        bench.kernel.plug(*arc_b50(address(number)))
    with bench.agent():
        result["ready_cpu_seconds"] = bench.agent_cpu()
        bench.get(METRICS)
        time.sleep(1)
        switches = bench.agent_switches()
        time.sleep(10)
        result["idle_wakeups_in_10s"] = bench.agent_switches() - switches
        result["rss_mib"] = bench.agent_memory() / 1024
    for number in range(8, 512):
        bench.kernel.plug(*arc_b50(address(number)))
    with bench.agent():
        result["one_of_512"] = changes(bench, address(300))
    return result


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
