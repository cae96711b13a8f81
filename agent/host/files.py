"""Files that outlive this process, or that others may have touched.

``read_regular`` reads what may be anything by now: opening a FIFO would block and opening a device
may do things, so what is opened is known to be a regular file of bounded size. ``StateFile`` keeps
a small file of ours: whoever reads it, and whenever the machine dies, finds the old content or the
new one. The order that matters: temporary file beside it, fsync, rename, fsync of the directory.

Everything here blocks and belongs in a thread; errors are ``OSError``.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import Final

Step = Callable[[str], None]
"""Told the name of each step once it is done; a test stops the process there."""

OUT_OF_MEANS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What says nothing about a file: this process, or the host, lacks something at the moment."""


def no_step(_name: str) -> None:
    """What production does between two steps: nothing."""


def read_regular(path: str, limit: int) -> bytes:
    """Read a regular file of bounded size, without ever waiting for anybody.

    Args:
        path: Links in it are followed.
        limit: Bytes.

    Raises:
        OSError: EFBIG: it is too large. EINVAL: it is no regular file. EAGAIN: it would have to be
            waited for.
        ValueError: No file can have that path.
    """
    return read_with_status(path, limit)[1]


def read_with_status(
    path: str, limit: int, *, dir_fd: int | None = None, follow: bool = True
) -> tuple[os.stat_result, bytes]:
    """Read as ``read_regular`` does, and tell what it was that was read.

    Args:
        path: From ``dir_fd``, if one is given.
        limit: Bytes.
        dir_fd: A directory that is open.
        follow: Whether what is at the path may itself be a link.

    Raises:
        OSError: EFBIG: it is too large. EINVAL: it is no regular file.
        ValueError: No file can have that path.
    """
    _require_regular(os.stat(path, dir_fd=dir_fd, follow_symlinks=follow), limit)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, flags if follow else flags | os.O_NOFOLLOW, dir_fd=dir_fd)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        _require_regular(status, limit)
        # It may be growing: one byte more than allowed tells.
        content: bytes | None = file.read(limit + 1)
    if content is None:  # procfs and tracefs have regular files that one waits at, such as kmsg
        raise OSError(errno.EAGAIN, "it has nothing to read at the moment")
    if len(content) > limit:
        raise _too_large(limit)
    return status, content


class StateFile:
    """A small file in the state directory.

    Args:
        directory: The state directory; made when it is first needed.
        name: The file's name.
        limit: Bytes that it may have.
        step: Told of each step.
    """

    def __init__(self, directory: str, name: str, *, limit: int, step: Step = no_step) -> None:
        self.path: Final = f"{directory}/{name}"
        self.aside: Final = f"{self.path}.set-aside"
        """Where a file that could not be used is kept for people; there is one at most."""
        self._directory: Final = directory
        self._temp: Final = f"{self.path}.tmp"
        self._limit: Final = limit
        self._step: Final = step

    def read(self) -> bytes:
        """What it holds.

        Raises:
            FileNotFoundError: There is none.
            OSError: It cannot be read.
        """
        return read_regular(self.path, self._limit)

    def set_aside(self) -> None:
        """Put it where nothing overwrites it but the next such.

        Raises:
            OSError: That could not be done, or not durably.
        """
        os.rename(self.path, self.aside)
        self._sync()

    def replace(self, content: bytes) -> None:
        """Give it another content, durably.

        Raises:
            OSError: That could not be done; the old content is there, or the new one is and may
                not outlive the machine. Doing it again settles that.
        """
        make_directories(self._directory)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temp)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(self._temp, flags, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                self._step("written")
                os.fsync(file.fileno())
            self._step("synced")
            os.rename(self._temp, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self._temp)
            raise
        self._step("renamed")
        self._sync()
        self._step("directory-synced")

    def _sync(self) -> None:
        """Make the names in the directory durable."""
        _sync(self._directory)


def make_directories(path: str, mode: int = 0o755) -> None:
    """Make a directory and what is missing above it, under any umask; what is there stays."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        make_directories(parent, mode)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    os.chmod(path, mode)
    _sync(parent)


def _sync(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _require_regular(status: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if status.st_size > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> OSError:
    allowed = f"{limit // 2**20} MiB" if limit >= 2**20 else f"{limit} bytes"
    return OSError(errno.EFBIG, f"it is larger than {allowed}")
