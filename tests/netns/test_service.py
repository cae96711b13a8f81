"""The agent under a service manager: when it is ready, that it lives, how it ends."""

import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from agent.control.server import LONGEST_DELAY
from agent.simulate.udev import UdevMode
from tests.conftest import IN_CI
from tests.netns.inside import METRICS, SPECS
from tests.netns.outside import PrivateHost
from tests.netns.process import START
from tests.netns.story import (
    GPU_FILE,
    MEI_FILE,
    SETTINGS,
    A,
    B,
    becomes_true,
    log_entries,
    published,
    settings,
    start,
    truth,
)

pytestmark = pytest.mark.netns

WATCHDOG = 0.6
"""Seconds."""
HANGS = "/run/specs-that-hang"
"""The consumer does not look there, or it would hang too."""


def told(host: PrivateHost, key: str) -> list[str]:
    """What its manager was told under a key, in order."""
    return [fields[key] for fields in host.inside.told() if key in fields]


def hears(host: PrivateHost, key: str, enough: Callable[[list[str]], bool]) -> list[str]:
    """Wait until its manager was told enough."""
    seen = host.until(lambda: told(host, key), enough)
    assert enough(seen), host.inside.agent_log()
    return seen


def about_metrics(host: PrivateHost, event: str) -> list[dict[str, Any]]:
    """What it has logged under a name about its metrics port."""
    return [entry for entry in log_entries(host, event) if entry["service"] == "metrics"]


def hang(host: PrivateHost) -> None:
    """Let the directory of specs hang."""
    try:
        host.inside.hang(HANGS)
    except RuntimeError as error:
        if IN_CI or "PermissionError" not in str(error):
            raise
        pytest.skip("no FUSE here, whose file systems can be made to hang")


def begin_a_pass_that_hangs(host: PrivateHost) -> None:
    """Let the directory of specs hang, and wait until the agent hangs in there."""
    hang(host)
    host.kernel.plug(B.hardware)
    assert host.until(host.inside.agent_hangs, bool)


# --- the start ------------------------------------------------------------------------------------


def test_at_boot_it_is_ready_once_udev_has_loaded_the_driver_and_the_spec_is_there(
    host: PrivateHost,
) -> None:
    """Engines are ordered after it, and start containers when it says so."""
    host.kernel.udev = UdevMode.MANUAL
    host.kernel.plug(A.hardware)
    host.inside.start_agent(SETTINGS, wait=False)
    hears(host, "STATUS", lambda seen: seen != [])
    assert log_entries(host, "pass")
    assert told(host, "READY") == []
    host.kernel.udev_step()  # loads the driver; the nodes are there, and udev is not done with them
    assert host.kernel.driver_of(A.address) == "xe"
    host.kernel.udev = UdevMode.AUTO
    host.inside.await_ready()
    assert published(host) == truth(host)
    assert told(host, "STATUS")[-1] == "publishing intel.com/gpu: 1, intel.com/gpu-mei: 1"


def test_a_driver_that_never_comes_delays_the_start_by_so_much_and_no_more(
    host: PrivateHost,
) -> None:
    host.kernel.udev = UdevMode.MANUAL
    host.kernel.plug(A.hardware)
    host.inside.start_agent(settings(reconcile={"ready_timeout": "1s"}))
    assert host.kernel.udev_waiting
    assert published(host) == {}
    host.kernel.udev = UdevMode.AUTO
    becomes_true(host)


def test_a_function_without_a_driver_delays_nothing_once_udev_is_done(host: PrivateHost) -> None:
    host.kernel.plug(A.hardware)
    assert host.kernel.unbind(A.address) == 0
    host.inside.start_agent(settings(reconcile={"ready_timeout": "1h"}))
    assert published(host) == {}
    assert told(host, "STATUS")[-1] == "nothing to publish"


def test_started_by_hand_it_makes_the_folder_of_its_sockets(host: PrivateHost) -> None:
    """A unit has RuntimeDirectory= for it; the umask may be any."""
    own = {"control": "/run/cdi-agent/control.sock", "metrics": "/run/cdi-agent/metrics.sock"}
    host.inside.start_agent(
        settings(metrics={"listen": own["metrics"]}),
        through=("sh", "-c", 'umask 077; exec "$@"', "sh"),
    )
    opened = host.until(lambda: log_entries(host, "listening"), lambda seen: len(seen) == len(own))
    assert {entry["service"]: entry["address"] for entry in opened} == {
        name: [path] for name, path in own.items()
    }
    assert host.inside.mode("/run/cdi-agent") == 0o755
    assert log_entries(host, "not-listening") == []


# --- while it runs --------------------------------------------------------------------------------


def test_its_status_says_what_it_publishes_and_what_is_wrong(host: PrivateHost) -> None:
    start(host, A, B)
    host.kernel.unplug(B.address)
    assert host.kernel.move(A.address, "vfio-pci") == 0
    hears(host, "STATUS", lambda seen: seen[-1] == "publishing intel.com/gpu-vfio: 1")
    host.kernel.unplug(A.address)
    hears(host, "STATUS", lambda seen: seen[-1] == "nothing to publish")


