"""The desk for claims by itself: what it hands to ``vfio.claim``, and when."""

import asyncio
import math
from collections.abc import Iterable, Mapping

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from agent.errors import AgentError
from agent.host.model import Address, Hold, HoldMode
from agent.reconcile.desk import Desk
from agent.vfio.model import (
    Answer,
    Asked,
    Durable,
    Effect,
    Inspect,
    Inspection,
    Prepare,
    Release,
    Result,
    Stray,
)
from agent.vfio.orders import unknown_origin
from agent.vfio.problems import Code, problem
from agent.vfio.state import Phase, Rules
from tests.vfio.world import GPU, Chip, World

NAME = f"intel.com/gpu={GPU}"
PREPARE = Prepare("vm", HoldMode.VFIO, (GPU,))


class Journal:
    """One that can be written unless it is full."""

    def __init__(self) -> None:
        self.saved: Durable | None = Durable()
        self.is_full = False

    async def save(self, durable: Durable) -> None:
        if self.is_full:
            raise AgentError("no space left on device")
        self.saved = durable


class Worker:
    """One that remembers what it is to do."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []

    def start(self, effect: Effect) -> None:
        self.effects.append(effect)


class Bench:
    """A desk, and what it works with."""

    def __init__(self, found: Durable | None = Durable()) -> None:  # noqa: B008 - immutable
        self.world = World(Chip(GPU))
        self.worker = Worker()
        self.journal = Journal()
        self.now = 1000.0
        self.desk = Desk(
            journal=self.journal,
            found=found,
            worker=self.worker,
            rules=Rules(),
            boot_id="0" * 32,
            clock=lambda: self.now,
        )
        self.specs: Mapping[Address, tuple[str, ...]] = {}
        self.stale = False
        """A spec has an entry of which nobody knows any more whose it is."""

    def published(self, holds: Iterable[Hold]) -> Mapping[Address, tuple[str, ...]]:
        """As the reconciler tells it: what is stale may be of whatever is being withdrawn."""
        leaving = [hold.address for hold in holds if not hold.settled]
        return dict(self.specs) | (dict.fromkeys(leaving, ("stale",)) if self.stale else {})

    async def run_pass(self, *orders: Asked, results: Iterable[Result] = ()) -> None:
        await self.desk.advance(
            self.world.look(), self.published, {}, orders=orders, results=results
        )
        self.desk.begin()

    def inspect(self) -> Inspection:
        """Nothing speaks against what was asked last."""
        effect = self.worker.effects[-1]
        assert isinstance(effect, Inspect)
        return Inspection(effect, overrides=((GPU, None),), holders_known=True)

    def is_in(self, phase: Phase) -> bool:
        return self.desk.claims.live["vm"].phase is phase


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def answer_to(reply: "asyncio.Future[Answer]") -> Answer:
    assert reply.done(), "it is answered by now"
    return await reply


async def test_an_order_that_came_before_the_first_look_is_not_lost(bench: Bench) -> None:
    """The host, or the directory for specs, could not be read while it came."""
    first, reply = bench.desk.register(Release("vm"))
    await bench.run_pass(first)
    assert not reply.done(), "what is on disk is not known in the first pass"
    await bench.run_pass()
    assert (await answer_to(reply)).ok


async def test_what_nobody_waits_for_any_more_is_not_begun(bench: Bench) -> None:
    """It came while nothing could be begun, and whoever sent it has hung up since."""
    early, reply = bench.desk.register(PREPARE)
    await bench.run_pass(early)
    reply.cancel()
    later, other = bench.desk.register(PREPARE)
    other.cancel()
    await bench.run_pass(later)
    assert not bench.desk.claims.live
    assert not bench.worker.effects


async def test_without_a_look_nothing_is_begun_and_nobody_waits(bench: Bench) -> None:
    """Not even for the deadlines of what is under way."""
    early, reply = bench.desk.register(PREPARE)
    await bench.run_pass(early)
    asked, other = bench.desk.register(Release("vm"))
    bench.desk.refuse([asked], "too many open files")
    for each in (reply, other):
        (told,) = (await answer_to(each)).problems
        assert (told.code, told.retryable) == (Code.HOST_UNKNOWN, True)
    assert bench.desk.wake_at == math.inf
    await bench.run_pass()
    assert not bench.desk.claims.live


async def test_who_waits_for_what_is_under_way_is_not_told_of_one_look_that_failed(
    bench: Bench,
) -> None:
    """The next one may succeed; nor of one that fails long after another that did."""
    await bench.run_pass()
    asked, reply = bench.desk.register(PREPARE)
    await bench.run_pass(asked)
    for _ in range(2):
        bench.desk.refuse((), "too many open files")
        assert not reply.done()
        bench.now += Rules().deadlines.withdraw
        await bench.run_pass()
    assert bench.is_in(Phase.CHECKING)


async def test_who_uses_a_device_is_asked_again_only_when_no_entry_gives_it_any_more(
    bench: Bench,
) -> None:
    """Also when the claim goes on in the pass in which the journal was saved."""
    await bench.run_pass()
    asked, _ = bench.desk.register(PREPARE)
    await bench.run_pass(asked)
    bench.stale = True
    await bench.run_pass(results=[bench.inspect()])
    assert bench.is_in(Phase.WITHDRAWING)
    assert len(bench.worker.effects) == 1
    bench.stale = False
    await bench.run_pass()
    assert bench.is_in(Phase.GUARDING)
    assert len(bench.worker.effects) == 2


async def test_a_claim_goes_on_in_the_pass_in_which_the_journal_was_saved(bench: Bench) -> None:
    await bench.run_pass()
    asked, _ = bench.desk.register(PREPARE)
    await bench.run_pass(asked)
    await bench.run_pass(results=[bench.inspect()])
    assert bench.is_in(Phase.GUARDING)


async def test_a_journal_that_can_be_saved_again_undoes_no_claim(bench: Bench) -> None:
    """Who asks for it meanwhile does not have it undone for what was true before."""
    await bench.run_pass()
    asked, reply = bench.desk.register(PREPARE)
    await bench.run_pass(asked)
    bench.journal.is_full = True
    await bench.run_pass(results=[bench.inspect()])
    assert bench.is_in(Phase.WITHDRAWING)
    bench.journal.is_full = False
    again, other = bench.desk.register(PREPARE)
    await bench.run_pass(again)
    assert bench.is_in(Phase.GUARDING)
    assert not reply.done()
    assert not other.done()


async def test_a_journal_that_cannot_be_saved_is_told_once(bench: Bench) -> None:
    """It is tried again several times a second, and told again when it has failed anew."""
    await bench.run_pass()
    bench.journal.is_full = True
    asked, _ = bench.desk.register(PREPARE)
    with capture_logs() as logs:
        await bench.run_pass(asked)
        await bench.run_pass(results=[bench.inspect()])
        for _ in range(3):
            await bench.run_pass()
    assert [each["event"] for each in logs].count("journal-failed") == 1


async def test_what_is_stranded_is_looked_at_in_every_pass() -> None:
    """Also if no claim has it, and no event tells what somebody does with it."""
    bench = Bench(found=None)
    bench.world.chips[GPU].driver = "vfio-pci"
    await bench.run_pass()
    assert bench.desk.claims.strays.keys() == {GPU}
    assert bench.desk.awaited == {GPU}


async def test_what_is_being_brought_back_is_not_told_to_be_stranded() -> None:
    """If that fails too, it is told then."""
    world = World(Chip(GPU, driver="vfio-pci"))
    origin = unknown_origin(world.look().functions[GPU])
    stray = Stray(structs.replace(origin, known=True), problem(Code.STRANDED, "it was stranded"))
    bench = Bench(found=Durable("0" * 32, strays=(stray,)))
    with capture_logs() as logs:
        await bench.run_pass()
    assert bench.desk.claims.claim_of(GPU) is not None
    assert [each["event"] for each in logs].count("stranded") == 0


async def test_of_a_dry_run_nothing_is_told(bench: Bench) -> None:
    """The log of claims has what was done, and nothing was."""
    await bench.run_pass()
    asked, reply = bench.desk.register(structs.replace(PREPARE, dry_run=True))
    with capture_logs() as logs:
        await bench.run_pass(asked)
        await bench.run_pass(results=[bench.inspect()])
    assert (await answer_to(reply)).moves
    assert logs == []
