"""Writes to sysfs are answered as the kernel answers them: what they do, and their errnos."""

import errno
from collections.abc import Callable

import pytest

from agent.simulate import Kernel, Source
from agent.simulate.host import arc_b50, arc_b60, flex_170, network_card, two_functions
from tests.simulate.conftest import Recorder

GPU = "0000:03:00.0"
PCI = "/sys/bus/pci"


def of_function(name: str) -> str:
    return f"{PCI}/devices/{GPU}/{name}"


@pytest.fixture(autouse=True)
def gpu(kernel: Kernel) -> None:
    kernel.plug(*arc_b50())


@pytest.mark.parametrize(
    ("before", "path", "data", "expected"),
    [
        pytest.param(None, f"{PCI}/drivers/xe/bind", GPU, errno.EBUSY, id="bind what is bound"),
        pytest.param(
            lambda k: k.unbind(GPU),
            f"{PCI}/drivers/vfio-pci/bind",
            GPU,
            errno.ENODEV,
            id="bind to a driver that neither knows it nor is its override",
        ),
        pytest.param(
            lambda k: (k.unbind(GPU), k.override(GPU, "vfio-pci")),
            f"{PCI}/drivers/xe/bind",
            GPU,
            errno.ENODEV,
            id="bind to its own driver against its override",
        ),
        pytest.param(
            lambda k: (k.unbind(GPU), k.override(GPU, "nouveau")),
            f"{PCI}/drivers/nouveau/bind",
            GPU,
            errno.ENODEV,
            id="bind to an override that cannot drive it",
        ),
        pytest.param(
            lambda k: (k.unbind(GPU), k.override(GPU, "pci-stub")),
            f"{PCI}/drivers/pci-stub/bind",
            GPU,
            0,
            id="bind to a driver for anything",
        ),
        pytest.param(
            None, f"{PCI}/drivers/xe/bind", "0000:99:00.0", errno.ENODEV, id="bind nothing"
        ),
        pytest.param(
            None, f"{PCI}/drivers/i915/unbind", GPU, errno.ENODEV, id="unbind from another driver"
        ),
        pytest.param(None, of_function("driver/unbind"), f"{GPU}\n", 0, id="unbind by the link"),
        pytest.param(
            lambda k: k.unbind(GPU),
            of_function("driver/unbind"),
            GPU,
            errno.ENOENT,
            id="unbind what has no driver",
        ),
        pytest.param(
            None, f"{PCI}/drivers_probe", "nonsense", errno.ENODEV, id="probe what is not there"
        ),
        pytest.param(None, f"{PCI}/drivers_probe", GPU, 0, id="probe what is bound"),
        pytest.param(
            None, of_function("driver_override"), "x" * 4096, errno.EINVAL, id="override of a page"
        ),
        pytest.param(None, of_function("vendor"), "0x1", errno.EACCES, id="read-only attribute"),
        pytest.param(None, of_function("nothing"), "1", errno.ENOENT, id="no such attribute"),
        pytest.param(None, "/dev/dri/card0", "1", errno.EACCES, id="not sysfs"),
        pytest.param(None, of_function("sriov_numvfs"), "13", errno.ERANGE, id="too many VFs"),
        pytest.param(None, of_function("sriov_numvfs"), "two", errno.EINVAL, id="VFs in words"),
        pytest.param(
            lambda k: k.create_vfs(GPU, 2),
            of_function("sriov_numvfs"),
            "3",
            errno.EBUSY,
            id="other number of VFs",
        ),
        pytest.param(
            lambda k: k.create_vfs(GPU, 2), of_function("sriov_numvfs"), "2", 0, id="same number"
        ),
        pytest.param(
            lambda k: k.move(GPU, "vfio-pci"),
            of_function("sriov_numvfs"),
            "2",
            errno.ENOENT,
            id="VFs of a PF on VFIO",
        ),
        pytest.param(None, of_function("remove"), "yes", errno.EINVAL, id="remove in words"),
        pytest.param(None, of_function("remove"), "0", 0, id="remove not"),
        pytest.param(
            None, f"{PCI}/drivers/xe/new_id", "8086", errno.EINVAL, id="half an id for new_id"
        ),
        pytest.param(
            None, f"{PCI}/drivers/xe/remove_id", "8086 1", errno.ENODEV, id="unknown id removed"
        ),
        pytest.param(
            None, of_function("uevent"), "nonsense", errno.EINVAL, id="unknown action triggered"
        ),
    ],
)
def test_errno(
    kernel: Kernel,
    before: Callable[[Kernel], object] | None,
    path: str,
    data: str,
    expected: int,
) -> None:
    if before is not None:
        before(kernel)
    assert kernel.write(path, data) == expected


