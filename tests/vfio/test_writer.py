"""The child that writes: one call, under the function's lock, and never for an agent that died."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.vfio import writer


def start(*arguments: object, keep: tuple[int, ...] = ()) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-I", "-S", writer.__file__, *map(str, arguments)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=keep)


def answer(*arguments: object) -> tuple[int, bytes] | None:
    with start(*arguments) as child:
        out, complaint = child.communicate(timeout=30)
    assert complaint == b""
    return writer.parse(out)


@contextmanager
def stuck(path: Path, lock: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """A child that hangs in opening a pipe that nobody reads."""
    with start("write", lock, path, "x") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == writer.BEGUN
        yield child
        child.kill()


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def attribute(tmp_path: Path) -> Path:
    path = tmp_path / "attribute"
    path.write_bytes(b"0123456789")
    return path


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_write_neither_cuts_nor_appends(attribute: Path, lock: Path) -> None:
    assert answer("write", lock, attribute, "ab\n") == (0, b"")
    assert attribute.read_bytes() == b"ab\n3456789"


def test_any_bytes_get_through(attribute: Path, lock: Path) -> None:
    text = b"\xff\xe4 \n"
    assert answer("write", lock, attribute, os.fsdecode(text)) == (0, b"")
    assert attribute.read_bytes().startswith(text)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        pytest.param("missing", errno.ENOENT, id="nothing is made"),
        pytest.param(".", errno.EISDIR, id="a folder"),
        pytest.param("/proc/self/oom_score_adj", errno.EINVAL, id="what the kernel refuses"),
    ],
)
def test_the_answer_is_the_errno_of_the_kernel(
    tmp_path: Path, lock: Path, path: str, code: int
) -> None:
    assert answer("write", lock, tmp_path / path, "vfio-pci") == (code, b"")
    assert sorted(os.listdir(tmp_path)) == ["lock"]


def test_nothing_is_written_of_nothing(attribute: Path, lock: Path) -> None:
    """Zero bytes never reach the kernel's code, and would look like a success."""
    assert answer("write", lock, attribute, "") == (errno.EINVAL, b"")


def test_a_write_is_one_call(attribute: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one with the rest would be another order to the kernel."""
    calls: list[bytes] = []

    def half(fd: int, content: bytes) -> int:
        os.close(fd)
        calls.append(content)
        return len(content) // 2

    monkeypatch.setattr(os, "write", half)
    assert writer.write_once(str(attribute), b"vfio-pci") == errno.EIO
    assert calls == [b"vfio-pci"]


def test_an_attribute_is_read_as_it_is(attribute: Path) -> None:
    attribute.write_bytes(b"(null)\n")
    assert answer("read", attribute) == (0, b"(null)\n")


def test_a_page_is_read_at_most(attribute: Path) -> None:
    attribute.write_bytes(bytes(10 * writer.PAGE))
    assert answer("read", attribute) == (0, bytes(writer.PAGE))


def test_of_a_configuration_space_only_the_part_that_all_have_is_read(attribute: Path) -> None:
    attribute.write_bytes(bytes(range(256)))
    assert answer("head", attribute) == (0, bytes(range(64)))


def test_what_cannot_be_read_is_an_errno(tmp_path: Path) -> None:
    assert answer("read", tmp_path / "missing") == (errno.ENOENT, b"")


@pytest.mark.parametrize(
    "output",
    [b"", b"begun\n", b"begun\n1", b"begun\nTraceback\n", b"-1\n", b"Fatal Python error: x\n"],
)
def test_an_output_that_is_none_says_nothing(output: bytes) -> None:
    assert writer.parse(output) is None


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        pytest.param(b"begun\n16\n", (16, b""), id="refused"),
        pytest.param(b"begun\n0\nbegun\n1\n", (0, b"begun\n1\n"), id="any content"),
        pytest.param(b"Could not find libraries\nbegun\n0\n", (0, b""), id="a complaint"),
        pytest.param(b"30\n", (30, b""), id="no lock"),
    ],
)
def test_an_output_is_errno_and_content(output: bytes, answer: tuple[int, bytes]) -> None:
    assert writer.parse(output) == answer


# --- the lock -------------------------------------------------------------------------------------


def test_a_second_write_waits_for_the_first(attribute: Path, pipe: Path, lock: Path) -> None:
    with stuck(pipe, lock) as first, start("write", lock, attribute, "ab") as second:
        assert second.stdout is not None
        os.set_blocking(second.stdout.fileno(), False)
        with open(lock, "rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert attribute.read_bytes() == b"0123456789"
        first.kill()
        second.wait(30)
        assert second.stdout.read() == b"begun\n0\n"
    assert attribute.read_bytes().startswith(b"ab")


def test_the_lock_of_a_stopped_child_is_held_until_it_is_gone(pipe: Path, lock: Path) -> None:
    with stuck(pipe, lock) as first, start("wait", lock) as waiting:
        first.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)
        assert waiting.poll() is None
        first.kill()
        assert waiting.communicate(timeout=30)[0] == b"0\n"


def test_a_lock_that_cannot_be_had_prevents_the_write(attribute: Path, lock: Path) -> None:
    lock.symlink_to(attribute)
    assert answer("write", lock, attribute, "ab") == (errno.ELOOP, b"")
    assert attribute.read_bytes() == b"0123456789"


# --- the agent ------------------------------------------------------------------------------------


def test_a_child_whose_agent_has_died_does_not_begin(attribute: Path, lock: Path) -> None:
    """Or the device would change behind the back of the agent that was started since."""
    with open(lock, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        child = start("write", lock, attribute, "ab")
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        fcntl.flock(file, fcntl.LOCK_UN)
        with child.stderr:
            assert child.wait(30) == 1
            assert b"the agent has died" in child.stderr.read()
    assert attribute.read_bytes() == b"0123456789"


def test_a_child_keeps_no_descriptor_of_the_agent(pipe: Path, lock: Path) -> None:
    ours, theirs = os.pipe()
    try:
        with start("write", lock, pipe, "x", keep=(theirs,)) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == writer.BEGUN
            fds = {fd: os.readlink(f"/proc/{child.pid}/fd/{fd}") for fd in (0, 1, 2, 3)}
            assert sorted(os.listdir(f"/proc/{child.pid}/fd")) == ["0", "1", "2", "3"]
            assert fds[3] == str(lock)
            child.kill()
    finally:
        os.close(ours)
        os.close(theirs)


def test_what_it_does_not_understand_it_does_not_do(attribute: Path) -> None:
    with start("write", attribute, "ab") as child:
        out, complaint = child.communicate(timeout=30)
    assert (child.returncode, out) == (1, b"")
    assert complaint.startswith(b"the head of writer.py")
