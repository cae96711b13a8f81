"""The log: structlog in front, standard error or the journal behind.

Owns how an entry becomes bytes and where they go. `configure` decides once where standard error
leads; after that a call costs some ten microseconds, never waits for a reader and never raises.
Other libraries' loggers and Python's warnings come out here too, as ``library-message``.

What had to be dropped is told by the next entry that is written, in its field ``log_dropped``.
Fields that belong to everything that happens meanwhile (the number of a pass) are bound by
``structlog.contextvars``. Nothing is written per event at info.
"""

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from typing import Final, Literal

import structlog
from msgspec import structs

from agent.observe import record as records
from agent.observe.colour import allows_colour
from agent.observe.record import Record
from agent.observe.settings import Level, LogSettings
from agent.observe.sinks import JOURNAL, Journal, Lines, is_reachable, leads_to_journal
from agent.troubles import Troubles

Sink = Literal["text", "colour", "json", "prefixed", "journal"]

_LEVELS: Final[Mapping[Level, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_TRACEBACK_FRAMES: Final = 24
_ALIKE: Final = 80
"""Characters by which two messages of a library are the same."""


class Log:
    """The end of structlog's chain: makes an entry of a call and hands it to a sink.

    Args:
        sink: The form and the place.
        fd: Where lines go; used by ``journal`` too while there is no journal.
        journal: The journal's socket.
        clock: Seconds since 1970.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        fd: int = 2,
        journal: str = JOURNAL,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.sink: Final = sink
        self._lines = Lines(fd)
        self._journal = Journal(journal) if sink == "journal" else None
        self._clock = clock
        self._failed = 0
        self._told = 0
        self._lock = threading.RLock()  # spec files are written in threads, which may log

    @property
    def dropped(self) -> int:
        """Entries that reached nobody: no room, or they could not be written at all."""
        journal = 0 if self._journal is None else self._journal.dropped
        return self._failed + self._lines.dropped + journal

    def __call__(self, event: MutableMapping[str, object]) -> None:
        """Write an entry; never blocks, never raises."""
        try:
            entry = _record(event)
            with self._lock:  # held for the time of a write that does not wait
                missing = self.dropped - self._told
                if missing:
                    entry = structs.replace(entry, fields={**entry.fields, "log_dropped": missing})
                if self._write(entry):
                    self._told += missing
        except Exception:  # noqa: BLE001 - whatever is wrong with an entry, the work goes on
            self._failed += 1

    def close(self) -> None:
        """Close what was opened; further entries are lost."""
        self._lines.close()
        if self._journal is not None:
            self._journal.close()

    def _write(self, entry: Record) -> bool:
        """Write an entry; says whether it reached somebody."""
        match self.sink:
            case "text":
                return self._lines.write(records.text_lines(entry, self._clock()))
            case "colour":
                return self._lines.write(records.text_lines(entry, self._clock(), records.COLOUR))
            case "json":
                return self._lines.write(records.json_line(entry, self._clock()))
            case "prefixed":
                return self._lines.write(records.prefixed_lines(entry))
            case "journal":
                assert self._journal is not None  # noqa: S101 - made together
                before = self._journal.dropped
                if self._journal.write(records.journal_entry(entry)):
                    return self._journal.dropped == before
                return self._lines.write(records.prefixed_lines(entry))


def choose_sink(
    settings: LogSettings, *, fd: int, environ: Mapping[str, str], journal: str = JOURNAL
) -> Sink:
    """Decide the form and the place of the log.

    Args:
        settings: The section ``log`` of the configuration.
        fd: Where lines would go.
        environ: The process's environment (``JOURNAL_STREAM``, ``NO_COLOR``, ``TERM``).
        journal: The journal's socket.
    """
    to_journal = leads_to_journal(fd, environ.get("JOURNAL_STREAM"))
    match settings.format:
        case "json":
            return "json"
        case "journal":
            return "journal" if is_reachable(journal) else "prefixed"
        case "auto" if to_journal:
            return "journal" if is_reachable(journal) else "prefixed"
        case "auto" | "text":
            if to_journal:
                return "prefixed"
            return "colour" if os.isatty(fd) and allows_colour(environ) else "text"


def configure(
    settings: LogSettings,
    *,
    fd: int = 2,
    environ: Mapping[str, str],
    journal: str = JOURNAL,
    clock: Callable[[], float] = time.time,
) -> Log:
    """Set up structlog and the standard library's logging; the returned log counts and closes.

    May be called again, for another level or form; close the earlier log then.
    """
    log = Log(
        choose_sink(settings, fd=fd, environ=environ, journal=journal),
        fd=fd,
        journal=journal,
        clock=clock,
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            _hand_on,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.level]),
        logger_factory=lambda *_names: _Last(log),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, _Bridge):
            root.removeHandler(handler)
    root.addHandler(_Bridge())
    logging.captureWarnings(capture=True)
    return log


def reset() -> None:
    """Undo `configure`, for whoever shares the process."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, _Bridge):
            root.removeHandler(handler)
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()


class _Last:
    """What structlog takes for the logger that writes: one method per level."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def msg(self, event: MutableMapping[str, object]) -> None:
        self._log(event)

    debug = info = warning = error = critical = msg


def _hand_on(
    _logger: object, _method: str, event: MutableMapping[str, object]
) -> tuple[tuple[MutableMapping[str, object]], dict[str, object]]:
    """The last processor: the whole entry is the one argument of the logger."""
    return (event,), {}


class _Bridge(logging.Handler):
    """Entries of the standard library's logging, from warnings on, as entries of ours.

    Of a library's messages that begin alike one a minute is handed on: what others do in a storm is
    not ours to know.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._troubles = Troubles()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand one on; logging calls this with its lock held."""
        log = structlog.get_logger()
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - the arguments do not fit the text, or worse
            text = str(record.msg)
        fields: dict[str, object] = {"logger": record.name, "text": text}
        error = record.exc_info[1] if record.exc_info else None  # asyncio gives False
        if error is not None:
            fields["exc_info"] = error
        trouble = (record.name, text.partition("\n")[0][:_ALIKE], repr(error)[:_ALIKE])
        if not self._troubles.is_news(trouble, time.monotonic()):
            return
        method = log.error if record.levelno >= logging.ERROR else log.warning
        method("library-message", **fields)


def _record(event: MutableMapping[str, object]) -> Record:
    """Make a bounded entry of what the call gave."""
    level = str(event.pop("level", "info"))
    name = records.event_name(str(event.pop("event", "")))
    error = event.pop("exc_info", None)
    if error is True:
        error = sys.exc_info()[1]
    elif isinstance(error, tuple):
        error = error[1]
    lines: tuple[str, ...] = ()
    if isinstance(error, BaseException):
        event.setdefault("error", f"{type(error).__name__}: {error}")
        lines = _traceback(error)
    fields = {
        records.harmless(str(key), 64): records.plain(value)
        for key, value in list(event.items())[: records.MAX_ITEMS]
    }
    return Record(level, name, fields, lines)


def _traceback(error: BaseException) -> tuple[str, ...]:
    """The last lines of an exception's traceback: they say what happened."""
    whole = "".join(traceback.format_exception(error, limit=-_TRACEBACK_FRAMES))
    return tuple(records.harmless(line, 512) for line in whole.splitlines()[-records.MAX_ITEMS :])
