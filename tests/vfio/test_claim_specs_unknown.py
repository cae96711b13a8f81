"""Claims while nobody can tell what is published: they need that to publish, and the host to live.

The spec directory has become a link or a file, may not be read, or the agent may open no more
files. Nobody waits for an answer until somebody has mended that, and no device waits without a
driver; but what is known to be published is not moved.
"""

import pytest
from msgspec import structs

from agent.host.model import HoldMode
from agent.vfio.model import Prepare, Recover
from agent.vfio.problems import Code
from agent.vfio.state import Outcome, Phase, explain
from tests.vfio.world import AUDIO, GPU, RELEASE, SHAPES, Chip, World, audio, does_nothing

PREPARE = SHAPES[0].prepare
UNKNOWN = "cannot read /run/cdi: it is a symbolic link"
FREE = {GPU: ("xe", None), AUDIO: ("snd_hda_intel", None)}
HELD = {GPU: ("vfio-pci", "vfio-pci"), AUDIO: ("vfio-pci", "vfio-pci")}


def in_force() -> World:
    world = World(Chip(GPU), audio())
    world.ask(PREPARE)
    assert world.state() == HELD
    return world


def under_way(phase: Phase) -> tuple[World, int]:
    world = World(Chip(GPU), audio())
    ticket = world.post(PREPARE)
    world.until(phase)
    return world, ticket


@pytest.mark.parametrize(
    "order",
    [
        PREPARE,
        structs.replace(PREPARE, dry_run=True),
        Prepare("other", HoldMode.DRM, (GPU,)),
    ],
    ids=["prepare", "dry-run", "nothing-to-move"],
)
def test_what_would_have_to_be_published_is_refused(order: Prepare) -> None:
    world = World(Chip(GPU), audio())
    world.specs_problem = UNKNOWN
    (problem,) = world.answers[world.ask(order)].problems
    assert (problem.code, problem.retryable) == (Code.SPECS_UNKNOWN, True)
    assert UNKNOWN in problem.sentence
    assert world.state() == FREE
    assert not world.claims.live
    assert not world.writes


@pytest.mark.parametrize(
    "phase",
    [Phase.CHECKING, Phase.WITHDRAWING, Phase.GUARDING, Phase.MOVING, Phase.PUBLISHING],
)
def test_what_is_on_its_way_is_undone_and_answered(phase: Phase) -> None:
    world, ticket = under_way(phase)
    world.specs_problem = UNKNOWN
    world.run(patience=world.rules.deadlines.publish)
    assert world.state() == FREE, "what has been withdrawn waits for nothing else"
    assert not world.claims.live
    assert not world.stranded
    problem = world.answers[ticket].problems[0]
    assert problem.code is Code.SPECS_UNKNOWN
    assert problem.retryable
    world.specs_problem = ""
    world.run()
    assert world.answers[world.ask(PREPARE)].ok, "it need not cool down"


@pytest.mark.parametrize(
    "phase",
    [Phase.WITHDRAWING, Phase.GUARDING, Phase.MOVING, Phase.PUBLISHING],
)
def test_what_an_earlier_agent_left_on_its_way_is_undone(phase: Phase) -> None:
    """Nothing was ever known: what keeps a device from its driver is waited for, not for ever."""
    world, _ = under_way(phase)
    world.specs_problem = UNKNOWN
    began = world.now
    world.start()
    claim = world.claims.live["vm"]
    assert UNKNOWN in explain(claim), "it is said meanwhile"
    world.run()
    assert world.state() == FREE
    assert [ended.outcome for ended in world.ended] == [Outcome.UNDONE]
    assert world.now - began >= world.rules.deadlines.withdraw


def test_a_device_that_is_known_to_be_published_is_not_moved_and_who_asked_is_told() -> None:
    world = in_force()
    world.specs_problem = UNKNOWN
    for _ in range(2):
        (problem,) = world.answers[world.ask(RELEASE)].problems
        assert (problem.code, problem.retryable) == (Code.SPECS_UNKNOWN, True)
        assert world.claims.live["vm"].phase is Phase.RELEASING
    assert world.state() == HELD
    assert not world.disk.claims[0].done, "it is being released, whoever starts next"
    world.specs_problem = ""
    world.run()
    assert world.state() == FREE
    assert world.ended[-1].outcome is Outcome.RELEASED


def test_leases_end_and_owners_go_meanwhile() -> None:
    leased, owned = World(Chip(GPU), audio()), World(Chip(GPU), audio())
    for world, order in ((leased, structs.replace(PREPARE, lease=20.0)), (owned, PREPARE)):
        world.post(order)
        world.until(Phase.DONE)
        world.specs_problem = UNKNOWN
    owned.owners_gone = frozenset({"vm"})
    for world in (leased, owned):
        world.run()
        assert world.claims.live["vm"].phase is Phase.RELEASING
        world.specs_problem = ""
        world.run()
        assert world.state() == FREE


def test_what_is_stranded_is_recovered_meanwhile() -> None:
    world = in_force()
    world.faults.append((lambda write: write.address == GPU, does_nothing))
    world.ask(RELEASE)
    assert world.stranded == {GPU}
    world.faults.clear()
    world.specs, world.known_specs = {}, {}
    world.specs_problem = UNKNOWN
    assert world.answers[world.ask(Recover(GPU))].ok
    assert world.state() == FREE
    assert not world.stranded


def test_a_claim_in_force_is_not_told_to_be_published() -> None:
    world = in_force()
    world.specs_problem = UNKNOWN
    (problem,) = world.answers[world.ask(PREPARE)].problems
    assert problem.code is Code.SPECS_UNKNOWN
    assert world.claims.live["vm"].phase is Phase.DONE
    world.specs_problem = ""
    assert world.answers[world.ask(PREPARE)].ok
