"""News from the kernel and from udev, as hints.

Owns one socket per source (`host.netlink`). A message is a hint on its first line (`host.uevent`).

What may never happen is silence that nobody notices:

- **Overflow.** The kernel drops what the socket cannot hold and sets ENOBUFS, which then makes
  every ``poll`` of pyudev fail, for ever. Asking a second handle of the same socket for SO_ERROR
  reads the error and clears it; the reader goes on, and one look at everything makes up for the
  loss.
- **Deafness.** Without udevd's control file, libudev joins no multicast group and says nothing.
  The socket's own address tells: no group, no messages.
- **Death.** Any other error of the socket closes it.

A source that is deaf or dead says so in its state, for whose time the reconciler looks by the
clock, and is opened anew with growing delay.

The order that matters: a source is opened (and collects messages) before the first look, and every
time it is opened *again* it asks for a look at everything.

A storm is met three times: udev's messages of other subsystems are kept out by a filter in the
socket, messages that say the same are one hint per batch, and a batch is bounded, so that the
loop's other tasks get their turn. The kernel's messages of other subsystems are thrown away here,
for libudev, asked to do it, does not return before it has met one that it keeps or the last.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import functools
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Final, NoReturn, Self

import structlog

from agent.host.hints import Hint
from agent.host.netlink import Connection, connect
from agent.host.uevent import ACTIONS, OTHER, SUBSYSTEMS, Message, Source, hint_of
from agent.troubles import Troubles

BATCH: Final = 128
"""Messages read before the loop's other tasks have their turn: about 3 ms."""
FIRST_DELAY: Final = 0.25
LONGEST_DELAY: Final = 30.0
"""Seconds between attempts to open a source."""

_log = structlog.get_logger(__name__)


class SourceState(enum.StrEnum):
    """Whether a source hears anything."""

    UP = "up"
    DEAF = "deaf"
    """The socket is open and belongs to no multicast group: nothing will ever come."""
    DOWN = "down"
    """There is no socket."""


