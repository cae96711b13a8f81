"""Who else moves devices: driverctl and libvirt, whatever lies in their folders."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from agent.host.model import Address
from agent.vfio.managed import managers, passed_through

GPU: Final = Address("0000:03:00.0")
OTHER: Final = Address("10000:c1:1f.7")

# As libvirt 9 writes it, shortened: the machine's own address stands beside <source>.
STATE: Final = """<?xml version='1.0'?>
<!-- WARNING: THIS IS AN AUTO-GENERATED FILE. -->
<domstatus state='running' reason='booted' pid='4711'>
  <domain type='kvm' id='1'>
    <name>win11</name>
    <devices>
      <controller type='pci' index='0' model='pcie-root'/>
      <disk type='file' device='disk'>
        <source file='/var/lib/libvirt/images/win11.qcow2' index='1'/>
        <address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>
      </disk>
      <hostdev mode='subsystem' type='pci' managed='yes'>
        <driver name='vfio'/>
        <source>
          <address domain='0x0000' bus='0x03' slot='0x00' function='0x0'/>
        </source>
        <alias name='hostdev0'/>
        <address type='pci' domain='0x0000' bus='0x05' slot='0x00' function='0x0'/>
      </hostdev>
      <interface type='hostdev'>
        <source>
          <address type='pci' domain='0x10000' bus='0xc1' slot='0x1f' function='0x7'/>
        </source>
      </interface>
      <hostdev mode='subsystem' type='usb'>
        <source><vendor id='0x1234'/><address bus='3' device='2'/></source>
      </hostdev>
    </devices>
  </domain>
</domstatus>
"""


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    return tmp_path / "etc"


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    path = tmp_path / "run/libvirt/qemu"
    path.mkdir(parents=True)
    return path


def found(root: Path, *addresses: Address) -> tuple[tuple[Address, str], ...]:
    return managers(addresses, etc=str(root / "etc"), run=str(root / "run"), sys=str(root / "sys"))


def test_a_host_with_neither_has_no_manager(tmp_path: Path) -> None:
    assert found(tmp_path, GPU) == ()


def test_driverctl_has_a_file_for_each_device(tmp_path: Path, etc: Path) -> None:
    (etc / "driverctl.d").mkdir(parents=True)
    (etc / "driverctl.d/pci-0000:03:00.0").write_text("vfio-pci\n")
    assert found(tmp_path, OTHER, GPU) == ((GPU, "driverctl"),)


def test_a_link_of_driverctl_is_one_wherever_it_leads(tmp_path: Path, etc: Path) -> None:
    """What it says may lie on a file system that is not there (yet)."""
    (etc / "driverctl.d").mkdir(parents=True)
    (etc / "driverctl.d/pci-0000:03:00.0").symlink_to("/nowhere")
    assert found(tmp_path, OTHER, GPU) == ((GPU, "driverctl"),)


def test_what_is_no_folder_has_no_machines(tmp_path: Path) -> None:
    (tmp_path / "run/libvirt").mkdir(parents=True)
    (tmp_path / "run/libvirt/qemu").touch()
    assert found(tmp_path, GPU) == ()


def test_libvirt_names_what_its_machines_are_given(tmp_path: Path, machines: Path) -> None:
    """And neither where that stands in the machine, nor USB devices, nor other folders' files."""
    (machines / "win11.xml").write_text(STATE)
    (machines / "win11.pid").write_text("4711")
    assert found(tmp_path, GPU, Address("0000:05:00.0"), Address("0000:04:00.0"), OTHER) == (
        (GPU, "libvirt for the virtual machine win11"),
        (OTHER, "libvirt for the virtual machine win11"),
    )
    assert passed_through(STATE.encode()) == {GPU, OTHER}


BOMB: Final = (
    "<!DOCTYPE d [<!ENTITY a 'x'>"
    + "".join(f"<!ENTITY b{n} '{f'&b{n - 1};' * 10 if n else '&a;'}'>" for n in range(9))
    + "]><d>&b8;</d>"
)


