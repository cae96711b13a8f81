"""Whatever happens, in whatever order: what no claim may ever do, and where every function ends.

`World` holds every single write to the rules while a history is played: never to a function that
hangs, never before the journal has its origin, never while a spec has it, and no origin is ever
overwritten. Here histories are made up, and what they lead to is looked at.
"""

import dataclasses
import errno
from collections.abc import Callable

from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec import structs

from agent.host.model import Address, HoldMode
from agent.vfio.model import Holder, Prepare, Recover, Release, Write, Written
from agent.vfio.state import Rules
from tests.vfio.test_claim_table import TRANSITIONS
from tests.vfio.world import (
    AUDIO,
    GPU,
    OTHER_GPU,
    Chip,
    Fault,
    World,
    answers,
    audio,
    does_nothing,
    hangs,
    is_not_begun,
    is_slow,
)

ADDRESSES = (GPU, AUDIO, OTHER_GPU)
addresses = st.sampled_from(ADDRESSES)
ids = st.sampled_from(["vm", "other"])

Act = Callable[["History"], None]


class History:
    """A world in which everything may happen."""

    def __init__(self) -> None:
        self.world = World(Chip(GPU), audio(), Chip(OTHER_GPU, group=2))
        self.before = self.world.state()
        self.foreign: set[Address] = set()
        """Functions that somebody else did something to."""
        self.next_faults: list[Fault] = []
        self.world.faults.append((lambda _write: bool(self.next_faults), self._fail))

    def _fail(self, world: World, write: Write) -> Written | None:
        return self.next_faults.pop(0)(world, write)

    def settle(self) -> None:
        """Everything is well again: whatever can end, ends."""
        world = self.world
        self.next_faults.clear()
        world.journal_full = world.specs_readonly = world.blind = False
        world.unasked = world.specs_problem = ""
        world.holders, world.unread, world.overrides_unread, world.dead = [], set(), set(), set()
        world.goes_on, world.rules = True, Rules()
        for address in tuple(world.stuck):
            world.let_go(address)
        world.finish()
        world.run()


def _crash(history: History) -> None:
    history.world.start()


def prepare(
    id_: str, mode: HoldMode, devices: tuple[Address, ...], lease: float | None, *, dry_run: bool
) -> Act:
    order = Prepare(id_, mode, devices, lease=lease, from_vfio=True, dry_run=dry_run)
    return lambda history: _give(history, order)


def _give(history: History, order: Prepare | Release | Recover) -> None:
    history.world.post(order)


def release(id_: str, *, force: bool) -> Act:
    return lambda history: _give(history, Release(id_, force=force))


def recover(address: Address) -> Act:
    # Forced, it would move what a person has put somewhere: another test.
    return lambda history: _give(history, Recover(address))


def fault(*what: Fault) -> Act:
    return lambda history: history.next_faults.extend(what)


def let_go(*, done: bool) -> Act:
    def act(history: History) -> None:
        for address in tuple(history.world.stuck):
            history.world.let_go(address, done=done)

    return act


def finish(history: History) -> None:
    history.world.finish()


def toggle(name: str) -> Act:
    def act(history: History) -> None:
        setattr(history.world, name, not getattr(history.world, name))

    return act


def or_not(name: str) -> Act:
    """Something cannot be done any more, or can again."""

    def act(history: History) -> None:
        setattr(history.world, name, "" if getattr(history.world, name) else "why")

    return act


def pause(history: History) -> None:
    world = history.world
    world.rules = structs.replace(world.rules, paused=not world.rules.paused)


def use(path: str) -> Act:
    def act(history: History) -> None:
        world = history.world
        world.holders = [] if world.holders else [Holder(77, "qemu", path)]

    return act


def hide(name: str, address: Address) -> Act:
    def act(history: History) -> None:
        getattr(history.world, name).symmetric_difference_update({address})

    return act


def rebind(address: Address, driver: str | None) -> Act:
    """Somebody else moves a function, and clears its override."""

    def act(history: History) -> None:
        chip = history.world.chips.get(address)
        if chip is not None and address not in history.world.stuck:
            history.foreign.add(address)
            chip.driver, chip.override = driver, None

    return act


def replug(address: Address) -> Act:
    """Another card is put into the slot."""

    def act(history: History) -> None:
        if address not in history.world.stuck:
            history.foreign.add(address)
            # The kernel ends every write to a card before it goes, and begins none after.
            write = history.world.slow.pop(address, None)
            if write is not None:
                history.world.results.append(Written(write, errno=errno.ENODEV))
            chip = history.world.chips[address]
            history.world.chips[address] = dataclasses.replace(
                chip, inode=chip.inode + 1, driver=chip.own[0], override=None
            )

    return act


