"""The agent on a simulated host, as a process that can be killed.

``python -m tests.claims.agent`` reads one `Start` a line, and lets an agent begin for each: a copy
of this process, which has everything imported already. It says when one has begun and when it has
ended, with its status, and begins the next only then. When its input ends, so does it.

The agent is the real one, put together by ``agent.daemon``. What is simulated is chosen at the two
seams that there are, the stat of nodes and the program that writes, and the kernel's messages come
from a socket instead of netlink. Over that socket its `Trap` is set too, and it tells of each pass.
"""

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
import traceback
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from agent import config
from agent.cli.lock import instance_lock
from agent.daemon import Daemon
from agent.host.hints import Hint
from agent.observe import log as logs
from agent.reconcile.state import PassReport, State
from agent.simulate import stat_plain
from agent.simulate.serve import WRITER
from agent.vfio.children import PYTHON
from agent.vfio.model import Answer, Order
from tests.claims.trap import ANSWER, Orders, Trap

MESSAGE: Final = 65_536
PASSED: Final = b"passed"
SET: Final = b"set"


class Start(msgspec.Struct, frozen=True):
    """How an agent is to be started."""

    config: str
    events: str
    """The socket on which the kernel's messages come."""
    writes: str
    """The socket on which the kernel takes writes."""
    log: str
    environ: Mapping[str, str]


class Begun(msgspec.Struct, frozen=True, tag=True):
    """An agent has been started."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """It has ended."""

    status: int
    """As ``subprocess`` has it: a signal is a negative number."""


class FromKernel(msgspec.Struct, frozen=True):
    """A message to the agent: one of the two."""

    hint: Hint | None = None
    trap: Orders | None = None


class Agent(Daemon):
    """The service on a simulated host.

    Args:
        events: The socket on which the kernel's messages come.
        trap: What is set over that socket.
        rest: What `Daemon` takes.
    """

    def __init__(self, *, events: str, trap: Trap, **rest: Any) -> None:  # noqa: ANN401 - see above
        super().__init__(**rest)
        self._path = events
        self._trap = trap
        self._events = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def _open_sources(self) -> None:
        self._events.connect(self._path)
        self._events.setblocking(False)

    def _is_blind(self) -> bool:
        return False

    def _root_tasks(self) -> dict[str, Coroutine[object, object, object]]:
        return {**super()._root_tasks(), "events": self._listen_to_kernel()}

    async def _listen_to_kernel(self) -> NoReturn:
        decode = msgspec.json.Decoder(FromKernel, dec_hook=lambda kind, value: kind(*value)).decode
        loop = asyncio.get_running_loop()
        while True:
            message = decode(await loop.sock_recv(self._events, MESSAGE))
            if message.hint is not None:
                self._inbox.hint(message.hint)
            if message.trap is not None:
                self._trap.set(message.trap)
                self._events.send(SET)

    def _on_pass(self, report: PassReport, state: State) -> None:
        super()._on_pass(report, state)
        with contextlib.suppress(BlockingIOError):
            self._events.send(PASSED)

    async def submit(self, order: Order) -> Answer:
        answer = await super().submit(order)
        self._trap.moment(ANSWER)
        return answer


def serve(start: Start) -> None:
    """Be an agent, until SIGTERM."""
    load = functools.partial(config.load, Path(start.config))
    settings = load()
    log = logs.configure(settings.log, environ=start.environ)
    with instance_lock(settings.state_directory, settings.cdi.directories) as lock:
        agent = Agent(
            events=start.events,
            trap=Trap((settings.cdi.directory, settings.state_directory)),
            config=settings,
            reload=load,
            occupy=lock.take_specs,
            log=log,
            environ=dict(start.environ),
            stat_node=stat_plain,
            writer=(*PYTHON, WRITER, start.writes),
        )
        asyncio.run(agent.run())
    log.close()


def begin(start: Start) -> int:
    """Start an agent; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor, to in enumerate((nothing, log, log)):
            os.dup2(to, descriptor)
        os.closerange(3, 1 << 16)
        serve(start)
    except BaseException:  # noqa: BLE001 - a copy must not go on as the original
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)
    os._exit(0)


def main() -> None:
    """Start agents, one after another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        pid = begin(msgspec.json.decode(line, type=Start))
        say(Begun(pid))
        _, status = os.waitpid(pid, 0)
        say(Ended(os.waitstatus_to_exitcode(status)))


def say(what: Begun | Ended) -> None:
    """Tell whoever started us."""
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
