"""What the rig promises to the scenarios, shown on real guests."""

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

import agent
from tests.guest.bundle import PROJECT
from tests.guest.channel import CommandFailedError, GuestGoneError
from tests.guest.conftest import Frozen, Resume
from tests.guest.evidence import collect
from tests.guest.image import INSIDE
from tests.guest.layers import Installed
from tests.guest.rig import Guest
from tests.guest.topology import ONE_GPU, slot

# The first of them may have to build everything.
pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]


def cards(guest: Guest) -> list[str]:
    """The DRM nodes in the guest's /dev; none if there is no /dev/dri."""
    listing = guest.sh("ls /dev/dri 2>/dev/null || true").out.split()
    return [name for name in listing if name != "by-path"]


def groups(guest: Guest) -> dict[str, str]:
    """The IOMMU group of each PCI function."""
    links = guest.sh("cd /sys/kernel/iommu_groups; ls -d */devices/*").out.split()
    return {link.rpartition("/")[2]: link.partition("/")[0] for link in links}


def test_a_command_gives_exit_code_output_and_time(no_gpu: Guest) -> None:
    result = no_gpu.run("/bin/sh", "-c", "cat; echo err >&2; exit 3", stdin=b"in", check=False)
    assert (result.rc, result.out, result.err) == (3, "in", "err\n")
    with pytest.raises(CommandFailedError, match=r"(?s)exit code 3: cat.*why"):
        no_gpu.sh("cat; echo why >&2; exit 3")
    assert no_gpu.run("/no/such/program", check=False).rc == 127


def test_a_command_that_hangs_is_killed_with_its_children(no_gpu: Guest) -> None:
    hung = no_gpu.sh("echo began; sleep 1234 & sleep 1234", seconds=3, check=False)
    assert (hung.rc, hung.out) == (124, "began\n")
    no_gpu.wait_until("! pgrep -f '[s]leep 1234'")


def test_files_and_folders_reach_the_guest_unchanged(no_gpu: Guest, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "big").write_bytes(data)
    (tmp_path / "wheels" / "tool").write_text("#!/bin/sh\necho run\n")
    (tmp_path / "wheels" / "tool").chmod(0o755)
    no_gpu.push(tmp_path / "wheels", "/srv/a/wheels")
    assert no_gpu.run("sha256sum", "/srv/a/wheels/big").out[:64] == hashlib.sha256(data).hexdigest()
    assert no_gpu.run("/srv/a/wheels/tool").out == "run\n"
    no_gpu.write("/etc/new/file", "text", mode=0o600)
    assert no_gpu.sh("cat /etc/new/file; stat -c ' %a %U' /etc/new/file").out == "text 600 root\n"


def test_each_resumed_guest_is_as_it_was_frozen(resume: Resume, one_gpu: Guest) -> None:
    one_gpu.sh("touch /root/mine")
    with resume(ONE_GPU) as other:
        assert other.sh("ls /root/mine", check=False).rc != 0
        assert one_gpu.sh("ls /root/mine").rc == 0
        assert cards(other) == cards(one_gpu) == ["card0", "renderD128"]


def test_a_resumed_guest_knows_what_time_it_is(no_gpu: Guest) -> None:
    assert abs(float(no_gpu.sh("date +%s").out) - time.time()) < 60


def test_the_frozen_boot_was_whole(no_gpu: Guest) -> None:
    """No unit failed, none waits, and the journal goes back to the kernel's start."""
    assert no_gpu.sh("systemctl is-system-running").out == "running\n"
    assert no_gpu.sh("systemctl list-jobs --no-legend").out == ""
    journal = no_gpu.sh("journalctl --boot --no-pager").out
    assert "Linux version" in journal
    assert "ordering cycle" not in journal
    assert cards(no_gpu) == []


def test_every_port_takes_a_card_and_two_functions_of_one_share_a_group(no_gpu: Guest) -> None:
    no_gpu.plug("secondary-vga", "one", bus="rp0", addr="0.1", multifunction="on")
    no_gpu.plug("secondary-vga", "zero", bus="rp0", addr="0.0", multifunction="on")
    for port in range(1, 6):
        no_gpu.plug("secondary-vga", f"gpu{port}", bus=f"rp{port}")
    no_gpu.wait_until("test -e /dev/dri/card6")
    found = groups(no_gpu)
    assert found[f"{slot(0)}.0"] == found[f"{slot(0)}.1"]
    assert len({found[f"{slot(port)}.0"] for port in range(6)}) == 6


def test_the_many_gpus_are_grouped_as_the_topology_says(many_gpus: Guest) -> None:
    found = groups(many_gpus)
    twins = {found[f"{slot(2)}.0"], found[f"{slot(2)}.1"]}
    behind = {found["0000:08:01.0"], found["0000:08:02.0"]}
    alone = {found[f"{slot(0)}.0"], found[f"{slot(1)}.0"]}
    assert (len(twins), len(behind), len(alone)) == (1, 1, 2)
    assert len(twins | behind | alone) == 4
    wanted = [*(f"card{number}" for number in range(6)), "renderD128", "renderD129"]
    assert cards(many_gpus) == wanted


