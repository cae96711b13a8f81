"""Moving the functions of a claim side by side: one write at a time for each. Pure.

``moves`` says which write is due. Here is decided whether it is made now, later or no more: the
same write is made a few times with growing delay, and what has arrived is left alone. What a
write answered is never believed: the look that came after it says what it did.
"""

import errno
from collections.abc import Callable, Collection

from msgspec import structs

from agent.host.model import Address, Function
from agent.vfio.checks import unavailable
from agent.vfio.model import Origin, Step, Write, Written
from agent.vfio.moves import CLEAR, Goal, Override, is_explained, next_step, override_for
from agent.vfio.problems import Code, Problem, problem
from agent.vfio.state import Claim, FunctionState
from agent.vfio.turn import Absence, Turn

_STEPS = {
    Step.OVERRIDE: "driver_override",
    Step.UNBIND: "unbind",
    Step.PROBE: "drivers_probe",
}
"""The files of sysfs, for people."""


def drive(turn: Turn, claim: Claim, goal_of: Callable[[Origin], Goal]) -> Claim:
    """Give every function of a claim that can take it its next write."""
    late = turn.overdue(claim, turn.deadlines.move)
    functions = tuple(
        _drive(turn, claim, state, goal_of(state.origin), late=late) if state.moves else state
        for state in claim.functions
    )
    return structs.replace(claim, functions=functions)


def _drive(
    turn: Turn, claim: Claim, state: FunctionState, goal: Goal, *, late: bool
) -> FunctionState:
    if state.problem or state.writing or state.address in turn.children:
        return state
    function = turn.find(state.origin)
    if function is Absence.GONE:
        return structs.replace(state, gone=True)
    if isinstance(function, Function):
        if not _is_ours(claim, state, function):
            what = f"somebody else put {state.address} on {function.driver}"
            return structs.replace(state, problem=problem(Code.CHANGED, what))
        step = next_step(function, goal, state.override)
        if step is None:
            return state
        if turn.may_write(claim, state.address):
            again = override_for(function, goal).value or CLEAR
            is_free = state.asked and (claim.force or not function.virtfns)
            return _write(
                turn, state, Write(claim.id, state.address, *step), again, is_free=is_free
            )
    return _wait(turn, state, late=late)


def _is_ours(claim: Claim, state: FunctionState, function: Function) -> bool:
    """Whether nobody else has moved a function: what the kernel chose at our word is our doing."""
    probed = any(write.step is Step.PROBE for write in state.written)
    forced = claim.record.recovery and claim.force
    return probed or forced or is_explained(function, state.origin)


def _wait(turn: Turn, state: FunctionState, *, late: bool) -> FunctionState:
    """Wait until a function can be read and written to, but not for ever."""
    if late:
        what = f"{state.address} could not be moved in {turn.deadlines.move:g} s"
        return structs.replace(state, problem=problem(Code.MOVE_FAILED, what))
    turn.wake(turn.now + turn.deadlines.retry)
    return state


def _write(
    turn: Turn, state: FunctionState, write: Write, override: str, *, is_free: bool
) -> FunctionState:
    """Make the write that is due, unless it was made too often or a moment ago.

    Args:
        override: What the override has to be for it, in case that it did not take.
        is_free: It may be unbound. That is asked anew each time: whoever finds its node there after
            the kernel has refused to unbind it may open it.
    """
    if state.unmade and turn.now < state.retry_at:
        turn.wake(state.retry_at)
        return state
    if state.written.count(write) >= turn.deadlines.tries:
        return structs.replace(state, problem=_exhausted(turn, state, write))
    if _is_in_vain(state, write):
        if turn.now < state.retry_at:
            turn.wake(state.retry_at)
            return state
        write = structs.replace(write, step=Step.OVERRIDE, value=override)
    if write.step is Step.UNBIND:
        if not is_free:
            return structs.replace(state, unbinds=True)
        state = structs.replace(state, asked=False)
    turn.do(write)
    return structs.replace(state, writing=write, written=(*state.written, write))


