"""The monitor without a kernel that sends: what messages mean, and what becomes of a bad socket.

Real messages, real overflows and real deafness are in tests/netns.
"""

import asyncio
import collections
import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import pytest
import pyudev
import structlog

from agent.errors import SourceUnavailableError
from agent.host.hints import Hint
from agent.host.model import Address, DeviceNumber
from agent.host.monitor import (
    FIRST_DELAY,
    LONGEST_DELAY,
    Monitor,
    SourceState,
)
from agent.host.netlink import connect
from agent.host.uevent import Message, hint_of

GPU = "/devices/pci0000:00/0000:00:01.0/0000:03:00.0"
ADDRESS = Address("0000:03:00.0")


# --- what a message means -------------------------------------------------------------------------

MEANINGS = {
    "the function itself": (
        Message("bind", GPU, "pci"),
        Hint("udev", address=ADDRESS),
    ),
    "a card": (
        Message("add", f"{GPU}/drm/card0", "drm", "/dev/dri/card0", DeviceNumber(226, 0)),
        Hint(
            "udev",
            address=ADDRESS,
            node_path="/dev/dri/card0",
            node_number=DeviceNumber(226, 0),
            udev_done=True,
        ),
    ),
    "a card that went": (
        Message("remove", f"{GPU}/drm/card0", "drm", "/dev/dri/card0", DeviceNumber(226, 0)),
        Hint(
            "udev",
            address=ADDRESS,
            node_path="/dev/dri/card0",
            node_number=DeviceNumber(226, 0),
        ),
    ),
    "a connector": (
        Message("change", f"{GPU}/drm/card0/card0-HDMI-A-1", "drm"),
        Hint("udev", address=ADDRESS),
    ),
    "an action that no kernel has yet": (
        Message(
            "levitate", f"{GPU}/accel/accel0", "accel", "/dev/accel/accel0", DeviceNumber(261, 0)
        ),
        Hint(
            "udev",
            address=ADDRESS,
            node_path="/dev/accel/accel0",
            node_number=DeviceNumber(261, 0),
            udev_done=True,
        ),
    ),
    "an IOMMU group": (
        Message("add", "/devices/virtual/vfio/4", "vfio", "/dev/vfio/4", DeviceNumber(241, 3)),
        Hint(
            "udev",
            group=4,
            node_path="/dev/vfio/4",
            node_number=DeviceNumber(241, 3),
            udev_done=True,
        ),
    ),
    "a group without an IOMMU": (
        Message("add", "/devices/virtual/vfio/noiommu-0", "vfio", "/dev/vfio/noiommu-0"),
        Hint("udev", node_path="/dev/vfio/noiommu-0", udev_done=True, everything=True),
    ),
    "a group in digits that are not ASCII": (
        Message("add", "/devices/virtual/vfio/٤", "vfio"),
        Hint("udev", everything=True),
    ),
    "a group of absurd size": (
        Message("add", "/devices/virtual/vfio/" + "4" * 5000, "vfio"),
        Hint("udev", everything=True),
    ),
    "a VFIO cdev": (
        Message(
            "add",
            f"{GPU}/vfio-dev/vfio0",
            "vfio-dev",
            "/dev/vfio/devices/vfio0",
            DeviceNumber(511, 0),
        ),
        Hint(
            "udev",
            address=ADDRESS,
            node_path="/dev/vfio/devices/vfio0",
            node_number=DeviceNumber(511, 0),
            udev_done=True,
        ),
    ),
    "a GPU's security controller": (
        Message(
            "add", f"{GPU}/xe.mei-gscfi.768/mei/mei1", "mei", "/dev/mei1", DeviceNumber(236, 1)
        ),
        Hint(
            "udev",
            address=ADDRESS,
            node_path="/dev/mei1",
            node_number=DeviceNumber(236, 1),
            udev_done=True,
        ),
    ),
    "the node that all AMD GPUs share": (
        Message("add", "/devices/virtual/kfd/kfd", "kfd", "/dev/kfd", DeviceNumber(234, 0)),
        Hint(
            "udev",
            node_path="/dev/kfd",
            node_number=DeviceNumber(234, 0),
            udev_done=True,
            everything=True,
        ),
    ),
    "a card without a function": (
        Message("add", "/devices/platform/vkms/drm/card3", "drm", "/dev/dri/card3"),
        Hint("udev", node_path="/dev/dri/card3", udev_done=True, orphan=True),
    ),
    "simpledrm's card below the GPU that it draws on": (
        Message("add", f"{GPU}/simple-framebuffer.0/drm/card0", "drm"),
        Hint("udev", address=ADDRESS, orphan=True),
    ),
    "a connector of a card without a function": (
        Message("change", "/devices/platform/vkms/drm/card3/card3-Virtual-1", "drm"),
        Hint("udev", orphan=True),
    ),
    "the path that virtio-gpu once sent": (
        Message("change", "/card0", "drm"),
        Hint("udev", everything=True),
    ),
    "a long domain": (
        Message("add", "/devices/pci10000:e1/10000:e1:00.0", "pci"),
        Hint("udev", address=Address("10000:e1:00.0")),
    ),
    "nothing at all": (Message("", "", ""), Hint("udev", everything=True)),
}


