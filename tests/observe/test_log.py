"""What a logging call becomes, wherever standard error leads, whatever is logged."""

import asyncio
import contextlib
import json
import logging
import os
import pty
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import structlog

from agent.observe import log as agent_log
from agent.observe.log import Log, Sink, choose_sink, configure
from agent.observe.settings import Format, LogSettings
from tests.observe.test_record import Evil, parse_journal

NOW = 1_000_000_000.0


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging is global: each test gives it back."""
    yield
    agent_log.reset()
    structlog.contextvars.clear_contextvars()


class Reader:
    """The reading end of a pipe, and the log that writes into it."""

    def __init__(self, settings: LogSettings, environ: Mapping[str, str]) -> None:
        self._fd, self._writer = os.pipe()
        os.set_blocking(self._fd, False)
        self.log = configure(settings, fd=self._writer, environ=environ, clock=lambda: NOW)

    def text(self) -> str:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._fd, 1_000_000).decode()
        return ""

    def entries(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.text().splitlines()]

    def close(self) -> None:
        self.log.close()
        os.close(self._fd)
        os.close(self._writer)


@pytest.fixture
def reader() -> Iterator[Reader]:
    with contextlib.closing(Reader(LogSettings(format="json"), {})) as made:
        yield made


def test_an_entry_has_time_level_name_and_fields(reader: Reader) -> None:
    structlog.get_logger("any.name").warning("spec-write-failed", path="/run/cdi/x", attempt=2)
    assert reader.entries() == [
        {
            "time": "2001-09-09T01:46:40.000Z",
            "level": "warning",
            "event": "spec-write-failed",
            "path": "/run/cdi/x",
            "attempt": 2,
        }
    ]


def test_what_is_bound_to_the_context_is_in_every_entry(reader: Reader) -> None:
    with structlog.contextvars.bound_contextvars(pass_id=7):
        structlog.get_logger().info("a")
    structlog.get_logger().info("b")
    assert [entry.get("pass_id") for entry in reader.entries()] == [7, None]


@pytest.mark.parametrize(
    ("level", "seen"),
    [
        ("debug", ["debug", "info", "warning", "error", "critical"]),
        ("info", ["info", "warning", "error", "critical"]),
        ("warning", ["warning", "error", "critical"]),
        ("error", ["error", "critical"]),
    ],
)
def test_the_level_decides_what_is_written(level: str, seen: list[str]) -> None:
    settings = msgspec.convert({"level": level, "format": "json"}, LogSettings)
    with contextlib.closing(Reader(settings, {})) as reader:
        log = structlog.get_logger()
        for name in ("debug", "info", "warning", "error", "critical"):
            getattr(log, name)("x")
        log.log(logging.DEBUG, "x")
        entries = reader.entries()
    assert [entry["level"] for entry in entries] == seen + (["debug"] if level == "debug" else [])


def test_a_logger_that_exists_already_follows_a_new_level(reader: Reader) -> None:
    """A reload changes the level of the loggers that modules made when they were imported."""
    module_logger = structlog.get_logger()
    module_logger.debug("before")
    with contextlib.closing(Reader(LogSettings(format="json", level="debug"), {})) as second:
        module_logger.debug("after")
        assert [entry["event"] for entry in second.entries()] == ["after"]
    assert reader.entries() == []


def test_an_exception_is_told_with_the_end_of_its_traceback(reader: Reader) -> None:
    def recurse(depth: int) -> None:
        if depth == 0:
            raise ValueError("the\nreason")
        recurse(depth - 1)

    try:
        recurse(500)
    except ValueError:
        structlog.get_logger().exception("pass-failed")
    (entry,) = reader.entries()
    assert entry["error"] == r"ValueError: the\nreason"
    traceback = entry["traceback"]
    assert isinstance(traceback, list)
    assert len(traceback) <= 64
    assert traceback[-2:] == ["ValueError: the", "reason"]


@pytest.mark.parametrize("form", ["exception", "tuple"])
def test_an_exception_may_be_given(reader: Reader, form: str) -> None:
    error = ValueError("x")
    given = error if form == "exception" else (type(error), error, None)
    structlog.get_logger().error("pass-failed", exc_info=given)
    assert reader.entries()[0]["error"] == "ValueError: x"


def test_exc_info_without_an_exception_is_no_error(reader: Reader) -> None:
    structlog.get_logger().error("pass-failed", exc_info=True)
    assert [entry["event"] for entry in reader.entries()] == ["pass-failed"]
    assert reader.log.dropped == 0


def test_a_value_that_cannot_be_printed_costs_only_itself(reader: Reader) -> None:
    structlog.get_logger().info("x", evil=Evil(), good=1)
    assert reader.entries()[0]["good"] == 1


def test_what_cannot_be_made_an_entry_is_counted_and_told_of(reader: Reader) -> None:
    structlog.get_logger().info(Evil())
    assert reader.log.dropped == 1
    structlog.get_logger().info("next")
    structlog.get_logger().info("after")
    assert [(e["event"], e.get("log_dropped")) for e in reader.entries()] == [
        ("next", 1),
        ("after", None),
    ]


def test_after_a_gap_the_log_says_how_much_is_missing(reader: Reader) -> None:
    log = structlog.get_logger()
    sent = 0
    while reader.log.dropped == 0:
        log.info("x", filler="y" * 1000)
        sent += 1
    for _ in range(9):
        log.info("x", filler="y" * 1000)
    text = reader.text()
    log.info("end")
    text += reader.text()
    entries = [json.loads(line) for line in text.splitlines()]
    assert entries[-1]["event"] == "end"
    assert entries[-1]["log_dropped"] == sent + 9 - (len(entries) - 1)
    assert not any("log_dropped" in entry for entry in entries[:-1])


async def test_logging_never_blocks_the_loop(reader: Reader) -> None:
    """The guard of conftest would raise, and the entry would be counted as lost."""
    structlog.get_logger().error("pass-failed", exc_info=ValueError("x"))
    assert reader.log.dropped == 0
    assert reader.entries()[0]["event"] == "pass-failed"


async def test_asyncio_tells_of_an_error_that_nobody_awaited_here_too(reader: Reader) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": "it broke"})
    assert [(e["event"], e["logger"], e["text"]) for e in reader.entries()] == [
        ("library-message", "asyncio", "it broke")
    ]


def test_a_library_that_repeats_itself_is_heard_once(reader: Reader) -> None:
    """Its messages are ours to bound: asyncio once told of the same failure 3000 times a second."""
    for number in range(100):
        logging.getLogger("some.library").error("no more sockets\nsocket: <at %x>", number)
        logging.getLogger("some.library").error("failed", exc_info=ValueError("x"))
    logging.getLogger("some.library").error("failed", exc_info=ValueError("y"))
    logging.getLogger("other.library").error("failed", exc_info=ValueError("x"))
    assert [(e["logger"], str(e["text"]).partition("\\n")[0]) for e in reader.entries()] == [
        ("some.library", "no more sockets"),
        ("some.library", "failed"),
        ("some.library", "failed"),
        ("other.library", "failed"),
    ]


def test_other_libraries_and_warnings_come_out_here(reader: Reader) -> None:
    logging.getLogger("some.library").info("not this")
    logging.getLogger("some.library").warning("look: %s", "x\n<0>forged")
    logging.getLogger("some.library").error("failed", exc_info=ValueError("x"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    entries = reader.entries()
    assert [(e["event"], e["level"], e["logger"]) for e in entries] == [
        ("library-message", "warning", "some.library"),
        ("library-message", "error", "some.library"),
        ("library-message", "warning", "py.warnings"),
    ]
    assert entries[0]["text"] == r"look: x\n<0>forged"
    assert entries[1]["error"] == "ValueError: x"


def test_a_library_that_logs_nonsense_is_no_error(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    ours = [handler for handler in root.handlers if type(handler).__module__ == agent_log.__name__]
    monkeypatch.setattr(root, "handlers", ours)  # pytest's own handler would raise
    logging.getLogger("some.library").warning("%d", "not a number")
    assert reader.entries()[0]["text"] == "%d"


def test_threads_may_log(reader: Reader) -> None:
    threads = [
        threading.Thread(target=lambda: [structlog.get_logger().info("x") for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reader.entries()) == 200


# --- where it goes --------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "journal"))
        bound.setblocking(False)
        yield bound


def stream_of(fd: int) -> str:
    status = os.fstat(fd)
    return f"{status.st_dev}:{status.st_ino}"


@pytest.mark.parametrize(
    ("form", "journal_stream", "reachable", "terminal", "environ", "sink"),
    [
        pytest.param("auto", True, True, False, {}, "journal", id="the journal"),
        pytest.param("auto", True, False, False, {}, "prefixed", id="its socket is out of reach"),
        pytest.param("auto", False, True, False, {}, "text", id="a pipe on a host with a journal"),
        pytest.param("auto", False, True, True, {"TERM": "xterm"}, "colour", id="a terminal"),
        pytest.param("auto", False, True, True, {"TERM": "dumb"}, "text", id="a dumb terminal"),
        pytest.param("auto", False, True, True, {"NO_COLOR": "1"}, "text", id="no colour wanted"),
        pytest.param("auto", False, True, True, {"NO_COLOR": ""}, "colour", id="NO_COLOR is empty"),
        pytest.param("text", False, True, True, {}, "colour", id="text on a terminal"),
        pytest.param("text", True, True, False, {}, "prefixed", id="text into the journal"),
        pytest.param("json", True, True, False, {}, "json", id="json"),
        pytest.param("journal", False, True, False, {}, "journal", id="the journal, in any case"),
        pytest.param("journal", False, False, False, {}, "prefixed", id="no journal"),
    ],
)
def test_where_the_log_goes(
    tmp_path: Path,
    journal: socket.socket,
    form: Format,
    journal_stream: bool,  # noqa: FBT001 - a table
    reachable: bool,  # noqa: FBT001
    terminal: bool,  # noqa: FBT001
    environ: dict[str, str],
    sink: Sink,
) -> None:
    reader, writer = pty.openpty() if terminal else os.pipe()
    if journal_stream:
        environ = {**environ, "JOURNAL_STREAM": stream_of(writer)}
    path = str(tmp_path / ("journal" if reachable else "nowhere"))
    settings = LogSettings(format=form)
    assert choose_sink(settings, fd=writer, environ=environ, journal=path) == sink
    os.close(reader)
    os.close(writer)


def test_the_journal_gets_fields(tmp_path: Path, journal: socket.socket) -> None:
    with contextlib.closing(
        configure(
            LogSettings(format="journal"), fd=2, environ={}, journal=str(tmp_path / "journal")
        )
    ):
        structlog.get_logger().error("spec-write-failed", kind="intel.com/gpu")
    fields = parse_journal(journal.recv(100_000))
    assert fields["CDI_AGENT_EVENT"] == "spec-write-failed"
    assert fields["CDI_AGENT_KIND"] == "intel.com/gpu"
    assert fields["PRIORITY"] == "3"


def test_a_journal_that_goes_away_is_replaced_by_prefixed_lines(
    tmp_path: Path, journal: socket.socket
) -> None:
    reader, writer = os.pipe()
    path = tmp_path / "journal"
    with contextlib.closing(
        configure(LogSettings(format="journal"), fd=writer, environ={}, journal=str(path))
    ) as log:
        path.unlink()
        structlog.get_logger().warning("x")
        assert os.read(reader, 1000) == b"<4>x\n"
        assert log.dropped == 0
    os.close(reader)
    os.close(writer)


def test_a_full_journal_loses_entries_and_says_so_later(
    tmp_path: Path, journal: socket.socket
) -> None:
    with contextlib.closing(
        Log("journal", fd=2, journal=str(tmp_path / "journal"), clock=lambda: NOW)
    ) as log:
        while log.dropped < 5:
            log({"event": "x"})
        with contextlib.suppress(BlockingIOError):
            while journal.recv(100_000):
                pass
        log({"event": "end"})
        told = parse_journal(journal.recv(100_000))
        assert (told["CDI_AGENT_EVENT"], told["CDI_AGENT_LOG_DROPPED"]) == ("end", "5")


def test_after_the_end_nothing_raises(reader: Reader) -> None:
    reader.log.close()
    structlog.get_logger().info("x")


@pytest.mark.parametrize(
    "document",
    [
        pytest.param({"level": "loud"}, id="level"),
        pytest.param({"format": "xml"}, id="format"),
        pytest.param({"colour": True}, id="unknown key"),
    ],
)
def test_bad_settings_are_refused(document: Mapping[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(document, LogSettings)
