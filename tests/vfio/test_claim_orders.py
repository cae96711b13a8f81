"""What is asked for, by whom, how often and for how long; and what somebody else does meanwhile."""

from collections.abc import Callable

import pytest
from msgspec import structs

from agent.host.model import Address, HoldMode
from agent.vfio.claim import holds
from agent.vfio.model import (
    ANY_DRIVER,
    Answer,
    Holder,
    Move,
    Order,
    Prepare,
    Recover,
    Release,
    Step,
)
from agent.vfio.problems import Code
from agent.vfio.state import Outcome, Phase, Rules
from tests.vfio.world import (
    AUDIO,
    GPU,
    OTHER_GPU,
    RELEASE,
    SHAPES,
    VF,
    Chip,
    World,
    audio,
    does_nothing,
    hangs,
)

PREPARE = SHAPES[0].prepare
VM = Holder(77, "qemu-system-x86", "/dev/vfio/1")


def world_of(*chips: Chip) -> World:
    return World(*(chips or (Chip(GPU), audio())))


def ask(world: World, order: Order) -> Answer:
    return world.answers[world.ask(order)]


def ask_briefly(world: World, order: Order) -> Answer:
    """Give an order whose claim has a lease, and do not wait for the end of that."""
    ticket = world.post(order)
    world.run(patience=5)
    return world.answers[ticket]


def codes(answer: Answer) -> list[Code]:
    return [problem.code for problem in answer.problems]


# --- asked for twice ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phase", [Phase.CHECKING, Phase.WITHDRAWING, Phase.GUARDING, Phase.MOVING, Phase.PUBLISHING]
)
def test_a_repeated_prepare_joins_the_one_that_is_under_way(phase: Phase) -> None:
    world = world_of()
    first = world.post(PREPARE)
    world.until(phase)
    second = world.post(structs.replace(PREPARE, client="another", devices=(GPU, GPU)))
    world.run()
    assert world.answers[first] == structs.replace(world.answers[second], ticket=first)
    assert world.answers[first].ok
    assert len(world.writes) == 6


@pytest.mark.parametrize("phase", [p for p in list(Phase)[8:13] if p is not Phase.RESTORING])
def test_a_repeated_release_joins_the_one_that_is_under_way(phase: Phase) -> None:
    world = world_of()
    ask(world, PREPARE)
    first = world.post(RELEASE)
    world.until(phase)
    early = world.post(PREPARE)
    second = world.post(RELEASE)
    world.run()
    assert world.answers[first].ok
    assert world.answers[second].ok
    assert codes(world.answers[early]) == [Code.ENDING]
    assert len(world.writes) == 6 + 8


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(structs.replace(PREPARE, devices=(OTHER_GPU,)), id="device"),
        pytest.param(structs.replace(PREPARE, mode=HoldMode.DRM), id="mode"),
        pytest.param(structs.replace(PREPARE, driver="xe-vfio-pci"), id="driver"),
        pytest.param(structs.replace(PREPARE, named=(AUDIO,)), id="named"),
    ],
)
def test_an_id_means_one_thing(other: Prepare) -> None:
    world = world_of(Chip(GPU), audio(), Chip(OTHER_GPU, group=2))
    ask(world, PREPARE)
    assert codes(ask(world, other)) == [Code.CLAIMED]
    assert world.claims.live["vm"].record.request == PREPARE


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (Prepare("", HoldMode.VFIO, (GPU,)), "a claim cannot be called ''"),
        (Prepare("recover:x", HoldMode.VFIO, (GPU,)), "a claim cannot be called 'recover:x'"),
        (Prepare("vm", HoldMode.VFIO, ()), "the claim names no device"),
        (Prepare("vm", HoldMode.VFIO, (GPU,), lease=0), "0 seconds are no lease"),
        (Prepare("vm", HoldMode.VFIO, (GPU,), lease=float("nan")), "nan seconds are no lease"),
        (Prepare("vm", HoldMode.VFIO, (GPU,), lease=float("inf")), "inf seconds are no lease"),
        (
            Prepare("vm", HoldMode.DRM, (GPU,), named=(AUDIO,)),
            "a claim in mode drm moves no other function along",
        ),
        (
            Prepare("vm", HoldMode.DRM, (GPU,), driver="xe_vfio_pci"),
            "xe_vfio_pci is a VFIO driver, and mode drm takes a device off VFIO",
        ),
        (Release(f"recover:{GPU}"), f"recover:{GPU} is no claim"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nonsense_is_refused(order: Order, sentence: str) -> None:
    """Also for a claim that is in force, which stays as it is."""
    world = world_of()
    ask(world, PREPARE)
    answer = ask(world, order)
    assert codes(answer) == [Code.INVALID]
    assert answer.problems[0].sentence == sentence
    assert world.claims.live["vm"].phase is Phase.DONE


# --- given back early -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phase",
    [
        Phase.CHECKING,
        Phase.WITHDRAWING,
        Phase.GUARDING,
        Phase.MOVING,
        Phase.PUBLISHING,
        Phase.CONFIRMING,
    ],
)
def test_a_release_of_a_claim_that_is_under_way_turns_it_back(phase: Phase) -> None:
    """Whoever prepares hears that it was cancelled, and may prepare again at once."""
    world = world_of()
    before, published = world.state(), dict(world.specs)
    first = world.post(PREPARE)
    world.until(phase)
    second = world.post(RELEASE)
    world.run()
    assert codes(world.answers[first]) == [Code.CANCELLED]
    assert world.answers[second].ok
    assert (world.state(), world.specs) == (before, published)
    assert not world.disk.claims
    assert ask(world, PREPARE).ok