def in_code(name: str) -> str:
    """A state in an encoding that the parser does not have."""
    return f"<?xml version='1.0' encoding='{name}'?>{STATE}"


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**30)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda p: p.write_text(""), "not XML", id="empty"),
        pytest.param(lambda p: p.write_text(STATE[:-40]), "not XML", id="torn"),
        pytest.param(lambda p: p.write_bytes(os.urandom(4096)), "not XML", id="binary"),
        pytest.param(lambda p: p.write_text(in_code("klingon")), "not XML", id="code"),
        pytest.param(lambda p: p.write_text(in_code("base64")), "not XML", id="no-text"),
        pytest.param(lambda p: p.write_text(in_code("shift_jis")), "multi-byte", id="multi-byte"),
        pytest.param(lambda p: p.write_text("<a>" * 100_000), "nests too deep", id="deep"),
        pytest.param(lambda p: p.write_text(BOMB), "document type", id="entities"),
        pytest.param(os.mkfifo, "not a regular file", id="fifo"),
        pytest.param(lambda p: p.symlink_to(p), "Too many levels", id="loop"),
        pytest.param(large, "larger than 4 MiB", id="large"),
    ],
)
def test_a_state_that_cannot_be_read_may_name_any_device(
    tmp_path: Path, machines: Path, make: Callable[[Path], object], reason: str
) -> None:
    make(machines / "x.xml")
    ((address, who),) = found(tmp_path, GPU)
    assert address == GPU
    assert who.startswith(f"libvirt, perhaps: {machines}/x.xml cannot be read (")
    assert reason in who


def test_a_machine_that_ends_meanwhile_has_nothing(tmp_path: Path, machines: Path) -> None:
    (machines / "x.xml").symlink_to("gone")
    assert found(tmp_path, GPU) == ()


def hostdev(type_: str, source: str) -> str:
    return f"<hostdev mode='subsystem' type='{type_}'><source>{source}</source></hostdev>"


@pytest.mark.parametrize(
    ("device", "address"),
    [
        pytest.param(
            hostdev("pci", "<address bus='0x3' slot='0'/>"), GPU, id="domain and function default"
        ),
        pytest.param(
            hostdev("pci", "<address domain='0' bus='3' slot='00' function='0'/>"),
            GPU,
            id="decimal and octal",
        ),
        pytest.param(
            "<interface type='hostdev'><source><address domain='0' bus='0x03' slot='0'/></source>"
            "</interface>",
            GPU,
            id="network card that says no type",
        ),
        pytest.param(
            "<interface type='network'><source network='n'/><actual type='hostdev'><source>"
            "<address type='pci' bus='0x03' slot='0x00'/></source></actual></interface>",
            GPU,
            id="network card of a pool",
        ),
        pytest.param(
            "<disk type='nvme'><source type='pci' namespace='1'><address bus='0x03' slot='0x00'/>"
            "</source></disk>",
            GPU,
            id="NVMe disk",
        ),
        pytest.param(
            hostdev("mdev", "<address uuid='C2177883-f1bb-47f0-914d-32a22e3a8804'/>"),
            GPU,
            id="a part of it",
        ),
    ],
)
def test_whatever_libvirt_calls_a_pci_device_is_found(
    tmp_path: Path, device: str, address: Address
) -> None:
    part = "c2177883-f1bb-47f0-914d-32a22e3a8804"
    (tmp_path / f"devices/pci0000:00/{GPU}/{part}").mkdir(parents=True)
    (tmp_path / "bus/mdev/devices").mkdir(parents=True)
    (tmp_path / f"bus/mdev/devices/{part}").symlink_to(f"../../../devices/pci0000:00/{GPU}/{part}")
    assert passed_through(f"<d>{device}</d>".encode(), str(tmp_path)) == {address}


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            hostdev("usb", "<vendor id='0x1050'/><address bus='1' device='4'/>"), id="usb"
        ),
        pytest.param(
            hostdev("scsi", "<adapter name='scsi_host0'/><address bus='3' target='0' unit='0'/>"),
            id="scsi",
        ),
        pytest.param(
            hostdev("mdev", "<address uuid='../../../pci/0000:03:00.0/x'/>"), id="no uuid"
        ),
        pytest.param(hostdev("mdev", f"<address uuid='{'0' * 32}'/>"), id="no such part"),
        pytest.param(
            "<source><address bus='0x03' slot='0x00' function='0x0'/></source>", id="of nothing"
        ),
        pytest.param(
            hostdev("pci", "<x><address bus='0x03' slot='0x00'/></x>"), id="not the source's own"
        ),
    ],
)
def test_what_is_no_pci_device_is_none(tmp_path: Path, device: str) -> None:
    assert passed_through(f"<d>{device}</d>".encode(), str(tmp_path)) == frozenset()


@pytest.mark.parametrize(
    "address",
    [
        "<address function='0x0'/>",
        "<address bus='0x100' slot='0x00' function='0x0'/>",
        "<address bus='0x03' slot='0x20' function='0x0'/>",
        "<address bus='0x03' slot='0x00' function='0x8'/>",
        "<address bus='-1' slot='0x00' function='0x0'/>",
        "<address bus='three' slot='0x00' function='0x0'/>",
    ],
)
def test_a_pci_device_without_an_address_may_be_any(
    tmp_path: Path, machines: Path, address: str
) -> None:
    (machines / "x.xml").write_text(f"<d>{hostdev('pci', address)}</d>")
    ((_, who),) = found(tmp_path, GPU)
    assert "passes a device through that has no address" in who
