"""What an order does to the claims: makes one, joins one, turns one back. Pure.

Every order is idempotent. What is asked for twice is one claim with two who wait for it; giving
back what nobody has is a success.
"""

from msgspec import structs

from agent.host.model import Function, HoldMode, Inventory
from agent.vfio.backward import turn_back
from agent.vfio.case import Case, Chosen, choose
from agent.vfio.checks import find_by_look, find_nonsense, missing
from agent.vfio.group import companions
from agent.vfio.model import (
    ANY_DRIVER,
    RECOVERY,
    Asked,
    Identity,
    Order,
    Origin,
    Prepare,
    Record,
    Recover,
    Release,
)
from agent.vfio.problems import Code, Problem, problem
from agent.vfio.state import THERE, Claim, FunctionState, Phase, Wants
from agent.vfio.turn import Turn

OURSELVES = "cdi-agent"
"""Who asks for a recovery that nobody asked for."""

_UNWANTED = frozenset({Code.CANCELLED, Code.LOST})
"""Why a claim may be on its way back though nothing failed: somebody has given it back."""


def accept(turn: Turn, asked: Asked) -> None:
    """Take an order."""
    match asked.order:
        case Prepare() as order:
            _prepare(turn, asked.ticket, order)
        case Release() as order:
            _release(turn, asked.ticket, order)
        case Recover() as order:
            _recover(turn, asked.ticket, order)


def is_early(order: Order, inventory: Inventory) -> bool:
    """Whether a function that an order would move may be about to get its driver.

    At boot, and when a card is plugged in, udev loads the module that binds it: a claim made before
    would remember that the function had no driver, and give it back to none.
    """
    if not inventory.environment.udev_queue or not isinstance(order, Prepare):
        return False
    known = inventory.functions
    asked = [known[each] for each in (*order.devices, *order.named) if each in known]
    return any(each.driver is None for each in (*asked, *companions(asked, inventory)))


# --- prepare --------------------------------------------------------------------------------------


def _prepare(turn: Turn, ticket: int, order: Prepare) -> None:
    claim = turn.live.get(order.id)
    nonsense = find_nonsense(order)
    if nonsense:
        turn.answer(ticket, order.id, *nonsense)
    elif claim is not None:
        _join(turn, ticket, order, claim)
    else:
        _begin(turn, ticket, order)


def _join(turn: Turn, ticket: int, order: Prepare, claim: Claim) -> None:
    """Wait for a claim that there is already, if it is the same; a dry run leaves it as it is."""
    if _content(order) != _content(claim.record.request):
        what = f"there is a claim {order.id} already, and it is for something else"
        turn.answer(ticket, order.id, problem(Code.CLAIMED, what))
    elif claim.phase is Phase.LOST and claim.problem is not None:
        turn.answer(ticket, order.id, claim.problem)
    elif claim.phase in {*THERE, Phase.DONE}:
        joined = claim if order.dry_run else renew(claim, order, turn.now)
        turn.live[claim.id] = turn.wait(joined, ticket, Wants.HELD)
    elif claim.problem is not None and claim.problem.code not in _UNWANTED:
        turn.live[claim.id] = turn.wait(claim, ticket, Wants.HELD)
    else:
        turn.answer(ticket, order.id, problem(Code.ENDING, f"claim {order.id} is being released"))


def _content(order: Prepare) -> tuple[object, ...]:
    """What two orders must have in common to be one claim."""
    return order.mode, set(order.devices), set(order.named), order.driver, order.from_vfio


def renew(claim: Claim, order: Prepare, now: float) -> Claim:
    """Let the lease of a claim begin anew, and whoever asks now be its owner."""
    request = structs.replace(
        claim.record.request,
        lease=order.lease,
        owner_pid=order.owner_pid,
        owner_started=order.owner_started,
    )
    expires_at = None if order.lease is None else now + order.lease
    record = structs.replace(claim.record, request=request, expires_at=expires_at)
    return structs.replace(claim, record=record)


def _begin(turn: Turn, ticket: int, order: Prepare) -> None:
    """Make a claim, unless the look alone has something against it."""
    chosen = choose(order, turn.seen, turn.rules)
    case = Case(order, chosen, turn.claims, turn.seen, turn.rules, turn.now)
    problems = find_by_look(case)
    if problems and not (order.dry_run and chosen):
        turn.answer(ticket, order.id, *problems)
        return
    record = Record(
        request=order,
        origins=tuple(_origin(turn, each) for each in chosen),
        since=turn.now,
    )
    claim = Claim(record, tuple(map(FunctionState, record.origins)), since=turn.now)
    claim = structs.replace(claim, dry_run=order.dry_run, findings=problems)
    turn.live[_key(ticket, order.id, dry_run=order.dry_run)] = turn.wait(
        renew(claim, order, turn.now), ticket, Wants.HELD
    )


