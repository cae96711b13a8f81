"""A claim of every shape goes there and comes back, whenever the agent is killed on the way."""

import pytest
from msgspec import structs

from agent.vfio.model import Prepare
from agent.vfio.problems import Code
from tests.vfio.world import GPU, OTHER_GPU, RELEASE, SHAPES, Crash, Shape, World

shapes = pytest.mark.parametrize("shape", [pytest.param(s, id=s.id) for s in SHAPES])


def world_of(shape: Shape) -> World:
    return World(*shape.chips())


@shapes
def test_there_and_back_again_and_again(shape: Shape) -> None:
    """Each order is given twice, each is answered when the specs say so; ten times."""
    world = world_of(shape)
    before, published = world.state(), dict(world.specs)
    for _ in range(10):
        for _ in range(2):
            ticket = world.ask(shape.prepare)
            answer = world.answers[ticket]
            assert answer.ok, answer
            on_disk = {name for names in world.specs_at[ticket].values() for name in names}
            assert set(answer.names) <= on_disk
            assert {name.partition("=")[2] for name in answer.names} == set(shape.prepare.devices)
        for address, driver in shape.moved.items():
            assert world.chips[address].driver == driver
        assert {a: s for a, s in world.state().items() if a not in shape.moved} == {
            a: s for a, s in before.items() if a not in shape.moved
        }
        for _ in range(2):
            ticket = world.ask(RELEASE)
            assert world.answers[ticket].ok
            assert world.specs_at[ticket] == published
        assert world.state() == before
        assert not world.claims.live
        assert not world.disk.claims
        assert not world.stranded
    assert {write.address for write in world.writes} == set(shape.moved)


def test_what_is_not_moved_stays_published_all_the_time() -> None:
    shape = next(shape for shape in SHAPES if shape.id == "one-of-two-pre-bound")
    world = world_of(shape)

    def look() -> None:
        assert OTHER_GPU in world.specs

    world.before_pass = look
    world.ask(shape.prepare)
    world.ask(RELEASE)


@shapes
def test_killed_before_every_moment_of_a_claim(shape: Shape) -> None:
    """Started again, the claim is in force as it was answered, or all is as it was before."""
    for moment in range(10_000):
        world = world_of(shape)
        before, published = world.state(), dict(world.specs)
        world.crash_at = world.moments + moment
        ticket = world.post(shape.prepare)
        try:
            world.run()
        except Crash:
            pass
        else:
            break  # there are no more moments
        world.start()
        world.run()
        assert not world.stranded, moment
        claim = world.claims.live.get("vm")
        if claim is not None:
            assert claim.phase == "done"
            for address, driver in shape.moved.items():
                assert world.chips[address].driver == driver
        else:
            assert ticket not in world.answers, "what was answered is in force"
            assert world.state() == before, moment
            assert world.specs == published, moment
        assert world.answers[world.ask(shape.prepare)].ok, moment
        assert world.answers[world.ask(RELEASE)].ok, moment
        assert world.state() == before
    else:
        pytest.fail("no end of moments")


@shapes
def test_killed_before_every_moment_of_a_release(shape: Shape) -> None:
    """Started again, the claim is in force still, or the release is finished."""
    for moment in range(10_000):
        world = world_of(shape)
        before, published = world.state(), dict(world.specs)
        world.ask(shape.prepare)
        world.crash_at = world.moments + moment
        world.post(RELEASE)
        try:
            world.run()
        except Crash:
            pass
        else:
            break
        world.start()
        world.run()
        assert not world.stranded, moment
        if world.claims.live:
            assert world.claims.live["vm"].phase == "done"
            assert world.answers[world.ask(RELEASE)].ok
        assert world.state() == before, moment
        assert world.specs == published, moment
        assert not world.disk.claims
    else:
        pytest.fail("no end of moments")


@shapes
def test_killed_again_while_the_undo_is_under_way(shape: Shape) -> None:
    """However often an agent dies, the next one goes on from there."""
    world = world_of(shape)
    before = world.state()
    world.post(shape.prepare)
    for _ in range(200):
        world.crash_at = world.moments + 3
        try:
            world.run()
            break
        except Crash:
            world.start()
    world.crash_at = None
    world.ask(RELEASE)
    assert world.state() == before
    assert not world.stranded


@shapes
def test_a_reboot_in_the_middle_voids_a_claim(shape: Shape) -> None:
    """After it nothing of ours is left, and nothing is written."""
    for moment in range(10_000):
        world = world_of(shape)
        world.crash_at = world.moments + moment
        world.post(shape.prepare)
        try:
            world.run()
        except Crash:
            pass
        else:
            break
        world.reboot()
        world.writes.clear()
        world.start()
        world.run()
        assert not world.writes
        assert not world.claims.live
        assert not world.stranded
        assert not world.disk.claims
    else:
        pytest.fail("no end of moments")


def test_a_second_claim_for_a_function_is_refused_and_told_by_whom_it_is_held() -> None:
    shape = SHAPES[1]
    world = world_of(shape)
    world.ask(structs.replace(shape.prepare, client="the VM service"))
    for device in shape.moved:
        answer = world.answers[world.ask(Prepare("other", shape.prepare.mode, (device,)))]
        assert {problem.code for problem in answer.problems} == {Code.CLAIMED}
        assert "claim vm of the VM service" in answer.problems[0].sentence
    assert world.claims.live.keys() == {"vm"}


def test_of_two_claims_at_once_the_first_gets_the_device() -> None:
    world = World(*SHAPES[0].chips())
    first = world.post(SHAPES[0].prepare)
    second = world.post(structs.replace(SHAPES[0].prepare, id="other"))
    world.run()
    assert world.answers[first].ok
    assert [problem.code for problem in world.answers[second].problems] == [Code.CLAIMED]
    assert world.chips[GPU].driver == "vfio-pci"