class Monitor:
    """One source of events: reads its messages on the event loop and hands on hints.

    Made by `open`, driven by `run`, ended by cancelling that. The counters grow for as long as the
    object lives, whatever happens to the socket.

    Args:
        source: Whom it listens to.
        emit: Takes each hint, in the loop's thread; must neither block nor raise.
        connect: Opens the socket; raises what the real socket raises.
        subsystems: Whose messages count; the others become no hints.
        batch: How many messages are read before the loop's other tasks have their turn.
        sleep: Waits between two attempts to open the socket.
    """

    def __init__(
        self,
        source: Source,
        emit: Callable[[Hint], None],
        connect: Callable[[], Connection],
        *,
        subsystems: Collection[str] = SUBSYSTEMS,
        batch: int = BATCH,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.source: Final = source
        self.state = SourceState.DOWN
        self.events: Counter[tuple[str, str]] = Counter()
        """Messages by (subsystem, action); both from closed sets, the rest is ``other``."""
        self.overflows = 0
        """How often the kernel said that it dropped messages."""
        self.malformed = 0
        """Messages that could not be read."""
        self.opened = 0
        """How often the socket was opened and could hear."""
        self._emit = emit
        self._connect = connect
        self._subsystems = frozenset(subsystems)
        self._batch = batch
        self._sleep = sleep
        self._connection: Connection | None = None
        self._announced: SourceState | None = None
        self._troubles = Troubles()

    @classmethod
    def open(
        cls,
        source: Source,
        emit: Callable[[Hint], None],
        *,
        subsystems: Collection[str] = SUBSYSTEMS,
        receive_buffer: int | None = None,
    ) -> Self:
        """Open a source: from here on its messages are collected, for `run` to read.

        Open before the first look, and before the loop runs or in a thread: the first source that
        a process opens runs ldconfig. Asks for no look. A source that is deaf, or cannot be opened
        now, is not an error: its state says so, and `run` tries again.

        Args:
            source: Whom to listen to.
            emit: Takes each hint, in the loop's thread; must neither block nor raise.
            subsystems: `SUBSYSTEMS`, and what profiles need beyond them.
            receive_buffer: Bytes that the kernel may keep for this socket. None leaves libudev's
                choice: 128 MiB with CAP_NET_ADMIN, else 8 MiB, about 20,000 messages.

        Raises:
            SourceUnavailableError: This process can never open it.
        """
        opens = functools.partial(connect, source, subsystems, receive_buffer)
        monitor = cls(source, emit, opens, subsystems=subsystems)
        monitor.listen()
        return monitor

    def listen(self) -> None:
        """Open the socket and test whether it can hear; `state` is the answer.

        Raises:
            SourceUnavailableError: This process can never open it.
        """
        self.close()
        try:
            connection = self._connect()
        except OSError as error:
            self._became(SourceState.DOWN, problem=str(error))
            return
        if connection.deaf:
            connection.close()
            self._became(
                SourceState.DEAF,
                problem="libudev joined no multicast group",
                hint="no udevd: /run/udev/control is missing and /dev is no devtmpfs",
            )
            return
        self._connection = connection
        self.opened += 1
        self._became(SourceState.UP)

    def close(self) -> None:
        """Close the socket, if one is open; `run` does so at its end."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self.state = SourceState.DOWN

    async def run(self) -> NoReturn:
        """Read until cancelled; never returns.

        Raises:
            SourceUnavailableError: The socket died, and this process can never open another.
        """
        delay = FIRST_DELAY
        looked_as = SourceState.UP
        try:
            while True:
                if reopened := self._connection is None:
                    self.listen()
                if self._connection is not None:
                    if reopened:
                        # What came before, only a look that starts after this moment can tell.
                        self._look_everywhere("opened", time.monotonic())
                    heard = self.events.total()
                    await self._read_until_it_dies(self._connection)
                    self.close()
                    if self.events.total() > heard:
                        delay = FIRST_DELAY
                    looked_as = SourceState.UP
                elif self.state is not looked_as:
                    self._look_everywhere(self.state.value, time.monotonic())
                    looked_as = self.state
                await self._sleep(delay)
                delay = min(delay * 2, LONGEST_DELAY)
        finally:
            self.close()

    async def _read_until_it_dies(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        died: asyncio.Future[None] = loop.create_future()
        loop.add_reader(connection.fileno(), self._readable, connection, died)
        try:
            await died
        finally:
            loop.remove_reader(connection.fileno())

    def _readable(self, connection: Connection, died: asyncio.Future[None]) -> None:
        """Read one batch. The loop calls again while there is more."""
        if died.done():
            return
        try:
            if not self._read_batch(connection):
                died.set_result(None)
        except Exception as bug:  # noqa: BLE001 - the loop would log it and call again, for ever
            died.set_exception(bug)

    def _read_batch(self, connection: Connection) -> bool:
        """Read at most a batch and emit its hints; False if the socket is dead."""
        news: dict[Message, float] = {}  # in order, each once, with the time of the first
        lost: dict[str, float] = {}
        alive = True
        for _ in range(self._batch):
            try:
                message = connection.receive()
            except (OSError, ValueError) as error:
                now = time.monotonic()
                # Reading SO_ERROR also clears it. Unread, it would make each `receive` fail.
                pending = connection.pending_error()
                if errno.ENOBUFS in {pending, getattr(error, "errno", None)}:
                    self.overflows += 1
                    lost.setdefault("overflow", now)
                elif isinstance(error, ValueError) and not pending:
                    self.malformed += 1
                    lost.setdefault("malformed", now)
                else:
                    self._became(
                        SourceState.DOWN, error=os.strerror(pending) if pending else str(error)
                    )
                    alive = False
                    break
                continue
            if message is None:
                break
            self.events[self._labels(message)] += 1
            if message.subsystem in self._subsystems:
                news.setdefault(message, time.monotonic())
        for reason, received in lost.items():
            self._complain(reason, received)
            self._look_everywhere(reason, received)
        for message, received in news.items():
            self._emit(hint_of(message, self.source, received))
        return alive

    def _labels(self, message: Message) -> tuple[str, str]:
        return (
            message.subsystem if message.subsystem in self._subsystems else OTHER,
            message.action if message.action in ACTIONS else OTHER,
        )

    def _look_everywhere(self, reason: str, received: float) -> None:
        self._emit(Hint(reason=reason, everything=True, received=received))

    def _became(self, state: SourceState, **details: str) -> None:
        """Take on a state; say so once, not at each attempt that ends in the same."""
        self.state = state
        if state is self._announced:
            return
        self._announced = state
        match state:
            case SourceState.UP:
                _log.info("source-up", source=self.source)
            case SourceState.DEAF:
                _log.warning("source-deaf", source=self.source, **details)
            case SourceState.DOWN:
                _log.warning("source-down", source=self.source, **details)

    def _complain(self, trouble: str, now: float) -> None:
        """Log a trouble that can come a thousand times a second; the counters have every case."""
        if not self._troubles.is_news(trouble, now):
            return
        if trouble == "overflow":
            _log.warning("source-overflow", source=self.source, overflows=self.overflows)
        else:
            _log.warning("source-malformed", source=self.source, malformed=self.malformed)
