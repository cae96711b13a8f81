"""Who has a node open: real processes, whatever they call it and wherever they run.

``/dev/full`` stands for a GPU's node: everybody may open it, and hardly anybody has it open.
"""

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from agent.vfio import holders
from agent.vfio.children import program
from agent.vfio.holders import (
    MAX_HIDDEN,
    MAX_HOLDERS,
    VFIO_DEVICE,
    Mounts,
    Nodes,
    blind_spots,
    nodes_below,
    printable,
    scan,
)

NODE: Final = "/dev/full"
NUMBER: Final = os.makedev(1, 7)
GROUP: Final = "/dev/vfio/12"
GPU: Final = "0000:03:00.0"

PYTHON: Final = os.path.basename(sys.executable)[:15]
"""What the kernel calls this program."""

Line = tuple[str, ...]

# --- real processes -------------------------------------------------------------------------------


@contextmanager
def running(script: str, *arguments: object, before: tuple[str, ...] = ()) -> Iterator[int]:
    """A process that has done what the script says and has come to its last line, a pid."""
    argv = (*before, sys.executable, "-I", "-S", "-c", script, *map(str, arguments))
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            # What was started in between ends with it: `unshare` is told so.
            process.kill()


OPENS: Final = """
import os, sys
os.open(sys.argv[1], os.O_RDWR)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def held_by(pid: int, node: str = NODE) -> Line | None:
    """What is found about a process, among all others of this machine."""
    lines = scan("/proc", Nodes("/dev", [GPU], [node]))
    return next((line for line in lines if line[:2] == ("held", str(pid))), None)


def test_a_process_is_named_with_what_it_holds() -> None:
    with running(OPENS, NODE) as pid:
        assert held_by(pid) == ("held", str(pid), NODE, PYTHON)


def entry(
    folder: Path, name: str, number: str | None = None, devname: str = "", subsystem: str = ""
) -> None:
    """An entry of sysfs, with a node if it has a number."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "uevent").write_text(f"MAJOR=1\nDEVNAME={devname}\n" if devname else "")
    if number is not None:
        (path / "dev").write_text(f"{number}\n")
    if subsystem:
        (path / "subsystem").symlink_to(f"/sys/class/{subsystem}")


def test_every_node_below_a_function_is_one_of_it(tmp_path: Path) -> None:
    """However deep, whatever its driver calls it; but neither disks nor what can be taken away."""
    entry(tmp_path, "drm/card0", "226:0", "dri/card0", "drm")
    entry(tmp_path, "drm/card0/card0-DP-1/i2c-5/i2c-dev/i2c-5", "89:5", "i2c-5", "i2c-dev")
    entry(tmp_path, "sound/card1/controlC1", "116:9", "snd/controlC1", "sound")
    entry(tmp_path, "sound/card1/input15", subsystem="input")
    entry(tmp_path, "sound/card1/input15/event12", "13:76", "input/event12", "input")
    entry(tmp_path, "graphics/fb0", "29:0", "/dev/fb0", "graphics")
    entry(tmp_path, "nvme/nvme0/nvme0n1", "259:0", "nvme0n1", "block")
    entry(tmp_path, "0000:04:00.0/drm/card1", "226:1", "dri/card1", "drm")
    entry(tmp_path, "odd", "x:y", "odd")
    entry(tmp_path, "unnamed", "10:1")
    (tmp_path / "firmware_node").symlink_to(tmp_path)
    assert sorted(nodes_below(str(tmp_path))) == [
        ("/dev/dri/card0", os.makedev(226, 0)),
        ("/dev/fb0", os.makedev(29, 0)),
        ("/dev/i2c-5", os.makedev(89, 5)),
        ("/dev/snd/controlC1", os.makedev(116, 9)),
    ]


def test_a_function_that_has_gone_has_no_nodes(tmp_path: Path) -> None:
    assert list(nodes_below(str(tmp_path / "gone"))) == []


def test_who_holds_a_node_that_only_sysfs_knows_is_found_by_its_number(tmp_path: Path) -> None:
    entry(tmp_path, f"bus/pci/devices/{GPU}/sound/card1/controlC1", "1:7", "snd/controlC1")
    with running(OPENS, NODE) as pid:
        argv = (*program(holders), "/proc", "/dev", str(tmp_path), GPU, GPU)
        run = subprocess.run(argv, check=True, capture_output=True, text=True)
    assert f"held\t{pid}\t/dev/snd/controlC1\t{PYTHON}" in run.stdout.splitlines()


