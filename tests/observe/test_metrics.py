"""The metrics are complete from the start, closed against outsiders, and please Prometheus."""

import asyncio
import dataclasses
import json
import math
import os
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from agent.cdi.desired import Reason, Withheld
from agent.cdi.spec import Kind
from agent.control.pages import application, document, probe
from agent.control.server import HttpService
from agent.control.sockets import TcpAddress, bind, describe
from agent.host.hints import Hint
from agent.host.model import Address
from agent.observe.health import Verdict
from agent.observe.metrics import CONTENT_TYPE, Histogram, Metrics
from agent.reconcile.messages import Inbox
from agent.reconcile.state import PassReport, State

GPU = Kind("intel.com/gpu")
VFIO = Kind("intel.com/gpu-vfio")
FIRST = Address("0000:03:00.0")
SECOND = Address("0000:04:00.0")


@dataclasses.dataclass
class FakeSource:
    """A source of events."""

    source: str
    state: str = "up"
    events: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    overflows: int = 0
    malformed: int = 0


class Rig:
    """Metrics and what they read."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0
        self.sources = [FakeSource("kernel"), FakeSource("udev")]
        self.inbox = Inbox(2)
        self.state = State()
        self.verdict = Verdict(ok=True)
        self.metrics = Metrics(
            version="1.2.3",
            sources=self.sources,
            inbox=self.inbox,
            snapshot=lambda: self.state,
            health=lambda: self.verdict,
            log_dropped=lambda: 4,
            clock=lambda: self.now,
        )
        self.metrics.kinds = (GPU, VFIO)

    def text(self) -> str:
        return asyncio.run(self.metrics.render()).decode()

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self.samples()[f"cdi_agent_{name}", frozenset(labels.items())]


def report(**changes: Any) -> PassReport:  # noqa: ANN401 - any of its fields
    return structs.replace(
        PassReport(id=1, reasons={"udev": 2}, started=10.0, duration=0.004, looked_at=1), **changes
    )


def test_everything_is_there_before_anything_happened() -> None:
    """A counter that appears with its first event makes that event invisible to rate()."""
    samples = Rig().samples()
    names = {name for name, _ in samples}
    assert {
        "cdi_agent_build_info",
        "cdi_agent_devices",
        "cdi_agent_event_malformed_total",
        "cdi_agent_event_overflows_total",
        "cdi_agent_events_total",
        "cdi_agent_healthy",
        "cdi_agent_last_pass_timestamp_seconds",
        "cdi_agent_last_success_timestamp_seconds",
        "cdi_agent_log_dropped_total",
        "cdi_agent_message_to_disk_seconds_count",
        "cdi_agent_pass_duration_seconds_bucket",
        "cdi_agent_passes_total",
        "cdi_agent_queue_length",
        "cdi_agent_queue_overflows_total",
        "cdi_agent_source_up",
        "cdi_agent_spec_deletes_total",
        "cdi_agent_spec_failures_total",
        "cdi_agent_spec_writes_total",
        "cdi_agent_withheld",
        "process_cpu_seconds_total",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
    } <= names
    assert not any(name.endswith("_created") for name in names)
    count = {name: sum(key[0] == name for key in samples) for name in names}
    assert count["cdi_agent_events_total"] == 2 * 9 * 9
    assert count["cdi_agent_withheld"] == len(Reason)
    assert count["cdi_agent_devices"] == 2 * 2
    assert count["cdi_agent_spec_writes_total"] == 3
    assert count["cdi_agent_passes_total"] == 2


def test_no_library_adds_to_it() -> None:
    """The library's global registry is not ours: it would bring python_gc_* and whatever else."""
    names = {name for name, _ in Rig().samples()}
    assert all(name.startswith(("cdi_agent_", "process_")) for name in names)


def test_what_happens_adds_no_series() -> None:
    rig = Rig()
    before = rig.samples().keys()
    rig.sources[0].events = {("drm", "add"): 3, ("other", "other"): 5}
    rig.state = State(
        published={(GPU, FIRST): "x"},
        withheld=tuple(Withheld(SECOND, GPU, reason, "why") for reason in Reason),
    )
    rig.metrics.observe(
        report(wrote=((GPU, "/x"),), deleted=((None, "/y"),), failed=((VFIO, "/z", "full"),))
    )
    assert rig.samples().keys() == before