@pytest.mark.parametrize(("message", "hint"), MEANINGS.values(), ids=MEANINGS.keys())
def test_a_message_says_where_to_look(message: Message, hint: Hint) -> None:
    assert hint_of(message, "udev", 0.0) == hint


def test_the_kernels_message_is_no_sign_that_udev_is_done() -> None:
    message = Message("add", f"{GPU}/drm/card0", "drm", "/dev/dri/card0", DeviceNumber(226, 0))
    hint = hint_of(message, "kernel", 7.5)
    assert not hint.udev_done
    assert (hint.reason, hint.received) == ("kernel", 7.5)


# --- a source that the test feeds -----------------------------------------------------------------

Event = Message | Exception
CARD = Message("change", f"{GPU}/drm/card0", "drm", "/dev/dri/card0", DeviceNumber(226, 0))
RENDER = Message(
    "add", f"{GPU}/drm/renderD128", "drm", "/dev/dri/renderD128", DeviceNumber(226, 128)
)


class Fed:
    """A connection that holds what it was made with, and errors as the real one raises them."""

    def __init__(self, events: Sequence[Event] = (), *, deaf: bool = False) -> None:
        self.deaf = deaf
        self.events = collections.deque(events)
        self.errors: collections.deque[int] = collections.deque()
        self.closed = False
        self._ours, self._theirs = socket.socketpair()
        self._theirs.send(b"!")  # readable for ever, as a socket with messages is

    def fileno(self) -> int:
        return self._ours.fileno()

    def receive(self) -> Message | None:
        if not self.events:
            return None
        match self.events.popleft():
            case Message() as message:
                return message
            case error:
                self.errors.append(getattr(error, "pending", 0))
                raise error

    def pending_error(self) -> int:
        return self.errors.popleft()

    def close(self) -> None:
        self.closed = True
        self._ours.close()
        self._theirs.close()


class PollError(OSError):
    """What pyudev's ``poll`` raises: no errno; the socket knows more."""

    def __init__(self, pending: int) -> None:
        super().__init__("Error while polling fd")
        self.pending = pending


class Rig:
    """A monitor, its connections in the order in which it opens them, and what it says."""

    def __init__(self, *connections: Fed | Exception, batch: int = 128) -> None:
        self.connections = collections.deque(connections)
        self.hints: list[Hint] = []
        self.delays: list[float] = []
        self.finished = asyncio.Event()
        self.monitor = Monitor("udev", self.hint, self.connect, batch=batch, sleep=self.sleep)

    def hint(self, hint: Hint) -> None:
        self.hints.append(hint)

    def connect(self) -> Fed:
        match self.connections.popleft():
            case Fed() as fed:
                return fed
            case error:
                raise error

    async def sleep(self, delay: float) -> None:
        self.delays.append(delay)
        if not self.connections:
            self.finished.set()
            await asyncio.Event().wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - the reader has no word for "read it all"
            await asyncio.sleep(0)

    @property
    def reasons(self) -> list[str]:
        return [hint.reason for hint in self.hints]


async def running(rig: Rig, condition: Callable[[], bool]) -> None:
    """Run the monitor until something is true, then cancel it."""
    task = asyncio.create_task(rig.monitor.run())
    waiting = asyncio.create_task(rig.until(condition))
    done, _ = await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    for unfinished in {task, waiting} - done:
        unfinished.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unfinished
    if task in done:
        await task


async def test_each_opening_asks_for_a_look_at_everything_before_any_message_counts() -> None:
    rig = Rig(Fed([CARD]))
    await running(rig, lambda: len(rig.hints) == 2)
    assert rig.hints[0].everything
    assert rig.hints[0].reason == "opened"
    assert rig.hints[1].address == ADDRESS


async def test_a_cancelled_monitor_closes_its_socket() -> None:
    fed = Fed()
    rig = Rig(fed)
    await running(rig, lambda: bool(rig.hints))
    assert fed.closed
    assert rig.monitor.state is SourceState.DOWN


