"""An HTTP server for one small ASGI application, bounded in every direction.

uvicorn's protocol with h11 parses and answers; what surrounds it is ours. uvicorn's own ``Server``
installs signal handlers and wakes ten times a second for ever, which an idle agent must not, and
its protocol waits without limit for a request to be completed. Here

- a connection carries one request and is closed; nothing is pipelined and nothing kept alive,
- from connecting to the last byte of the answer it has ``seconds``, and of the request
  ``request_seconds``; then it is cut off, whoever is slow,
- of more than ``connections`` at once the oldest that has not asked yet is closed, so that idle
  ones keep nobody out; if all wait for an answer, the new one is,
- more than ``request_bytes`` of request are not read.

So the most that strangers can hold is a constant, and the agent's own work goes on beside it.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from agent.control.sockets import BACKLOG

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI 3 application."""

SHUTDOWN_SECONDS: Final = 1.0
"""How long answers that are under way may take at the end."""
FAREWELL_SECONDS: Final = 0.2
"""How long those who wait still have to be told then that there is no answer."""
_UCRED: Final = struct.Struct("iII")
"""``struct ucred``, unix(7)."""
_HAS_ASKED: Final = (h11.DONE, h11.MUST_CLOSE)
_TOO_LARGE: Final = (
    b"HTTP/1.1 413 Content Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class Limits(msgspec.Struct, frozen=True):
    """How much strangers may use."""

    connections: int = 16
    """At once; what is too much is closed without an answer."""
    seconds: float = 10.0
    """From connecting to the last byte of the answer."""
    request_seconds: float = 10.0
    """From connecting to the last byte of the request: who waits for an answer may take longer than
    who has not even asked."""
    request_bytes: int = 16_384
    """Of head and body together."""


class Server:
    """Answers on listening sockets from `start` to `stop`, in the running loop.

    Args:
        application: What answers; an exception in it is answered by 500 and logged. At the end one
            that has not answered is cancelled, and may say so to who waits; if it does not, that
            is answered by 503.
        limits: How much strangers may use.
    """

    def __init__(self, application: Application, limits: Limits | None = None) -> None:
        self.refused = 0
        """Connections closed because there were too many."""
        self.timeouts = 0
        """Connections cut off because they took too long."""
        self.limits: Final = limits or Limits()
        # uvicorn tells of every malformed request; whoever sends those shall not fill our log.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._config = Config(
            _told_of_the_end(application),
            http=H11Protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            h11_max_incomplete_event_size=self.limits.request_bytes,
        )
        self._config.load()
        self._state = ServerState()
        self._state.default_headers = [(b"connection", b"close")]
        self._servers: list[asyncio.Server] = []
        self._open: dict[_Connection, None] = {}
        """In the order in which they came."""
        self._none_open = asyncio.Event()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._open)

    async def start(self, listeners: Sequence[socket.socket]) -> None:
        """Answer on these sockets, which `stop` closes."""
        loop = asyncio.get_running_loop()
        for listener in listeners:
            # asyncio accepts `backlog` connections at once, and goes on after the first that fails
            # for want of descriptors: each failure schedules another try, thousands a second soon.
            server = await loop.create_server(lambda: _Connection(self), sock=listener, backlog=1)
            listener.listen(BACKLOG)
            self._servers.append(server)

    async def stop(self) -> None:
        """Accept nothing more, let answers that are under way end (1 s), cut off the rest.

        Who still waits then is told that there will be no answer.
        """
        for server in self._servers:
            server.close()
        self._servers = []
        for connection in tuple(self._open):
            connection.shutdown()
        await self._none_open_within(SHUTDOWN_SECONDS)
        for connection in tuple(self._open):
            if not connection.is_waiting:
                connection.abort()
        await asyncio.sleep(0)  # now they know
        tasks = tuple(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._none_open_within(FAREWELL_SECONDS)
        for connection in tuple(self._open):
            connection.abort()
        await self._until_none_open()

    async def _none_open_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._until_none_open()

    async def _until_none_open(self) -> None:
        while self._open:
            self._none_open.clear()
            await self._none_open.wait()

    def _accepted(self, connection: "_Connection") -> bool:
        """Take a connection in, if there is room or an idle one to make some."""
        is_full = len(self._open) >= self.limits.connections
        if is_full:
            self.refused += 1
            idle = next((each for each in self._open if each.is_idle), None)
            if idle is not None:
                idle.abort()
                self._gone(idle)
                is_full = False
        if is_full or not self._servers:
            return False
        self._open[connection] = None
        return True

    def _gone(self, connection: "_Connection") -> None:
        self._open.pop(connection, None)
        if not self._open:
            self._none_open.set()


class _Connection(H11Protocol):
    """One connection, one request, one deadline."""

    def __init__(self, server: Server) -> None:
        super().__init__(config=server._config, server_state=server._state, app_state={})  # noqa: SLF001 - its own server
        self._server = server
        self._received = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._answer_by = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, or close it at once."""
        if not self._server._accepted(self):  # noqa: SLF001 - as above
            transport.abort()
            return
        limits = self._server.limits
        self._answer_by = self.loop.time() + limits.seconds
        seconds = min(limits.seconds, limits.request_seconds)
        self._deadline = self.loop.call_later(seconds, self._too_late)
        self.app_state = {"peer": peer_of(transport.get_extra_info("socket"))}
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        if self._deadline is None:
            return  # never taken
        self._deadline.cancel()
        super().connection_lost(exc)
        self._server._gone(self)  # noqa: SLF001 - as above

    def data_received(self, data: bytes) -> None:
        """Parse it, unless it is too much."""
        self._received += len(data)
        if self._received <= self._server.limits.request_bytes:
            super().data_received(data)
            self._has_asked()
        elif self.conn.our_state is h11.IDLE:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        else:
            self.transport.pause_reading()  # the answer is on its way; nobody needs the rest

    def _has_asked(self) -> None:
        """Once it has said all, it has the time that the answer takes."""
        if self._deadline is not None and self.conn.their_state in _HAS_ASKED:
            self._deadline.cancel()
            self._deadline = self.loop.call_at(self._answer_by, self._too_late)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has said all may still wait for the answer."""
        return self.conn.our_state in {h11.SEND_RESPONSE, h11.SEND_BODY}

    @property
    def is_idle(self) -> bool:
        """Whether the client has not asked yet, or not to the end."""
        return self.conn.our_state is h11.IDLE

    @property
    def is_waiting(self) -> bool:
        """Whether the client has asked, and has nothing of an answer yet."""
        return self.conn.our_state is h11.SEND_RESPONSE

    def abort(self) -> None:
        """Close it now, whatever is still to be sent."""
        self.transport.abort()

    def _too_late(self) -> None:
        self._server.timeouts += 1
        self.abort()


def _told_of_the_end(application: Application) -> Application:
    """An application that answers when it is cancelled: uvicorn would take that for a bug."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def say(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await application(scope, receive, say)
        except asyncio.CancelledError:
            if not has_begun:
                await send({"type": "http.response.start", "status": 503, "headers": []})
                await send({"type": "http.response.body", "body": b""})

    return answer


def peer_of(connection: socket.socket) -> str:
    """Who is at the other end of a connection, for the log: the kernel's word, not the peer's."""
    if connection.family != socket.AF_UNIX:
        return "network"
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    return f"pid {pid}, uid {uid}"
