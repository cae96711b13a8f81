"""The only reader of /sys: folders, links and small attributes, with one answer to each mishap.

What vanishes while it is read is *absent* (None, or an empty list), at any step: the kernel says
ENOENT or ENODEV. What cannot be read or is not what it must be is an ``UnreadableError`` with its
reason, and costs that one function. What this process lacks (descriptors, memory) is a
``LookError``: it says nothing about any device, and taking it for their absence would withdraw
them all.

Nothing here blocks. Only what no device lock can hold back may be asked for: links, listings, and
attributes that the kernel shows from its own memory. Never ``driver_override``, ``sriov_numvfs``
(a hung ``unbind`` or a long probe holds their lock), ``config`` (wakes a sleeping device) or the
``uevent`` of a PCI function (takes the lock in some kernels). The ``uevent`` of a class device (a
card, a VFIO group) is safe: no driver binds to it, so nothing holds its lock for long. Files are
opened O_NONBLOCK, so that even a FIFO in a file's place keeps nobody waiting.
"""

import errno
import os
import re
import stat
from collections.abc import Mapping
from types import TracebackType
from typing import Final, NamedTuple, NoReturn, Self

from agent.errors import LookError

MAX_ATTRIBUTE: Final = 4096
"""An attribute of sysfs is at most one page (``PAGE_SIZE`` in fs/sysfs/file.c)."""

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NONBLOCK
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_GONE: Final = frozenset({errno.ENOENT, errno.ENODEV})
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

_HEXADECIMAL: Final = re.compile(rb"0x([0-9a-fA-F]{1,8})\n?")
_DECIMAL: Final = re.compile(rb"(-?[0-9]{1,9})\n?")
_NUMBER: Final = re.compile(rb"([0-9]{1,4}):([0-9]{1,7})\n?")


class UnreadableError(Exception):
    """Something in sysfs is there and cannot be read, or makes no sense; the text says what."""


def printable(name: str) -> str:
    """A name from the file system, with whatever is no text in it spelt out."""
    return name if name.isascii() and name.isprintable() else ascii(name)[1:-1]


