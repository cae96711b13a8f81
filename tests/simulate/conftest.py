"""A simulated host for each test."""

from pathlib import Path

import pytest

from agent.simulate import Features, Kernel, Source, Uevent

DRIVERS = ("pcieport", "i915", "xe", "nouveau", "vfio-pci", "virtio-pci", "bochs-drm", "pci-stub")


class Recorder:
    """Keeps what is said, and tells what of it is about displays, VFIO and functions."""

    def __init__(self) -> None:
        self.events: list[Uevent] = []

    def __call__(self, event: Uevent) -> None:
        self.events.append(event)

    def of(self, source: Source) -> list[str]:
        """``add drm card0`` and so on."""
        return [
            f"{event.action} {event.subsystem} {event.devpath.rpartition('/')[2]}"
            for event in self.events
            if event.source is source
            and event.subsystem in {"drm", "graphics", "vfio", "vfio-dev", "pci", "virtio"}
        ]


@pytest.fixture
def heard() -> Recorder:
    return Recorder()


@pytest.fixture
def kernel(tmp_path: Path, heard: Recorder) -> Kernel:
    return Kernel(tmp_path / "host", heard, features=Features(drivers=DRIVERS))
