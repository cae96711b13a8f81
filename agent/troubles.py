"""Telling of the same trouble once a minute, however often it comes. Pure: time is an argument.

On a host that does not hold still a trouble can come thousands of times a second, and a log that
fills the disk is one more. Counters count every case; an entry is for people.
"""

from collections.abc import Hashable
from typing import Final

QUIET: Final = 60.0
"""Seconds between two entries about the same trouble."""


class Troubles:
    """Remembers what was told of in the last minute."""

    def __init__(self) -> None:
        self._told: dict[Hashable, float] = {}

    def is_news(self, trouble: Hashable, now: float) -> bool:
        """Whether to tell of a trouble now; if so, it counts as told.

        Args:
            trouble: What makes two of them the same.
            now: Monotonic seconds.
        """
        self._told = {known: at for known, at in self._told.items() if now - at < QUIET}
        if trouble in self._told:
            return False
        self._told[trouble] = now
        return True
