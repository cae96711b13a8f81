"""Which configurations go with what is claimed."""

import json
from pathlib import Path

import pytest
from msgspec import structs

from agent import compose, config
from agent.cdi.files import Disk
from agent.cdi.offers import Policy
from agent.cdi.profile import Naming, Profile
from agent.config import Config
from agent.errors import ConfigError
from agent.host.model import Function, HoldMode
from agent.reconcile.rules import Layout, Rules, Timing
from agent.reconcile.state import State
from agent.vfio.claim import holds
from agent.vfio.model import Identity, Origin, Prepare, Record
from agent.vfio.modules import aliases_path
from agent.vfio.state import Claim, Claims, FunctionState, Phase
from tests.cdi.worlds import B50, BUILTIN, changed, decide, function, inventory, vfio

NAME = "intel.com/gpu-vfio=0000-03-00-0-0xe212"
RENAMED = changed("intel-gpu", naming=Naming.ADDRESS)
IN_FORCE, LEAVING = Phase.DONE, Phase.FREEING


def state(phase: Phase, found: Function) -> State:
    """What a reconciler knows that has made a claim, and has looked since."""
    origin = Origin(B50, Identity.of(found), "xe", None, "vfio-pci")
    request = Prepare("vm", HoldMode.VFIO, (B50,))
    record = Record(request, (origin,), done=phase is IN_FORCE, names=(NAME,), directory="/cdi")
    claims = Claims(live={"vm": Claim(record, (FunctionState(origin),), phase=phase)})
    host = inventory(found)
    return State(inventory=host, desired=decide(host, holds=holds(claims)), claims=claims)


def rules(
    profiles: tuple[Profile, ...] = BUILTIN, directory: str = "/cdi", ignore: str = ""
) -> Rules:
    policy = Policy(ignore=frozenset({ignore} - {""}))
    return Rules(profiles, policy, Layout(directory), Timing())


NEW = {
    "renamed": rules(RENAMED),
    "another directory": rules(directory="/elsewhere"),
    "ignored": rules(ignore=B50),
}


@pytest.mark.parametrize("new", [pytest.param(new, id=name) for name, new in NEW.items()])
def test_what_a_claim_holds_is_neither_renamed_nor_moved(new: Rules) -> None:
    with pytest.raises(ConfigError, match=f"claim vm holds {NAME}, which") as refused:
        compose.require_kept_names(state(IN_FORCE, vfio()), new)
    assert refused.value.hint == "release the claim first: cdi-agent release vm"


def test_names_are_where_they_are_by_now_wherever_they_were_when_they_were_claimed() -> None:
    """The service was started with another directory, which nobody could refuse."""
    now = structs.replace(state(IN_FORCE, vfio()), disk=Disk("/elsewhere"))
    compose.require_kept_names(now, rules(directory="/elsewhere"))
    with pytest.raises(ConfigError, match="claim vm holds"):
        compose.require_kept_names(now, rules())


def test_what_changes_nothing_for_a_claim_is_allowed() -> None:
    compose.require_kept_names(state(IN_FORCE, vfio()), rules())
    compose.require_kept_names(state(IN_FORCE, vfio()), rules(ignore="0000:99:00.0"))


@pytest.mark.parametrize("new", [pytest.param(new, id=name) for name, new in NEW.items()])
@pytest.mark.parametrize(
    ("phase", "found"),
    [
        pytest.param(Phase.LOST, function(), id="lost"),
        pytest.param(LEAVING, vfio(), id="being given back"),
    ],
)
def test_a_claim_that_holds_nothing_any_more_stands_in_no_way(
    phase: Phase, found: Function, new: Rules
) -> None:
    compose.require_kept_names(state(phase, found), new)


# --- what may be claimed, and with which driver ---------------------------------------------------

ALIAS = "alias vfio_pci:v00008086d0000E212sv*sd*bc*sc*i* xe_vfio_pci\n"
BY_PROFILE = {"profiles": [{"name": "intel-gpu", "vfio": {"driver": "profiled-vfio-pci"}}]}
BY_SETTING = {"drivers": {"8086:E212": "set-vfio-pci"}}


@pytest.fixture
def modules(tmp_path: Path) -> str:
    """Where the running kernel has a driver for this very device."""
    path = Path(aliases_path(str(tmp_path)))
    path.parent.mkdir()
    path.write_text(ALIAS)
    return str(tmp_path)


def settings(cdi: object = None, vfio: object = None) -> Config:
    return config.parse(json.dumps({"cdi": cdi or {}, "vfio": vfio or {}}))


