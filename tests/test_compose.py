"""Which configurations go with what is claimed."""

import pytest

from agent import compose
from agent.cdi.offers import Policy
from agent.cdi.profile import Naming, Profile
from agent.errors import ConfigError
from agent.host.model import Function, HoldMode
from agent.reconcile.rules import Layout, Rules, Timing
from agent.reconcile.state import State
from agent.vfio.claim import holds
from agent.vfio.model import Identity, Origin, Prepare, Record
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