def test_of_functions_without_a_node_no_process_is_asked(tmp_path: Path) -> None:
    argv = (*program(holders), str(tmp_path), "/dev", str(tmp_path), GPU, GPU)
    run = subprocess.run(argv, check=True, capture_output=True, text=True)
    assert run.stdout == "done\n", "not even that there is no procfs"


def test_who_holds_another_node_is_no_holder() -> None:
    with running(OPENS, "/dev/zero") as pid:
        assert held_by(pid) is None


def test_a_link_to_a_node_is_the_node(tmp_path: Path) -> None:
    (tmp_path / "by-path").symlink_to(NODE)
    with running(OPENS, tmp_path / "by-path") as pid:
        assert held_by(pid) is not None


@pytest.mark.netns
def test_a_process_whose_first_thread_has_ended_is_seen() -> None:
    """Its /proc/<pid>/fd is empty, though its other threads have everything open.

    Of such a process the kernel shows that to nobody but root, whoever's process it is.
    """
    script = """
import ctypes, os, sys, threading, time
os.open(sys.argv[1], os.O_RDWR)
first = f"/proc/self/task/{os.getpid()}/stat"
def wait():
    while open(first).read().rpartition(") ")[2][0] != "Z": time.sleep(0.001)
    os.write(1, b"%d\\n" % os.getpid())
    sys.stdin.read()
threading.Thread(target=wait).start()
ctypes.CDLL(None).syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)  # exit, of one thread
"""
    with running(script, NODE) as pid:
        assert os.listdir(f"/proc/{pid}/fd") == []
        assert held_by(pid) is not None


def test_a_process_may_be_called_anything() -> None:
    script = "open('/proc/self/comm', 'wb').write(b'\\xff\\n\"}{')\n" + OPENS
    with running(script, NODE) as pid:
        line = held_by(pid)
        assert line is not None
        assert printable(line[-1]) == '\\xff?"}{'


def test_processes_may_end_while_they_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(OPENS, NODE) as pid:
        real = os.listdir

        def late(path: str) -> list[str]:
            names = real(path)
            if path == f"/proc/{pid}/fd":
                os.kill(pid, 9)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            return names

        monkeypatch.setattr(os, "listdir", late)
        assert held_by(pid) is None


