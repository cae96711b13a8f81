"""Children are started, waited for with a deadline, killed, and abandoned without a trace."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.vfio.children import MAX_OUTPUT, PYTHON, Child, Children, started_at


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def hang(pipe: Path) -> tuple[str, ...]:
    """What says that it is there, and never ends."""
    return ("sh", "-c", f"echo here; exec cat {pipe}")


async def said(child: Child, what: bytes) -> None:
    """Wait until a child has said something."""
    while not child.output().endswith(what):  # noqa: ASYNC110 - a pipe tells of no end
        await asyncio.sleep(0.001)


def script(text: str) -> tuple[str, ...]:
    return (*PYTHON, "-c", text)


@pytest.mark.parametrize(
    ("argv", "status", "output"),
    [
        pytest.param(("true",), 0, b"", id="success"),
        pytest.param(("sh", "-c", "echo out; echo err >&2; exit 3"), 3, b"out\nerr\n", id="both"),
        pytest.param(("sh", "-c", "kill -TERM $$"), -signal.SIGTERM, b"", id="signal"),
        pytest.param(("cat",), 0, b"", id="no input"),
    ],
)
async def test_a_child_that_ends(argv: tuple[str, ...], status: int, output: bytes) -> None:
    child = Child.start(argv)
    assert await child.ends_within(None)
    assert (child.gone.result(), child.output()) == (status, output)


async def test_what_cannot_be_started_is_an_error_and_leaves_nothing() -> None:
    with pytest.raises(FileNotFoundError):
        Child.start(("/no/such/program",))


@pytest.mark.parametrize("waits", [False, True], ids=["starts", "waits"])
async def test_a_start_for_which_descriptors_are_short_leaves_none(*, waits: bool) -> None:
    """Whichever of them it is that is not to be had any more."""
    before = descriptors()
    with few_descriptors() as spare:
        starts = 0
        for count in range(8):
            for fd in spare[:count]:
                os.close(fd)
            with contextlib.suppress(OSError):
                child = Child.start(("cat",), waits=waits)
                starts += 1
                child.dismiss()
                await child.ends_within(None)
            spare[:count] = [os.dup(0) for _ in range(count)]
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(0)
        assert 0 < starts < 8
    assert descriptors() == before


@contextlib.contextmanager
def few_descriptors() -> Iterator[list[int]]:
    """Have this process use up all descriptors that it may have; these are not needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, descriptors())) + 16, hard))
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.dup(0))
        yield spare
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in spare:
            os.close(fd)


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


async def test_a_child_that_does_not_end_in_time_is_killed_when_that_is_wanted(pipe: Path) -> None:
    child = Child.start(hang(pipe))
    await said(child, b"here\n")
    assert not await child.ends_within(0)
    child.kill()
    assert await child.ends_within(None)
    assert child.gone.result() == -signal.SIGKILL
    child.kill()
    child.abandon()
    assert child.output() == b"here\n"


async def test_who_waits_may_be_cancelled_and_others_wait_on(pipe: Path) -> None:
    child = Child.start(hang(pipe))
    waiting = asyncio.create_task(child.ends_within(None))
    await said(child, b"here\n")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    child.kill()
    assert await child.ends_within(None)


async def test_a_child_that_says_too_much_waits_and_is_not_read_on() -> None:
    child = Child.start(("cat", "/dev/zero"))
    await said(child, bytes(MAX_OUTPUT))
    child.kill()
    await child.ends_within(None)
    assert child.output() == bytes(MAX_OUTPUT)


