"""What strangers can do to the HTTP server is bounded, and it goes on answering."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agent.control.http import Application, Limits, Receive, Scope, Send, Server
from agent.control.sockets import TcpAddress, UnixAddress, bind, describe

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


class Client:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while chunk := await self.reader.read(65536):
                data += chunk
        return data

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class Rig:
    """A server on a free port of loopback."""

    def __init__(self, application: Application, limits: Limits) -> None:
        self.server = Server(application, limits)
        self.listener = bind(TcpAddress("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.clients: list[Client] = []

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    async def ask(self, data: bytes = GET) -> bytes:
        client = await self.connect()
        await client.send(data)
        return await client.rest()

    async def accepted(self, count: int) -> None:
        """Wait until the server has that many connections."""
        while self.server.connections != count:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def rig(application: Application = hello, limits: Limits | None = None) -> AsyncIterator[Rig]:
    made = Rig(application, limits or Limits())
    await made.server.start([made.listener])
    try:
        yield made
    finally:
        await made.server.stop()
        for client in made.clients:
            await client.close()
        assert made.server.connections == 0


@pytest.fixture
def gate() -> asyncio.Event:
    return asyncio.Event()


async def test_a_request_is_answered_and_the_connection_closed() -> None:
    async with rig() as r:
        answer = await r.ask()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in answer.lower()
    assert answer.endswith(b"hello\r\n0\r\n\r\n")


async def test_a_client_that_has_sent_all_may_close_its_half_and_still_gets_the_answer() -> None:
    async def later(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.01)
        await hello(scope, receive, send)

    async with rig(later) as r:
        client = await r.connect()
        await client.send(GET)
        client.writer.write_eof()
        assert (await client.rest()).startswith(b"HTTP/1.1 200")


async def test_nobody_is_signalled_and_nothing_ticks_while_the_server_is_idle() -> None:
    """The server that comes with uvicorn handles signals and wakes ten times a second."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with rig():
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
        assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x00\xff\x16\x03\x01" * 20 + b"\r\n\r\n", id="binary"),
        pytest.param(b"GET\r\n\r\n", id="no target"),
        pytest.param(b"GET / HTTP/1.1\r\nno colon\r\n\r\n", id="no header"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", id="two hosts"),
        pytest.param(
            b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", id="negative length"
        ),
        pytest.param(
            b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            id="two lengths",
        ),
    ],
)
async def test_garbage_is_a_bad_request_and_says_nothing_in_the_log(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig() as r:
        assert (await r.ask(data)).startswith(b"HTTP/1.1 400")
        assert (await r.ask()).startswith(b"HTTP/1.1 200")
    assert caplog.records == []


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000, id="one header"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 20_000, id="many headers"),
        pytest.param(b"GET /" + b"x" * 100_000, id="target"),
        pytest.param(b"x" * 100_000, id="no end"),
    ],
)
async def test_a_request_that_does_not_end_is_refused(data: bytes) -> None:
    async with rig() as r:
        answer = await r.ask(data)
        # A reset may overtake the answer: the client was still sending.
        assert answer == b"" or answer.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))
        assert (await r.ask()).startswith(b"HTTP/1.1 200")


async def test_a_body_that_nobody_reads_is_not_read() -> None:
    async with rig() as r:
        client = await r.connect()
        await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        for _ in range(100):
            await client.send(b"x" * 10_000)
        answer = await client.rest()
        assert answer == b"" or answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 413"))
        assert (await r.ask()).startswith(b"HTTP/1.1 200")


async def test_what_is_pipelined_after_the_first_request_is_not_answered() -> None:
    async with rig() as r:
        assert (await r.ask(GET * 50 + b"\x00garbage")).count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="says nothing"),
        pytest.param(b"GET / HTTP/1.1\r\nHos", id="stops in the head"),
        pytest.param(
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n",
            id="keeps its body back",
        ),
    ],
)
@pytest.mark.parametrize(
    "limits",
    [Limits(seconds=0.05), Limits(seconds=60, request_seconds=0.05)],
    ids=["answer", "request"],
)
async def test_who_does_not_finish_is_cut_off(sent: bytes, limits: Limits) -> None:
    """However long the answer may take: who only connects leaves no room for those who ask."""

    async def wait_for_body(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with rig(wait_for_body, limits) as r:
        await r.ask(sent)
        assert r.server.timeouts == 1


@pytest.mark.parametrize(
    "request_", [GET, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n12"]
)
async def test_who_has_asked_may_wait_for_the_answer(request_: bytes) -> None:
    asked = asyncio.Event()
    gate = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        await gate.wait()
        await hello(scope, receive, send)

    async with rig(slow, Limits(seconds=3600, request_seconds=60)) as r:
        client = await r.connect()
        await r.accepted(1)
        (connection,) = r.server._open  # noqa: SLF001 - to wait for the end of it would take a minute

        def left() -> float:
            deadline = connection._deadline  # noqa: SLF001 - it has no other sign
            assert deadline is not None
            return deadline.when() - asyncio.get_running_loop().time()

        assert left() <= 60
        await client.send(request_)
        await asked.wait()
        assert left() > 60
        gate.set()
        assert b"hello" in await client.rest()


async def test_drip_fed_bytes_do_not_extend_the_deadline() -> None:
    async with rig(limits=Limits(seconds=0.1)) as r:
        client = await r.connect()
        closed = asyncio.ensure_future(client.rest())
        head = iter(b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000)
        while not closed.done():
            await client.send(bytes([next(head)]))
            await asyncio.wait([closed], timeout=0.005)
        assert r.server.timeouts == 1


async def test_who_does_not_read_the_answer_is_cut_off() -> None:
    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})

    async with rig(large, Limits(seconds=0.1)) as r:
        client = await r.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(GET)
        await r.accepted(1)
        await r.accepted(0)
        assert r.server.timeouts == 1


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """The usual limit of 1024 is too low for who holds both ends of a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
async def test_a_thousand_idle_connections_leave_room_for_the_next() -> None:
    async with rig(limits=Limits(connections=8)) as r:
        idle = [await r.connect() for _ in range(1000)]
        assert r.server.connections <= 8
        for client in idle[:-8]:
            assert await client.rest() == b""
        assert r.server.refused == len(idle) - 8
        assert (await r.ask()).startswith(b"HTTP/1.1 200")


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may open nothing more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_want_of_descriptors_is_one_failure_at_a_time_and_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop would try as often as connections may wait, and each failure would try again."""
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0)
    failures: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: failures.put_nowait(context["message"]))
    server = Server(hello)
    listener = bind(TcpAddress("127.0.0.1", 0))
    with socket.create_connection(listener.getsockname()) as client:
        client.setblocking(False)
        with no_descriptors():
            await server.start([listener])
            assert "out of system resource" in await failures.get()
            assert failures.empty()
        await loop.sock_sendall(client, GET)
        assert (await loop.sock_recv(client, 65536)).startswith(b"HTTP/1.1 200")
    await server.stop()


async def test_one_too_many_is_closed_and_the_others_are_served(gate: asyncio.Event) -> None:
    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await gate.wait()
        await hello(scope, receive, send)

    async with rig(wait, Limits(connections=2)) as r:
        first, second = await r.connect(), await r.connect()
        for client in (first, second):
            await client.send(GET)
        await r.accepted(2)
        assert await (await r.connect()).rest() == b""
        assert r.server.refused == 1
        gate.set()
        assert (await first.rest()).startswith(b"HTTP/1.1 200")
        assert (await second.rest()).startswith(b"HTTP/1.1 200")


async def test_idle_connections_keep_nobody_out(gate: asyncio.Event) -> None:
    """Whoever is longest without a question makes room; who waits for an answer never does."""

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await gate.wait()
        await hello(scope, receive, send)

    async with rig(wait, Limits(connections=3)) as r:
        busy = await r.connect()
        await busy.send(GET)
        oldest, half = await r.connect(), await r.connect()
        await half.send(GET[:-2])
        await r.accepted(3)
        new = await r.connect()
        await new.send(GET)
        assert await oldest.rest() == b""
        newest = await r.connect()
        await newest.send(GET)
        assert await half.rest() == b""
        gate.set()
        for client in (busy, new, newest):
            assert (await client.rest()).startswith(b"HTTP/1.1 200")
        assert r.server.refused == 2


async def test_a_failing_application_is_a_500_and_the_next_request_is_answered() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/bad":
            raise ValueError(scope["path"])
        await hello(scope, receive, send)

    async with rig(fail) as r:
        assert (await r.ask(GET.replace(b"/ ", b"/bad "))).startswith(b"HTTP/1.1 500")
        assert (await r.ask()).startswith(b"HTTP/1.1 200")


async def test_stopping_lets_an_answer_end_and_accepts_nothing_more(gate: asyncio.Event) -> None:
    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        gate.set()
        await asyncio.sleep(0.01)
        await hello(scope, receive, send)

    async with rig(wait) as r:
        client = await r.connect()
        await client.send(GET)
        await gate.wait()
        await r.server.stop()
        assert (await client.rest()).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConnectionRefusedError):
            await r.connect()


async def test_stopping_cuts_off_what_does_not_end(
    gate: asyncio.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits is told that there is no answer, and who has not asked is not."""
    monkeypatch.setattr("agent.control.http.SHUTDOWN_SECONDS", 0.01)

    async def hang(scope: Scope, receive: Receive, send: Send) -> None:
        gate.set()
        await asyncio.Event().wait()

    async with rig(hang) as r:
        busy, silent = await r.connect(), await r.connect()
        await busy.send(GET)
        await gate.wait()
        await r.accepted(2)
        await r.server.stop()
        assert r.server.connections == 0
        assert (await busy.rest()).startswith(b"HTTP/1.1 503")
        assert await silent.rest() == b""
    assert caplog.text == "", "it is no bug"


async def test_stopping_waits_for_nobody_who_does_not_read_its_answer(
    gate: asyncio.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agent.control.http.SHUTDOWN_SECONDS", 0.01)
    monkeypatch.setattr("agent.control.http.FAREWELL_SECONDS", 0.01)

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gate.set()
        while True:
            await send({"type": "http.response.body", "body": bytes(1_000_000), "more_body": True})

    async with rig(endless) as r:
        client = await r.connect()
        await client.send(GET)
        await gate.wait()
        await r.server.stop()
        assert r.server.connections == 0
    assert caplog.text == ""


async def test_the_same_server_answers_on_ipv6_and_on_a_path(tmp_path: Path) -> None:
    server = Server(hello)
    path = UnixAddress(str(tmp_path / "s"))
    listeners = [bind(TcpAddress("::1", 0)), await asyncio.to_thread(bind, path)]
    await server.start(listeners)
    port = listeners[0].getsockname()[1]
    for opened in (
        asyncio.open_connection("::1", port),
        asyncio.open_unix_connection(describe(listeners[1])),
    ):
        client = Client(*await opened)
        await client.send(GET)
        assert (await client.rest()).startswith(b"HTTP/1.1 200")
        await client.close()
    await server.stop()
