"""The simulated udevd is late, can be stepped, and can be absent."""

import os
import stat
from pathlib import Path

import pytest

from agent.simulate import Features, Kernel, Source, UdevMode
from agent.simulate.host import arc_b50, bmc, bochs
from tests.simulate.conftest import Recorder

GPU = "0000:03:00.0"
CARD_LINK = f"dev/dri/by-path/pci-{GPU}-card"


def test_an_entry_and_a_link_for_each_node_once_udevd_is_done(kernel: Kernel) -> None:
    kernel.udev = UdevMode.MANUAL
    kernel.plug(*arc_b50())
    root = kernel.root
    assert (root / "dev/dri/card0").exists()
    assert (root / "run/udev/queue").exists()
    assert not (root / "run/udev/data/c226:0").exists()
    assert not (root / CARD_LINK).exists()
    assert stat.S_IMODE((root / "dev/dri/renderD128").stat().st_mode) == 0o600
    kernel.udev_settle()
    assert not (root / "run/udev/queue").exists()
    assert (root / "run/udev/data/c226:0").exists()
    assert os.readlink(root / CARD_LINK) == "../card0"
    assert stat.S_IMODE((root / "dev/dri/renderD128").stat().st_mode) == 0o666
    assert "S:dri/by-path" in (root / "run/udev/data/c226:128").read_text()


def test_a_slow_udevd_leaves_a_dangling_link_until_it_is_done(kernel: Kernel) -> None:
    kernel.plug(*arc_b50())
    kernel.udev = UdevMode.MANUAL
    kernel.unbind(GPU)
    link = kernel.root / CARD_LINK
    assert link.is_symlink()
    assert not link.exists()
    kernel.udev_settle()
    assert not (kernel.root / "dev/dri").exists(), "the last link goes, and the folders with it"


def test_steps_are_single_messages_in_the_kernels_order(kernel: Kernel, heard: Recorder) -> None:
    kernel.plug(*arc_b50())
    kernel.udev = UdevMode.MANUAL
    heard.events.clear()
    kernel.unbind(GPU)
    said = heard.of(Source.KERNEL)
    assert heard.of(Source.UDEV) == []
    assert kernel.udev_waiting > len(said)
    while kernel.udev_step():
        assert heard.of(Source.UDEV) == said[: len(heard.of(Source.UDEV))]
    assert heard.of(Source.UDEV) == said
    assert kernel.udev_waiting == 0


def test_without_udevd_there_is_no_control_no_entry_and_no_message(
    tmp_path: Path, heard: Recorder
) -> None:
    features = Features(drivers=("pcieport", "xe"))
    kernel = Kernel(tmp_path / "host", heard, udev=UdevMode.OFF, features=features)
    kernel.plug(*arc_b50())
    assert (kernel.root / "dev/dri/card0").exists()
    assert not (kernel.root / "run/udev/control").exists()
    assert heard.of(Source.KERNEL)
    assert heard.of(Source.UDEV) == []


def test_what_was_said_while_udevd_was_off_is_lost_to_it(kernel: Kernel, heard: Recorder) -> None:
    kernel.udev = UdevMode.OFF
    kernel.plug(*arc_b50())
    kernel.udev = UdevMode.AUTO
    assert (kernel.root / "run/udev/control").exists()
    assert heard.of(Source.UDEV) == []


def test_udevd_loads_the_driver_and_says_add_when_the_probe_is_over(
    kernel: Kernel, heard: Recorder
) -> None:
    kernel.plug(*bmc())
    said = [str(event) for event in heard.events]
    assert kernel.driver_of("0000:06:00.0") == "ast"
    assert said.index("udev add pci 0000:06:00.0") > said.index("kernel bind pci 0000:06:00.0")


def test_a_late_entry_belongs_to_whoever_has_the_number_then(kernel: Kernel) -> None:
    """A slow udevd writes what the message said, though another device has the number by now."""
    kernel.plug(*arc_b50())
    kernel.udev = UdevMode.MANUAL
    kernel.unbind(GPU)
    kernel.plug(*bochs("0000:0b:00.0"))
    assert (kernel.root / "dev/dri/card0").exists()
    assert "0000:03:00.0" in (kernel.root / "run/udev/data/c226:0").read_text()
    kernel.udev_settle()
    assert "0000:0b:00.0" in (kernel.root / "run/udev/data/c226:0").read_text()


@pytest.mark.parametrize("source", list(Source))
def test_node_names_are_as_each_source_writes_them(
    kernel: Kernel, heard: Recorder, source: Source
) -> None:
    kernel.plug(*arc_b50())
    (event,) = (
        event
        for event in heard.events
        if event.source is source and event.action == "add" and event.devpath.endswith("/card0")
    )
    assert event.properties["DEVNAME"] == (
        "dri/card0" if source is Source.KERNEL else "/dev/dri/card0"
    )
    assert event.node == "/dev/dri/card0"
    assert event.payload["ACTION"] == "add"
    assert event.payload["MINOR"] == "0"


def test_booting_is_silent(tmp_path: Path, heard: Recorder) -> None:
    """Nobody listens before the agent starts; udevd has dealt with everything by then."""
    kernel = Kernel(tmp_path / "host", heard, udev=UdevMode.MANUAL)
    with kernel.boot() as machine:
        machine.plug(bochs())
    assert heard.events == []
    assert kernel.udev_waiting == 0
