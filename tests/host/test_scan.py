"""What a look finds: one function after the other, and the host around them."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from agent.errors import LookError
from agent.host import sysfs
from agent.host.devnodes import NodeStat, file_system, lstat_node, node_path
from agent.host.hints import EVERYTHING, NOTHING, Scope
from agent.host.model import (
    Address,
    DeviceNumber,
    Environment,
    Function,
    Inventory,
    Link,
    Node,
    NodeRole,
    NodeState,
)
from agent.host.scan import Scanner
from tests.host.tree import Host, stat_node

GPU = "0000:03:00.0"
AUDIO = "0000:04:00.0"
OTHER = "0000:09:00.0"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with one Arc B50, its sound and the bridge above both."""
    host = Host(tmp_path)
    host.add("0000:00:01.0", ids="8086:7ecc", class_code=0x060400, group=1)
    host.add(GPU, group=16, bridges=("0000:00:01.0",))
    host.bind(GPU, "xe", "card0", "renderD128")
    host.add(AUDIO, ids="8086:e2f7", class_code=0x040300, group=17, bridges=("0000:00:01.0",))
    host.bind(AUDIO, "snd_hda_intel")
    host.hints.clear()
    return host


def look(host: Host, *extra_nodes: str) -> Inventory:
    return host.scanner(*extra_nodes).scan(EVERYTHING, Inventory())


def gpu(host: Host) -> Function:
    return look(host).functions[Address(GPU)]


def node(role: NodeRole, name: str, path: str, major: int, minor: int) -> Node:
    return Node(role, name, path, DeviceNumber(major, minor), NodeState.PRESENT, settled=True)


CARD = node(NodeRole.CARD, "card0", "/dev/dri/card0", 226, 0)
RENDER = node(NodeRole.RENDER, "renderD128", "/dev/dri/renderD128", 226, 128)


def test_a_look_tells_all_of_a_gpu(host: Host) -> None:
    inventory = look(host)
    assert list(inventory.functions) == ["0000:00:01.0", GPU, AUDIO]
    assert inventory.functions[Address(GPU)] == Function(
        address=Address(GPU),
        devpath=f"/devices/pci0000:00/0000:00:01.0/{GPU}",
        vendor=0x8086,
        device=0xE212,
        class_code=0x030000,
        subsystem_vendor=0x8086,
        subsystem_device=0x1100,
        revision=0,
        driver="xe",
        boot_vga=True,
        numa_node=None,
        pcie_root="pci0000:00",
        iommu_group=16,
        nodes=(CARD, RENDER),
        links=(
            Link(f"/dev/dri/by-path/pci-{GPU}-card", "/dev/dri/card0"),
            Link(f"/dev/dri/by-path/pci-{GPU}-render", "/dev/dri/renderD128"),
        ),
        inode=os.stat(host.sys(GPU)).st_ino,
    )
    assert inventory.functions[Address(AUDIO)].boot_vga is None
    assert inventory.environment == Environment(iommu=True)
    assert not inventory.dropped


def test_a_function_without_driver_or_nodes_is_a_function(host: Host) -> None:
    host.unbind(GPU)
    assert gpu(host).driver is None
    assert gpu(host).nodes == ()


def test_a_function_that_names_no_builder_has_none(host: Host) -> None:
    """The kernel shows zeros where a bridge names none."""
    for name in ("subsystem_vendor", "subsystem_device"):
        host.sys(GPU, name).write_text("0x0000\n")
    assert (gpu(host).subsystem_vendor, gpu(host).subsystem_device) == (None, None)


def test_a_pf_and_its_vfs_know_each_other(host: Host) -> None:
    vfs = [f"0000:03:00.{number}" for number in range(1, 4)]
    for vf in vfs:
        host.add(vf, pf=GPU, bridges=("0000:00:01.0",))
    inventory = look(host)
    assert inventory.functions[Address(GPU)].virtfns == tuple(vfs)
    assert {inventory.functions[Address(vf)].physfn for vf in vfs} == {GPU}
    assert inventory.functions[Address(GPU)].physfn is None


def test_virtfns_are_sorted_as_people_count(host: Host) -> None:
    vfs = [f"0000:03:{number // 8:02x}.{number % 8}" for number in range(1, 13)]
    for vf in vfs:
        host.add(vf, pf=GPU)
    assert gpu(host).virtfns == tuple(vfs)


