"""Offers put together to specs, with the entry `all`."""

import dataclasses
import random

import pytest

from agent.cdi import rules
from agent.cdi.desired import Offer
from agent.cdi.profile import Vfio
from agent.cdi.spec import ContainerEdits, Device, Kind, Mount, Spec
from agent.errors import SpecError
from agent.host.model import Address, Hold, HoldMode, Inventory
from tests.cdi.worlds import B50, B60, changed, decide, function, inventory, shared, sheets, vfio

GPU = Kind("intel.com/gpu")
VFIO = Kind("intel.com/gpu-vfio")
AMD = Kind("amd.com/gpu")
TWO = inventory(function(B50, 0), function(B60, 1))


def entry(spec: Spec, name: str = "all") -> Device | None:
    return {device.name: device for device in spec.devices}.get(name)


def paths(device: Device | None) -> list[str]:
    assert device is not None
    return [node.path for node in device.edits.device_nodes]


def specs(host: Inventory, **fields: object) -> dict[Kind, Spec]:
    made = sheets(decide(host, **fields).offers)  # type: ignore[arg-type]
    return {kind: sheet.spec for kind, sheet in made.items()}


def test_a_kind_without_a_device_has_no_spec() -> None:
    assert sheets(()) == {}
    assert set(specs(inventory(vfio()))) == {VFIO}


def test_all_gives_what_every_device_gives() -> None:
    assert paths(entry(specs(TWO)[GPU])) == [
        "/dev/dri/card0",
        "/dev/dri/renderD128",
        "/dev/dri/card1",
        "/dev/dri/renderD129",
    ]


def test_what_all_devices_share_is_in_all_once() -> None:
    radeons = (
        function(address, number, vendor=0x1002, device=0x744C, driver="amdgpu")
        for number, address in enumerate((B50, B60))
    )
    given = paths(entry(specs(inventory(*radeons, nodes=[shared("/dev/kfd")]))[AMD]))
    assert given.count("/dev/kfd") == 1
    assert len(given) == 5


def test_all_leaves_out_vfs_and_claimed_devices() -> None:
    vf = Address("0000:03:00.1")
    host = inventory(function(B50, 0, virtfns=(vf,)), function(vf, 1, physfn=B50), function(B60, 2))
    held = specs(host, holds=[Hold(B60, "c", HoldMode.DRM, settled=True)])[GPU]
    assert len(held.devices) == 4
    assert paths(entry(held)) == ["/dev/dri/card0", "/dev/dri/renderD128"]


def test_there_is_no_all_of_nothing() -> None:
    claimed = specs(inventory(function()), holds=[Hold(B50, "c", HoldMode.DRM, settled=True)])[GPU]
    assert [device.name for device in claimed.devices] == ["0000-03-00-0-0xe212"]


def test_a_vfio_kind_has_no_all() -> None:
    assert entry(specs(inventory(vfio()))[VFIO]) is None


def test_in_a_kind_for_both_all_is_of_those_on_their_own_driver() -> None:
    profiles = changed("intel-gpu", vfio=Vfio(kind=GPU))
    (spec,) = specs(inventory(vfio(B50), function(B60, 1)), profiles=profiles).values()
    assert len(spec.devices) == 3
    assert paths(entry(spec)) == ["/dev/dri/card1", "/dev/dri/renderD129"]


def test_all_has_each_other_edit_of_its_devices_once() -> None:
    profiles = changed("intel-gpu", env=("A=b",), additional_gids=(44,), annotations={"a": "b"})
    all_of_them = entry(specs(TWO, profiles=profiles)[GPU])
    assert all_of_them is not None
    assert all_of_them.edits.env == ("A=b",)
    assert all_of_them.edits.additional_gids == (44,)
    assert all_of_them.annotations == (("a", "b"),)


def test_a_path_that_is_one_devices_mount_and_anothers_node_is_in_all_as_a_node() -> None:
    (offer,) = decide(function()).offers
    path = "/dev/dri/card0"
    edits = ContainerEdits(mounts=(Mount("/x", path),))
    other = dataclasses.replace(offer, address=B60, device=Device("other", edits))
    (sheet,) = sheets([offer, other]).values()
    assert rules.validate(sheet.spec) == []
    assert path in paths(entry(sheet.spec))


def test_a_device_that_is_called_all_is_refused() -> None:
    (offer,) = decide(function()).offers
    with pytest.raises(SpecError, match="called all"):
        sheets([dataclasses.replace(offer, device=Device("all", offer.device.edits))])


def test_the_order_of_the_offers_changes_nothing() -> None:
    offers: list[Offer] = list(
        decide(inventory(*(function(f"0000:{bus:02x}:00.0", bus) for bus in range(20)))).offers
    )
    shuffled = random.Random(3).sample(offers, len(offers))
    assert sheets(shuffled) == sheets(offers)
