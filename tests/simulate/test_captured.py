"""A captured host and its simulation look the same, and the simulation goes on from there."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pytest

from agent.errors import CaptureError
from agent.host import capture
from agent.host.hints import EVERYTHING
from agent.host.model import Inventory
from agent.host.scan import Scanner
from agent.simulate import Features, Kernel, UdevMode, VfioKind, captured, stat_plain
from agent.simulate import host as shapes
from tests.simulate.conftest import Recorder

GPU: Final = "0000:03:00.0"


def look(kernel: Kernel) -> Inventory:
    """A full look at a simulated host."""
    root = kernel.root
    scanner = Scanner(
        sys=root / "sys",
        dev=root / "dev",
        run=root / "run",
        proc=root / "proc",
        stat_node=stat_plain,
    )
    return scanner.scan(EVERYTHING, Inventory())


def capture_of(kernel: Kernel) -> capture.Capture:
    return capture.capture(look(kernel))


def everything(kernel: Kernel) -> None:
    kernel.plug_platform("simple-framebuffer.0", "simple-framebuffer")
    kernel.plug(*shapes.bmc(), *shapes.apu(), *shapes.npu(), *shapes.management_engine())
    kernel.plug(*shapes.arc_with_audio("0000:13:00.0"), *shapes.arc_b50(), *shapes.instinct())
    kernel.plug(*shapes.virtio_gpu("0000:21:00.0"), *shapes.disk(), *shapes.network_card())
    kernel.plug(*shapes.two_functions(), *shapes.flex_170())
    kernel.create_vfs("0000:4d:00.0", 9)
    kernel.unplug_platform("simple-framebuffer.0")


def renumbered(kernel: Kernel) -> None:
    kernel.plug(*shapes.arc_b50(), *shapes.arc_b60(), *shapes.integrated_intel())
    for address in ("0000:07:00.0", GPU):
        kernel.unbind(address)
    for address in (GPU, "0000:07:00.0"):
        kernel.bind(address, "xe")
    kernel.unplug("0000:07:00.0")


def on_vfio(kernel: Kernel) -> None:
    kernel.plug(*shapes.two_functions(), *shapes.arc_b50())
    for address in ("0000:05:00.1", "0000:05:00.0", GPU):
        kernel.move(address, "vfio-pci")
    kernel.move("0000:05:00.1", "snd_hda_intel")


def without_drivers(kernel: Kernel) -> None:
    kernel.plug(*shapes.two_functions(), *shapes.npu())
    for address in ("0000:05:00.0", "0000:05:00.1", "0000:00:0b.0"):
        kernel.unbind(address)


def half_done(kernel: Kernel) -> None:
    kernel.plug(*shapes.arc_b50())
    kernel.udev = UdevMode.MANUAL
    kernel.plug(*shapes.arc_b60())
    kernel.lose("/dev/dri/renderD128")
    kernel.tree.link("/dev/dri/by-path/pci-0000:03:00.0-render", "/dev/dri/card1")


HOSTS: Final[Mapping[str, Callable[[Kernel], None]]] = {
    "empty": lambda kernel: None,
    "everything": everything,
    "renumbered": renumbered,
    "on VFIO": on_vfio,
    "without drivers": without_drivers,
    "half done": half_done,
}


@pytest.mark.parametrize("build", [pytest.param(build, id=name) for name, build in HOSTS.items()])
def test_a_captured_host_looks_as_it_was_captured(
    kernel: Kernel, heard: Recorder, tmp_path: Path, build: Callable[[Kernel], None]
) -> None:
    build(kernel)
    first = capture_of(kernel)
    heard.events.clear()
    again = captured.load(capture.parse(capture.dump(first)), tmp_path / "again", heard)
    assert capture.dump(capture_of(again)) == capture.dump(first)
    assert heard.events == [], "nobody listens while a host boots"


@pytest.mark.parametrize(
    "features",
    [
        pytest.param(Features(vfio=kind, devtmpfs=devtmpfs), id=f"{kind.name} {devtmpfs}")
        for kind in VfioKind
        for devtmpfs in (True, False)
    ],
)
def test_the_kind_of_host_survives(tmp_path: Path, features: Features) -> None:
    kernel = Kernel(tmp_path / "host", lambda event: None, features=features)
    kernel.plug(*shapes.arc_b50())
    kernel.move(GPU, "vfio-pci")
    kernel.udev = UdevMode.OFF
    first = capture_of(kernel)
    again = captured.load(first, tmp_path / "again", lambda event: None)
    assert capture_of(again) == first


def test_a_captured_host_goes_on(kernel: Kernel, heard: Recorder, tmp_path: Path) -> None:
    """From VFIO back to the usual driver, and to VFIO again."""
    kernel.plug(*shapes.arc_b50())
    kernel.move(GPU, "vfio-pci")
    again = captured.load(capture_of(kernel), tmp_path / "again", heard)
    assert again.modprobe("xe") == 0
    assert again.move(GPU, "xe") == 0
    assert set(again.node_paths(GPU)) == {"/dev/dri/card0", "/dev/dri/renderD128"}
    assert again.move(GPU, "vfio-pci") == 0
    assert capture_of(again) == capture_of(kernel)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        pytest.param(
            {
                "nodes": [
                    {"role": "card", "name": f"card{n}", "path": f"/dev/dri/card{n}"}
                    for n in range(2)
                ]
            },
            "more than one node",
            id="two cards",
        ),
        pytest.param({"devpath": "/devices/platform/0000:03:00.0"}, "is not at", id="not on PCI"),
        pytest.param({"virtfns": [GPU]}, r"functions\[0\]\.virtfns", id="its own VF"),
        pytest.param(
            {"driver": "vfio-pci", "vfio_dev": True}, "cannot be bound", id="VFIO without a group"
        ),
    ],
)
def test_a_host_that_no_kernel_makes_is_refused(
    tmp_path: Path, function: dict[str, object], reason: str
) -> None:
    import yaml

    text = yaml.safe_dump(
        {
            "version": 1,
            "functions": [
                {
                    "address": GPU,
                    "devpath": f"/devices/pci0000:00/{GPU}",
                    "id": "8086:e212",
                    "class": "0x030000",
                    "driver": "xe",
                }
                | function
            ],
        }
    )
    with pytest.raises(CaptureError, match=reason):
        captured.load(capture.parse(text), tmp_path / "host", lambda event: None)
