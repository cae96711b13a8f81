"""What every test runs under.

- `no_blocking_calls`: a blocking call that agent code makes in the event loop raises.
- `nothing_left_behind`: a test that leaves a thread, a child process, an open file or a task fails.
  Fixtures of a wider scope are set up before it looks, so what they keep open is theirs.
- A marker (`netns`, `podman`, ...) names what a test needs of the machine. What is missing is a
  skip with its reason at home, and a failure where CI=true: there nothing is left out unnoticed.
- Hypothesis is derandomised in CI, so that a red run is red again.
"""

import asyncio
import functools
import gc
import os
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
import pytest_asyncio
from blockbuster import BlockBuster

import agent

IN_CI = os.environ.get("CI") == "true"

# How fast the machine is decides nothing: no deadline, no complaint about slow generation.
PATIENT = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("home", PATIENT)
hypothesis.settings.register_profile("ci", PATIENT, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if IN_CI else "home")


# --- what a test needs of the machine -------------------------------------------------------------

# Programs by marker. Containers run in namespaces that the test makes: `podman` includes `netns`.
PROGRAMS = {
    "guest": ("qemu-system-x86_64", "qemu-img", "mmdebstrap", "mkfs.ext4"),
    "netns": ("unshare", "mount"),
    "podman": ("unshare", "mount", "podman", "crun", "busybox"),
    "prometheus": ("prometheus", "promtool"),
    "systemd": ("systemd-analyze", "systemd-socket-activate", "systemd-tmpfiles"),
}
NEED_ROOT = {"guest", "netns", "podman"}
NEED_NAMESPACES = {"netns", "podman"}


@functools.cache
def missing(marker: str) -> str:
    """Say what this machine lacks for tests with that marker; an empty string if nothing."""
    if marker in NEED_ROOT and os.geteuid() != 0:
        return "needs root"
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    absent = [name for name in PROGRAMS[marker] if shutil.which(name, path=path) is None]
    if absent:
        return f"needs {', '.join(absent)}: `make test` as root installs what Debian has"
    if marker in NEED_NAMESPACES:
        probe = subprocess.run(
            ["unshare", "--net", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
            capture_output=True,
            text=True,
            check=False,
        )
        if probe.returncode != 0:
            return f"may not make namespaces here: {probe.stderr.strip()}"
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that this machine cannot run; in CI fail it."""
    for marker in item.iter_markers():
        if marker.name not in PROGRAMS or not (reason := missing(marker.name)):
            continue
        if IN_CI:
            pytest.fail(f"{reason} (and CI leaves nothing out)", pytrace=False)
        pytest.skip(reason)


# --- nothing blocks the loop ----------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="session")
def no_blocking_calls() -> Iterator[None]:
    """Make a blocking call raise BlockingError if agent code makes it while its loop runs."""
    guard = BlockBuster(scanned_modules=[agent])
    guard.activate()
    yield
    guard.deactivate()


# --- nothing is left behind -----------------------------------------------------------------------


def open_files() -> dict[int, str]:
    """Map this process's open descriptors to what they lead to."""
    files = {}
    for entry in os.listdir("/proc/self/fd"):
        # The descriptor that listed the folder is gone by now.
        try:
            files[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue
    return files


def children() -> dict[int, str]:
    """Map the ids of this process's children, zombies too, to their names."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}  # as nearly always; spares the walk through /proc
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # pid (name) state ppid ...; a name may hold blanks and brackets.
        name, _, rest = stat.partition(" (")[2].rpartition(") ")
        if int(rest.split()[1]) == os.getpid():
            found[int(entry)] = name
    return found


def left_over(files: dict[int, str], processes: dict[int, str], threads: set[int]) -> list[str]:
    """Name what is there now and was not there then."""
    return [
        *(f"open file {fd} -> {to}" for fd, to in open_files().items() if files.get(fd) != to),
        *(f"child {pid} ({name})" for pid, name in children().items() if pid not in processes),
        *(f"thread {t.name}" for t in threading.enumerate() if t.ident not in threads),
    ]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test after which a thread, a child process or an open file is left."""
    before = open_files(), children(), {t.ident or 0 for t in threading.enumerate()}
    yield
    if left_over(*before):
        gc.collect()  # a reference cycle, as of a caught exception, holds nothing for long
    if rest := left_over(*before):
        pytest.fail("left behind: " + "; ".join(rest), pytrace=False)


@pytest_asyncio.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Fail a test that leaves a task in its loop."""
    yield
    if rest := asyncio.all_tasks() - {asyncio.current_task()}:
        names = "; ".join(map(str, rest))
        for task in rest:
            task.cancel()
        await asyncio.wait(rest)
        pytest.fail(f"left behind: {names}", pytrace=False)


@pytest.fixture(autouse=True)
def no_task_left_in_asyncio_tests(
    request: pytest.FixtureRequest,
    nothing_left_behind: None,  # first up, so last to look: by then the loop's own files are closed
) -> None:
    """Put `no_task_left` around each asyncio test: the others need no loop."""
    if request.node.get_closest_marker("asyncio"):
        request.getfixturevalue("no_task_left")
