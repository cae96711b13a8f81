"""What becomes of the journal's claims when an agent starts. Pure.

Nothing is decided here that ``advance`` could decide by looking: a claim that was under way is
put on its way back, one that was in force is in force until a look says that it is lost, one that
was lost stays so, and what was stranded is tried once more unless somebody else had his hands on
it. A journal of an earlier boot says nothing about this one: with
the boot every override and every binding of ours has gone.
"""

import msgspec
from msgspec import structs

from agent.host.model import Inventory
from agent.vfio.model import RECOVERY, Durable, Record, Stray, Watch
from agent.vfio.orders import OURSELVES, recovery, unknown_origin
from agent.vfio.problems import Code, problem
from agent.vfio.state import Claim, Claims, FunctionState, Phase


class Started(msgspec.Struct, frozen=True):
    """What an agent starts with."""

    claims: Claims
    effects: tuple[Watch, ...] = ()
    """To be started at once; they write nothing."""
    voided: tuple[Record, ...] = ()
    """Claims of an earlier boot: nobody holds anything by them any more."""


def start(
    journal: Durable,
    inventory: Inventory,
    *,
    boot_id: str,
    now: float,
    damaged: bool = False,
) -> Started:
    """Make the claims of what an earlier agent wrote down.

    Args:
        journal: What was read; an empty one if there was none, or if it was set aside.
        inventory: A look at everything.
        boot_id: Of this boot.
        now: Monotonic seconds.
        damaged: There was a journal, and it could not be read. That is not the same as no claims:
            whatever is on VFIO may have been moved by this agent, and is not touched until a
            person says so. What may still write to a function has that one's lock (`vfio.writer`).
    """
    if damaged:
        strays = {
            function.address: Stray(
                unknown_origin(function),
                problem(
                    Code.STRANDED,
                    f"the journal was lost, and nobody knows who put it on {function.driver}",
                    address=function.address,
                ),
                function.driver,
            )
            for function in inventory.functions.values()
            if function.on_vfio
        }
        return Started(Claims(boot_id=boot_id, strays=strays))
    if journal.boot_id != boot_id:
        return Started(Claims(boot_id=boot_id), voided=journal.claims)
    live = {record.id: _claim(record, now) for record in journal.claims}
    claimed = {state.address for claim in live.values() for state in claim.functions}
    strays = {
        stray.origin.address: stray
        for stray in journal.strays
        if stray.origin.address not in claimed
    }
    for address, stray in strays.items():
        if stray.origin.known and not stray.lost:
            live[f"{RECOVERY}{address}"] = recovery(stray.origin, now=now, client=OURSELVES)
    # Until what may still write has ended, nobody else writes there.
    busy = {child.write.address: child for child in journal.children}
    claims = Claims(boot_id=boot_id, live=live, strays=strays, children=busy)
    return Started(claims, tuple(map(Watch, busy.values())))


def _claim(record: Record, now: float) -> Claim:
    """A claim as its record says: in force, lost, or on its way back."""
    claim = Claim(
        record,
        tuple(map(FunctionState, record.origins)),
        since=now,
        touched=any(origin.target is not None for origin in record.origins),
        force=record.recovery and record.request.force,
    )
    if record.lost:
        phase = Phase.FORGETTING if record.recovery else Phase.LOST
        lost = problem(Code.LOST, record.lost)
        return structs.replace(claim, phase=phase, problem=lost)
    if record.done:
        return structs.replace(claim, phase=Phase.DONE)
    why = None
    if not record.recovery:
        why = problem(
            Code.INTERRUPTED, f"the agent was stopped while claim {record.id} was under way"
        )
    return structs.replace(claim, phase=Phase.RELEASING, problem=why)
