"""What one call of ``advance`` works on: the claims as they change, and what it has decided so far.

It lives for one call. The rules of when nothing may be written are kept in one place, `may_write`:
every write of every claim goes through it.
"""

import enum
import math
from collections.abc import Iterable, Sequence

from msgspec import structs

from agent.host.model import Address, Function, HoldMode, NodeRole
from agent.vfio.group import members
from agent.vfio.model import (
    Answer,
    Child,
    Effect,
    Identity,
    Inspect,
    Move,
    Origin,
    Stray,
)
from agent.vfio.problems import Code, Problem, hint_for, problem
from agent.vfio.state import (
    Advance,
    Claim,
    Claims,
    Cooling,
    Ended,
    FunctionState,
    Outcome,
    Passed,
    Phase,
    Rules,
    Seen,
    Waiter,
    Wants,
)

_VFIO_NODES = (NodeRole.VFIO_GROUP, NodeRole.VFIO_CDEV)
_FREED_BY = {Code.CHANGED: Code.NOT_STRANDED, Code.DEAD: Code.DEAD}
"""Whose hint says what frees a function that is stranded for these reasons, if no plain recovery:
where somebody else has put it, it is left but by force."""


class Absence(enum.Enum):
    """Why a look does not have a function that a claim remembers."""

    GONE = enum.auto()
    """It was pulled out, or another card is in its slot."""
    UNREAD = enum.auto()
    """It is there, and could not be read this time."""