class Folder:
    """An open folder of sysfs. It stays the same one even if another takes its place.

    Args:
        path: Its path on disk; links in it are followed.

    Raises:
        FileNotFoundError: There is no such folder, or it vanished.
        UnreadableError: It cannot be opened.
        LookError: This process may open no more files.
    """

    __slots__ = ("_fd", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, _FOLDER)
        except OSError as error:
            if error.errno in _GONE:
                raise FileNotFoundError(path) from error
            _refuse(path, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def inode(self) -> int:
        """The inode of the folder: another device at the same address has another."""
        return os.fstat(self._fd).st_ino

    def names(self, below: str = "") -> list[str]:
        """The names in the folder, or in one below it; none if it vanished."""
        try:
            if not below:
                return os.listdir(self._fd)
            fd = os.open(below, _FOLDER, dir_fd=self._fd)
            try:
                return os.listdir(fd)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in _GONE:
                return []
            _refuse(below or self.path, error)

    def read(self, name: str) -> bytes | None:
        """What an attribute holds, or None if it is not there (any more)."""
        try:
            fd = os.open(name, _FILE, dir_fd=self._fd)
            try:
                content = os.read(fd, MAX_ATTRIBUTE + 1)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in _GONE:
                return None
            _refuse(name, error)
        if len(content) > MAX_ATTRIBUTE:
            raise UnreadableError(f"{printable(name)} is longer than a page")
        return content

    def link(self, name: str) -> str | None:
        """Where a link leads, as it is written; None if it is not there (any more)."""
        try:
            return os.readlink(name, dir_fd=self._fd)
        except OSError as error:
            if error.errno in _GONE:
                return None
            if error.errno == errno.EINVAL:
                raise UnreadableError(f"{printable(name)} is not a link") from error
            _refuse(name, error)

    def links(self) -> dict[str, str]:
        """Where each link in the folder leads, as it is written; what is none is left out."""
        found = {}
        for name in self.names():
            try:
                found[name] = os.readlink(name, dir_fd=self._fd)
            except OSError as error:
                if error.errno in _OURS:
                    _refuse(name, error)
        return found

    def leads_to(self, name: str) -> str | None:
        """The last part of where a link leads: the name of a driver, a group, a function."""
        target = self.link(name)
        return None if target is None else target.rpartition("/")[2]

    def hexadecimal(self, name: str) -> int | None:
        """A number such as ``0x8086``; None if the attribute is not there."""
        content = self.read(name)
        return None if content is None else int(_matched(_HEXADECIMAL, name, content)[1], 16)

    def decimal(self, name: str) -> int | None:
        """A number such as ``-1``; None if the attribute is not there."""
        content = self.read(name)
        return None if content is None else int(_matched(_DECIMAL, name, content)[1])

    def number(self, name: str) -> tuple[int, int] | None:
        """A device number such as ``226:0``; None if the attribute is not there."""
        content = self.read(name)
        if content is None:
            return None
        match = _matched(_NUMBER, name, content)
        return int(match[1]), int(match[2])

    def properties(self, name: str) -> Mapping[str, str]:
        """The lines ``KEY=value`` of a ``uevent`` file; what is no such line is left out."""
        lines = (self.read(name) or b"").decode(errors="surrogateescape").split("\n")
        pairs = (line.partition("=") for line in lines)
        return {key: value for key, equals, value in pairs if equals}


def names(path: str) -> list[str] | None:
    """The names in a folder by its path; None if there is no such folder.

    Raises:
        UnreadableError: It cannot be listed.
        LookError: This process may open no more files.
    """
    try:
        return os.listdir(path)
    except OSError as error:
        if error.errno in _GONE:
            return None
        _refuse(path, error)


def link(path: str) -> str | None:
    """Where a link leads, as it is written; None if there is none, or no link.

    Raises:
        UnreadableError: It cannot be read.
    """
    try:
        return os.readlink(path)
    except OSError as error:
        if error.errno in _GONE or error.errno == errno.EINVAL:
            return None
        _refuse(path, error)


def links(path: str) -> dict[str, str]:
    """Where each link in a folder leads, as it is written; none if there is no such folder.

    What is no link, or cannot be read, is left out.

    Raises:
        UnreadableError: The folder cannot be listed.
        LookError: This process may open no more files.
    """
    try:
        with Folder(path) as folder:
            return folder.links()
    except FileNotFoundError:
        return {}


class Mark(NamedTuple):
    """What tells whether a folder is the same and has the same entries as before."""

    device: int
    inode: int
    changed: int
    """When an entry last came, went or was replaced; nanoseconds since 1970."""


def mark(path: str) -> Mark | None:
    """The mark of a folder; None if it cannot be had."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return Mark(found.st_dev, found.st_ino, found.st_mtime_ns)


def text(path: str) -> str | None:
    """All of a file that may be long, as /proc/self/mountinfo; None if it cannot be had."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno in _OURS:
            _refuse(path, error)
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        with open(fd, encoding="utf-8", errors="surrogateescape", closefd=False) as file:
            return file.read()
    except OSError:
        return None
    finally:
        os.close(fd)


def exists(path: str) -> bool:
    """Whether anything is at that path; a loop of links is not."""
    try:
        os.stat(path)
    except OSError:
        return False
    return True


def _matched(pattern: re.Pattern[bytes], name: str, content: bytes) -> re.Match[bytes]:
    match = pattern.fullmatch(content)
    if match is None:
        shown = printable(content[:40].decode(errors="surrogateescape"))
        raise UnreadableError(f"{printable(name)} makes no sense: '{shown}'")
    return match


def _refuse(name: str, error: OSError) -> NoReturn:
    """Turn an error of the system that is not a vanishing into one of ours."""
    if error.errno in _OURS:
        raise LookError(
            f"cannot look at the host: {error.strerror}",
            hint="the limit of open files or of memory of this process is too low",
        ) from error
    raise UnreadableError(f"{printable(name)}: {error.strerror}") from error
