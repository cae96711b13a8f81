"""The way there: what a claim does in each phase until it is in force, and while it is. Pure.

Each function here stands for one phase: it is given a claim that is in it, and returns the claim
as it is then, perhaps in another phase, or None when it has ended. Before the first write the
order is: check, journal and withdraw, check again. From the first write on whatever fails turns
the whole claim back.
"""

from msgspec import structs

from agent.host.model import Function, HoldMode
from agent.vfio.backward import checking_recovery, turn_back
from agent.vfio.case import Case, Chosen
from agent.vfio.checks import find_by_inspection, find_by_look, find_holders, find_no_means
from agent.vfio.drive import drive, hung, no_means, rests, set_asked
from agent.vfio.model import Inspection, Move, Record
from agent.vfio.moves import Override, goal_there, has_driver
from agent.vfio.problems import Code, Problem, problem
from agent.vfio.state import Claim, FunctionState, Outcome, Phase, Wants
from agent.vfio.turn import Absence, Turn


def checking(turn: Turn, claim: Claim) -> Claim | None:
    """May the devices be taken? Nothing has been touched, and the specs do not know of it."""
    if claim.record.recovery:
        return checking_recovery(turn, claim)
    inspection = claim.inspection
    if inspection is None:
        return _inspect(turn, claim)
    if _is_unread(turn, claim):
        return claim
    problems = _look_again(turn, claim, inspection)
    if claim.dry_run:
        _tell(turn, claim, tuple(dict.fromkeys((*claim.findings, *problems))))
        return None
    if problems:
        claim = structs.replace(claim, problem=problems[0])
        turn.end(claim, Outcome.REFUSED, problems[1:])
        return None
    return turn.enter(_with_overrides(claim, inspection), Phase.WITHDRAWING)


def withdrawing(turn: Turn, claim: Claim) -> Claim | None:
    """The journal has to have the claim, and the specs must not have its devices any more."""
    if not turn.is_journalled(claim):
        if turn.journal_failed(claim):
            return turn_back(turn, claim, _journal_failed(turn))
        return claim
    if not claim.moving:
        return turn.enter(claim, Phase.PUBLISHING)
    published = [each.address for each in claim.moving if turn.may_be_published(each.address)]
    if not published:
        return turn.enter(claim, Phase.GUARDING)
    if turn.overdue(claim, turn.deadlines.withdraw):
        what = f"the entries of {', '.join(published)} could not be withdrawn from the specs"
        why = turn.specs_unknown() or problem(Code.WITHDRAW_FAILED, what)
        return turn_back(turn, claim, why)
    return claim


def guarding(turn: Turn, claim: Claim) -> Claim | None:
    """Has somebody got hold of a device before its entry was withdrawn?"""
    inspection = claim.inspection
    if inspection is None:
        return _inspect(turn, claim)
    if _is_unread(turn, claim):
        return claim
    problems = _look_again(turn, claim, inspection)
    overrides = dict(inspection.overrides)
    for state in claim.moving:
        if overrides.get(state.address) != state.origin.override:
            what = f"somebody else changed the driver_override of {state.address}"
            problems = (*problems, problem(Code.CHANGED, what))
    if problems:
        return turn_back(turn, claim, problems[0])
    claim = structs.replace(claim, touched=True)
    claim = set_asked(claim, [state.address for state in claim.moving])
    return turn.enter(_with_overrides(claim, inspection), Phase.MOVING)


def moving(turn: Turn, claim: Claim) -> Claim | None:
    """The functions go to their new driver, side by side."""
    why = None
    if claim.inspection is not None:
        found = (*find_no_means(claim.inspection), *find_holders(claim.inspection))
        why = next(iter(found), None)
        claim = set_asked(claim, claim.inspection.effect.addresses)
        claim = structs.replace(claim, inspection=None)
    if why is None:
        claim = drive(turn, claim, goal_there)
        why = _new_vfs(turn, claim) or _first_problem(turn, claim) or no_means(turn, claim)
    if why is not None:
        return turn_back(turn, claim, why)
    if all(rests(turn, state, goal_there(state.origin)) for state in claim.functions):
        return turn.enter(claim, Phase.PUBLISHING)
    to_unbind = tuple(state.address for state in claim.moving if state.unbinds)
    if to_unbind and claim.inspecting is None:
        claim = turn.inspect(claim, to_unbind, used=to_unbind, drivers=())
    return claim