@pytest.mark.parametrize("phase", [Phase.CHECKING, Phase.MOVING, Phase.CONFIRMING])
def test_a_prepare_after_the_release_is_told_that_the_claim_is_ending(phase: Phase) -> None:
    """It came too late for the claim that is given back, and may be tried again."""
    world = world_of()
    first = world.post(PREPARE)
    world.until(phase)
    world.post(RELEASE)
    late = world.post(PREPARE)
    world.run()
    assert codes(world.answers[first]) == [Code.CANCELLED]
    assert codes(world.answers[late]) == [Code.ENDING]
    assert world.answers[late].problems[0].retryable
    assert ask(world, PREPARE).ok


# --- for how long ---------------------------------------------------------------------------------


def test_a_claim_is_released_when_its_lease_ends() -> None:
    world = world_of()
    before = world.state()
    began = world.now
    world.post(structs.replace(PREPARE, lease=60.0))
    world.run(patience=59)
    assert world.claims.live
    world.run(patience=61)
    assert world.now >= began + 60
    assert not world.claims.live
    assert world.state() == before
    assert [ended.outcome for ended in world.ended] == [Outcome.RELEASED]


def test_a_lease_begins_anew_with_each_prepare() -> None:
    world = world_of()
    leased = structs.replace(PREPARE, lease=60.0)
    world.post(leased)
    world.run(patience=1)
    for _ in range(3):
        world.now += 50
        world.post(leased)
        world.run(patience=1)
        assert world.answers[max(world.answers)].ok
    assert world.disk.claims[0].expires_at == world.now + 60
    world.post(PREPARE)
    world.run(patience=600)
    assert world.claims.live, "whoever prepares last decides"


def test_a_lease_goes_on_when_the_agent_is_started_again() -> None:
    world = world_of()
    world.post(structs.replace(PREPARE, lease=60.0))
    world.run(patience=1)
    began = world.now
    world.start()
    world.run(patience=30)
    assert world.claims.live
    world.run(patience=300)
    assert not world.claims.live
    assert world.now < began + 62


LASTING = structs.replace(PREPARE, lease=60.0)
OWNED = structs.replace(PREPARE, owner_pid=4711, owner_started=99)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(LASTING, LASTING, id="lease-renewed"),
        pytest.param(LASTING, PREPARE, id="lease-ended"),
        pytest.param(PREPARE, LASTING, id="lease-begun"),
        pytest.param(OWNED, PREPARE, id="without-owner"),
        pytest.param(PREPARE, OWNED, id="owner"),
    ],
)
def test_how_long_a_claim_lasts_is_promised_only_once_the_journal_has_it(
    first: Prepare, then: Prepare
) -> None:
    """Else an agent that starts after a crash would end the claim by what it was asked before."""
    world = world_of()
    assert ask_briefly(world, first).ok
    world.now += 10
    world.journal_full = True
    assert codes(ask_briefly(world, then)) == [Code.JOURNAL_FAILED]
    assert world.claims.live["vm"].phase is Phase.DONE, "it stays in force all the same"
    world.journal_full = False
    assert ask_briefly(world, then).ok
    assert world.disk.claims == (world.claims.live["vm"].record,)