def test_events_are_read_from_their_sources() -> None:
    rig = Rig()
    rig.sources[1].events = {("drm", "add"): 3}
    rig.sources[1].overflows = 2
    rig.sources[1].malformed = 1
    rig.sources[1].state = "deaf"
    assert rig.value("events_total", source="udev", subsystem="drm", action="add") == 3
    assert rig.value("events_total", source="kernel", subsystem="drm", action="add") == 0
    assert rig.value("event_overflows_total", source="udev") == 2
    assert rig.value("event_malformed_total", source="udev") == 1
    assert rig.value("source_up", source="udev") == 0
    assert rig.value("source_up", source="kernel") == 1


def test_a_source_that_could_not_be_opened_is_down() -> None:
    rig = Rig()
    del rig.sources[0]
    assert rig.value("source_up", source="kernel") == 0
    assert rig.value("event_overflows_total", source="kernel") == 0


def test_devices_are_counted_by_kind_and_withheld_ones_by_reason() -> None:
    rig = Rig()
    rig.state = State(
        published={(GPU, FIRST): "a", (GPU, SECOND): "b"},
        withheld=(
            Withheld(FIRST, VFIO, Reason.FOREIGN_DUPLICATE, "why"),
            Withheld(SECOND, None, Reason.UNMATCHED, "why"),
        ),
    )
    assert rig.value("devices", kind=GPU, state="published") == 2
    assert rig.value("devices", kind=VFIO, state="published") == 0
    assert rig.value("devices", kind=VFIO, state="withheld") == 1
    assert rig.value("withheld", reason="foreign-duplicate") == 1
    assert rig.value("withheld", reason="unmatched") == 1
    assert rig.value("withheld", reason="udev") == 0


def test_passes_and_what_they_did() -> None:
    rig = Rig()
    rig.metrics.observe(
        report(
            wrote=((GPU, "/a"), (VFIO, "/b")),
            deleted=((None, "/c"),),
            withdraw_latency=0.0029,
            publish_latencies=(0.055, 0.056),
        )
    )
    rig.now += 60
    rig.metrics.observe(report(duration=2.0, failed=((GPU, "/a", "no space left"),)))
    assert rig.value("passes_total", result="ok") == 1
    assert rig.value("passes_total", result="failed") == 1
    assert rig.value("spec_writes_total", kind=GPU) == 1
    assert rig.value("spec_deletes_total", kind="leftover") == 1
    assert rig.value("spec_failures_total", kind=GPU) == 1
    assert rig.value("pass_duration_seconds_bucket", le="0.005") == 1
    assert rig.value("pass_duration_seconds_sum") == pytest.approx(2.004)
    assert rig.value("message_to_disk_seconds_bucket", action="withdraw", le="0.003") == 1
    assert rig.value("message_to_disk_seconds_bucket", action="withdraw", le="0.002") == 0
    assert rig.value("message_to_disk_seconds_count", action="publish") == 2
    assert rig.value("last_pass_timestamp_seconds") == 1_700_000_060
    assert rig.value("last_success_timestamp_seconds") == 1_700_000_000


def test_health_the_queue_the_log_and_the_build() -> None:
    rig = Rig()
    assert rig.value("healthy") == 1
    rig.verdict = Verdict(False, ("no space left",))
    for _ in range(5):
        rig.inbox.hint(Hint(reason="udev"))
    assert rig.value("healthy") == 0
    assert rig.value("queue_length") == 2
    assert rig.value("queue_overflows_total") == 1
    assert rig.value("log_dropped_total") == 4
    assert '\ncdi_agent_build_info{python="3.' in rig.text()
    assert 'version="1.2.3"' in rig.text()


def test_a_kind_that_was_taken_out_of_the_configuration_keeps_its_counters() -> None:
    rig = Rig()
    rig.metrics.observe(report(wrote=((GPU, "/a"),)))
    rig.metrics.kinds = (VFIO,)
    assert rig.value("spec_writes_total", kind=GPU) == 1


def rendered_with(proc: Path) -> str:
    metrics = Metrics(
        version="1",
        sources=[],
        inbox=Inbox(),
        snapshot=State,
        health=lambda: Verdict(ok=True),
        proc=str(proc),
    )
    return asyncio.run(metrics.render()).decode()


def test_the_process_is_measured_where_proc_shows_only_processes(tmp_path: Path) -> None:
    """As for a service with ``ProcSubset=pid``."""
    (tmp_path / "self").symlink_to("/proc/self")
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(rendered_with(tmp_path))
        for sample in family.samples
        if sample.name.startswith("process_")
    }
    assert len(samples) == 6
    assert samples["process_resident_memory_bytes"] > 1e6
    assert time.time() - 3600 < samples["process_start_time_seconds"] <= time.time() + 1


