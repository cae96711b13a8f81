"""The scenario files, played before the agent on a real kernel.

The same files are played on the simulated host. Here, at every expectation, four must agree: the
file, the specs on disk, the oracle's look at /sys and /dev, and the agent's own metrics; and where
a GPU is published on VFIO, its group opens and the kernel calls it viable. When all is over, the
witness has seen no file that an engine would refuse, and the agent has had nothing to complain of.
"""

import json
from pathlib import Path
from typing import Final

import pytest

from agent.simulate.scenario import Scenario, load, play
from tests.guest.conftest import Resume
from tests.guest.observers import Observers
from tests.guest.settings import ALL
from tests.guest.stage import GuestStage, GuestWitness, cannot, cast

SCENARIOS: Final = {
    path.stem: load(path)
    for path in sorted((Path(__file__).parents[1] / "scenarios").glob("*.yaml"))
}
PLAYABLE: Final = [name for name, scenario in SCENARIOS.items() if not cannot(scenario)]

# Once each for everything that a kernel does with a device. The others say nothing more of it, are
# played on the simulated host and before real netlink, and here with CDI_AGENT_GUEST_ALL=1.
ALWAYS: Final = (
    *("only-gpu-to-vfio", "hot-plug", "module-unloaded", "remove-and-rescan", "renumbered"),
    *("swapped", "shared-group", "udev-stopped"),
)
# Played a second time with a card that is plugged: its driver is the PCI function's own, not a
# virtio child's, so that unloading its module unbinds it.
ALSO_PLUGGED: Final = ("module-unloaded", "renumbered")

PERFORMANCES: Final = [
    *(pytest.param(SCENARIOS[name], False, id=name) for name in (PLAYABLE if ALL else ALWAYS)),
    *(
        pytest.param(SCENARIOS[name], True, id=f"{name}-plugged")
        for name in (ALSO_PLUGGED if ALL else ALSO_PLUGGED[:1])
    ),
]


def test_only_these_scenarios_cannot_be_played_here() -> None:
    left_out = {name for name, scenario in SCENARIOS.items() if cannot(scenario)}
    assert left_out == {"virtual-functions", "management-controller"}


def complaints(observers: Observers) -> set[str]:
    """What the agent logged as a warning or worse, by name."""
    return {entry["CDI_AGENT_EVENT"] for entry in observers.entries("--priority=warning")}


def changes(observers: Observers) -> int:
    """How many spec files the journal says were written or deleted; none that could not be."""
    passes = observers.entries("CDI_AGENT_EVENT=pass")
    assert all(entry["CDI_AGENT_FAILED"] == "[]" for entry in passes)
    fields = ("CDI_AGENT_WROTE", "CDI_AGENT_DELETED")
    return sum(len(json.loads(entry[field])) for entry in passes for field in fields)


@pytest.mark.guest
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("scenario", "plugged"), PERFORMANCES)
def test_scenario(resume: Resume, scenario: Scenario, *, plugged: bool) -> None:
    topology, players = cast(scenario, plugged=plugged)
    with resume(topology) as guest:
        observers = Observers(guest)
        stage = GuestStage(guest, players)
        witness = GuestWitness(stage, observers)
        stage.start(scenario)
        for _ in play(scenario, stage, witness):
            pass
        assert observers.faults() == []
        assert complaints(observers) <= {"udev-absent", "source-deaf"}
        # Journal and metrics tell of the same agent, which was never restarted.
        assert changes(observers) == witness.writes
