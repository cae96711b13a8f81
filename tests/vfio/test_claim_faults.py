"""Whatever fails on the way, a device ends where it was, or is reported as stranded."""

import errno
from collections.abc import Callable

import pytest

from agent.host.model import Address
from agent.vfio.model import Holder, Prepare, Recover, Release, Step, Write, Written
from agent.vfio.problems import Code
from agent.vfio.state import Outcome, Phase, explain
from tests.vfio.world import (
    AUDIO,
    GPU,
    OTHER_GPU,
    RELEASE,
    SHAPES,
    Crash,
    Fault,
    Shape,
    World,
    answers,
    does_nothing,
    hangs,
    is_not_begun,
    is_slow,
)

MOVING = tuple(shape for shape in SHAPES if shape.moved)
BY_ID = {shape.id: shape for shape in SHAPES}
AUDIO_TOO = BY_ID["with-audio"]
ONE = BY_ID["one-gpu"]
TWO = BY_ID["two-gpus"]

shapes = pytest.mark.parametrize("shape", [pytest.param(s, id=s.id) for s in MOVING])
faults = pytest.mark.parametrize(
    "fault",
    [
        pytest.param(answers(errno.EBUSY), id="EBUSY"),
        pytest.param(answers(errno.ENODEV), id="ENODEV"),
        pytest.param(answers(errno.EIO), id="EIO"),
        pytest.param(does_nothing, id="no-effect"),
    ],
)


def world_of(shape: Shape) -> World:
    return World(*shape.chips())


def writes_of(shape: Shape) -> tuple[int, int]:
    """How many writes there are on the way there, and there and back."""
    world = world_of(shape)
    world.ask(shape.prepare)
    there = len(world.writes)
    world.ask(RELEASE)
    return there, len(world.writes)


def fails_at(world: World, number: int, fault: Fault) -> None:
    """Let one write fail: the one with this number."""
    count = len(world.writes)
    world.faults.append((lambda _write: len(world.writes) == count + number + 1, fault))


def fails(world: World, fault: Fault, write: Write, *phases: Phase) -> None:
    """Let a write fail whenever it is made, or only in one of these phases."""
    world.faults.append(
        (
            lambda w: (
                (w.address, w.step, w.value) == (write.address, write.step, write.value)
                and (not phases or any(c.phase in phases for c in world.claims.live.values()))
            ),
            fault,
        )
    )


# --- a write that fails ---------------------------------------------------------------------------


@shapes
@faults
def test_a_write_that_fails_once_is_made_again(shape: Shape, fault: Fault) -> None:
    for number in range(writes_of(shape)[1]):
        world = world_of(shape)
        before = world.state()
        fails_at(world, number, fault)
        assert world.answers[world.ask(shape.prepare)].ok, number
        assert world.answers[world.ask(RELEASE)].ok, number
        assert world.state() == before, number
        assert not world.stranded


@shapes
@faults
def test_a_write_that_fails_on_the_way_there_undoes_the_claim(shape: Shape, fault: Fault) -> None:
    """It is tried three times, then all functions go back, and the answer says what failed."""
    for number in range(writes_of(shape)[0]):
        world = world_of(shape)
        world.ask(shape.prepare)
        write = world.writes[number]
        world = world_of(shape)
        before, published = world.state(), dict(world.specs)
        if shape.id == "second-choice-of-the-kernel" and write.step is Step.OVERRIDE:
            continue  # see test_what_fails_there_and_back_is_back_or_stranded
        fails(world, fault, write, Phase.MOVING)
        answer = world.answers[world.ask(shape.prepare)]
        again = world.answers[world.ask(shape.prepare)]
        assert [p.code for p in again.problems] == [Code.COOLING_DOWN] * len(shape.moved)
        assert [p.code for p in answer.problems] == [Code.MOVE_FAILED]
        assert write.address in answer.problems[0].sentence
        assert "3 times" in answer.problems[0].sentence
        assert world.writes.count(write) <= 3 + 3, "there and back"
        assert world.state() == before
        assert world.specs == published
        assert not world.stranded
        assert not world.disk.claims
        assert [ended.outcome for ended in world.ended] == [Outcome.UNDONE]
        world.now += world.rules.deadlines.cool_down
        world.faults.clear()
        assert world.answers[world.ask(shape.prepare)].ok


