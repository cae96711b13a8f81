"""What the reconciler needs from the host, from the disk, and from whoever watches it."""

from typing import Protocol

from agent.cdi.files import Action, Disk
from agent.host.hints import Scope
from agent.host.model import Inventory
from agent.vfio.model import Durable, Effect


class Looker(Protocol):
    """Reads the host: ``host.scan.Scanner``."""

    def scan(self, scope: Scope, previous: Inventory) -> Inventory:
        """Read the functions of the scope; the rest is as before. Blocks for milliseconds."""


class SpecStore(Protocol):
    """Reads and changes the spec directories: ``cdi.store.Store``."""

    def read(self) -> Disk:
        """Read the spec directories. Blocks for milliseconds."""

    async def prepare(self) -> None:
        """Make the directory if it is missing: some consumers break without it.

        Raises:
            StoreError: It could not be made.
        """

    async def save_record(self) -> None:
        """Bring the record of what is ours up to date on disk; never urgent, never fails."""

    async def apply(self, action: Action) -> None:
        """Perform one action, atomically.

        Raises:
            StoreError: It could not be done; the old file is as it was, or is gone.
        """


class Watchdog(Protocol):
    """Takes silence of the loop for its death: ``observe.systemd.Notifier``."""

    @property
    def watchdog_interval(self) -> float | None:
        """Seconds between two signs of life; None if nobody waits for any."""

    def feed_watchdog(self) -> None:
        """Give a sign of life; cheap enough for every turn of the loop."""


class ClaimJournal(Protocol):
    """What has to survive a crash: ``vfio.journal.Journal``."""

    @property
    def saved(self) -> Durable | None:
        """What is on disk; None if that is not known."""

    async def save(self, durable: Durable) -> None:
        """Make it say this, durably.

        Raises:
            AgentError: It could not be done.
        """


class EffectWorker(Protocol):
    """Performs effects: ``vfio.worker.Worker``; its results come through the inbox."""

    def start(self, effect: Effect) -> None:
        """Begin an effect; returns at once."""