async def test_a_thousand_equal_messages_are_one_hint_a_batch() -> None:
    fed = Fed([CARD] * 1000)
    rig = Rig(fed, batch=100)
    await running(rig, lambda: not fed.events)
    assert rig.reasons == ["opened"] + ["udev"] * 10
    assert rig.monitor.events == {("drm", "change"): 1000}


async def test_different_messages_of_one_batch_all_become_hints_in_their_order() -> None:
    rig = Rig(Fed([CARD, RENDER, CARD]))
    await running(rig, lambda: len(rig.hints) == 3)
    assert [hint.node_path for hint in rig.hints] == [None, CARD.node, RENDER.node]


async def test_the_loop_has_its_turn_between_batches() -> None:
    fed = Fed([CARD] * 1000)
    rig = Rig(fed, batch=10)
    seen = set()

    def look() -> bool:
        seen.add(len(fed.events))
        return not fed.events

    await running(rig, look)
    assert seen == set(range(0, 1001, 10))


async def test_a_merged_hint_has_the_time_of_its_first_message() -> None:
    rig = Rig(Fed([CARD] * 100))
    before = time.monotonic()
    await running(rig, lambda: len(rig.hints) == 2)
    assert before <= rig.hints[0].received <= rig.hints[1].received <= time.monotonic()


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(PollError(errno.ENOBUFS), id="found by poll"),
        pytest.param(OSError(errno.ENOBUFS, "No buffer space available"), id="found by recvmsg"),
    ],
)
async def test_after_an_overflow_the_reader_goes_on_and_everything_is_looked_at(
    error: OSError,
) -> None:
    rig = Rig(Fed([CARD, error, RENDER]))
    await running(rig, lambda: len(rig.hints) == 4)
    assert rig.monitor.overflows == 1
    assert rig.monitor.opened == 1
    assert [hint.reason for hint in rig.hints if hint.everything] == ["opened", "overflow"]
    assert rig.hints[-1].node_path == RENDER.node


async def test_many_overflows_of_one_batch_are_counted_each_and_looked_for_once() -> None:
    rig = Rig(Fed([PollError(errno.ENOBUFS)] * 50))
    await running(rig, lambda: len(rig.hints) == 2)
    assert rig.monitor.overflows == 50
    assert rig.reasons == ["opened", "overflow"]


async def test_a_malformed_message_is_counted_and_makes_up_for_what_it_meant_to_say() -> None:
    rig = Rig(Fed([ValueError("Invalid argument"), RENDER]))
    await running(rig, lambda: len(rig.hints) == 3)
    assert rig.monitor.malformed == 1
    assert rig.reasons == ["opened", "malformed", "udev"]
    assert rig.hints[1].everything


async def test_what_happens_a_thousand_times_is_logged_once() -> None:
    fed = Fed([ValueError("Invalid argument")] * 1000)
    rig = Rig(fed, batch=10)
    with structlog.testing.capture_logs() as logs:
        await running(rig, lambda: not fed.events)
    assert [entry["log_level"] for entry in logs] == ["info", "warning"]
    assert rig.monitor.malformed == 1000


async def test_messages_of_other_subsystems_are_no_hints_and_end_a_batch_too() -> None:
    """Else a flood of them would keep the loop from everything else."""
    fed = Fed([Message("change", "", "block")] * 1000)
    rig = Rig(fed, batch=10)
    seen = set()

    def look() -> bool:
        seen.add(len(fed.events))
        return not fed.events

    await running(rig, look)
    assert seen == set(range(0, 1001, 10))
    assert rig.reasons == ["opened"]


async def test_labels_of_the_counter_are_closed_sets() -> None:
    strange = [Message(f"a{n}", f"/devices/{n}", f"s{n}") for n in range(100)]
    rig = Rig(Fed([*strange, Message("add", GPU, "pci"), Message("hop", GPU, "pci")]))
    await running(rig, lambda: len(rig.hints) == 3)
    assert rig.monitor.events == {
        ("other", "other"): 100,
        ("pci", "add"): 1,
        ("pci", "other"): 1,
    }


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(PollError(errno.EBADF), id="the socket tells"),
        pytest.param(PollError(0), id="the socket does not tell"),
        pytest.param(OSError(errno.EIO, "Input/output error"), id="recvmsg tells"),
    ],
)
async def test_a_dead_socket_is_opened_anew_and_everything_is_looked_at(error: OSError) -> None:
    dead, fresh = Fed([CARD, error, RENDER]), Fed([RENDER])
    rig = Rig(dead, fresh)
    await running(rig, lambda: len(rig.hints) == 4)
    assert dead.closed
    assert rig.reasons == ["opened", "udev", "opened", "udev"]
    assert rig.monitor.opened == 2


