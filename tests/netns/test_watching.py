"""How the running agent is watched: its log, its metrics, a real Prometheus."""

import json
import re

import pytest

from agent.simulate.events import Source
from tests.netns.inside import METRICS
from tests.netns.outside import PrivateHost
from tests.netns.story import SETTINGS, A, B, becomes_true, settings, start
from tests.netns.test_agent import CARD_CHANGED

pytestmark = pytest.mark.netns

PROMETHEUS = "http://127.0.0.1:9090/api/v1/query?query="


def series(host: PrivateHost) -> set[str]:
    """The names and labels of all that the agent counts."""
    return {name for name in host.metrics() if name.startswith("cdi_agent_")}


# --- the log --------------------------------------------------------------------------------------


def test_where_the_journals_socket_is_not_reachable_lines_bear_their_priority(
    host: PrivateHost,
) -> None:
    """Standard error leads to the journal, which reads ``<N>`` and nothing more."""
    host.kernel.plug(A.hardware)
    host.inside.start_agent(
        {"host": SETTINGS["host"]}, environ={"JOURNAL_STREAM": host.inside.log_stream()}
    )
    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)
    lines = host.inside.agent_log().splitlines()
    assert all(re.match(r"<[3-6]>\S", line) for line in lines)
    assert any(line.startswith("<6>pass") for line in lines)


def test_json_is_one_object_a_line_with_the_events_name(host: PrivateHost) -> None:
    host.inside.start_agent(settings(log={"format": "json", "level": "info"}))
    entries = [json.loads(line) for line in host.inside.agent_log().splitlines()]
    assert {"started", "ready", "source-up"} <= {entry["event"] for entry in entries}
    assert all({"time", "level", "event"} <= entry.keys() for entry in entries)


def test_events_that_change_nothing_leave_no_line(host: PrivateHost) -> None:
    host.kernel.plug(A.hardware)
    host.inside.start_agent(settings(log={"level": "info"}))
    host.quiet()
    before = host.inside.agent_log()
    host.kernel.storm(A.address, 30)
    for source in Source:
        host.inside.send(source, CARD_CHANGED, times=100)
    host.inside.send(Source.UDEV, {**CARD_CHANGED, "SUBSYSTEM": "usb"}, times=100)
    host.quiet()
    assert host.inside.agent_log() == before


# --- metrics --------------------------------------------------------------------------------------


def test_whatever_happens_no_series_is_added(host: PrivateHost) -> None:
    """Each can be asked for its rate from its first event on, and none is made from outside."""
    start(host, A)
    before = series(host)
    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)
    host.kernel.plug(B.hardware)
    becomes_true(host)
    for action in ("remove", "online", "whatever"):
        for subsystem in ("drm", "usb", "nonsense"):
            message = {**CARD_CHANGED, "ACTION": action, "SUBSYSTEM": subsystem}
            for source in Source:
                host.inside.send(source, message)
    host.inside.send_raw(Source.UDEV, b"\xff" * 99)
    host.quiet()
    assert series(host) == before


@pytest.mark.prometheus
@pytest.mark.timeout(120)
def test_a_real_prometheus_scrapes_the_running_agent(host: PrivateHost) -> None:
    start(host, A)
    checked = host.inside.promtool(host.inside.get(METRICS))
    assert (checked.status, checked.output, checked.errors) == (0, "", "")
    host.inside.start_prometheus("127.0.0.1:9478")

    def value(query: str) -> str:
        """What Prometheus knows; empty until it knows something."""
        result = json.loads(host.inside.get_or_nothing(PROMETHEUS + query) or '{"data": {}}')
        found = result["data"].get("result", [])
        return str(found[0]["value"][1]) if found else ""

    published = 'cdi_agent_devices{kind="intel.com/gpu",state="published"}'
    assert host.until(lambda: value("up"), lambda seen: seen == "1") == "1"
    assert value(published) == "1"
    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)
    assert host.until(lambda: value(published), lambda seen: seen == "0") == "0"
    assert value('cdi_agent_spec_deletes_total{kind="intel.com/gpu"}') == "1"
    assert value("scrape_samples_scraped") == str(len(host.metrics()))
