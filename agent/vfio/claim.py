"""What claims do next: one pure function, ``advance``, and the table of every transition.

There is no order of events in it. Every call is given what is true now (the look, what the specs
have, what the journal has on disk), and each claim goes as far as that allows. So a claim that
comes out of the journal after a crash goes on like any other, and a lost, doubled or late message
changes nothing. It has to be called again when any of what it is given has changed: when a result
or an order came, after a look, after the journal was saved or the specs were written, and at
``wake_at``.

    there   checking ─▶ withdrawing ─▶ guarding ─▶ moving ─▶ publishing ─▶ confirming ─▶ done
                             └──────── nothing to move ────────▲
    back    releasing ─▶ freeing ─▶ returning ─▶ verifying ─▶ restoring ─▶ end
    lost    done ─▶ lost ─▶ forgetting ─▶ end

What fails in ``checking`` ends there. What fails before the first write goes on in ``restoring``,
and whatever fails later, or is released, in ``releasing``. On the way back a claim returns from
``verifying`` to ``returning`` if an override is left, and to ``freeing`` when a write that hung
has come to its end. A recovery goes from ``checking`` to ``releasing``; what a lost claim has left
and somebody has brought back by hand is looked at in ``forgetting``.

The caller must keep one order: save ``claims.durable`` if it differs from what is on disk, then
withdraw and publish what `holds` says, then start the effects.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from msgspec import structs

from agent.host.model import Function
from agent.vfio import backward, forward
from agent.vfio.drive import take_result
from agent.vfio.model import RECOVERY, Asked, Child, Inspection, Result, Stray, Written
from agent.vfio.moves import is_back
from agent.vfio.orders import OURSELVES, accept, give_back, recovery
from agent.vfio.problems import Code, Problem, problem
from agent.vfio.state import (
    THERE,
    Advance,
    Claim,
    Claims,
    Phase,
    Rules,
    Seen,
    explain,
    holds,
)
from agent.vfio.turn import Absence, Turn

__all__ = ["TABLE", "advance", "explain", "holds"]

TABLE: Final[Mapping[Phase, Callable[[Turn, Claim], Claim | None]]] = {
    Phase.CHECKING: forward.checking,
    Phase.WITHDRAWING: forward.withdrawing,
    Phase.GUARDING: forward.guarding,
    Phase.MOVING: forward.moving,
    Phase.PUBLISHING: forward.publishing,
    Phase.CONFIRMING: forward.confirming,
    Phase.DONE: forward.done,
    Phase.LOST: forward.lost,
    Phase.RELEASING: backward.releasing,
    Phase.FREEING: backward.freeing,
    Phase.RETURNING: backward.returning,
    Phase.VERIFYING: backward.verifying,
    Phase.RESTORING: backward.restoring,
    Phase.FORGETTING: backward.forgetting,
}
"""What is done in each phase: the only functions that let a claim go on."""


def advance(
    claims: Claims,
    seen: Seen,
    *,
    now: float,
    rules: Rules = Rules(),  # noqa: B008 - immutable
    orders: Iterable[Asked] = (),
    results: Iterable[Result] = (),
) -> Advance:
    """Let every claim go as far as it can.

    Args:
        claims: As the previous call left them, or ``start``.
        seen: What is true, looked at after all that ``results`` tell of.
        now: Monotonic seconds.
        rules: What the configuration decides.
        orders: New ones, in the order in which they came.
        results: What came of effects; each effect is answered once, a write that hangs twice.
    """
    turn = Turn(claims, seen, rules, now)
    for result in results:
        _receive(turn, result)
    _tidy(turn)
    for key, claim in list(turn.live.items()):
        why = _unwanted(turn, claim)
        if why is not None:
            turn.live[key] = give_back(turn, claim, why)
    for asked in orders:
        accept(turn, asked)
    for key, claim in list(turn.live.items()):
        _go_on(turn, key, claim)
    return turn.result()


def _go_on(turn: Turn, key: str, claim: Claim) -> None:
    """Let a claim go on until it has to wait."""
    while True:
        phase = claim.phase
        after = TABLE[phase](turn, claim)
        if after is None:
            del turn.live[key]
            return
        turn.live[key] = claim = after
        if claim.phase is phase:
            return


# --- what came ------------------------------------------------------------------------------------


def _receive(turn: Turn, result: Result) -> None:
    """Take the result of an effect; nobody listens to one that no claim waits for any more."""
    if isinstance(result, Inspection):
        for key, claim in turn.live.items():
            if claim.inspecting == result.effect:
                turn.live[key] = structs.replace(claim, inspecting=None, inspection=result)
        return
    write = result.effect
    if result.hung:
        turn.children[write.address] = Child(write, result.pid, result.started)
    elif result.gone:
        turn.children.pop(write.address, None)
    for key, claim in turn.live.items():
        if any(state.address == write.address for state in claim.functions):
            turn.live[key] = _take(turn, claim, result)


def _take(turn: Turn, claim: Claim, result: Written) -> Claim:
    functions = tuple(
        take_result(turn, state, result)
        if state.address == result.effect.address and (result.gone or state.writing)
        else state
        for state in claim.functions
    )
    claim = structs.replace(claim, functions=functions)
    if result.gone and claim.phase in {Phase.RETURNING, Phase.FREEING}:
        # Nothing is known of this function any more: who uses it, and what its override is.
        return turn.enter(claim, Phase.FREEING)
    return claim


# --- what changed ---------------------------------------------------------------------------------


def _unwanted(turn: Turn, claim: Claim) -> Problem | None:
    """Why a claim is to be given back though nobody said so."""
    if (
        claim.dry_run
        or claim.record.recovery
        or claim.phase not in {*THERE, Phase.DONE, Phase.LOST}
    ):
        return None
    if claim.id in turn.seen.owners_gone:
        what = f"process {claim.record.request.owner_pid}, the owner of claim {claim.id}, has ended"
        return problem(Code.CANCELLED, what)
    expires_at = claim.record.expires_at
    if expires_at is None:
        return None
    if turn.now >= expires_at:
        return problem(Code.CANCELLED, f"the lease of claim {claim.id} has ended")
    turn.wake(expires_at)
    return None


def _tidy(turn: Turn) -> None:
    """Look after the stranded functions that somebody else did something about."""
    for address, stray in list(turn.strays.items()):
        found = turn.find(stray.origin)
        if turn.claims.claim_of(address) is not None or found is Absence.UNREAD:
            continue
        if not isinstance(found, Function) or _is_nobodys(found, stray):
            del turn.strays[address]  # another card is in its slot, or it was never taken
        elif is_back(found, stray.origin) and found.driver != stray.driver:
            # Somebody brought it back by hand; whether our override is still there is found out.
            turn.strays[address] = structs.replace(stray, driver=found.driver)
            lost = stray.problem.sentence if stray.lost else ""
            turn.live[f"{RECOVERY}{address}"] = recovery(
                stray.origin, now=turn.now, client=OURSELVES, lost=lost
            )


def _is_nobodys(function: Function, stray: Stray) -> bool:
    """Whether a function of unknown origin is where it belongs, and need not be brought back."""
    is_dead = stray.problem.code is Code.DEAD
    return not stray.origin.known and not function.on_vfio and not is_dead
