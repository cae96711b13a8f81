"""Under which names functions are on disk, as far as claims have to know. Pure."""

from collections.abc import Iterable, Mapping

from agent.cdi.files import Disk
from agent.host.model import Address, Hold
from agent.reconcile.plan import ALL
from agent.reconcile.rules import Layout
from agent.reconcile.state import State


def names_known_last(state: State, _holds: Iterable[Hold]) -> Mapping[Address, tuple[str, ...]]:
    """The qualified names of each function that were on disk when that could be told last."""
    found: dict[Address, tuple[str, ...]] = {}
    for (kind, address), name in state.published.items():
        found[address] = (*found.get(address, ()), f"{kind}={name}")
    return found


def names_on_disk(
    state: State, disk: Disk, layout: Layout, holds: Iterable[Hold]
) -> Mapping[Address, tuple[str, ...]]:
    """The qualified names of each function that are on disk.

    As long as an entry is on disk that should not be, nobody can say whose nodes it gives: then
    every function that is being withdrawn counts as published, and no claim moves it.

    Args:
        state: After the latest pass: what should be on disk.
        disk: What is.
        layout: Which file is whose.
        holds: What claims mean for publishing now.
    """
    found: dict[Address, tuple[str, ...]] = {}
    known: set[tuple[str, str]] = set()
    kinds = {kind for kind, _ in state.published}
    files = {kind: disk.ours.get(layout.path(kind)) for kind in kinds}
    for (kind, address), name in state.published.items():
        file = files[kind]
        if file is not None and name in file.devices:
            found[address] = (*found.get(address, ()), f"{kind}={name}")
            known.add((file.path, name))
    leaving = [hold.address for hold in holds if not hold.settled and hold.address not in found]
    if leaving:
        stale = tuple(
            f"{file.path}: {name}"
            for file in disk.ours.values()
            for name in file.devices
            if name != ALL and (file.path, name) not in known
        )
        found.update(dict.fromkeys(leaving, stale))
    return found
