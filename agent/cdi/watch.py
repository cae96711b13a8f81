"""Watches the spec directories, so that what others do to them is found at once; only a hint.

What changed is not asked of the watch: the directories are read. Whatever it misses (a directory
that does not exist yet or lies on a file system without inotify, no watch left in the kernel), the
next regular look finds, so nothing here is an error that matters.

Our own writes are changes too. They are told like all others, with the time: who has read the
directories since then knows all about them.

Changes that do not end are told ever more rarely: two programs that write one file back and forth
must not turn into a loop that writes as fast as the disk can. The first of them is told at once.

The only importer of inotify_simple. What can block (a path on a file system that hangs) is done in
a thread; the descriptor is read in the loop.
"""

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, NoReturn, Protocol, cast

import inotify_simple
import structlog

from agent.cdi.directory import is_spec_name, printable

FIRST_REST: Final = 0.25
LONGEST_REST: Final = 60.0
"""Seconds between two hints while changes do not end; the first one grows to the second."""
FIRST_DELAY: Final = 1.0
LONGEST_DELAY: Final = 300.0
"""Seconds between two attempts to have an inotify descriptor."""

_FLAGS: Final = inotify_simple.flags
_MADE: Final = int(_FLAGS.CREATE)
"""Of a file its content is still to come, of a link nothing more comes."""
_LOST: Final = int(_FLAGS.DELETE_SELF | _FLAGS.MOVE_SELF | _FLAGS.UNMOUNT | _FLAGS.IGNORED)
_CHANGED: Final = int(
    _FLAGS.CLOSE_WRITE | _FLAGS.MOVED_FROM | _FLAGS.MOVED_TO | _FLAGS.DELETE | _FLAGS.ATTRIB
)
_MASK: Final = (_CHANGED | _MADE | _LOST | int(_FLAGS.ONLYDIR)) & ~int(
    _FLAGS.UNMOUNT | _FLAGS.IGNORED  # which come unasked
)
_OVERFLOWN: Final = -1
"""The watch of the event that tells that others were dropped."""
_NOT_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_HINTS: Final = {
    errno.EMFILE: "raise fs.inotify.max_user_instances, or end what has so many",
    errno.ENOSPC: "raise fs.inotify.max_user_watches",
}

_log = structlog.get_logger(__name__)


class _Event(Protocol):
    """One change, as inotify(7) describes it."""

    @property
    def wd(self) -> int: ...
    @property
    def mask(self) -> int: ...
    @property
    def name(self) -> str: ...


class _Inotify(Protocol):
    """The part of ``inotify_simple.INotify`` that is used."""

    def fileno(self) -> int: ...
    def add_watch(self, path: str, mask: int) -> int: ...
    def rm_watch(self, wd: int) -> None: ...
    def read(self, timeout: int) -> Sequence[_Event]: ...
    def close(self) -> None: ...


class _Timer(Protocol):
    """Something that will be called, unless it is cancelled."""

    def cancel(self) -> None: ...


_Later = Callable[[float, Callable[[], None]], _Timer]
_Identity = tuple[int, int]


