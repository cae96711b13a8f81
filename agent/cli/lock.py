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
def instance_lock(state_directory: Path) -> Iterator[None]:
    """Hold the lock.

    A state directory that cannot be written gives no lock, and is no reason not to serve: the
    caller goes on, and the log says so.

    Raises:
        AlreadyRunningError: Another instance holds it.
    """
    try:
        state_directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        fd = os.open(state_directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _log.warning(
            "no-lock",
            path=str(state_directory),
            problem=f"the state directory cannot be written ({error.strerror}): nothing keeps a "
            "second instance away, and the record of spec files is lost at the end",
        )
        yield
        return
    with open(fd, "rb"):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyRunningError(
                f"another cdi-agent holds {state_directory}/lock",
                hint="systemctl status cdi-agent; a second instance needs a state_directory of "
                "its own",
            ) from error
        yield
