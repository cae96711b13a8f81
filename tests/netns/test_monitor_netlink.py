"""The monitor hears real messages of both groups, through real libudev, and nothing silences it."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from agent.host.hints import Hint
from agent.host.model import Address, DeviceNumber
from agent.host.monitor import BATCH, Monitor, SourceState
from agent.host.uevent import Source
from tests.netns.netlink import KernelSender, UdevSender, body
from tests.netns.private import in_private_network, start_udevd

pytestmark = pytest.mark.netns

Sender = KernelSender | UdevSender
SOURCES: tuple[Source, ...] = ("kernel", "udev")
GPU = "/devices/pci0000:00/0000:00:01.0/0000:03:00.0"
ADDRESS = Address("0000:03:00.0")
CARD = {
    "ACTION": "add",
    "DEVPATH": f"{GPU}/drm/card0",
    "SUBSYSTEM": "drm",
    "DEVTYPE": "drm_minor",
    "DEVNAME": "dri/card0",
    "MAJOR": "226",
    "MINOR": "0",
}
LAST = {"ACTION": "add", "DEVPATH": "/devices/pci0000:00/0000:00:1f.0", "SUBSYSTEM": "pci"}
LAST_ADDRESS = Address("0000:00:1f.0")


class Listener:
    """A running monitor, a sender to its source, and the hints that came."""

    monitor: Monitor

    def __init__(self, source: Source) -> None:
        self.source: Source = source
        self.hints: list[Hint] = []
        self._news = asyncio.Event()
        self.sender: Sender = KernelSender() if source == "kernel" else UdevSender()

    async def open(self, receive_buffer: int | None = None) -> None:
        self.monitor = await asyncio.to_thread(
            Monitor.open, self.source, self._take, receive_buffer=receive_buffer
        )

    def _take(self, hint: Hint) -> None:
        self.hints.append(hint)
        self._news.set()

    async def until(self, condition: Callable[[Hint], bool]) -> list[Hint]:
        """All hints so far, once one of them meets the condition."""
        while not any(map(condition, self.hints)):
            self._news.clear()
            await self._news.wait()
        return self.hints

    async def until_drained(self) -> None:
        """Send until a message is heard: there is no room for one in a socket that is full."""
        while not any(hint.address == LAST_ADDRESS for hint in self.hints):
            self.sender.send(LAST)
            await asyncio.sleep(0)

    async def until_the_last(self) -> list[Hint]:
        """Send one more message, and wait until it is heard: what came before is then heard too."""
        self.sender.send(LAST)
        return await self.until(lambda hint: hint.address == LAST_ADDRESS)


@contextlib.asynccontextmanager
async def listening(source: Source, receive_buffer: int | None = None) -> AsyncIterator[Listener]:
    """Open a source, stall (nothing is read before the first `await`), then listen."""
    listener = Listener(source)
    await listener.open(receive_buffer)
    task = asyncio.create_task(listener.monitor.run())
    try:
        yield listener
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        listener.sender.close()


def run(scenario: Callable[[], Awaitable[None]], *, udevd: bool = True) -> None:
    """Run a scenario with a loop and namespaces of its own."""

    async def limited() -> None:
        async with asyncio.timeout(30):
            await scenario()

    in_private_network(lambda: asyncio.run(limited()), udevd=udevd)


@pytest.mark.parametrize("source", SOURCES)
def test_a_message_becomes_a_hint_of_its_source(source: Source) -> None:
    async def scenario() -> None:
        async with listening(source) as listener:
            listener.sender.send(CARD)
            hints = await listener.until_the_last()
            assert [hint.everything for hint in hints] == [False, False]
            hint = hints[0]
            assert (hint.reason, hint.address) == (source, ADDRESS)
            assert (hint.node_path, hint.node_number) == ("/dev/dri/card0", DeviceNumber(226, 0))
            assert hint.udev_done == (source == "udev")
            assert listener.monitor.events == {("drm", "add"): 1, ("pci", "add"): 1}

    run(scenario)


@pytest.mark.parametrize("source", SOURCES)
def test_what_was_sent_between_opening_and_reading_is_heard(source: Source) -> None:
    """That is what makes "open, then look" safe."""

    async def scenario() -> None:
        listener = Listener(source)
        await listener.open()
        listener.sender.send(CARD)
        task = asyncio.create_task(listener.monitor.run())
        await listener.until(lambda hint: hint.address == ADDRESS)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        listener.sender.close()

    run(scenario)


@pytest.mark.parametrize("source", SOURCES)
def test_other_subsystems_are_no_news(source: Source) -> None:
    """Those of udev do not even wake us."""

    async def scenario() -> None:
        async with listening(source) as listener:
            for number in range(100):
                listener.sender.send(
                    {"ACTION": "add", "DEVPATH": f"/devices/{number}", "SUBSYSTEM": "block"}
                )
            hints = await listener.until_the_last()
            assert [hint.address for hint in hints] == [LAST_ADDRESS]
            read = listener.monitor.events["other", "add"]
            assert read == (0 if source == "udev" else 100)

    run(scenario)


def test_a_flood_of_other_subsystems_leaves_the_loop_its_turns() -> None:
    """Of the kernel's: libudev's own filter would not return before the flood has ended."""

    async def scenario() -> None:
        async with listening("kernel") as listener:
            for _ in range(10_000):
                listener.sender.send({**CARD, "SUBSYSTEM": "block"})
            turns = 0
            listener.sender.send(LAST)
            while not listener.hints:
                await asyncio.sleep(0)
                turns += 1
            assert turns >= 10_000 / BATCH

    run(scenario)


@pytest.mark.parametrize("source", SOURCES)
def test_after_an_overflow_everything_is_looked_at_and_the_next_message_is_heard(
    source: Source,
) -> None:
    async def scenario() -> None:
        async with listening(source, receive_buffer=65536) as listener:
            for _ in range(5_000):  # the loop is stalled meanwhile
                listener.sender.send(CARD)
            await listener.until_drained()
            looks = [hint.everything for hint in listener.hints if hint.reason == "overflow"]
            assert 1 <= len(looks) <= listener.monitor.overflows
            assert all(looks)
            assert listener.monitor.events["drm", "add"] < 5_000
            assert listener.monitor.opened == 1

    run(scenario)


def test_a_storm_of_100000_messages_stays_small_and_leaves_the_loop_its_turns() -> None:
    async def scenario() -> None:
        async with listening("udev") as listener:
            assert isinstance(listener.sender, UdevSender)
            message = body({**CARD, "SEQNUM": "1"})
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for number in range(100_000):
                listener.sender.send_raw(message, "drm", "drm_minor")
                if number % 1_000 == 0:
                    await asyncio.sleep(0)
            await listener.until_drained()
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            heard = listener.monitor.events["drm", "add"]
            assert heard == 100_000 or listener.monitor.overflows
            assert len(listener.hints) < heard / 50
            assert grown < 4096  # KiB

    run(scenario)


MALFORMED = {
    "empty": b"",
    "noise": bytes(range(255, 127, -1)),
    "no NUL at the end": b"ACTION=add\0DEVPATH=/devices/x\0SUBSYSTEM=pci\0SEQNUM=1",
    "no action": b"DEVPATH=/devices/x\0SUBSYSTEM=pci\0SEQNUM=1\0",
    "no subsystem": b"ACTION=add\0DEVPATH=/devices/x\0SEQNUM=1\0",
    "an action of the future": b"ACTION=levitate\0DEVPATH=/devices/x\0SUBSYSTEM=pci\0SEQNUM=1\0",
    "a path that leaves /sys": b"ACTION=add\0DEVPATH=../../etc\0SUBSYSTEM=pci\0SEQNUM=1\0",
    "a path that is no text": b"ACTION=add\0DEVPATH=/devices/\xff\0SUBSYSTEM=pci\0SEQNUM=1\0",
    "a node that is no text": (
        b"ACTION=add\0DEVPATH=/devices/x\0SUBSYSTEM=pci\0SEQNUM=1\0DEVNAME=\xfe\0"
    ),
    "a major that is no number": (
        b"ACTION=add\0DEVPATH=/devices/x\0SUBSYSTEM=pci\0SEQNUM=1\0MAJOR=x\0MINOR=0\0"
    ),
    "longer than a message can be": (
        b"ACTION=add\0DEVPATH=/devices/" + b"x" * 9000 + b"\0SUBSYSTEM=pci\0SEQNUM=1\0"
    ),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_costs_a_look_at_most(source: Source, payload: bytes) -> None:
    """Dropped unseen by libudev, perhaps; what it reports is counted; the next message is heard."""

    async def scenario() -> None:
        async with listening(source) as listener:
            match listener.sender:
                case KernelSender() as kernel:
                    kernel.send_raw(b"add@/devices/x\0" + payload if payload else b"")
                case UdevSender() as udev:
                    udev.send_raw(payload, "pci")
            hints = await listener.until_the_last()
            assert all(hint.everything for hint in hints[:-1])
            reasons = [hint.reason for hint in hints]
            assert reasons.count("malformed") == listener.monitor.malformed

    run(scenario)


def test_malformed_messages_are_reported_at_all() -> None:
    async def scenario() -> None:
        async with listening("udev") as listener:
            assert isinstance(listener.sender, UdevSender)
            listener.sender.send_raw(MALFORMED["no action"], "pci")
            await listener.until_the_last()
            assert listener.monitor.malformed == 1

    run(scenario)


def test_without_udevd_the_udev_source_says_that_it_is_deaf_until_udevd_comes() -> None:
    async def scenario() -> None:
        async with listening("udev") as listener:
            assert listener.monitor.state is SourceState.DEAF
            await listener.until(lambda hint: hint.reason == "deaf" and hint.everything)
            start_udevd()
            await listener.until(lambda hint: hint.reason == "opened" and hint.everything)
            listener.sender.send(CARD)
            await listener.until(lambda hint: hint.address == ADDRESS)

    run(scenario, udevd=False)


def test_without_udevd_the_kernel_is_heard() -> None:
    async def scenario() -> None:
        async with listening("kernel") as listener:
            assert listener.monitor.state is SourceState.UP
            await listener.until_the_last()

    run(scenario, udevd=False)
