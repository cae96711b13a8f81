"""The lock that lets one instance write: the service, or a command that does the same once.

It is held on a file in the state directory, and on every directory for specs that this process
writes to or looks into: what it finds there with our first line, and did not write, it takes for
left over by an earlier instance, and deletes. One that a reload has left is held to the end, as it
may have files of ours in it for a while.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog

from agent.errors import AlreadyRunningError
from agent.host.files import make_directories

_log = structlog.get_logger()


class InstanceLock:
    """What is held, each until ``close``."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], int] = {}
        """Descriptors, by what each is open on."""

    def take_specs(self, directories: Sequence[str | Path]) -> None:
        """Hold directories for specs, beside those that are held already.

        Args:
            directories: The one that is written to first; if it is missing it is made, lest two
                instances make it.

        Raises:
            AlreadyRunningError: Another instance holds one of them.
        """
        # What cannot be made or opened is no place to write to: that is told where it is tried.
        with contextlib.suppress(OSError):
            make_directories(str(directories[0]))
        for number, directory in enumerate(directories):
            key = "cdi.other_directories" if number else "cdi.directory"
            with contextlib.suppress(OSError):
                fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                self._take(fd, str(directory), key)

    def take_state(self, directory: Path) -> None:
        """Hold the state directory.

        Raises:
            AlreadyRunningError: Another instance holds it.
            OSError: It cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._take(fd, f"{directory}/lock", "state_directory")

    def close(self) -> None:
        """Let go of all of it."""
        while self._held:
            os.close(self._held.popitem()[1])

    def _take(self, fd: int, path: str, key: str) -> None:
        status = os.fstat(fd)
        identity = (status.st_dev, status.st_ino)
        if identity in self._held:  # under another name
            os.close(fd)
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise AlreadyRunningError(
                f"another cdi-agent holds {path}",
                hint=f"systemctl status cdi-agent; a second instance needs another {key}",
            ) from error
        except OSError:
            os.close(fd)
            raise
        self._held[identity] = fd


@contextlib.contextmanager
def instance_lock(
    state_directory: str | Path, directories: Sequence[str | Path]
) -> Iterator[InstanceLock]:
    """Hold the lock of the state directory, and the directories for specs themselves.

    Two instances with one state directory would spoil each other's memory, and two with one
    directory for specs each other's files. A state directory that cannot be written gives no lock,
    and is no reason not to serve: the caller goes on, and the log says so.

    Args:
        state_directory: Made if it is missing.
        directories: For specs; the one that is written to first.

    Raises:
        AlreadyRunningError: Another instance holds one of them.
    """
    with contextlib.closing(InstanceLock()) as lock:
        try:
            lock.take_state(Path(state_directory))
        except OSError as error:
            _log.warning(
                "no-lock",
                path=str(state_directory),
                problem=f"the state directory cannot be written ({error.strerror}): nothing keeps "
                "a second instance away, and the record of spec files is lost at the end",
            )
        lock.take_specs(directories)
        yield lock
