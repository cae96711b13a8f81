"""What may have changed, and so what a look has to read. Pure.

A message of the kernel, of udev or of a timer becomes a `Hint`; hints are joined into one `Scope`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import structs

from agent.host.model import Address, DeviceNumber, Inventory, slot_of


class Hint(msgspec.Struct, frozen=True):
    """That something may have changed, and where; never what.

    A message of the kernel or of udev becomes one on its first line. So do timers and signals.
    """

    reason: str
    """A short closed word for log and metrics: ``kernel``, ``udev``, ``overflow``, ``timer``, …"""
    address: Address | None = None
    group: int | None = None
    node_path: str | None = None
    node_number: DeviceNumber | None = None
    orphan: bool = False
    """A message about a DRM or accel device that is no PCI function's own."""
    udev_done: bool = False
    """udev has dealt with this node (its message came, and it was no removal)."""
    everything: bool = False
    received: float = 0.0
    """Monotonic time in seconds at which the message was read."""


class Scope(msgspec.Struct, frozen=True):
    """What a look has to read."""

    everything: bool = False
    addresses: frozenset[Address] = frozenset()
    orphans: bool = False
    """The DRM and accel nodes that belong to no function."""

    def __or__(self, other: Scope) -> Scope:
        """The union of two scopes."""
        return Scope(
            everything=self.everything or other.everything,
            addresses=self.addresses | other.addresses,
            orphans=self.orphans or other.orphans,
        )


EVERYTHING: Final = Scope(everything=True)
NOTHING: Final = Scope()


def scope_of(hints: Iterable[Hint], inventory: Inventory) -> Scope:
    """Join hints into what must be looked at, given what is known.

    A function brings every function whose last known node path or device number the message
    mentions; a group brings its members. A message that cannot be mapped means everything.
    The slot, group, PF and VFs of each function are added by ``widen``.
    """
    hints = tuple(hints)
    if any(hint.everything for hint in hints):
        return EVERYTHING
    # A burst repeats itself: what differs only in its time is looked up once.
    news = {
        (hint.address, hint.orphan, (hint.group, hint.node_path, hint.node_number))
        for hint in hints
    }
    orphans = {word for each in inventory.orphans for word in (each.node.path, each.node.number)}
    addresses: set[Address] = set()
    about_orphans = False
    for address, orphan, words in news:
        known = [word for word in words if word is not None]
        found = {a for word in known for a in _whose(word, inventory)}
        if address is not None:
            found.add(address)
        is_orphan = orphan or not orphans.isdisjoint(known)
        if not found and not is_orphan:
            return EVERYTHING
        addresses |= found
        about_orphans |= is_orphan
    return widen(Scope(addresses=frozenset(addresses), orphans=about_orphans), inventory)


def _whose(word: str | DeviceNumber | int, inventory: Inventory) -> tuple[Address, ...]:
    """Who has a node of this path or number, or is in this IOMMU group."""
    if isinstance(word, int):
        return inventory.by_group.get(word, ())
    return inventory.by_node.get(word, ())


def widen(scope: Scope, inventory: Inventory) -> Scope:
    """Add what belongs to each function of a scope: its slot, IOMMU group, PF and VFs.

    The result is closed: widening it again adds nothing.
    """
    if scope.everything or not scope.addresses:
        return scope
    done: set[Address] = set()
    todo = set(scope.addresses)
    while todo:
        done |= todo
        known = [f for address in todo if (f := inventory.functions.get(address)) is not None]
        todo = {
            neighbour
            for slot in {slot_of(address) for address in todo}
            for number in range(8)
            if (neighbour := Address(f"{slot}.{number}")) in inventory.functions
        }
        for group in {f.iommu_group for f in known if f.iommu_group is not None}:
            todo.update(inventory.by_group[group])
        for function in known:
            todo.update(function.virtfns)
            if function.physfn is not None:
                todo.add(function.physfn)
        todo -= done
    return structs.replace(scope, addresses=frozenset(done))
