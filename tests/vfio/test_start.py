"""What becomes of the journal when an agent starts."""

from collections.abc import Callable

import msgspec
import pytest
from msgspec import structs

from agent.host.model import Address
from agent.vfio.model import Child, Durable, Holder, Recover, Step, Stray, Watch, Write
from agent.vfio.problems import Code, Problem
from agent.vfio.start import start
from agent.vfio.state import Claims, Outcome, Phase, Rules
from tests.vfio.world import (
    AUDIO,
    GPU,
    OTHER_GPU,
    RELEASE,
    SHAPES,
    Chip,
    Shape,
    World,
    audio,
    does_nothing,
)

PREPARE = SHAPES[0].prepare
VM = Holder(77, "qemu-system-x86", "/dev/vfio/1")


def in_force() -> World:
    world = World(Chip(GPU), audio())
    world.ask(PREPARE)
    return world


def under_way(phase: Phase) -> World:
    world = World(Chip(GPU), audio())
    world.post(PREPARE)
    world.until(phase)
    return world


def stranded() -> World:
    world = in_force()
    world.faults.append(
        (lambda write: (write.address, write.step) == (GPU, Step.UNBIND), does_nothing)
    )
    world.ask(RELEASE)
    world.faults.clear()
    assert world.stranded == {GPU}
    return world


def test_without_a_journal_there_are_no_claims() -> None:
    """And what somebody else put on VFIO is no business of ours."""
    world = World(Chip(GPU, driver="vfio-pci", override="vfio-pci"))
    world.start()
    world.run()
    assert not world.claims.live
    assert not world.stranded
    assert not world.writes
    assert world.specs == {GPU: (f"intel.com/gpu-vfio={GPU}",)}


def test_a_claim_in_force_stays_in_force() -> None:
    """Its names, its age and its entry are as they were; nothing is written."""
    world = in_force()
    record, count, published = world.disk.claims[0], len(world.writes), dict(world.specs)
    world.now += 50
    world.start()
    world.run()
    assert world.disk.claims == (record,)
    assert world.claims.live["vm"].record.since < world.now - 49
    assert len(world.writes) == count
    assert world.specs == published
    assert world.answers[world.ask(PREPARE)].names == record.names


def test_a_claim_has_the_names_under_which_its_devices_are_published_after_a_start() -> None:
    """Of a service that is started with another configuration nobody can refuse it."""
    world = in_force()
    world.vendor, world.rules = "example.com", Rules(directory="/elsewhere")
    world.start()
    world.run()
    record = world.disk.claims[0]
    assert (record.names, record.directory) == (world.specs[GPU], "/elsewhere")
    assert record.names == (f"example.com/gpu-vfio={GPU}",)
    assert world.answers[world.ask(PREPARE)].names == record.names


def test_a_claim_knows_into_which_directory_it_is_published_after_a_start() -> None:
    """Also when its names are what they were."""
    world = in_force()
    (record,) = world.disk.claims
    world.rules = Rules(directory="/elsewhere")
    world.start()
    world.run()
    assert world.disk.claims == (structs.replace(record, directory="/elsewhere"),)


def test_a_claim_keeps_its_names_while_a_device_is_not_published() -> None:
    world = in_force()
    (record,) = world.disk.claims
    world.nodes_never_come = {GPU}
    world.start()
    world.run()
    assert not world.specs
    assert world.disk.claims == (record,)


def test_a_claim_gets_other_names_only_when_all_of_its_devices_have_one() -> None:
    world = World(Chip(GPU), Chip(OTHER_GPU))
    world.ask(structs.replace(PREPARE, devices=(GPU, OTHER_GPU)))
    (record,) = world.disk.claims
    world.vendor, world.nodes_never_come = "example.com", {GPU}
    world.start()
    world.run()
    assert world.specs.keys() == {OTHER_GPU}
    assert world.disk.claims == (record,)
    world.nodes_never_come = set()
    world.run()
    assert world.disk.claims[0].names == (*world.specs[GPU], *world.specs[OTHER_GPU])


def test_a_claim_in_force_whose_device_somebody_moved_meanwhile_is_lost() -> None:
    world = in_force()
    world.chips[GPU].driver = "xe"
    world.start()
    world.run()
    assert world.claims.live["vm"].phase is Phase.LOST


def on(
    driver: str | None, override: str | None = None, *, is_read: bool = True
) -> Callable[[World], None]:
    """Let somebody else put the GPU there; perhaps nobody can read the overrides then."""

    def move(world: World) -> None:
        world.chips[GPU].driver, world.chips[GPU].override = driver, override
        world.overrides_unread = set() if is_read else {GPU, AUDIO}

    return move


