"""Devices that do not answer any more when a claim gives them back: withheld until they do."""

import pytest
from msgspec import structs

from agent.host.model import HoldMode
from agent.vfio.model import Prepare, Recover, Step
from agent.vfio.problems import Code
from agent.vfio.state import Outcome, Rules
from tests.vfio.world import (
    AUDIO,
    GPU,
    OTHER_GPU,
    RECOVER,
    RELEASE,
    SHAPES,
    Chip,
    World,
    audio,
    does_nothing,
)

PREPARE = SHAPES[0].prepare
PUBLISHED = {
    GPU: (f"intel.com/gpu={GPU}",),
    OTHER_GPU: (f"intel.com/gpu={OTHER_GPU}",),
}


def codes(world: World, ticket: int) -> list[Code]:
    return [problem.code for problem in world.answers[ticket].problems]


@pytest.fixture
def world() -> World:
    """A claim in force whose GPU has died of its virtual machine."""
    world = World(Chip(GPU), audio(), Chip(OTHER_GPU, group=2))
    world.ask(PREPARE)
    world.dead = {GPU}
    return world


@pytest.fixture
def dead(world: World) -> World:
    """It has been released: on its driver again, stranded, and dead."""
    world.ask(RELEASE)
    assert world.claims.strays[GPU].problem.code is Code.DEAD
    return world


def without(address: str) -> dict[str, tuple[str, ...]]:
    return {known: names for known, names in PUBLISHED.items() if known != address}


def test_a_device_that_came_back_dead_is_stranded_and_withheld(world: World) -> None:
    """It is on its driver, and nothing but its answer is missing; its neighbours are published."""
    ticket = world.ask(RELEASE)
    assert codes(world, ticket) == [Code.STRANDED]
    (problem,) = world.answers[ticket].problems
    assert "does not answer" in problem.sentence
    assert problem.hint.startswith("reset it or power-cycle the host"), "to recover it is no help"
    assert world.ended[-1].outcome is Outcome.STRANDED
    assert world.stranded == {GPU}
    assert world.state()[GPU] == ("xe", None)
    assert world.specs == without(GPU)


def test_what_an_undo_brings_back_dead_is_withheld_too() -> None:
    world = World(Chip(GPU), audio(), Chip(OTHER_GPU, group=2))
    world.dead = {GPU}
    world.nodes_never_come = {GPU}
    assert codes(world, world.ask(PREPARE))[0] is Code.NOT_PUBLISHED
    assert world.claims.strays[GPU].problem.code is Code.DEAD
    assert world.specs == without(GPU)


def test_a_dead_companion_withholds_no_device(world: World) -> None:
    world.dead = {AUDIO}
    assert codes(world, world.ask(RELEASE)) == [Code.STRANDED]
    assert world.stranded == {AUDIO}
    assert world.specs == PUBLISHED


def test_a_dead_device_stays_withheld(dead: World) -> None:
    """Over passes, over a start, and as often as it is tried; nothing is written to it."""
    count = len(dead.writes)
    dead.start()
    dead.run()
    for _ in range(2):
        assert codes(dead, dead.ask(RECOVER)) == [Code.DEAD]
    assert codes(dead, dead.ask(structs.replace(RECOVER, dry_run=True))) == [Code.DEAD]
    assert dead.claims.strays[GPU].problem.code is Code.DEAD
    assert len(dead.writes) == count
    assert dead.specs == without(GPU)


def test_a_dead_device_that_answers_again_is_recovered(dead: World) -> None:
    dead.dead.clear()
    assert dead.answers[dead.ask(RECOVER)].ok
    assert not dead.stranded
    assert dead.specs == PUBLISHED


def test_paused_a_dead_device_stays_withheld(dead: World) -> None:
    dead.rules = Rules(paused=True)
    assert codes(dead, dead.ask(RECOVER)) == [Code.PAUSED]
    assert dead.specs == without(GPU)


def test_another_card_in_its_slot_is_not_dead(dead: World) -> None:
    dead.chips[GPU] = Chip(GPU, inode=8)
    dead.run()
    assert not dead.stranded
    assert dead.specs == PUBLISHED


@pytest.mark.parametrize("mode", HoldMode)
def test_a_dead_device_is_not_claimed(dead: World, mode: HoldMode) -> None:
    assert codes(dead, dead.ask(Prepare("other", mode, (GPU,)))) == [Code.STRANDED]


@pytest.mark.parametrize("mode", HoldMode)
def test_a_device_of_unknown_origin_that_came_back_dead_is_withheld(
    world: World, mode: HoldMode
) -> None:
    """A broken journal does not say where it came from; that it is dead is known all the same."""
    world.start(damaged=True)
    world.run()
    assert codes(world, world.ask(RECOVER)) == [Code.STRANDED]
    world.run()
    assert world.claims.strays[GPU].problem.code is Code.DEAD
    assert world.specs == without(GPU)
    assert codes(world, world.ask(Prepare("other", mode, (GPU,)))) == [Code.STRANDED]
    world.start()
    world.run()
    assert codes(world, world.ask(RECOVER)) == [Code.DEAD]
    assert world.specs == without(GPU)
    world.dead.clear()
    assert world.answers[world.ask(RECOVER)].ok
    assert world.specs == PUBLISHED


def test_a_dead_device_that_is_left_on_vfio_is_stranded_for_that(world: World) -> None:
    """What could not be moved back is not asked whether it answers."""
    world.faults.append((lambda w: (w.address, w.step) == (GPU, Step.UNBIND), does_nothing))
    assert codes(world, world.ask(RELEASE)) == [Code.STRANDED]
    assert world.claims.strays[GPU].problem.code is Code.MOVE_FAILED
    world.faults.clear()
    assert codes(world, world.ask(RECOVER)) == [Code.STRANDED]
    assert world.claims.strays[GPU].problem.code is Code.DEAD
    assert world.specs == without(GPU)


def test_force_recovers_no_dead_device_that_has_to_be_moved(world: World) -> None:
    world.start(damaged=True)
    world.run()
    assert codes(world, world.ask(Recover(GPU, force=True))) == [Code.STRANDED]
    assert world.specs == without(GPU)