@shapes
@faults
def test_a_write_that_fails_on_the_way_back_leaves_its_function_stranded(
    shape: Shape, fault: Fault
) -> None:
    """The others are back all the same; `recover` finishes it, and may be asked for twice."""
    there, back = writes_of(shape)
    for number in range(there, back):
        world = world_of(shape)
        world.ask(shape.prepare)
        world.ask(RELEASE)
        write = world.writes[number]
        world = world_of(shape)
        before, published = world.state(), dict(world.specs)
        world.ask(shape.prepare)
        fails(world, fault, write)
        answer = world.answers[world.ask(RELEASE)]
        address = write.address
        assert [p.code for p in answer.problems] == [Code.STRANDED]
        assert f"recover {address}" in answer.problems[0].hint
        assert world.stranded == {address}
        assert world.disk.strays == tuple(world.claims.strays.values())
        after = world.state()
        assert {a: s for a, s in after.items() if a != address} == {
            a: s for a, s in before.items() if a != address
        }
        refused = world.answers[world.ask(shape.prepare)].problems
        assert Code.STRANDED in {p.code for p in refused}
        (failed,) = world.answers[world.ask(Recover(address))].problems
        assert "is stranded" in failed.sentence, "it fails still"
        assert failed.hint
        assert "recover" not in failed.hint, "that is what has just been tried"
        told = world.claims.strays[address].problem
        assert f"recover {address}" in told.hint, "who looks later has not tried yet"
        assert world.stranded == {address}
        world.faults.clear()
        assert world.answers[world.ask(Recover(address))].ok
        assert world.state() == before
        assert world.specs == published
        again = world.answers[world.ask(Recover(address))]
        is_plain = before[address][0] not in {None, "vfio-pci"}
        assert [p.code for p in again.problems] == ([] if is_plain else [Code.NOT_STRANDED])
        assert not world.disk.strays


@shapes
@faults
def test_what_fails_there_and_back_is_back_or_stranded(shape: Shape, fault: Fault) -> None:
    """Each step of each function, for ever; and the next start tries once more."""
    for address in shape.moved:
        for step in Step:
            world = world_of(shape)
            before = world.state()
            world.faults.append(
                (lambda w, a=address, s=step: (w.address, w.step) == (a, s), fault)  # type: ignore[misc]
            )
            ticket = world.ask(shape.prepare)
            if world.answers[ticket].ok:
                continue  # such a write is not made in this shape
            for each, state in world.state().items():
                assert state == before[each] or each in world.stranded
            world.faults.clear()
            world.start()
            world.run()
            for each in tuple(world.stranded):
                # The kernel gave it to another driver: only a person may say that this is not so.
                assert world.chips[each].driver == "i915"
                assert not world.answers[world.ask(Recover(each))].ok
                assert world.answers[world.ask(Recover(each, force=True))].ok
            assert world.state() == before
            assert not world.stranded


# --- what comes between two writes ----------------------------------------------------------------


def happens_after(world: World, step: Step, what: Callable[[], None], *phases: Phase) -> None:
    """Let something happen at the first write of a kind in these phases, and the write fail."""
    done = False

    def fault(_world: World, write: Write) -> Written | None:
        nonlocal done
        if done:
            return None
        done = True
        what()
        return Written(write, errno=errno.EBUSY) if step is Step.UNBIND else None

    def matches(write: Write) -> bool:
        in_phase = any(claim.phase in phases for claim in world.claims.live.values())
        return write.step is step and in_phase

    world.faults.append((matches, fault))


def test_who_opens_a_node_after_an_unbind_has_failed_is_asked_for_on_the_way_there() -> None:
    world = world_of(ONE)
    before = world.state()
    holder = Holder(77, "X", "/dev/dri/card3")
    happens_after(world, Step.UNBIND, lambda: world.holders.append(holder), Phase.MOVING)
    answer = world.answers[world.ask(ONE.prepare)]
    assert [p.code for p in answer.problems] == [Code.IN_USE]
    assert [w.step for w in world.writes].count(Step.UNBIND) == 1
    assert (world.state(), world.stranded) == (before, set())


def test_who_uses_a_device_is_asked_anew_before_each_unbind() -> None:
    """What was found out before the second one says nothing of the third."""
    world = world_of(ONE)
    before = world.state()
    holder = Holder(77, "X", "/dev/dri/card3")
    happens_after(world, Step.UNBIND, lambda: None, Phase.MOVING)
    happens_after(world, Step.UNBIND, lambda: world.holders.append(holder), Phase.MOVING)
    assert [p.code for p in world.answers[world.ask(ONE.prepare)].problems] == [Code.IN_USE]
    assert [w.step for w in world.writes].count(Step.UNBIND) == 2
    assert (world.state(), world.stranded) == (before, set())


def test_a_claim_is_undone_if_nobody_is_there_to_ask_who_uses_a_device_by_now() -> None:
    world = world_of(ONE)
    before = world.state()

    def lack() -> None:
        world.unasked = "python cannot be started: Too many open files"

    happens_after(world, Step.UNBIND, lack, Phase.MOVING)
    ticket = world.ask(ONE.prepare)
    assert [p.code for p in world.answers[ticket].problems] == [Code.NO_MEANS]
    world.unasked = ""
    world.run()
    assert (world.state(), world.stranded) == (before, set())


