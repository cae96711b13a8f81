"""The words of a claim as values: what is asked for, what is remembered, what has to be done.

Pure. ``vfio.claim`` decides with these, ``vfio.journal`` writes ``Durable`` to disk,
``vfio.worker`` performs effects and answers with results. What is durable is only what an agent
that starts after a crash cannot find out again: who asked for what, and what each function was.

Moments are seconds of the monotonic clock, which counts from boot and is the same for every
process: within one boot an agent may believe the moments that an earlier one wrote down, and
beyond it the journal is void.
"""

import enum
from typing import Final

import msgspec

from agent.host.model import Address, Function, HoldMode
from agent.vfio.problems import Problem


class Identity(msgspec.Struct, frozen=True):
    """Which card it is: another one in the same slot differs in at least one of these."""

    vendor: int
    device: int
    subsystem_vendor: int | None
    subsystem_device: int | None
    class_code: int
    inode: int
    """Of the sysfs folder; new after each plug, so it means nothing after a reboot."""

    @classmethod
    def of(cls, function: Function) -> "Identity":
        """The identity of a function as a look saw it."""
        return cls(
            function.vendor,
            function.device,
            function.subsystem_vendor,
            function.subsystem_device,
            function.class_code,
            function.inode,
        )


# --- what is asked for ----------------------------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True):
    """Hold these devices in a mode. Repeated with the same content it joins what is under way."""

    id: str
    mode: HoldMode
    devices: tuple[Address, ...]
    client: str = ""
    """Who asks, for people."""
    force: bool = False
    """Take even the display of the console, and a device whose users are not to be seen."""
    named: tuple[Address, ...] = ()
    """Other endpoints of the IOMMU group that may be moved too; companions need no naming."""
    driver: str | None = None
    """The VFIO driver to use instead of the best one for each device."""
    from_vfio: bool = False
    """``mode: drm`` may take a device off VFIO that somebody else put there."""
    lease: float | None = None
    """Seconds after which the claim is released unless it was prepared again."""
    owner_pid: int | None = None
    """The claim is released when this process has gone."""
    owner_started: int | None = None
    """When that process started, as ``/proc/<pid>/stat`` counts: a pid is given out again."""
    dry_run: bool = False
    """Run every check, change nothing, and answer with what would be moved. Of a driver that is not
    there only its module is looked for: whether that can be loaded, nobody knows before."""
    called: tuple[tuple[str, Address], ...] = ()
    """CDI names by which devices were asked for. An entry has gone, and its name may mean another
    one, as soon as its device is claimed; whoever repeats the order still means this one."""


class Release(msgspec.Struct, frozen=True):
    """Give the devices of a claim back. Success if there is no such claim."""

    id: str
    client: str = ""
    force: bool = False
    """Even while a process holds a node of the device open, or a claim needs its IOMMU group."""


class Recover(msgspec.Struct, frozen=True):
    """Bring a stranded device back to its recorded driver, or to the one the kernel prefers."""

    address: Address
    client: str = ""
    force: bool = False
    """Even while a process holds a node of it open, if driverctl or libvirt manages it, if somebody
    else has put it on another driver, and if this agent did not move it."""
    dry_run: bool = False
    """Run the checks, change nothing, and answer with what would be moved."""


Order = Prepare | Release | Recover


class Asked(msgspec.Struct, frozen=True):
    """An order, and the number under which whoever asked waits for the answer."""

    ticket: int
    order: Order

    @property
    def addresses(self) -> frozenset[Address]:
        """The functions that it names."""
        match self.order:
            case Prepare(devices=devices, named=named):
                return frozenset((*devices, *named))
            case Recover(address=address):
                return frozenset((address,))
            case Release():
                return frozenset()


# --- what is answered -----------------------------------------------------------------------------


class Move(msgspec.Struct, frozen=True):
    """What a claim does, or would do, with one function."""

    address: Address
    before: str | None
    """Its driver when the claim was made."""
    after: str | None
    """The driver that it is given; empty for the one that the kernel prefers."""
    companion: bool = False


class Answer(msgspec.Struct, frozen=True):
    """The answer to one order. It is a success if there is no problem."""

    ticket: int
    claim: str
    names: tuple[str, ...] = ()
    """The qualified CDI names that the claim holds, as ``intel.com/gpu-vfio=…``."""
    problems: tuple[Problem, ...] = ()
    """The first is why the order failed; the others were found beside it."""
    moves: tuple[Move, ...] = ()
    """Only of a dry run."""

    @property
    def ok(self) -> bool:
        """Whether what was ordered has been done."""
        return not self.problems


# --- what is remembered ---------------------------------------------------------------------------


class Step(enum.StrEnum):
    """One write to sysfs; in this order they move a function."""

    OVERRIDE = "override"
    """``<function>/driver_override``."""
    UNBIND = "unbind"
    """``<function>/driver/unbind``."""
    PROBE = "probe"
    """``/sys/bus/pci/drivers_probe``."""


class Origin(msgspec.Struct, frozen=True):
    """What a function was before anybody claimed it; the first origin wins until released."""

    address: Address
    identity: Identity
    driver: str | None
    """Its driver. It may have had none: whoever unbound it then finds it so again. That the driver
    had merely not come yet cannot be told from that afterwards, so an order waits until it can be
    told before (`agent.reconcile.early`)."""
    override: str | None
    """The ``driver_override`` that somebody else had set; None if there was none."""
    target: str | None
    """The driver that the claim wants; None where the claim does not move the function.
    ``ANY_DRIVER`` is whatever the kernel prefers and is not VFIO."""
    companion: bool = False
    """It moves along; nobody asked for it."""
    published: bool = False
    """It had an entry in a spec; the end of the claim waits until it has one again."""
    known: bool = True
    """False after the journal was lost: then ``driver`` and ``override`` say nothing, and it goes
    back to the driver that the kernel prefers."""