def test_a_prepare_that_changes_nothing_needs_no_journal() -> None:
    world = world_of()
    names = ask(world, PREPARE).names
    world.journal_full = True
    assert ask(world, structs.replace(PREPARE, client="another")).names == names


def lost_to_somebody(world: World) -> None:
    world.chips[GPU].driver = "xe"


def released(world: World) -> None:
    world.post(RELEASE)


@pytest.mark.parametrize(
    ("meanwhile", "code"),
    [(lost_to_somebody, Code.LOST), (released, Code.CANCELLED)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_who_renews_a_claim_that_ends_meanwhile_is_told(
    meanwhile: Callable[[World], None], code: Code
) -> None:
    """Nobody is told that a claim is in force when it is not any more."""
    world = world_of()
    ask_briefly(world, LASTING)
    world.now += 10
    world.journal_full = True
    renewed = world.post(LASTING)
    world.step()
    assert renewed not in world.answers
    world.journal_full = False
    meanwhile(world)
    world.run(patience=5)
    assert codes(world.answers[renewed]) == [code]


def test_a_lease_that_ends_before_the_claim_is_in_force_cancels_it() -> None:
    world = world_of()
    before = world.state()
    world.nodes_never_come = {GPU}
    answer = ask(world, structs.replace(PREPARE, lease=3.0))
    assert codes(answer) == [Code.CANCELLED]
    assert "lease" in answer.problems[0].sentence
    assert world.state() == before


def test_a_claim_is_released_when_its_owner_has_gone() -> None:
    world = world_of()
    before = world.state()
    ask(world, structs.replace(PREPARE, owner_pid=4711))
    world.owners_gone = frozenset({"another"})
    world.run()
    assert world.claims.live
    world.owners_gone = frozenset({"vm"})
    world.run()
    assert not world.claims.live
    assert world.state() == before


# --- lost -----------------------------------------------------------------------------------------


def rebound(world: World) -> None:
    world.chips[GPU].driver, world.chips[GPU].override = "xe", None


def rebound_but_marked(world: World) -> None:
    world.chips[GPU].driver = "xe"


def unbound(world: World) -> None:
    world.chips[GPU].driver = None


def replaced(world: World) -> None:
    world.chips[GPU] = Chip(GPU, inode=8)


def pulled_out(world: World) -> None:
    del world.chips[GPU]


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (rebound, {AUDIO}),
        (rebound_but_marked, {AUDIO, GPU}),
        (unbound, {AUDIO, GPU}),
        (replaced, {AUDIO}),
        (pulled_out, {AUDIO}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_claim_that_somebody_else_changed_is_lost(
    change: Callable[[World], None], left: set[Address]
) -> None:
    """It is reported and never moved; its release writes nothing, and says what is left of it."""
    world = world_of()
    ask(world, PREPARE)
    change(world)
    world.run()
    claim = world.claims.live["vm"]
    assert claim.phase is Phase.LOST
    assert claim.problem is not None
    assert GPU in claim.problem.sentence
    count = len(world.writes)
    (problem,) = ask(world, PREPARE).problems
    assert problem.code is Code.LOST
    assert "recover" not in problem.hint, "of a claim that is held it does nothing"
    assert codes(ask(world, Recover(AUDIO))) == [Code.CLAIMED]
    world.start()
    world.run()
    assert world.claims.live["vm"].phase is Phase.LOST
    answer = ask(world, RELEASE)
    assert set(codes(answer)) == {Code.STRANDED}
    assert world.stranded == left
    assert len(world.writes) == count
    assert ask(world, RELEASE).ok
    for address in left:
        assert ask(world, Recover(address)).ok
    assert not world.stranded
    assert all(chip.override is None for chip in world.chips.values())


def test_what_somebody_has_put_on_another_driver_of_the_host_is_recovered_by_force() -> None:
    """Who is refused is told so: the same again would be refused again."""
    world = world_of(Chip(GPU, ("xe", "i915")))
    before = world.state()
    ask(world, PREPARE)
    world.chips[GPU].driver, world.chips[GPU].override = "i915", None
    world.run()
    assert codes(ask(world, RELEASE)) == [Code.STRANDED]
    for _ in range(2):
        (problem,) = ask(world, Recover(GPU)).problems
        assert "on i915" in problem.sentence
        assert f"`cdi-agent recover {GPU} --force`" in problem.hint
        assert world.claims.strays[GPU].problem.hint == problem.hint, "who looks later is told too"
    assert world.chips[GPU].driver == "i915"
    assert ask(world, Recover(GPU, force=True)).ok
    assert world.state() == before


def test_what_driverctl_has_taken_over_meanwhile_is_recovered_by_force_alone() -> None:
    """Two programs must not move one device: nor does a start, for which nobody has asked."""
    world = world_of(Chip(GPU))
    before = world.state()
    ask(world, PREPARE)
    world.faults.append((lambda write: write.step is Step.PROBE, does_nothing))
    assert codes(ask(world, RELEASE)) == [Code.STRANDED]
    world.faults.clear()
    world.chips[GPU].driver = world.chips[GPU].override = "vfio-pci"
    world.managed = {GPU: "driverctl"}
    world.start()
    world.run()
    for _ in range(2):
        (problem,) = ask(world, Recover(GPU)).problems
        assert "is managed by driverctl" in problem.sentence
        assert world.state() == {GPU: ("vfio-pci", "vfio-pci")}
        assert world.stranded == {GPU}
    assert ask(world, Recover(GPU, force=True)).ok
    assert world.state() == before


def test_what_driverctl_has_brought_back_is_stranded_no_more() -> None:
    world = world_of(Chip(GPU))
    ask(world, PREPARE)
    world.faults.append((lambda write: write.step is Step.PROBE, does_nothing))
    assert codes(ask(world, RELEASE)) == [Code.STRANDED]
    world.chips[GPU].driver = world.chips[GPU].override = "xe"
    world.managed = {GPU: "driverctl"}
    world.run()
    assert not world.stranded
    assert world.chips[GPU].driver == "xe"


def test_who_recovers_what_cannot_be_read_is_not_told_that_it_does_not_exist() -> None:
    world = world_of(Chip(GPU))
    world.unread.add(GPU)
    (problem,) = ask(world, Recover(GPU)).problems
    assert problem.code is Code.UNKNOWN_DEVICE
    assert problem.sentence == f"{GPU} could not be read: it changes all the time"
    (problem,) = ask(world, Recover(OTHER_GPU)).problems
    assert problem.sentence == f"{OTHER_GPU} does not exist"


@pytest.mark.parametrize("driver", [None, "vfio-pci"])
def test_nobody_is_given_a_driver_of_the_host_in_the_group_of_another_claim(
    driver: str | None,
) -> None:
    """The group would not be viable any more, and the virtual machine would not start."""
    world = World(Chip(GPU), Chip(OTHER_GPU, driver=driver))
    ask(world, PREPARE)
    published = dict(world.specs)
    other = Prepare("other", HoldMode.DRM, (OTHER_GPU,), from_vfio=True)
    for order in (other, structs.replace(other, dry_run=True)):
        (problem,) = ask(world, order).problems
        assert problem.code is Code.CLAIMED
        assert "IOMMU group 1" in problem.sentence
        assert "claim vm" in problem.sentence
    assert world.specs == published
    assert world.chips[OTHER_GPU].driver == driver
    assert ask(world, RELEASE).ok
    assert ask(world, other).ok


def test_a_release_waits_for_another_claim_that_needs_the_group() -> None:
    """As it waits for its virtual machine; unless it is forced."""
    for force in (False, True):
        world = World(Chip(GPU), Chip(OTHER_GPU, driver="vfio-pci"))
        ask(world, PREPARE)
        other = Prepare("other", HoldMode.VFIO, (OTHER_GPU,))
        assert ask(world, other).ok
        published = dict(world.specs)
        answer = ask_briefly(world, structs.replace(RELEASE, force=force))
        assert answer.ok is force
        if not force:
            assert codes(answer) == [Code.CLAIMED]
            assert "claim other" in answer.problems[0].sentence
            assert world.chips[GPU].driver == "vfio-pci"
            world.start()
            world.run(patience=5)
            assert world.chips[GPU].driver == "vfio-pci", "nor does another start take it"
            assert published[OTHER_GPU] == world.specs[OTHER_GPU]
            assert ask(world, Release("other")).ok
            world.run()
        assert "vm" not in world.claims.live
        assert world.chips[GPU].driver == "xe"


@pytest.mark.parametrize("step", [Step.UNBIND, Step.PROBE])
def test_what_is_undone_waits_for_another_claim_that_needs_the_group(step: Step) -> None:
    """Its device is on VFIO or on no driver, and harms nobody so."""
    world = World(Chip(GPU), Chip(OTHER_GPU, driver="vfio-pci"))
    published = dict(world.specs)
    world.faults.append((lambda write: write.step is step, hangs))
    failed = world.post(PREPARE)
    world.run(patience=5)
    assert Code.HUNG in codes(world.answers[failed])
    world.faults.clear()
    world.chips[GPU].driver = None  # as far as the kernel has come
    assert ask_briefly(world, Prepare("other", HoldMode.VFIO, (OTHER_GPU,))).ok
    held = dict(world.specs)
    world.let_go(GPU, done=False)
    world.run(patience=5)
    assert world.chips[GPU].driver is None
    assert world.specs == held
    assert ask(world, Release("other")).ok
    world.run()
    assert not world.claims.live
    assert world.chips[GPU].driver == "xe"
    assert world.specs == published


def test_another_vf_of_the_group_moves_along_only_by_name() -> None:
    """It is a device of its own, though it is in the same slot; somebody may be given it next."""
    sibling = Address("0000:03:00.4")
    world = World(
        Chip(GPU, virtfns=(VF, sibling), driver="vfio-pci"),
        Chip(VF, physfn=GPU),
        Chip(sibling, physfn=GPU),
    )
    order = Prepare("vm", HoldMode.VFIO, (VF,))
    (problem,) = ask(world, order).problems
    assert problem.code is Code.GROUP_NOT_VIABLE
    assert sibling in problem.sentence
    assert world.chips[sibling].driver == "xe"
    assert ask(world, structs.replace(order, named=(sibling,))).ok
    assert world.chips[sibling].driver == "vfio-pci"


def test_two_claims_that_need_one_group_can_both_be_released() -> None:
    world = World(Chip(GPU), Chip(OTHER_GPU, driver=None))
    ask(world, PREPARE)
    world.chips[OTHER_GPU].driver = "xe"
    assert ask(world, Prepare("other", HoldMode.VFIO, (OTHER_GPU,))).ok
    ask_briefly(world, RELEASE)
    assert ask(world, Release("other")).ok
    world.run()
    assert not world.claims.live
    assert {chip.driver for chip in world.chips.values()} == {"xe"}


def test_what_is_lost_and_back_again_leaves_nothing() -> None:
    """Somebody brought all of it back by hand: the release forgets it."""
    world = world_of()
    before = world.state()
    ask(world, PREPARE)
    for address, (driver, override) in before.items():
        world.chips[address].driver, world.chips[address].override = driver, override
    world.run()
    assert world.claims.live["vm"].phase is Phase.LOST
    assert ask(world, RELEASE).ok
    assert not world.stranded
    assert [ended.outcome for ended in world.ended] == [Outcome.FORGOTTEN]


def test_who_prepares_while_a_lost_claim_is_forgotten_is_not_told_that_it_is_in_force() -> None:
    world = world_of()
    before = world.state()
    ask(world, PREPARE)
    for address, (driver, override) in before.items():
        world.chips[address].driver, world.chips[address].override = driver, override
    world.run()
    world.post(RELEASE)
    world.until(Phase.FORGETTING)
    late = world.post(PREPARE)
    world.run()
    assert codes(world.answers[late]) == [Code.ENDING]


def test_another_card_in_the_slot_is_not_held() -> None:
    world = world_of(Chip(GPU))
    ask(world, PREPARE)
    replaced(world)
    world.run()
    assert not holds(world.claims)
    assert world.specs == {GPU: (f"intel.com/gpu={GPU}",)}


# --- paused ---------------------------------------------------------------------------------------


def test_paused_nothing_is_taken_or_given_back() -> None:
    world = world_of()
    before = world.state()
    ask(world, PREPARE)
    world.rules = Rules(paused=True)
    count = len(world.writes)
    assert codes(ask(world, RELEASE)) == [Code.PAUSED]
    assert not world.specs, "a withdrawal is not stopped"
    assert codes(ask(world, RELEASE)) == [Code.PAUSED]
    assert len(world.writes) == count
    world.rules = Rules()
    world.run()
    assert world.state() == before
    world.rules = Rules(paused=True)
    assert set(codes(ask(world, PREPARE))) == {Code.PAUSED}
    assert ask(world, Prepare("vm", HoldMode.DRM, (GPU,))).ok, "what is there need not be moved"


def test_paused_what_fails_is_undone_all_the_same() -> None:
    world = world_of()
    before = world.state()
    world.post(PREPARE)
    world.until(Phase.MOVING)
    world.rules = Rules(paused=True)
    world.faults.append((lambda write: write.step is Step.PROBE, does_nothing))

    def well_again_on_the_way_back() -> None:
        if any(claim.phase is Phase.RETURNING for claim in world.claims.live.values()):
            world.faults.clear()

    world.before_pass = well_again_on_the_way_back
    world.run()
    assert world.state() == before
    assert [ended.outcome for ended in world.ended] == [Outcome.UNDONE]


def test_paused_a_recovery_waits() -> None:
    world = stranded()
    world.rules = Rules(paused=True)
    assert codes(ask(world, Recover(GPU))) == [Code.PAUSED]
    assert world.stranded == {GPU}
    world.rules = Rules()
    world.run()
    assert not world.stranded


# --- a dry run ------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_moved_and_changes_nothing() -> None:
    world = world_of()
    before, published = world.state(), dict(world.specs)
    for _ in range(2):
        answer = ask(world, structs.replace(PREPARE, dry_run=True))
        assert answer.ok
        assert answer.moves == (
            Move(GPU, "xe", "vfio-pci"),
            Move(AUDIO, "snd_hda_intel", "vfio-pci", companion=True),
        )
    assert (world.state(), world.specs) == (before, published)
    assert world.claims == structs.replace(world.claims, live={}, strays={})
    assert not world.disk.claims


def test_a_dry_run_says_everything_that_is_wrong_at_once() -> None:
    world = world_of(Chip(GPU, boot_vga=True), audio())
    world.managed = {AUDIO: "driverctl"}
    world.holders = [Holder(12, "Xorg", "/dev/dri/card3")]
    answer = ask(world, structs.replace(PREPARE, dry_run=True))
    assert codes(answer) == [Code.BOOT_DISPLAY, Code.MANAGED, Code.IN_USE]
    assert len(answer.moves) == 2


@pytest.mark.parametrize("phase", [Phase.CHECKING, Phase.MOVING, Phase.DONE, Phase.FREEING])
def test_a_dry_run_of_a_live_claim_is_answered_as_the_same_claim_would_be(phase: Phase) -> None:
    """And it changes nothing of it, not even how long its lease is."""
    world = world_of()
    leased = structs.replace(PREPARE, lease=60)
    if phase is Phase.FREEING:
        ask_briefly(world, leased)
        world.post(RELEASE)
    else:
        world.post(leased)
    world.until(phase)
    record = world.claims.live["vm"].record
    dry = world.post(structs.replace(PREPARE, dry_run=True, lease=99))
    world.run(patience=0)
    if "vm" in world.claims.live:
        assert world.claims.live["vm"].record.expires_at == record.expires_at
    real = world.post(leased)
    world.run(patience=5)
    if phase is Phase.FREEING:
        assert codes(world.answers[dry]) == [Code.ENDING]
        return
    assert world.answers[dry].ok
    assert world.answers[dry] == structs.replace(world.answers[real], ticket=dry)


def test_a_dry_run_of_something_else_says_what_is_in_the_way() -> None:
    world = world_of()
    ask(world, PREPARE)
    for change in ({"id": "other"}, {"devices": (OTHER_GPU,)}):
        order = structs.replace(PREPARE, dry_run=True, **change)
        assert set(codes(ask(world, order))) == {Code.CLAIMED}


def test_a_dry_run_is_in_nobodys_way() -> None:
    world = world_of()
    dry = world.post(structs.replace(PREPARE, dry_run=True))
    real = world.post(PREPARE)
    world.run()
    assert world.answers[dry].moves
    assert world.answers[real].ok


@pytest.mark.parametrize(
    ("id_", "dry_run"),
    [
        ("2:vm", Prepare("vm", HoldMode.VFIO, (OTHER_GPU,), dry_run=True)),
        (f"2:recover:{OTHER_GPU}", Recover(OTHER_GPU, force=True, dry_run=True)),
    ],
    ids=["prepare", "recover"],
)
def test_a_dry_run_displaces_no_claim_whatever_that_is_called(id_: str, dry_run: Order) -> None:
    """A claim may be called as a person likes: by the number of the next order, say."""
    world = world_of(Chip(GPU), audio(), Chip(OTHER_GPU, group=2, driver=None))
    assert ask(world, structs.replace(PREPARE, id=id_)).ok
    assert ask(world, dry_run).ok
    assert world.claims.live.keys() == {id_}
    assert [record.id for record in world.disk.claims] == [id_]


# --- recover --------------------------------------------------------------------------------------


def stranded() -> World:
    """A GPU that could not be brought back: its unbind failed."""
    world = world_of(Chip(GPU), audio(), Chip(OTHER_GPU, group=2))
    ask(world, PREPARE)
    world.faults.append(
        (lambda write: (write.address, write.step) == (GPU, Step.UNBIND), does_nothing)
    )
    assert codes(ask(world, RELEASE)) == [Code.STRANDED]
    world.faults.clear()
    assert world.stranded == {GPU}
    return world


def test_a_dry_run_of_recover_says_what_would_be_moved() -> None:
    world = stranded()
    count = len(world.writes)
    answer = ask(world, Recover(GPU, dry_run=True))
    assert answer.moves == (Move(GPU, "vfio-pci", "xe"),)
    assert answer.ok
    assert len(world.writes) == count
    assert world.stranded == {GPU}


def test_a_dry_run_waits_for_nothing() -> None:
    """Neither for a recovery that hangs nor for the end of a pause: it says what is in the way."""
    world = stranded()
    world.faults.append((lambda write: write.step is Step.PROBE, hangs))
    ask(world, Recover(GPU))
    assert codes(ask(world, Recover(GPU, dry_run=True))) == [Code.CLAIMED]
    world.let_go(GPU)
    world.run()
    world = stranded()
    world.rules = Rules(paused=True)
    assert codes(ask(world, Recover(GPU, dry_run=True))) == [Code.PAUSED]
    assert not world.claims.live


def test_recover_refuses_what_is_in_use_unless_forced() -> None:
    world = stranded()
    world.holders = [VM]
    for order in (Recover(GPU, dry_run=True), Recover(GPU), Recover(GPU)):
        assert codes(ask(world, order)) == [Code.IN_USE]
        assert world.stranded == {GPU}
        assert not world.claims.live
    assert "77" in world.claims.strays[GPU].problem.sentence
    assert ask(world, Recover(GPU, force=True)).ok
    assert world.chips[GPU].driver == "xe"


def test_recover_of_what_is_where_it_belongs_is_a_success() -> None:
    world = world_of()
    assert ask(world, Recover(GPU)).ok
    assert not world.writes


def test_recover_moves_what_is_not_ours_only_if_forced() -> None:
    """The device goes to the driver that the kernel prefers."""
    world = world_of(Chip(GPU, driver="vfio-pci", override="vfio-pci"))
    assert codes(ask(world, Recover(GPU))) == [Code.NOT_STRANDED]
    assert not world.writes
    answer = ask(world, Recover(GPU, force=True, dry_run=True))
    assert answer.moves == (Move(GPU, "vfio-pci", ANY_DRIVER),)
    for _ in range(2):
        assert ask(world, Recover(GPU, force=True)).ok
    assert world.state() == {GPU: ("xe", None)}
    assert world.specs == {GPU: (f"intel.com/gpu={GPU}",)}


def test_recover_of_an_unknown_or_claimed_device_is_refused() -> None:
    world = world_of()
    ask(world, PREPARE)
    assert codes(ask(world, Recover(OTHER_GPU))) == [Code.UNKNOWN_DEVICE]
    assert codes(ask(world, Recover(AUDIO, force=True))) == [Code.CLAIMED]


def test_two_who_recover_wait_for_one_recovery() -> None:
    world = stranded()
    first, second = world.post(Recover(GPU)), world.post(Recover(GPU))
    world.run()
    assert world.answers[first].ok
    assert world.answers[second].ok
    assert [ended.outcome for ended in world.ended][-1:] == [Outcome.RELEASED]


def test_a_stray_that_somebody_brought_back_is_stranded_no_more() -> None:
    """But for the override, which is cleared."""
    world = stranded()
    world.chips[GPU].driver = "xe"
    world.run()
    assert not world.stranded
    assert world.state()[GPU] == ("xe", None)


def test_a_stray_that_was_pulled_out_is_stranded_no_more() -> None:
    world = stranded()
    replaced(world)
    world.run()
    assert not world.stranded
    assert not world.disk.strays


def test_a_recovery_that_hangs_is_finished_when_the_kernel_returns() -> None:
    world = stranded()
    world.faults.append((lambda write: write.step is Step.PROBE, hangs))
    assert codes(ask(world, Recover(GPU))) == [Code.HUNG]
    world.faults.clear()
    world.start()
    world.run()
    world.let_go(GPU)
    world.run()
    assert not world.stranded
    assert world.state()[GPU] == ("xe", None)


def test_what_fails_to_be_moved_again_and_again_is_left_alone_longer_each_time() -> None:
    """A claim in force ends the row, and so does time."""
    world = world_of(Chip(GPU))
    world.nodes_never_come = {GPU}

    def left_alone() -> float:
        ask(world, PREPARE)
        began = world.claims.cooling[GPU].until - world.now
        assert codes(ask(world, PREPARE)) == [Code.COOLING_DOWN]
        world.now = world.claims.cooling[GPU].until
        return began

    assert [left_alone() for _ in range(10)] == [
        *(10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0),
        world.rules.deadlines.cool_down_max,
    ]
    world.nodes_never_come = set()
    assert ask(world, PREPARE).ok
    assert ask(world, RELEASE).ok
    world.nodes_never_come = {GPU}
    assert left_alone() == 10.0, "it was in force meanwhile"
    assert left_alone() == 20.0
    world.now += world.rules.deadlines.cool_down_max
    assert left_alone() == 10.0, "that was long ago"


def test_who_asks_again_is_told_names_that_specs_have() -> None:
    """Another file defines them too by now, or the configuration ignores the device."""
    world = world_of()
    names = ask(world, PREPARE).names
    world.nodes_never_come = {GPU}
    world.run()
    assert not world.specs
    began = world.now
    answer = ask(world, PREPARE)
    assert codes(answer) == [Code.NOT_PUBLISHED]
    assert names[0] in answer.problems[0].sentence
    assert world.now == began + world.rules.deadlines.publish
    assert world.claims.live["vm"].phase is Phase.DONE, "it holds its devices all the same"
    late = world.post(PREPARE)
    world.run(patience=1)
    assert late not in world.answers
    world.nodes_never_come = set()
    world.run()
    assert world.answers[late].names == names


@pytest.mark.parametrize("unbound_before", [False, True], ids=["at once", "unbound before"])
@pytest.mark.parametrize("phase", [Phase.MOVING, Phase.PUBLISHING, Phase.CONFIRMING, Phase.DONE])
def test_a_companion_that_is_pulled_out_is_let_go(phase: Phase, *, unbound_before: bool) -> None:
    """Nobody asked for it. What was asked for is held without it, and goes home."""
    world = world_of()
    ticket = world.post(PREPARE)
    world.until(phase)
    if unbound_before and phase is not Phase.MOVING:
        world.chips[AUDIO].driver = None
        world.step()
        world.step()
    del world.chips[AUDIO]
    world.run()
    assert world.answers[ticket].ok
    assert world.claims.live["vm"].phase is Phase.DONE
    assert {hold.address for hold in holds(world.claims)} == {GPU}
    world.start()
    world.run()
    assert ask(world, PREPARE).ok
    assert ask(world, RELEASE).ok
    assert world.state() == {GPU: ("xe", None)}
    assert not world.stranded


def test_a_companion_that_came_back_to_its_driver_may_be_pulled_out_all_the_same() -> None:
    """That it had none for a moment, long ago, says nothing of the moment before it goes."""
    world = world_of()
    ask(world, PREPARE)
    for driver in (None, "vfio-pci"):
        world.chips[AUDIO].driver = driver
        world.step()
    world.now += 10 * world.rules.deadlines.poll
    world.chips[AUDIO].driver = None
    world.step()
    del world.chips[AUDIO]
    world.run()
    assert world.claims.live["vm"].phase is Phase.DONE


def test_a_companion_that_somebody_takes_from_its_driver_and_leaves_there_is_lost() -> None:
    world = world_of()
    ask(world, PREPARE)
    world.chips[AUDIO].driver = None
    began = world.now
    world.run()
    assert world.claims.live["vm"].phase is Phase.LOST
    assert world.now - began == world.rules.deadlines.poll
