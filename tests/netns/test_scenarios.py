"""Every scenario file, played before the unmodified agent: real netlink, real nodes, real libudev.

The same files are played on the simulated host, where time is the test's own. Here the witness
waits, and looks closer: each device that is published has exactly the nodes that it has.
"""

import functools
import re
from pathlib import Path
from typing import Final

import pytest

from agent.simulate.scenario import Act, Expectation, Kind, Published, WaitQuiet, load
from tests.netns import story
from tests.netns.outside import PrivateHost

pytestmark = pytest.mark.netns

FILES: Final = sorted((Path(__file__).parents[1] / "scenarios").glob("*.yaml"))
KINDS: Final = {"intel.com/gpu": Kind.OWN, "intel.com/gpu-vfio": Kind.VFIO}
SETTINGS: Final = {
    **story.SETTINGS,
    # A slow udevd is slow until it catches up, however slow this machine is.
    "reconcile": {"udev_timeout": 60},
}


def address_of(device: str) -> str:
    """``0000-03-00-0-0xe212`` is the device at 0000:03:00.0."""
    match = re.fullmatch(r"(.+)-(..)-(..)-(.)-0x.{4}", device)
    assert match is not None
    return f"{match[1]}:{match[2]}:{match[3]}.{match[4]}"


class Agent:
    """What the agent publishes, in the words of the scenario."""

    def __init__(self, host: PrivateHost, names: dict[str, str]) -> None:
        self._host = host
        self._names = names

    def fault(self, expected: Expectation) -> str:
        """In which way something else is published than should be."""
        found: dict[Kind, set[str]] = {}
        for name, nodes in story.published(self._host).items():
            kind, _, device = name.partition("=")
            if device == "all" or kind not in KINDS:
                continue
            address = address_of(device)
            found.setdefault(KINDS[kind], set()).add(self._names[address])
            if set(nodes) != self._nodes_of(address, KINDS[kind]):
                return f"{name} is published with {nodes}"
        published: Published = {kind: frozenset(names) for kind, names in found.items()}
        return expected.fault(published)

    def _nodes_of(self, address: str, kind: Kind) -> set[str]:
        if address not in self._host.kernel.functions:
            return set()
        nodes = self._host.kernel.node_paths(address)
        if kind is Kind.OWN:
            return {node for node in nodes if node.startswith("/dev/dri/")}
        group = {node for node in nodes if not node.startswith("/dev/vfio/devices/")}
        return group | {"/dev/vfio/vfio"}


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in FILES])
def test_the_agent_publishes_what_the_scenario_expects(host: PrivateHost, path: Path) -> None:
    agent = Agent(host, host.inside.set_scene(str(path)))
    host.inside.start_agent(SETTINGS)
    host.inside.writes()
    for number, step in enumerate(load(path).steps):
        match step:
            case Act():
                host.inside.act(number)
            case WaitQuiet():
                host.quiet()
            case Expectation():
                if step.unwritten:
                    host.quiet()
                fault = host.until(functools.partial(agent.fault, step), lambda fault: not fault)
                assert not fault, f"step {number + 1}: {fault}\n{host.inside.agent_log()}"
                writes = host.inside.writes()
                assert not (step.unwritten and writes), f"step {number + 1}: {writes}"
