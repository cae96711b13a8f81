"""Every scenario file, played on the simulated host before the real reconciler and the real store.

There is a pass after every act, and one when a device may have settled, in a time of the test's
own. A second witness looks at the tree of the simulated host, without a line of the agent: what the
files expect must be what that look finds, or the files would ask for what is not so.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import structlog

from agent.host.model import Address
from agent.simulate import UdevMode, stat_plain
from agent.simulate.scenario import (
    Act,
    Expectation,
    Kind,
    Published,
    Scenario,
    WaitQuiet,
    load,
    play,
)
from agent.simulate.stage import SimulatedStage
from tests.reconcile.rig import Rig

FILES: Final = sorted(Path(__file__).parent.glob("*.yaml"))
KINDS: Final = {"intel.com/gpu": Kind.OWN, "intel.com/gpu-vfio": Kind.VFIO}


@pytest.fixture(params=[pytest.param(path, id=path.stem) for path in FILES])
def scenario(request: pytest.FixtureRequest) -> Scenario:
    path: Path = request.param
    return load(path)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    yield Rig(tmp_path)
    structlog.reset_defaults()


@pytest.fixture
def stage(scenario: Scenario, rig: Rig) -> SimulatedStage:
    """The simulated host, with what is there at the start."""
    stage = SimulatedStage(rig.kernel, scenario.parts)
    stage.udev(scenario.udev)
    stage.start(scenario.start)
    return stage


# --- the agent ------------------------------------------------------------------------------------


def published(rig: Rig, stage: SimulatedStage) -> Published:
    """What the agent's files say, in the words of the scenario."""
    return {
        KINDS[kind]: frozenset(stage.names[address_of(device)] for device in devices)
        for kind, devices in rig.published().items()
    }


def address_of(device: str) -> Address:
    """``0000-03-00-0-0xe212`` is the device at 0000:03:00.0."""
    match = re.match(r"([0-9a-f]+)-([0-9a-f]+)-([0-9a-f]+)-([0-7])-", device)
    assert match is not None
    return Address(f"{match[1]}:{match[2]}:{match[3]}.{match[4]}")


def files(rig: Rig) -> list[tuple[str, int, int]]:
    """What tells whether a file was written: another inode, another time."""
    found = ((path.name, path.stat()) for path in sorted(rig.specs.glob("*")))
    return [(name, stat.st_ino, stat.st_mtime_ns) for name, stat in found]


async def test_the_agent_publishes_what_the_scenario_expects(
    scenario: Scenario, stage: SimulatedStage, rig: Rig
) -> None:
    await rig.quiet()
    before = files(rig)
    for step in scenario.steps:
        match step:
            case Act():
                await rig.do(step.do, stage)
                await rig.step()
            case WaitQuiet():
                await rig.quiet()
            case Expectation():
                await rig.quiet()
                assert step.fault(published(rig, stage)) == "", step
                if step.unwritten:
                    assert files(rig) == before, step
                before = files(rig)


# --- a look at the host without the agent ---------------------------------------------------------


class Look:
    """A witness that reads the simulated /sys and /dev by itself."""

    def __init__(self, stage: SimulatedStage) -> None:
        self._stage = stage
        self._root = stage.kernel.root

    def wait_quiet(self) -> None:
        """The simulated host is always quiet when a verb returns."""

    def expect(self, expected: Expectation) -> None:
        fault = expected.fault(self.published())
        assert not fault, fault

    def published(self) -> Published:
        """What should be published of the host as it is."""
        found: dict[Kind, set[str]] = {}
        for address, name in self._stage.names.items():
            if (kind := self._kind(address)) is not None:
                found.setdefault(kind, set()).add(name)
        return {kind: frozenset(names) for kind, names in found.items()}

    def _kind(self, address: str) -> Kind | None:
        folder = self._root / "sys/bus/pci/devices" / address
        if not folder.exists() or not (folder / "class").read_text().startswith("0x03"):
            return None
        driver = folder / "driver"
        if not driver.exists():
            return None
        if driver.resolve().name == "vfio-pci":
            group = (folder / "iommu_group").resolve()
            free = all(self._does_not_hinder(one) for one in (group / "devices").iterdir())
            return Kind.VFIO if free and self._is_ready(f"vfio/{group.name}") else None
        drm = folder / "drm"
        nodes = os.listdir(drm) if drm.exists() else []
        kinds = {re.sub("[0-9]+$", "", node) for node in nodes}
        ready = all(self._is_ready(f"dri/{node}") for node in nodes)
        return Kind.OWN if kinds == {"card", "renderD"} and ready else None

    def _does_not_hinder(self, function: Path) -> bool:
        """A function of a group on VFIO: it is on VFIO too, has no driver, or is a bridge."""
        driver = function / "driver"
        return (
            not driver.exists()
            or driver.resolve().name in {"vfio-pci", "pcieport"}
            or (function / "class").read_text().startswith("0x06")
        )

    def _is_ready(self, node: str) -> bool:
        """A character device, and udevd has dealt with it if there is one."""
        found = stat_plain(str(self._root / "dev" / node))
        if found is None or found.number is None:
            return False
        done = self._root / f"run/udev/data/c{found.number}"
        return done.exists() or not (self._root / "run/udev/control").exists()


def test_a_look_without_the_agent_agrees(scenario: Scenario, stage: SimulatedStage) -> None:
    assert len(list(play(scenario, stage, Look(stage)))) == len(scenario.steps)


# --- the files themselves -------------------------------------------------------------------------


def test_a_scenario_expects_something_at_its_end(scenario: Scenario) -> None:
    last = scenario.steps[-1]
    assert isinstance(last, Expectation)
    assert last.published or last.deleted
    assert scenario.title


def test_there_are_scenarios_with_and_without_udevd() -> None:
    assert {load(path).udev for path in FILES} >= {UdevMode.AUTO, UdevMode.OFF}
