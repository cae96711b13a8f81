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

from agent.simulate.scenario import Act, Scenario, load, play
from tests.guest.conftest import Resume
from tests.guest.observers import Observers
from tests.guest.settings import ALL
from tests.guest.stage import Cast, GuestStage, GuestWitness, cannot, cast
from tests.guest.topology import Topology

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
    *((name, SCENARIOS[name], *cast(SCENARIOS[name])) for name in (PLAYABLE if ALL else ALWAYS)),
    *(
        (f"{name}-plugged", SCENARIOS[name], *cast(SCENARIOS[name], plugged=True))
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


def numbers_change(scenario: Scenario) -> bool:
    """Whether every function comes back under other numbers."""
    acts = [step.text.split()[0] for step in scenario.steps if isinstance(step, Act)]
    return not {"renumber", "swap"}.isdisjoint(acts)


def numbers(observers: Observers, players: Cast) -> dict[str, int]:
    """Under how many different nodes each player has been published."""
    specs = [note["spec"] for note in observers.saw() if "spec" in note]
    return {
        name: len({tuple(spec[one.device]) for spec in specs if one.device in spec})
        for name, one in players.items()
    }


@pytest.mark.guest
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("scenario", "topology", "players"), [pytest.param(*p, id=name) for name, *p in PERFORMANCES]
)
def test_scenario(resume: Resume, scenario: Scenario, topology: Topology, players: Cast) -> None:
    with resume(topology) as guest:
        observers = Observers(guest)
        stage = GuestStage(guest, players)
        witness = GuestWitness(stage, observers)
        stage.start(scenario)
        for _ in play(scenario, stage, witness):
            pass
        assert observers.faults() == []
        assert complaints(observers) <= {"udev-absent", "source-deaf"}
        if numbers_change(scenario):
            assert all(number > 1 for number in numbers(observers, players).values())
        # Journal and metrics tell of the same agent, which was never restarted.
        assert changes(observers) == witness.writes
