"""Every transition of a claim, each with what leads to it; there is no other one."""

import errno
from collections.abc import Callable

import pytest

from agent.host.model import HoldMode
from agent.vfio.claim import TABLE
from agent.vfio.model import Holder, Prepare, Recover, Release, Step
from agent.vfio.state import PHASES, THERE, Phase
from tests.vfio.world import GPU, RELEASE, SHAPES, Chip, World, answers, does_nothing, hangs

PREPARE = SHAPES[0].prepare
ALREADY_THERE = Prepare("vm", HoldMode.DRM, (GPU,))
END = None

Scene = Callable[[World], object]


# --- how to get there -----------------------------------------------------------------------------


def until(phase: Phase, order: Prepare | Release | Recover = PREPARE) -> Scene:
    """Give an order, and let its claim come into a phase."""

    def scene(world: World) -> None:
        world.post(order)
        world.until(phase)

    return scene


def then(*scenes: Scene) -> Scene:
    """One after the other, and then all that follows from it."""

    def scene(world: World) -> None:
        for each in scenes:
            each(world)
        world.run(patience=100)

    return scene


def ask(order: Prepare | Release | Recover) -> Scene:
    return lambda world: world.post(order)


def change(name: str, value: object) -> Scene:
    return lambda world: setattr(world, name, value)


def somebody_binds(driver: str | None) -> Scene:
    return lambda world: setattr(world.chips[GPU], "driver", driver)


def fails(step: Step, value: str | None = None) -> Scene:
    """A write has no effect, as often as it is made."""
    return lambda world: world.faults.append(
        (lambda write: write.step is step and value in {None, write.value}, does_nothing)
    )


def hangs_then_returns(world: World) -> None:
    world.faults.append((lambda write: write.step is Step.UNBIND, hangs))
    world.run(patience=100)
    world.faults.clear()
    world.let_go(GPU)


def stranded(world: World) -> None:
    """Leave a function that is stranded on VFIO."""
    world.ask(PREPARE)
    world.faults.append((lambda write: write.step is Step.UNBIND, answers(errno.EIO)))
    world.ask(RELEASE)
    assert world.stranded == {GPU}
    world.faults.clear()
    world.passed.clear()


VM = Holder(77, "qemu-system-x86", "/dev/vfio/1")
CHECKING, WITHDRAWING, GUARDING, MOVING, PUBLISHING, CONFIRMING, DONE = tuple(Phase)[:7]
LOST, RELEASING, FREEING, RETURNING, VERIFYING, RESTORING, FORGETTING = tuple(Phase)[7:]

