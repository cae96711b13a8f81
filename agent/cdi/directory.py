"""A directory of spec files, held open: reading it, and replacing one file of it atomically.

Every step is relative to the descriptor of the directory, so nothing can lead out of it between
two steps: no file of ours is opened through a symbolic link, and what is opened for reading is
known to be a regular file of bounded size, because opening a FIFO blocks and opening a device may
do things.

The order that matters in ``Draft``: temporary file in the same directory (consumers watch the
directory for a rename *within* it; a rename from elsewhere also brings a foreign SELinux label),
mode, fsync, rename, fsync of the directory. Its name ends neither in ``.yaml`` nor in ``.json``:
CDI's library loads hidden files too, and goes by the ending alone.

Everything here blocks and belongs in a thread; errors are ``OSError``.
"""

import contextlib
import errno
import os
import re
import stat
from types import TracebackType
from typing import Final, Self

import msgspec

from agent.cdi.files import PREFIX
from agent.cdi.tree import MAX_SIZE
from agent.errors import StoreError
from agent.host.files import Step, no_step, read_with_status

SUFFIXES: Final = (".yaml", ".json")
"""The endings that consumers load."""

FILE_MODE: Final = 0o644
"""Rootless engines read specs too."""

_TEMP: Final = re.compile(rf"{re.escape(PREFIX)}\.[0-9a-f]{{16}}\.tmp")

_HINTS: Final = {
    errno.ENOSPC: "free some space there; it is tried again by itself",
    errno.EDQUOT: "free some space there; it is tried again by itself",
    errno.EROFS: "make the file system writable; a systemd unit needs ReadWritePaths= for it, and "
    "a restart if the directory was removed",
    errno.EACCES: "run as root, and look for a denial by SELinux or AppArmor",
    errno.EPERM: "run as root, and look for a denial by SELinux or AppArmor",
}


def fault(doing: str, path: str, error: OSError) -> StoreError:
    """The sentence for an error of the operating system: what could not be done, where, and why."""
    name = errno.errorcode.get(error.errno or 0, "unknown error")
    reason = (error.strerror or str(error)).strip()
    return StoreError(
        f"cannot {doing} {printable(path)}: {reason[:1].lower()}{reason[1:]} ({name})",
        hint=_HINTS.get(error.errno or 0),
    )


def printable(path: str) -> str:
    """A path on one line that can be printed and sent as UTF-8; a name may hold any byte but NUL.

    No two paths look the same. One without anything odd in it is as it is.
    """
    text = os.fsencode(path).replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_temp(name: str) -> bool:
    """Whether this is the name of a temporary file of ours."""
    return _TEMP.fullmatch(name) is not None


def is_spec_name(name: str) -> bool:
    """Whether consumers load a file of this name."""
    return name.endswith(SUFFIXES)


class Entry(msgspec.Struct, frozen=True):
    """A name in a directory that is of interest, with what ``lstat`` says of it."""

    name: str
    status: os.stat_result

    @property
    def is_directory(self) -> bool:
        """Consumers skip it, whatever its name."""
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def is_link(self) -> bool:
        """Consumers follow it; we never make one."""
        return stat.S_ISLNK(self.status.st_mode)

    @property
    def is_file(self) -> bool:
        """A regular file."""
        return stat.S_ISREG(self.status.st_mode)

    @property
    def mode(self) -> int:
        """The permission bits."""
        return stat.S_IMODE(self.status.st_mode)


class Directory:
    """A directory held open. Use it as a context manager, or close it."""

    __slots__ = ("fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def open(cls, path: str, *, follow: bool = False) -> Self:
        """Open it.

        Args:
            path: Absolute. Links on the way are followed, as ``/var/run`` is one to ``/run``.
            follow: Whether the directory itself may be a link. CDI's library does not follow it.

        Raises:
            OSError: ENOENT: it does not exist. ELOOP: it is a link.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            fd = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
        except NotADirectoryError:
            if not os.path.islink(path):
                raise
            reason = "it is a symbolic link, which CDI consumers do not follow"
            raise OSError(errno.ELOOP, reason, path) from None
        return cls(path, fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        os.close(self.fd)

    @property
    def identity(self) -> tuple[int, int]:
        """One directory has one, under whatever names and bind mounts it is reached."""
        status = os.fstat(self.fd)
        return (status.st_dev, status.st_ino)

    def in_place(self) -> bool:
        """Whether its path still leads to it: nobody removed or replaced it meanwhile."""
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.identity

    def sync(self) -> None:
        """Make the names in it durable."""
        os.fsync(self.fd)

    def names(self) -> list[str]:
        """What consumers would load, and our temporary files; what could be ours comes first."""
        with os.scandir(self.fd) as listing:
            names = [e.name for e in listing if is_spec_name(e.name) or is_temp(e.name)]
        return sorted(names, key=lambda name: (not name.startswith(PREFIX), name))

    def entry(self, name: str) -> Entry | None:
        """One name in it, or None if it is not there (any more)."""
        try:
            return Entry(name, os.stat(name, dir_fd=self.fd, follow_symlinks=False))
        except FileNotFoundError:
            return None

    def read(self, name: str, *, follow: bool = False) -> tuple[os.stat_result, bytes]:
        """Read a regular file of bounded size, without ever waiting for anybody.

        Args:
            name: The file's name.
            follow: Whether to read through a symbolic link, as consumers do.

        Raises:
            OSError: EFBIG: it is too large. EINVAL: it is no regular file.
        """
        return read_with_status(name, MAX_SIZE, dir_fd=self.fd, follow=follow)

    def unlink(self, name: str) -> None:
        """Delete a file; what is gone is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def rename(self, old: str, new: str) -> None:
        """Rename within the directory."""
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)


class Draft:
    """A file on its way: first a temporary file beside its target, then the target.

    Args:
        directory: Where it goes; closed by ``close``.
        name: The target.
        step: Told of each step.
    """

    def __init__(self, directory: Directory, name: str, step: Step = no_step) -> None:
        self.directory = directory
        self.name = name
        self.temp = f"{PREFIX}.{os.urandom(8).hex()}.tmp"
        self.placed = False
        """The target has the new content."""
        self._step = step

    def opener(self, name: str, flags: int) -> int:
        """For ``open``: make the temporary file here, and nowhere else."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, FILE_MODE, dir_fd=self.directory.fd)

    def commit(self, fd: int) -> None:
        """Put the temporary file, open as ``fd`` and written in full, in the target's place."""
        self._step("written")
        os.fchmod(fd, FILE_MODE)
        self._step("mode")
        os.fsync(fd)
        self._step("synced")
        self.directory.rename(self.temp, self.name)
        self.placed = True
        self._step("renamed")
        self.directory.sync()
        self._step("directory-synced")
        require_in_place(self.directory)

    def close(self) -> None:
        """Let go of the directory; a temporary file that was not put in place is deleted."""
        try:
            if not self.placed:
                os.unlink(self.temp, dir_fd=self.directory.fd)
        except OSError:
            pass  # never made, or cannot be deleted now: the next reading lists it as a leftover
        finally:
            self.directory.close()


def require_in_place(directory: Directory) -> None:
    """Refuse what was done to a directory that is no longer the one that consumers read.

    Raises:
        OSError: ESTALE.
    """
    if not directory.in_place():
        reason = "the directory was replaced meanwhile"
        raise OSError(errno.ESTALE, reason, directory.path)