def _key(ticket: int, id_: str, *, dry_run: bool) -> str:
    """Under what a claim is kept: a dry run is in the way of none, whatever those are called."""
    return f"dry run {ticket} of {id_}" if dry_run else id_


def _origin(turn: Turn, chosen: Chosen) -> Origin:
    function = chosen.function
    return Origin(
        address=function.address,
        identity=Identity.of(function),
        driver=function.driver,
        override=None,  # the inspection tells
        target=chosen.target,
        companion=chosen.companion,
        published=turn.is_published(function.address),
    )


# --- release --------------------------------------------------------------------------------------


def _release(turn: Turn, ticket: int, order: Release) -> None:
    claim = turn.live.get(order.id)
    if order.id.startswith(RECOVERY):
        turn.answer(ticket, order.id, problem(Code.INVALID, f"{order.id} is no claim"))
    elif claim is None:
        turn.answer(ticket, order.id)
    else:
        turn.live[claim.id] = give_back(
            turn,
            structs.replace(turn.wait(claim, ticket, Wants.GONE), force=claim.force or order.force),
            problem(Code.CANCELLED, f"claim {order.id} was released before it was in force"),
        )


def give_back(turn: Turn, claim: Claim, why: Problem) -> Claim:
    """Turn a claim back that is no longer wanted.

    Args:
        why: What is told to who still waits for it to be in force.
    """
    if claim.phase in THERE:
        return turn_back(turn, claim, why)
    if claim.phase is Phase.DONE:
        return turn_back(turn, turn.dismiss(claim, Wants.HELD, why), None)
    if claim.phase is Phase.LOST:
        return turn.enter(claim, Phase.FORGETTING)
    if claim.phase is Phase.FREEING and claim.obstacle is not None:
        return turn.enter(claim, Phase.FREEING)  # it may be free by now, or may be forced
    return claim


# --- recover --------------------------------------------------------------------------------------


def recovery(
    origin: Origin, *, now: float, client: str, force: bool = False, lost: str = ""
) -> Claim:
    """A claim whose only purpose is to be undone: it brings a stranded function back.

    Args:
        origin: What the function was.
        now: Monotonic seconds.
        client: Who asks.
        force: Even while it is in use.
        lost: How its claim was lost. Then it is found out what is left on it, and nothing written.
    """
    id_ = f"{RECOVERY}{origin.address}"
    request = Prepare(id_, HoldMode.DRM, (origin.address,), client=client, force=force)
    record = Record(request, (origin,), since=now, recovery=True, lost=lost)
    claim = Claim(record, (FunctionState(origin),), since=now, force=force, touched=True)
    return structs.replace(claim, phase=Phase.FORGETTING) if lost else claim


def unknown_origin(function: Function) -> Origin:
    """The origin of a function of which nobody knows where it came from."""
    return Origin(
        address=function.address,
        identity=Identity.of(function),
        driver=function.driver,
        override=None,
        target=function.driver or ANY_DRIVER,
        known=False,
    )


def _recover(turn: Turn, ticket: int, order: Recover) -> None:
    address = order.address
    key = f"{RECOVERY}{address}"
    function = turn.seen.inventory.functions.get(address)
    running = turn.live.get(key)
    stray = turn.strays.get(address)
    holder = turn.claims.claim_of(address)
    if function is None:
        turn.answer(ticket, key, missing(address, turn.seen.inventory))
    elif running is not None and not order.dry_run:
        running = turn.wait(running, ticket, Wants.GONE)
        turn.live[key] = structs.replace(running, force=running.force or order.force)
    elif holder is not None:
        what = f"{address} belongs to claim {holder.id}, which is {holder.standing}"
        turn.answer(ticket, key, problem(Code.CLAIMED, what))
    elif stray is None and function.driver is not None and not function.on_vfio:
        turn.answer(ticket, key)  # it is where it should be
    elif stray is None and not order.force:
        what = f"this agent has no record that it moved {address}"
        turn.answer(ticket, key, problem(Code.NOT_STRANDED, what, address=address))
    else:
        origin = unknown_origin(function) if stray is None else stray.origin
        claim = recovery(origin, now=turn.now, client=order.client, force=order.force)
        claim = structs.replace(claim, dry_run=order.dry_run)
        turn.live[_key(ticket, key, dry_run=order.dry_run)] = turn.wait(claim, ticket, Wants.GONE)
