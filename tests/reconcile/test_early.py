"""Orders wait while a driver may be about to come, and no longer."""

import dataclasses
from typing import Final

import pytest
from msgspec import structs

from agent.host.model import Environment, HoldMode, Inventory
from agent.reconcile.early import Queue
from agent.vfio.model import Asked, Order, Prepare, Recover, Release
from tests.vfio.world import AUDIO, GPU, OTHER_GPU, Chip, World, audio

PREPARE: Final = Prepare("vm", HoldMode.VFIO, (GPU,))
PATIENCE: Final = 10.0


def host(*chips: Chip, udev_at_work: bool = True) -> Inventory:
    inventory = World(*chips).look()
    return dataclasses.replace(inventory, environment=Environment(udev_queue=udev_at_work))


def queue(*orders: Order) -> Queue:
    queue = Queue()
    queue.waiting = [Asked(number, order) for number, order in enumerate(orders)]
    return queue


def taken(queue: Queue, host: Inventory, *, ready: bool = True, now: float = 0.0) -> list[Order]:
    return [each.order for each in queue.take(host, ready=ready, now=now, patience=PATIENCE)]


LATE_GPU: Final = (Chip(GPU, driver=None), audio())
LATE_AUDIO: Final = (Chip(GPU), Chip(AUDIO, ("snd_hda_intel",), None, class_code=0x040300))
DRM: Final = structs.replace(PREPARE, mode=HoldMode.DRM)
NAMED: Final = structs.replace(PREPARE, devices=(OTHER_GPU,), named=(GPU,))


@pytest.mark.parametrize(
    ("chips", "order"),
    [
        pytest.param(LATE_GPU, PREPARE, id="the device"),
        pytest.param(LATE_AUDIO, PREPARE, id="its companion"),
        pytest.param((*LATE_GPU, Chip(OTHER_GPU)), NAMED, id="what is named"),
        pytest.param(LATE_GPU, DRM, id="for its own driver"),
        pytest.param(LATE_GPU, structs.replace(PREPARE, dry_run=True), id="dry run"),
    ],
)
def test_a_claim_waits_for_a_driver_while_udev_is_at_work_but_not_for_ever(
    chips: tuple[Chip, ...], order: Prepare
) -> None:
    """It would remember that there was none, and give the function back to none."""
    at_work = host(*chips)
    waiting = queue(order)
    assert taken(waiting, at_work) == []
    assert taken(waiting, at_work, now=PATIENCE - 0.1) == []
    assert taken(waiting, at_work, now=PATIENCE) == [order]
    assert waiting.waiting == []
    assert taken(queue(order), host(*chips, udev_at_work=False)) == [order], "none is coming"


def test_a_claim_of_what_has_its_driver_waits_for_nothing() -> None:
    assert taken(queue(PREPARE), host(Chip(GPU), audio(), Chip(OTHER_GPU, driver=None))) == [
        PREPARE
    ]


def test_before_the_start_has_ended_every_claim_waits_but_nothing_else() -> None:
    """What is about a claim that waits is done after it, in the order in which it was asked for."""
    orders = (Release("vm"), PREPARE, Release("vm"), Release("other"), Recover(GPU))
    waiting, there = queue(*orders), host(Chip(GPU), audio(), udev_at_work=False)
    assert taken(waiting, there, ready=False) == [orders[0], orders[3], orders[4]]
    assert taken(waiting, there) == [orders[1], orders[2]]


def test_what_comes_later_has_its_own_patience() -> None:
    waiting, at_work = queue(PREPARE), host(*LATE_GPU)
    assert taken(waiting, at_work) == []
    other = structs.replace(PREPARE, id="other")
    waiting.waiting.append(Asked(7, other))
    assert taken(waiting, at_work, now=5.0) == []
    assert taken(waiting, at_work, now=PATIENCE) == [PREPARE]
    assert taken(waiting, at_work, now=PATIENCE + 5.0) == [other]


def test_all_can_be_taken_when_none_can_be_done() -> None:
    waiting = queue(PREPARE, Release("vm"))
    assert taken(waiting, host(*LATE_GPU)) == []
    assert [each.order for each in waiting.take_all()] == [PREPARE, Release("vm")]
    assert taken(waiting, host(*LATE_GPU)) == []