ANY_DRIVER: Final = ""

RECOVERY: Final = "recover:"
"""How the id of a recovery begins; nobody may ask for a claim with such an id."""


class Record(msgspec.Struct, frozen=True):
    """A claim in the journal, from before its first write until all of it is back."""

    request: Prepare
    origins: tuple[Origin, ...]
    """Of every function of the claim, in the order in which they were chosen."""
    done: bool = False
    """The claim is in force. If not, it was under way, there or back, and has to be undone."""
    names: tuple[str, ...] = ()
    """The qualified CDI names that were answered."""
    directory: str = ""
    """Where the specs of those names are."""
    since: float = 0.0
    """When it was asked for."""
    expires_at: float | None = None
    """When its lease ends."""
    recovery: bool = False
    """Not asked for as a claim: a stranded function is being brought back."""
    lost: str = ""
    """What somebody else has changed of what it holds: from then on nothing of it is touched, by
    this agent or the next one. Empty if nobody has."""

    @property
    def id(self) -> str:
        """The claim's id."""
        return self.request.id


class Stray(msgspec.Struct, frozen=True):
    """A function that is stranded: we moved it, it is not back, and no claim explains it."""

    origin: Origin
    problem: Problem
    driver: str | None = None
    """What it was on when it was found stranded."""
    lost: bool = False
    """Its claim was lost: it may be as somebody wants it, and nothing but `Recover` moves it."""


# --- what has to be done --------------------------------------------------------------------------


class Inspect(msgspec.Struct, frozen=True):
    """Read what can block or needs rights: overrides, holders of nodes, managers, drivers."""

    claim: str
    addresses: tuple[Address, ...]
    node_paths: tuple[str, ...]
    """The nodes of these functions that a look knows, the VFIO ones too."""
    drivers: tuple[str, ...] = ()
    """Drivers that must be available."""
    loads: bool = True
    """Their modules are loaded; if not, it is only looked whether there are such."""
    natives: tuple[tuple[Address, str], ...] = ()
    """Functions that somebody wants on a driver of the host, and on which: is it for them?"""
    used: tuple[Address, ...] = ()
    """Functions that have a driver, of all whose nodes is asked which process has one open."""
    alive: bool = False
    """Whether the functions still answer, too. To ask wakes one that sleeps."""
    serial: int = 0
    """Tells two that are otherwise the same apart."""


class Write(msgspec.Struct, frozen=True):
    """One write for one function, by a child that can be abandoned."""

    claim: str
    address: Address
    step: Step
    value: str
    """What is written: a driver's name or a newline, an address."""


class Child(msgspec.Struct, frozen=True):
    """A process that performs a write and did not end in time. Nobody writes to its function."""

    write: Write
    pid: int
    started: int | None = None
    """When it started, as ``/proc/<pid>/stat`` counts: a pid is given out again."""


class Watch(msgspec.Struct, frozen=True):
    """Tell when a child of an earlier agent has ended, by ``Written(child.write, gone=True)``."""

    child: Child


Effect = Inspect | Write | Watch


class Durable(msgspec.Struct, frozen=True):
    """All that the journal keeps. If it equals what is on disk, nothing need be written."""

    boot_id: str = ""
    """The boot in which it was written; in another one it is void."""
    claims: tuple[Record, ...] = ()
    strays: tuple[Stray, ...] = ()
    children: tuple[Child, ...] = ()


# --- what came of it ------------------------------------------------------------------------------


class Holder(msgspec.Struct, frozen=True):
    """A process that has a node open."""

    pid: int
    command: str
    path: str


class Inspection(msgspec.Struct, frozen=True):
    """The answer to ``Inspect``. What could not be read in time is unknown, and unknown refuses."""

    effect: Inspect
    overrides: tuple[tuple[Address, str | None], ...] = ()
    """Only of functions whose override could be read."""
    holders: tuple[Holder, ...] = ()
    holders_known: bool = False
    blind: tuple[str, ...] = ()
    """Why not all holders are known."""
    managed: tuple[tuple[Address, str], ...] = ()
    """Functions that driverctl or libvirt manages, and which of them."""
    unavailable: tuple[tuple[str, str], ...] = ()
    """Drivers that are not to be had, and why."""
    unsuitable: tuple[tuple[Address, str], ...] = ()
    """Of ``natives`` those whose driver announces other devices only."""
    dead: tuple[Address, ...] = ()
    """Functions that do not answer any more, if that was asked."""
    noiommu: bool = False
    """VFIO's ``enable_unsafe_noiommu_mode`` is on."""
    unasked: str = ""
    """Why some of it could not even be asked: there was no process to be had."""


class Written(msgspec.Struct, frozen=True):
    """The answer to ``Write``; after ``hung`` there comes a second one, with ``gone``."""

    effect: Write
    errno: int = 0
    """0 is success."""
    unmade: str = ""
    """Why it was not even begun: there was no process to be had. It says nothing of the function,
    and is no try."""
    hung: bool = False
    """Past its deadline, the child was killed and is not gone yet."""
    gone: bool = False
    """A child that had hung has ended after all; nothing is known of its effect but by looking."""
    pid: int = 0
    """Of the child that hangs."""
    started: int | None = None
    """When that child started."""


Result = Inspection | Written
