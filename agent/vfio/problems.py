"""What can be wrong with a claim, what to do about it, and whether time alone can help.

Pure. A sentence is made where the problem is found, since it names what was found; its hint and
whether trying again can help depend on the code alone and stand here, in one table.
"""

import enum
from collections.abc import Mapping
from typing import Final

import msgspec

from agent.host.model import Address


class Code(enum.StrEnum):
    """What can be wrong: stable words for programs, metrics and the log.

    The guide's table is made of the members' docstrings.
    """

    UNKNOWN_DEVICE = "unknown-device"
    """No such function, or no profile publishes it in that mode, or it has gone."""
    IGNORED = "ignored"
    """The configuration keeps it out of everything."""
    CLAIMED = "claimed"
    """Another claim has the function, or this id with other content."""
    STRANDED = "stranded"
    """It could not be brought back; ``recover`` tries again."""
    NOT_STRANDED = "not-stranded"
    """There is no record that this agent moved it."""
    HUNG = "hung"
    """A write to it has not returned."""
    IOMMU_OFF = "iommu-off"
    """It is in no IOMMU group: the IOMMU is off, or not for this device."""
    NO_IOMMU_MODE = "no-iommu-mode"
    """VFIO would take it without an IOMMU, which protects nobody."""
    GROUP_NOT_VIABLE = "group-not-viable"
    """Another endpoint of its IOMMU group is on a driver of the host."""
    NOT_IN_GROUP = "not-in-group"
    """A function was named that is in no IOMMU group of the claim."""
    DRIVER_UNAVAILABLE = "driver-unavailable"
    """The driver is neither there nor could it be loaded."""
    DRIVER_UNSUITABLE = "driver-unsuitable"
    """The driver is none of VFIO's, or for other devices; or the device would keep another one."""
    ACTIVE_VFS = "active-vfs"
    """It has VFs, which would vanish."""
    IN_USE = "in-use"
    """A process holds a node of it open."""
    HOLDERS_UNKNOWN = "holders-unknown"
    """Nobody can say whether a process holds a node open."""
    USERS_UNSEEN = "users-unseen"
    """Its driver hides who uses it, or makes no node by which that could be seen."""
    OVERRIDE_UNKNOWN = "override-unknown"
    """Its ``driver_override`` could not be read, so it could not be restored."""
    BOOT_DISPLAY = "boot-display"
    """It shows the console."""
    MANAGED = "managed"
    """driverctl or libvirt moves it."""
    FOREIGN_BINDING = "foreign-binding"
    """Somebody else bound it to VFIO."""
    COOLING_DOWN = "cooling-down"
    """It could not be moved a moment ago."""
    PAUSED = "paused"
    """An administrator lets no claim begin to move a device."""
    JOURNAL_FAILED = "journal-failed"
    """What must be on disk before a device is touched could not be written, or not be believed."""
    WITHDRAW_FAILED = "withdraw-failed"
    """Its entry could not be taken out of its spec."""
    SPECS_UNKNOWN = "specs-unknown"
    """The spec directory cannot be read: nobody knows what is published."""
    HOST_UNKNOWN = "host-unknown"
    """The host cannot be looked at."""
    CHANGED = "changed"
    """Somebody else changed it while it was being moved."""
    MOVE_FAILED = "move-failed"
    """The kernel refused a write, or the write had no effect."""
    NO_MEANS = "no-means"
    """There was no process to be had for what has to be done."""
    DEAD = "dead"
    """It does not answer any more: its configuration space reads ones."""
    NOT_PUBLISHED = "not-published"
    """Its entry did not come though it is on its driver, or cannot come for another's file."""
    LOST = "lost"
    """Somebody else changed what the claim holds."""
    ENDING = "ending"
    """A claim with this id is being released or undone."""
    CANCELLED = "cancelled"
    """The claim was released before it was done."""
    INTERRUPTED = "interrupted"
    """The agent was stopped before the claim was done."""
    INVALID = "invalid"
    """The order itself makes no sense."""


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong, for programs and for people."""

    code: Code
    sentence: str
    hint: str = ""
    """What the reader can do about it; empty if nothing."""
    retryable: bool = False
    """Whether the same order can succeed later without a change by a person."""


HINTS: Final[Mapping[Code, str]] = {
    Code.UNKNOWN_DEVICE: "`cdi-agent scan` lists what this host has and what is published",
    Code.IGNORED: "take it out of `ignore` in the configuration",
    Code.CLAIMED: "`cdi-agent claims` shows who holds what; `cdi-agent release ID` gives it back",
    Code.STRANDED: "`cdi-agent recover ADDRESS` brings it back",
    Code.NOT_STRANDED: "`cdi-agent recover ADDRESS --force` moves it all the same",
    Code.HUNG: "the kernel's log may say what it waits for; only its return or a reboot ends it",
    Code.IOMMU_OFF: "turn on VT-d or AMD-Vi in the firmware, and on the kernel's command line",
    Code.NO_IOMMU_MODE: "turn on the IOMMU, or allow this by `vfio.allow_no_iommu`",
    Code.GROUP_NOT_VIABLE: "name these functions too if they may be taken from the host",
    Code.NOT_IN_GROUP: "name only functions of the IOMMU groups of the claimed devices",
    Code.DRIVER_UNAVAILABLE: "load its module, or name another driver",
    Code.DRIVER_UNSUITABLE: "name no driver, and the best one that there is for it is taken",
    Code.ACTIVE_VFS: "claim a VF, or write 0 to its sriov_numvfs first",
    Code.IN_USE: "stop that process",
    Code.HOLDERS_UNKNOWN: "the agent needs CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH to see it",
    Code.USERS_UNSEEN: "stop what uses it, then unload its driver, or `--force` takes it as it is",
    Code.OVERRIDE_UNKNOWN: "a driver may hold the device's lock; the kernel's log may say why",
    Code.BOOT_DISPLAY: "`--force` takes it all the same, and the console goes dark",
    Code.MANAGED: "let one program move it: take it out of the other's hands first",
    Code.FOREIGN_BINDING: "`--from-vfio` allows to take it, if whoever bound it agrees",
    Code.COOLING_DOWN: "see to what failed, and ask again then",
    Code.PAUSED: "`cdi-agent resume` lets devices be moved again",
    Code.JOURNAL_FAILED: "see to the space and the permissions of the state directory",
    Code.WITHDRAW_FAILED: "see to the space and the permissions of the spec directory",
    Code.SPECS_UNKNOWN: "see to the spec directory: it has to be one, and readable for the agent",
    Code.HOST_UNKNOWN: "the log says what the agent lacks",
    Code.CHANGED: "let one program move it",
    Code.MOVE_FAILED: "the kernel's log may say why",
    Code.NO_MEANS: "see to the memory, the processes and the open files of this host",
    Code.DEAD: "reset it or power-cycle the host, then `cdi-agent recover ADDRESS`",
    Code.NOT_PUBLISHED: "`cdi-agent explain ADDRESS` says what it waits for",
    Code.LOST: "release the claim: then it is said what is left of it and what brings that back",
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
        Code.HOST_UNKNOWN,
        Code.HUNG,
        Code.INTERRUPTED,
        Code.IN_USE,
        Code.JOURNAL_FAILED,
        Code.NO_MEANS,
        Code.PAUSED,
        Code.SPECS_UNKNOWN,
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
