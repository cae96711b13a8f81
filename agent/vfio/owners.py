"""Who owns a claim: a process whose end is the end of the claim. No event tells of it.

Blocks for a moment and belongs in a thread.
"""

from agent.vfio.children import started_at
from agent.vfio.model import Prepare
from agent.vfio.state import Claims


def owners_gone(claims: Claims, proc: str = "/proc") -> frozenset[str]:
    """The claims whose owner has ended.

    Args:
        claims: All that there are.
        proc: Where procfs is.
    """
    return frozenset(
        claim.id
        for claim in claims.live.values()
        if not claim.dry_run and _has_gone(claim.record.request, proc)
    )


def _has_gone(request: Prepare, proc: str) -> bool:
    """Whether there is an owner who has ended; a pid that was given out again is another."""
    if request.owner_pid is None:
        return False
    try:
        return started_at(request.owner_pid, proc) != request.owner_started
    except OSError:
        return False  # to take a device from a machine that runs is worse than to take it late
