"""Does what a pass has decided, one action after another, and remembers what could not be done."""

from collections.abc import Callable, Iterable

import structlog

from agent.cdi.files import Action, WriteSpec
from agent.errors import StoreError
from agent.reconcile.account import Acts
from agent.reconcile.plan import failed, succeeded
from agent.reconcile.ports import SpecStore
from agent.reconcile.rules import Timing
from agent.troubles import Troubles

_log = structlog.get_logger()


class Actor:
    """Performs actions, and tells of the same failure once in a while only.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._troubles = Troubles()

    async def perform(
        self, actions: Iterable[Action], acts: Acts, store: SpecStore, timing: Timing
    ) -> bool:
        """Do these actions in order; a failure is remembered and the rest goes on.

        Args:
            actions: What to do.
            acts: What the pass has done so far; brought up to date.
            store: What does it.
            timing: When a failed action is tried again.

        Returns:
            Whether all of them could be done.
        """
        failures = len(acts.failures)
        for action in actions:
            try:
                await store.apply(action)
            except StoreError as error:
                now = self._clock()
                acts.failures.append((action, error.sentence))
                acts.memory = failed(acts.memory, action, error.sentence, now=now, timing=timing)
                self._tell(action, error, acts, now)
            else:
                acts.done.append(action)
                acts.memory = succeeded(acts.memory, action)
        return len(acts.failures) == failures

    def _tell(self, action: Action, error: StoreError, acts: Acts, now: float) -> None:
        if not self._troubles.is_news((action.path, error.sentence), now):
            return
        acts.told = True
        _log.error(
            "spec-write-failed" if isinstance(action, WriteSpec) else "spec-delete-failed",
            path=action.path,
            kind=action.kind,
            problem=error.sentence,
            hint=error.hint,
            attempt=acts.memory.retries[action.path].attempts,
        )
