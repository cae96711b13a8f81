"""The child that touches a device: one system call that may never return, and nothing else.

A program of its own (`agent.vfio.children.program`) with the standard library alone, and little of
that: a few milliseconds. No descriptor of the agent leads to it but its output.

=========================  =======================================================================
``write LOCK PATH TEXT``   write TEXT to PATH, in one ``write(2)``
``read PATH``              read an attribute of at most one page
``head PATH``              read the first 64 bytes of it
``wait LOCK``              end when nobody holds LOCK any more
=========================  =======================================================================

The first line of its output is ``begun``, as soon as nothing but that one call is left to do. The
next is an errno, 0 for success; after it a ``read`` gives what it read.

**The lock.** A write may hang in the kernel beyond the life of the agent that wanted it, and until
it returns no other may be made to that function. So it is the child that holds the function's lock
file: the kernel lets go of it when this process is gone and not before, whoever has killed it.

**The agent's death.** A write that has not begun by then is not begun: what the next agent sees
must not change behind its back. ``begun`` fails, since nobody is there to read it.
"""

import errno
import fcntl
import os
import sys
from _collections_abc import Callable  # `collections`, which is more than `os` needs, costs 2 ms

HEAD = 64
"""The part of the configuration space that every function has, and whoever asks may read."""

PAGE = 4096
"""An attribute of sysfs is at most one page."""

BEGUN = b"begun\n"

Write = Callable[[str, bytes], int]


def write_once(path: str, content: bytes) -> int:
    """Write in one call to what is there already; 0 or an errno."""
    try:
        # Neither created nor cut off: in sysfs that would mean nothing, and elsewhere do harm.
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)
        return 0 if os.write(fd, content) == len(content) else errno.EIO
    except OSError as error:
        return error.errno or errno.EIO


def main(arguments: list[str], write: Write = write_once) -> None:
    """Do what the arguments say.

    Args:
        arguments: A verb and what it needs.
        write: Writes bytes to a path and returns 0 or an errno; a simulated host has its own.
    """
    os.closerange(3, 1 << 20)
    try:
        match arguments:
            case ["write", lock, path, text]:
                _hold(lock)
                _say(BEGUN)
                # The kernel never hears of a write of nothing; what clears an override is "\n".
                code = write(path, os.fsencode(text)) if text else errno.EINVAL
                _say(b"%d\n" % code)
            case [("read" | "head") as verb, path]:
                _say(BEGUN)
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
                _say(b"0\n" + os.read(fd, PAGE if verb == "read" else HEAD))
            case ["wait", lock]:
                _hold(lock)
                _say(b"0\n")
            case _:
                raise SystemExit("the head of writer.py says what it takes")
    except BrokenPipeError:
        raise SystemExit("the agent has died") from None
    except OSError as error:
        _say(b"%d\n" % (error.errno or errno.EIO))


def parse(output: bytes) -> tuple[int, bytes] | None:
    """Read the output of such a child that has ended: errno and content; None if it is none.

    An interpreter that is not quite well says so before anything else; that is passed over.
    """
    before, begun, after = output.partition(BEGUN)
    code, newline, content = (after if begun else before).partition(b"\n")
    return (int(code), content) if newline and code.isdigit() else None


def _hold(lock: str) -> None:
    """Wait for a lock, and keep it as long as this process lives."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)


def _say(what: bytes) -> None:
    os.write(1, what)


if __name__ == "__main__":
    main(sys.argv[1:])
