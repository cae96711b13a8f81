"""A log whose reader is slow, gone or was never there holds nobody up."""

import contextlib
import os
import pty
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.observe.sinks import Journal, Lines, is_reachable, leads_to_journal

LINE = b"x" * 99 + b"\n"


@pytest.fixture(params=["pipe", "socket", "terminal"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """What may be at the other end of standard error: (reading end, writing end)."""
    match request.param:
        case "pipe":
            reader, writer = os.pipe()
        case "socket":
            pair = socket.socketpair()
            reader, writer = (end.detach() for end in pair)
        case _:
            reader, writer = pty.openpty()
    yield reader, writer
    for fd in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(fd)


def lines(fd: int) -> contextlib.closing[Lines]:
    return contextlib.closing(Lines(fd))


def read_all(fd: int) -> bytes:
    os.set_blocking(fd, False)
    data = b""
    with contextlib.suppress(BlockingIOError, OSError):
        while chunk := os.read(fd, 65536):
            data += chunk
    return data.replace(b"\r\n", b"\n")  # as a terminal shows them


def test_a_line_is_written(ends: tuple[int, int]) -> None:
    with lines(ends[1]) as sink:
        assert sink.write(LINE)
        assert read_all(ends[0]) == LINE


def test_a_reader_that_stopped_costs_lines_and_no_time(ends: tuple[int, int]) -> None:
    """Were one of these writes to block, the test would not end."""
    with lines(ends[1]) as sink:
        for _ in range(50_000):
            sink.write(LINE)
        assert sink.dropped > 0
        assert os.get_blocking(ends[1]), "the descriptor is shared and stays as it was"


def test_what_is_written_after_a_gap_is_whole_lines(ends: tuple[int, int]) -> None:
    with lines(ends[1]) as sink:
        while sink.dropped < 3:
            sink.write(LINE)
        data = read_all(ends[0])
        sink.write(b"end\n")
        data += read_all(ends[0])
    assert set(data.splitlines(keepends=True)) == {LINE, b"end\n"}


def test_a_line_longer_than_the_pipe_arrives_in_the_end() -> None:
    reader, writer = os.pipe()
    long = b"y" * 200_000 + b"\n"
    data = b""
    with lines(writer) as sink:
        assert sink.write(long), "begun; the rest waits for room"
        while not data.endswith(b"z\n"):
            data += read_all(reader)
            sink.write(b"z\n")
    assert data.startswith(long)
    assert data[len(long) :].strip(b"z\n") == b""
    os.close(reader)
    os.close(writer)


def test_a_reader_that_is_gone_is_no_error(ends: tuple[int, int]) -> None:
    os.close(ends[0])
    with lines(ends[1]) as sink:
        assert not sink.write(LINE)
        assert sink.dropped == 1


def test_a_file_keeps_the_position_that_it_shares(tmp_path: Path) -> None:
    """A file opened a second time would be written from its beginning again."""
    path = tmp_path / "log"
    with path.open("wb", buffering=0) as file, lines(file.fileno()) as sink:
        file.write(b"before\n")
        assert sink.write(b"ours\n" * 2000)
        file.write(b"after\n")
    assert path.read_bytes() == b"before\n" + b"ours\n" * 2000 + b"after\n"


def test_a_full_disk_is_no_error() -> None:
    with open("/dev/full", "wb", buffering=0) as file, lines(file.fileno()) as sink:
        assert not sink.write(LINE)
        assert sink.dropped == 1


def test_no_standard_error_at_all_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    with lines(writer) as sink:
        assert not sink.write(LINE)
        assert sink.dropped == 1


def test_a_pipe_that_cannot_be_opened_again_is_asked_before_each_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As without /proc, or with the terminal of another user."""

    def refuse(*_args: object) -> int:
        raise PermissionError

    monkeypatch.setattr("agent.observe.sinks.os.open", refuse)
    reader, writer = os.pipe()
    with lines(writer) as sink:
        for _ in range(5_000):
            sink.write(LINE)
        assert sink.dropped > 0
        data = read_all(reader)
    assert data.count(LINE) > 500
    os.close(reader)
    os.close(writer)


class FakeJournal:
    """A datagram socket at a path."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.setblocking(False)

    def close(self) -> None:
        self.socket.close()
        os.unlink(self.path)


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[FakeJournal]:
    with contextlib.closing(FakeJournal(tmp_path / "socket")) as fake:
        yield fake


def test_an_entry_is_one_datagram(journald: FakeJournal) -> None:
    with contextlib.closing(Journal(journald.path)) as journal:
        assert journal.write(b"MESSAGE=x\n")
    assert journald.socket.recv(1000) == b"MESSAGE=x\n"


def test_a_busy_journal_costs_entries_and_no_time(journald: FakeJournal) -> None:
    with contextlib.closing(Journal(journald.path)) as journal:
        for _ in range(10_000):
            assert journal.write(b"MESSAGE=x\n")
        assert journal.dropped > 0


def test_an_entry_that_is_too_large_is_dropped(journald: FakeJournal) -> None:
    with contextlib.closing(Journal(journald.path)) as journal:
        assert journal.write(b"x" * 10_000_000)
        assert journal.dropped == 1


def test_a_journal_that_was_started_anew_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with contextlib.closing(Journal(str(path))) as journal:
        assert not journal.write(b"MESSAGE=none\n")
        for _ in range(2):
            with contextlib.closing(FakeJournal(path)) as fake:
                assert journal.write(b"MESSAGE=x\n")
                assert fake.socket.recv(1000) == b"MESSAGE=x\n"
            assert not journal.write(b"MESSAGE=gone\n")
        assert journal.dropped == 0


def test_what_is_reachable(journald: FakeJournal, tmp_path: Path) -> None:
    assert is_reachable(journald.path)
    assert not is_reachable(str(tmp_path / "no" / "socket"))
    (tmp_path / "file").touch()
    assert not is_reachable(str(tmp_path / "file"))


def test_standard_error_is_the_journal_if_device_and_inode_agree(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        status = os.fstat(file.fileno())
        assert leads_to_journal(file.fileno(), f"{status.st_dev}:{status.st_ino}")
        assert not leads_to_journal(file.fileno(), f"{status.st_dev}:{status.st_ino + 1}")
        assert not leads_to_journal(file.fileno(), "nonsense")
        assert not leads_to_journal(file.fileno(), None)
        fd = file.fileno()
    assert not leads_to_journal(fd, f"{status.st_dev}:{status.st_ino}"), "a closed descriptor"
