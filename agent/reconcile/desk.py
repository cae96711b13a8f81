"""The reconciler's desk for claims: takes orders, asks ``vfio.claim`` what is next, sees it done.

It belongs to the reconciler's task, like the state. In every pass it is asked twice. Before
anything is decided about specs, ``advance`` brings the claims up to date and the journal to disk;
what it answers with, holds, is what claims mean for publishing. After the specs are written,
``begin`` starts the effects and answers those who have waited. So the order that a claim needs
(journal, then withdraw, then touch the device) is the order of a pass.

Nothing is decided here. A journal that cannot be saved is told to ``advance``, which then lets
no claim go on that needs it.
"""

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import structlog
from msgspec import structs

from agent.errors import AgentError
from agent.host.model import Address, Function, Hold, HoldMode, Inventory
from agent.reconcile.ports import ClaimJournal, EffectWorker
from agent.vfio.claim import advance, explain, holds
from agent.vfio.model import (
    RECOVERY,
    Answer,
    Asked,
    Durable,
    Effect,
    Inspection,
    Order,
    Recover,
    Result,
    Stray,
    Written,
)
from agent.vfio.problems import Code, problem
from agent.vfio.start import start
from agent.vfio.state import Advance, Claims, Ended, Outcome, Phase, Rules, Seen

_log = structlog.get_logger()

INSPECT: Final = "inspect"
"""The name of the step that looks and does not write."""

Published = Callable[[Iterable[Hold]], Mapping[Address, tuple[str, ...]]]
"""The qualified CDI names of each function that are on disk, given what claims hold."""