orders = st.one_of(
    st.builds(
        lambda i, m, d, lease, dry: (
            f"prepare {i} {m} {d} {lease} {dry}",
            prepare(i, m, tuple(d), lease, dry_run=dry),
        ),
        ids,
        st.sampled_from([HoldMode.VFIO, HoldMode.VFIO, HoldMode.DRM]),
        st.lists(st.sampled_from((GPU, OTHER_GPU)), min_size=1, max_size=2, unique=True),
        st.sampled_from([None, None, 3.0]),
        st.sampled_from([False, False, False, True]),
    ),
    st.builds(lambda i, f: (f"release {i} {f}", release(i, force=f)), ids, st.booleans()),
    st.builds(lambda a: (f"recover {a}", recover(a)), addresses),
)
troubles = st.one_of(
    st.sampled_from(
        [
            ("crash", _crash),
            ("EBUSY", fault(answers(errno.EBUSY))),
            ("EIO thrice", fault(*[answers(errno.EIO)] * 3)),
            ("no effect", fault(does_nothing)),
            ("no effect at all", fault(*[does_nothing] * 9)),
            ("no process", fault(*[is_not_begun] * 9)),
            ("hangs", fault(hangs)),
            ("is slow", fault(is_slow)),
            ("slow ones are done", finish),
            ("let go, done", let_go(done=True)),
            ("let go, not done", let_go(done=False)),
            ("journal full", toggle("journal_full")),
            ("specs read-only", toggle("specs_readonly")),
            ("specs unknown", or_not("specs_problem")),
            ("blind", toggle("blind")),
            ("nobody asks", or_not("unasked")),
            ("goes on", toggle("goes_on")),
            ("pause", pause),
            ("vm runs", use("/dev/vfio/1")),
            ("X runs", use("/dev/dri/card3")),
        ]
    ),
    st.builds(lambda a: (f"unread {a}", hide("unread", a)), addresses),
    st.builds(lambda a: (f"override of {a}", hide("overrides_unread", a)), addresses),
    st.builds(lambda a: (f"dead {a}", hide("dead", a)), addresses),
)
strangers = st.one_of(
    st.builds(
        lambda a, d: (f"rebind {a} {d}", rebind(a, d)),
        addresses,
        st.sampled_from([None, "xe", "pci-stub"]),
    ),
    st.builds(lambda a: (f"replug {a}", replug(a)), addresses),
)
acts = st.tuples(
    st.one_of(orders, troubles, troubles, strangers),
    st.one_of(st.integers(0, 12), st.just(99)),
)
"""Something happens, and then a number of passes."""


Happens = list[tuple[tuple[str, Act], int]]


def play(history: History, happens: Happens) -> None:
    """Let all of it happen; many passes are as many as there is something to do for."""
    for (_, act), passes in happens:
        act(history)
        if passes == 99:
            history.world.run(patience=5)
        for _ in range(passes % 99):
            history.world.step()


@given(st.lists(acts, max_size=40))
@settings(max_examples=200)
def test_every_function_ends_where_it_was_or_is_reported(happens: Happens) -> None:
    history = History()
    world = history.world
    play(history, happens)
    history.settle()
    for claim in world.claims.live.values():
        assert claim.phase in {"done", "lost"}, "nothing is left half-way"
    event(f"{len(world.claims.live)} claims, {len(world.stranded)} stranded")
    for id_ in ("vm", "other"):
        world.ask(Release(id_))
    world.run()
    assert not world.claims.live, "and nothing that is released stays"
    assert world.claims.durable == world.disk
    assert set(world.passed) <= {(before, after) for before, after, *_ in TRANSITIONS}
    for address, chip in world.chips.items():
        if address in world.stranded:
            continue
        assert "vfio" not in f"{chip.driver} {chip.override}", "nothing of ours is left"
        if address not in history.foreign:
            assert (chip.driver, chip.override) == history.before[address]
    published = {a for a in (GPU, OTHER_GPU) if world.chips[a].driver is not None}
    assert published - world.stranded <= world.specs.keys()


@given(st.lists(acts, max_size=30))
@settings(max_examples=50)
def test_every_order_is_answered_once(happens: Happens) -> None:
    """Whatever becomes of it; only an agent that dies answers nobody."""
    history = History()
    play(history, [each for each in happens if each[0][0] != "crash"])
    history.settle()
    tickets = set(range(1, history.world.post(Release("nobody")) + 1))
    history.world.run()
    assert history.world.answers.keys() == tickets