def test_who_opens_a_node_after_an_unbind_has_failed_is_waited_for_on_the_way_back() -> None:
    world = world_of(ONE)
    before = world.state()
    world.ask(ONE.prepare)
    there = len(world.writes)
    holder = Holder(77, "qemu", "/dev/vfio/1")
    happens_after(world, Step.UNBIND, lambda: world.holders.append(holder), Phase.RETURNING)
    assert [p.code for p in world.answers[world.ask(RELEASE)].problems] == [Code.IN_USE]
    assert [w.step for w in world.writes[there:]].count(Step.UNBIND) == 1
    world.holders.clear()
    world.run()
    assert (world.state(), world.stranded, len(world.claims.live)) == (before, set(), 0)


def test_who_uses_a_device_that_hangs_is_in_the_way_of_no_other() -> None:
    """It is asked anew when the kernel has let go of it."""
    world = world_of(TWO)
    before = world.state()
    world.ask(TWO.prepare)
    holder = Holder(77, "qemu", "/dev/vfio/1")
    world.faults.append((lambda w: (w.address, w.step) == (GPU, Step.UNBIND), hangs))
    happens_after(world, Step.UNBIND, lambda: world.holders.append(holder), Phase.RETURNING)
    world.ask(RELEASE)
    assert world.state()[OTHER_GPU] == before[OTHER_GPU]
    world.faults.clear()
    world.let_go(GPU, done=False)
    world.run()
    assert world.state()[GPU] != before[GPU], "it is in use"
    world.holders.clear()
    world.run()
    assert (world.state(), world.stranded) == (before, set())


def test_an_unbind_that_fails_while_nobody_uses_the_device_is_made_again() -> None:
    """Each way once more, and not asked about for ever."""
    world = world_of(ONE)
    before = world.state()
    happens_after(world, Step.UNBIND, lambda: None, Phase.MOVING)
    happens_after(world, Step.UNBIND, lambda: None, Phase.RETURNING)
    assert world.answers[world.ask(ONE.prepare)].ok
    assert world.answers[world.ask(RELEASE)].ok
    assert [w.step for w in world.writes].count(Step.UNBIND) == 4
    assert world.state() == before


def test_vfs_that_are_made_in_the_middle_of_a_claim_are_not_destroyed() -> None:
    world = world_of(ONE)
    before = world.state()

    def make_vfs() -> None:
        world.chips[GPU].virtfns = (Address("0000:03:00.1"),)

    happens_after(world, Step.OVERRIDE, make_vfs, Phase.MOVING)
    answer = world.answers[world.ask(ONE.prepare)]
    assert [p.code for p in answer.problems] == [Code.ACTIVE_VFS]
    assert Step.UNBIND not in {write.step for write in world.writes}
    assert (world.state(), world.stranded) == (before, set())


@pytest.mark.parametrize("force", [False, True], ids=["waited for", "forced"])
def test_vfs_that_are_made_in_the_middle_of_a_release(*, force: bool) -> None:
    world = world_of(ONE)
    before = world.state()
    world.ask(ONE.prepare)
    there = len(world.writes)

    def make_vfs() -> None:
        world.chips[GPU].virtfns = (Address("0000:03:00.1"),)

    happens_after(world, Step.OVERRIDE, make_vfs, Phase.RETURNING)
    answer = world.answers[world.ask(Release("vm", force=force))]
    assert [p.code for p in answer.problems] == ([] if force else [Code.ACTIVE_VFS])
    if not force:
        assert Step.UNBIND not in {write.step for write in world.writes[there:]}
        world.chips[GPU].virtfns = ()
        world.run()
    assert (world.state(), world.stranded, len(world.claims.live)) == (before, set(), 0)


# --- what the agent itself lacks ------------------------------------------------------------------


@pytest.mark.parametrize("order", [ONE.prepare, RELEASE], ids=["there", "back"])
def test_a_write_for_which_there_is_no_process_is_no_try(order: Prepare | Release) -> None:
    """However often there is none: that says nothing about the device."""
    world = world_of(ONE)
    if order is RELEASE:
        world.ask(ONE.prepare)
    lacking = len(world.writes) + 2 * world.rules.deadlines.tries
    world.faults.append((lambda _write: len(world.writes) < lacking, is_not_begun))
    assert world.answers[world.ask(order)].ok
    assert not world.stranded
    assert not world.ended or world.ended[-1].outcome is Outcome.RELEASED