async def test_abandoned_children_are_killed_and_nobody_waits(pipe: Path) -> None:
    """Not even one that is stopped, or whose parent looks away."""
    children = Children()
    found = [children.start(hang(pipe)) for _ in range(3)]
    for child in found:
        await said(child, b"here\n")
    os.kill(found[0].pid, signal.SIGSTOP)
    pidfds = [os.pidfd_open(child.pid) for child in found]
    children.abandon()
    assert all(child.gone.cancelled() for child in found)
    await asyncio.sleep(0)
    assert len(children) == 0
    for pidfd in pidfds:
        # Whoever has it now (here this process) takes its status: they have died.
        try:
            ended = await asyncio.to_thread(os.waitid, os.P_PIDFD, pidfd, os.WEXITED)
        except ChildProcessError:
            continue  # `abandon` could take it at once
        finally:
            os.close(pidfd)
        assert ended is not None
        assert ended.si_status == signal.SIGKILL


async def test_an_account_is_kept_of_those_that_have_not_ended(pipe: Path) -> None:
    children = Children()
    ended, stuck = children.start(("true",)), children.start(hang(pipe))
    await ended.ends_within(None)
    await asyncio.sleep(0)
    assert len(children) == 1
    stuck.kill()
    await stuck.ends_within(None)


async def test_a_child_inherits_neither_environment_nor_group_nor_what_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    child = Child.start(
        script(
            "import os, signal\n"
            "status = open('/proc/self/status').read().split()\n"
            "print(sorted(os.environ), os.getpgid(0) == os.getpid())\n"
            "print(status[status.index('SigBlk:') + 1])\n"
        )
    )
    await child.ends_within(None)
    assert child.output() == b"['LC_ALL', 'PATH'] True\n0000000000000000\n"


async def test_the_end_of_the_loop_waits_for_no_child(pipe: Path) -> None:
    """And it is quiet: no warning about a process or a transport that is dropped."""
    code = (
        "import asyncio, sys\n"
        "from agent.vfio.children import Child\n"
        "async def main():\n"
        f"    child = Child.start({hang(pipe)!r})\n"
        "    while not child.output(): await asyncio.sleep(0)\n"
        "    print(child.pid)\n"
        "asyncio.run(main())\n"
    )
    argv = (sys.executable, "-X", "dev", "-c", code)
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, complaints = await process.communicate()
    pid = int(out)
    try:
        assert complaints == b""
        assert started_at(pid) is not None, "it is there still: nobody has killed it"
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_process_is_known_by_when_it_started() -> None:
    ours = started_at(os.getpid())
    assert ours is not None
    assert ours > 0


@pytest.mark.parametrize(
    "stat",
    [
        pytest.param(b"7 (a b) c) S 1" + b" 0" * 17 + b" 4711 0\n", id="blanks and brackets"),
        pytest.param(b"7 (x) R 1" + b" 0" * 17 + b" 4711", id="plain"),
        pytest.param(b"7 (x) Z 1" + b" 0" * 15 + b" 3 0 4711", id="first thread has ended"),
    ],
)
def test_a_processes_name_may_hold_anything(tmp_path: Path, stat: bytes) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_bytes(stat)
    assert started_at(7, str(tmp_path)) == 4711


@pytest.mark.parametrize(
    "stat",
    [
        pytest.param(None, id="no such process"),
        pytest.param(b"", id="empty"),
        pytest.param(b"7 (x) R", id="short"),
        pytest.param(b"7 (x) R" + b" y" * 30, id="no numbers"),
        pytest.param(b"7 (x) Z 1" + b" 0" * 15 + b" 1 0 4711", id="ended"),
        pytest.param(b"7 (x) X 1" + b" 0" * 15 + b" 0 0 4711", id="dead"),
    ],
)
def test_a_process_that_has_gone_has_no_start(tmp_path: Path, stat: bytes | None) -> None:
    (tmp_path / "7").mkdir()
    if stat is not None:
        (tmp_path / "7/stat").write_bytes(stat)
    assert started_at(7, str(tmp_path)) is None


def test_a_process_that_has_ended_is_none_though_nobody_has_noticed() -> None:
    process = subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert started_at(process.pid) is None
    finally:
        process.wait()


def test_a_start_that_cannot_be_told_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").symlink_to("stat")
    with pytest.raises(OSError, match="symbolic links"):
        started_at(7, str(tmp_path))
