"""Who has to move along, and who is in the way: the IOMMU group of a device. Pure.

The kernel gives a group of functions to a process as one (`Function.keeps_group`). Some of them
belong to the device and move with it; nobody else's function is moved unless a person names it.
"""

from collections.abc import Collection, Iterable
from typing import Final

from agent.host.model import Function, Inventory

# What a host may stand on. Such a function is never moved because another one is.
_STORAGE: Final = 0x01
_NETWORK: Final = 0x02
_USB: Final = 0x0C03


def companions(devices: Iterable[Function], inventory: Inventory) -> tuple[Function, ...]:
    """The functions that have to move with these devices, such as the audio of a GPU.

    A companion is an endpoint of the same IOMMU group *and* slot. Neither alone says that two
    belong together: without isolation a group spans slots, and an APU's GPU shares its slot with
    USB. It is never the PF of a claimed one, and never a VF: that is a device of its own. Nor is it
    storage, network or host USB.
    """
    devices = tuple(devices)
    claimed = {device.address for device in devices}
    physical = {device.physfn for device in devices}
    found = {
        other.address: other
        for device in devices
        for other in members(device, inventory)
        if other.slot == device.slot
        and other.address not in claimed | physical
        and not other.is_vf
        and not _is_vital(other)
    }
    return tuple(found.values())


def members(device: Function, inventory: Inventory) -> tuple[Function, ...]:
    """The endpoints of the IOMMU group of a device, itself among them."""
    if device.iommu_group is None:
        return (device,)
    group = inventory.group(device.iommu_group)
    return tuple(function for function in group if not function.is_bridge)


def in_the_way(moving: Collection[Function], inventory: Inventory) -> tuple[Function, ...]:
    """The endpoints that keep the groups of these functions from being viable.

    Args:
        moving: Functions that are, or will be, on VFIO.
    """
    ours = {function.address for function in moving}
    found = {
        other.address: other
        for function in moving
        for other in members(function, inventory)
        if other.address not in ours and other.keeps_group
    }
    return tuple(found.values())


def _is_vital(function: Function) -> bool:
    return function.class_code >> 16 in {_STORAGE, _NETWORK} or function.base_class == _USB
