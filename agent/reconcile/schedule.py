"""When a pass is due without news, and from when on the service counts as ready.

Times are monotonic seconds and arguments; nothing here waits. A pass is due when something that it
waits for may have happened (a device has settled, a write is tried again), and at the latest when
everything is to be looked at again.
"""

import asyncio
import math
from collections.abc import Iterable

from agent.reconcile.rules import Rules

BOOT_POLL = 0.1
"""Seconds between looks while READY, or an order, waits for udev to load a driver: its end sends no
event."""


class Schedule:
    """When the next pass is due.

    Args:
        started: When the service began.
    """

    def __init__(self, started: float) -> None:
        self.ready = asyncio.Event()
        """Set after the first pass that leaves nothing to wait for, or after ``ready_timeout``."""
        self.wake_at = math.inf
        """When something that is waited for may be over."""
        self._started = started
        self._looked_at_all = -math.inf

    def resync_at(self, rules: Rules, *, blind: bool) -> float:
        """When everything is looked at, whatever is heard.

        Args:
            rules: What the configuration decides.
            blind: A source of events is down or deaf.
        """
        period = min(rules.resync, rules.resync_blind) if blind else rules.resync
        return self._looked_at_all + period

    def looked_at_all(self, at: float) -> None:
        """Note that everything has been looked at."""
        self._looked_at_all = at

    def passed(self, wakes: Iterable[float], rules: Rules, now: float, *, starting: bool) -> None:
        """Note the end of a pass.

        Args:
            wakes: When something may be over that it waits for.
            rules: What the configuration decides.
            now: When it decided so.
            starting: Something that the start has to wait for is still under way.
        """
        self.wake_at = min(wakes, default=math.inf)
        if self.ready.is_set():
            return
        if starting and now < self._started + rules.ready_timeout:
            self.wake_at = min(self.wake_at, now + BOOT_POLL)
        else:
            self.ready.set()

    def failed(self, rules: Rules, now: float) -> None:
        """Note a pass that came to nothing: the next one looks at everything."""
        self._looked_at_all = now  # in vain: it is tried again by `wake_at`
        self.wake_at = now + rules.resync_blind
        if self.ready.is_set():
            return
        wait_until = self._started + rules.ready_timeout
        if now >= wait_until:
            self.ready.set()  # and not healthy, which the state says
        else:
            self.wake_at = min(self.wake_at, wait_until)