def test_the_script_says_what_the_function_finds() -> None:
    with running(OPENS, NODE) as pid:
        argv = (*program(holders), "/proc", "/dev", "/sys", GPU, "", NODE, GROUP)
        run = subprocess.run(argv, check=True, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    assert f"held\t{pid}\t{NODE}\t{PYTHON}" in lines
    assert lines[-1] == "done"


@pytest.mark.netns
def test_a_node_under_another_name_is_known_by_its_number(tmp_path: Path) -> None:
    """Containers have nodes of their own; what they are called is theirs to say."""
    os.mknod(tmp_path / "renderD200", stat.S_IFCHR | 0o666, NUMBER)
    with running(OPENS, tmp_path / "renderD200") as pid:
        assert held_by(pid) == ("held", str(pid), NODE, PYTHON)


@pytest.mark.netns
def test_another_node_under_the_same_name_is_another(tmp_path: Path) -> None:
    """A container's card0 may be any of the host's cards."""
    script = f'mount -t tmpfs tmpfs /dev; mknod {NODE} c 1 5; exec "$0" "$@"'
    with running(OPENS, NODE, before=("unshare", "--mount", "sh", "-c", script)) as pid:
        assert os.readlink(f"/proc/{pid}/fd/3") == NODE
        assert held_by(pid) is None


@pytest.mark.netns
@pytest.mark.parametrize(
    "before",
    [
        pytest.param(("setpriv", "--reuid=65534", "--clear-groups"), id="another user"),
        pytest.param(("unshare", "--mount", "--net"), id="other namespaces"),
        pytest.param(("unshare", "--user", "--map-root-user"), id="its own users"),
    ],
)
def test_processes_of_others_are_seen(before: tuple[str, ...]) -> None:
    with running(OPENS, NODE, before=before) as pid:
        assert held_by(pid) is not None


@pytest.mark.netns
def test_a_process_in_a_container_is_seen_under_the_hosts_pid() -> None:
    before = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    with running(OPENS, NODE, before=before) as inside:
        assert inside == 1
        found = list(scan("/proc", Nodes("/dev", [GPU], [NODE])))
    assert [line[-1] for line in found if line[0] == "held" and line[1] != "1"] == [PYTHON]


# --- a /proc that is made up ----------------------------------------------------------------------


class Proc:
    """Folders that look like /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self").mkdir(parents=True)

    def process(self, pid: int, *targets: str, command: str = "vm") -> Path:
        folder = self.root / str(pid)
        (folder / "fdinfo").mkdir(parents=True)
        (folder / "comm").write_text(f"{command}\n")
        fds = folder / "fd"
        fds.mkdir()
        for number, target in enumerate(targets):
            (fds / str(number)).symlink_to(target)
        return folder

    def scan(self, *paths: str) -> list[Line]:
        return list(scan(str(self.root), Nodes(str(self.root / "no-dev"), [GPU], list(paths))))


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


def test_nodes_that_cannot_be_examined_are_known_by_their_path(proc: Proc) -> None:
    proc.process(1, "/dev/dri/card0 (deleted)", "socket:[1]", "anon_inode:[eventfd]")
    proc.process(7, "/dev/null", "/dev/dri/card0")
    assert proc.scan("/dev/dri/card0") == [("held", "7", "/dev/dri/card0", "vm")]


@pytest.mark.parametrize(
    ("others", "fdinfo", "counts"),
    [
        pytest.param((), "", True, id="nobody says"),
        pytest.param(("/dev/vfio/7",), "", False, id="its group says so"),
        pytest.param(("/dev/vfio/12",), "", True, id="our group"),
        pytest.param(("/dev/vfio/noiommu-3",), "", False, id="its group has no IOMMU"),
        pytest.param(("/dev/vfio/vfio",), "", True, id="no group"),
        pytest.param((), f"/sys/devices/pci0000:00/{GPU}", True, id="ours"),
        pytest.param((), "/sys/devices/pci0000:00/0000:07:00.0", False, id="another"),
    ],
)
def test_a_device_of_vfio_whose_group_is_closed(
    proc: Proc, others: tuple[str, ...], fdinfo: str, *, counts: bool
) -> None:
    folder = proc.process(7, VFIO_DEVICE, *others)
    if fdinfo:
        text = f"pos:\t0\nflags:\t02000002\nvfio-device-syspath: {fdinfo}\n"
        (folder / "fdinfo/0").write_text(text)
    assert [line[1] for line in proc.scan(GROUP)] == ["7"] * counts


def test_devices_of_vfio_are_none_of_a_function_on_its_own_driver(proc: Proc) -> None:
    proc.process(7, VFIO_DEVICE)
    assert proc.scan("/dev/dri/card0") == []


def test_processes_that_vanish_are_passed_over(proc: Proc) -> None:
    (proc.root / "5").mkdir()
    proc.process(6)
    (proc.root / "not-a-pid").mkdir()
    assert proc.scan(NODE) == []


def test_more_holders_than_anybody_reads_are_not_listed(proc: Proc) -> None:
    for pid in range(1, 2 * MAX_HOLDERS):
        proc.process(pid, NODE)
    assert [int(line[1]) for line in proc.scan(NODE)] == list(range(1, MAX_HOLDERS + 1))


@pytest.mark.parametrize(
    ("number", "blind"),
    [
        pytest.param(errno.EACCES, True, id="refused"),
        pytest.param(errno.EIO, True, id="fails"),
        pytest.param(errno.ENOENT, False, id="gone"),
        pytest.param(errno.ESRCH, False, id="ended"),
    ],
)
def test_a_process_that_cannot_be_examined_is_said(
    proc: Proc, monkeypatch: pytest.MonkeyPatch, number: int, *, blind: bool
) -> None:
    proc.process(7, NODE)
    real = os.listdir

    def refuse(path: str) -> list[str]:
        if path.endswith("/7/fd"):
            raise OSError(number, os.strerror(number))
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    said = ("blind", f"process 7 cannot be examined: {os.strerror(number)}")
    assert proc.scan(NODE) == [said] * blind


def test_a_holder_is_found_behind_any_number_of_processes_that_hide(
    proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an ordinary user sees the host."""
    for pid in range(1, 101):
        proc.process(pid, NODE)
    real = os.listdir

    def refuse(path: str) -> list[str]:
        if path.endswith("/fd") and not path.endswith("/100/fd"):
            raise OSError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    *hidden, holder = proc.scan(NODE)
    assert holder[:2] == ("held", "100")
    assert len(hidden) == MAX_HIDDEN


@pytest.mark.parametrize(
    ("number", "blind"), [(errno.EACCES, True), (errno.ESTALE, False), (errno.ENOENT, False)]
)
def test_a_file_that_cannot_be_examined_is_no_node_unless_that_was_refused(
    proc: Proc, monkeypatch: pytest.MonkeyPatch, number: int, *, blind: bool
) -> None:
    proc.process(7, "/srv/file")
    real = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:  # noqa: ANN401 - as os.stat
        if str(path).endswith("/fd/0"):
            raise OSError(number, os.strerror(number))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert [line[0] for line in proc.scan(NODE)] == ["blind"] * blind


MOUNTINFO: Final = """\
28 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 28 0:50 / /home rw shared:9 - nfs4 server:/home rw,vers=4.2
41 28 0:51 / /mnt/my\\040data rw - fuse.sshfs me@there:/ rw
42 28 0:52 / /mnt/lustre rw master:2 shared:3 - lustre mds:/scratch rw
43 40 8:2 / /home/local rw - xfs /dev/sdb1 rw
44 43 0:50 /x /home/local/far rw - nfs server:/x rw
"""


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("/dev/dri/card0", False),
        ("/home", False),
        ("/home/me/file", True),
        ("/homes/me", False),
        ("/home/local/file", False),
        ("/home/local/far/file", True),
        ("/mnt/my data/file", True),
        ("/mnt/lustre/file", True),
    ],
)
def test_files_of_other_machines_are_left_alone(proc: Proc, path: str, *, remote: bool) -> None:
    """Looking at one waits for as long as that machine is down."""
    (proc.process(7) / "mountinfo").write_text(MOUNTINFO)
    mounts = Mounts()
    mounts.enter(str(proc.root / "7"))
    assert mounts.is_remote(path) is remote


