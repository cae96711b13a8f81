"""What addresses, device paths and drivers' names say."""

import pytest

from agent.host.model import (
    Address,
    address_in_devpath,
    address_order,
    is_vfio_driver,
    owner_of_node,
    parse_address,
    pcie_root_of,
    slot_of,
)


@pytest.mark.parametrize(
    ("devpath", "address", "owner"),
    [
        ("/devices/pci0000:00/0000:00:01.0/0000:03:00.0", "0000:03:00.0", None),
        ("/devices/pci0000:00/0000:03:00.0/drm/card0", "0000:03:00.0", "0000:03:00.0"),
        ("/devices/pci0000:00/0000:03:00.0/drm/card0/card0-DP-1", "0000:03:00.0", "0000:03:00.0"),
        ("/devices/pci0000:00/0000:03:00.0/accel/accel0", "0000:03:00.0", "0000:03:00.0"),
        ("/devices/pci0000:00/0000:03:00.0/virtio1/drm/card0", "0000:03:00.0", "0000:03:00.0"),
        ("/devices/pci0000:00/0000:03:00.0/nova_core.nova-drm.0/drm/card0",)
        + ("0000:03:00.0",) * 2,
        ("/devices/pci0000:00/10000:e0:06.0/drm/card0", "10000:e0:06.0", "10000:e0:06.0"),
        ("/devices/pci0000:00/0000:03:00.0/simple-framebuffer.0/drm/card0", "0000:03:00.0", None),
        ("/devices/platform/vkms/drm/card0", None, None),
        ("/devices/pci0000:00", None, None),
        ("/card0", None, None),
        ("", None, None),
        ("/devices/0000:03:00.9/drm/card0", None, None),
        ("/devices/x0000:03:00.0/drm/card0", None, None),
    ],
)
def test_a_device_path_tells_the_function_and_whose_node_it_is(
    devpath: str, address: str | None, owner: str | None
) -> None:
    assert address_in_devpath(devpath) == address
    assert owner_of_node(devpath) == owner


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:03:00.0", "0000:03:00.0"),
        ("03:00.0", "0000:03:00.0"),
        (" 0000:0A:1F.7\n", "0000:0a:1f.7"),
        ("10000:e1:00.0", "10000:e1:00.0"),
        ("00000000:03:00.0", "0000:03:00.0"),
        ("00010000:E1:00.0", "10000:e1:00.0"),
    ],
)
def test_an_address_is_read_as_people_write_it(text: str, address: str) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "card0", "0000:03:00.8", "0000:03:00", "3:0.0", "0:0:0:0.0"])
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as 0000:03:00\.0"):
        parse_address(text)


def test_small_facts_of_addresses_and_paths() -> None:
    assert slot_of(Address("0000:03:00.7")) == "0000:03:00"
    assert (
        pcie_root_of("/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0") == "pci0000:00"
    )
    assert pcie_root_of("/devices/platform/a.pcie/pci0001:00/0001:00:00.0") == "pci0001:00"
    assert pcie_root_of("/devices/platform/vkms") is None
    addresses = map(Address, ("10000:00:00.0", "ffff:00:00.0", "0000:ff:00.0"))
    assert sorted(addresses, key=address_order) == [
        "0000:ff:00.0",
        "ffff:00:00.0",
        "10000:00:00.0",
    ]


@pytest.mark.parametrize(
    ("driver", "vfio"),
    [
        ("vfio-pci", True),
        ("vfio_pci", True),
        ("xe-vfio-pci", True),
        ("nvgrace-gpu-vfio-pci", True),
        ("xe", False),
        ("vfiox", False),
        (None, False),
    ],
)
def test_a_vfio_driver_is_known_by_a_part_of_its_name(
    driver: str | None,
    vfio: bool,  # noqa: FBT001 - a column of the table
) -> None:
    assert is_vfio_driver(driver) is vfio
