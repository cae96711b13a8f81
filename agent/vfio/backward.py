"""The way back: what a claim does in each phase from its failure or release until its end. Pure.

Undoing, releasing, going on after a crash and recovering a stranded function are one way. It
never stops at the first error: each function goes as far back as it can, and what cannot be
brought back is remembered as stranded. What is in the way is said to whoever waits, and the claim
goes on by itself when it has gone.
"""

from collections.abc import Iterator, Sequence

from msgspec import structs

from agent.host.model import Address, Function, is_vfio_driver
from agent.vfio.checks import find_dependents, find_holders, find_no_means, managed
from agent.vfio.drive import (
    drive,
    hung,
    is_busy,
    name_missing_drivers,
    no_means,
    rests,
    set_asked,
)
from agent.vfio.model import Inspection, Move
from agent.vfio.moves import Override, goal_back, is_back
from agent.vfio.problems import Code, Problem, problem
from agent.vfio.state import Claim, FunctionState, Outcome, Phase
from agent.vfio.turn import Absence, Turn

_BREAKS_DRIVERS = frozenset({Code.CHANGED, Code.HUNG, Code.MOVE_FAILED, Code.NOT_PUBLISHED})
"""Failures after which a function is left alone for a while: drivers break of being moved on."""


def turn_back(turn: Turn, claim: Claim, why: Problem | None) -> Claim:
    """Let a claim give back what it has.

    Args:
        why: Why it is undone; None if it is released.
    """
    functions = tuple(
        structs.replace(
            state, written=(), problem=None, errno=0, unmade="", asked=False, unbinds=False
        )
        for state in claim.functions
    )
    record = structs.replace(claim.record, done=False)
    claim = structs.replace(claim, problem=why, functions=functions, record=record)
    return turn.enter(claim, Phase.RELEASING if claim.touched else Phase.RESTORING)


def releasing(turn: Turn, claim: Claim) -> Claim | None:
    """The journal has to say that the claim is not in force, and the specs must not have it.

    If it cannot be told what the specs have, what they had when that was known last stays where it
    is, and what had been withdrawn by then goes back. After a start nothing is known: but no entry
    can be true but that of a claim which was not in force. That is waited for a while, and then
    weighs less than a device without driver.
    """
    if not turn.is_journalled(claim):
        if turn.journal_failed(claim):
            what = f"the journal could not be written: {turn.seen.journal_problem}"
            return _hinder(turn, claim, problem(Code.JOURNAL_FAILED, what))
        return claim
    published = [each.address for each in claim.moving if turn.may_be_published(each.address)]
    unknown = turn.specs_unknown()
    is_late = not turn.seen.specs_unread or turn.overdue(claim, turn.deadlines.withdraw)
    if unknown is not None and (published or not is_late):
        return _hinder(turn, claim, unknown)
    if not published:
        return turn.enter(claim, Phase.FREEING)
    if turn.overdue(claim, turn.deadlines.withdraw):
        what = f"the entries of {', '.join(published)} could not be withdrawn from the specs"
        return _hinder(turn, claim, problem(Code.WITHDRAW_FAILED, what))
    return claim


def freeing(turn: Turn, claim: Claim) -> Claim | None:
    """Nobody may use what has to be unbound; that is waited for, unless it is forced."""
    pause = _pause(turn)
    if pause is not None and claim.problem is None:  # what has failed is undone all the same
        return _hinder(turn, claim, pause)
    if is_busy(turn, claim):
        return claim
    if claim.inspection is None:
        return _ask(turn, claim, claim.moving, _to_unbind(turn, claim), goes=claim.moving)
    obstacle = _in_the_way(turn, claim, claim.inspection)
    if obstacle is None or claim.force:
        lacking = claim.inspection.unavailable
        claim = structs.replace(_with_overrides(claim, claim.inspection), lacking=lacking)
        claim = set_asked(claim, [state.address for state in claim.functions])
        return turn.enter(claim, Phase.RETURNING)
    if claim.record.recovery:
        _stay_stranded(turn, claim, obstacle)
        return None
    return _hinder(turn, _later(turn, claim, turn.deadlines.poll), obstacle)


