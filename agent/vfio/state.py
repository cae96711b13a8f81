"""Claims as values: what is remembered of each from one pass to the next. Pure.

A claim is its ``Record``, which is what the journal keeps of it, and beside that only what may be
forgotten: which phase it is in, what it waits for, who waits for it. A phase says what the claim
waits for; `PHASES` says so to people, and ``claim.py`` has the table of what follows.
"""

import enum
import math
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from agent.host.model import Address, Function, Hold, HoldMode, Inventory
from agent.vfio.model import (
    Answer,
    Child,
    Durable,
    Effect,
    Inspect,
    Inspection,
    Origin,
    Record,
    Stray,
    Write,
)
from agent.vfio.moves import Override
from agent.vfio.problems import Code, Problem


class Phase(enum.StrEnum):
    """What a claim waits for. The names are those of the log, the metrics and ``claims``."""

    CHECKING = "checking"
    WITHDRAWING = "withdrawing"
    GUARDING = "guarding"
    MOVING = "moving"
    PUBLISHING = "publishing"
    CONFIRMING = "confirming"
    DONE = "done"
    LOST = "lost"
    RELEASING = "releasing"
    FREEING = "freeing"
    RETURNING = "returning"
    VERIFYING = "verifying"
    RESTORING = "restoring"
    FORGETTING = "forgetting"


PHASES: Final[Mapping[Phase, str]] = {
    Phase.CHECKING: "it is being found out whether the devices may be taken",
    Phase.WITHDRAWING: "the journal and the specs have to say that the devices are taken",
    Phase.GUARDING: "it is looked once more whether somebody uses the devices",
    Phase.MOVING: "the devices are being given to the driver that the claim wants",
    Phase.PUBLISHING: "the devices are on their driver; their entries have to be published",
    Phase.CONFIRMING: "all is in place; the journal has to say so",
    Phase.DONE: "the claim is in force",
    Phase.LOST: "somebody else changed what the claim holds; nothing of it is touched any more",
    Phase.RELEASING: "the journal and the specs have to say that the devices are given back",
    Phase.FREEING: "nobody may use the devices any more",
    Phase.RETURNING: "the devices are being given back to the driver that they came from",
    Phase.VERIFYING: "it is read back that nothing of the claim is left on the devices",
    Phase.RESTORING: "the devices are back; their entries have to be published again",
    Phase.FORGETTING: "it is found out what is left on the devices of a lost claim",
}

THERE: Final = frozenset(
    {
        Phase.CHECKING,
        Phase.WITHDRAWING,
        Phase.GUARDING,
        Phase.MOVING,
        Phase.PUBLISHING,
        Phase.CONFIRMING,
    }
)
"""On the way to be in force."""

_IN_FORCE: Final = frozenset({Phase.PUBLISHING, Phase.CONFIRMING, Phase.DONE, Phase.LOST})
_HOLDING_NOTHING: Final = frozenset({Phase.CHECKING, Phase.RESTORING, Phase.FORGETTING})
_NOT_IN_JOURNAL: Final = frozenset({Phase.CHECKING, Phase.RESTORING})


class Deadlines(msgspec.Struct, frozen=True):
    """How long each step of a claim may take, and how often it is tried. Seconds."""

    withdraw: float = 10.0
    """Until the entries have to be off the disk."""
    move: float = 30.0
    """Until every function has to be on its driver; a write that hangs is not counted."""
    publish: float = 10.0
    """From then until the entries have to be on the disk."""
    restore: float = 5.0
    """How long the end of a claim waits until the devices are published as they were."""
    tries: int = 3
    """How often the same write is made at most, there or back."""
    retry: float = 0.25
    """Before the second try; doubles with each further one."""
    poll: float = 2.0
    """Between looks at what ends without an event: a process that holds a node open."""
    cool_down: float = 10.0
    """How long a function that could not be moved is left alone; doubles each time in a row."""
    cool_down_max: float = 3600.0
    """The longest that it is; after as long again without a failure none is remembered."""


