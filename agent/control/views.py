"""What is told of a state: plain values for JSON, made of a snapshot. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from agent.host.model import Address
from agent.reconcile.state import State
from agent.vfio.claim import explain
from agent.vfio.model import Answer
from agent.vfio.problems import Problem
from agent.vfio.state import Claim

Document = dict[str, Any]


def status(state: State) -> Document:
    """What the agent does, in a few numbers."""
    kinds: dict[str, int] = {}
    for kind, _ in state.published:
        kinds[kind] = kinds.get(kind, 0) + 1
    return {
        "published": kinds,
        "withheld": len(state.withheld),
        "claims": len(_claims(state)),
        "stranded": sorted(state.claims.strays),
        "hung": sorted(state.claims.children),
        "paused": state.paused,
        "passes": state.passes,
    }


def devices(state: State) -> list[Document]:
    """Every device in every kind, published or not, in order of address."""
    rows = [
        {
            "address": address,
            "kind": kind,
            "name": name,
            "state": "published",
            "reason": None,
            "detail": "",
        }
        for (kind, address), name in state.published.items()
    ]
    rows += [
        {
            "address": withheld.address,
            "kind": withheld.kind,
            "name": None,
            "state": "withheld",
            "reason": withheld.reason.value,
            "detail": withheld.detail,
        }
        for withheld in state.withheld
    ]
    return sorted(rows, key=lambda row: (row["address"], row["kind"] or ""))


def claims(state: State, now: float) -> Document:
    """Who holds what, and what was left behind.

    Args:
        now: Monotonic seconds.
    """
    return {
        "claims": [_claim(state, claim, now) for claim in _claims(state)],
        "stranded": [
            {"address": address, "driver": _driver(state, address), **problem(stray.problem)}
            for address, stray in sorted(state.claims.strays.items())
        ],
        "hung": [
            {"address": address, "step": child.write.step.value, "pid": child.pid}
            for address, child in sorted(state.claims.children.items())
        ],
        "paused": state.paused,
    }


def claim(state: State, id_: str, now: float) -> Document | None:
    """One claim, as `claims` tells of it; None if there is none of this id.

    Args:
        now: Monotonic seconds.
    """
    return next((_claim(state, each, now) for each in _claims(state) if each.id == id_), None)


def explanation(state: State, address: Address, now: float) -> Document | None:
    """All that is known of a function; None if the host has none there.

    Args:
        now: Monotonic seconds.
    """
    function = state.inventory.functions.get(address)
    if function is None and address not in state.inventory.dropped:
        return None
    holder = state.claims.claim_of(address)
    stray = state.claims.strays.get(address)
    cooling = state.claims.cooling.get(address)
    return {
        "address": address,
        "id": None if function is None else function.pci_id,
        "driver": _driver(state, address),
        "iommu_group": None if function is None else function.iommu_group,
        "nodes": []
        if function is None
        else [
            {"path": node.path, "state": node.state.value, "settled": node.settled}
            for node in function.nodes
        ],
        "devices": [row for row in devices(state) if row["address"] == address],
        "claim": None if holder is None else _claim(state, holder, now),
        "stranded": None if stray is None else problem(stray.problem),
        "hung": address in state.claims.children,
        "cooling_down": cooling is not None and cooling.until > now,
    }


def answer(answered: Answer) -> Document:
    """The answer to an order."""
    return {
        "claim": answered.claim,
        "ok": answered.ok,
        "names": list(answered.names),
        "problems": [problem(each) for each in answered.problems],
        "moves": [
            {
                "address": move.address,
                "before": move.before,
                "after": move.after,
                "companion": move.companion,
            }
            for move in answered.moves
        ],
    }


def problem(found: Problem) -> Document:
    """One thing that is wrong."""
    return {
        "code": found.code.value,
        "sentence": found.sentence,
        "hint": found.hint or None,
        "retryable": found.retryable,
    }


def _claims(state: State) -> list[Claim]:
    """Those that hold something, or will: a dry run is none."""
    return [claim for claim in state.claims.live.values() if not claim.dry_run]


def _claim(state: State, claim: Claim, now: float) -> Document:
    record = claim.record
    request = record.request
    expires = record.expires_at
    return {
        "id": claim.id,
        "mode": request.mode.value,
        "phase": claim.phase.value,
        "explanation": explain(claim),
        "client": request.client,
        "age_seconds": round(max(0.0, now - record.since), 1),
        "expires_in_seconds": None if expires is None else round(max(0.0, expires - now), 1),
        "owner_pid": request.owner_pid,
        "names": list(record.names),
        "functions": list(_functions(state, claim)),
        "problem": None if claim.problem is None else problem(claim.problem),
    }


def _functions(state: State, claim: Claim) -> Iterator[Mapping[str, object]]:
    for function in claim.functions:
        origin = function.origin
        yield {
            "address": origin.address,
            "driver": _driver(state, origin.address),
            "came_from": origin.driver,
            "moved": function.moves,
            "companion": origin.companion,
            "problem": None if function.problem is None else problem(function.problem),
        }


def _driver(state: State, address: Address) -> str | None:
    function = state.inventory.functions.get(address)
    return None if function is None else function.driver