def returning(turn: Turn, claim: Claim) -> Claim | None:
    """The functions go back to where they came from, each as far as it can."""
    claim = drive(turn, claim, goal_back)
    if any(state.unbinds for state in claim.functions):
        return turn.enter(claim, Phase.FREEING)
    if not all(rests(turn, each, goal_back(each.origin)) for each in claim.functions):
        obstacle = hung(turn, claim) or no_means(turn, claim)
        return claim if obstacle is None else _hinder(turn, claim, obstacle)
    if _written(claim):
        return turn.enter(claim, Phase.VERIFYING)
    return _leave(turn, claim)


def verifying(turn: Turn, claim: Claim) -> Claim | None:
    """Has the override really gone, and does the device still answer?

    With the override left, a device cannot go where it belongs; and some do not survive what a
    virtual machine did to them.
    """
    inspection = claim.inspection
    if inspection is None:
        return _ask(turn, claim, _written(claim), alive=True)
    claim = _without_dead(_with_overrides(claim, inspection), inspection)
    if all(rests(turn, each, goal_back(each.origin)) for each in claim.functions):
        return _leave(turn, claim)
    unread = [each for each in _written(claim) if each.override is None]
    if not unread:
        return turn.enter(claim, Phase.RETURNING)
    if inspection.unasked:
        return _unasked(turn, claim, inspection)
    if claim.looks >= turn.deadlines.tries:
        return _leave(turn, _cannot_verify(claim, unread))
    return _later(turn, claim, turn.deadlines.retry)


def restoring(turn: Turn, claim: Claim) -> Claim | None:
    """The devices are free; those that were published should be so again before anybody is told."""
    is_known = turn.specs_unknown() is None
    for state in claim.functions:
        if not (is_known and state.origin.published) or state.address in turn.strays:
            continue
        if turn.find(state.origin) is Absence.GONE or turn.is_published(state.address):
            continue
        if not turn.overdue(claim, turn.deadlines.restore):
            return claim
    _end(turn, claim)
    return None


def forgetting(turn: Turn, claim: Claim) -> Claim | None:
    """A lost claim is released: nothing is written, and what we left on its devices is told.

    So is what became of such a device when somebody has brought it back by hand.
    """
    if claim.inspection is None:
        return _ask(turn, claim, claim.moving)
    overrides = dict(claim.inspection.overrides)
    strays = []
    for state in claim.moving:
        function = turn.find(state.origin)
        restored = overrides.get(state.address, state.origin.target) == state.origin.override
        if function is Absence.GONE or (
            restored and isinstance(function, Function) and is_back(function, state.origin)
        ):
            turn.strays.pop(state.address, None)
            continue
        what = claim.record.lost
        if not claim.record.recovery:
            what = f"{state.address} is not as it was, and its claim was lost: {what}"
        stranded = problem(Code.STRANDED, what, address=state.address)
        turn.strand(state, stranded, lost=True)
        strays.append(stranded)
    turn.end(
        structs.replace(claim, problem=None),
        Outcome.STRANDED if strays else Outcome.FORGOTTEN,
        strays,
    )
    return None


# --- recovering -----------------------------------------------------------------------------------


def checking_recovery(turn: Turn, claim: Claim) -> Claim | None:
    """May a stranded function be moved? Nothing has been withdrawn, and it stays a stray so far."""
    obstacle = hung(turn, claim) or _pause(turn)
    if obstacle is not None and not claim.dry_run:
        return _hinder(turn, claim, obstacle)
    if claim.inspection is None:
        used = _to_unbind(turn, claim)
        return _ask(turn, claim, claim.functions, used, goes=claim.functions, alive=True)
    if claim.inspection.unasked and not claim.dry_run:
        return _unasked(turn, claim, claim.inspection)
    if not claim.force:
        obstacle = obstacle or _taken_over(turn, claim, claim.inspection)
        obstacle = obstacle or _in_the_way(turn, claim, claim.inspection)
        obstacle = obstacle or _dead_as_it_is(turn, claim, claim.inspection)
    if claim.dry_run:
        problems = () if obstacle is None else (obstacle,)
        for waiter in claim.waiters:
            turn.answer(waiter.ticket, claim.id, *problems, moves=_moves(turn, claim))
        return None
    if obstacle is not None:
        _stay_stranded(turn, claim, obstacle)
        return None
    for state in claim.functions:
        turn.strays.pop(state.address, None)
    return turn_back(turn, claim, None)


