"""Where log entries go: standard error and the journal's socket, neither of which may block.

A log that waits for its reader holds up the loop, and with it the next withdrawal. So every write
here is non-blocking, and what cannot be written now is dropped and counted.
"""

import contextlib
import errno
import os
import select
import socket
import stat
from typing import Final

JOURNAL: Final = "/run/systemd/journal/socket"


class Lines:
    """Whole lines to a descriptor, without waiting for its reader.

    Making the descriptor itself non-blocking would change it for everyone who shares it (the shell
    of a terminal, to begin with), so each kind of file gets what it needs: a pipe or a terminal is
    opened a second time, a socket is told with each call, a regular file does not block.

    Args:
        fd: Open for writing; it is neither changed nor closed.
    """

    def __init__(self, fd: int) -> None:
        self.dropped = 0
        """Entries that could not be written."""
        self._fd = fd
        self._own: int | None = None
        self._socket: socket.socket | None = None
        self._rest = b""
        """The end of a line that was written in part."""
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            return  # closed: everything is dropped
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(fd))
        elif stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            # Refused where the terminal belongs to another user (su) or there is no /proc; then
            # `_write` asks before it writes.
            with contextlib.suppress(OSError):
                self._own = os.open(f"/proc/self/fd/{fd}", flags)

    def write(self, lines: bytes) -> bool:
        """Write, or drop and count; never blocks and never raises. Says whether it was written."""
        if self._rest and not self._flush():
            self.dropped += 1
            return False
        self._rest = lines
        if not self._flush() and self._rest == lines:
            self._rest = b""
            self.dropped += 1
            return False
        return True

    def close(self) -> None:
        """Close what was opened here."""
        if self._own is not None:
            os.close(self._own)
            self._own = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _flush(self) -> bool:
        """Write what is left of a line; says whether nothing is."""
        try:
            while self._rest:
                self._rest = self._rest[self._write(self._rest) :]
        except OSError:
            return False
        return True

    def _write(self, data: bytes) -> int:
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if self._own is not None:
            return os.write(self._own, data)
        writable = select.poll()
        writable.register(self._fd, select.POLLOUT)
        if not writable.poll(0):
            raise BlockingIOError
        # One page always fits into a pipe that reports room.
        return os.write(self._fd, data[: select.PIPE_BUF])


class Journal:
    """Datagrams to the journal's socket.

    Args:
        path: The socket.
    """

    def __init__(self, path: str = JOURNAL) -> None:
        self.dropped = 0
        """Entries for which the journal had no room."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def write(self, entry: bytes) -> bool:
        """Send an entry; never blocks and never raises.

        Returns:
            False if there is no journal (any more): the caller may write elsewhere. What a journal
            has no room for is dropped and counted.
        """
        try:
            # Not connected: a journal that was started anew is found again.
            self._socket.sendto(entry, self._path)
        except OSError as error:
            if error.errno in {errno.EAGAIN, errno.ENOBUFS, errno.EMSGSIZE}:
                self.dropped += 1
                return True
            return False
        return True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def is_reachable(path: str) -> bool:
    """Whether a datagram socket takes messages at that path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == 0


def leads_to_journal(fd: int, journal_stream: str | None) -> bool:
    """Whether a descriptor is the journal's stream: systemd names its device and inode.

    Args:
        fd: Usually standard error.
        journal_stream: The variable ``JOURNAL_STREAM``, which children inherit even where
            somebody redirected their standard error.
    """
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return journal_stream == f"{status.st_dev}:{status.st_ino}"
