"""A child process writes to the simulated host as the agent's writer does to a real one."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.simulate import Kernel
from agent.simulate.host import arc_b50
from agent.simulate.serve import WRITER, Server

GPU = "0000:03:00.0"


@pytest.fixture(autouse=True)
def gpu(kernel: Kernel) -> None:
    kernel.plug(*arc_b50())


@pytest.fixture
def server(kernel: Kernel, tmp_path: Path) -> Iterator[Server]:
    with Server(kernel, tmp_path / "kernel.socket") as server:
        yield server


def start(server: Server, *arguments: object) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-I", "-S", WRITER, server.path, *arguments]
    return subprocess.Popen(list(map(str, argv)), stdout=subprocess.PIPE, text=True)


def answer(child: "subprocess.Popen[str]") -> list[str]:
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 0
    return out.splitlines()


def attribute(kernel: Kernel, name: str) -> Path:
    return kernel.root / "sys/bus/pci/devices" / GPU / name


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("driver_override", "vfio-pci", 0),
        ("driver/unbind", GPU, 0),
        ("driver/unbind", "0000:77:00.0", errno.ENODEV),
        ("no-such-file", "1", errno.ENOENT),
        ("vendor", "1", errno.EACCES),
    ],
)
def test_a_write_is_answered_with_the_errno_of_the_kernel(
    kernel: Kernel, server: Server, tmp_path: Path, name: str, text: str, expected: int
) -> None:
    child = start(server, "write", tmp_path / "lock", attribute(kernel, name), text)
    assert answer(child) == ["begun", str(expected)]


def test_what_is_written_happens(kernel: Kernel, server: Server, tmp_path: Path) -> None:
    for name, text in (("driver_override", "vfio-pci"), ("driver/unbind", GPU)):
        answer(start(server, "write", tmp_path / "lock", attribute(kernel, name), text))
    probe = kernel.root / "sys/bus/pci/drivers_probe"
    answer(start(server, "write", tmp_path / "lock", probe, GPU))
    assert kernel.driver_of(GPU) == "vfio-pci"
    read = answer(start(server, "read", attribute(kernel, "driver_override")))
    assert read == ["begun", "0", "vfio-pci"]


def test_the_lock_of_a_killed_writer_is_free_when_the_kernel_returns_and_not_before(
    kernel: Kernel, server: Server, tmp_path: Path
) -> None:
    lock = tmp_path / "lock"
    kernel.hang(GPU)
    driver = attribute(kernel, "driver")
    with start(server, "write", lock, driver / "unbind", GPU) as child:
        with kernel.changing() as changed:
            assert changed.wait_for(lambda: not driver.is_symlink(), 30), "it hangs in the kernel"
        child.kill()
    with open(lock, "rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    waiting = start(server, "wait", lock)
    kernel.heal()
    assert answer(waiting) == ["0"]
    assert kernel.driver_of(GPU) is None


def test_a_reader_of_a_hanging_device_waits_with_it(kernel: Kernel, server: Server) -> None:
    kernel.hang(GPU, now=True)
    child = start(server, "read", attribute(kernel, "driver_override"))
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    assert child.poll() is None
    kernel.heal()
    # It was let in with the old content, or came late and found the file in its place again.
    assert answer(child) == ["0", "(null)"]


def test_two_servers_cannot_have_one_socket(kernel: Kernel, server: Server) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
        Server(kernel, server.path)
