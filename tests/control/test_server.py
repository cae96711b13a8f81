"""The metrics port: what it answers, and that it comes and goes without harm to anybody."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from agent.control.http import Application, Limits
from agent.control.pages import TEXT, Reply, application, document, probe
from agent.control.server import LONGEST_DELAY, HttpService
from agent.control.settings import MetricsSettings
from agent.control.sockets import Address, TcpAddress, UnixAddress, bind, parse_address

LOOPBACK = TcpAddress("127.0.0.1", 0)


class Answer:
    """A verdict for a probe."""

    def __init__(self, *problems: str) -> None:
        self.ok = not problems
        self.document: Mapping[str, object] = {"ok": self.ok, "problems": problems}


async def broken() -> Reply:
    raise RuntimeError("a secret that no stranger shall read")


async def slow() -> Reply:
    await asyncio.Event().wait()
    raise AssertionError


async def numbers() -> bytes:
    return b"cdi_agent_up 1\n"


PAGES = application(
    {
        "/metrics": document(numbers, TEXT),
        "/healthz": probe(lambda: Answer("the disk is full")),
        "/readyz": probe(Answer),
        "/broken": broken,
        "/slow": slow,
    }
)


@contextlib.asynccontextmanager
async def serving(
    where: Address | Sequence[socket.socket] = LOOPBACK,
    *,
    app: Application = PAGES,
    limits: Limits | None = None,
) -> AsyncIterator[HttpService]:
    server = HttpService("metrics", app, where=where, limits=limits)
    task = asyncio.create_task(server.run())
    while not server.listening:  # noqa: ASYNC110 - binding takes a thread and a few turns
        await asyncio.sleep(0)
    try:
        yield server
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert server.listening == ()


async def ask(server: HttpService, path: str, method: str = "GET") -> tuple[int, bytes, bytes]:
    """Status, head and body of an answer."""
    address = parse_address(server.listening[0])
    if isinstance(address, TcpAddress):
        reader, writer = await asyncio.open_connection(address.host, address.port)
    else:
        reader, writer = await asyncio.open_unix_connection(address.path)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), head.lower(), body


@pytest.mark.parametrize(
    ("path", "method", "status", "body"),
    [
        pytest.param("/metrics", "GET", 200, b"cdi_agent_up 1\n", id="metrics"),
        pytest.param("/metrics", "HEAD", 200, b"", id="head"),
        pytest.param("/metrics?name[]=x", "GET", 200, b"cdi_agent_up 1\n", id="query"),
        pytest.param("/readyz", "GET", 200, b'{"ok":true,"problems":[]}\n', id="ready"),
        pytest.param(
            "/healthz",
            "GET",
            503,
            b'{"ok":false,"problems":["the disk is full"]}\n',
            id="unhealthy",
        ),
        pytest.param("/metrics", "POST", 405, b"nothing here can be changed\n", id="post"),
        pytest.param("/metrics", "DELETE", 405, b"nothing here can be changed\n", id="delete"),
        pytest.param("/metrics/", "GET", 404, b"no such page\n", id="almost a page"),
        pytest.param("/../metrics", "GET", 404, b"no such page\n", id="dots"),
        pytest.param("/%2e%2e/etc/passwd", "GET", 404, b"no such page\n", id="escaped dots"),
        pytest.param("/", "GET", 200, b"/metrics\n/healthz\n/readyz\n/broken\n/slow\n", id="index"),
    ],
)
async def test_pages(path: str, method: str, status: int, body: bytes) -> None:
    async with serving() as server:
        got_status, head, got_body = await ask(server, path, method)
    assert (got_status, got_body) == (status, body)
    assert b"cache-control: no-store" in head
    assert b"server:" not in head


async def test_405_says_what_is_allowed() -> None:
    async with serving() as server:
        assert b"allow: get, head" in (await ask(server, "/metrics", "PUT"))[1]


async def test_a_broken_page_is_logged_with_its_traceback_and_tells_strangers_nothing() -> None:
    async with serving() as server:
        with capture_logs() as logs:
            status, _, body = await ask(server, "/broken")
        assert status == 500
        assert b"secret" not in body
        assert [entry["event"] for entry in logs] == ["page-failed"]
        assert logs[0]["exc_info"] is True
        assert (await ask(server, "/metrics"))[0] == 200


async def test_a_page_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.control.pages.PAGE_SECONDS", 0.01)
    async with serving() as server:
        assert (await ask(server, "/slow"))[0] == 503


async def test_health_is_asked_anew_for_each_request() -> None:
    verdicts = iter([Answer(), Answer("broken"), Answer()])
    async with serving(app=application({"/healthz": probe(lambda: next(verdicts))})) as server:
        assert [(await ask(server, "/healthz"))[0] for _ in range(3)] == [200, 503, 200]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_the_port_is_free_again_at_once_and_can_be_served_again(host: str) -> None:
    where: Address = TcpAddress(host, 0)
    for _ in range(3):
        async with serving(where) as server:
            where = parse_address(server.listening[0])
            assert (await ask(server, "/metrics"))[0] == 200
    bind(where).close()


async def test_a_path_is_served_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    async with serving(UnixAddress(str(path))) as server:
        assert (await ask(server, "/metrics"))[0] == 200
    assert not path.exists()


async def test_sockets_of_systemd_are_served_and_their_path_is_left_to_systemd(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.sock"
    passed = await asyncio.to_thread(bind, UnixAddress(str(path)))
    async with serving([passed]) as server:
        assert (await ask(server, "/metrics"))[0] == 200
    assert path.exists()


async def test_a_taken_port_is_said_once_and_served_as_soon_as_it_is_free() -> None:
    """The delay grows to a minute; whatever holds the port, the server neither ends nor spins."""
    taken = bind(LOOPBACK)
    address = TcpAddress(*taken.getsockname())
    delays: list[float] = []

    async def sleep(delay: float) -> None:
        delays.append(delay)
        if len(delays) == 10:
            taken.close()
        await asyncio.sleep(0)

    server = HttpService("metrics", PAGES, where=address, sleep=sleep)
    with capture_logs() as logs:
        task = asyncio.create_task(server.run())
        while not server.listening:  # noqa: ASYNC110 - it comes by itself
            await asyncio.sleep(0)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert max(delays) == LONGEST_DELAY
    assert [entry["event"] for entry in logs] == ["not-listening", "listening"]
    assert logs[0]["log_level"] == "warning"
    assert "Address already in use" in logs[0]["problem"]
    assert str(address) in logs[0]["problem"]
    assert (await ask(server, "/metrics"))[0] == 200
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(TcpAddress("203.0.113.1", 9478), id="not an address of this host"),
        pytest.param(UnixAddress("/nowhere/metrics.sock"), id="no folder"),
        pytest.param(UnixAddress("/dev/null"), id="not a socket"),
    ],
)
async def test_an_impossible_address_is_tried_again_until_the_end(where: Address) -> None:
    tried = asyncio.Event()

    async def sleep(delay: float) -> None:
        if delay > 4:
            tried.set()
        await asyncio.sleep(0)

    server = HttpService("metrics", PAGES, where=where, sleep=sleep)
    with capture_logs() as logs:
        task = asyncio.create_task(server.run())
        await tried.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [entry["event"] for entry in logs] == ["not-listening"]


async def test_a_socket_whose_folder_is_missing_says_so_and_opens_once_it_is_there(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"

    async def sleep(_: float) -> None:
        await asyncio.to_thread(folder.mkdir)

    path = f"{folder}/control.sock"
    server = HttpService("control", PAGES, where=UnixAddress(path), sleep=sleep)
    with capture_logs() as logs:
        task = asyncio.create_task(server.run())
        while not server.listening:  # noqa: ASYNC110 - it comes by itself
            await asyncio.sleep(0)
    assert logs[0]["problem"] == (
        f"the control socket {path} cannot be opened: its folder does not exist"
    )
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_server_that_ends_while_it_binds_leaves_no_socket(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.sock"
    task = asyncio.create_task(HttpService("metrics", PAGES, where=UnixAddress(str(path))).run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not path.exists()


@pytest.mark.parametrize(
    "document",
    [
        pytest.param({}, id="default"),
        pytest.param({"listen": None}, id="off"),
        pytest.param({"listen": "[::]:80"}, id="everywhere"),
        pytest.param({"listen": "/run/cdi-agent/metrics.sock"}, id="path"),
    ],
)
def test_settings_that_are_accepted(document: Mapping[str, object]) -> None:
    settings = msgspec.convert(document, MetricsSettings)
    assert settings.listen == document.get("listen", "127.0.0.1:9478")


def test_a_bad_address_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"'localhost:80' is not a numeric address"):
        msgspec.convert({"listen": "localhost:80"}, MetricsSettings)


def test_the_port_is_open_to_this_host_only_by_default() -> None:
    listen = MetricsSettings().listen
    assert listen is not None
    address = parse_address(listen)
    assert isinstance(address, TcpAddress)
    assert address.host == "127.0.0.1"