def test_a_pass_that_hangs_is_noticed_and_the_next_start_is_right(host: PrivateHost) -> None:
    """As by systemd's watchdog: signs of life come by themselves, and end with the work."""
    host.kernel.plug(A.hardware)
    watched = {"WATCHDOG_USEC": str(round(WATCHDOG * 1e6))}
    host.inside.start_agent(settings(cdi={"directory": HANGS}), environ=watched)
    own = published(host, HANGS)
    hears(host, "WATCHDOG", lambda seen: len(seen) >= 4)
    host.inside.supervise(WATCHDOG)
    hang(host)
    assert host.kernel.move(A.address, "vfio-pci") == 0
    assert host.inside.await_end() == -signal.SIGABRT
    host.inside.unhang(HANGS)
    assert published(host, HANGS) == own
    host.inside.start_agent(settings(cdi={"directory": HANGS}))
    assert published(host, HANGS) == truth(host)


def test_a_taken_metrics_port_is_reported_and_the_agent_works_until_it_is_free(
    host: PrivateHost,
) -> None:
    host.inside.take_port(9478)
    start(host, A)
    said = host.until(lambda: about_metrics(host, "not-listening"), bool)
    assert "127.0.0.1:9478 cannot be opened" in said[0]["problem"]
    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)
    host.inside.free_port()
    # The longer all this took, the longer the agent waits until it tries again.
    patience = START + LONGEST_DELAY
    assert host.until(lambda: about_metrics(host, "listening"), bool, patience)
    assert host.metrics()["cdi_agent_healthy"] == 1
    assert len(about_metrics(host, "not-listening")) == 1


# --- the end --------------------------------------------------------------------------------------


def test_a_restart_at_once_finds_the_metrics_port_free(host: PrivateHost) -> None:
    """Though clients were connected a moment ago."""
    start(host, A)
    for number in (signal.SIGTERM, signal.SIGKILL):
        assert host.inside.get(METRICS)
        host.inside.end_agent(number)
        host.inside.start_agent(SETTINGS)
        assert host.until(lambda: host.inside.answers(METRICS), bool)
    assert about_metrics(host, "not-listening") == []


def test_a_second_signal_ends_it_at_once(host: PrivateHost) -> None:
    """Even if the pass that it waits for never ends."""
    host.kernel.plug(A.hardware)
    host.inside.start_agent(settings(cdi={"directory": HANGS}))
    begin_a_pass_that_hangs(host)
    host.inside.signal_agent(signal.SIGTERM)
    assert host.until(lambda: log_entries(host, "stopping"), bool)
    assert host.inside.agent_runs()
    assert host.inside.end_agent(signal.SIGTERM) == -signal.SIGTERM


def test_a_second_signal_ends_the_first_process_of_a_container_too(host: PrivateHost) -> None:
    """For it the kernel has no default that ends it."""
    host.kernel.plug(A.hardware)
    # Without a mount namespace of its own: in there the file system would not hang.
    first = ("unshare", "--pid", "--fork", "--kill-child")
    host.inside.start_agent(settings(cdi={"directory": HANGS}), through=first)
    begin_a_pass_that_hangs(host)
    host.inside.signal_children(signal.SIGTERM)
    assert host.until(lambda: log_entries(host, "stopping"), bool)
    host.inside.signal_children(signal.SIGTERM)
    assert host.inside.await_end() == 128 + signal.SIGTERM


def test_wherever_it_is_killed_the_next_start_is_right(host: PrivateHost) -> None:
    choose = random.Random(3)
    start(host, A)
    for round_number in range(4):
        driver = "vfio-pci" if round_number % 2 == 0 else "xe"
        assert host.kernel.move(A.address, driver) == 0
        host.inside.kill_after(choose.uniform(0, 0.03))
        host.inside.start_agent(SETTINGS)
        assert published(host) == truth(host)


def test_specs_go_on_stop_if_that_is_wanted_and_come_back_with_the_next_start(
    host: PrivateHost,
) -> None:
    host.inside.put_spec(f"{SPECS}/vendor.yaml", "example.com/other", ["one"])
    host.kernel.plug(A.hardware)
    host.inside.start_agent(settings(cdi={"remove_on_stop": True}))
    assert host.inside.listing(SPECS) == sorted([GPU_FILE, MEI_FILE, "vendor.yaml"])
    assert host.inside.end_agent() == 0
    assert host.inside.listing(SPECS) == ["vendor.yaml"]
    host.inside.start_agent(SETTINGS)
    assert host.inside.listing(SPECS) == sorted([GPU_FILE, MEI_FILE, "vendor.yaml"])


def test_the_end_is_told(host: PrivateHost) -> None:
    start(host, A)
    assert host.inside.end_agent() == 0
    assert told(host, "STOPPING") == ["1"]
    assert told(host, "STATUS")[-1] == "stopping"
    assert log_entries(host, "stopping")[0]["signal"] == "SIGTERM"
    assert log_entries(host, "stopped")