def test_uevents_are_recorded_from_both_sources(no_gpu: Guest) -> None:
    log = "/run/uevents.jsonl"
    no_gpu.start("uevents", "/usr/local/sbin/rig-uevents", log, "drm")
    no_gpu.wait_until(f"grep -q ready {log}")
    no_gpu.plug("secondary-vga", "hot", bus="rp0")
    no_gpu.wait_until(f"grep udev {log} | grep -q '/drm/card0\"'")
    events = [json.loads(line) for line in no_gpu.read(log).splitlines()[1:]]
    first = next(event for event in events if event["devpath"].endswith("/drm/card0"))
    assert (first["from"], first["action"]) == ("kernel", "add")
    assert first["properties"]["DEVNAME"] == "dri/card0"


def test_the_witness_sees_a_write_in_place_and_lets_a_rename_pass(no_gpu: Guest) -> None:
    no_gpu.push(INSIDE / "witness.py", "/root/witness.py")
    no_gpu.sh("mkdir -p /run/watched")
    no_gpu.start("witness", "/usr/bin/python3", "/root/witness.py", "/run/watched", "/run/saw")
    no_gpu.wait_until("grep -q ready /run/saw")
    spec = (
        'cdiVersion: "0.5.0"\nkind: "a.org/gpu"\ndevices:\n- name: "one"\n'
        '  containerEdits: {deviceNodes: [{path: "/dev/null"}]}\n'
    )
    no_gpu.write("/run/watched/.new", spec)
    no_gpu.sh("mv /run/watched/.new /run/watched/a.yaml")
    no_gpu.wait_until("grep -q a.org/gpu /run/saw")
    assert "fault" not in no_gpu.read("/run/saw")
    no_gpu.sh("echo >>/run/watched/a.yaml")
    no_gpu.wait_until("grep -q 'modified in place' /run/saw")


def test_the_agent_is_installed_as_this_tree_has_it(no_gpu: Guest) -> None:
    said = no_gpu.run("/opt/cdi-agent/bin/cdi-agent", "--version").out
    assert agent.__version__ in said.split()


def test_a_dead_guest_is_reported_at_once_and_its_folder_is_removed(resume: Resume) -> None:
    with resume(ONE_GPU) as guest:
        os.kill(guest.pid, signal.SIGKILL)
        with pytest.raises(GuestGoneError):
            guest.sh("true")
    assert not guest.folder.exists()


def test_evidence_is_collected_from_a_guest_and_even_from_a_dead_one(
    resume: Resume, tmp_path: Path
) -> None:
    with resume(ONE_GPU) as guest:
        collect(guest, tmp_path / "alive")
        os.kill(guest.pid, signal.SIGKILL)
        collect(guest, tmp_path / "dead")
    assert "rig-channel" in (tmp_path / "alive" / "journal.txt").read_text()
    assert "renderD128" in (tmp_path / "alive" / "devices.txt").read_text()
    assert "ended" in (tmp_path / "dead" / "journal.txt").read_text()
    assert (tmp_path / "dead" / "console.log").exists()


FAILING: Final = """
import pytest

@pytest.mark.guest
@pytest.mark.timeout(900)
def test_fails(one_gpu):
    one_gpu.sh("echo 'the last' word | systemd-cat")
    assert False
"""


@pytest.mark.usefixtures("frozen")
def test_a_failing_test_leaves_its_guests_journal_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(FAILING)
    plain = ("-p", "no:cacheprovider", "-p", "no:randomly", f"--rootdir={tmp_path}")
    settings = ("-c", str(PROJECT / "pyproject.toml"), "-p", "tests.guest.conftest")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, *settings, str(tmp_path)],
        cwd=PROJECT,
        env=os.environ | {"CDI_AGENT_GUEST_EVIDENCE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    kept = tmp_path / "guest-test_fails"
    assert "the last word" in (kept / "journal.txt").read_text()
    assert "the last word" in run.stdout
    assert str(kept) in run.stdout


def test_qemu_ends_when_its_maker_is_killed(installed: Installed, frozen: Frozen) -> None:
    """Nothing outlives a test run, not even one that had no time to clean up."""
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.guest.image import Image; from tests.guest.rig import Guest\n"
        "from tests.guest.topology import ONE_GPU\n"
        "image, frozen = map(Path, sys.argv[1:])\n"
        "with Guest.resume(Image(image), ONE_GPU, frozen) as guest:\n"
        "    print(guest.pid, guest.folder, flush=True); sys.stdin.read()\n"
    )
    folders = (str(installed.image.folder), str(frozen[ONE_GPU.name]))
    argv = [sys.executable, "-c", program, *folders]
    maker = subprocess.Popen(argv, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with maker:
        assert maker.stdout
        pid, folder = maker.stdout.readline().split()
        qemu = os.pidfd_open(int(pid))
        maker.kill()
    ended, _, _ = select.select([qemu], [], [], 120)
    os.close(qemu)
    assert ended
    # Young folders are left alone by the sweep: this one is ours to remove.
    for file in Path(os.fsdecode(folder)).iterdir():
        file.unlink()
    Path(os.fsdecode(folder)).rmdir()
