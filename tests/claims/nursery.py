"""Where the agents of these tests come from: see ``agent.py``, which this talks to."""

import subprocess
import sys
from pathlib import Path
from typing import IO, Final

import msgspec

from tests.claims.agent import Begun, Ended, Start

PATIENCE: Final = 60.0
"""Seconds after which a test that waits has failed."""


class Nursery:
    """Starts agents, each a copy of one process that has everything imported."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.claims.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to: Final[IO[bytes]] = self._process.stdin
        self._from: Final[IO[bytes]] = self._process.stdout

    def start(self, start: Start) -> int:
        """Start an agent; its process id."""
        self._to.write(msgspec.json.encode(start) + b"\n")
        self._to.flush()
        said = self._hear()
        assert isinstance(said, Begun)
        return said.pid

    def await_end(self) -> int:
        """Wait for the end of the agent that was started; its status."""
        said = self._hear()
        assert isinstance(said, Ended)
        return said.status

    def _hear(self) -> Begun | Ended:
        return msgspec.json.decode(self._from.readline(), type=Begun | Ended)

    def close(self) -> None:
        """End it; the agents have ended before."""
        self._to.close()
        self._from.close()
        self._process.wait(PATIENCE)