def publishing(turn: Turn, claim: Claim) -> Claim | None:
    """The entries have to come: then the nodes are there, and udev has dealt with them."""
    claim = _without_companions(turn, claim)
    changed = _changed(turn, claim)
    if changed is not None:
        return turn_back(turn, claim, changed)
    missing = [a for a in claim.record.request.devices if not turn.is_published(a)]
    if not missing:
        record = structs.replace(_with_names(turn, claim.record), done=True)
        return turn.enter(structs.replace(claim, record=record), Phase.CONFIRMING)
    if turn.overdue(claim, turn.deadlines.publish):
        reasons = [
            f"{address} ({turn.seen.withheld.get(address, 'its nodes did not come')})"
            for address in missing
        ]
        what = f"not published in time: {', '.join(reasons)}"
        why = turn.specs_unknown() or problem(Code.NOT_PUBLISHED, what, address=missing[0])
        return turn_back(turn, claim, why)
    return claim


def confirming(turn: Turn, claim: Claim) -> Claim | None:
    """The journal has to say that the claim is in force: only then may anybody rely on it."""
    claim = _without_companions(turn, claim)
    changed = _changed(turn, claim)
    if changed is not None:
        return turn_back(turn, claim, changed)
    if claim.record in turn.seen.saved.claims:
        for state in claim.moving:
            turn.cooling.pop(state.address, None)
        return turn.enter(claim, Phase.DONE)
    if turn.journal_failed(claim):
        return turn_back(turn, claim, _journal_failed(turn))
    return claim


def done(turn: Turn, claim: Claim) -> Claim | None:
    """In force, as long as nobody else changes what it holds.

    Whoever asks (again) is told so once the journal has for how long and for whom, and the specs
    on disk have its names.
    """
    claim = _without_companions(turn, claim)
    changed = _changed(turn, claim)
    if changed is not None:
        why = problem(Code.LOST, changed.sentence)
        claim = turn.dismiss(claim, Wants.HELD, why)
        record = structs.replace(claim.record, lost=why.sentence)
        return turn.enter(structs.replace(claim, record=record, problem=why), Phase.LOST)
    claim = structs.replace(claim, record=_with_names(turn, claim.record))
    if claim.record in turn.seen.saved.claims:
        claim = structs.replace(claim, confirmed=claim.record)
    if claim.record == claim.confirmed:
        return _answer(turn, claim)
    if claim.waiters and turn.journal_failed(claim):
        return turn.dismiss(claim, Wants.HELD, _journal_failed(turn))
    return claim


def _answer(turn: Turn, claim: Claim) -> Claim:
    """Tell who waits that a claim is in force, or that it does not help them: no spec says so."""
    if not claim.waiters:
        return claim
    devices = claim.record.request.devices
    names = {name for device in devices for name in turn.seen.published.get(device, ())}
    unknown = turn.specs_unknown()
    if unknown is not None:
        return turn.dismiss(claim, Wants.HELD, unknown)
    missing = [name for name in claim.record.names if name not in names]
    if not missing:
        return turn.answer_held(claim)
    waited_until = min(waiter.since for waiter in claim.waiters) + turn.deadlines.publish
    if turn.now < waited_until:
        turn.wake(waited_until)
        return claim
    why = [turn.seen.withheld[a] for a in devices if a in turn.seen.withheld]
    what = f"claim {claim.id} is in force, but not published: {', '.join(missing)}"
    what += f" ({'; '.join(why)})" if why else ""
    return turn.dismiss(claim, Wants.HELD, problem(Code.NOT_PUBLISHED, what, address=devices[0]))


def lost(turn: Turn, claim: Claim) -> Claim | None:
    """Nothing is done for a lost claim until it is released; what was pulled out is free."""
    functions = tuple(
        structs.replace(state, gone=state.gone or turn.find(state.origin) is Absence.GONE)
        for state in claim.functions
    )
    return structs.replace(claim, functions=functions)


# --- checks ---------------------------------------------------------------------------------------


def _inspect(turn: Turn, claim: Claim) -> Claim:
    """Ask once for all that the checks need beyond the look."""
    if claim.inspecting is not None:
        return claim
    addresses = tuple(state.address for state in claim.moving)
    return turn.inspect(
        claim,
        addresses,
        used=addresses,
        drivers=(state.origin.target for state in claim.moving if state.origin.target),
    )


def _is_unread(turn: Turn, claim: Claim) -> bool:
    """Whether the look does not have a function, and may have it in a moment."""
    return any(
        turn.find(state.origin) is Absence.UNREAD for state in claim.functions
    ) and not turn.overdue(claim, turn.deadlines.move)


def _look_again(turn: Turn, claim: Claim, inspection: Inspection) -> tuple[Problem, ...]:
    """Everything that speaks against a claim for which nothing has been moved yet."""
    chosen: list[Chosen] = []
    for state in claim.functions:
        function = turn.find(state.origin)
        if not isinstance(function, Function) or function.driver != state.origin.driver:
            what = f"somebody else changed {state.address} while it was being checked"
            return (problem(Code.CHANGED, what),)
        chosen.append(Chosen(function, state.origin.target, state.origin.companion))
    case = Case(
        request=claim.record.request,
        chosen=tuple(chosen),
        claims=turn.claims,
        seen=turn.seen,
        rules=turn.rules,
        now=turn.now,
        inspection=inspection,
        own=not claim.dry_run,
    )
    return (*find_by_look(case), *find_by_inspection(case))