def lost(*, lease: float | None = None) -> World:
    """A claim that an administrator has moved to its own driver, and then to VFIO again."""
    world = World(Chip(GPU), audio())
    world.post(structs.replace(PREPARE, lease=lease))
    world.until(Phase.DONE)
    for move in (on("xe"), on("vfio-pci", "vfio-pci")):
        move(world)
        world.step()
        world.step()
    assert world.claims.live["vm"].phase is Phase.LOST
    world.writes.clear()
    return world


def test_a_lost_claim_stays_lost_whatever_its_devices_look_like() -> None:
    """They look as if they were held still, and it is somebody else who holds them."""
    world = lost()
    for _ in range(2):
        world.start()
        world.run()
        assert world.claims.live["vm"].phase is Phase.LOST
        (problem,) = world.answers[world.ask(PREPARE)].problems
        assert problem.code is Code.LOST
        assert "xe" in problem.sentence, "what was seen then"
    world.ask(RELEASE)
    assert world.stranded == {GPU, AUDIO}
    assert world.state()[GPU] == ("vfio-pci", "vfio-pci")
    assert not world.writes


def test_the_lease_of_a_lost_claim_ends_without_a_write() -> None:
    world = lost(lease=50.0)
    world.start()
    world.run()
    assert not world.claims.live
    assert not world.writes


def released_lost() -> World:
    world = lost()
    world.ask(RELEASE)
    return world


def test_what_is_left_of_a_lost_claim_is_moved_by_nothing_but_recover() -> None:
    world = released_lost()
    for _ in range(2):
        world.start()
        world.run()
        assert world.stranded == {GPU, AUDIO}
        assert not world.writes
    for address in (GPU, AUDIO):
        assert world.answers[world.ask(Recover(address))].ok
    assert world.state() == {GPU: ("xe", None), AUDIO: ("snd_hda_intel", None)}
    assert not world.stranded


def test_what_is_left_of_a_lost_claim_stays_so_when_it_cannot_be_recovered() -> None:
    world = released_lost()
    world.holders = [VM]
    assert world.answers[world.ask(Recover(GPU))].problems[0].code is Code.IN_USE
    world.holders = []
    world.start()
    world.run()
    assert world.stranded == {GPU, AUDIO}
    assert not world.writes


@pytest.mark.parametrize(
    ("move", "left"),
    [
        pytest.param(on("xe"), {AUDIO}, id="all of it"),
        pytest.param(on("xe", "vfio-pci"), {GPU, AUDIO}, id="but not its override"),
        pytest.param(on("xe", is_read=False), {GPU, AUDIO}, id="but who knows its override"),
    ],
)
def test_what_is_left_of_a_lost_claim_may_be_brought_back_by_hand(
    move: Callable[[World], None], left: set[Address]
) -> None:
    """It is looked at, by this agent or the next one, and nothing is written."""
    world = released_lost()
    move(world)
    world.until(Phase.FORGETTING)
    world.start()
    world.run()
    assert world.stranded == left
    assert not world.writes


def test_what_is_left_of_a_lost_claim_may_be_claimed_as_it_is() -> None:
    """Somebody has put it on VFIO, and so it stays."""
    world = released_lost()
    assert world.answers[world.ask(PREPARE)].ok
    assert world.answers[world.ask(RELEASE)].ok
    assert world.state()[GPU] == ("vfio-pci", "vfio-pci")
    assert not world.writes


@pytest.mark.parametrize(
    "phase", [Phase.WITHDRAWING, Phase.GUARDING, Phase.MOVING, Phase.PUBLISHING]
)
def test_a_claim_that_was_under_way_is_undone(phase: Phase) -> None:
    world = under_way(phase)
    assert world.disk.claims
    world.start()
    assert world.claims.live["vm"].problem is not None
    assert world.claims.live["vm"].problem.code is Code.INTERRUPTED
    world.run()
    assert [ended.outcome for ended in world.ended] == [Outcome.UNDONE]
    assert world.state() == {GPU: ("xe", None), AUDIO: ("snd_hda_intel", None)}
    assert not world.disk.claims
    assert world.answers[world.ask(PREPARE)].ok, "it need not cool down"


@pytest.mark.parametrize("shape", [pytest.param(s, id=s.id) for s in SHAPES])
def test_a_claim_of_an_earlier_boot_is_void(shape: Shape) -> None:
    world = World(*shape.chips())
    world.ask(shape.prepare)
    records, count = world.disk.claims, len(world.writes)
    world.reboot()
    started = start(world.disk, world.look(), boot_id=world.boot_id, now=world.now)
    assert started.voided == records
    assert started.claims == Claims(boot_id="next-boot")
    world.start()
    world.run()
    assert not world.claims.live
    assert not world.stranded
    assert len(world.writes) == count
    assert world.disk == Durable("next-boot")


def test_what_was_stranded_is_tried_once_more() -> None:
    world = stranded()
    world.start()
    world.run()
    assert not world.stranded
    assert world.state()[GPU] == ("xe", None)
    assert not world.disk.strays