def test_a_vfio_function_has_the_node_of_its_group_and_its_own(host: Host) -> None:
    host.unbind(GPU)
    host.bind(GPU, "vfio-pci", "vfio0")
    host.add_group_node(16)
    assert gpu(host).on_vfio
    assert gpu(host).nodes == (
        node(NodeRole.VFIO_GROUP, "16", "/dev/vfio/16", 511, 16),
        node(NodeRole.VFIO_CDEV, "vfio0", "/dev/vfio/devices/vfio0", 510, 0),
    )


def test_a_group_on_vfio_gives_its_node_to_no_function_on_its_own_driver(host: Host) -> None:
    host.add_group_node(16)
    assert gpu(host).nodes == (CARD, RENDER)


def test_a_kernel_without_cdevs_has_vfio_dev_and_no_node_there(host: Host) -> None:
    host.unbind(GPU)
    host.bind(GPU, "xe-vfio-pci")
    (host.sys(GPU) / "vfio-dev/vfio0").mkdir(parents=True)
    assert gpu(host).has_vfio_dev
    assert gpu(host).nodes == ()


@pytest.mark.parametrize(
    ("below", "name", "role"),
    [
        ("/virtio0", "card3", NodeRole.CARD),
        ("/nova_core.nova-drm.0", "renderD131", NodeRole.RENDER),
        ("/xe.mei-gscfi.768", "mei1", NodeRole.MEI),
        ("", "accel0", NodeRole.ACCEL),
    ],
)
def test_a_node_below_the_device_that_the_driver_makes_is_the_functions(
    host: Host, below: str, name: str, role: NodeRole
) -> None:
    host.unbind(GPU)
    host.add_node(GPU, name, below=below)
    (found,) = gpu(host).nodes
    assert (found.role, found.name, found.counts) == (role, name, True)
    assert look(host).orphans == ()


def test_what_is_no_node_is_none(host: Host) -> None:
    for name in ("controlD64", "card0-DP-1", "version", "card", "cardX"):
        host.write(f"sys{host.functions[GPU].devpath}/drm/{name}/dev", "226:64\n")
    host.write(f"sys{host.functions[GPU].devpath}/drm/card7/dev", "226:7\n")
    host.write(f"sys{host.functions[GPU].devpath}/drm/card7/uevent", "DEVTYPE=drm_connector\n")
    host.write(f"sys{host.functions[GPU].devpath}/mei/mei0/dev", "240:0\n")
    assert gpu(host).nodes == (CARD, RENDER)


def test_card10_comes_after_card2_and_cards_before_render_nodes(host: Host) -> None:
    host.unbind(GPU)
    host.bind(GPU, "xe", "renderD129", "card10", "renderD128", "card2")
    names = [node.name for node in gpu(host).nodes]
    assert names == ["card2", "card10", "renderD128", "renderD129"]


def test_functions_are_sorted_by_the_value_of_the_domain(host: Host) -> None:
    for address in ("10000:e1:00.0", "0001:00:00.0", "ffffffff:00:00.0", "0000:ff:00.0"):
        host.add(address)
    assert list(look(host).functions) == [
        "0000:00:01.0",
        GPU,
        AUDIO,
        "0000:ff:00.0",
        "0001:00:00.0",
        "10000:e1:00.0",
        "ffffffff:00:00.0",
    ]


# --- nodes and links ------------------------------------------------------------------------------


def unsettle(host: Host) -> None:
    host.unlink("run/udev/data/c226:0")


def take_away(host: Host) -> None:
    host.unlink("dev/dri/card0")


def put_a_link(host: Host) -> None:
    host.unlink("dev/dri/card0")
    host.link("dev/dri/card0", "dev/dri/renderD128")


def renumber(host: Host) -> None:
    host.write("dev/dri/card0", "226:1")


def put_a_file(host: Host) -> None:
    host.write("dev/dri/card0", "not a node")


def put_a_folder(host: Host) -> None:
    host.unlink("dev/dri/card0")
    (host.root / "dev/dri/card0").mkdir()


@pytest.mark.parametrize(
    ("change", "state", "settled"),
    [
        (unsettle, NodeState.PRESENT, False),
        (take_away, NodeState.MISSING, True),
        (renumber, NodeState.MISMATCH, True),
        (put_a_file, NodeState.MISMATCH, True),
        (put_a_folder, NodeState.UNREADABLE, True),
    ],
)
def test_a_node_is_what_dev_and_udev_say(
    host: Host,
    change: Callable[[Host], None],
    state: NodeState,
    settled: bool,  # noqa: FBT001 - a column of the table
) -> None:
    change(host)
    assert gpu(host).nodes == (structs.replace(CARD, state=state, settled=settled), RENDER)
    assert not look(host).dropped