def test_the_nodes_of_a_container_on_fuse_are_looked_at(proc: Proc) -> None:
    """Rootless engines may have all of a container on FUSE, but for /dev."""
    (proc.process(7) / "mountinfo").write_text(
        "1 0 0:9 / / rw - fuse.fuse-overlayfs fuse-overlayfs rw\n"
        "2 1 0:5 /dri/card0 /dev/dri/card0 rw - devtmpfs udev rw\n"
    )
    mounts = Mounts()
    mounts.enter(str(proc.root / "7"))
    assert mounts.is_remote("/etc/passwd")
    assert not mounts.is_remote("/dev/dri/card0")


def test_mounts_are_read_once_for_each_namespace(proc: Proc) -> None:
    for pid, namespace in ((7, 1), (8, 1), (9, 2)):
        folder = proc.process(pid)
        (folder / "ns").mkdir()
        (folder / "ns/mnt").symlink_to(f"mnt:[{namespace}]")
    (proc.root / "7/mountinfo").write_text(MOUNTINFO)
    mounts = Mounts()
    seen = []
    for pid in (7, 8, 9):
        mounts.enter(str(proc.root / str(pid)))
        seen.append(mounts.is_remote("/home/me/file"))
    assert seen == [True, True, False]


STATUS: Final = "Name:\tpython\nCapPrm:\t{0:016x}\nCapEff:\t{0:016x}\nCapBnd:\t{0:016x}\n"
ALL: Final = 0x1FFFFFFFFFF
NO_PTRACE: Final = "the agent lacks CAP_SYS_PTRACE"
NO_SEARCH: Final = "the agent lacks CAP_DAC_READ_SEARCH"


@pytest.mark.parametrize(
    ("capabilities", "second", "reasons"),
    [
        pytest.param(ALL, "kthreadd", [], id="root"),
        pytest.param(1 << 19 | 1 << 2, "kthreadd", [], id="as the unit"),
        pytest.param(1 << 19 | 1 << 1, "kthreadd", [], id="overriding"),
        pytest.param(0, "kthreadd", [NO_PTRACE, NO_SEARCH], id="none"),
        pytest.param(ALL & ~(1 << 19), "kthreadd", [NO_PTRACE], id="no ptrace"),
        pytest.param(ALL, "bash", ["{} shows the processes of a container"], id="a container"),
        pytest.param(ALL, None, ["{} shows the processes of a container"], id="hidden"),
    ],
)
def test_what_keeps_processes_from_being_seen_is_said(
    proc: Proc, capabilities: int, second: str | None, reasons: list[str]
) -> None:
    (proc.root / "self/status").write_text(STATUS.format(capabilities))
    if second is not None:
        proc.process(2, command=second)
    said = list(blind_spots(str(proc.root)))
    assert len(said) == len(reasons)
    for reason, expected in zip(said, reasons, strict=True):
        assert reason.startswith(expected.format(proc.root))


def test_without_procfs_nothing_is_known(tmp_path: Path) -> None:
    assert list(blind_spots(str(tmp_path))) == [f"there is no procfs at {tmp_path}"]
