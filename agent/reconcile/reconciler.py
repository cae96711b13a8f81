"""The loop, to be read from top to bottom: messages in, a pass, a report.

One task runs it and nobody else changes the state. A pass looks at what the messages hint at,
computes what is desired, plans, and acts: all withdrawals, then all publications. It never asks
what a message *said*: a lost, doubled or forged one costs a look and nothing else.

What blocks for a moment (reading /sys, /dev and the spec directories) runs in a thread; nothing
that can block for ever is done here. A pass is not interrupted: ``Stop`` ends the loop after the
pass that is under way, so no rename ever happens late.
"""

import asyncio
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog
from msgspec import structs

from agent.cdi.desired import Desired, desired
from agent.cdi.files import Action, Disk
from agent.errors import AgentError, LookError, StoreError
from agent.host.hints import EVERYTHING, Hint, Scope, scope_of, widen
from agent.host.model import DeviceNumber, Hold, Inventory
from agent.reconcile import early
from agent.reconcile.account import (
    Acts,
    is_as_left,
    is_news,
    is_starting,
    line_of,
    read_back,
    report_of,
)
from agent.reconcile.acting import Actor
from agent.reconcile.desk import Desk, Published
from agent.reconcile.messages import (
    RELOAD,
    SPECS,
    Finished,
    Inbox,
    Message,
    NewRules,
    Pause,
    Reconfigure,
    Stop,
)
from agent.reconcile.names import names_known_last, names_on_disk
from agent.reconcile.news import news
from agent.reconcile.plan import TRANSIENT, Plan, plan
from agent.reconcile.ports import Looker, SpecStore, Watchdog
from agent.reconcile.rules import Rules
from agent.reconcile.schedule import BOOT_POLL, Schedule
from agent.reconcile.state import Key, PassReport, State
from agent.reconcile.verdict import foreign_obstacle
from agent.troubles import Troubles
from agent.vfio.model import Answer, Asked, Order, Result
from agent.vfio.state import Claims

_log = structlog.get_logger()