async def test_attempts_to_open_grow_rarer() -> None:
    rig = Rig(*[OSError(errno.EMFILE, "Too many open files")] * 9)
    await running(rig, rig.finished.is_set)
    assert rig.delays == [FIRST_DELAY * 2**n for n in range(7)] + [LONGEST_DELAY] * 2


async def test_while_it_cannot_be_opened_the_state_tells_whoever_looks_instead() -> None:
    rig = Rig(Fed([CARD, PollError(0)]), *[OSError(errno.EMFILE, "Too many open files")] * 3)
    with structlog.testing.capture_logs() as logs:
        await running(rig, rig.finished.is_set)
    assert rig.reasons == ["opened", "udev", "down"]
    assert [entry["event"] for entry in logs] == ["source-up", "source-down"]


async def test_a_socket_that_was_heard_resets_the_delay_and_a_mute_one_does_not() -> None:
    rig = Rig(Fed([PollError(0)]), Fed([PollError(0)]), Fed([CARD, PollError(0)]))
    await running(rig, rig.finished.is_set)
    assert rig.delays == [FIRST_DELAY, FIRST_DELAY * 2, FIRST_DELAY]


async def test_a_deaf_source_says_so_once_and_is_opened_until_it_can_hear() -> None:
    deaf = [Fed(deaf=True) for _ in range(3)]
    rig = Rig(*deaf, Fed([CARD]))
    with structlog.testing.capture_logs() as logs:
        await running(rig, lambda: len(rig.hints) == 3)
    assert rig.reasons == ["deaf", "opened", "udev"]
    assert rig.hints[0].everything
    assert [entry["event"] for entry in logs] == ["source-deaf", "source-up"]
    assert all(fed.closed for fed in deaf)


async def test_a_fault_in_the_program_ends_the_run_instead_of_spinning() -> None:
    rig = Rig(Fed([CARD]))

    def broken(hint: Hint) -> None:
        if not hint.everything:
            raise ZeroDivisionError

    rig.monitor = Monitor("udev", broken, rig.connect, sleep=rig.sleep)
    with pytest.raises(ZeroDivisionError):
        await rig.monitor.run()


async def test_a_source_that_can_never_be_had_again_ends_the_run() -> None:
    rig = Rig(Fed([PollError(0)]), SourceUnavailableError("no libudev"))
    with pytest.raises(SourceUnavailableError):
        await rig.monitor.run()


# --- the real socket, as far as it needs no privilege ---------------------------------------------


@pytest.fixture
def no_socket(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the system refuse netlink sockets with an errno."""

    def refuse(number: int) -> None:
        def fail(*_: object, **__: object) -> NoReturn:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(socket, "socket", fail)

    return refuse


def test_a_real_source_opens_without_privilege_and_closes_what_it_opened() -> None:
    """`nothing_left_behind` sees to the second half."""
    monitor = Monitor.open("kernel", lambda _: None, receive_buffer=1 << 30)
    states = [monitor.state]
    monitor.close()
    states.append(monitor.state)
    assert states == [SourceState.UP, SourceState.DOWN]


def test_a_closed_connection_is_not_read() -> None:
    connection = connect("kernel", {"drm"}, None)
    connection.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        connection.receive()


def test_a_socket_that_may_never_be_had_is_an_error_with_advice(
    no_socket: Callable[[int], None],
) -> None:
    no_socket(errno.EAFNOSUPPORT)
    with pytest.raises(SourceUnavailableError) as caught:
        Monitor.open("udev", lambda _: None)
    assert "RestrictAddressFamilies" in (caught.value.hint or "")


def test_a_socket_that_cannot_be_had_now_is_a_state(no_socket: Callable[[int], None]) -> None:
    no_socket(errno.EMFILE)
    assert Monitor.open("udev", lambda _: None).state is SourceState.DOWN


def test_a_receive_buffer_above_the_limit_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a process without CAP_NET_ADMIN."""

    def refuse(*_: object) -> NoReturn:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(pyudev.Monitor, "set_receive_buffer_size", refuse)
    with structlog.testing.capture_logs() as logs:
        monitor = Monitor.open("kernel", lambda _: None, receive_buffer=1 << 30)
    assert monitor.state is SourceState.UP
    monitor.close()
    assert [entry["event"] for entry in logs] == ["receive-buffer-refused", "source-up"]
