"""From where a function is and where it should be to the next write."""

import pytest
from msgspec import structs

from agent.vfio.model import ANY_DRIVER, Identity, Origin, Step
from agent.vfio.moves import (
    Goal,
    Override,
    goal_back,
    goal_there,
    has_driver,
    is_back,
    is_explained,
    next_step,
)
from tests.vfio.world import GPU, Chip

VFIO = Goal("vfio-pci", "vfio-pci")
XE = Goal("xe", None)
NONE = Goal(None, None)
ANY = Goal(ANY_DRIVER, None)

CLEAR = (Step.OVERRIDE, "\n")
UNBIND = (Step.UNBIND, GPU)
PROBE = (Step.PROBE, GPU)


def override(driver: str) -> tuple[Step, str]:
    return Step.OVERRIDE, driver


@pytest.mark.parametrize(
    ("driver", "known", "goal", "step"),
    [
        # There.
        ("xe", None, VFIO, override("vfio-pci")),
        ("xe", "vfio-pci", VFIO, UNBIND),
        (None, "vfio-pci", VFIO, PROBE),
        ("vfio-pci", "vfio-pci", VFIO, None),
        (None, None, VFIO, override("vfio-pci")),
        ("vfio-pci", None, VFIO, override("vfio-pci")),
        # Back.
        ("vfio-pci", "vfio-pci", XE, override("xe")),
        ("vfio-pci", "xe", XE, UNBIND),
        (None, "xe", XE, PROBE),
        ("i915", "xe", XE, UNBIND),
        ("xe", "xe", XE, CLEAR),
        ("xe", None, XE, None),
        # Back to an override that somebody else had set.
        ("vfio-pci", "vfio-pci", Goal("xe", "xe"), override("xe")),
        ("xe", "xe", Goal("xe", "xe"), None),
        ("xe", "xe", Goal("xe", "none"), override("none")),
        # Back to no driver: the override goes first, so that nothing binds it again.
        ("vfio-pci", "vfio-pci", NONE, CLEAR),
        ("vfio-pci", None, NONE, UNBIND),
        (None, None, NONE, None),
        ("vfio-pci", "vfio-pci", Goal(None, "none"), override("none")),
        ("vfio-pci", "none", Goal(None, "none"), UNBIND),
        # To whatever the kernel prefers.
        ("vfio-pci", "vfio-pci", ANY, CLEAR),
        ("vfio-pci", None, ANY, UNBIND),
        (None, None, ANY, PROBE),
        ("xe", None, ANY, None),
    ],
)
def test_the_next_write(
    driver: str | None, known: str | None, goal: Goal, step: tuple[Step, str] | None
) -> None:
    function = Chip(GPU, driver=driver).function()
    assert next_step(function, goal, Override(known)) == step


@pytest.mark.parametrize("driver", [None, "xe", "vfio-pci", "i915"])
@pytest.mark.parametrize("goal", [VFIO, XE, NONE, ANY])
def test_an_override_that_is_not_known_is_written(driver: str | None, goal: Goal) -> None:
    step = next_step(Chip(GPU, driver=driver).function(), goal, None)
    assert step is not None
    assert step[0] is Step.OVERRIDE


@pytest.mark.parametrize(
    ("driver", "wanted", "has"),
    [
        ("xe-vfio-pci", "xe_vfio_pci", True),
        ("vfio-pci", "xe-vfio-pci", False),
        (None, None, True),
        ("xe", None, False),
        (None, "xe", False),
        (None, ANY_DRIVER, False),
        ("xe", ANY_DRIVER, True),
        ("vfio-pci", ANY_DRIVER, False),
    ],
)
def test_what_a_driver_is_called(driver: str | None, wanted: str | None, *, has: bool) -> None:
    assert has_driver(Chip(GPU, driver=driver).function(), wanted) is has


ORIGIN = Origin(GPU, Identity.of(Chip(GPU).function()), "xe", None, "vfio-pci")


@pytest.mark.parametrize(
    ("driver", "explained"),
    [(None, True), ("xe", True), ("vfio-pci", True), ("i915", False), ("xe-vfio-pci", False)],
)
def test_what_accounts_for_a_driver(driver: str | None, *, explained: bool) -> None:
    function = Chip(GPU, driver=driver).function()
    assert is_explained(function, ORIGIN) is explained
    assert is_explained(function, structs.replace(ORIGIN, known=False))


def test_goals() -> None:
    assert goal_there(ORIGIN) == VFIO
    assert goal_there(structs.replace(ORIGIN, target=ANY_DRIVER)) == ANY
    assert goal_back(ORIGIN) == XE
    assert goal_back(structs.replace(ORIGIN, known=False)) == ANY
    assert is_back(Chip(GPU).function(), ORIGIN)
    assert not is_back(Chip(GPU, driver="vfio-pci").function(), ORIGIN)
