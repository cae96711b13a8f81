"""Hosts that lack something: each is recognised, said once, and lived with."""

import pytest

from agent.simulate.events import Source
from agent.simulate.udev import UdevMode
from tests.netns.inside import HEALTH, SPECS
from tests.netns.outside import PrivateHost
from tests.netns.process import refusing, unprivileged
from tests.netns.story import (
    SETTINGS,
    A,
    B,
    becomes_true,
    log_entries,
    published,
    settings,
    truth,
)

pytestmark = pytest.mark.netns

OURS = f"{SPECS}/ours"


def up(host: PrivateHost) -> dict[str, float]:
    """Which sources hear anything."""
    metrics = host.metrics()
    return {name: metrics[f'cdi_agent_source_up{{source="{name}"}}'] for name in Source}


def test_without_udevd_nobody_is_waited_for(host: PrivateHost) -> None:
    host.kernel.udev = UdevMode.OFF
    host.kernel.plug(A.hardware)
    host.inside.start_agent(settings(reconcile={"udev_timeout": "1h", "resync_blind": "1h"}))
    assert published(host) == truth(host)
    host.kernel.plug(B.hardware)
    becomes_true(host)
    host.quiet()
    assert len(log_entries(host, "udev-absent")) == 1
    (deaf,) = log_entries(host, "source-deaf")
    assert deaf["source"] == "udev"
    assert up(host) == {"kernel": 1, "udev": 0}


def test_without_netlink_it_looks_by_the_clock(host: PrivateHost) -> None:
    """As under a seccomp filter, or a unit that does not allow AF_NETLINK."""
    host.kernel.plug(A.hardware)
    host.inside.start_agent(settings(reconcile={"resync_blind": "1s"}), through=refusing("netlink"))
    assert published(host) == truth(host)
    assert up(host) == {"kernel": 0, "udev": 0}
    for gpu in (A, B):
        host.kernel.plug(B.hardware) if gpu is B else host.kernel.move(A.address, "vfio-pci")
        becomes_true(host)
    said = log_entries(host, "source-unavailable")
    assert [entry["source"] for entry in said] == ["kernel", "udev"]
    assert "AF_NETLINK" in said[0]["hint"]
    health = host.inside.get(HEALTH)
    assert '"ok":true' in health
    assert "the source kernel is unavailable" in health


def test_a_static_dev_is_said_once_and_nothing_is_published_from_it(host: PrivateHost) -> None:
    """As in a container that was given a copy of the host's nodes, which neither come nor go."""
    host.kernel.plug(A.hardware)
    host.inside.start_agent(settings(host={"static_dev": False}))
    assert published(host) == {}
    host.kernel.plug(B.hardware)
    host.quiet()
    assert published(host) == {}
    (said,) = log_entries(host, "static-dev")
    assert "host.static_dev" in said["hint"]
    reasons = {w["reason"] for w in log_entries(host, "withheld") if w["device"] == A.address}
    assert reasons == {"static-dev"}
    assert host.metrics()['cdi_agent_withheld{reason="static-dev"}'] == 4  # with each one's MEI
    host.inside.reload(SETTINGS)
    becomes_true(host)


def test_the_host_may_be_mounted_elsewhere_and_specs_name_its_own_paths(host: PrivateHost) -> None:
    """As in a container: /sys, /dev and /run of its own, and the host's somewhere below."""
    host.kernel.plug(A.hardware)
    root = host.inside.elsewhere
    host.inside.start_agent(
        settings(
            host={"sys": f"{root}/sys", "dev": f"{root}/dev", "run": f"{root}/run"},
            cdi={"directory": f"{root}/run/cdi", "other_directories": []},
        ),
        through=host.inside.with_own_folders,
    )
    assert published(host) == truth(host)
    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)
    assert host.kernel.move(A.address, "xe") == 0
    becomes_true(host)
    assert all(node.startswith("/dev/") for nodes in published(host).values() for node in nodes)
    assert up(host) == {"kernel": 1, "udev": 1}


def test_a_user_who_may_write_the_specs_needs_no_privilege(host: PrivateHost) -> None:
    """Without a state directory: nothing keeps a second instance away, which is said once."""
    host.kernel.plug(A.hardware)
    host.inside.chown(SPECS)
    host.inside.start_agent(SETTINGS, through=unprivileged())
    assert published(host) == truth(host)
    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)
    assert len(log_entries(host, "no-lock")) == 1
    assert len(log_entries(host, "spec-record-unwritable")) == 1
    assert '"ok":true' in host.inside.get(HEALTH)
    assert host.inside.mode(f"{SPECS}/cdi-agent_intel.com-gpu-vfio.yaml") == 0o644


def test_a_user_who_may_not_is_told_so_and_the_host_is_not_called_healthy(
    host: PrivateHost,
) -> None:
    host.kernel.plug(A.hardware)
    host.inside.start_agent(SETTINGS, through=unprivileged())
    assert published(host) == {}
    said = log_entries(host, "spec-write-failed")
    assert "permission denied (EACCES)" in said[0]["problem"]
    assert "run as root" in said[0]["hint"]
    assert host.metrics()["cdi_agent_healthy"] == 0
    assert host.metrics()['cdi_agent_withheld{reason="store"}'] == 2
    host.inside.chown(SPECS)
    becomes_true(host)
    assert host.metrics()["cdi_agent_healthy"] == 1