def set_asked(claim: Claim, addresses: Collection[Address]) -> Claim:
    """Let functions be unbound, once: it was asked who uses them."""
    functions = tuple(
        structs.replace(state, asked=True, unbinds=False) if state.address in addresses else state
        for state in claim.functions
    )
    return structs.replace(claim, functions=functions)


def _is_in_vain(state: FunctionState, write: Write) -> bool:
    """Whether this very write was made, and nothing that could make a difference since."""
    if write not in state.written:
        return False
    since = state.written[::-1].index(write)
    return all(other.step is not Step.OVERRIDE for other in state.written[::-1][:since])


def _exhausted(turn: Turn, state: FunctionState, write: Write) -> Problem:
    """Say what was tried in vain."""
    what = f"{_STEPS[write.step]} of {state.address} was written {turn.deadlines.tries} times,"
    if state.errno:
        name = errno.errorcode.get(state.errno, str(state.errno))
        result = f"and the kernel answered {name}"
    else:
        result = "which the kernel took without an effect"
    return problem(Code.MOVE_FAILED, f"{what} {result}")


def take_result(turn: Turn, state: FunctionState, result: Written) -> FunctionState:
    """Take what a write to a function answered."""
    write = result.effect
    if result.unmade:
        return structs.replace(
            state,
            writing=None,
            written=state.written[:-1],  # no try
            unmade=result.unmade,
            retry_at=turn.now + turn.deadlines.poll,
        )
    tries = state.written.count(write)
    override = state.override
    if write.step is Step.OVERRIDE:
        done = not (result.errno or result.hung or result.gone)
        override = Override(None if write.value == CLEAR else write.value) if done else None
    return structs.replace(
        state,
        writing=None,
        override=override,
        errno=result.errno,
        unmade="",
        retry_at=turn.now + turn.deadlines.retry * 2 ** max(0, tries - 1),
    )


def rests(turn: Turn, state: FunctionState, goal: Goal) -> bool:
    """Whether nothing is left to do for a function: it has arrived, has gone, or was given up."""
    if not state.moves or state.problem or state.gone:
        return True
    if state.writing or state.address in turn.children:
        return False
    function = turn.find(state.origin)
    return isinstance(function, Function) and next_step(function, goal, state.override) is None


def is_busy(turn: Turn, claim: Claim) -> bool:
    """Whether a write to a function of a claim is on its way and does not hang."""
    return any(state.writing and state.address not in turn.children for state in claim.functions)


def no_means(turn: Turn, claim: Claim) -> Problem | None:
    """Say that a function cannot be written to for want of means, when that has lasted too long."""
    for state in claim.moving:
        if state.unmade and turn.overdue(claim, turn.deadlines.move):
            return problem(Code.NO_MEANS, f"{state.address} cannot be written to: {state.unmade}")
    return None


def hung(turn: Turn, claim: Claim) -> Problem | None:
    """Say which writes of a claim hang."""
    children = [
        turn.children[each.address] for each in claim.moving if each.address in turn.children
    ]
    if not children:
        return None
    what = "; ".join(
        f"process {child.pid or '?'} hangs in a write to {_STEPS[child.write.step]} of"
        f" {child.write.address}"
        for child in children
    )
    return problem(Code.HUNG, what)


def name_missing_drivers(turn: Turn, claim: Claim) -> Claim:
    """Say of a function that is left without a driver that its own is not to be had, if so."""
    lacking = dict(claim.lacking)

    def reason(state: FunctionState) -> Problem | None:
        function, driver = turn.find(state.origin), state.origin.driver or ""
        has_failed = state.problem is not None and state.problem.code is Code.MOVE_FAILED
        is_bare = isinstance(function, Function) and function.driver is None
        if has_failed and is_bare and driver in lacking:
            return unavailable(driver, lacking[driver])
        return state.problem

    functions = tuple(structs.replace(each, problem=reason(each)) for each in claim.functions)
    return structs.replace(claim, functions=functions)
