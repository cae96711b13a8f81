"""The life of a port or a socket: opened when it can be, kept, released at the end.

A port that is taken, or not allowed, is said once and tried again with growing delay; the agent's
own work neither waits for it nor ends with it.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NoReturn

import structlog

from agent.control.http import Application, Limits, Server
from agent.control.sockets import Address, TcpAddress, UnixAddress, bind, describe, unlink

_log = structlog.get_logger()

FIRST_DELAY: Final = 1.0
LONGEST_DELAY: Final = 60.0
"""Seconds between two attempts to open the port."""


class HttpService:
    """Serves an application on an address, or on sockets that systemd handed over.

    Args:
        name: What it is for, for the log: ``metrics``, ``control``.
        application: What answers.
        where: The address to listen on, or listening sockets that exist already.
        limits: How much strangers may use.
        sleep: Waits between two attempts to open the port.
    """

    def __init__(
        self,
        name: str,
        application: Application,
        *,
        where: Address | Sequence[socket.socket],
        limits: Limits | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.listening: tuple[str, ...] = ()
        """Where it answers now."""
        self.http: Final = Server(application, limits)
        self._name = name
        self._where = where
        self._sleep = sleep

    async def run(self) -> NoReturn:
        """Serve until cancelled; never returns. Then the port is free again, within about 1 s."""
        if isinstance(self._where, TcpAddress | UnixAddress):
            ours = await self._open(self._where)
            listeners: Sequence[socket.socket] = (ours,)
        else:
            ours = None
            listeners = self._where
        try:
            await self.http.start(listeners)
            self.listening = tuple(describe(listener) for listener in listeners)
            _log.info("listening", service=self._name, address=self.listening)
            await asyncio.get_running_loop().create_future()
        finally:
            self.listening = ()
            # What ends this task may come twice; the port is released all the same.
            await asyncio.shield(self._release(ours))
        raise AssertionError  # pragma: no cover - the future above is never done

    async def _release(self, ours: socket.socket | None) -> None:
        """Close everything; a path that we made goes first, so that nobody finds it dead."""
        if ours is not None:
            await asyncio.to_thread(unlink, ours)
        await self.http.stop()

    async def _open(self, address: Address) -> socket.socket:
        """Open the port, however long that takes."""
        delay = FIRST_DELAY
        said = ""
        while True:
            try:
                return await _bind(address)
            except OSError as error:
                problem = f"the {self._name} socket {address} cannot be opened: {error.strerror}"
                if problem != said:
                    said = problem
                    _log.warning(
                        "not-listening", service=self._name, address=str(address), problem=problem
                    )
            await self._sleep(delay)
            delay = min(delay * 2, LONGEST_DELAY)


async def _bind(address: Address) -> socket.socket:
    """Bind in a thread; a socket that nobody waits for any more is closed.

    Raises:
        OSError: It is taken, or not allowed here.
    """
    binding = asyncio.ensure_future(asyncio.to_thread(bind, address))
    try:
        return await asyncio.shield(binding)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            listener = await binding
            await asyncio.to_thread(unlink, listener)
            listener.close()
        raise
