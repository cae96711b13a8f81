"""A boot with the unit enabled, as the README installs it: who was ready when, and confined how.

A frozen guest has booted like any host, and the journal goes back to the kernel's start. The
stand-in for an engine (`inside/containerd.service`) has copied what it found when it was started.
"""

import json
from typing import Final

import pytest

from tests.guest.bundle import PROJECT
from tests.guest.observers import AGENT, DISPLAY, SPECS, VIRTIO_GPU, Observers
from tests.guest.rig import Guest
from tests.guest.stage import CARD, GPU, Function
from tests.guest.topology import slot

# The first of them may have to build everything.
pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

# linux/capability.h
CAP_DAC_READ_SEARCH: Final = 2
CAP_SYS_PTRACE: Final = 19

ENGINE: Final = "containerd.service"
FIRST: Final = Function(GPU, f"{slot(0)}.0").device
SECOND: Final = Function(GPU, f"{slot(1)}.0").device
CARDS: Final = [
    Function(CARD, address).device
    for address in (f"{slot(2)}.0", f"{slot(2)}.1", "0000:08:01.0", "0000:08:02.0")
]


def properties(guest: Guest, unit: str) -> dict[str, str]:
    """What systemd says of a unit."""
    lines = guest.run("systemctl", "show", unit).out.splitlines()
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def assert_whole(guest: Guest) -> None:
    """The boot has ended, with nothing failed, nothing waiting and no job dropped for a cycle."""
    assert guest.sh("systemctl is-system-running").out == "running\n"
    assert guest.sh("systemctl --failed --no-legend; systemctl list-jobs --no-legend").out == ""
    journal = guest.sh("journalctl --boot --no-pager").out
    assert "Linux version" in journal
    for word in ("ordering cycle", "deleted to break", "Failed to start"):
        assert word not in journal
    agent = properties(guest, AGENT)
    assert (agent["ActiveState"], agent["NRestarts"]) == ("active", "0")


def assert_before_the_engine(guest: Guest) -> None:
    """The engine was started when the agent was active, and it found what is there now."""
    active = int(properties(guest, AGENT)["ActiveEnterTimestampMonotonic"])
    assert 0 < active <= int(properties(guest, ENGINE)["ExecMainStartTimestampMonotonic"])
    guest.run("diff", "--recursive", "/run/engine-saw/cdi", SPECS)


def assert_ready_after_the_specs(guest: Guest, observers: Observers, files: int) -> None:
    """First every spec was on disk, then the unit was active; the journal says so in that order."""
    passes = observers.entries("CDI_AGENT_EVENT=pass")
    wrote = [path for entry in passes for path in json.loads(entry["CDI_AGENT_WROTE"])]
    assert len(wrote) == files
    (ready,) = observers.entries("CDI_AGENT_EVENT=ready")
    received = "__MONOTONIC_TIMESTAMP"
    assert all(int(entry[received]) < int(ready[received]) for entry in passes)
    # The clock was set when the guest was resumed: the journal knows what it was at boot.
    boot = int(ready["__REALTIME_TIMESTAMP"]) - int(ready[received])
    active = boot + int(properties(guest, AGENT)["ActiveEnterTimestampMonotonic"])
    for path in wrote:
        renamed = float(guest.run("stat", "--format=%.9Z", path).out)
        assert renamed * 1e6 <= active


def test_boot_with_one_gpu(one_gpu: Guest) -> None:
    observers = Observers(one_gpu)
    agreed = observers.agree(
        holds={VIRTIO_GPU: [FIRST]}, without=[f"{VIRTIO_GPU}-vfio", DISPLAY], quiet=True
    )
    nodes = ["/dev/dri/card0", "/dev/dri/renderD128"]
    assert agreed.specs == {VIRTIO_GPU: {FIRST: nodes, "all": nodes}}
    assert_whole(one_gpu)
    assert_before_the_engine(one_gpu)
    assert_ready_after_the_specs(one_gpu, observers, files=1)
    assert agreed.writes == 1
    assert agreed.total("source_up") == 2
    assert agreed.total("withheld") == 0


def test_boot_without_a_gpu(no_gpu: Guest) -> None:
    """A healthy host: no spec in the directory, and the engine is not kept waiting."""
    observers = Observers(no_gpu)
    agreed = observers.agree(quiet=True)
    assert agreed.specs == {}
    assert no_gpu.sh(f"ls -A {SPECS}; stat -c %a {SPECS}").out == ".cdi-agent.lock\n755\n"
    assert_whole(no_gpu)
    assert_before_the_engine(no_gpu)
    assert_ready_after_the_specs(no_gpu, observers, files=0)
    assert observers.entries("--priority=warning") == []
    assert (agreed.writes, agreed.total("source_up")) == (0, 2)


def test_boot_with_many_gpus(many_gpus: Guest) -> None:
    """Nothing of which udev was still busy was left out of what the engine found."""
    observers = Observers(many_gpus)
    agreed = observers.agree(holds={VIRTIO_GPU: [FIRST, SECOND], DISPLAY: CARDS}, quiet=True)
    assert set(agreed.specs) == {VIRTIO_GPU, DISPLAY}
    assert_whole(many_gpus)
    assert_before_the_engine(many_gpus)


def test_the_unit_runs_as_shipped_and_is_confined(one_gpu: Guest) -> None:
    """All scenarios run under the unit that users get: here is what it may not do."""
    unit = properties(one_gpu, AGENT)
    shipped = (PROJECT / "systemd/cdi-agent.service").read_text()
    assert one_gpu.read(unit["FragmentPath"]) == shipped
    assert "DropInPaths" not in unit
    assert unit["NeedDaemonReload"] == "no"
    assert unit["WatchdogUSec"] == "30s"
    pid = unit["MainPID"]
    lines = one_gpu.read(f"/proc/{pid}/status").splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    # To see who holds a node open; and, whatever it is started with, no other.
    assert status["CapBnd"] == f"{1 << CAP_SYS_PTRACE | 1 << CAP_DAC_READ_SEARCH:016x}"
    assert {status["CapInh"], status["CapAmb"]} == {"0" * 16}
    # as root, but in the agent's view of the file system
    inside = f"nsenter --target {pid} --mount -- sh -c"
    for place in ("/etc/x", "/usr/x", "/var/lib/x", "/opt/cdi-agent/x", "/root/x"):
        assert one_gpu.sh(f"{inside} 'echo >{place}'", check=False).rc != 0, place
    for place in (f"{SPECS}/x", "/var/lib/cdi-agent/x"):
        one_gpu.sh(f"{inside} 'echo >{place}; rm {place}'")
