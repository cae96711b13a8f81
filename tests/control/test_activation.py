"""Sockets as systemd itself hands them over, served by the real server."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.control.sockets import TcpAddress, bind

# What `run` does with a socket named "metrics"; it ends after the first answer.
PROGRAM = """
import asyncio, os
from agent.control.pages import Reply, application
from agent.control.server import HttpService
from agent.control.sockets import passed_sockets

async def main():
    answered = asyncio.Event()
    async def page():
        answered.set()
        return Reply(b"it works")
    found = passed_sockets(os.environ)
    server = HttpService("metrics", application({"/metrics": page}), where=found["metrics"])
    serving = asyncio.create_task(server.run())
    await answered.wait()
    while server.http.connections:
        await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.wait([serving])

asyncio.run(main())
"""


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | tuple[str, int]]:
    """Where systemd listens: a free port, or a path."""
    if request.param == "unix":
        yield str(tmp_path / "metrics.sock")
        return
    with bind(TcpAddress("127.0.0.1", 0)) as free:
        name = free.getsockname()
    yield name


def connect(address: str | tuple[str, int], systemd: subprocess.Popen[bytes]) -> socket.socket:
    """Connect as soon as systemd listens."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    while True:
        client = socket.socket(family)
        try:
            client.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            client.close()
            assert systemd.poll() is None
        else:
            return client


@pytest.mark.systemd
def test_the_first_scrape_starts_the_program_and_is_answered(
    address: str | tuple[str, int],
) -> None:
    listen = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
    with subprocess.Popen(
        [
            *("systemd-socket-activate", f"--listen={listen}", "--fdname=metrics"),
            *(sys.executable, "-c", PROGRAM),
        ],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
    ) as systemd:
        with connect(address, systemd) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert systemd.wait() == 0, systemd.stderr and systemd.stderr.read()
    assert answer.endswith(b"\r\n\r\nit works")
