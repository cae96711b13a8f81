"""Who moves along with a device, and who is in its way."""

import pytest
from msgspec import structs

from agent.host.model import Address, Function, Inventory
from agent.vfio.group import companions, in_the_way, members
from tests.vfio.world import AUDIO, GPU, OTHER_GPU, USB, VF, Chip, audio

GPU_FUNCTION = Chip(GPU).function()


def of_class(class_code: int, address: Address = AUDIO, **fields: object) -> Function:
    """Another function of the group and slot of the GPU."""
    function = Chip(address, class_code=class_code).function()
    return structs.replace(function, **fields)


def inventory(*functions: Function) -> Inventory:
    return Inventory(functions={function.address: function for function in functions})


@pytest.mark.parametrize(
    ("other", "moves_along"),
    [
        pytest.param(of_class(0x040300), True, id="audio"),
        pytest.param(of_class(0x038000), True, id="another-display"),
        pytest.param(of_class(0x108000), True, id="security-processor"),
        pytest.param(of_class(0x0C8000), True, id="ucsi"),
        pytest.param(of_class(0x040300, driver=None), True, id="without-a-driver"),
        pytest.param(of_class(0x040300, iommu_group=2), False, id="of-another-group"),
        pytest.param(of_class(0x040300, iommu_group=None), False, id="of-no-group"),
        pytest.param(of_class(0x040300, Address("0000:03:01.0")), False, id="of-another-slot"),
        pytest.param(of_class(0x040300, Address("0001:03:00.1")), False, id="of-another-domain"),
        pytest.param(of_class(0x060400), False, id="bridge"),
        pytest.param(of_class(0x010802), False, id="storage"),
        pytest.param(of_class(0x020000), False, id="network"),
        pytest.param(of_class(0x0C0330), False, id="host-usb"),
        pytest.param(of_class(0x038000, physfn=GPU), False, id="its-vf"),
        pytest.param(of_class(0x038000, physfn=OTHER_GPU), False, id="another-vf"),
    ],
)
def test_a_companion_is_of_the_same_group_and_slot(other: Function, *, moves_along: bool) -> None:
    found = companions([GPU_FUNCTION], inventory(GPU_FUNCTION, other))
    assert [each.address for each in found] == [other.address] * moves_along


def test_the_pf_of_a_claimed_vf_is_no_companion() -> None:
    virtual = Chip(VF, physfn=GPU).function()
    physical = Chip(GPU, virtfns=(VF,)).function()
    assert not companions([virtual], inventory(physical, virtual))


def test_two_claimed_devices_share_their_companions() -> None:
    second = Chip(Address("0000:03:00.2")).function()
    sound = audio().function()
    found = companions([GPU_FUNCTION, second], inventory(GPU_FUNCTION, second, sound))
    assert found == (sound,)


def test_without_an_iommu_nobody_moves_along() -> None:
    alone = Chip(GPU, group=None).function()
    sound = structs.replace(audio().function(), iommu_group=None)
    assert not companions([alone], inventory(alone, sound))
    assert members(alone, inventory(alone, sound)) == (alone,)
    assert not in_the_way([alone], inventory(alone, sound))


@pytest.mark.parametrize(
    ("other", "blocks"),
    [
        pytest.param(Chip(OTHER_GPU).function(), True, id="on-its-own-driver"),
        pytest.param(Chip(OTHER_GPU, driver=None).function(), False, id="on-no-driver"),
        pytest.param(Chip(OTHER_GPU, driver="vfio-pci").function(), False, id="on-vfio"),
        pytest.param(Chip(OTHER_GPU, driver="pci-stub").function(), False, id="on-a-stub"),
        pytest.param(Chip(OTHER_GPU, group=2).function(), False, id="of-another-group"),
        pytest.param(of_class(0x060400, USB, driver="pcieport"), False, id="bridge"),
        pytest.param(of_class(0x060400, USB, driver="shpchp"), False, id="bridge-with-a-driver"),
    ],
)
def test_an_endpoint_on_a_driver_of_the_host_is_in_the_way(
    other: Function, *, blocks: bool
) -> None:
    found = in_the_way([GPU_FUNCTION], inventory(GPU_FUNCTION, other))
    assert [each.address for each in found] == [other.address] * blocks


def test_what_moves_along_is_not_in_the_way() -> None:
    other = Chip(OTHER_GPU).function()
    assert not in_the_way([GPU_FUNCTION, other], inventory(GPU_FUNCTION, other))