def test_a_procfs_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert "process_" not in rendered_with(tmp_path)


def test_a_histogram_puts_a_bound_into_its_own_bucket() -> None:
    from prometheus_client.core import HistogramMetricFamily

    histogram = Histogram((1, 2))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0, -1.0):
        histogram.observe(value)
    family = HistogramMetricFamily("x", "x", labels=[])
    histogram.add_to(family, ())
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name == "x_bucket"}
    assert buckets == {"1.0": 3, "2.0": 5, "+Inf": 6}
    assert math.isclose(sum(s.value for s in family.samples if s.name == "x_sum"), 14)


async def test_rendering_does_not_block_the_loop() -> None:
    """The guard of conftest raises if /proc is read in the loop."""
    text = await Rig().metrics.render()
    assert b"process_resident_memory_bytes" in text


# --- the real Prometheus --------------------------------------------------------------------------


async def test_who_asks_at_the_same_time_gets_the_same_answer() -> None:
    """However many scrape at once, the loop's own work waits for one page."""
    rig = Rig()
    made: list[int] = []

    class Counting(Collector):
        def collect(self) -> Iterator[Metric]:
            made.append(1)
            return iter(())

    rig.metrics.add(Counting())
    made.clear()  # its names were asked for
    pages = await asyncio.gather(*(rig.metrics.render() for _ in range(16)))
    assert len(set(pages)) == 1
    assert len(made) == 1
    await rig.metrics.render()
    assert len(made) == 2


def busy() -> Rig:
    """A rig that has something to say in each metric."""
    rig = Rig()
    rig.sources[0].events = {("drm", "add"): 3}
    rig.state = State(published={(GPU, FIRST): "a"})
    rig.metrics.observe(report(wrote=((GPU, "/a"),), withdraw_latency=0.002))
    return rig


@pytest.mark.prometheus
def test_promtool_has_nothing_to_say() -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=busy().text(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


async def fetch(port: int, path: str) -> bytes | None:
    """The body of a page, or None while nobody answers."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return None
    writer.write(f"GET {path} HTTP/1.0\r\nHost: x\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    return body if b" 200 " in head.splitlines()[0] else None


@pytest.mark.prometheus
@pytest.mark.timeout(120)
async def test_a_real_prometheus_scrapes_the_running_server(tmp_path: Path) -> None:
    rig = busy()
    pages = {
        "/metrics": document(rig.metrics.render, CONTENT_TYPE),
        "/healthz": probe(lambda: rig.verdict),
    }
    listener = bind(TcpAddress("127.0.0.1", 0))
    server = HttpService("metrics", application(pages), where=[listener])
    serving = asyncio.create_task(server.run())
    with bind(TcpAddress("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                "scrape_configs": [
                    {
                        "job_name": "cdi-agent",
                        "static_configs": [{"targets": [describe(listener)]}],
                    }
                ],
            }
        )
    )
    program = shutil.which("prometheus", path=os.environ["PATH"] + ":/usr/sbin")
    assert program is not None
    with (tmp_path / "log").open("wb") as log:
        prometheus = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
        )
    try:

        async def query(expression: str) -> dict[str, float]:
            """The present value of each series, by its labels; waits until there is one."""
            path = "/api/v1/query?" + urllib.parse.urlencode({"query": expression})
            while True:
                body = await fetch(port, path)
                result = json.loads(body)["data"]["result"] if body is not None else []
                if result:
                    return {
                        json.dumps(series["metric"], sort_keys=True): float(series["value"][1])
                        for series in result
                    }
                assert prometheus.returncode is None, (tmp_path / "log").read_text()
                await asyncio.sleep(0.2)

        assert set((await query('up{job="cdi-agent"} == 1')).values()) == {1}
        assert sum((await query("sum(cdi_agent_events_total)")).values()) == 3
        assert len(await query("cdi_agent_events_total")) == 2 * 9 * 9
        assert list((await query('cdi_agent_devices{kind="intel.com/gpu"} == 1')).values()) == [1]
        quantile = "histogram_quantile(0.5, cdi_agent_message_to_disk_seconds_bucket)"
        assert 0.001 <= next(iter((await query(f"{quantile} > 0")).values())) <= 0.002
        assert next(iter((await query("process_resident_memory_bytes > 0")).values())) > 1e6
        assert list((await query("scrape_samples_scraped > 100")).values())
    finally:
        prometheus.terminate()
        await prometheus.wait()
        serving.cancel()
        await asyncio.wait([serving])