def test_a_claim_for_which_there_is_no_process_is_undone_in_time() -> None:
    """The devices are to be had as soon as there is one: it was not they that failed."""
    world = world_of(TWO)
    before = world.state()
    world.faults.append((lambda _write: True, is_not_begun))
    answer = world.answers[world.ask(TWO.prepare)]
    assert [(p.code, p.retryable) for p in answer.problems] == [(Code.NO_MEANS, True)]
    assert "Too many open files" in answer.problems[0].sentence
    assert (world.state(), world.stranded) == (before, set())
    world.faults.clear()
    assert world.answers[world.ask(TWO.prepare)].ok


def test_a_device_is_brought_back_as_soon_as_there_is_a_process_for_it() -> None:
    """Whoever released it is not kept waiting, and nothing is stranded meanwhile."""
    world = world_of(TWO)
    before = world.state()
    world.ask(TWO.prepare)
    world.faults.append((lambda _write: True, is_not_begun))
    assert [p.code for p in world.answers[world.ask(RELEASE)].problems] == [Code.NO_MEANS]
    assert "Too many open files" in explain(world.claims.live["vm"])
    assert not world.stranded
    world.faults.clear()
    world.run()
    assert (world.state(), world.stranded) == (before, set())
    assert not world.claims.live


def test_what_nobody_was_there_to_ask_is_asked_again() -> None:
    """A claim is refused, which costs nothing; on the way back there is no end of it."""
    world = world_of(ONE)
    before = world.state()
    world.unasked = "python cannot be started: Too many open files"
    refused = world.answers[world.ask(ONE.prepare)].problems
    assert (refused[0].code, refused[0].retryable) == (Code.NO_MEANS, True)
    world.unasked = ""
    world.ask(ONE.prepare)
    ticket = world.post(RELEASE)
    world.until(Phase.RETURNING)
    world.unasked = "python cannot be started: Too many open files"
    world.run()
    assert [claim.phase for claim in world.claims.live.values()] == [Phase.VERIFYING]
    assert [problem.code for problem in world.answers[ticket].problems] == [Code.NO_MEANS]
    world.unasked = ""
    world.run()
    assert (world.state(), world.stranded) == (before, set())


@pytest.mark.parametrize("step", [Step.UNBIND, Step.PROBE])
def test_a_recovery_waits_until_it_can_be_asked_who_uses_the_device(step: Step) -> None:
    """Nothing is written before, and the device is not given up."""
    world = world_of(ONE)
    before = world.state()
    world.ask(ONE.prepare)
    fails(world, does_nothing, Write("vm", GPU, step, GPU))
    world.ask(RELEASE)
    world.faults.clear()
    assert world.stranded == {GPU}
    count = len(world.writes)
    world.unasked = "python cannot be started: Too many open files"
    assert [p.code for p in world.answers[world.ask(Recover(GPU))].problems] == [Code.NO_MEANS]
    assert len(world.writes) == count
    world.unasked = ""
    world.run()
    assert (world.state(), world.stranded) == (before, set())


def test_what_nobody_was_there_to_ask_is_no_look_in_vain() -> None:
    """However long there was nobody: the override is then read as often as it takes."""
    world = world_of(ONE)
    before = world.state()
    world.ask(ONE.prepare)
    world.post(RELEASE)
    world.until(Phase.RETURNING)
    world.unasked = "python cannot be started: Too many open files"
    world.run()
    world.unasked, world.overrides_unread = "", {GPU}
    world.run(patience=world.rules.deadlines.poll)
    world.overrides_unread = set()
    world.run()
    assert (world.state(), world.stranded) == (before, set())


# --- how a write is made again --------------------------------------------------------------------


def test_a_write_is_made_again_after_a_moment_that_grows() -> None:
    world = world_of(ONE)
    world.faults.append((lambda write: write.step is Step.OVERRIDE, answers(errno.EBUSY)))
    world.ask(ONE.prepare)
    began, second, third = world.written_at[:3]
    assert (second - began, third - second) == (0.25, 0.5)


def test_without_its_override_a_function_is_not_unbound() -> None:
    """It would go to whatever driver the kernel prefers."""
    world = world_of(ONE)
    fails(world, answers(errno.EIO), Write("vm", GPU, Step.OVERRIDE, "vfio-pci"))
    assert not world.answers[world.ask(ONE.prepare)].ok
    assert {write.step for write in world.writes} == {Step.OVERRIDE}


def test_nobody_waits_for_the_entry_of_what_is_stranded() -> None:
    world = world_of(ONE)
    world.ask(ONE.prepare)
    began = world.now
    fails(world, answers(errno.EIO), Write("vm", GPU, Step.PROBE, GPU))
    ticket = world.post(RELEASE)
    world.run(patience=4)
    assert world.answers[ticket].problems
    assert world.chips[GPU].driver is None
    assert world.now - began < world.rules.deadlines.restore


