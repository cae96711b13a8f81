"""What reaches the reconciler, and the bounded queue through which it comes.

Everyone but the reconciler's own task sends messages and reads snapshots. Hints may be lost (a
full queue turns them into one "look at everything", as an overflow of the socket does); nothing
else may.
"""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from agent.host.hints import Hint
from agent.reconcile.ports import Looker, SpecStore
from agent.reconcile.rules import Rules
from agent.reconcile.state import State
from agent.vfio.model import Asked, Result
from agent.vfio.state import Rules as ClaimRules

RELOAD: Final = "reload"
"""The reason of the pass that ends a reload: a new configuration is in force."""
RELOAD_REFUSED: Final = "reload-refused"
"""The reason of the pass that ends a reload after which the old one is."""


SPECS: Final = "specs"
"""The reason of a hint at the spec directories: it brings no function into a look."""


class Stop(msgspec.Struct, frozen=True):
    """The last message: end after the pass that is under way."""


class NewRules(msgspec.Struct, frozen=True):
    """What a new configuration brings."""

    rules: Rules
    scanner: Looker
    store: SpecStore
    claim_rules: ClaimRules | None = None
    """None where nobody claims anything."""
    check: Callable[[State], None] = lambda _state: None
    """Refuses it by an ``AgentError`` if it does not go with what is claimed."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reconfigure:
    """Take these, or refuse them; the next pass looks at everything by them."""

    new: NewRules
    taken: asyncio.Future[None]
    """Done when they are in force."""


class Finished(msgspec.Struct, frozen=True):
    """A worker has done an effect, or gives up waiting for it."""

    result: Result


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pause:
    """Let no claim begin to move a device, or let them again. What is on its way goes on."""

    paused: bool
    taken: asyncio.Future[None]
    """Done when it is so."""


Order = Asked | Finished | Pause | Reconfigure | Stop
"""What must not be lost."""

Message = Hint | Order


class Inbox:
    """The bounded queue between everything that happens and the one task that reacts.

    Args:
        size: How many messages may wait before a hint is one too many.
    """

    def __init__(self, size: int = 4096) -> None:
        self._queue: asyncio.Queue[Message] = asyncio.Queue()  # of hints no more than `size`
        self._size = size
        self._lost: Hint | None = None
        self.received: Counter[str] = Counter()
        """Hints by reason, lost ones included."""
        self.overflows = 0
        """How often the queue went from not full to full."""

    def __len__(self) -> int:
        """How many messages wait."""
        return self._queue.qsize()

    def hint(self, hint: Hint) -> None:
        """Add a hint; never blocks and never fails."""
        self.received[hint.reason] += 1
        if self._queue.qsize() < self._size:
            self._queue.put_nowait(hint)
        elif self._lost is None:
            self.overflows += 1
            self._lost = Hint(reason="queue-full", everything=True, received=hint.received)

    def order(self, message: Order) -> None:
        """Add a message that must not be lost, however full the queue is; never blocks or fails.

        Orders are few: each comes from a person, a signal, or an effect that was started.
        """
        self._queue.put_nowait(message)

    async def batch(self, timeout: float | None) -> list[Message]:  # noqa: ASYNC109 - empty is an answer, no error
        """Everything that waits, after waiting for one message; empty if none came in time.

        Args:
            timeout: Seconds; None waits without limit.
        """
        messages: list[Message] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                messages.append(await self._queue.get())
        while not self._queue.empty():
            messages.append(self._queue.get_nowait())
        if self._lost is not None:
            messages.append(self._lost)
            self._lost = None
        return messages
