"""How a simulated host has device nodes: real ones as root, files that stand for them otherwise.

This is the seam at which the rest of the agent notices a simulation. Without root there is no
mknod, so a plain file stands for a node, and what it holds is the node's number; `stat_plain` reads
that where ``os.stat`` would tell. With `make_real` nothing is different from a real host.
"""

import errno
import os
import re
import stat
from typing import Final, Protocol

from agent.host.devnodes import NodeStat
from agent.host.model import DeviceNumber


class MakeNode(Protocol):
    """Makes a character device; what was at the path is replaced in one step."""

    def __call__(self, path: str, number: DeviceNumber, mode: int) -> None:
        """Make it.

        Args:
            path: Where, on this machine.
            number: Its major and minor.
            mode: Its permissions, whatever the umask is.
        """


_PLAIN: Final = re.compile(rb"character device ([0-9]{1,4}):([0-9]{1,7})\n")


def make_real(path: str, number: DeviceNumber, mode: int) -> None:
    """Make a real node; needs CAP_MKNOD, and a file system that is not mounted ``nodev``."""
    temp = _beside(path)
    os.mknod(temp, stat.S_IFCHR, os.makedev(*number))
    os.chmod(temp, mode)
    os.rename(temp, path)


def make_plain(path: str, number: DeviceNumber, mode: int) -> None:
    """Make a file that stands for a node."""
    temp = _beside(path)
    with open(temp, "xb") as file:
        file.write(b"character device %d:%d\n" % number)
    os.chmod(temp, mode)
    os.rename(temp, path)


def _beside(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".#{name}")


def stat_plain(path: str, /) -> NodeStat | None:
    """Say what is at a path of a host whose nodes `make_plain` made (``devnodes.StatNode``)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return NodeStat(None)
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return NodeStat(None)
        match = _PLAIN.fullmatch(os.read(fd, 64))
    finally:
        os.close(fd)
    return NodeStat(None if match is None else DeviceNumber(int(match[1]), int(match[2])))
