"""The lock that lets one instance write: the service, or a command that does the same once.

It is held on a file in the state directory, and on one in every directory for specs that this
process writes to or looks into: what it finds there with our first line, and did not write, it
takes for left over by an earlier instance, and deletes. One that a reload has left is held to the
end, as it may have files of ours in it for a while.

**The file.** Who may read a file or a directory may lock it, so it is one that nobody else may even
open; a directory that everybody may read would let everybody keep the agent from starting. Readers
of specs pass it over by its name. The service leaves it where it is: to delete it could block, and
the end must not. What is at its place and is no such file is left alone, and said: nothing then
keeps a second instance away.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog

from agent.errors import AlreadyRunningError
from agent.host.files import make_directories

_log = structlog.get_logger()

SPECS_LOCK: Final = ".cdi-agent.lock"
"""In a directory for specs."""

STATE_LOCK: Final = "lock"
"""In the state directory."""

_NOT_OURS_TO_WRITE: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


class InstanceLock:
    """What is held, each until ``close``.

    Args:
        tidy: Whether no file is left in the directories for specs.
    """

    def __init__(self, *, tidy: bool = False) -> None:
        self._tidy = tidy
        self._held: dict[tuple[int, int], contextlib.ExitStack] = {}
        """What lets go of each, by which file it is."""

    def take_specs(self, directories: Sequence[str | Path]) -> None:
        """Hold directories for specs, beside those that are held already.

        Args:
            directories: The one that is written to first; if it is missing it is made, lest two
                instances make it.

        Raises:
            AlreadyRunningError: Another instance holds one of them.
        """
        # Those that are there go first: who is refused has made none.
        for number, directory in sorted(
            enumerate(directories), key=lambda each: not os.path.isdir(each[1])
        ):
            key = "cdi.other_directories" if number else "cdi.directory"
            # What cannot be made or opened is no place to write to: that is told where it is tried.
            if number == 0:
                with contextlib.suppress(OSError):
                    make_directories(str(directory))
            with contextlib.ExitStack() as stack:
                try:
                    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                except OSError:
                    continue
                stack.callback(os.close, folder)
                try:
                    self._take(folder, SPECS_LOCK, str(directory), key, stack)
                except OSError as error:
                    if error.errno not in _NOT_OURS_TO_WRITE:
                        _warn(f"{directory}/{SPECS_LOCK}", f"it cannot be locked: {_why(error)}")

    def take_state(self, directory: Path) -> None:
        """Hold the state directory.

        Raises:
            AlreadyRunningError: Another instance holds it.
            OSError: It cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        with contextlib.ExitStack() as stack:
            folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, folder)
            path = f"{directory}/{STATE_LOCK}"
            self._take(folder, STATE_LOCK, path, "state_directory", stack)

    def close(self) -> None:
        """Let go of all of it."""
        while self._held:
            self._held.popitem()[1].close()

    def _take(
        self, folder: int, name: str, what: str, key: str, stack: contextlib.ExitStack
    ) -> None:
        """Lock a file, and keep what closes it.

        Args:
            what: What is held by it, for people.
            key: What another instance would have to have another one of.
            stack: Closes the folder; it is emptied if the lock is kept.

        Raises:
            AlreadyRunningError: Another instance holds it.
            OSError: There is no such file, nor can one be made.
        """
        while True:
            fd = _open(folder, name)
            identity = _identity(os.fstat(fd))
            if identity in self._held:  # under another name
                os.close(fd)
                return
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_in_place = _is_in_place(folder, name, identity)
            except BlockingIOError as error:
                os.close(fd)
                raise AlreadyRunningError(
                    f"another cdi-agent holds {what}",
                    hint=f"systemctl status cdi-agent; a second instance needs another {key}",
                ) from error
            except OSError:
                os.close(fd)
                raise
            if is_in_place:
                break
            os.close(fd)  # whoever had it has deleted it at its end: it holds nothing any more
        stack.callback(os.close, fd)
        if self._tidy and name == SPECS_LOCK:
            stack.callback(_delete, folder, name, identity)
        self._held[identity] = stack.pop_all()


def _open(folder: int, name: str) -> int:
    """Open a file that nobody else may open.

    Raises:
        OSError: It cannot be made, or what is there is something else.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=folder)
    status = os.fstat(fd)
    what = ""
    if not stat.S_ISREG(status.st_mode):
        what = "it is no regular file"
    elif status.st_uid != os.geteuid():
        what = f"it belongs to user {status.st_uid}"
    if what:
        os.close(fd)
        raise OSError(errno.EINVAL, what)
    os.fchmod(fd, 0o600)
    return fd


def _is_in_place(folder: int, name: str, identity: tuple[int, int]) -> bool:
    try:
        return _identity(os.stat(name, dir_fd=folder, follow_symlinks=False)) == identity
    except FileNotFoundError:
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _delete(folder: int, name: str, identity: tuple[int, int]) -> None:
    """Delete a file that is locked, unless another one is at its place."""
    with contextlib.suppress(OSError):
        if _is_in_place(folder, name, identity):
            os.unlink(name, dir_fd=folder)


def _why(error: OSError) -> str:
    return "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror or str(error)


def _warn(path: str, problem: str) -> None:
    _log.warning("no-lock", path=path, problem=f"{problem}: nothing keeps a second instance away")


@contextlib.contextmanager
def instance_lock(
    state_directory: str | Path, directories: Sequence[str | Path], *, tidy: bool = False
) -> Iterator[InstanceLock]:
    """Hold the locks of the state directory and of the directories for specs.

    Two instances with one state directory would spoil each other's memory, and two with one
    directory for specs each other's files. A state directory that cannot be written gives no lock,
    and is no reason not to serve: the caller goes on, and the log says so. Who is refused leaves no
    directory behind that was not there.

    Args:
        state_directory: Made if it is missing.
        directories: For specs; the one that is written to first.
        tidy: Whether no file is left in them at the end.

    Raises:
        AlreadyRunningError: Another instance holds one of them.
    """
    with contextlib.closing(InstanceLock(tidy=tidy)) as lock:
        if is_there := os.path.isdir(state_directory):
            _take_state(lock, Path(state_directory))
        lock.take_specs(directories)
        if not is_there:
            _take_state(lock, Path(state_directory))
        yield lock


def _take_state(lock: InstanceLock, directory: Path) -> None:
    try:
        lock.take_state(directory)
    except OSError as error:
        _warn(
            str(directory),
            f"the state directory cannot be written ({_why(error)}), and the record of spec "
            "files is lost at the end",
        )