def test_what_a_claim_explains_is_not_stranded() -> None:
    world = in_force()
    origin = world.disk.claims[0].origins[0]
    stray = Stray(origin, Problem(Code.STRANDED, "it was stranded"))
    world.disk = structs.replace(world.disk, strays=(stray,))
    world.start()
    world.run()
    assert world.claims.live.keys() == {"vm"}
    assert not world.stranded
    assert not world.disk.strays


def test_what_is_stranded_and_in_use_stays_so() -> None:
    world = stranded()
    world.holders = [VM]
    count = len(world.writes)
    world.start()
    world.run()
    assert world.stranded == {GPU}
    assert world.claims.strays[GPU].problem.code is Code.IN_USE
    assert len(world.writes) == count
    assert not world.claims.live
    world.holders = []
    assert world.answers[world.ask(Recover(GPU))].ok


def test_a_recovery_that_was_forced_is_so_after_a_start() -> None:
    """Its journal says that somebody wanted the device even while it is in use."""
    world = stranded()
    world.holders = [VM]
    world.post(Recover(GPU, force=True))
    world.until(Phase.FREEING)
    world.start()
    world.run()
    assert not world.stranded
    assert world.state()[GPU] == ("xe", None)


def test_a_recovery_that_was_under_way_waits_while_moving_is_paused() -> None:
    """Nothing has failed that would have to be undone all the same."""
    world = stranded()
    world.post(Recover(GPU))
    world.until(Phase.FREEING)
    count, world.rules = len(world.writes), Rules(paused=True)
    world.start()
    world.run()
    assert len(world.writes) == count
    world.rules = Rules()
    world.run()
    assert world.state()[GPU] == ("xe", None)
    assert world.ended[-1].outcome is Outcome.RELEASED


def test_a_forced_claim_that_is_undone_after_a_start_takes_the_device_from_nobody() -> None:
    """What was forced was the way there."""
    world = World(Chip(GPU))
    world.post(structs.replace(PREPARE, force=True))
    world.until(Phase.PUBLISHING)
    world.holders = [VM]
    count = len(world.writes)
    world.start()
    world.run()
    assert len(world.writes) == count
    assert world.claims.live["vm"].obstacle is not None
    world.holders = []
    world.run()
    assert world.state()[GPU] == ("xe", None)


def test_what_is_stranded_is_forgotten_with_its_boot() -> None:
    world = stranded()
    world.reboot()
    world.start()
    world.run()
    assert not world.stranded


def test_a_broken_journal_is_not_the_same_as_no_claims() -> None:
    """Devices on VFIO are of unknown origin then, moved by nothing but `recover`."""
    world = in_force()
    world.chips[OTHER_GPU] = Chip(OTHER_GPU, driver="vfio-pci", group=2)
    count = len(world.writes)
    for damaged in (True, False):
        world.start(damaged=damaged)
        world.run()
        assert world.stranded == {GPU, AUDIO, OTHER_GPU}
        assert not world.claims.live
        assert len(world.writes) == count
        assert not any(stray.origin.known for stray in world.disk.strays)
        assert "the journal was lost" in world.claims.strays[GPU].problem.sentence
    for address in (GPU, AUDIO):
        assert world.answers[world.ask(Recover(address))].ok
    assert world.state()[GPU] == ("xe", None)
    assert world.state()[AUDIO] == ("snd_hda_intel", None)
    world.chips[OTHER_GPU].driver = "xe"
    world.run()
    assert not world.stranded, "somebody brought back the last one"


def test_a_child_that_still_writes_is_waited_for() -> None:
    """An earlier agent left it. A broken journal does not tell of it, and none survives a boot."""
    child = Child(Write("vm", GPU, Step.UNBIND, GPU), 4711, 99)
    journal = Durable("this-boot", children=(child,))
    look = World(Chip(GPU), audio()).look()
    started = start(journal, look, boot_id="this-boot", now=0.0)
    assert started.effects == (Watch(child),)
    assert started.claims.children == {GPU: child}
    for boot, damaged in (("this-boot", True), ("next-boot", False)):
        assert not start(journal, look, boot_id=boot, now=0.0, damaged=damaged).effects


@pytest.mark.parametrize("shape", [pytest.param(s, id=s.id) for s in SHAPES])
def test_what_the_journal_keeps_can_be_written_and_read(shape: Shape) -> None:
    """All of it, in every state, as JSON; a claim in force is the same after it."""
    world = World(*shape.chips())
    world.goes_on = False
    found = set()
    world.before_pass = lambda: found.add(world.disk)
    world.ask(shape.prepare)
    world.faults.append((lambda _write: True, does_nothing))
    world.ask(RELEASE)
    found.add(world.disk)
    assert len(found) > 3
    for durable in found:
        read = msgspec.json.decode(msgspec.json.encode(durable), type=Durable, strict=True)
        assert read == durable
        again = start(read, world.look(), boot_id=durable.boot_id, now=world.now)
        assert again.claims.durable == durable
