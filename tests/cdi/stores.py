"""What the tests of the store share: specs to write, and a reader that is as strict as CDI."""

import os
from collections.abc import Mapping
from pathlib import Path

from agent.cdi.files import PREFIX, DeleteSpec, WriteSpec
from agent.cdi.parse import parse
from agent.cdi.render import Suffix, render
from agent.cdi.spec import ContainerEdits, Device, DeviceNode, Kind, Spec
from agent.cdi.store import Store
from agent.host.files import Step, no_step

GPU = Kind("intel.com/gpu")
NAME = f"{PREFIX}intel.com-gpu.yaml"


def spec_of(*cards: int, kind: Kind = GPU) -> Spec:
    """A spec with one device for each of these card numbers."""
    return Spec(
        kind,
        tuple(
            Device(
                f"card{card}",
                ContainerEdits(
                    device_nodes=(DeviceNode(f"/dev/dri/card{card}", permissions="rw"),)
                ),
            )
            for card in cards
        ),
    )


def content_of(*cards: int, kind: Kind = GPU, suffix: Suffix = "yaml") -> bytes:
    """The file of such a spec."""
    return render(spec_of(*cards, kind=kind), suffix=suffix)


class Place:
    """A spec directory, a second one, and a state directory, all below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "run" / "cdi"
        self.other = root / "etc" / "cdi"
        self.state = root / "state"
        self.path = self.directory / NAME

    def store(self, step: Step = no_step) -> Store:
        """A store as a newly started process has it."""
        return Store(self.directory, self.state, (self.other,), step=step)

    def write(self, *cards: int, delete_if_unwritable: bool = False) -> WriteSpec:
        """The action that publishes these cards."""
        return WriteSpec(
            str(self.path),
            GPU,
            content_of(*cards),
            publishes=tuple(f"card{card}" for card in cards),
            delete_if_unwritable=delete_if_unwritable,
        )

    def delete(self) -> DeleteSpec:
        """The action that deletes the file."""
        return DeleteSpec(str(self.path), GPU)

    def names(self) -> list[str]:
        """Everything in the spec directory, temporary files too."""
        return sorted(os.listdir(self.directory)) if self.directory.exists() else []


def consume(directory: Path) -> Mapping[str, str]:
    """Load a directory as an engine does: every device with the file that defines it.

    Raises:
        AssertionError: A file is empty, partial or invalid, or a device is defined twice.
    """
    devices: dict[str, str] = {}
    for name in os.listdir(directory):
        if not name.endswith((".yaml", ".json")):
            continue
        try:
            content = (directory / name).read_bytes()
        except FileNotFoundError:
            continue  # deleted since it was listed
        spec = parse(content)
        assert spec.devices, name
        for device in spec.devices:
            assert device.name not in devices, f"{device.name} in {name} and {devices[device.name]}"
            devices[device.name] = name
    return devices
