"""The simulated kernel says what the real one said, in the order in which it was recorded.

The expected orders are recordings of Linux 6.12 (its own messages), written by hand here.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.simulate import Features, Kernel, Source, Uevent
from agent.simulate.host import arc_b50, bochs, flex_170, two_functions, virtio_gpu
from tests.simulate.conftest import Recorder

FLEX = "0000:4d:00.0"


ARRIVAL = [
    "add drm renderD128",
    "add drm card0",
    "add drm card0-DP-1",
    "add drm card0-DP-2",
    "add drm card0-HDMI-A-1",
    "change drm card0",
    "add graphics fb0",
    "bind pci 0000:05:00.0",
]
DEPARTURE = [
    "remove graphics fb0",
    "remove drm card0-HDMI-A-1",
    "remove drm card0-DP-2",
    "remove drm card0-DP-1",
    "remove drm card0",
    "remove drm renderD128",
    "unbind pci 0000:05:00.0",
]


@pytest.mark.parametrize(
    ("before", "action", "expected"),
    [
        pytest.param(
            lambda k: k.unbind("0000:05:00.0"),
            lambda k: k.bind("0000:05:00.0", "nouveau"),
            ARRIVAL,
            id="its own driver binds",
        ),
        pytest.param(
            lambda k: None,
            lambda k: k.unbind("0000:05:00.0"),
            DEPARTURE,
            id="its own driver unbinds",
        ),
        pytest.param(
            lambda k: (k.unbind("0000:05:00.0"), k.override("0000:05:00.0", "vfio-pci")),
            lambda k: k.probe("0000:05:00.0"),
            ["add vfio 0", "add vfio-dev vfio0", "bind pci 0000:05:00.0"],
            id="vfio-pci binds",
        ),
        pytest.param(
            lambda k: k.move("0000:05:00.0", "vfio-pci"),
            lambda k: k.unbind("0000:05:00.0"),
            ["remove vfio-dev vfio0", "remove vfio 0", "unbind pci 0000:05:00.0"],
            id="vfio-pci unbinds",
        ),
        pytest.param(
            lambda k: None,
            lambda k: k.write("/sys/bus/pci/devices/0000:05:00.0/remove", "1"),
            [*DEPARTURE, "remove pci 0000:05:00.0"],
            id="PCI remove",
        ),
        pytest.param(
            lambda k: k.write("/sys/bus/pci/devices/0000:05:00.0/remove", "1"),
            lambda k: k.write("/sys/bus/pci/rescan", "1"),
            ["add pci 0000:05:00.0", *ARRIVAL],
            id="PCI rescan",
        ),
    ],
)
def test_order_of_messages(
    kernel: Kernel,
    heard: Recorder,
    before: Callable[[Kernel], object],
    action: Callable[[Kernel], object],
    expected: list[str],
) -> None:
    kernel.plug(two_functions()[0])
    before(kernel)
    heard.events.clear()
    action(kernel)
    assert heard.of(Source.KERNEL) == expected
    assert heard.of(Source.UDEV) == expected, "udevd passes all of it on, later"


def test_a_module_of_a_child_bus_brings_no_message_of_the_function(
    kernel: Kernel, heard: Recorder
) -> None:
    kernel.udev = kernel.udev.OFF  # it would load the module at once
    kernel.plug(*virtio_gpu())
    heard.events.clear()
    kernel.modprobe("virtio_gpu")
    assert heard.of(Source.KERNEL) == [
        "change drm card0",
        "add drm renderD128",
        "add drm card0",
        "add drm card0-Virtual-1",
        "change drm card0",
        "add graphics fb0",
        "bind virtio virtio0",
    ]
    assert heard.events[1].devpath == "/card0", "of what is not yet in sysfs"


def test_vfs_come_and_go_one_by_one_and_the_pf_says_change(kernel: Kernel, heard: Recorder) -> None:
    kernel.plug(*flex_170())
    kernel.write(f"/sys/bus/pci/devices/{FLEX}/sriov_drivers_autoprobe", "0")
    heard.events.clear()
    kernel.create_vfs(FLEX, 2)
    assert [event for event in heard.of(Source.KERNEL) if event != "change pci 0000:4d:00.0"] == [
        "add pci 0000:4d:00.1",
        "change pci 0000:4d:00.1",
        "add pci 0000:4d:00.2",
        "change pci 0000:4d:00.2",
    ]
    assert heard.of(Source.KERNEL)[-1] == "change pci 0000:4d:00.0"
    vf = next(event for event in heard.events if event.action == "add")
    assert "DRIVER" not in vf.properties
    assert vf.properties["PCI_CLASS"] == "38000"
    assert vf.properties["PCI_ID"] == "8086:56C0"
    heard.events.clear()
    kernel.remove_vfs(FLEX)
    assert heard.of(Source.KERNEL) == [
        "remove pci 0000:4d:00.2",
        "remove pci 0000:4d:00.1",
        "change pci 0000:4d:00.0",
    ]


def test_a_group_has_one_node_from_its_first_function_to_its_last(
    kernel: Kernel, heard: Recorder
) -> None:
    gpu, audio = two_functions()
    kernel.plug(gpu, audio)
    heard.events.clear()
    for function in (gpu, audio):
        kernel.move(function.address, "vfio-pci")
    for function in (gpu, audio):
        kernel.unbind(function.address)
    vfio = [event for event in heard.of(Source.KERNEL) if "vfio" in event]
    assert vfio == [
        "add vfio 0",
        "add vfio-dev vfio0",
        "add vfio-dev vfio1",
        "remove vfio-dev vfio0",
        "remove vfio-dev vfio1",
        "remove vfio 0",
    ]


def test_unbind_says_neither_driver_nor_modalias(kernel: Kernel, heard: Recorder) -> None:
    kernel.plug(two_functions()[0])
    kernel.unbind("0000:05:00.0")
    bound = next(event for event in heard.events if event.action == "bind")
    unbound = next(event for event in heard.events if event.action == "unbind")
    assert bound.properties["DRIVER"] == "nouveau"
    assert bound.properties["MODALIAS"].startswith("pci:v000010DEd000024B0")
    assert not {"DRIVER", "MODALIAS"} & set(unbound.properties)
    assert unbound.properties["PCI_SLOT_NAME"] == "0000:05:00.0"


def test_display_messages_never_name_the_driver(kernel: Kernel, heard: Recorder) -> None:
    kernel.plug(*arc_b50())
    drm = [event for event in heard.events if event.subsystem == "drm"]
    assert drm
    assert all("DRIVER" not in event.properties for event in drm)


def test_a_node_goes_before_its_message_and_its_folder_after_it(tmp_path: Path) -> None:
    """When "remove card" comes there is no node, no number, no link, but a folder."""
    moments: dict[str, tuple[bool, bool, bool, bool]] = {}

    root = tmp_path / "host"

    def look(event: Uevent) -> None:
        if event.source is Source.KERNEL and event.devpath.endswith("/drm/card0"):
            moments[event.action] = (
                (root / "dev/dri/card0").exists(),
                (root / "sys/dev/char/226:0").exists(),
                (root / f"sys{event.devpath}/dev").exists(),
                (root / f"sys{event.devpath}").exists(),
            )

    kernel = Kernel(root, look, features=Features(drivers=("bochs-drm",)))
    kernel.plug(*bochs())
    assert moments.pop("add") == (True, True, True, True)
    moments.clear()
    kernel.unbind("0000:02:00.0")
    assert moments == {"remove": (False, False, False, True)}
    assert not (root / "dev/dri").exists(), "the folder goes with the last node"


def test_the_driver_link_goes_first_and_comes_first(tmp_path: Path) -> None:
    links: list[tuple[str, bool]] = []
    function = tmp_path / "host/sys/bus/pci/devices/0000:02:00.0"

    def look(event: Uevent) -> None:
        if event.source is Source.KERNEL and event.subsystem == "drm":
            links.append((event.action, (function / "driver").is_symlink()))

    kernel = Kernel(tmp_path / "host", look, features=Features(drivers=("bochs-drm",)))
    kernel.plug(*bochs())
    assert links
    assert all(link for _, link in links)
    links.clear()
    kernel.unbind("0000:02:00.0")
    assert links
    assert not any(link for _, link in links)


def test_a_failed_probe_leaves_no_link_and_no_message(kernel: Kernel, heard: Recorder) -> None:
    kernel.plug(two_functions()[0])
    kernel.unbind("0000:05:00.0")
    heard.events.clear()
    kernel.fail_probe("0000:05:00.0", 5)
    assert kernel.bind("0000:05:00.0", "nouveau") == 5
    assert kernel.driver_of("0000:05:00.0") is None
    assert not (kernel.root / "sys/bus/pci/devices/0000:05:00.0/driver").is_symlink()
    assert heard.events == []