def _moves(turn: Turn, claim: Claim) -> tuple[Move, ...]:
    found = [(each, turn.find(each.origin)) for each in claim.functions]
    return tuple(
        Move(state.address, function.driver, goal_back(state.origin).driver)
        for state, function in found
        if isinstance(function, Function) and not is_back(function, state.origin)
    )


def _stay_stranded(turn: Turn, claim: Claim, reason: Problem) -> None:
    """Leave a function stranded, and say why."""
    for state in claim.functions:
        if turn.find(state.origin) is not Absence.GONE:
            turn.strand(state, reason)
    turn.end(claim, Outcome.STRANDED, (reason,))


# --- looking --------------------------------------------------------------------------------------


def _written(claim: Claim) -> list[FunctionState]:
    """The functions on which something of ours could be left."""
    return [each for each in claim.moving if each.written and not (each.problem or each.gone)]


def _ask(
    turn: Turn,
    claim: Claim,
    states: Sequence[FunctionState],
    used: Sequence[FunctionState] = (),
    *,
    goes: Sequence[FunctionState] = (),
    alive: bool = False,
) -> Claim:
    """Have found out what is left on these functions, and who uses some of them.

    Of those that are to go back the drivers are loaded that have been unloaded meanwhile. One that
    has no driver needs that as well: its driver may have been missing when it was last tried.
    """
    if claim.inspecting is not None:
        return claim
    if turn.now < claim.inspect_at:
        turn.wake(claim.inspect_at)
        return claim
    claim = turn.inspect(
        claim,
        (state.address for state in states),
        used=(state.address for state in used),
        drivers=(
            each.origin.driver
            for each in goes
            if each.origin.known and each.origin.driver and _is_away(turn, each)
        ),
        alive=alive,
    )
    return structs.replace(claim, looks=claim.looks + 1)


def _is_away(turn: Turn, state: FunctionState) -> bool:
    """Whether a function is there, and not on the driver that it came from."""
    function = turn.find(state.origin)
    return isinstance(function, Function) and not is_back(function, state.origin)


def _later(turn: Turn, claim: Claim, seconds: float) -> Claim:
    """Find out again in a moment what was found out now."""
    turn.wake(turn.now + seconds)
    return structs.replace(claim, inspection=None, inspect_at=turn.now + seconds)


def _unasked(turn: Turn, claim: Claim, inspection: Inspection) -> Claim:
    """Ask again, as often as it takes, what could not be asked for want of means."""
    claim = structs.replace(claim, looks=claim.looks - 1)
    if turn.overdue(claim, turn.deadlines.move):
        claim = _hinder(turn, claim, *find_no_means(inspection))
    return _later(turn, claim, turn.deadlines.poll)


def _to_unbind(turn: Turn, claim: Claim) -> list[FunctionState]:
    """The functions that go back by being unbound, so that whoever uses them would notice.

    One that hangs is looked at anew when the kernel has let go of it.
    """
    found = [
        (state, turn.find(state.origin))
        for state in claim.moving
        if state.address not in turn.children
    ]
    return [
        state
        for state, function in found
        if isinstance(function, Function)
        and function.driver is not None
        and not is_back(function, state.origin)
    ]


def _in_the_way(turn: Turn, claim: Claim, inspection: Inspection) -> Problem | None:
    """Who uses what has to be unbound."""
    states = _to_unbind(turn, claim)
    for state in states:
        if turn.seen.inventory.functions[state.address].virtfns:
            return problem(Code.ACTIVE_VFS, f"{state.address} has VFs, which would vanish")
    found = (*find_no_means(inspection), *find_holders(inspection)) if states else ()
    return next(iter((*_needed(turn, claim), *found)), None)


def _needed(turn: Turn, claim: Claim) -> Iterator[Problem]:
    """Which other claims need that functions stay without a driver of the host."""
    away = [each.origin for each in claim.moving if _is_away(turn, each)]
    goals = {origin.address: goal_back(origin).driver for origin in away}
    inventory = turn.seen.inventory
    going = [
        inventory.functions[address]
        for address, driver in goals.items()
        if driver is not None and not is_vfio_driver(driver)
    ]
    yield from find_dependents(going, turn.claims, claim.id, inventory)