def test_an_override_is_written_and_cleared_and_makes_no_message(
    kernel: Kernel, heard: Recorder
) -> None:
    heard.events.clear()
    path = of_function("driver_override")
    assert kernel.tree.read(path) == "(null)\n"
    assert kernel.write(path, "vfio-pci") == 0
    assert kernel.tree.read(path) == "vfio-pci\n"
    assert kernel.write(path, "") == 0, "zero bytes do nothing"
    assert kernel.tree.read(path) == "vfio-pci\n"
    assert kernel.write(path, "\n") == 0, "a newline clears it"
    assert kernel.tree.read(path) == "(null)\n"
    assert heard.events == []


def test_a_probe_can_succeed_and_bind_nothing(kernel: Kernel) -> None:
    kernel.unbind(GPU)
    kernel.override(GPU, "no-such-driver")
    assert kernel.probe(GPU) == 0
    assert kernel.driver_of(GPU) is None
    kernel.override(GPU, None)
    kernel.bind_nothing(GPU)
    assert kernel.probe(GPU) == kernel.bind(GPU, "xe") == 0
    assert kernel.driver_of(GPU) is None
    kernel.heal()
    assert kernel.probe(GPU) == 0
    assert kernel.driver_of(GPU) == "xe"


def test_a_probe_tries_the_next_driver_when_one_fails(kernel: Kernel) -> None:
    kernel.unbind(GPU)
    kernel.fail_probe(GPU, errno.EIO)
    assert kernel.probe(GPU) == 0
    assert kernel.driver_of(GPU) is None
    assert kernel.bind(GPU, "xe") == errno.EIO


def test_new_id_takes_every_free_function_of_that_id(kernel: Kernel) -> None:
    """Why the agent never writes it: it reaches further than the one function that is meant."""
    kernel.plug(*arc_b50("0000:08:00.0"), *arc_b60("0000:0d:00.0"))
    for address in (GPU, "0000:08:00.0", "0000:0d:00.0"):
        kernel.unbind(address)
    assert kernel.write(f"{PCI}/drivers/vfio-pci/new_id", "8086 e212") == 0
    assert kernel.driver_of(GPU) == kernel.driver_of("0000:08:00.0") == "vfio-pci"
    assert kernel.driver_of("0000:0d:00.0") is None
    assert kernel.write(f"{PCI}/drivers/vfio-pci/new_id", "8086 e212") == errno.EEXIST


def test_remove_and_rescan_find_the_same_function_in_another_folder(kernel: Kernel) -> None:
    """Another inode, so that a function that came back is not taken for the one that went."""
    folder = kernel.root / "sys/bus/pci/devices" / GPU
    seen = {folder.stat().st_ino}
    for _ in range(8):
        assert kernel.write(of_function("remove"), "1") == 0
        assert not folder.exists()
        assert kernel.write(f"{PCI}/rescan", "1") == 0
        assert folder.stat().st_ino not in seen
        seen.add(folder.stat().st_ino)


def test_what_was_unplugged_is_not_found_by_a_rescan(kernel: Kernel) -> None:
    kernel.unplug(GPU)
    kernel.write(f"{PCI}/rescan", "1")
    assert GPU not in kernel.functions


