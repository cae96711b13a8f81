"""Children that wait, started, for what they are to do: starting one takes longer than its work.

An interpreter needs some ten milliseconds to begin, and a claim needs a child for each write, one
after another. So while claims are busy, each child that is used is replaced by one that waits for
its arguments; when none was wanted for a while, those that wait are let go. A child still does one
thing and ends, and one whose agent has died has been told nothing and does nothing.
"""

import asyncio
import os
import select
from collections.abc import Callable, Sequence
from typing import Final

from agent.vfio.children import Child, Children

MOST: Final = 3
"""How many wait at most; more devices than that are seldom moved at once."""

REPLACE: Final = 0.005
"""Seconds after the end of a child until others are started: first comes what it was waited for."""

IDLE: Final = 5.0
"""Seconds without work after which those that wait are let go."""

_AT_ONCE: Final = select.PIPE_BUF
"""Bytes that a pipe takes all or not at all, pipe(7): nobody may do half of what it is to do."""


class Spares:
    """Starts children of one program.

    Args:
        children: Keeps account of them.
        program: Its command; without arguments it waits for them (`agent.vfio.arguments`).
        most: How many may wait; 0 if the program cannot wait.
    """

    def __init__(self, children: Children, program: Sequence[str], *, most: int = MOST) -> None:
        self.program: Final = tuple(program)
        self.most: Final = most
        self._children = children
        self._waiting: list[Child] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def start(self, *arguments: str) -> Child:
        """Let a child do something: one that waits, or a new one.

        Raises:
            OSError: It cannot be started.
        """
        child = self._told(arguments) or self._children.start((*self.program, *arguments))
        if self.most:
            child.gone.add_done_callback(self._ended)
        return child

    def _ended(self, _gone: "asyncio.Future[int | None]") -> None:
        if not self._is_closed:
            self._later(REPLACE, self._replace)

    def _replace(self) -> None:
        """Have others wait for the work that is likely to follow."""
        while len(self._waiting) < self.most:
            try:
                self._waiting.append(self._children.start(self.program, waits=True))
            except OSError:
                break  # the next one is started when it is wanted
        self._later(IDLE, self._dismiss)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, act)

    def _dismiss(self) -> None:
        """Let go of those that wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for child in self._waiting:
            child.dismiss()
        self._waiting.clear()

    def close(self) -> None:
        """Let go of those that wait, and have no others wait any more."""
        self._is_closed = True
        self._dismiss()

    def _told(self, arguments: Sequence[str]) -> Child | None:
        text = b"\0".join(map(os.fsencode, arguments))
        if len(text) > _AT_ONCE:
            return None
        while self._waiting:
            child = self._waiting.pop(0)
            if child.tell(text):
                return child
        return None