def test_the_end_of_a_claim_waits_for_the_specs_but_not_for_ever() -> None:
    """The devices are back whatever becomes of their entries: that is not fatal."""
    world = world_of(ONE)
    before = world.state()
    world.ask(ONE.prepare)
    began = world.now

    def specs_fail() -> None:
        world.specs_readonly = any(
            claim.phase in {Phase.RETURNING, Phase.VERIFYING, Phase.RESTORING}
            for claim in world.claims.live.values()
        )

    world.before_pass = specs_fail
    assert world.answers[world.ask(RELEASE)].ok
    assert world.now - began == world.rules.deadlines.restore
    assert world.state() == before


def test_a_journal_that_failed_another_claim_is_no_reason_to_refuse_this_one() -> None:
    """What could not be saved a moment ago says nothing about what was never tried."""
    world = world_of(TWO)
    first = world.post(ONE.prepare)
    world.step()
    world.journal_full = True
    second = world.post(ONE.prepare.__class__("other", ONE.prepare.mode, (OTHER_GPU,)))
    world.step()  # the first one goes to the journal, in vain
    world.journal_full = False
    world.run()
    assert [p.code for p in world.answers[first].problems] == [Code.JOURNAL_FAILED]
    assert world.answers[second].ok


# --- somebody else --------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.MOVING, Phase.RETURNING])
def test_what_somebody_else_moved_meanwhile_is_not_touched_any_more(phase: Phase) -> None:
    """It is reported, and the other functions go back."""
    world = world_of(AUDIO_TOO)

    def somebody_binds_it() -> None:
        claim = world.claims.live.get("vm")
        if claim is not None and claim.phase is phase and world.chips[GPU].driver is None:
            world.chips[GPU].driver = "pci-stub"
            world.before_pass = lambda: None

    world.before_pass = somebody_binds_it
    first = world.answers[world.ask(AUDIO_TOO.prepare)]
    second = world.answers[world.ask(RELEASE)]
    assert world.chips[GPU].driver == "pci-stub"
    assert world.state()[AUDIO] == ("snd_hda_intel", None)
    assert world.stranded == {GPU}
    problem = (second if first.ok else first).problems[0]
    assert "somebody else put 0000:03:00.0 on pci-stub" in problem.sentence
    assert not world.answers[world.ask(Recover(GPU))].ok
    assert world.answers[world.ask(Recover(GPU, force=True))].ok
    assert world.state()[GPU] == ("xe", None)


def test_an_override_that_somebody_sets_meanwhile_is_not_overwritten() -> None:
    world = world_of(ONE)

    def somebody_sets_it() -> None:
        if any(claim.phase is Phase.WITHDRAWING for claim in world.claims.live.values()):
            world.chips[GPU].override = "i915"

    world.before_pass = somebody_sets_it
    answer = world.answers[world.ask(ONE.prepare)]
    assert [p.code for p in answer.problems] == [Code.CHANGED]
    assert "driver_override" in answer.problems[0].sentence
    assert not world.writes
    assert world.chips[GPU].override == "i915"


# --- a write that is slow -------------------------------------------------------------------------


def test_the_way_back_waits_for_the_writes_that_are_on_their_way() -> None:
    """What is read of a function before they have ended is not true after."""
    world = world_of(AUDIO_TOO)
    before = world.state()
    world.faults.append((lambda w: (w.address, w.step) == (AUDIO, Step.UNBIND), is_slow))
    fails(world, answers(errno.EIO), Write("vm", GPU, Step.UNBIND, GPU), Phase.MOVING)
    ticket = world.ask(AUDIO_TOO.prepare)
    assert ticket not in world.answers
    assert world.claims.live["vm"].phase is Phase.FREEING
    world.faults.clear()
    world.finish()
    world.run()
    assert [p.code for p in world.answers[ticket].problems] == [Code.MOVE_FAILED]
    assert world.state() == before


# --- a write that hangs ---------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("done", [True, False], ids=["it-was-done", "it-was-not"])
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed-meanwhile"])
def test_a_write_that_hangs_is_waited_for_without_another_one(
    shape: Shape, *, done: bool, killed: bool
) -> None:
    """There: the others are back at once, it says what hangs, and is undone when it returns."""
    for number in range(writes_of(shape)[0]):
        world = world_of(shape)
        before, published = world.state(), dict(world.specs)
        fails_at(world, number, hangs)
        answer = world.answers[world.ask(shape.prepare)]
        address = world.writes[number].address
        assert [p.code for p in answer.problems] == [Code.HUNG]
        assert "4711" in answer.problems[0].sentence
        assert {a for a, s in world.state().items() if s != before[a]} <= {address}
        assert [child.write.address for child in world.disk.children] == [address]
        claim = world.claims.live["vm"]
        assert claim.phase is Phase.RETURNING
        assert "hangs" in explain(claim)
        for order in (RELEASE, shape.prepare, Recover(address)):
            assert not world.answers[world.ask(order)].ok
        if killed:
            world.start()
            world.run()
            assert claim.id in world.claims.live
        world.let_go(address, done=done)
        world.run()
        assert world.state() == before
        assert world.specs == published
        assert not world.claims.children
        assert not world.disk.children
        assert not world.disk.claims
        assert not world.stranded