class Reconciler:
    """Owns the state and runs the passes.

    Args:
        inbox: Where messages come from.
        scanner: Reads the host.
        store: Reads and writes the spec directories.
        rules: What the configuration decides.
        on_pass: Called after every pass, in the loop's thread; must not block or raise.
        blind: Whether a source of events is down or deaf at the moment.
        desk: What is done about claims; None where nobody claims anything.
        watchdog: Fed at every turn of the loop, by the task that does the work.
        clock: Monotonic seconds.
    """

    def __init__(  # noqa: PLR0913 - its collaborators, one by one
        self,
        *,
        inbox: Inbox,
        scanner: Looker,
        store: SpecStore,
        rules: Rules,
        on_pass: Callable[[PassReport, State], None] = lambda _report, _state: None,
        blind: Callable[[], bool] = lambda: False,
        desk: Desk | None = None,
        watchdog: Watchdog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._scanner = scanner
        self._store = store
        self._rules = rules
        self._on_pass = on_pass
        self._blind = blind
        self._desk = desk
        self._orders = early.Queue()
        self._results: list[Result] = []
        self._watchdog = watchdog
        self._clock = clock
        self._state = State()
        self._schedule = Schedule(clock())
        self.ready = self._schedule.ready
        self._believes_state = False
        """The state is what the last look found; if not, the next one is at everything."""
        self._read_at = -math.inf
        """When the latest reading of the spec directories began."""
        self._unread: Mapping[Key, str] = {}
        """What may have been written to disk and could not be read back."""
        self._looks_again = False
        """Others have changed the directories while the latest pass wrote; said once in a row, lest
        a disk that keeps no mode is written to for ever."""
        self._unprepared = ""
        self._troubles = Troubles()
        self._actor = Actor(clock)
        self._saving: asyncio.Task[None] | None = None

    def snapshot(self) -> State:
        """The state after the latest pass."""
        return self._state

    async def run(self) -> None:
        """Run passes until told to stop; the first one looks at everything."""
        hints = [Hint(reason="start", everything=True, received=self._clock())]
        while True:
            await self.run_pass(hints)
            if not len(self._inbox):
                self._save_record()
            # Messages are taken in every round, however long the next pass has been due: a host
            # that is slower than its own timers hears Stop all the same, and feeds the watchdog.
            while True:
                messages = [m for m in await self._inbox.batch(self._turn()) if self._is_news(m)]
                if messages or self._clock() >= self._due_at:
                    break
            if any(isinstance(message, Stop) for message in messages):
                break
            hints = [hint for message in messages for hint in await self._take(message)]
        if self._saving is not None:
            await self._saving

    def _save_record(self) -> None:
        """Begin to bring the record of what is ours to disk: no message waits for that disk."""
        if self._saving is not None:
            if not self._saving.done():
                return
            self._saving.result()  # it never fails; a bug shall show
        self._saving = asyncio.create_task(self._store.save_record(), name="record")

    def _is_news(self, message: Message) -> bool:
        """Whether a pass would learn from it: our own writes are changes of the directories too."""
        if not isinstance(message, Hint) or message.reason != SPECS:
            return True
        return message.received >= self._read_at

    async def _take(self, message: Message) -> tuple[Hint, ...]:
        """Put a message where the next pass finds it; what it hints at."""
        match message:
            case Hint():
                return (message,)
            case Asked():
                self._orders.waiting.append(message)
            case Finished():
                self._results.append(message.result)
            case Pause():
                self._pause(message)
            case Reconfigure():
                return await self._reconfigure(message)
            case Stop():
                pass
        return ()

    async def settle(self) -> State:
        """Run passes without news until nothing is waited for, bounded by ``ready_timeout``."""
        hints = [Hint(reason="start", everything=True, received=self._clock())]
        while True:
            await self.run_pass(hints)
            if self.ready.is_set():
                await self._store.save_record()
                return self._state
            await asyncio.sleep(max(0.0, self._schedule.wake_at - self._clock()))
            hints = []

    async def run_pass(self, hints: Sequence[Hint]) -> PassReport:
        """One pass: look, decide, act, account.

        Args:
            hints: What may have changed; none when only time has passed.
        """
        started = self._clock()
        scope = self._scope(hints, started)
        try:
            return await self._pass(hints, scope, started)
        except (LookError, StoreError) as error:
            return self._blocked(hints, scope, started, error)

    async def _pass(self, hints: Sequence[Hint], scope: Scope, started: float) -> PassReport:
        """The pass itself.

        Raises:
            LookError: The host cannot be read.
            StoreError: The spec directories cannot be read (any more).
        """
        before = self._state

        # Look. Both readings take one thread hop; from here on, facts and files are values.
        if scope.everything:
            await self._prepare()
        self._read_at = self._clock()
        inventory, disk = await asyncio.to_thread(self._look, scope, before.inventory)
        if scope.everything:
            self._schedule.looked_at_all(started)
        self._believes_state = True

        # Bring claims up to date, and their journal to disk, before anything follows from them.
        holds = await self._advance_claims(inventory, disk)
        if isinstance(disk, StoreError):
            self._state = structs.replace(before, inventory=inventory)
            raise disk  # claims depend on the host; all that follows, on the disk

        # Decide.
        wanted = desired(inventory, self._rules.profiles, holds, self._rules.policy, before.desired)
        decide = functools.partial(
            plan,
            wanted,
            layout=self._rules.layout,
            timing=self._rules.timing,
            now=self._clock(),  # of the whole pass: what fails in it is not due again in it
            heard=min((hint.received for hint in hints), default=started),
            udevd=inventory.environment.udevd,
        )
        memory = dataclasses.replace(
            before.memory, udev_done=before.memory.udev_done | _udev_done(hints)
        )
        decision = decide(disk, memory)

        # Act.
        acts = Acts(decision.memory)
        while not await self._perform(decision.withdrawals, acts):
            # What could not be withdrawn waits, and keeps its paths: nothing else is given them.
            disk = await self._read_again()
            decision = decide(disk, acts.memory)
            acts.memory = decision.memory
        acts.withdrawn_at = self._clock()
        self._unread = decision.published
        await self._perform(decision.publications, acts)
        planned = disk
        if acts.done:
            disk = await self._read_again()
        self._unread = {}
        self._looks_again = not (self._looks_again or is_as_left(disk, planned, acts))

        # Account.
        state = self._next_state(inventory, wanted, disk, decision, acts)
        report = report_of(hints, scope, before, state, acts, started=started, now=self._clock())
        self._state = state
        self._tell(before, state, report, decision, acts)

        # What claims do to devices begins only now: the specs no longer name what they move.
        if self._desk is not None:
            if self._desk.depends_on_specs and state.published != before.published:
                self._desk.look_again()
            self._desk.begin()
        self._on_pass(report, state)
        return report

    async def submit(self, order: Order) -> Answer:
        """Ask for a claim, its end, or a stranded device back; returns when it is done or refused.

        Whoever stops waiting changes nothing: the order goes on, and asking again joins it.

        Raises:
            RuntimeError: Nobody claims anything here.
        """
        if self._desk is None:
            raise RuntimeError("this reconciler has no desk for claims")
        asked, reply = self._desk.register(order)
        self._inbox.order(asked)
        return await reply

    async def pause(self, *, paused: bool) -> None:
        """Let no claim begin to move a device, or let them again; returns when it is so."""
        message = Pause(paused, asyncio.get_running_loop().create_future())
        self._inbox.order(message)
        await message.taken

    def _pause(self, message: Pause) -> None:
        paused = message.paused
        if self._desk is not None and self._desk.rules.paused is not paused:
            self._desk.rules = structs.replace(self._desk.rules, paused=paused)
            self._state = structs.replace(self._state, paused=paused)
            _log.warning("paused" if paused else "resumed")
        if not message.taken.done():
            message.taken.set_result(None)

    async def reconfigure(self, new: NewRules) -> None:
        """Take a new configuration; returns when it is in force.

        Raises:
            AgentError: It was refused, and the old one stays.
        """
        message = Reconfigure(new, asyncio.get_running_loop().create_future())
        self._inbox.order(message)
        await message.taken

    async def _reconfigure(self, message: Reconfigure) -> tuple[Hint, ...]:
        """Take it, unless it does not go with what is claimed by now."""
        new = message.new
        try:
            new.check(self._state)
        except AgentError as error:
            if not message.taken.done():
                message.taken.set_exception(error)
            return ()
        self._rules, self._scanner, self._store = new.rules, new.scanner, new.store
        if self._desk is not None and new.claim_rules is not None:
            paused = self._desk.rules.paused
            self._desk.rules = structs.replace(new.claim_rules, paused=paused)
        await self._prepare()
        _log.info("reloaded")
        if not message.taken.done():
            message.taken.set_result(None)
        return (Hint(RELOAD, everything=True, received=self._clock()),)

    async def _advance_claims(
        self, inventory: Inventory, disk: Disk | StoreError
    ) -> tuple[Hold, ...]:
        """Hand the desk what is true; what claims mean for publishing."""
        if self._desk is None:
            return ()
        orders = self._orders.take(
            inventory,
            ready=self.ready.is_set(),
            now=self._clock(),
            patience=self._rules.ready_timeout,
        )
        results, self._results = self._results, []
        state, rules = self._state, self._rules
        published: Published = functools.partial(names_known_last, state)
        specs_problem = ""
        if isinstance(disk, StoreError):
            specs_problem, disk = disk.sentence, Disk(rules.layout.directory)
        else:
            published = functools.partial(names_on_disk, state, disk, rules.layout)
        await self._desk.advance(
            inventory,
            published,
            {w.address: w.detail for w in state.withheld},
            specs_problem=specs_problem,
            specs_unread=state.disk is None,
            obstructed=functools.partial(
                foreign_obstacle, disk=disk, profiles=rules.profiles, layout=rules.layout
            ),
            orders=orders,
            results=results,
        )
        return self._desk.holds()

    async def _prepare(self) -> None:
        """Make the spec directory, which consumers expect even while it is empty."""
        try:
            await self._store.prepare()
        except StoreError as error:
            if error.sentence != self._unprepared:
                self._unprepared = error.sentence
                _log.error("spec-directory-missing", problem=error.sentence, hint=error.hint)
        else:
            self._unprepared = ""

    async def _perform(self, actions: Iterable[Action], acts: Acts) -> bool:
        return await self._actor.perform(actions, acts, self._store, self._rules.timing)

    async def _read_again(self) -> Disk:
        self._read_at = self._clock()
        return await asyncio.to_thread(self._store.read)

    def _turn(self) -> float:
        """Feed the watchdog; seconds until it wants to be fed again, or a pass is due."""
        wait = self._due_at - self._clock()
        if self._watchdog is not None:
            self._watchdog.feed_watchdog()
            if self._watchdog.watchdog_interval is not None:
                wait = min(wait, self._watchdog.watchdog_interval)
        return max(0.0, wait)

    @property
    def _claims(self) -> Claims:
        return Claims() if self._desk is None else self._desk.claims

    @property
    def _due_at(self) -> float:
        """When the next pass is due without news."""
        wake_at = min(self._schedule.wake_at, self._resync_at)
        if self._orders.waiting:
            wake_at = min(wake_at, self._read_at + BOOT_POLL)
        return wake_at if self._desk is None else min(wake_at, self._desk.wake_at)

    @property
    def _resync_at(self) -> float:
        return self._schedule.resync_at(self._rules, blind=self._blind())

    def _scope(self, hints: Sequence[Hint], now: float) -> Scope:
        """What this pass reads: what the hints name, and whatever is waited for."""
        if now >= self._resync_at or not self._believes_state:
            return EVERYTHING
        memory = self._state.memory
        awaited = {w.address for w in self._state.withheld if w.reason in TRANSIENT}
        awaited |= memory.recheck.addresses
        if self._desk is not None:
            awaited |= self._desk.awaited
            for asked in self._orders.waiting:
                awaited |= asked.addresses
        inventory = self._state.inventory
        facts = [hint for hint in hints if hint.reason != SPECS]
        return scope_of(facts, inventory) | widen(Scope(addresses=frozenset(awaited)), inventory)

    def _look(self, scope: Scope, previous: Inventory) -> tuple[Inventory, Disk | StoreError]:
        """Read the host and the spec directories; runs in a thread.

        Returns:
            What the host has, and what the directories have or why they cannot be read.

        Raises:
            LookError: The host cannot be read.
        """
        inventory = self._scanner.scan(scope, previous)
        try:
            return inventory, self._store.read()
        except StoreError as error:
            return inventory, error

    def _next_state(
        self,
        inventory: Inventory,
        wanted: Desired,
        disk: Disk,
        decision: Plan,
        acts: Acts,
    ) -> State:
        """What is true now, read back from the disk rather than believed of the actions."""
        published, withheld = read_back(decision, disk, acts.memory, self._rules.layout)
        retries = acts.memory.retries
        wakes = [retry.at for retry in retries.values()]
        if decision.wake_at is not None:
            wakes.append(decision.wake_at)
        if self._looks_again:
            wakes.append(self._clock())
        starting = is_starting(inventory, withheld)
        self._schedule.passed(wakes, self._rules, self._clock(), starting=starting)
        return State(
            inventory=inventory,
            desired=wanted,
            disk=disk,
            memory=acts.memory,
            published=published,
            withheld=withheld,
            passes=self._state.passes + 1,
            claims=self._claims,
            paused=self._desk is not None and self._desk.rules.paused,
            problems=tuple(retry.problem for retry in retries.values()),
        )

    def _blocked(
        self, hints: Sequence[Hint], scope: Scope, started: float, error: AgentError
    ) -> PassReport:
        """A pass that came to nothing: the host or the spec directory cannot be read.

        What is published stays as it was known last, and the next pass looks at everything: nothing
        is believed of what was not read. Claims need the host alone, and wait for nothing else.
        """
        before = self._state
        if self._desk is not None:
            if isinstance(error, LookError):
                self._desk.refuse(self._orders.take_all(), error.sentence)
            self._desk.begin()  # what was decided before it failed: nobody else would answer
        now = self._clock()
        if error.sentence not in before.problems and self._troubles.is_news(error.sentence, now):
            _log.error("look-failed", problem=error.sentence, hint=error.hint)
        self._state = structs.replace(
            before,
            passes=before.passes + 1,
            published={**before.published, **self._unread},
            claims=self._claims,
            problems=(error.sentence,),
        )
        self._believes_state = False
        self._schedule.failed(self._rules, now)
        acts = Acts(before.memory)
        report = structs.replace(
            report_of(hints, scope, before, self._state, acts, started=started, now=now),
            problems=(error.sentence,),
        )
        self._on_pass(report, self._state)
        return report

    def _tell(
        self, before: State, state: State, report: PassReport, decision: Plan, acts: Acts
    ) -> None:
        """One canonical line a pass, and one for each thing that is new to its reader."""
        for item in news(before, state, unconfirmed=decision.unconfirmed):
            _log.log(item.level, item.event, **item.fields)
        _log.log(
            logging.INFO if is_news(report, acts) else logging.DEBUG,
            "pass",
            **line_of(before, state, report),
        )


def _udev_done(hints: Iterable[Hint]) -> frozenset[tuple[str, DeviceNumber]]:
    """The nodes that udev says it has dealt with."""
    return frozenset(
        (hint.node_path, hint.node_number)
        for hint in hints
        if hint.udev_done and hint.node_path is not None and hint.node_number is not None
    )
