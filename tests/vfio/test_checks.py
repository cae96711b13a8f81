"""What is refused before anything is touched: each with its code, a sentence and a hint."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest
from msgspec import structs

from agent.host.model import Function, HoldMode
from agent.vfio.model import Holder, Prepare, Recover
from agent.vfio.problems import HINTS, RETRYABLE, Code
from agent.vfio.state import Rules
from tests.vfio.world import (
    AUDIO,
    GPU,
    OTHER_GPU,
    RELEASE,
    USB,
    VF,
    Chip,
    World,
    audio,
    does_nothing,
    hangs,
)

Change = Callable[[World], object]


def prepare(*devices: str, **fields: object) -> Prepare:
    return Prepare("vm", HoldMode.VFIO, devices or (GPU,), **fields)  # type: ignore[arg-type]


def drm(**fields: object) -> Prepare:
    return structs.replace(prepare(), mode=HoldMode.DRM, **fields)


def rules(**fields: object) -> Change:
    return lambda world: setattr(world, "rules", Rules(**fields))  # type: ignore[arg-type]


def change(**fields: object) -> Change:
    def act(world: World) -> None:
        for name, value in fields.items():
            setattr(world, name, value)

    return act


def nothing(_world: World) -> None:
    """All is well."""


def refuse_vfio(_function: Function, mode: HoldMode) -> str | None:
    return "no profile recognises it" if mode is HoldMode.VFIO else None


def another_claim(world: World) -> None:
    world.ask(Prepare("other", HoldMode.VFIO, (GPU,), client="libvirt"))


def cooling(world: World) -> None:
    world.nodes_never_come = {GPU}
    world.ask(prepare())
    world.nodes_never_come = set()


def stranded(world: World) -> None:
    world.ask(prepare())
    world.faults.append((lambda _write: True, does_nothing))
    world.ask(RELEASE)
    world.faults.clear()


def hung(world: World) -> None:
    world.faults.append((lambda _write: True, hangs))
    world.ask(Prepare("other", HoldMode.VFIO, (GPU,)))


def bridge() -> Chip:
    return Chip(USB, ("pcieport",), "pcieport", class_code=0x060400)


def usb(**fields: object) -> Chip:
    return Chip(USB, ("xhci_hcd",), "xhci_hcd", class_code=0x0C0330, **fields)  # type: ignore[arg-type]


ONE = (Chip(GPU),)
X = Holder(12, "Xorg", "/dev/dri/card3")

REFUSED: tuple[tuple[str, Sequence[Chip], Change, Prepare, Code, str], ...] = (
    ("no-such-device", ONE, nothing, prepare(OTHER_GPU), Code.UNKNOWN_DEVICE, "does not exist"),
    ("bridge", (bridge(),), nothing, prepare(USB), Code.UNKNOWN_DEVICE, "is a bridge"),
    (
        "unread",
        ONE,
        change(unread={GPU}),
        prepare(),
        Code.UNKNOWN_DEVICE,
        "could not be read: it changes all the time",
    ),
    (
        "no-profile",
        ONE,
        rules(unpublishable=refuse_vfio),
        prepare(),
        Code.UNKNOWN_DEVICE,
        "cannot be published in mode vfio: no profile recognises it",
    ),
    ("ignored", ONE, rules(ignore=frozenset({GPU})), prepare(), Code.IGNORED, "ignores"),
    (
        "ignored-by-id",
        ONE,
        rules(ignore=frozenset({"8086:e212"})),
        prepare(),
        Code.IGNORED,
        "ignores",
    ),
    (
        "companion-ignored",
        (Chip(GPU), audio()),
        rules(ignore=frozenset({AUDIO})),
        prepare(),
        Code.GROUP_NOT_VIABLE,
        f"{AUDIO} of IOMMU group 1 is on snd_hda_intel",
    ),
    (
        "claimed",
        ONE,
        another_claim,
        prepare(),
        Code.CLAIMED,
        "claim other of libvirt, which is in force",
    ),
    (
        "companion-claimed",
        (Chip(GPU), audio()),
        another_claim,
        prepare(AUDIO),
        Code.CLAIMED,
        f"{AUDIO} is held by claim other",
    ),
    ("hung", ONE, hung, prepare(), Code.HUNG, "process 4711 hangs"),
    (
        "cooling-down",
        ONE,
        cooling,
        prepare(),
        Code.COOLING_DOWN,
        "for 10 s, because the last claim of it failed: not",
    ),
    ("stranded", ONE, stranded, prepare(), Code.STRANDED, "is stranded"),
    ("stranded-drm", ONE, stranded, drm(from_vfio=True), Code.STRANDED, "is stranded"),
    ("paused", ONE, rules(paused=True), prepare(), Code.PAUSED, "paused"),
    (
        "specs-unknown",
        ONE,
        change(specs_problem="cannot read /run/cdi"),
        prepare(),
        Code.SPECS_UNKNOWN,
        "cannot read /run/cdi",
    ),
    (
        "in-the-way-of-another-file",
        ONE,
        change(obstructed={(GPU, HoldMode.VFIO): "/run/cdi/a.yaml defines it too"}),
        prepare(),
        Code.NOT_PUBLISHED,
        "cannot be published in mode vfio: /run/cdi/a.yaml defines it too",
    ),
    (
        "iommu-off",
        (Chip(GPU, group=None),),
        nothing,
        prepare(),
        Code.IOMMU_OFF,
        "this host has no IOMMU group",
    ),
    (
        "not-behind-the-iommu",
        (Chip(GPU, group=None), Chip(OTHER_GPU)),
        nothing,
        prepare(),
        Code.IOMMU_OFF,
        "it is in no IOMMU group",
    ),
    (
        "no-iommu-mode",
        (Chip(GPU, group=None),),
        change(noiommu=True),
        prepare(),
        Code.NO_IOMMU_MODE,
        "can write to all memory",
    ),
    (
        "already-in-no-iommu-mode",
        (Chip(GPU, group=None, driver="vfio-pci"),),
        change(noiommu=True),
        prepare(),
        Code.NO_IOMMU_MODE,
        "can write to all memory",
    ),
    (
        "group-not-viable",
        (Chip(GPU), Chip(OTHER_GPU)),
        nothing,
        prepare(),
        Code.GROUP_NOT_VIABLE,
        f"{OTHER_GPU} of IOMMU group 1 is on xe",
    ),
    (
        "usb-does-not-move-along",
        (Chip(GPU), usb()),
        nothing,
        prepare(),
        Code.GROUP_NOT_VIABLE,
        f"{USB} of IOMMU group 1 is on xhci_hcd",
    ),
    (
        "named-of-another-group",
        (Chip(GPU), usb(group=2)),
        nothing,
        prepare(named=(USB,)),
        Code.NOT_IN_GROUP,
        f"{USB} is in no IOMMU group",
    ),
    (
        "driver-unavailable",
        ONE,
        change(unavailable={"vfio-pci": "module vfio_pci is not installed"}),
        prepare(),
        Code.DRIVER_UNAVAILABLE,
        "vfio-pci is not available: module vfio_pci is not installed",
    ),
    (
        "active-vfs",
        (Chip(GPU, virtfns=(VF,)), Chip(VF, physfn=GPU, group=2)),
        nothing,
        prepare(),
        Code.ACTIVE_VFS,
        "has 1 VF, which would vanish",
    ),
    (
        "held-open",
        ONE,
        change(holders=[X]),
        prepare(),
        Code.IN_USE,
        "process 12 (Xorg) holds /dev/dri/card3 open",
    ),
    ("holders-unknown", ONE, change(blind=True), prepare(), Code.HOLDERS_UNKNOWN, "card3"),
    (
        "override-unknown",
        ONE,
        change(overrides_unread={GPU}),
        prepare(),
        Code.OVERRIDE_UNKNOWN,
        "could not be read in time",
    ),
    *(
        (
            f"users-unseen-{driver}",
            (Chip(GPU, (driver,), driver, class_code=0x120000),),
            nothing,
            prepare(),
            Code.USERS_UNSEEN,
            f"is on {driver}, and who uses it there cannot be seen",
        )
        for driver in ("nvidia", "xen-pciback", "uio_pci_generic")
    ),
    (
        "users-unseen-companion",
        (Chip(GPU), Chip(AUDIO, ("pciback",), "pciback", class_code=0x040300)),
        nothing,
        prepare(),
        Code.USERS_UNSEEN,
        f"{AUDIO} is on pciback",
    ),
    (
        "users-hidden-beside-nodes",
        ONE,
        lambda world: setattr(
            world, "rules", structs.replace(world.rules, hides_users=lambda each: each.nodes != ())
        ),
        prepare(),
        Code.USERS_UNSEEN,
        "is on xe, and who uses it there",
    ),
    (
        "boot-display",
        (Chip(GPU, boot_vga=True),),
        nothing,
        prepare(),
        Code.BOOT_DISPLAY,
        "shows this host's console",
    ),
    (
        "managed",
        ONE,
        change(managed={GPU: "libvirt"}),
        prepare(),
        Code.MANAGED,
        "is managed by libvirt",
    ),
    (
        "foreign-binding",
        (Chip(GPU, driver="vfio-pci"),),
        nothing,
        drm(),
        Code.FOREIGN_BINDING,
        "this agent did not put it there",
    ),
    (
        "foreign-binding-to-another-vfio-driver",
        (Chip(GPU, driver="vfio-pci"),),
        nothing,
        prepare(driver="xe-vfio-pci"),
        Code.FOREIGN_BINDING,
        "not on xe-vfio-pci",
    ),
    (
        "a-driver-that-is-none-of-vfio",
        ONE,
        rules(unsuitable=lambda _function, _driver: "is not a VFIO driver"),
        prepare(driver="snd_hda_intel"),
        Code.DRIVER_UNSUITABLE,
        f"{GPU} cannot be moved to snd-hda-intel, which is not a VFIO driver",
    ),
    (
        "the-driver-that-it-is-on",
        ONE,
        rules(vfio_driver=lambda _function: "xe"),
        prepare(),
        Code.DRIVER_UNSUITABLE,
        "xe, which has it now and is not a VFIO driver",
    ),
    (
        "a-driver-for-other-devices",
        (Chip(GPU, driver="vfio-pci"),),
        change(for_others=frozenset({"snd_hda_intel"})),
        drm(driver="snd_hda_intel", from_vfio=True),
        Code.DRIVER_UNSUITABLE,
        f"{GPU} cannot be moved to snd_hda_intel, which is for other devices",
    ),
    (
        "another-driver-than-its-own",
        ONE,
        nothing,
        drm(driver="i915"),
        Code.DRIVER_UNSUITABLE,
        f"{GPU} is on xe, and mode drm moves no device from there to i915",
    ),
)

ALLOWED: tuple[tuple[str, Sequence[Chip], Change, Prepare], ...] = (
    ("another-device", (Chip(GPU), Chip(OTHER_GPU, group=2)), another_claim, prepare(OTHER_GPU)),
    ("boot-display-forced", (Chip(GPU, boot_vga=True),), nothing, prepare(force=True)),
    ("boot-display-for-drm", (Chip(GPU, boot_vga=True),), nothing, drm()),
    (
        "boot-display-without-a-driver",
        (Chip(GPU, boot_vga=True, driver=None),),
        nothing,
        prepare(),
    ),
    (
        "vfs-of-what-is-not-moved",
        (Chip(GPU, virtfns=(VF,), driver="vfio-pci"),),
        nothing,
        prepare(),
    ),
    ("pf-whose-vfs-have-gone", (Chip(GPU, virtfns=()),), nothing, prepare()),
    (
        "no-iommu-mode-allowed",
        (Chip(GPU, group=None),),
        lambda world: (change(noiommu=True)(world), rules(allow_no_iommu=True)(world)),
        prepare(),
    ),
    (
        "pre-bound-and-nobody-can-tell-who-uses-it",
        (Chip(GPU, driver="vfio-pci"),),
        change(blind=True),
        prepare(),
    ),
    (
        "pre-bound-by-the-same-driver",
        (Chip(GPU, driver="vfio-pci"),),
        nothing,
        prepare(driver="vfio_pci"),
    ),
    (
        "pre-bound-companion",
        (Chip(GPU), dataclasses.replace(audio(), driver="vfio-pci")),
        nothing,
        prepare(driver="xe-vfio-pci"),
    ),
    ("foreign-binding-agreed", (Chip(GPU, driver="vfio-pci"),), nothing, drm(from_vfio=True)),
    ("drm-on-the-driver-that-is-asked-for", ONE, nothing, drm(driver="xe")),
    (
        "drm-on-a-driver-that-may-be-for-it",
        (Chip(GPU, driver=None),),
        change(for_others=frozenset({"i915"})),
        drm(driver="xe"),
    ),
    ("drm-on-no-driver", (Chip(GPU, driver=None),), nothing, drm()),
    ("named-of-the-group", (Chip(GPU), Chip(OTHER_GPU)), nothing, prepare(named=(OTHER_GPU,))),
    ("usb-of-another-group", (Chip(GPU), usb(group=2)), nothing, prepare()),
    (
        "somebody-uses-another-device",
        ONE,
        change(holders=[Holder(1, "x", "/dev/dri/card4")]),
        prepare(),
    ),
    ("vf", (Chip(GPU, virtfns=(VF,)), Chip(VF, physfn=GPU, group=2)), nothing, prepare(VF)),
    ("cooling-down-where-it-stays", ONE, cooling, drm()),
)


def test_a_device_that_stays_on_its_driver_is_not_said_to_get_the_best_one() -> None:
    world = World(Chip(GPU))
    (problem,) = world.answers[world.ask(drm(driver="i915"))].problems
    assert problem.hint == "name no driver, and it is claimed on the one that it has"
    assert world.answers[world.ask(drm())].ok


@pytest.mark.parametrize(
    ("chips", "change", "order", "code", "sentence"),
    [pytest.param(*row, id=id_) for id_, *row in REFUSED],
)
def test_what_is_refused(
    chips: Sequence[Chip], change: Change, order: Prepare, code: Code, sentence: str
) -> None:
    """Twice the same answer, by a dry run too; and nothing is written or withdrawn."""
    world = World(*map(dataclasses.replace, chips))
    change(world)
    world.now += 0.001
    before, published, count = world.state(), dict(world.specs), len(world.writes)
    for each in (order, order, structs.replace(order, id="dry", dry_run=True)):
        world.post(each)
        world.run(patience=0)
        problems = world.answers[max(world.answers)].problems
        found = [problem for problem in problems if problem.code is code]
        assert found, problems
        assert sentence in found[0].sentence
        assert found[0].hint
        assert "ADDRESS" not in found[0].hint
        assert not found[0].sentence.endswith(".")
    assert (world.state(), world.specs, len(world.writes)) == (before, published, count)


@pytest.mark.parametrize(
    ("chips", "change", "order"), [pytest.param(*row, id=id_) for id_, *row in ALLOWED]
)
def test_what_is_allowed(chips: Sequence[Chip], change: Change, order: Prepare) -> None:
    world = World(*map(dataclasses.replace, chips))
    change(world)
    dry = world.answers[world.ask(structs.replace(order, dry_run=True))]
    assert dry.ok, dry.problems
    answer = world.answers[world.ask(order)]
    assert answer.ok, answer.problems


def test_every_code_has_its_place_in_the_table() -> None:
    assert HINTS.keys() == set(Code)
    assert set(Code) > RETRYABLE


@pytest.mark.parametrize(
    ("chips", "order"),
    [
        pytest.param((Chip(GPU), audio()), prepare(), id="audio without a node"),
        pytest.param(
            (Chip(GPU, ("pci-stub",), "pci-stub", class_code=0x120000),), prepare(), id="stub"
        ),
        pytest.param((Chip(GPU, driver=None, class_code=0x120000),), prepare(), id="no driver"),
        pytest.param(
            (Chip(GPU, ("nvidia",), "nvidia", class_code=0x120000),),
            prepare(force=True),
            id="forced",
        ),
    ],
)
def test_who_uses_a_device_need_not_be_seen(chips: tuple[Chip, ...], order: Prepare) -> None:
    """Where nobody can use it, and where somebody says that it does not matter."""
    world = World(*chips)
    answer = world.answers[world.ask(order)]
    assert Code.USERS_UNSEEN not in {problem.code for problem in answer.problems}
    assert world.writes, "it was moved"


def test_all_that_the_look_finds_is_said_at_once() -> None:
    world = World(Chip(GPU, boot_vga=True, virtfns=(VF,)), usb())
    answer = world.answers[world.ask(prepare(GPU, OTHER_GPU))]
    assert [problem.code for problem in answer.problems] == [
        Code.UNKNOWN_DEVICE,
        Code.GROUP_NOT_VIABLE,
        Code.ACTIVE_VFS,
        Code.BOOT_DISPLAY,
    ]


def test_what_may_belong_to_somebody_else_may_be_used_as_it_is() -> None:
    """A device of unknown origin, on VFIO: a claim that need not move it is given it."""
    world = World(Chip(GPU, driver="vfio-pci"))
    world.start(damaged=True)
    world.run()
    assert world.stranded == {GPU}
    answer = world.answers[world.ask(drm(from_vfio=True))]
    assert [problem.code for problem in answer.problems] == [Code.STRANDED]
    assert world.answers[world.ask(prepare())].ok
    assert world.answers[world.ask(RELEASE)].ok
    assert not world.writes
    assert world.answers[world.ask(Recover(GPU))].ok
    assert world.chips[GPU].driver == "xe"


@pytest.mark.parametrize(
    ("override", "expected"),
    [("vfio_pci", "vfio-pci"), (None, "xe-vfio-pci")],
    ids=["asked-for", "best-for-the-device"],
)
def test_the_driver_is_the_one_that_is_asked_for_else_the_best(
    override: str | None, expected: str
) -> None:
    """What is asked for is for the device: its companion gets the best one for itself."""
    world = World(Chip(GPU), audio())
    world.rules = Rules(
        vfio_driver=lambda function: "vfio-pci" if function.address == AUDIO else "xe_vfio_pci"
    )
    assert world.answers[world.ask(prepare(driver=override))].ok
    assert world.chips[GPU].driver == expected
    assert world.chips[AUDIO].driver == "vfio-pci"