@shapes
@pytest.mark.parametrize("done", [True, False], ids=["it-was-done", "it-was-not"])
def test_a_release_that_hangs_is_finished_when_the_kernel_returns(
    shape: Shape, *, done: bool
) -> None:
    there, back = writes_of(shape)
    for number in range(back - there):
        world = world_of(shape)
        before = world.state()
        world.ask(shape.prepare)
        fails_at(world, number, hangs)
        answer = world.answers[world.ask(RELEASE)]
        assert [p.code for p in answer.problems] == [Code.HUNG]
        world.let_go(next(iter(world.stuck)), done=done)
        world.run()
        assert world.state() == before
        assert not world.claims.live
        assert not world.stranded


def test_a_device_of_which_a_write_hung_is_left_alone_for_a_while() -> None:
    world = world_of(ONE)
    world.faults.append((lambda write: write.step is Step.PROBE, hangs))
    assert [p.code for p in world.answers[world.ask(ONE.prepare)].problems] == [Code.HUNG]
    world.faults.clear()
    world.let_go(GPU)
    world.run()
    assert not world.claims.live
    refused = world.post(ONE.prepare)
    world.run(patience=0)
    assert [p.code for p in world.answers[refused].problems] == [Code.COOLING_DOWN]


def test_a_function_that_hangs_does_not_hold_up_another_claim() -> None:
    world = world_of(TWO)
    fails_at(world, 0, hangs)
    assert not world.answers[world.ask(ONE.prepare)].ok
    other = Release("other")
    prepare = ONE.prepare.__class__("other", ONE.prepare.mode, (OTHER_GPU,))
    for _ in range(2):
        assert world.answers[world.ask(prepare)].ok
        assert world.answers[world.ask(other)].ok
    assert world.claims.live.keys() == {"vm"}


# --- the journal and the specs --------------------------------------------------------------------


@shapes
def test_without_a_journal_nothing_is_touched(shape: Shape) -> None:
    world = world_of(shape)
    before, published = world.state(), dict(world.specs)
    world.journal_full = True
    for _ in range(2):
        answer = world.answers[world.ask(shape.prepare)]
        assert [p.code for p in answer.problems] == [Code.JOURNAL_FAILED]
        assert "no space left" in answer.problems[0].sentence
    assert not world.writes
    assert world.state() == before
    assert world.specs == published
    assert [ended.outcome for ended in world.ended] == [Outcome.REFUSED] * 2
    world.journal_full = False
    assert world.answers[world.ask(shape.prepare)].ok


@pytest.mark.parametrize("shape", [pytest.param(s, id=s.id) for s in SHAPES])
def test_a_claim_that_the_journal_cannot_confirm_is_undone(shape: Shape) -> None:
    """It would be undone by the next agent: nobody may rely on it."""
    world = world_of(shape)
    before = world.state()
    world.before_pass = lambda: setattr(
        world,
        "journal_full",
        any(claim.phase is Phase.PUBLISHING for claim in world.claims.live.values())
        or world.journal_full,
    )
    answer = world.answers[world.ask(shape.prepare)]
    if answer.ok:
        assert not shape.moved, "without a move the entry is there before the pass ends"
        return
    assert [p.code for p in answer.problems] == [Code.JOURNAL_FAILED]
    assert world.state() == before
    assert not world.claims.live


@shapes
def test_a_release_that_cannot_be_journalled_is_done_when_it_can(shape: Shape) -> None:
    world = world_of(shape)
    before = world.state()
    world.ask(shape.prepare)
    world.journal_full = True
    count = len(world.writes)
    for _ in range(2):
        world.post(RELEASE)
        world.run(patience=30)
        assert [p.code for p in world.answers[max(world.answers)].problems] == [Code.JOURNAL_FAILED]
    assert len(world.writes) == count
    world.journal_full = False
    world.run(patience=30)
    assert world.state() == before
    assert not world.claims.live


