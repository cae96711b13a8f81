"""Orders that came too early: before the start's waiting is over, or while a driver may be coming.

At boot a GPU has no driver *yet*. A claim would remember that it had none, and its release would
leave it so. So whoever asks to claim something waits, not longer than the start does, until each
function has its driver or udev has nothing more to do. What else was asked for is not kept waiting,
unless it is about a claim that is.
"""

from collections.abc import Iterable

from agent.host.model import Inventory
from agent.vfio.model import Asked, Prepare, Recover
from agent.vfio.orders import is_early


class Queue:
    """The orders that have not been taken yet."""

    def __init__(self) -> None:
        self.waiting: list[Asked] = []
        """In the order in which they came."""
        self._until: dict[int, float] = {}

    def take(
        self, inventory: Inventory, *, ready: bool, now: float, patience: float
    ) -> list[Asked]:
        """Take those for which it is time.

        Args:
            inventory: What the host has now.
            ready: The start's waiting is over.
            now: Monotonic seconds.
            patience: Seconds after which an order is taken whatever the host looks like.
        """
        until = {each.ticket: self._until.get(each.ticket, now + patience) for each in self.waiting}
        due: list[Asked] = []
        early: list[Asked] = []
        kept: set[str] = set()
        for asked in self.waiting:
            order = asked.order
            name = None if isinstance(order, Recover) else order.id
            must_wait = isinstance(order, Prepare) and (not ready or is_early(order, inventory))
            if name in kept or (must_wait and now < until[asked.ticket]):
                early.append(asked)
                kept.update(() if name is None else (name,))
            else:
                due.append(asked)
        self.waiting = early
        self._until = {each.ticket: until[each.ticket] for each in early}
        return due

    def take_all(self) -> Iterable[Asked]:
        """Take all of them, since none can be done."""
        waiting, self.waiting, self._until = self.waiting, [], {}
        return waiting