def test_lstat_node_tells_a_character_device_from_all_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "fifo")
    assert lstat_node("/dev/null") == NodeStat(DeviceNumber(1, 3))
    for name in ("file", "link", "fifo"):
        assert lstat_node(str(tmp_path / name)) == NodeStat(None)
    assert lstat_node(str(tmp_path / "nothing")) is None
    assert lstat_node(str(tmp_path / "file/below")) is None


@pytest.mark.parametrize(
    ("devname", "path"),
    [
        ("dri/card0", "/dev/dri/card0"),
        ("/dev/dri/card0", "/dev/dri/card0"),
        ("gpu/first", "/dev/gpu/first"),
        ("", "/dev/dri/card0"),
        ("../etc/shadow", "/dev/dri/card0"),
        ("/etc/shadow", "/dev/dri/card0"),
        ("dri//card0", "/dev/dri/card0"),
        ("dri/./card0", "/dev/dri/card0"),
        ("dri/\x1b[31m", "/dev/dri/card0"),
        ("dri/\udcff", "/dev/dri/card0"),
    ],
)
def test_devname_decides_the_path_if_it_stays_below_dev(devname: str, path: str) -> None:
    assert node_path(NodeRole.CARD, "card0", {"DEVNAME": devname}) == path


def test_links_follow_the_node_that_they_lead_to(host: Host) -> None:
    """A link that still bears the address of another function is not that function's."""
    host.add(OTHER)
    host.bind(OTHER, "xe", "card1", by_path=False)
    host.link(f"dev/dri/by-path/pci-{GPU}-card", "dev/dri/card1")
    host.link("dev/dri/by-path/pci-0000:0a:00.0-card", "dev/dri/card9")
    (host.root / "dev/dri/by-path/loop").symlink_to("loop")
    (host.root / "dev/dri/by-path/out").symlink_to("../../../etc/passwd")
    (host.root / "dev/dri/by-path/file").touch()
    (host.root / os.fsdecode(b"dev/dri/by-path/\xff")).symlink_to("../card0")
    functions = look(host).functions
    assert functions[Address(GPU)].links == (
        Link(f"/dev/dri/by-path/pci-{GPU}-render", "/dev/dri/renderD128"),
    )
    assert functions[Address(OTHER)].links == (
        Link(f"/dev/dri/by-path/pci-{GPU}-card", "/dev/dri/card1"),
    )


def test_accel_nodes_have_links_too(host: Host) -> None:
    host.add_node(GPU, "accel0")
    host.link(f"dev/accel/by-path/pci-{GPU}-accel", "dev/accel/accel0")
    link = Link(f"/dev/accel/by-path/pci-{GPU}-accel", "/dev/accel/accel0")
    assert link in gpu(host).links


