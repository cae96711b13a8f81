"""The lock that lets one instance write: the service, or a command that does the same once."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import structlog

from agent.errors import AlreadyRunningError

_log = structlog.get_logger()


@contextlib.contextmanager
def instance_lock(state_directory: Path, specs: Path) -> Iterator[None]:
    """Hold the lock of the state directory, and the directory for specs itself.

    Two instances with one state directory would spoil each other's memory, and two with one
    directory for specs each other's files. A state directory that cannot be written gives no lock,
    and is no reason not to serve: the caller goes on, and the log says so.

    Raises:
        AlreadyRunningError: Another instance holds one of them.
    """
    with contextlib.ExitStack() as held:
        try:
            state_directory.mkdir(parents=True, exist_ok=True, mode=0o755)
            fd = os.open(state_directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            _log.warning(
                "no-lock",
                path=str(state_directory),
                problem=f"the state directory cannot be written ({error.strerror}): nothing keeps "
                "a second instance away, and the record of spec files is lost at the end",
            )
        else:
            held.callback(os.close, fd)
            _take(fd, f"{state_directory}/lock", "state_directory")
        # One that is missing is made later, and then nobody else has it yet.
        with contextlib.suppress(OSError):
            fd = os.open(specs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, fd)
            _take(fd, str(specs), "cdi.directory")
        yield


def _take(fd: int, path: str, key: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise AlreadyRunningError(
            f"another cdi-agent holds {path}",
            hint=f"systemctl status cdi-agent; a second instance needs a {key} of its own",
        ) from error
