"""The queue is bounded, loses only hints, and says so."""

from agent.host.hints import Hint
from agent.reconcile.messages import Inbox, Order, Stop
from agent.vfio.model import Asked, Release


def hint(number: int) -> Hint:
    return Hint(reason="kernel", group=number, received=float(number))


async def test_hints_come_out_in_order_and_together() -> None:
    inbox = Inbox()
    for number in range(3):
        inbox.hint(hint(number))
    assert await inbox.batch(None) == [hint(0), hint(1), hint(2)]


async def test_nothing_in_time_is_an_empty_batch() -> None:
    assert await Inbox().batch(0) == []


async def test_a_full_queue_means_look_at_everything_once() -> None:
    inbox = Inbox(size=2)
    for number in range(1000):
        inbox.hint(hint(number))
    assert len(inbox) == 2
    assert inbox.overflows == 1
    assert inbox.received["kernel"] == 1000
    batch = await inbox.batch(None)
    assert batch[:2] == [hint(0), hint(1)]
    (lost,) = batch[2:]
    assert isinstance(lost, Hint)
    assert (lost.everything, lost.received) == (True, 2.0)
    inbox.hint(hint(7))
    assert await inbox.batch(None) == [hint(7)]


async def test_an_order_is_never_lost_and_never_refused() -> None:
    """However many wait: hints and orders that nobody has taken for a while, as on a slow disk."""
    inbox = Inbox(size=2)
    for number in range(5):
        inbox.hint(hint(number))
    orders: list[Order] = [Asked(number, Release("vm")) for number in range(5)]
    orders.append(Stop())
    for order in orders:
        inbox.order(order)
    inbox.hint(hint(5))
    batch = await inbox.batch(None)
    assert [message for message in batch if not isinstance(message, Hint)] == orders
    assert any(isinstance(message, Hint) and message.everything for message in batch)