class Desk:
    """What the reconciler does about claims.

    Args:
        journal: What has to survive a crash; loaded already.
        found: What it said when it was loaded; None if it could not be used.
        worker: Performs effects; its results come back through the inbox.
        rules: What the configuration decides about claims.
        boot_id: Of this boot.
        owners_gone: Which of these claims' owners have ended; reads /proc, called in a thread.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        journal: ClaimJournal,
        found: Durable | None,
        worker: EffectWorker,
        rules: Rules,
        boot_id: str,
        owners_gone: Callable[[Claims], frozenset[str]] = lambda _claims: frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rules = rules
        self.claims = Claims(boot_id=boot_id)
        self.wake_at = math.inf
        """When ``advance`` has to be called again even without news."""
        self.ended: Counter[tuple[str, ...]] = Counter()
        """Claims that have ended, by mode and outcome."""
        self.durations: list[tuple[str, float]] = []
        """Steps that were done since this was emptied last, with the seconds that each took."""
        self.hung: int = 0
        """How many writes did not return in time."""
        self._journal = journal
        self._found = found
        self._is_started = False
        self._early: tuple[Asked, ...] = ()
        """Orders that came before the first look succeeded."""
        self._journal_problem = ""
        self._blind_since: float | None = None
        """When the host could be looked at for the last time, if it cannot be now."""
        self._worker = worker
        self._owners_gone = owners_gone
        self._clock = clock
        self._tickets = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Answer]] = {}
        self._decided = Advance(self.claims)
        self._started_at: dict[Effect, float] = {}

    # --- for those who ask ------------------------------------------------------------------------

    def register(self, order: Order) -> tuple[Asked, asyncio.Future[Answer]]:
        """Number an order; its answer comes through the future. Whoever stops waiting just does."""
        asked = Asked(next(self._tickets), order)
        reply: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._replies[asked.ticket] = reply
        return asked, reply

    # --- for the reconciler -----------------------------------------------------------------------

    @property
    def awaited(self) -> frozenset[Address]:
        """The functions that claims depend on, to be looked at in every pass."""
        return frozenset(
            state.address for claim in self.claims.live.values() for state in claim.functions
        ) | frozenset(self.claims.strays)

    @property
    def depends_on_specs(self) -> bool:
        """Whether a claim waits for specs, or for the names that its devices have in them."""
        return any(claim.phase is not Phase.LOST for claim in self.claims.live.values())

    def holds(self) -> tuple[Hold, ...]:
        """What claims mean for publishing."""
        return holds(self.claims)

    async def advance(
        self,
        inventory: Inventory,
        published: Published,
        withheld: Mapping[Address, str],
        *,
        specs_problem: str = "",
        specs_unread: bool = False,
        obstructed: Callable[[Function, HoldMode], str | None] = lambda _function, _mode: None,
        orders: Sequence[Asked] = (),
        results: Iterable[Result] = (),
    ) -> None:
        """Bring the claims up to date, and the journal to disk.

        Args:
            inventory: Looked at after everything that the results tell of.
            published: What is on disk, as far as these claims have to know.
            withheld: Why a function is not published.
            specs_problem: Why it cannot be told what is on disk; ``published`` is what was known
                last.
            specs_unread: Nor was it known at any time.
            obstructed: Which file on disk would keep a function from being published in a mode.
            orders: New ones.
            results: What came of effects.
        """
        if not self._is_started:
            self._early = tuple(orders)
            self._start(inventory)
            return
        self._blind_since = None
        orders, self._early = tuple(filter(self._is_wanted, (*self._early, *orders))), ()
        results = tuple(results)
        self.wake_at = math.inf
        if orders and self._journal_problem:
            await self._save()  # whoever asks (again) is told how it is now
        self._time(results)
        before = self.claims
        seen = Seen(
            inventory=inventory,
            # Of hundreds of devices, where nobody asks, it need not be known.
            published=published(holds(before)) if orders or self.awaited else {},
            specs_problem=specs_problem,
            specs_unread=specs_unread,
            saved=self._journal.saved or Durable(),
            journal_problem=self._journal_problem,
            withheld=withheld,
            obstructed=obstructed,
            owners_gone=await self._gone(before),
        )
        now = self._clock()
        decided = advance(before, seen, now=now, rules=self.rules, orders=orders, results=results)
        self.claims = decided.claims
        if await self._save():
            # Whoever waited for the journal need not wait for another pass.
            seen = structs.replace(
                seen,
                published=published(holds(self.claims)),
                saved=self.claims.durable,
                journal_problem="",
            )
            more = advance(self.claims, seen, now=self._clock(), rules=self.rules)
            decided = _together(decided, more)
            self.claims = decided.claims
            if await self._save():
                self.look_again()
        if decided.wake_at is not None:
            self.wake_at = min(self.wake_at, decided.wake_at)
        self._decided = decided
        self._tell(before, decided)

    def begin(self) -> None:
        """Start what was decided, and answer; the specs are as the holds say, or could not be."""
        decided, self._decided = self._decided, Advance(self.claims)
        for effect in decided.effects:
            self._started_at[effect] = self._clock()
            self._worker.start(effect)
        for answer in decided.answers:
            self._answer(answer)

    def refuse(self, orders: Iterable[Asked], why: str) -> None:
        """Answer without a look, since there is none to be had: nothing is begun without one.

        What is under way goes on when there is one; who waits for it is told so after a while.

        Args:
            orders: New ones.
            why: The host cannot be looked at.
        """
        now = self._clock()
        self._blind_since = now if self._blind_since is None else self._blind_since
        self.wake_at = math.inf  # it is called when there is a look
        what = problem(Code.HOST_UNKNOWN, f"nothing can be claimed or given back: {why}")
        orders, self._early = (*self._early, *orders), ()
        for asked in orders:
            order = asked.order
            name = f"{RECOVERY}{order.address}" if isinstance(order, Recover) else order.id
            self._answer(Answer(asked.ticket, name, problems=(what,)))
        if now < self._blind_since + self.rules.deadlines.withdraw:
            return
        for claim in self.claims.live.values():
            for waiter in claim.waiters:
                self._answer(Answer(waiter.ticket, claim.id, problems=(what,)))

    def look_again(self) -> None:
        """What claims depend on has changed: have ``advance`` called again at once."""
        self.wake_at = self._clock()

    def _answer(self, answer: Answer) -> None:
        reply = self._replies.pop(answer.ticket, None)
        if reply is not None and not reply.done():
            reply.set_result(answer)

    def _is_wanted(self, asked: Asked) -> bool:
        """Whether anybody waits for the answer: what nobody wants any more is not begun."""
        reply = self._replies[asked.ticket]
        if reply.cancelled():
            del self._replies[asked.ticket]
        return not reply.cancelled()

    def _start(self, inventory: Inventory) -> None:
        """Take over what an earlier agent wrote down; ``inventory`` is a look at everything."""
        self._is_started = True
        started = start(
            Durable() if self._found is None else self._found,
            inventory,
            boot_id=self.claims.boot_id,
            now=self._clock(),
            damaged=self._found is None,
        )
        for record in started.voided:
            _log.info("claim-void", claim=record.id, devices=list(record.request.devices))
        for effect in started.effects:
            self._worker.start(effect)
        self.claims = started.claims
        # What is being recovered is told if that fails; of the rest nobody would hear otherwise.
        self._tell_strays(
            stray
            for address, stray in self.claims.strays.items()
            if self.claims.claim_of(address) is None
        )
        self._decided = Advance(self.claims)
        self.look_again()

    async def _save(self) -> bool:
        """Have the journal say how claims are now; whether it says something new."""
        durable = self.claims.durable
        if durable == self._journal.saved:
            self._journal_problem = ""
            return False
        try:
            await self._journal.save(durable)
        except AgentError as error:
            if error.sentence != self._journal_problem:
                _log.error("journal-failed", problem=error.sentence, hint=error.hint)
            self._journal_problem = error.sentence
            self.wake_at = min(self.wake_at, self._clock() + self.rules.deadlines.poll)
            return False
        self._journal_problem = ""
        return True

    async def _gone(self, claims: Claims) -> frozenset[str]:
        """Ask after owners, if there are any; no event tells of their end."""
        if all(claim.record.request.owner_pid is None for claim in claims.live.values()):
            return frozenset()
        self.wake_at = min(self.wake_at, self._clock() + self.rules.deadlines.poll)
        return await asyncio.to_thread(self._owners_gone, claims)

    def _time(self, results: Iterable[Result]) -> None:
        """Note how long each effect took."""
        for result in results:
            began = self._started_at.pop(result.effect, None)
            if isinstance(result, Written) and result.hung:
                self.hung += 1
            if began is not None:
                step = INSPECT if isinstance(result, Inspection) else result.effect.step
                self.durations.append((step, self._clock() - began))

    def _tell(self, before: Claims, decided: Advance) -> None:
        """One line for each claim that has come further, ended, or left something behind."""
        for key, claim in decided.claims.live.items():
            old = before.live.get(key)
            if not claim.dry_run and (old is None or old.phase is not claim.phase):
                _log.info(
                    "claim",
                    claim=claim.id,
                    phase=claim.phase,
                    mode=claim.record.request.mode,
                    devices=list(claim.record.request.devices),
                    client=claim.record.request.client,
                    explanation=explain(claim),
                )
        for ended in decided.ended:
            self._tell_end(ended)
        new = decided.claims.strays.keys() - before.strays.keys()
        self._tell_strays(decided.claims.strays[address] for address in new)

    def _tell_strays(self, strays: Iterable[Stray]) -> None:
        for stray in strays:
            _log.error(
                "stranded",
                device=stray.origin.address,
                problem=stray.problem.sentence,
                hint=stray.problem.hint,
            )

    def _tell_end(self, ended: Ended) -> None:
        request = ended.claim.record.request
        self.ended[request.mode.value, ended.outcome.value] += 1
        quiet = ended.outcome in {Outcome.RELEASED, Outcome.FORGOTTEN, Outcome.REFUSED}
        say = _log.info if quiet else _log.warning
        say(
            "claim-ended",
            claim=ended.claim.id,
            outcome=ended.outcome.value,
            devices=list(request.devices),
            client=request.client,
            problems=[each.sentence for each in ended.problems],
        )


def _together(first: Advance, then: Advance) -> Advance:
    """What two calls decided, one after the other."""
    wakes = [each.wake_at for each in (first, then) if each.wake_at is not None]
    return Advance(
        claims=then.claims,
        effects=first.effects + then.effects,
        answers=first.answers + then.answers,
        passed=first.passed + then.passed,
        ended=first.ended + then.ended,
        wake_at=min(wakes, default=None),
    )