TRANSITIONS: tuple[tuple[Phase, Phase | None, str, Scene], ...] = (
    # There.
    (CHECKING, WITHDRAWING, "nothing-speaks-against-it", then(ask(PREPARE))),
    (CHECKING, RESTORING, "released", then(until(CHECKING), ask(RELEASE))),
    (CHECKING, END, "refused", then(change("managed", {GPU: "driverctl"}), ask(PREPARE))),
    (CHECKING, RELEASING, "a-recovery", then(stranded, ask(Recover(GPU)))),
    (WITHDRAWING, GUARDING, "journalled-and-withdrawn", then(ask(PREPARE))),
    (WITHDRAWING, PUBLISHING, "nothing-to-move", then(ask(ALREADY_THERE))),
    (
        WITHDRAWING,
        RESTORING,
        "journal-full",
        then(change("journal_full", True), ask(PREPARE)),
    ),
    (GUARDING, MOVING, "still-nothing-speaks-against-it", then(ask(PREPARE))),
    (GUARDING, RESTORING, "somebody-was-quicker", then(until(GUARDING), somebody_binds(None))),
    (MOVING, PUBLISHING, "on-its-driver", then(ask(PREPARE))),
    (MOVING, RELEASING, "a-write-fails", then(until(MOVING), fails(Step.PROBE))),
    (PUBLISHING, CONFIRMING, "published", then(ask(PREPARE))),
    (
        PUBLISHING,
        RELEASING,
        "never-published",
        then(change("nodes_never_come", {GPU}), ask(PREPARE)),
    ),
    (
        PUBLISHING,
        RESTORING,
        "never-published-and-not-moved",
        then(
            change("specs_readonly", True),
            lambda world: world.specs.clear(),
            ask(ALREADY_THERE),
        ),
    ),
    (CONFIRMING, DONE, "journalled", then(ask(PREPARE))),
    (
        CONFIRMING,
        RELEASING,
        "somebody-changes-it",
        then(until(CONFIRMING), somebody_binds("xe")),
    ),
    (
        CONFIRMING,
        RESTORING,
        "journal-full-and-not-moved",
        then(until(WITHDRAWING, ALREADY_THERE), change("journal_full", True)),
    ),
    # In force.
    (DONE, LOST, "somebody-changes-it", then(until(DONE), somebody_binds("xe"))),
    (DONE, RELEASING, "released", then(until(DONE), ask(RELEASE))),
    (DONE, RESTORING, "released-and-not-moved", then(until(DONE, ALREADY_THERE), ask(RELEASE))),
    (
        LOST,
        FORGETTING,
        "released",
        then(until(DONE), then(somebody_binds("xe")), ask(RELEASE)),
    ),
    (FORGETTING, END, "looked-at", then(until(DONE), then(somebody_binds("xe")), ask(RELEASE))),
    # Back.
    (RELEASING, FREEING, "journalled-and-withdrawn", then(until(DONE), ask(RELEASE))),
    (FREEING, RETURNING, "nobody-uses-it", then(until(DONE), ask(RELEASE))),
    (
        FREEING,
        FREEING,
        "forced",
        then(
            until(DONE),
            change("holders", [VM]),
            until(FREEING, RELEASE),
            lambda world: world.run(patience=3),
            ask(Release("vm", force=True)),
        ),
    ),
    (
        FREEING,
        END,
        "a-recovery-does-not-wait",
        then(stranded, until(RELEASING, Recover(GPU)), change("holders", [VM])),
    ),
    (RETURNING, VERIFYING, "on-its-old-driver", then(until(DONE), ask(RELEASE))),
    (
        RETURNING,
        RESTORING,
        "nothing-could-be-done",
        then(until(DONE), fails(Step.OVERRIDE), fails(Step.UNBIND), ask(RELEASE)),
    ),
    (RETURNING, FREEING, "a-hung-write-returned", then(until(MOVING), hangs_then_returns)),
    (
        VERIFYING,
        RETURNING,
        "the-override-is-still-there",
        then(until(DONE), fails(Step.OVERRIDE, "\n"), ask(RELEASE)),
    ),
    (VERIFYING, RESTORING, "nothing-is-left", then(until(DONE), ask(RELEASE))),
    (RESTORING, END, "published-again", then(until(DONE), ask(RELEASE))),
)


def play(scene: Scene) -> set[tuple[Phase, Phase | None]]:
    world = World(Chip(GPU))
    scene(world)
    return set(world.passed)


@pytest.mark.parametrize(
    ("before", "after", "scene"),
    [
        pytest.param(before, after, scene, id=f"{before}-{after or 'end'}-{why}")
        for before, after, why, scene in TRANSITIONS
    ],
)
def test_what_leads_from_one_phase_to_the_next(
    before: Phase, after: Phase | None, scene: Scene
) -> None:
    assert (before, after) in play(scene)


def test_there_is_no_other_transition() -> None:
    """In all of these scenes; the property test says so of every history."""
    found = set().union(*(play(scene) for *_, scene in TRANSITIONS))
    assert found == {(before, after) for before, after, *_ in TRANSITIONS}


def test_every_phase_has_its_row_and_its_sentence() -> None:
    assert TABLE.keys() == PHASES.keys() == set(Phase)
    assert set(Phase) == {before for before, *_ in TRANSITIONS}
    assert set(THERE) == set(list(Phase)[:6])