@shapes
def test_a_device_that_cannot_be_withdrawn_is_not_touched(shape: Shape) -> None:
    world = world_of(shape)
    if not any(address in world.specs for address in shape.moved):
        return  # nothing of it is published
    published = dict(world.specs)
    world.specs_readonly = True
    answer = world.answers[world.ask(shape.prepare)]
    assert [p.code for p in answer.problems] == [Code.WITHDRAW_FAILED]
    assert not world.writes
    assert world.specs == published
    world.specs_readonly = False
    world.ask(shape.prepare)
    count = len(world.writes)
    world.specs_readonly = True
    world.post(RELEASE)
    world.run(patience=30)
    assert [p.code for p in world.answers[max(world.answers)].problems] == [Code.WITHDRAW_FAILED]
    assert len(world.writes) == count
    world.specs_readonly = False
    world.run(patience=30)
    assert not world.claims.live


@shapes
def test_nodes_that_never_come_undo_the_claim(shape: Shape) -> None:
    world = world_of(shape)
    before, published = world.state(), dict(world.specs)
    world.nodes_never_come = set(shape.moved)
    if "drm" in shape.id:
        return
    answer = world.answers[world.ask(shape.prepare)]
    assert [p.code for p in answer.problems] == [Code.NOT_PUBLISHED]
    assert world.state() == before
    assert world.specs == published


# --- in use ---------------------------------------------------------------------------------------


def test_who_got_hold_of_the_device_before_it_was_withdrawn_keeps_it() -> None:
    world = world_of(AUDIO_TOO)
    before, published = world.state(), dict(world.specs)

    def open_it() -> None:
        if any(claim.phase is Phase.WITHDRAWING for claim in world.claims.live.values()):
            world.holders = [Holder(12, "Xorg", "/dev/dri/card3")]

    world.before_pass = open_it
    answer = world.answers[world.ask(AUDIO_TOO.prepare)]
    assert [p.code for p in answer.problems] == [Code.IN_USE]
    assert "process 12 (Xorg)" in answer.problems[0].sentence
    assert not world.writes
    assert (world.state(), world.specs) == (before, published)


@pytest.mark.parametrize("blind", [False, True], ids=["held", "unknown"])
def test_a_release_waits_for_a_virtual_machine(*, blind: bool) -> None:
    """It says `in-use`, keeps the entry withdrawn, and is finished when the node is closed."""
    world = world_of(AUDIO_TOO)
    before, published = world.state(), dict(world.specs)
    world.ask(AUDIO_TOO.prepare)
    count = len(world.writes)
    if blind:
        world.blind = True
    else:
        world.holders = [Holder(77, "qemu-system-x86", "/dev/vfio/1")]
    for _ in range(2):
        world.post(RELEASE)
        world.run(patience=30)
        problems = world.answers[max(world.answers)].problems
        assert [p.code for p in problems] == [Code.HOLDERS_UNKNOWN if blind else Code.IN_USE]
    assert len(world.writes) == count
    assert not world.specs
    world.blind, world.holders = False, []
    world.run(patience=30)
    assert (world.state(), world.specs) == (before, published)
    assert world.answers[world.ask(RELEASE)].ok


def test_a_forced_release_does_not_wait() -> None:
    world = world_of(ONE)
    before = world.state()
    world.ask(ONE.prepare)
    world.holders = [Holder(77, "qemu-system-x86", "/dev/vfio/1")]
    world.post(RELEASE)
    world.run(patience=30)
    assert world.claims.live
    assert world.answers[world.ask(Release("vm", force=True))].ok
    assert world.state() == before


def test_whoever_uses_a_group_uses_every_device_of_it() -> None:
    """Two claims share a group: the first is not given back under the feet of the second."""
    world = World(*(chip for chip in TWO.chips()))
    world.chips[OTHER_GPU].group = 1
    world.chips[OTHER_GPU].driver = "vfio-pci"
    world.ask(ONE.prepare)
    world.holders = [Holder(77, "qemu-system-x86", "/dev/vfio/1")]
    world.post(RELEASE)
    world.run(patience=30)
    assert [p.code for p in world.answers[max(world.answers)].problems] == [Code.IN_USE]


def test_who_uses_what_need_not_be_unbound_is_in_nobodys_way() -> None:
    """The second GPU could not be unbound, and is in use again: the first goes back still."""
    world = world_of(TWO)
    before = world.state()
    fails(world, answers(errno.EBUSY), Write("vm", OTHER_GPU, Step.UNBIND, OTHER_GPU))

    def open_it() -> None:
        if any(claim.phase is Phase.MOVING for claim in world.claims.live.values()):
            world.holders = [Holder(12, "Xorg", "/dev/dri/card4")]

    world.before_pass = open_it
    answer = world.answers[world.ask(TWO.prepare)]
    assert [p.code for p in answer.problems] == [Code.IN_USE]
    assert world.state() == before
    assert not world.claims.live


def test_what_is_not_bound_cannot_be_in_use() -> None:
    """A hung unbind that came back leaves no driver: nobody is asked who has it open."""
    world = world_of(ONE)
    before = world.state()
    fails_at(world, 1, hangs)
    world.ask(ONE.prepare)
    world.blind = True
    world.let_go(GPU)
    world.run()
    assert world.state() == before


