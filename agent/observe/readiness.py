"""What systemd is owed: READY after the start, and after each reload. Pure.

``systemctl reload`` waits for it, and at a start so do the units that are ordered after ours. It
comes when the files are as the configuration says, or when waiting for a device has lasted long
enough. Of a reload that was refused systemd wants to hear the end too; to a person that is no news.
"""

from collections.abc import Iterable

from agent.cdi.desired import Withheld
from agent.reconcile.plan import TRANSIENT


class ReadyNotice:
    """Owed from the start on."""

    def __init__(self) -> None:
        self._is_owed = True
        self._is_news = True
        self._until: float | None = None
        """When the latest reload counts as done, whatever is waited for; None before the first."""

    def reloaded(self, *, taken: bool, until: float) -> None:
        """Owe it again.

        Args:
            taken: The new configuration is in force; if not, it was refused.
            until: Monotonic seconds at which the reload counts as done.
        """
        self._is_owed = True
        self._is_news |= taken
        self._until = until

    def is_due(self, withheld: Iterable[Withheld], *, started: bool, now: float) -> bool:
        """Whether it is owed, and what it tells has come about.

        Args:
            withheld: What is not published now.
            started: The start is over.
            now: Monotonic seconds.
        """
        if not (self._is_owed and started):
            return False
        if self._until is None or now >= self._until:
            return True
        return not any(each.reason in TRANSIENT for each in withheld)

    def given(self) -> bool:
        """Note that it was given; whether that is news to a person."""
        news = self._is_news
        self._is_owed = self._is_news = False
        return news
