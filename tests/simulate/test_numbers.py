"""Numbers are the lowest free ones, and stay taken while a process holds the node."""

import os

import pytest

from agent.simulate import Kernel
from agent.simulate.devices import Numbers
from agent.simulate.host import arc_b50, arc_b60, bmc, two_functions

B50, B60, NVIDIA = "0000:03:00.0", "0000:07:00.0", "0000:0b:00.0"


def card(kernel: Kernel, address: str) -> str:
    (path,) = (path for path in kernel.node_paths(address) if path.startswith("/dev/dri/card"))
    return path


def test_numbers_are_the_lowest_free() -> None:
    numbers = Numbers(128)
    assert [numbers.take() for _ in range(3)] == [128, 129, 130]
    numbers.free(129)
    assert [numbers.take(), numbers.take()] == [129, 131]


def test_wanted_numbers_are_given_unless_they_are_taken() -> None:
    numbers = Numbers()
    numbers.want(5, 0)
    assert [numbers.take() for _ in range(3)] == [5, 0, 1]
    numbers.want(5)
    assert numbers.take() == 2


def test_cards_and_render_nodes_count_separately(kernel: Kernel) -> None:
    """A management controller takes card0, so the GPU has card1 and renderD128."""
    kernel.plug(*bmc())
    kernel.modprobe("ast")
    kernel.plug(*arc_b50("0000:0a:00.0"))
    assert card(kernel, "0000:0a:00.0") == "/dev/dri/card1"
    assert "/dev/dri/renderD128" in kernel.node_paths("0000:0a:00.0")


def test_the_65th_card_has_a_number_of_those_that_cards_and_render_nodes_share() -> None:
    """As no two nodes of DRM have one number, no two have one minor number."""
    more = Numbers(192)
    cards, renders = Numbers(0, 63, more), Numbers(128, 191, more)
    given = [(cards.take(), renders.take()) for _ in range(66)]
    assert given[63:] == [(63, 191), (192, 193), (194, 195)]
    cards.free(192)
    renders.free(130)
    assert [renders.take(), renders.take()] == [130, 192]


def test_a_held_node_keeps_its_number_until_it_is_closed(kernel: Kernel) -> None:
    """As recorded: card2 comes back as card3, and as card2 again once it is closed."""
    kernel.plug(*arc_b50(), *arc_b60(), *two_functions(NVIDIA)[:1])
    held = card(kernel, NVIDIA)
    assert held == "/dev/dri/card2"
    with kernel.hold(held) as hold:
        fd = kernel.root / f"proc/{hold.pid}/fd/3"
        assert os.readlink(fd) == held
        kernel.unbind(NVIDIA)
        assert os.readlink(fd) == f"{held} (deleted)"
        kernel.bind(NVIDIA, "nouveau")
        assert card(kernel, NVIDIA) == "/dev/dri/card3"
        assert "/dev/dri/renderD131" in kernel.node_paths(NVIDIA), "all numbers of the device"
    assert not fd.parent.parent.exists()
    kernel.unbind(NVIDIA)
    kernel.bind(NVIDIA, "nouveau")
    assert card(kernel, NVIDIA) == held


def test_two_cards_swap_when_they_come_back_in_the_other_order(kernel: Kernel) -> None:
    kernel.plug(*arc_b50(), *arc_b60())
    before = card(kernel, B50), card(kernel, B60)
    for address in (B50, B60):
        kernel.unbind(address)
    for address in (B60, B50):
        kernel.bind(address, "xe")
    assert (card(kernel, B60), card(kernel, B50)) == before


def test_group_and_cdev_are_two_number_spaces(kernel: Kernel) -> None:
    kernel.plug(*arc_b50(), *arc_b60())
    kernel.move(B60, "vfio-pci")
    kernel.move(B50, "vfio-pci")
    assert kernel.node_paths(B60) == ("/dev/vfio/7", "/dev/vfio/devices/vfio0")
    assert kernel.node_paths(B50) == ("/dev/vfio/3", "/dev/vfio/devices/vfio1")


def test_holding_a_node_that_is_not_there_is_refused(kernel: Kernel) -> None:
    with pytest.raises(FileNotFoundError):
        kernel.hold("/dev/dri/card0")


def test_a_module_in_use_cannot_be_unloaded(kernel: Kernel) -> None:
    kernel.plug(*arc_b50())
    with kernel.hold("/dev/dri/card0"):
        assert kernel.rmmod("xe") != 0
        assert kernel.driver_of(B50) == "xe"
    assert kernel.rmmod("xe") == 0
    assert kernel.driver_of(B50) is None
    assert kernel.modprobe("xe") == 0
    assert kernel.driver_of(B50) == "xe"


def test_hardware_for_a_taken_slot_changes_nothing(kernel: Kernel) -> None:
    kernel.plug(*arc_b50())
    functions = kernel.functions
    with pytest.raises(ValueError, match=B50):
        kernel.plug(*arc_b60(), *arc_b50())
    assert kernel.functions == functions