# --- reading back ---------------------------------------------------------------------------------


def test_the_driver_of_a_device_that_has_none_is_loaded_when_it_is_recovered() -> None:
    """Its module was missing when it was to go back (built anew for each kernel, say)."""
    world = world_of(ONE)
    before = world.state()
    world.ask(ONE.prepare)
    world.unloaded, world.unavailable = frozenset({"xe"}), {"xe": "no such module"}
    for order in (RELEASE, Recover(GPU)):
        (failed,) = world.answers[world.ask(order)].problems
        assert failed.code is Code.STRANDED
        assert "the driver xe is not available: no such module" in failed.sentence
        assert world.claims.strays[GPU].problem.sentence in failed.sentence
        assert world.chips[GPU].driver is None
    world.unavailable = {}
    assert world.answers[world.ask(Recover(GPU, dry_run=True))].moves
    assert "xe" in world.unloaded, "a dry run loads nothing"
    assert world.answers[world.ask(Recover(GPU))].ok
    assert world.state() == before


def test_the_driver_of_a_device_that_has_none_is_loaded_when_its_claim_is_undone() -> None:
    """It was unloaded as soon as nothing used it any more."""
    world = world_of(ONE)
    before = world.state()
    world.faults.append((lambda write: write.step is Step.PROBE and not world.stranded, _unloads))
    answer = world.answers[world.ask(ONE.prepare)]
    assert [p.code for p in answer.problems] == [Code.MOVE_FAILED]
    assert world.state() == before


def _unloads(world: World, write: Write) -> Written | None:
    """vfio-pci does not take the device; meanwhile somebody unloads its own driver."""
    if world.chips[write.address].override != "vfio-pci":
        return None
    world.unloaded = frozenset({"xe"})
    return Written(write, errno=errno.EBUSY)


def test_an_override_that_does_not_go_is_written_again_and_then_reported() -> None:
    """The kernel says yes to the write that clears it, and it is still there."""
    world = world_of(AUDIO_TOO)
    world.ask(AUDIO_TOO.prepare)
    clear = Write("vm", AUDIO, Step.OVERRIDE, "\n")
    fails(world, does_nothing, clear)
    answer = world.answers[world.ask(RELEASE)]
    assert [p.code for p in answer.problems] == [Code.STRANDED]
    assert world.writes.count(clear) == 3
    assert world.state()[AUDIO] == ("snd_hda_intel", "snd_hda_intel")
    assert world.stranded == {AUDIO}
    assert world.state()[GPU] == ("xe", None)


def test_an_override_that_cannot_be_read_back_is_reported() -> None:
    world = world_of(ONE)
    world.ask(ONE.prepare)
    world.overrides_unread = {GPU}
    answer = world.answers[world.ask(RELEASE)]
    assert [p.code for p in answer.problems] == [Code.STRANDED]
    assert "cannot be read back" in answer.problems[0].sentence
    world.overrides_unread = set()
    assert world.answers[world.ask(Recover(GPU))].ok
    assert not world.stranded


# --- looks that see nothing -----------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.MOVING, Phase.RETURNING])
def test_a_function_that_cannot_be_read_is_waited_for_but_not_for_ever(phase: Phase) -> None:
    world = world_of(ONE)
    before = world.state()

    def hide() -> None:
        if any(claim.phase is phase for claim in world.claims.live.values()):
            world.unread = {GPU}

    world.before_pass = hide
    world.ask(ONE.prepare)
    world.ask(RELEASE)
    assert not world.claims.live
    assert world.stranded == {GPU}
    world.before_pass = lambda: None
    world.unread = set()
    assert world.answers[world.ask(Recover(GPU))].ok
    assert world.state() == before


def test_a_function_that_cannot_be_read_for_a_moment_is_waited_for() -> None:
    world = world_of(ONE)
    looks = iter(range(1000))

    def hide() -> None:
        world.unread = {GPU} if next(looks) % 3 and world.claims.live else set()

    world.before_pass = hide
    assert world.answers[world.ask(ONE.prepare)].ok


def test_killed_at_every_moment_while_a_write_fails() -> None:
    """A failure and a crash together: nothing is stranded once the kernel is well again."""
    for moment in range(1000):
        world = world_of(AUDIO_TOO)
        before = world.state()
        fails(world, does_nothing, Write("vm", AUDIO, Step.PROBE, AUDIO))
        world.crash_at = world.moments + moment
        world.post(AUDIO_TOO.prepare)
        try:
            world.run()
        except Crash:
            world.faults.clear()
            world.start()
            world.run()
            assert world.state() == before, moment
            assert not world.stranded, moment
        else:
            assert moment > 20
            return
