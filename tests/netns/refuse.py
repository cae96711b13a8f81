"""Runs a program from which the kernel keeps something, as the filter of a container or unit would.

    python -m tests.netns.refuse netlink|inotify COMMAND...

A seccomp filter answers the system call with an errno; everything else is allowed.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from typing import Final, NamedTuple

_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_SECCOMP: Final = 22
_FILTER: Final = 2  # SECCOMP_MODE_FILTER
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_NUMBER, _FIRST_ARGUMENT = 0, 16  # offsets in struct seccomp_data
_ANY: Final = None


class Refusal(NamedTuple):
    """A system call that fails."""

    numbers: dict[str, int]
    """Of the call, by machine."""
    argument: int | None
    """The first argument for which it fails; None: whatever it is."""
    errno: int


REFUSALS: Final = {
    "netlink": Refusal({"x86_64": 41, "aarch64": 198}, 16, errno.EAFNOSUPPORT),  # AF_NETLINK
    "inotify": Refusal({"x86_64": 294, "aarch64": 26}, _ANY, errno.EMFILE),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(refusal: Refusal) -> None:
    """Refuse this to the process and all that it becomes."""
    number = refusal.numbers[platform.machine()]
    # Code, jump if true, jump if false, operand.
    steps = [(_LOAD, 0, 0, _NUMBER)]
    if refusal.argument is None:
        steps += [(_EQUAL, 0, 1, number)]
    else:
        steps += [
            (_EQUAL, 0, 3, number),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_EQUAL, 0, 1, refusal.argument),
        ]
    steps += [(_RETURN, 0, 0, _ERRNO | refusal.errno), (_RETURN, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    program = _Program(len(steps), code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    install(REFUSALS[sys.argv[1]])
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - no shell is wanted
