"""The words in which the scenarios are told: GPUs, and what should be published of them."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from agent.host.model import Address
from agent.simulate.hardware import Hardware
from agent.simulate.host import arc_b50
from tests.netns.inside import SPECS
from tests.netns.outside import PrivateHost

GPU_FILE: Final = "cdi-agent_intel.com-gpu.yaml"
MEI_FILE: Final = "cdi-agent_intel.com-gpu-mei.yaml"
VFIO_FILE: Final = "cdi-agent_intel.com-gpu-vfio.yaml"

SETTINGS: Final[Mapping[str, Any]] = {
    "host": {"static_dev": True},
    "log": {"level": "debug", "format": "json"},
}
"""What the agent is told on a private host, whose /dev is no devtmpfs."""

Published = Mapping[str, tuple[str, ...]]


def settings(**sections: Mapping[str, Any]) -> dict[str, Any]:
    """What the agent is told, and more: keys by section."""
    return {**SETTINGS, **{name: {**SETTINGS.get(name, {}), **k} for name, k in sections.items()}}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """An Arc Pro B50, behind bridges of its own."""

    bus: int

    @property
    def address(self) -> Address:
        """Its address."""
        return Address(f"0000:{self.bus:02x}:00.0")

    @property
    def hardware(self) -> Hardware:
        """What is plugged in."""
        (hardware,) = arc_b50(self.address)
        return hardware

    @property
    def name(self) -> str:
        """What it is called in its kinds."""
        return f"{self.address.replace(':', '-').replace('.', '-')}-0xe212"

    @property
    def own(self) -> str:
        """What a container asks for."""
        return f"intel.com/gpu={self.name}"

    @property
    def mei(self) -> str:
        """What a container asks for that manages it."""
        return f"intel.com/gpu-mei={self.name}"

    @property
    def vfio(self) -> str:
        """What a virtual machine's container asks for."""
        return f"intel.com/gpu-vfio={self.name}"


A: Final = Gpu(0x03)
B: Final = Gpu(0x07)
C: Final = Gpu(0x0B)
ALL: Final = "intel.com/gpu=all"


def truth(host: PrivateHost, gpus: Iterable[Gpu] = (A, B, C)) -> Published:
    """What should be published of the host as it is now, were all of it settled."""
    published: dict[str, tuple[str, ...]] = {}
    functions = host.kernel.functions
    for gpu in gpus:
        if (driver := functions.get(gpu.address)) is None:
            continue
        nodes = sorted(host.kernel.node_paths(gpu.address))
        if driver == "xe":
            published[gpu.own] = tuple(node for node in nodes if node.startswith("/dev/dri/"))
            published[gpu.mei] = tuple(node for node in nodes if node.startswith("/dev/mei"))
        else:
            group = (node for node in nodes if not node.startswith("/dev/vfio/devices/"))
            published[gpu.vfio] = (*group, "/dev/vfio/vfio")
    for kind in ("intel.com/gpu", "intel.com/gpu-mei"):
        members = [nodes for name, nodes in published.items() if name.startswith(f"{kind}=")]
        if members:
            published[f"{kind}=all"] = tuple(sorted(node for nodes in members for node in nodes))
    return published


def published(host: PrivateHost, directory: str = SPECS) -> Published:
    """The nodes that each device gives a container, by the name that one asks for."""
    return {
        f"{spec['kind']}={device['name']}": tuple(
            sorted(
                node.get("hostPath", node["path"])
                for node in device["containerEdits"].get("deviceNodes", ())
            )
        )
        for spec in host.inside.specs(directory).values()
        for device in spec["devices"]
    }


def becomes(host: PrivateHost, expected: Published) -> None:
    """Wait until exactly this is published."""
    seen = host.until(lambda: published(host), lambda now: now == expected)
    assert seen == expected, host.inside.agent_log()


def becomes_true(host: PrivateHost) -> None:
    """Wait until what is published is the truth."""
    becomes(host, truth(host))


def start(host: PrivateHost, *gpus: Gpu) -> None:
    """Plug GPUs in, start the agent, and forget what it wrote at the start."""
    if gpus:
        host.kernel.plug(*(gpu.hardware for gpu in gpus))
    host.inside.start_agent(SETTINGS)
    assert published(host) == truth(host)
    host.inside.writes()


def files_written(host: PrivateHost) -> list[tuple[str, str]]:
    """What happened to spec files since the last time: (``written`` or ``deleted``, name)."""
    return [(what, name) for what, name in host.inside.writes()]


def log_entries(host: PrivateHost, event: str) -> list[dict[str, Any]]:
    """What it has logged under a name."""
    whole, _, _being_written = host.inside.agent_log().rpartition("\n")
    entries = (json.loads(line) for line in whole.splitlines())
    return [entry for entry in entries if entry["event"] == event]


def full_looks(host: PrivateHost) -> int:
    """How many passes so far have looked at everything."""
    return sum(entry.get("looked_at") == "all" for entry in log_entries(host, "pass"))