class SpecWatch:
    """Tells that something may have changed in the spec directories.

    Made ready by `open`, driven by `run`, ended by cancelling that.

    Args:
        directories: What to watch; they need not exist.
        changed: Called in the loop's thread with the monotonic time; must not block or raise.
        sleep: Waits between two attempts to have a descriptor.
        later: Calls a function in so many seconds; the loop's ``call_later``.
    """

    def __init__(
        self,
        directories: Iterable[str],
        changed: Callable[[float], object],
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        later: _Later | None = None,
    ) -> None:
        self._wanted = tuple(directories)
        self._changed = changed
        self._sleep = sleep
        self._later = later
        self._inotify: _Inotify | None = None
        self._watches: dict[int, tuple[tuple[str, ...], _Identity]] = {}
        """The paths that lead to each directory that is watched, and which one it is."""
        self._stale = asyncio.Event()
        self._unheard: float | None = None
        """When the latest change was that nobody was told of."""
        self._rest = FIRST_REST
        self._resting: _Timer | None = None
        self._said: set[tuple[str, int | None]] = set()

    @property
    def watched(self) -> frozenset[str]:
        """The directories in which nothing goes unnoticed at present."""
        return frozenset(path for paths, _ in tuple(self._watches.values()) for path in paths)

    def follow(self, directories: Iterable[str]) -> None:
        """Watch these directories instead."""
        self._wanted = tuple(directories)
        self.renew()

    def renew(self) -> None:
        """See whether each path still leads to what is watched: cheap, for now and then."""
        self._stale.set()

    def open(self) -> None:
        """Watch from here on, for `run` to tell of it; before the first reading, in a thread.

        That it cannot be had is no error: `run` tries again.
        """
        try:
            # inotify_simple looks for libc the first time, which runs ldconfig.
            self._inotify = cast("_Inotify", inotify_simple.INotify(nonblocking=True))
        except OSError as error:
            self._complain("", error)
        else:
            self._renew(self._inotify, self._wanted)

    async def run(self) -> NoReturn:
        """Watch until cancelled; never returns."""
        delay = FIRST_DELAY
        late = self._inotify is None
        while (inotify := self._inotify) is None:
            await self._sleep(delay)
            delay = min(delay * 2, LONGEST_DELAY)
            await asyncio.to_thread(self.open)
        if late:
            self._notice(time.monotonic())
        loop = asyncio.get_running_loop()
        loop.add_reader(inotify.fileno(), self._readable, inotify)
        try:
            while True:
                await self._stale.wait()
                self._stale.clear()
                if await asyncio.to_thread(self._renew, inotify, self._wanted):
                    # What happened before it was watched, only reading can tell.
                    self._notice(time.monotonic())
        finally:
            loop.remove_reader(inotify.fileno())
            if self._resting is not None:
                self._resting.cancel()
            self.close()

    def close(self) -> None:
        """Watch nothing any more; `run` does so at its end."""
        self._watches.clear()
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def _renew(self, inotify: _Inotify, wanted: Sequence[str]) -> bool:
        """Bring the watches up to date, in a thread; whether something is watched anew."""
        for wd, (paths, known) in tuple(self._watches.items()):
            kept = tuple(path for path in paths if path in wanted and _identity(path) == known)
            if kept and kept != paths:
                self._watches[wd] = (kept, known)
            elif not kept:
                self._watches.pop(wd, None)
                with contextlib.suppress(OSError):
                    inotify.rm_watch(wd)
        anew = False
        for path in dict.fromkeys(wanted):
            if path in self.watched or (identity := _identity(path)) is None:
                continue
            try:
                wd = inotify.add_watch(path, _MASK)
            except OSError as error:
                self._complain(path, error)
                continue
            self._said = {said for said in self._said if said[0] != path}
            # Another path to the same directory has the same watch, and is watched by it.
            others = self._watches.get(wd)
            anew |= others is None
            self._watches[wd] = ((path,) if others is None else (*others[0], path), identity)
        return anew

    def _readable(self, inotify: _Inotify) -> None:
        """Take what there is; the loop calls again when there is more."""
        now = time.monotonic()
        for event in inotify.read(timeout=0):
            if event.wd not in self._watches and event.wd != _OVERFLOWN:
                # Of one that was given up; or of one so new that it will be told as watched anew.
                continue
            if event.mask & _LOST:
                self._watches.pop(event.wd, None)
                if not event.mask & int(_FLAGS.IGNORED):
                    with contextlib.suppress(OSError):
                        inotify.rm_watch(event.wd)
                self._stale.set()
                self._notice(now)
            elif event.name and not is_spec_name(event.name):
                continue  # nothing that a consumer loads, a temporary file of ours among it
            else:
                self._notice(now, at_once=event.mask != _MADE)

    def _notice(self, now: float, *, at_once: bool = True) -> None:
        """Tell of a change, or leave it for the end of the present rest."""
        self._unheard = now
        if self._resting is None:
            self._rest = FIRST_REST
            if at_once:
                self._tell()
            self._start_rest()

    def _tell(self) -> None:
        if self._unheard is not None:
            at, self._unheard = self._unheard, None
            self._changed(at)

    def _start_rest(self) -> None:
        later: _Later = self._later or asyncio.get_running_loop().call_later
        self._resting = later(self._rest, self._end_rest)

    def _end_rest(self) -> None:
        self._resting = None
        if self._unheard is not None:
            self._tell()
            self._rest = min(self._rest * 2, LONGEST_REST)
            self._start_rest()

    def _complain(self, path: str, error: OSError) -> None:
        """Say once what cannot be watched, unless it is just not there."""
        if error.errno in _NOT_THERE or (path, error.errno) in self._said:
            return
        self._said.add((path, error.errno))
        _log.warning(
            "spec-watch-unavailable",
            path=printable(path) or None,
            problem=f"changes by others are found by looking regularly only: {error.strerror}",
            hint=_HINTS.get(error.errno or 0),
        )


def _identity(path: str) -> _Identity | None:
    """Which directory a path leads to; None if there is none, or a link that nobody follows."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino
