"""systemd is told what it must know, and an agent that cannot tell it goes on working."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent.observe.systemd import Notifier
from agent.troubles import QUIET


class Manager:
    """The service manager's end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.setblocking(False)

    def told(self) -> list[dict[str, str]]:
        """Each message as its fields."""
        messages = []
        with contextlib.suppress(BlockingIOError):
            while data := self.socket.recv(65536):
                lines = data.decode().splitlines()
                messages.append(dict(line.split("=", 1) for line in lines))
        return messages

    def close(self) -> None:
        self.socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    path = str(tmp_path / "notify")
    address = path if request.param == "path" else f"@cdi-agent-test-{os.getpid()}"
    with contextlib.closing(Manager(address)) as made:
        yield made


class Clock:
    """Monotonic seconds that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_life_of_a_service(manager: Manager) -> None:
    with contextlib.closing(Notifier(manager.address, clock=Clock())) as notifier:
        notifier.ready("1 device published")
        notifier.status("2 devices published")
        notifier.reloading()
        notifier.ready("2 devices published")
        notifier.stopping()
    assert manager.told() == [
        {"READY": "1", "STATUS": "1 device published"},
        {"STATUS": "2 devices published"},
        {"RELOADING": "1", "MONOTONIC_USEC": "1000000000"},
        {"READY": "1", "STATUS": "2 devices published"},
        {"STOPPING": "1", "STATUS": "stopping"},
    ]


def test_the_same_status_is_not_told_twice(manager: Manager) -> None:
    with contextlib.closing(Notifier(manager.address)) as notifier:
        for status in ("a", "a", "b", "b", "a"):
            notifier.status(status)
    assert [message["STATUS"] for message in manager.told()] == ["a", "b", "a"]


def test_a_status_cannot_say_anything_else(manager: Manager) -> None:
    """The protocol has no escape: a newline in a value would begin another field."""
    with contextlib.closing(Notifier(manager.address)) as notifier:
        notifier.status("bad name\nSTOPPING=1\r\n\udcff" + "x" * 10_000)
    (message,) = manager.told()
    assert list(message) == ["STATUS"]
    assert message["STATUS"].startswith("bad name STOPPING=1 \\udcff")
    assert len(message["STATUS"]) < 600


def test_the_watchdog_is_fed_at_half_its_time_however_often_the_loop_turns(
    manager: Manager,
) -> None:
    clock = Clock()
    with contextlib.closing(Notifier(manager.address, watchdog=30, clock=clock)) as notifier:
        assert notifier.watchdog_interval == 15
        fed = []
        for _ in range(480):
            notifier.feed_watchdog()
            if manager.told():
                fed.append(clock.now - 1000)
            clock.now += 0.125
    assert fed == [0, 13.5, 27, 40.5, 54]


def test_nobody_is_fed_where_nobody_watches(manager: Manager) -> None:
    with contextlib.closing(Notifier(manager.address)) as notifier:
        assert notifier.watchdog_interval is None
        notifier.feed_watchdog()
    assert manager.told() == []


@pytest.mark.parametrize(
    ("environ", "interval"),
    [
        pytest.param({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "77"}, 15, id="ours"),
        pytest.param({"WATCHDOG_USEC": "30000000"}, 15, id="anybody's"),
        pytest.param({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "78"}, None, id="another's"),
        pytest.param({"WATCHDOG_USEC": "soon"}, None, id="nonsense"),
        pytest.param({"WATCHDOG_USEC": "0"}, None, id="never"),
        pytest.param({}, None, id="none"),
    ],
)
def test_the_environment_is_read_and_kept_from_children(
    environ: dict[str, str], interval: float | None
) -> None:
    environ["PATH"] = "/bin"
    environ["NOTIFY_SOCKET"] = "/nowhere"
    with contextlib.closing(Notifier.from_environment(environ, pid=77)) as notifier:
        assert notifier.watchdog_interval == interval
        assert notifier.enabled
    assert environ == {"PATH": "/bin"}


def test_without_a_service_manager_nothing_is_told_and_nothing_said() -> None:
    with capture_logs() as logs:
        notifier = Notifier.from_environment({})
        notifier.ready("x")
        notifier.feed_watchdog()
        notifier.stopping()
        notifier.close()
    assert not notifier.enabled
    assert notifier.failures == 0
    assert logs == []


@pytest.mark.parametrize("address", ["vsock:2:1234", "", "relative", "/", "@"])
def test_an_address_that_is_not_understood_is_said_once(address: str) -> None:
    with capture_logs() as logs:
        notifier = Notifier(address)
        notifier.ready("x")
    assert not notifier.enabled
    assert [entry["event"] for entry in logs] == ["notify-unsupported"]


def test_a_manager_that_does_not_listen_is_told_of_once_a_minute(tmp_path: Path) -> None:
    """Also if it listens now and then: one that is slow has room for every other message."""
    path = str(tmp_path / "notify")
    now = [1000.0]
    with (
        capture_logs() as logs,
        contextlib.closing(Notifier(path, clock=lambda: now[0])) as notifier,
    ):
        notifier.status("a")
        notifier.status("b")
        with contextlib.closing(Manager(path)) as manager:
            notifier.status("c")
            assert manager.told() == [{"STATUS": "c"}]
        os.unlink(path)
        notifier.status("d")
        assert [entry["event"] for entry in logs] == ["notify-failed"]
        now[0] += QUIET
        notifier.status("e")
    assert notifier.failures == 4
    assert [entry["event"] for entry in logs] == ["notify-failed", "notify-failed"]


def test_a_ready_that_found_no_room_goes_with_the_next_message(manager: Manager) -> None:
    """Lost, it would end in a start that times out."""
    with contextlib.closing(Notifier(manager.address, watchdog=30)) as notifier:
        number = 0
        while notifier.failures == 0:
            notifier.status(f"filler {number}")
            number += 1
        notifier.ready("done")
        assert notifier.failures == 2
        manager.told()
        notifier.feed_watchdog()
    assert manager.told() == [{"STATUS": "done", "READY": "1", "WATCHDOG": "1"}]


def test_a_reload_that_ended_before_it_could_be_told_is_told_as_its_end(manager: Manager) -> None:
    with contextlib.closing(Notifier(manager.address)) as notifier:
        number = 0
        while notifier.failures == 0:
            notifier.status(f"filler {number}")
            number += 1
        notifier.reloading()
        notifier.ready("done")
        manager.told()
        notifier.status("later")
    assert manager.told() == [{"STATUS": "later", "READY": "1"}]


def test_after_close_nothing_is_told(manager: Manager) -> None:
    notifier = Notifier(manager.address)
    notifier.close()
    notifier.ready("x")
    notifier.close()
    assert manager.told() == []
