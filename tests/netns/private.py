"""Namespaces for one thread of the tests: a network where its device events stay, and mounts.

``unshare(2)`` moves the calling thread alone, so a test needs no child process to hear real netlink
messages that nobody else hears, or to find another /dev and /run.
"""

import ctypes
import os
import stat
import subprocess
import threading
from collections.abc import Callable
from typing import Final, TypeVar

Result = TypeVar("Result")

_NEW_NETWORK: Final = 0x40000000  # CLONE_NEWNET
_NEW_MOUNTS: Final = 0x00020000  # CLONE_NEWNS; takes the thread's root and folder along
_libc: Final = ctypes.CDLL(None, use_errno=True)


def in_private_network(function: Callable[[], Result], *, udevd: bool = True) -> Result:
    """Run a function in a thread that has namespaces of its own, and hand on what it returns.

    Args:
        function: What to run.
        udevd: Whether /run/udev/control is there. /dev is no devtmpfs either way, so that alone
            decides whether libudev thinks that udevd runs.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _unshare()
            if udevd:
                start_udevd()
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again where the test can see it
            errors.append(error)

    thread = threading.Thread(target=run, name="private network")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _unshare() -> None:
    if _libc.unshare(_NEW_NETWORK | _NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _mount("--make-rprivate", "/")
    _mount("-t", "tmpfs", "tmpfs", "/dev")
    os.mknod("/dev/null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # ldconfig is run with it
    _mount("-t", "tmpfs", "tmpfs", "/run")


def start_udevd() -> None:
    """Make what libudev takes for a sign that udevd runs."""
    os.makedirs("/run/udev", exist_ok=True)
    with open("/run/udev/control", "x"):
        pass


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)