def test_links_that_cannot_have_changed_are_not_read_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at one of 512 GPUs must not read the links of all; a change is seen all the same."""
    scope = Scope(addresses=frozenset({Address(GPU)}))
    folder = host.root / "dev/dri/by-path"
    os.utime(folder, (1, 1))
    scanner = host.scanner()
    before = scanner.scan(EVERYTHING, Inventory())
    listed: list[str] = []

    def links(path: str) -> dict[str, str]:
        listed.append(path)
        return real_links(path)

    real_links = sysfs.links
    monkeypatch.setattr("agent.host.sysfs.links", links)
    assert scanner.scan(scope, before) == before
    assert str(folder) not in listed
    # As udev does it: beside, then in place of the old one.
    host.link("dev/dri/by-path/.#new", "dev/dri/card9")
    (folder / ".#new").rename(folder / f"pci-{GPU}-card")
    after = scanner.scan(scope, before)
    assert str(folder) in listed
    assert after == look(host)
    assert len(after.functions[Address(GPU)].links) == 1


def test_a_folder_of_links_that_changed_just_now_is_read_again(host: Host) -> None:
    """Two changes within one tick of the clock leave one time."""
    scanner = host.scanner()
    folder = host.root / "dev/dri/by-path"
    stamp = (time.time() + 3600,) * 2  # an hour ahead: new for as long as this test can take
    os.utime(folder, stamp)
    before = scanner.scan(EVERYTHING, Inventory())
    host.unlink(f"dev/dri/by-path/pci-{GPU}-card")
    os.utime(folder, stamp)
    after = scanner.scan(Scope(addresses=frozenset({Address(GPU)})), before)
    assert after == look(host)
    assert len(after.functions[Address(GPU)].links) == 1


# --- around the functions -------------------------------------------------------------------------


def test_shared_nodes_are_known_by_path_and_checked_by_number(host: Host) -> None:
    host.shared("kfd", "238:0", "virtual/kfd/kfd")
    host.shared("vfio/vfio", "10:196", "virtual/misc/vfio")
    host.write("sys/devices/virtual/misc/vfio/uevent", "")  # no DEVNAME: the entry's own name
    host.shared("snd/seq", "116:1", "virtual/sound/seq")
    host.write("dev/net/tun", "10:200")  # older than its device
    host.write("dev/mine", "238:0")  # somebody else's number
    host.write("dev/text", "no node")
    shared = look(host, "/dev/snd/seq", "/dev/net/tun", "/dev/mine", "/dev/text").shared
    assert {path: node.state for path, node in shared.items()} == {
        "/dev/kfd": NodeState.PRESENT,
        "/dev/mine": NodeState.MISMATCH,
        "/dev/snd/seq": NodeState.PRESENT,
        "/dev/text": NodeState.MISMATCH,
        "/dev/vfio/vfio": NodeState.MISMATCH,
    }
    assert shared["/dev/kfd"] == node(NodeRole.EXTRA, "kfd", "/dev/kfd", 238, 0)


def test_nodes_of_no_function_are_orphans_with_their_driver(host: Host) -> None:
    host.add_orphan("card2")
    host.add_orphan("renderD130")
    host.add_orphan("card1", "/devices/platform/simple-framebuffer.0")
    host.link(
        "sys/devices/platform/simple-framebuffer.0/driver",
        "sys/bus/platform/drivers/simple-framebuffer",
    )
    orphans = look(host).orphans
    assert [(orphan.node.name, orphan.driver) for orphan in orphans] == [
        ("card1", "simple-framebuffer"),
        ("card2", None),
        ("renderD130", None),
    ]
    assert orphans[1].devpath == "/devices/platform/vkms/drm/card2"
    assert gpu(host).nodes == (CARD, RENDER)


def test_simpledrms_card_below_the_gpu_is_not_the_gpus(host: Host) -> None:
    """Since Linux 6.10 the firmware's framebuffer is a child of the GPU that it is on."""
    place = f"{host.functions[GPU].devpath}/simple-framebuffer.0"
    host.add_orphan("card1", place)
    assert gpu(host).nodes == (CARD, RENDER)
    assert [orphan.node.name for orphan in look(host).orphans] == ["card1"]


def test_the_environment_is_what_run_and_proc_say(host: Host) -> None:
    host.unlink("run/udev/control")
    host.write("run/udev/queue", "")
    host.write("proc/self/mountinfo", f"1 0 0:9 / {host.root}/dev rw - tmpfs tmpfs rw\n")
    for address in (GPU, AUDIO, "0000:00:01.0"):
        host.move_to_group(address, None)
    assert look(host).environment == Environment(
        devtmpfs=False, udevd=False, udev_queue=True, iommu=False
    )


MOUNTS = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
24 27 0:6 / /dev rw,relatime shared:2 master:1 - devtmpfs devtmpfs rw,size=4k
25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw
27 1 254:0 / / rw - ext4 /dev/vda rw
28 27 0:6 / /host/dev rw - devtmpfs devtmpfs rw
29 27 0:30 / /dev\040two rw - tmpfs tmpfs rw
30 27 0:6 / /twice rw - devtmpfs devtmpfs rw
31 30 0:31 / /twice rw - tmpfs tmpfs rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/dev", "devtmpfs"),
        ("/dev/shm", "tmpfs"),
        ("/device", "ext4"),
        ("/host/dev", "devtmpfs"),
        ("/dev two", "tmpfs"),
        ("/twice", "tmpfs"),
        ("/", "ext4"),
    ],
)
def test_a_path_is_on_the_file_system_of_the_nearest_and_latest_mount(path: str, kind: str) -> None:
    assert file_system(MOUNTS, path) == kind


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: None])
def test_a_proc_that_is_none_is_no_devtmpfs(host: Host, put: Callable[[Path], None]) -> None:
    host.unlink("proc/self/mountinfo")
    put(host.root / "proc/self/mountinfo")
    assert not look(host).environment.devtmpfs


