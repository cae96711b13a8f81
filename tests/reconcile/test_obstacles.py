"""What is known to keep a device from being published before anybody moves it."""

from typing import Final

import pytest
from msgspec import structs

from agent.cdi.files import Disk, ForeignFile
from agent.cdi.profile import Naming, Profile
from agent.cdi.spec import Kind
from agent.host.model import Function, HoldMode
from agent.reconcile.rules import Layout
from agent.reconcile.verdict import foreign_obstacle
from tests.cdi.worlds import BUILTIN, changed, function, vfio

OWN, VFIO = Kind("intel.com/gpu"), Kind("intel.com/gpu-vfio")
NAME: Final = "0000-03-00-0-0xe212"
LAYOUT = Layout("/cdi")


def other(kind: Kind, *names: str, same: bool = True) -> ForeignFile:
    """A file of somebody else's that defines these."""
    return ForeignFile("/cdi/other.yaml", kind, frozenset(names), same_directory=same)


def at_place_of(kind: Kind) -> ForeignFile:
    """Something of somebody else's has the name of our file: a directory, say."""
    return ForeignFile(LAYOUT.path(kind), None, problem="it is a directory")


def obstacle(
    foreign: ForeignFile,
    mode: HoldMode = HoldMode.VFIO,
    profiles: tuple[Profile, ...] = BUILTIN,
    *,
    found: Function | None = None,
    adopt: bool = False,
) -> str | None:
    layout = Layout("/cdi", adopt=adopt)
    disk = Disk("/cdi", foreign=(foreign,))
    return foreign_obstacle(found or function(), mode, disk, profiles, layout)


@pytest.mark.parametrize(
    "found", [function(), vfio(), function(driver=None)], ids=["own", "vfio", "none"]
)
@pytest.mark.parametrize(
    ("foreign", "says"),
    [
        pytest.param(at_place_of(VFIO), "exists and was not written by", id="at its place"),
        pytest.param(other(VFIO, "a", NAME), f"defines {VFIO}={NAME} too", id="by its name"),
    ],
)
def test_a_foreign_file_in_the_way_is_known_whatever_driver_the_device_has(
    foreign: ForeignFile, says: str, found: Function
) -> None:
    said = obstacle(foreign, found=found)
    assert said is not None
    assert says in said
    assert foreign.path in said


@pytest.mark.parametrize(
    "foreign",
    [
        pytest.param(other(OWN, NAME), id="another kind"),
        pytest.param(other(VFIO, "a"), id="another name"),
        pytest.param(other(VFIO, NAME, same=False), id="another directory"),
        pytest.param(at_place_of(OWN), id="the place of another kind"),
    ],
)
def test_what_is_not_in_the_way_keeps_nothing_from_being_claimed(foreign: ForeignFile) -> None:
    assert obstacle(foreign) is None


def test_what_is_adopted_is_not_in_the_way() -> None:
    assert obstacle(other(VFIO, NAME), adopt=True) is None


def test_what_is_named_as_ours_is_not_adopted_and_stays_in_the_way() -> None:
    ours = structs.replace(other(VFIO, NAME), path="/cdi/cdi-agent_other.yaml")
    assert obstacle(at_place_of(VFIO), adopt=True) is not None
    assert obstacle(ours, adopt=True) is not None


def test_a_name_that_comes_with_the_nodes_is_not_guessed() -> None:
    by_card = changed("intel-gpu", naming=Naming.CARD)
    only_gpu = tuple(profile for profile in by_card if profile.own_kind == OWN)
    foreign = other(OWN, NAME, "card0")
    assert obstacle(foreign, HoldMode.DRM, only_gpu, found=vfio()) is None
    assert obstacle(other(VFIO, NAME), HoldMode.VFIO, only_gpu) is not None, "on VFIO it has none"
    assert obstacle(at_place_of(OWN), HoldMode.DRM, only_gpu, found=vfio()) is not None


def test_what_is_published_in_one_of_its_kinds_is_not_refused() -> None:
    """The claim comes into force with the names that there are."""
    (gpu,) = (profile for profile in BUILTIN if profile.own_kind == OWN)
    both = changed("intel-gpu-mei", match=gpu.match)
    assert obstacle(at_place_of(OWN), HoldMode.DRM, both) is None
    assert obstacle(at_place_of(OWN), HoldMode.DRM, (gpu,)) is not None
