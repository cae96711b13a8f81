"""Ends the agent at a chosen moment, or lets what it does there fail.

A moment is something that the agent does to the world: it opens a file for writing, renames or
deletes one, starts a child, answers an order. Python tells of each by an audit event *before* it
happens, wherever in the agent that is, so no step is left out because nobody thought of it. Between
two moments nothing changes that a `kill -9` could leave behind, so to be killed at each moment is
to be killed everywhere.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

ANSWER: Final = "answer"
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Orders(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the trap is to do."""

    at: int = 0
    """At which moment from now; 0 is never."""
    errno: int | None = None
    """What it fails with; None kills the agent."""
    times: int = 1
    """How many moments fail, one after another."""
    only: str = ""
    """Only what has this in its path or in its name counts as a moment."""


class Trap:
    """The trap of one agent process; it cannot be taken away again.

    Args:
        folders: Where files count: the spec directory and the state directory.
    """

    def __init__(self, folders: tuple[str, ...]) -> None:
        self._folders = tuple(f"{folder}/" for folder in folders)
        self._orders = Orders()
        self._seen = 0
        self._last = ""
        sys.addaudithook(self._hear)

    def set(self, orders: Orders) -> None:
        """Count from here."""
        self._orders, self._seen, self._last = orders, 0, ""

    def moment(self, what: str) -> None:
        """Something is about to happen.

        Raises:
            OSError: It is to fail.
        """
        orders = self._orders
        if not orders.at or orders.only not in what or what == self._last:
            return
        self._last = what
        self._seen += 1
        if not orders.at <= self._seen < orders.at + orders.times:
            return
        os.write(2, f"trap: moment {self._seen}: {what}\n".encode())
        if orders.errno is None:
            os.kill(os.getpid(), signal.SIGKILL)
        self._last = ""
        raise OSError(orders.errno, os.strerror(orders.errno or 0))

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        describe = _EVENTS.get(event)
        if describe is not None and self._orders.at:
            what = describe(self, *arguments)
            if what:
                self.moment(what)

    def _open(self, path: object, _mode: object, flags: object) -> str:
        writing = isinstance(flags, int) and flags & _WRITING
        return f"open {path}" if writing and self._counts(path) else ""

    def _rename(self, old: object, new: object, *_fds: object) -> str:
        return f"rename {old} {new}" if self._counts(new) else ""

    def _remove(self, path: object, folder: object) -> str:
        if not self._counts(path) or not isinstance(path, str):
            return ""
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path, dir_fd=folder if isinstance(folder, int) and folder >= 0 else None)
            return f"remove {path}"
        return ""

    def _spawn(self, _path: object, argv: object, _environment: object) -> str:
        return f"spawn {argv}"

    def _counts(self, path: object) -> bool:
        """Whether a file is the agent's own; a name without a folder is one in an open folder."""
        return isinstance(path, str) and (
            not path.startswith("/") or path.startswith(self._folders)
        )


_EVENTS: Final[Mapping[str, Callable[..., str]]] = {
    "open": Trap._open,  # noqa: SLF001 - its own
    "os.rename": Trap._rename,  # noqa: SLF001
    "os.remove": Trap._remove,  # noqa: SLF001
    "os.posix_spawn": Trap._spawn,  # noqa: SLF001
}
