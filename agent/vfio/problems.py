"""What goes with each code of a problem: what to do about it, and whether time alone can help.

Pure. A sentence is made where the problem is found, since it names what was found; its hint and
whether trying again can help depend on the code alone and stand here, in one table.
"""

from collections.abc import Mapping
from typing import Final

from agent.host.model import Address
from agent.vfio.model import Code, Problem

HINTS: Final[Mapping[Code, str]] = {
    Code.UNKNOWN_DEVICE: "`cdi-agent scan` lists what this host has and what is published",
    Code.IGNORED: "take it out of `ignore` in the configuration",
    Code.CLAIMED: "`cdi-agent claims` shows who holds what; `cdi-agent release` gives it back",
    Code.STRANDED: "`cdi-agent recover ADDRESS` brings it back",
    Code.NOT_STRANDED: "`cdi-agent recover --force` moves it all the same",
    Code.HUNG: "the kernel's log may say what it waits for; only its return or a reboot ends it",
    Code.IOMMU_OFF: "turn on VT-d or AMD-Vi in the firmware, and on the kernel's command line",
    Code.NO_IOMMU_MODE: "turn on the IOMMU, or allow this by `vfio.allow_no_iommu`",
    Code.GROUP_NOT_VIABLE: "name these functions too if they may be taken from the host",
    Code.NOT_IN_GROUP: "name only functions of the IOMMU groups of the claimed devices",
    Code.DRIVER_UNAVAILABLE: "load its module, or name another driver",
    Code.ACTIVE_VFS: "claim a VF, or write 0 to its sriov_numvfs first",
    Code.IN_USE: "stop that process",
    Code.HOLDERS_UNKNOWN: "the agent needs CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH to see it",
    Code.OVERRIDE_UNKNOWN: "a driver may hold the device's lock; the kernel's log may say why",
    Code.BOOT_DISPLAY: "`--force` takes it all the same, and the console goes dark",
    Code.MANAGED: "let one program move it: take it out of the other's hands first",
    Code.FOREIGN_BINDING: "`--from-vfio` allows to take it, if whoever bound it agrees",
    Code.COOLING_DOWN: "see to what failed, and ask again then",
    Code.PAUSED: "`cdi-agent resume` lets devices be moved again",
    Code.JOURNAL_FAILED: "see to the space and the permissions of the state directory",
    Code.WITHDRAW_FAILED: "see to the space and the permissions of the spec directory",
    Code.CHANGED: "let one program move it",
    Code.MOVE_FAILED: "the kernel's log may say why",
    Code.DEAD: "reset it or power-cycle the host, then `cdi-agent recover ADDRESS`",
    Code.NOT_PUBLISHED: "`cdi-agent explain ADDRESS` says what it waits for",
    Code.LOST: "release the claim; `cdi-agent recover ADDRESS` brings back what is left of it",
    Code.ENDING: "ask again when it has gone",
    Code.CANCELLED: "",
    Code.INTERRUPTED: "",
    Code.INVALID: "",
}

RETRYABLE: Final = frozenset(
    {
        Code.CHANGED,
        Code.CLAIMED,
        Code.COOLING_DOWN,
        Code.ENDING,
        Code.HUNG,
        Code.INTERRUPTED,
        Code.IN_USE,
        Code.JOURNAL_FAILED,
        Code.PAUSED,
        Code.WITHDRAW_FAILED,
    }
)


def problem(code: Code, sentence: str, *, address: Address | None = None) -> Problem:
    """Make a problem of what was found.

    Args:
        sentence: What is wrong, as one sentence without a full stop at its end.
        address: The function that a command in the hint is to be given.
    """
    return Problem(code, sentence, hint_for(code, address), code in RETRYABLE)


def hint_for(code: Code, address: Address | None = None) -> str:
    """Say what to do about a problem of a function."""
    return HINTS[code] if address is None else HINTS[code].replace("ADDRESS", address)