@pytest.mark.parametrize(
    ("wanted", "driver"),
    [
        pytest.param(settings(), "xe-vfio-pci", id="the best that the kernel has"),
        pytest.param(settings(BY_PROFILE), "profiled-vfio-pci", id="of the profile"),
        pytest.param(settings(BY_PROFILE, BY_SETTING), "set-vfio-pci", id="of the setting"),
    ],
)
def test_the_driver_for_a_virtual_machine(wanted: Config, driver: str, modules: str) -> None:
    """What is said of the very device goes before what is said of its kind."""
    rules = compose.claim_rules(wanted, modules=modules)
    assert rules.vfio_driver(function()) == driver
    assert rules.vfio_driver(function(device=0x1234, class_code=0x040300)) == "vfio-pci"


@pytest.mark.parametrize("driver", ["set_vfio_pci", "plainly_named"])
def test_a_driver_that_the_configuration_names_is_taken_for_a_vfio_driver(
    driver: str, modules: str
) -> None:
    wanted = settings(vfio={"drivers": {"8086:E212": driver}})
    rules = compose.claim_rules(wanted, modules=modules)
    assert rules.unsuitable(function(), driver.replace("_", "-")) is None
    assert rules.unsuitable(function(), "xe") == "is not a VFIO driver"
    assert rules.unsuitable(function(), "xe-vfio-pci") is None
    other = function(device=0x1234)
    assert rules.unsuitable(other, "plainly_named") == "is not a VFIO driver"


@pytest.mark.parametrize(
    ("cdi", "device", "mode", "reason"),
    [
        pytest.param({}, 0xE212, HoldMode.VFIO, None, id="published"),
        pytest.param({}, 0xE212, HoldMode.DRM, None, id="published on its own driver"),
        pytest.param(
            {"profiles": [{"name": "intel-gpu", "vfio": None}]},
            0xE212,
            HoldMode.VFIO,
            "profile intel-gpu publishes no devices on VFIO",
            id="not on VFIO",
        ),
        pytest.param(
            {"profiles": [{"name": "intel-gpu", "vfio": None}]},
            0xE212,
            HoldMode.DRM,
            None,
            id="not on VFIO, but on its own driver",
        ),
        pytest.param(
            {"profiles": [{"name": "intel-gpu", "nodes": []}]},
            0xE212,
            HoldMode.VFIO,
            None,
            id="on VFIO only",
        ),
        pytest.param(
            {"profiles": [{"name": "intel-gpu", "nodes": []}]},
            0xE212,
            HoldMode.DRM,
            "profile intel-gpu publishes devices on VFIO only",
            id="not on its own driver",
        ),
        pytest.param(
            {"profiles": [{"name": "intel-gpu", "enabled": False}]},
            0xE212,
            HoldMode.VFIO,
            "profile intel-gpu, which recognises it, is switched off",
            id="switched off",
        ),
    ],
)
def test_what_is_never_published_is_not_claimed(
    cdi: object, device: int, mode: HoldMode, reason: str | None, modules: str
) -> None:
    rules = compose.claim_rules(settings(cdi), modules=modules)
    assert rules.unpublishable(function(device=device), mode) == reason
    audio = function(device=0x1234, class_code=0x040300)
    assert rules.unpublishable(audio, mode) == "no profile recognises 8086:1234"


@pytest.mark.parametrize(
    ("vendor", "driver", "hidden"),
    [
        pytest.param(0x10DE, "nvidia", True, id="another toolkit's"),
        pytest.param(0x10DE, "nouveau", False, id="the kernel's own"),
        pytest.param(0x8086, "xe", False, id="of a profile without such"),
        pytest.param(0x10DE, None, False, id="none"),
    ],
)
def test_users_of_a_driver_that_another_toolkit_gives_to_containers_are_hidden(
    vendor: int, driver: str | None, *, hidden: bool
) -> None:
    rules = compose.claim_rules(settings(), modules="/nowhere")
    assert rules.hides_users(function(vendor=vendor, driver=driver)) is hidden


@pytest.mark.parametrize(
    ("driver", "known"),
    [
        pytest.param("xe", True, id="of the device's profile"),
        pytest.param("amdgpu", False, id="of another's"),
        pytest.param(None, False, id="none"),
    ],
)
def test_a_driver_that_a_profile_publishes_is_used_by_its_nodes(
    driver: str | None, *, known: bool
) -> None:
    rules = compose.claim_rules(settings(), modules="/nowhere")
    assert rules.makes_nodes(function(driver=driver)) is known