class Turn:
    """The claims in one call of ``advance``."""

    def __init__(self, claims: Claims, seen: Seen, rules: Rules, now: float) -> None:
        self.before = claims
        self.seen = seen
        self.rules = rules
        self.deadlines = rules.deadlines
        self.now = now
        self.live: dict[str, Claim] = dict(claims.live)
        self.strays: dict[Address, Stray] = dict(claims.strays)
        self.children: dict[Address, Child] = dict(claims.children)
        forgotten = now - rules.deadlines.cool_down_max
        self.cooling = {a: each for a, each in claims.cooling.items() if each.until > forgotten}
        self._serial = claims.serial
        self._effects: list[Effect] = []
        self._answers: list[Answer] = []
        self._passed: list[Passed] = []
        self._ended: list[Ended] = []
        self._wake_at = math.inf

    def result(self) -> Advance:
        """What was decided."""
        return Advance(
            claims=self.claims,
            effects=tuple(self._effects),
            answers=tuple(self._answers),
            passed=tuple(self._passed),
            ended=tuple(self._ended),
            wake_at=None if math.isinf(self._wake_at) else self._wake_at,
        )

    @property
    def claims(self) -> Claims:
        """The claims as they are now."""
        return Claims(
            boot_id=self.before.boot_id,
            live=self.live,
            strays=self.strays,
            children=self.children,
            cooling=self.cooling,
            serial=self._serial,
        )

    # --- looking ----------------------------------------------------------------------------------

    def find(self, origin: Origin) -> Function | Absence:
        """The function that a claim remembers, if the look has it."""
        function = self.seen.inventory.functions.get(origin.address)
        if function is not None and Identity.of(function) == origin.identity:
            return function
        if function is None and origin.address in self.seen.inventory.dropped:
            return Absence.UNREAD
        return Absence.GONE

    def is_published(self, address: Address) -> bool:
        """Whether a spec on disk has it, for certain."""
        return not self.seen.specs_problem and self.may_be_published(address)

    def may_be_published(self, address: Address) -> bool:
        """Whether a spec on disk has it, or had it when that was known last.

        Nobody else puts it there, so what had been withdrawn by then still is.
        """
        return bool(self.seen.published.get(address))

    def specs_unknown(self) -> Problem | None:
        """That it cannot be told what the specs have."""
        if not self.seen.specs_problem:
            return None
        what = f"it cannot be told what is published: {self.seen.specs_problem}"
        return problem(Code.SPECS_UNKNOWN, what)

    def is_journalled(self, claim: Claim) -> bool:
        """Whether the disk says what an agent that starts after a crash would have to undo."""
        saved = self.seen.saved
        return any(
            record.id == claim.id and record.origins == claim.record.origins and not record.done
            for record in saved.claims
        ) or set(claim.record.origins) <= {stray.origin for stray in saved.strays}

    def journal_failed(self, claim: Claim) -> bool:
        """Whether the journal had its chance to save the claim as it is, and could not.

        If it has not been saved yet, it is asked again in a while.
        """
        self.wake(self.now + self.deadlines.poll)
        before = self.before.live.get(claim.id)
        if before is None or not before.is_in_journal or before.record != claim.record:
            return False  # the problem is of an earlier pass
        return bool(self.seen.journal_problem)

    def may_write(self, claim: Claim, address: Address) -> bool:
        """Whether anything may be written to a function of a claim.

        Never while an earlier write hangs, never before the journal has its origin, and never
        while a spec still offers it.
        """
        return (
            address not in self.children
            and self.is_journalled(claim)
            and not self.may_be_published(address)
        )

    # --- acting -----------------------------------------------------------------------------------

    def do(self, effect: Effect) -> None:
        """Have something done."""
        self._effects.append(effect)

    def inspect(
        self,
        claim: Claim,
        addresses: Iterable[Address],
        *,
        used: Iterable[Address],
        drivers: Iterable[str],
        alive: bool = False,
    ) -> Claim:
        """Have something found out; whatever an earlier question brings is not listened to.

        Args:
            claim: On whose behalf.
            addresses: Functions whose override and manager are asked for.
            used: Functions of which is asked who uses them.
            drivers: Drivers that are needed.
            alive: Whether the functions still answer is asked too.
        """
        self._serial += 1
        used = tuple(used)
        wanted = tuple(dict.fromkeys(drivers))
        request = claim.record.request
        inspect = Inspect(
            claim=claim.id,
            # To read of a function that hangs would hang too.
            addresses=tuple(each for each in addresses if each not in self.children),
            node_paths=self.node_paths(used),
            used=tuple(each for each in used if self._is_bound(each)),
            drivers=wanted,
            natives=tuple(
                (state.address, request.driver)
                for state in claim.moving
                if request.mode is HoldMode.DRM and request.driver in wanted
            ),
            loads=not claim.dry_run,
            alive=alive,
            serial=self._serial,
        )
        self.do(inspect)
        return structs.replace(claim, inspecting=inspect, inspection=None)

    def _is_bound(self, address: Address) -> bool:
        function = self.seen.inventory.functions.get(address)
        return function is not None and function.driver is not None

    def node_paths(self, addresses: Iterable[Address]) -> tuple[str, ...]:
        """Every node by which a process may use these functions.

        Whoever uses one function of an IOMMU group on VFIO uses the group: it counts too.
        """
        paths: dict[str, None] = {}
        for address in addresses:
            function = self.seen.inventory.functions.get(address)
            if function is None:
                continue
            paths.update((node.path, None) for node in function.nodes)
            if function.on_vfio:
                for other in members(function, self.seen.inventory):
                    paths.update((node.path, None) for node in other.nodes_of(*_VFIO_NODES))
        return tuple(paths)

    def wake(self, at: float) -> None:
        """Call again at that time, unless it is called before."""
        self._wake_at = min(self._wake_at, at)

    # --- changing ---------------------------------------------------------------------------------

    def enter(self, claim: Claim, phase: Phase) -> Claim:
        """Let a claim wait for something else."""
        mode = claim.record.request.mode
        seconds = self.now - claim.since
        self._passed.append(Passed(claim.id, mode, claim.phase, phase, seconds))
        return structs.replace(
            claim,
            phase=phase,
            since=self.now,
            inspecting=None,
            inspection=None,
            inspect_at=-math.inf,
            looks=0,
            obstacle=None,
        )

    def overdue(self, claim: Claim, limit: float) -> bool:
        """Whether a phase has lasted too long; if not, it is looked at again when it has."""
        if self.now >= claim.since + limit:
            return True
        self.wake(claim.since + limit)
        return False

    def cool_down(self, address: Address, reason: str) -> None:
        """Leave a function alone for a while, longer each time that it fails in a row."""
        before = self.cooling.get(address)
        failures = 1 if before is None else before.failures + 1
        limits = self.deadlines
        longest = max(limits.cool_down, limits.cool_down_max)
        seconds = min(limits.cool_down * 2 ** min(failures - 1, 30), longest)
        self.cooling[address] = Cooling(self.now + seconds, reason, failures)

    def strand(self, state: FunctionState, why: Problem, *, lost: bool = False) -> None:
        """Remember that a function could not be brought back; the hint is what frees it.

        Args:
            lost: Somebody else may want it as it is; so it stays until it has been moved.
        """
        known = self.strays.get(state.address)
        lost = lost or (known is not None and known.lost)
        found = self.find(state.origin)
        driver = found.driver if isinstance(found, Function) else None
        code = _FREED_BY.get(why.code, Code.STRANDED)
        why = structs.replace(why, hint=hint_for(code, state.address))
        self.strays[state.address] = Stray(state.origin, why, driver, lost)

    # --- answering --------------------------------------------------------------------------------

    def answer(
        self,
        ticket: int,
        claim: str,
        *problems: Problem,
        names: tuple[str, ...] = (),
        moves: tuple[Move, ...] = (),
    ) -> None:
        """Answer one order."""
        self._answers.append(Answer(ticket, claim, names, problems, moves))

    def wait(self, claim: Claim, ticket: int, wants: Wants) -> Claim:
        """Let somebody wait for a claim."""
        return structs.replace(claim, waiters=(*claim.waiters, Waiter(ticket, wants, self.now)))

    def answer_held(self, claim: Claim) -> Claim:
        """Tell everybody who waits for it that a claim is in force."""
        for waiter in claim.waiters:
            self.answer(waiter.ticket, claim.id, names=claim.record.names)
        return structs.replace(claim, waiters=())

    def dismiss(self, claim: Claim, wants: Wants, why: Problem) -> Claim:
        """Tell those who wait for something of a claim that it will not be."""
        for waiter in claim.waiters:
            if waiter.wants is wants:
                self.answer(waiter.ticket, claim.id, why)
        others = tuple(waiter for waiter in claim.waiters if waiter.wants is not wants)
        return structs.replace(claim, waiters=others)

    def hinder(self, claim: Claim, obstacle: Problem) -> Claim:
        """Say what a claim waits for that may not end soon: nobody is kept waiting for it."""
        self._answer_all(claim, obstacle)
        return structs.replace(claim, obstacle=obstacle, waiters=())

    def end(self, claim: Claim, outcome: Outcome, problems: Sequence[Problem] = ()) -> None:
        """Let a claim be no more.

        Args:
            problems: What went wrong at its end; why it was undone stands in the claim.
        """
        self._answer_all(claim, *problems)
        self._ended.append(Ended(claim, outcome, tuple(problems)))

    def _answer_all(self, claim: Claim, *problems: Problem) -> None:
        reason = () if claim.problem is None else (claim.problem,)
        for waiter in claim.waiters:
            said = (*reason, *problems) if waiter.wants is Wants.HELD else problems
            self.answer(waiter.ticket, claim.id, *dict.fromkeys(said))