def _with_overrides(claim: Claim, inspection: Inspection) -> Claim:
    """Remember the overrides that were read, in the journal's record too."""
    overrides = dict(inspection.overrides)
    origins = tuple(
        structs.replace(origin, override=overrides.get(origin.address))
        for origin in claim.record.origins
    )
    functions = tuple(
        structs.replace(
            state,
            origin=origin,
            override=Override(origin.override) if origin.address in overrides else None,
        )
        for state, origin in zip(claim.functions, origins, strict=True)
    )
    record = structs.replace(claim.record, origins=origins)
    return structs.replace(claim, record=record, functions=functions)


def _tell(turn: Turn, claim: Claim, problems: tuple[Problem, ...]) -> None:
    """Answer a dry run."""
    moves = tuple(
        Move(each.address, each.origin.driver, each.origin.target, each.origin.companion)
        for each in claim.moving
    )
    for waiter in claim.waiters:
        turn.answer(waiter.ticket, claim.id, *problems, moves=moves)


def _with_names(turn: Turn, record: Record) -> Record:
    """Say under which names the devices are published, if all of them are.

    A claim in force keeps its names, but a service that is started with another configuration gives
    others. One of several that is not published for a moment is a name of it all the same.
    """
    published = [turn.seen.published.get(a, ()) for a in dict.fromkeys(record.request.devices)]
    names = tuple(name for each in published for name in each)
    directory = turn.rules.directory
    kept = record.directory == directory and set(names) <= set(record.names)
    if kept or not all(published):
        return record
    return structs.replace(record, names=names, directory=directory)


# --- what goes wrong ------------------------------------------------------------------------------


def _journal_failed(turn: Turn) -> Problem:
    what = f"the claim could not be written to the journal: {turn.seen.journal_problem}"
    return problem(Code.JOURNAL_FAILED, what)


def _new_vfs(turn: Turn, claim: Claim) -> Problem | None:
    """Whether somebody has made virtual functions of what is to be unbound now."""
    for state in claim.moving:
        function = turn.find(state.origin)
        if state.unbinds and isinstance(function, Function) and function.virtfns:
            return problem(Code.ACTIVE_VFS, f"{state.address} has VFs now, which would vanish")
    return None


def _first_problem(turn: Turn, claim: Claim) -> Problem | None:
    """Why a claim cannot go on with moving its functions."""
    for state in claim.moving:
        if state.problem is not None:
            return state.problem
        if state.gone and not state.origin.companion:
            return problem(Code.CHANGED, f"{state.address} was pulled out while it was moved")
    return hung(turn, claim)


def _without_companions(turn: Turn, claim: Claim) -> Claim:
    """Let go of the companions that were pulled out.

    Nobody asked for them, and they need no way back: what was asked for is held without them. The
    kernel takes a function from its driver first, so one without any may be gone in a moment.
    """
    functions = tuple(
        _companion(turn, state) if state.origin.companion and not state.gone else state
        for state in claim.functions
    )
    return structs.replace(claim, functions=functions)


def _companion(turn: Turn, state: FunctionState) -> FunctionState:
    function = turn.find(state.origin)
    if function is Absence.GONE:
        return structs.replace(state, gone=True)
    if not isinstance(function, Function) or function.driver is not None:
        return structs.replace(state, leaves_at=None)
    leaves_at = state.leaves_at or turn.now + turn.deadlines.poll
    return structs.replace(state, leaves_at=leaves_at)


def _changed(turn: Turn, claim: Claim) -> Problem | None:
    """What somebody else has changed of what a claim holds."""
    for state in claim.functions:
        if state.gone:
            continue
        if state.leaves_at is not None and turn.now < state.leaves_at:
            turn.wake(state.leaves_at)
            continue
        function = turn.find(state.origin)
        if function is Absence.GONE:
            return problem(Code.CHANGED, f"{state.address} was pulled out or replaced")
        if isinstance(function, Function) and not _is_held(function, state, claim):
            driver = function.driver or "no driver"
            what = f"somebody else changed {state.address}, which is on {driver} now"
            return problem(Code.CHANGED, what)
    return None


def _is_held(function: Function, state: FunctionState, claim: Claim) -> bool:
    """Whether a function is what the claim promises."""
    if state.origin.target is not None:
        return has_driver(function, state.origin.target)
    if claim.record.request.mode is HoldMode.VFIO:
        return function.on_vfio
    return function.driver is not None and not function.on_vfio