class Rules(msgspec.Struct, frozen=True):
    """What the configuration decides about claims."""

    deadlines: Deadlines = Deadlines()
    ignore: frozenset[str] = frozenset()
    """Addresses and ids (``8086:e212``) that are kept out of everything, in lower case."""
    paused: bool = False
    """No device is taken or given back; what is on its way goes on."""
    allow_no_iommu: bool = False
    directory: str = ""
    """Where the specs are written."""
    vfio_driver: Callable[[Function], str] = lambda _function: "vfio-pci"
    """The VFIO driver for a function: by setting, by profile, or the best alias there is."""
    unsuitable: Callable[[Function, str], str | None] = lambda _function, _driver: None
    """Why a driver cannot be the VFIO driver of a function: what it is; None if it may be."""
    hides_users: Callable[[Function], bool] = lambda _function: False
    """Whether a function's driver has users that are not to be seen by its nodes."""
    makes_nodes: Callable[[Function], bool] = lambda _function: False
    """Whether a function's driver is known to be used by its nodes: without them, by nobody."""
    unpublishable: Callable[[Function, HoldMode], str | None] = lambda _function, _mode: None
    """Why a function could not be published in a mode; None if it could."""


class Seen(msgspec.Struct, frozen=True):
    """What is true now, as far as claims depend on it."""

    inventory: Inventory
    """Read after everything that ``results`` tell of had happened."""
    published: Mapping[Address, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """The qualified CDI names of each function that are on disk; as it was known last, while
    ``specs_problem`` says that it is not known now."""
    specs_problem: str = ""
    """Why it cannot be told what is on disk. Then nothing counts as published, and nothing as
    withdrawn that was published: who asks is refused, and what waits for it has its deadline."""
    specs_unread: bool = False
    """It could not be told since the start either."""
    saved: Durable = msgspec.field(default_factory=Durable)
    """What the journal has on disk, fsynced."""
    journal_problem: str = ""
    """Why the latest ``Durable`` could not be saved; empty if it could."""
    withheld: Mapping[Address, str] = msgspec.field(default_factory=dict)
    """Why a function is not published."""
    obstructed: Callable[[Function, HoldMode], str | None] = lambda _function, _mode: None
    """Which file on disk would keep a function from being published in a mode; None if none."""
    owners_gone: frozenset[str] = frozenset()
    """Claims whose owner's process has ended."""


class FunctionState(msgspec.Struct, frozen=True):
    """What is known of a function of a live claim beside the look."""

    origin: Origin
    override: Override | None = None
    """None if it is not known."""
    writing: Write | None = None
    """The write that is on its way."""
    written: tuple[Write, ...] = ()
    """Every write that was made in this direction."""
    retry_at: float = -math.inf
    """When the latest write may be made again."""
    errno: int = 0
    """What the latest write answered."""
    unmade: str = ""
    """Why the latest write was not even begun; empty if it was."""
    asked: bool = False
    """Since it was last unbound it was asked who uses it: nobody, or it does not matter."""
    unbinds: bool = False
    """It is unbound as soon as that was asked."""
    problem: Problem | None = None
    """Why it is not moved any further in this direction."""
    gone: bool = False
    """The card was pulled out, so there is nothing left to be held."""
    leaves_at: float | None = None
    """A companion without driver may be about to be pulled out; until when that is waited for."""

    @property
    def address(self) -> Address:
        """Its address."""
        return self.origin.address

    @property
    def moves(self) -> bool:
        """Whether the claim moves it, rather than finding it where it should be."""
        return self.origin.target is not None


class Wants(enum.StrEnum):
    """What somebody who asked waits for."""

    HELD = "held"
    """The claim is in force."""
    GONE = "gone"
    """The claim has ended and its devices are back."""


class Waiter(msgspec.Struct, frozen=True):
    """Somebody who waits for an answer."""

    ticket: int
    wants: Wants
    since: float
    """When it asked."""


class Claim(msgspec.Struct, frozen=True):
    """A claim from the moment at which it passed its first checks until it has ended."""

    record: Record
    functions: tuple[FunctionState, ...]
    phase: Phase = Phase.CHECKING
    since: float = 0.0
    """When this phase began."""
    waiters: tuple[Waiter, ...] = ()
    inspecting: Inspect | None = None
    """What is being found out."""
    inspection: Inspection | None = None
    """What was found out in this phase."""
    inspect_at: float = -math.inf
    """When it may be found out again."""
    looks: int = 0
    """How often it was found out in this phase, in vain."""
    problem: Problem | None = None
    """Why it is being undone, or is lost; None if it is not, or was released."""
    obstacle: Problem | None = None
    """What it waits for that only somebody else can end."""
    lacking: tuple[tuple[str, str], ...] = ()
    """Drivers to which its functions go back and that are not to be had, and why."""
    confirmed: Record | None = None
    """How the journal had it when it was last in force and seen there."""
    touched: bool = False
    """Something may have been written to its functions."""
    force: bool = False
    """It is given back even while it is in use."""
    findings: tuple[Problem, ...] = ()
    """Of a dry run: what the look alone has against it."""
    dry_run: bool = False

    @property
    def id(self) -> str:
        """The claim's id."""
        return self.record.id

    @property
    def standing(self) -> str:
        """How far it is, in a word for people, to whom `done` would mean that it is over."""
        return "in force" if self.phase is Phase.DONE else self.phase.value

    @property
    def moving(self) -> tuple[FunctionState, ...]:
        """The functions that the claim moves."""
        return tuple(state for state in self.functions if state.moves)

    @property
    def is_in_journal(self) -> bool:
        """Whether the journal has to have it."""
        return self.phase not in _NOT_IN_JOURNAL and not self.dry_run


class Cooling(msgspec.Struct, frozen=True):
    """A function could not be moved, and is left alone: drivers break of being moved on and on."""

    until: float
    reason: str
    """What went wrong."""
    failures: int = 1
    """How often in a row; a claim in force ends the row, and so does time."""


class Claims(msgspec.Struct, frozen=True):
    """All that is known of claims between two passes."""

    boot_id: str = ""
    live: Mapping[str, Claim] = msgspec.field(default_factory=dict)
    """By id, in the order in which they were asked for."""
    strays: Mapping[Address, Stray] = msgspec.field(default_factory=dict)
    children: Mapping[Address, Child] = msgspec.field(default_factory=dict)
    """Writes that hang: their functions are *hung*, and nothing is written to them."""
    cooling: Mapping[Address, Cooling] = msgspec.field(default_factory=dict)
    """Functions that are left alone for a while, or were not long ago."""
    serial: int = 0
    """Of the latest ``Inspect``."""

    @property
    def durable(self) -> Durable:
        """What has to be on disk before the effects that come with these claims start."""
        return Durable(
            boot_id=self.boot_id,
            claims=tuple(claim.record for claim in self.live.values() if claim.is_in_journal),
            strays=tuple(self.strays.values()),
            children=tuple(self.children.values()),
        )

    def claim_of(self, address: Address) -> Claim | None:
        """The claim that a function belongs to."""
        for claim in self.live.values():
            if not claim.dry_run and any(address == each.address for each in claim.functions):
                return claim
        return None


class Outcome(enum.StrEnum):
    """How a claim ended."""

    RELEASED = "released"
    """All of it is back, because somebody wanted it to be."""
    UNDONE = "undone"
    """It failed after it had begun, and all of it is back."""
    REFUSED = "refused"
    """Nothing had been touched."""
    STRANDED = "stranded"
    """Some of it could not be brought back."""
    FORGOTTEN = "forgotten"
    """It was lost, and nothing of it was touched."""


class Ended(msgspec.Struct, frozen=True):
    """A claim that is no more, for log and metrics."""

    claim: Claim
    outcome: Outcome
    problems: tuple[Problem, ...] = ()


class Passed(msgspec.Struct, frozen=True):
    """A phase that a claim has left, for log and metrics."""

    claim: str
    mode: HoldMode
    phase: Phase
    next: Phase
    seconds: float
    """How long it lasted."""


class Advance(msgspec.Struct, frozen=True):
    """What one call of ``advance`` decided."""

    claims: Claims
    effects: tuple[Effect, ...] = ()
    answers: tuple[Answer, ...] = ()
    passed: tuple[Passed, ...] = ()
    """In order; the last phase of a claim that ended is not among them."""
    ended: tuple[Ended, ...] = ()
    wake_at: float | None = None
    """When to call again even if nothing happens."""


def holds(claims: Claims) -> tuple[Hold, ...]:
    """What claims mean for publishing, at most one hold for a function.

    A function that is not moved stays published, in the mode in which it was found. Of a claim
    that is nearly at its end the devices are free, so that they are published as they were.
    """
    dead = tuple(
        Hold(address, "", HoldMode.DRM, settled=False, dead=True)
        for address, stray in claims.strays.items()
        if stray.problem.code is Code.DEAD
    )
    return dead + tuple(
        Hold(
            address=state.address,
            claim=claim.id,
            mode=claim.record.request.mode,
            settled=claim.phase in _IN_FORCE or not state.moves,
        )
        for claim in claims.live.values()
        if not claim.dry_run and claim.phase not in _HOLDING_NOTHING
        for state in claim.functions
        if not state.gone
    )


def explain(claim: Claim) -> str:
    """Say in one sentence what a claim waits for, and why it is on its way back if it is."""
    parts = [PHASES[claim.phase]]
    if claim.obstacle is not None:
        parts.append(f"but {claim.obstacle.sentence}")
    if claim.problem is not None:
        parts.append(f"because of this: {claim.problem.sentence}")
    return "; ".join(parts)