def _taken_over(turn: Turn, claim: Claim, inspection: Inspection) -> Problem | None:
    """Who else moves what is not where it belongs: he may want it where it is."""
    managers = dict(inspection.managed)
    for state in claim.functions:
        if state.address in managers and _is_away(turn, state):
            return managed(state.address, managers[state.address])
    return None


def _with_overrides(claim: Claim, inspection: Inspection) -> Claim:
    """Believe the overrides that were read, and none that was asked for and could not be."""
    asked = inspection.effect.addresses
    overrides = {address: Override(value) for address, value in inspection.overrides}
    functions = tuple(
        structs.replace(state, override=overrides.get(state.address))
        if state.address in asked
        else state
        for state in claim.functions
    )
    return structs.replace(claim, functions=functions)


def _pause(turn: Turn) -> Problem | None:
    """That nothing may be moved now."""
    return problem(Code.PAUSED, "moving devices is paused") if turn.rules.paused else None


def _hinder(turn: Turn, claim: Claim, obstacle: Problem) -> Claim:
    """Say what is in the way, once."""
    if claim.obstacle == obstacle and not claim.waiters:
        return claim
    return turn.hinder(claim, obstacle)


def _without_dead(claim: Claim, inspection: Inspection) -> Claim:
    """Take functions for stranded that do not answer any more."""
    functions = tuple(
        structs.replace(state, problem=state.problem or _dead(state.address))
        if state.address in inspection.dead
        else state
        for state in claim.functions
    )
    return structs.replace(claim, functions=functions)


def _dead_as_it_is(turn: Turn, claim: Claim, inspection: Inspection) -> Problem | None:
    """Why a function stays stranded that is where it belongs."""
    for state in claim.functions:
        function = turn.find(state.origin)
        if state.address in inspection.dead and isinstance(function, Function):
            return _dead(state.address) if is_back(function, state.origin) else None
    return None


def _dead(address: Address) -> Problem:
    what = f"{address} does not answer any more: its configuration space reads ones"
    return problem(Code.DEAD, what, address=address)


# --- ending ---------------------------------------------------------------------------------------


def _cannot_verify(claim: Claim, states: list[FunctionState]) -> Claim:
    """Take functions for stranded whose override cannot be read back."""
    unread = {state.address for state in states}
    functions = tuple(
        structs.replace(
            state,
            problem=problem(
                Code.OVERRIDE_UNKNOWN, f"the driver_override of {state.address} cannot be read back"
            ),
        )
        if state.address in unread
        else state
        for state in claim.functions
    )
    return structs.replace(claim, functions=functions)


def _leave(turn: Turn, claim: Claim) -> Claim:
    """All that could be brought back is back: the journal may forget the claim."""
    if claim.problem is not None and claim.problem.code in _BREAKS_DRIVERS:
        for state in claim.moving:
            turn.cool_down(state.address, claim.problem.sentence)
    claim = name_missing_drivers(turn, claim)
    for state in claim.moving:
        if state.problem is not None and not state.gone:
            turn.strand(state, state.problem)
    return turn.enter(claim, Phase.RESTORING)


def _end(turn: Turn, claim: Claim) -> None:
    """Answer everybody: the claim is no more."""
    strays = tuple(
        _stranded(turn, claim, each.address, each.problem)
        for each in claim.moving
        if each.problem is not None and each.address in turn.strays
    )
    if strays:
        outcome = Outcome.STRANDED
    elif claim.problem is None:
        outcome = Outcome.RELEASED
    else:
        outcome = Outcome.UNDONE if claim.touched else Outcome.REFUSED
    turn.end(claim, outcome, strays)


def _stranded(turn: Turn, claim: Claim, address: Address, reason: Problem) -> Problem:
    """That a function is stranded; who has just tried to recover it is not told to do that."""
    why = turn.strays[address].problem
    is_tried = claim.record.recovery and reason.code is not Code.CHANGED
    hint = reason.hint if is_tried else why.hint
    return Problem(Code.STRANDED, f"{address} is stranded: {why.sentence}", hint)