def test_removing_a_bridge_removes_what_is_below_it_first(kernel: Kernel, heard: Recorder) -> None:
    heard.events.clear()
    assert kernel.write(f"{PCI}/devices/0000:01:00.0/remove", "1") == 0
    assert [event for event in heard.of(Source.KERNEL) if event.startswith("remove pci")] == [
        "remove pci 0000:03:00.0",
        "remove pci 0000:02:01.0",
        "remove pci 0000:01:00.0",
    ]
    kernel.write(f"{PCI}/rescan", "1")
    assert kernel.driver_of(GPU) == "xe"


def test_autoprobe_off_leaves_what_comes_without_a_driver(kernel: Kernel) -> None:
    kernel.write(f"{PCI}/drivers_autoprobe", "0")
    kernel.udev = kernel.udev.OFF
    kernel.plug(*arc_b60())
    assert kernel.driver_of("0000:07:00.0") is None


def test_a_trigger_repeats_the_message(kernel: Kernel, heard: Recorder) -> None:
    heard.events.clear()
    assert kernel.write("/sys/class/drm/card0/uevent", "change") == 0
    assert heard.of(Source.KERNEL) == heard.of(Source.UDEV) == ["change drm card0"]


def test_vfs_follow_their_pf_over_the_borders_of_slots(kernel: Kernel) -> None:
    kernel.plug(*flex_170())
    pf = "0000:4d:00.0"
    assert kernel.create_vfs(pf, 9) == 0
    vfs = [address for address in kernel.functions if address.startswith("0000:4d:")][1:]
    assert vfs[0] == "0000:4d:00.1"
    assert vfs[6:] == ["0000:4d:00.7", "0000:4d:01.0", "0000:4d:01.1"]
    folder = kernel.root / "sys/bus/pci/devices"
    assert (folder / pf / "virtfn7").resolve() == (folder / "0000:4d:01.0").resolve()
    assert (folder / "0000:4d:01.0/physfn").resolve() == (folder / pf).resolve()
    assert kernel.tree.read(f"{PCI}/devices/{pf}/sriov_numvfs") == "9\n"
    assert kernel.remove_vfs(pf) == 0
    assert not list((folder / pf).glob("virtfn*"))
    assert all(not address.startswith("0000:4d:01") for address in kernel.functions)


def test_vfs_go_with_the_driver_of_their_pf(kernel: Kernel) -> None:
    kernel.create_vfs(GPU, 2)
    kernel.unbind(GPU)
    assert "0000:03:00.1" not in kernel.functions


def test_injected_failures_match_paths_and_end(kernel: Kernel) -> None:
    kernel.fail("*/drivers/xe/unbind", errno.EIO, times=2)
    assert [kernel.unbind(GPU) for _ in range(3)] == [errno.EIO, errno.EIO, 0]
    kernel.fail("*", errno.EPERM)
    assert kernel.bind(GPU, "xe") == errno.EPERM
    kernel.heal()
    assert kernel.bind(GPU, "xe") == 0


def test_moving_by_hand_there_and_back_twice(kernel: Kernel) -> None:
    for _ in range(2):
        assert kernel.move(GPU, "vfio-pci") == 0
        assert kernel.driver_of(GPU) == "vfio-pci"
        assert kernel.move(GPU, "xe") == 0
        assert kernel.driver_of(GPU) == "xe"


def test_two_functions_of_a_slot_share_group_and_another_card_does_not(kernel: Kernel) -> None:
    kernel.plug(*two_functions(), *network_card())
    groups = kernel.root / "sys/kernel/iommu_groups"
    link = kernel.root / "sys/bus/pci/devices/0000:05:00.0/iommu_group"
    members = sorted(entry.name for entry in (groups / link.resolve().name / "devices").iterdir())
    assert members == ["0000:05:00.0", "0000:05:00.1"]