@pytest.mark.parametrize("mounts", ["", "\x00\udcff", " - ", "1 2 3 4 - devtmpfs"])
def test_a_list_of_mounts_that_says_nothing_is_no_devtmpfs(mounts: str) -> None:
    assert file_system(mounts, "/dev") is None


def test_nothing_is_opened_that_a_lock_could_hold_back(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung unbind holds the device's lock, and whoever reads driver_override waits for ever."""
    for name in ("driver_override", "sriov_numvfs", "config", "uevent", "power_state", "reset"):
        os.mkfifo(host.sys(GPU, name))
    opened: set[str] = set()
    real_open = os.open

    def spy(path: str, flags: int, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:  # what is in the folder of a function
            opened.add(path)
        return real_open(path, flags, dir_fd=dir_fd)

    monkeypatch.setattr("agent.host.sysfs.os.open", spy)
    assert GPU in look(host).functions
    assert opened == {
        *("vendor", "device", "class", "subsystem_vendor", "subsystem_device", "revision"),
        *("boot_vga", "numa_node"),
        *("drm", "drm/card0/dev", "drm/card0/uevent", "drm/renderD128/dev"),
        "drm/renderD128/uevent",
    }


def test_this_machine_can_be_looked_at() -> None:
    """Against the real /sys, whatever is there: all or nothing of it is in the inventory."""
    listed = sysfs.names("/sys/bus/pci/devices") or []
    inventory = Scanner().scan(EVERYTHING, Inventory())
    assert set(inventory.functions) | set(inventory.dropped) == set(listed)
    again = Scanner().scan(Scope(addresses=frozenset(inventory.functions)), inventory)
    assert again == inventory


# --- mishaps --------------------------------------------------------------------------------------


def test_a_machine_without_pci_has_no_functions(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    assert Scanner(sys=tmp_path).scan(EVERYTHING, Inventory()).functions == {}


def test_an_empty_folder_is_not_a_host_without_devices(tmp_path: Path) -> None:
    with pytest.raises(LookError, match="is not sysfs"):
        Scanner(sys=tmp_path).scan(EVERYTHING, Inventory())


def test_a_group_that_cannot_be_listed_costs_no_look(host: Host) -> None:
    scanner = host.scanner()
    before = scanner.scan(EVERYTHING, Inventory())
    group = before.functions[Address(GPU)].iommu_group
    members = host.root / f"sys/kernel/iommu_groups/{group}/devices"
    shutil.rmtree(members)
    members.write_text("no folder")
    assert scanner.scan(Scope(addresses=frozenset({Address(GPU)})), before) == before


def test_a_process_out_of_descriptors_does_not_report_missing_devices(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanner = host.scanner()
    before = scanner.scan(EVERYTHING, Inventory())

    def too_many(*_: object, **__: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("agent.host.sysfs.os.open", too_many)
        for scope in (EVERYTHING, Scope(addresses=frozenset({Address(GPU)}))):
            with pytest.raises(LookError, match="Too many open files"):
                scanner.scan(scope, before)
    assert scanner.scan(NOTHING, before) == before


def test_what_a_failed_look_has_seen_is_seen_by_the_next(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that changed just before is news for the look that succeeds."""
    scanner = host.scanner()
    before = scanner.scan(EVERYTHING, Inventory())
    host.unlink(f"dev/dri/by-path/pci-{GPU}-card")

    def no_memory(_address: Address) -> Function:
        raise LookError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(scanner._functions, "read", no_memory)  # noqa: SLF001 - fails once, and late
        with pytest.raises(LookError, match="no memory"):
            scanner.scan(Scope(addresses=frozenset({Address(AUDIO)})), before)
    assert scanner.scan(NOTHING, before) == look(host) != before


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def elsewhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/sys/kernel/ostype")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def gone(path: Path) -> None:
    path.unlink()


def text(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.unlink()
        path.write_bytes(content)

    return write


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        pytest.param("vendor", text(b"0x80_86\n"), "vendor makes no sense: '0x80_86\\n'", id="_"),
        pytest.param("device", text(b"\xff\x00"), r"device makes no sense: '\udcff\x00'", id="odd"),
        pytest.param("class", text(b"0x0 " * 2**20), "class is longer than a page", id="huge"),
        pytest.param("class", text(b""), "class makes no sense: ''", id="empty"),
        pytest.param("class", gone, "it has no class", id="gone"),
        pytest.param("vendor", fifo, "vendor makes no sense: ''", id="fifo"),
        pytest.param("revision", loop, "revision: Too many levels", id="loop"),
        pytest.param("revision", elsewhere, "revision: Too many levels", id="link"),
        pytest.param("numa_node", text(b"many"), "numa_node makes no sense: 'many'", id="word"),
        pytest.param("boot_vga", folder, "boot_vga: Is a directory", id="folder"),
        pytest.param("driver", text(b"xe"), "driver is not a link", id="driver"),
        pytest.param(
            "drm/card0/dev", text(b"226"), "drm/card0/dev makes no sense: '226'", id="dev"
        ),
        pytest.param("drm/card0/dev", fifo, "drm/card0/dev makes no sense", id="dev-fifo"),
        pytest.param("drm/card0/uevent", text(b"x" * 5000), "is longer than a page", id="uevent"),
    ],
)
def test_what_cannot_be_read_costs_its_function_and_says_why(
    host: Host, name: str, spoil: Callable[[Path], None], reason: str
) -> None:
    spoil(host.sys(GPU, name))
    inventory = look(host)
    assert list(inventory.functions) == ["0000:00:01.0", AUDIO]
    assert list(inventory.dropped) == [GPU]
    assert reason in inventory.dropped[Address(GPU)]


@pytest.mark.parametrize(
    ("name", "target", "reason"),
    [
        ("iommu_group", "sys/kernel/iommu_groups/none", "its IOMMU group is called none"),
        ("physfn", "sys/devices/thing", "its PF is called thing"),
    ],
)
def test_a_link_to_nonsense_costs_its_function(
    host: Host, name: str, target: str, reason: str
) -> None:
    host.link(f"sys{host.functions[GPU].devpath}/{name}", target)
    assert look(host).dropped == {GPU: reason}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (folder, "its entry is not a link"),
        (loop, f"its entry leads to {GPU}"),
        (lambda path: (path.unlink(), path.symlink_to("/etc")), "its entry leads to /etc"),
        (
            lambda path: (path.unlink(), path.symlink_to("../../../devices/x/0000:04:00.0")),
            "its entry leads to ../../../devices/x/0000:04:00.0",
        ),
    ],
    ids=["folder", "loop", "out", "other"],
)
def test_an_entry_that_leads_elsewhere_costs_its_function(
    host: Host, spoil: Callable[[Path], object], reason: str
) -> None:
    spoil(host.root / f"sys/bus/pci/devices/{GPU}")
    assert look(host).dropped == {GPU: reason}


def test_a_dangling_entry_is_a_function_that_vanished(host: Host) -> None:
    (host.root / "sys/bus/pci/devices/0000:0f:00.0").symlink_to("../../../devices/0000:0f:00.0")
    assert not look(host).dropped


def test_names_that_are_no_addresses_are_no_functions(host: Host) -> None:
    for name in ("0000:03:00.8", "000:03:00.0", "0000:03:00", ".", os.fsdecode(b"\xff")):
        if name != ".":
            (host.root / "sys/bus/pci/devices" / name).symlink_to("../../../devices")
    assert list(look(host).functions) == ["0000:00:01.0", GPU, AUDIO]
    assert not look(host).dropped


def test_a_driver_with_an_odd_name_is_spelt_out(host: Host) -> None:
    host.unlink(f"sys{host.functions[GPU].devpath}/driver")
    (host.sys(GPU) / "driver").symlink_to(os.fsdecode(b"../drivers/x\xffe\x1b"))
    assert gpu(host).driver == r"x\udcffe\x1b"


# --- races ----------------------------------------------------------------------------------------


class Meddler:
    """Changes the host at the moment at which a node is looked at."""

    def __init__(self, host: Host, act: Callable[[], None], times: int) -> None:
        self.host = host
        self.act = act
        self.left = times

    def __call__(self, path: str, /) -> NodeStat | None:
        """Look at a node, after meddling."""
        if self.left and "/dri/" in path:
            self.left -= 1
            self.act()
        return stat_node(path)

    def look(self) -> Inventory:
        """A full look while this meddles."""
        root = self.host.root
        return Scanner(
            sys=root / "sys",
            dev=root / "dev",
            run=root / "run",
            proc=root / "proc",
            stat_node=self,
        ).scan(EVERYTHING, Inventory())


def test_a_function_that_changes_while_it_is_read_is_read_again(host: Host) -> None:
    def rebind() -> None:
        host.unbind(GPU)
        host.bind(GPU, "xe", "card3", "renderD131")

    inventory = Meddler(host, rebind, 1).look()
    assert [node.name for node in inventory.functions[Address(GPU)].nodes] == [
        "card3",
        "renderD131",
    ]


def test_a_driver_that_changes_with_no_node_to_show_it_is_seen(host: Host) -> None:
    def rename() -> None:
        host.link(f"sys{host.functions[GPU].devpath}/driver", "sys/bus/pci/drivers/i915")

    assert Meddler(host, rename, 1).look().functions[Address(GPU)].driver == "i915"


def test_a_function_that_never_holds_still_is_dropped_for_this_look(host: Host) -> None:
    numbers = iter(range(1, 1000))

    def renumber() -> None:
        host.write(f"sys{host.functions[GPU].devpath}/drm/card0/dev", f"226:{next(numbers)}\n")

    inventory = Meddler(host, renumber, 1000).look()
    assert inventory.dropped == {GPU: "keeps changing while it is read"}
    assert AUDIO in inventory.functions


def test_a_function_that_vanishes_while_it_is_read_is_absent(host: Host) -> None:
    inventory = Meddler(host, lambda: host.remove(GPU), 1).look()
    assert list(inventory.functions) == ["0000:00:01.0", AUDIO]
    assert not inventory.dropped


def test_a_card_that_moves_on_during_a_look_is_not_left_with_both(host: Host) -> None:
    """The first function was read with card0; the second is read once it has card0."""
    host.add(OTHER)
    host.bind(OTHER, "xe", "card1")

    def swap() -> None:
        if host.functions[OTHER].driver == "xe" and "card1" in host.functions[OTHER].nodes:
            host.unbind(GPU)
            host.unbind(OTHER)
            host.bind(OTHER, "xe", "card0")
            host.bind(GPU, "xe", "card1")

    # card0 and renderD128 of the first function, then card1 of the second.
    calls = iter(range(100))
    inventory = Meddler(host, lambda: swap() if next(calls) == 2 else None, 100).look()
    names = {a: [n.name for n in f.nodes] for a, f in inventory.functions.items() if f.nodes}
    assert names == {GPU: ["card1"], OTHER: ["card0"]}


def test_a_card_that_has_moved_is_taken_from_its_old_owner_at_once(host: Host) -> None:
    """What says that the old owner lost it may still be on its way, and no link tells."""
    host.add(OTHER)
    host.unbind(GPU)
    host.bind(GPU, "xe", "card0", by_path=False)
    scanner = host.scanner()
    before = scanner.scan(EVERYTHING, Inventory())
    host.unbind(GPU)
    host.bind(OTHER, "xe", "card0", by_path=False)
    after = scanner.scan(Scope(addresses=frozenset({Address(OTHER)})), before)
    assert [n.name for n in after.functions[Address(OTHER)].nodes] == ["card0"]
    assert after.functions[Address(GPU)].nodes == ()


def test_two_functions_that_keep_claiming_one_card_are_both_reported(host: Host) -> None:
    """Nobody guesses whose it is; who publishes sees the conflict."""
    host.add(OTHER)
    host.bind(OTHER, "xe", "card0")
    inventory = look(host)
    assert inventory.functions[Address(GPU)].nodes[0].path == "/dev/dri/card0"
    assert inventory.functions[Address(OTHER)].nodes[0].path == "/dev/dri/card0"


def test_a_dropped_function_is_tried_again_in_the_next_look_of_any_scope(host: Host) -> None:
    scanner = host.scanner()
    host.write(f"sys{host.functions[GPU].devpath}/class", "nonsense")
    before = scanner.scan(EVERYTHING, Inventory())
    assert GPU in before.dropped
    host.write(f"sys{host.functions[GPU].devpath}/class", "0x030000\n")
    after = scanner.scan(Scope(addresses=frozenset({Address(AUDIO)})), before)
    assert GPU in after.functions
    assert not after.dropped


def test_a_scanner_that_knows_nothing_yet_can_make_a_partial_look(host: Host) -> None:
    """After a reload a new scanner goes on with the inventory of the old one."""
    before = look(host)
    assert host.scanner().scan(Scope(addresses=frozenset({Address(GPU)})), before) == before
