"""The child that writes to a simulated host: ``vfio/writer.py``, but for who answers the write.

Run as a script, ``python -I -S writer.py SOCKET VERB …``; what follows the socket is what
``vfio/writer.py`` takes, and what comes out is what that says.
"""

import _socket  # `socket`, which dresses it up, and `array` cost as much as all the rest
import errno
import os
import sys

FIRST_DESCRIPTOR = 3
LAST_DESCRIPTOR = 6
"""Nobody opens more: the lock, and what Python may have open besides."""


def write_through(path: str, content: bytes) -> int:
    """Let the simulated kernel do a write; 0 or an errno, and no return while it does not answer.

    The descriptors of this process go along, so that a lock outlives it as long as the write does.
    """
    held = [fd for fd in range(FIRST_DESCRIPTOR, LAST_DESCRIPTOR) if _is_open(fd)]
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    connection.connect(SOCKET)
    ints = b"".join(fd.to_bytes(4, sys.byteorder) for fd in held)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, ints)] if held else []
    connection.sendmsg([os.fsencode(path) + b"\0" + content], rights)
    answer = connection.recv(16)
    connection.close()
    return int(answer) if answer else errno.EIO


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    _, SOCKET, *arguments = sys.argv
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "vfio"))
    # By the path above, which mypy does not follow: there is no package without site-packages.
    import arguments as told  # type: ignore[import-not-found]
    import writer  # type: ignore[import-not-found]

    writer.main(told.given(arguments), write_through)
