"""Child processes that may never end: started, waited for with a deadline, and abandoned.

``asyncio``'s own are not used: its watcher waits for each child in a thread, and its transport
complains when it is dropped. Here a child is a pid, the read end of its output, and a pidfd that
the loop watches. One that does not end costs exactly these, whatever the kernel does with it, and
nothing waits for it at the end of the loop.

A killed child is not a dead one: in an uninterruptible call it stays until the kernel returns. Who
needs to know waits for ``gone``.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final, Self

PYTHON: Final = (sys.executable, "-I", "-S")
"""Runs what needs the standard library alone."""

MAX_OUTPUT: Final = 65_536
"""Bytes; also what a pipe holds, so a child is done with its output before anybody reads it."""

_ENDED: Final = (b"Z", b"X")
"""States of a process, or of its first thread, in proc(5)."""

_ENVIRONMENT: Final = {"LC_ALL": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


class Child:
    """A process of ours, from `start` until it has ended or is abandoned.

    Attributes:
        gone: Done when the process has ended and is reaped. The result is its exit status, the
            negative number of the signal that ended it, or None if that was not to be had.
    """

    def __init__(self, pid: int, pidfd: int, output: int, orders: int = -1) -> None:
        loop = asyncio.get_running_loop()
        self.pid: Final = pid
        self.gone: Final[asyncio.Future[int | None]] = loop.create_future()
        self._pidfd = pidfd
        self._pipe = output
        self._orders = orders
        self._output = b""
        loop.add_reader(pidfd, self._ended)

    @classmethod
    def start(cls, argv: Sequence[str], *, waits: bool = False) -> Self:
        """Start a program: no input, a plain environment, no descriptor of ours but its output's.

        It has a process group of its own, so what a terminal sends to ours does not reach it.

        Args:
            argv: The program and its arguments.
            waits: It has an input, and is to be told over it what to do: see `tell`.

        Raises:
            OSError: It cannot be started.
        """
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            output, out = _pipe(ours, theirs)
            os.set_blocking(output, False)
            if waits:
                source, orders = _pipe(theirs, ours)
                os.set_blocking(orders, False)
            else:
                source, orders = _closed_by(theirs, os.open(os.devnull, os.O_RDONLY)), -1
            pid = os.posix_spawnp(
                argv[0],
                list(argv),
                _ENVIRONMENT,
                # What Python opens is closed by exec; what else this process has inherited, the
                # scripts close themselves.
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, source, 0),
                    (os.POSIX_SPAWN_DUP2, out, 1),
                    (os.POSIX_SPAWN_DUP2, out, 2),
                ],
                setpgroup=0,
                setsigmask=(),
                setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # Python ignores these two
            )
            try:
                child = cls(pid, _closed_by(ours, os.pidfd_open(pid)), output, orders)
            except OSError:
                # One that cannot be watched is ended: it has not begun anything.
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
            ours.pop_all()
            return child

    def tell(self, text: bytes) -> bool:
        """Say once to a child that waits what it is to do; whether it can have heard it.

        Args:
            text: No more than a pipe takes at once (``PIPE_BUF``).
        """
        told = False
        if not self.gone.done():
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._orders, text)
                told = True
        self.dismiss()
        return told

    def dismiss(self) -> None:
        """Let a child that waits end, if it was told nothing."""
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1

    async def ends_within(self, seconds: float | None) -> bool:
        """Wait for its end, not longer than that (None: as long as it takes)."""
        await asyncio.wait((self.gone,), timeout=seconds)
        return self.gone.done()

    def output(self) -> bytes:
        """What it has written so far, errors too; at most 64 KiB."""
        if self._pipe >= 0:
            with contextlib.suppress(BlockingIOError):
                self._output += os.read(self._pipe, MAX_OUTPUT - len(self._output))
        return self._output

    def kill(self) -> None:
        """Kill it; that may take its time, or for ever. What it still says nobody hears."""
        if not self.gone.done():
            self.output()
            self._drop_pipe()
            # By the pidfd: never another process that was given its pid.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def abandon(self) -> None:
        """Kill it and let go of it; one that is stuck ends when it can, and nobody waits."""
        if not self.gone.done():
            self.kill()
            self._reap()
            self._drop()
            self.gone.cancel()

    def _ended(self) -> None:
        self.output()
        status = self._reap()
        self._drop()
        self.gone.set_result(status)

    def _reap(self) -> int | None:
        """Take the exit status, which also takes the process off the list of processes."""
        try:
            found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return None  # whoever debugs the agent has taken it
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _drop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._drop_pipe()
        self.dismiss()

    def _drop_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


class Children:
    """Those that have not ended, whoever waits for them."""

    def __init__(self) -> None:
        self._alive: set[Child] = set()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._alive)

    def start(self, argv: Sequence[str], *, waits: bool = False) -> Child:
        """Start one more, as `Child.start` does.

        Raises:
            OSError: It cannot be started.
        """
        child = Child.start(argv, waits=waits)
        self._alive.add(child)
        child.gone.add_done_callback(lambda _: self._alive.discard(child))
        return child

    def abandon(self) -> None:
        """Kill all, and wait for none."""
        for child in tuple(self._alive):
            child.abandon()


def program(module: ModuleType) -> tuple[str, ...]:
    """The command that runs the ``main`` of a module here that needs the standard library alone.

    The module is imported, not run by its path, so that its compiled form is used.
    """
    folder, file = os.path.split(module.__file__ or "")
    name = file.removesuffix(".py")
    script = (
        f"import sys; sys.path.append({folder!r}); import arguments, {name}; "
        f"{name}.main(arguments.given(sys.argv[1:]))"
    )
    return (*PYTHON, "-c", script)


def started_at(pid: int, proc: str = "/proc") -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process.

    With its pid that tells it from any other. One that has ended and waits for its parent to take
    notice is none any more. These are the fields 22, 3 and 20 of ``/proc/<pid>/stat``; the second,
    the name, stands in brackets and may hold blanks and brackets itself.

    Raises:
        OSError: It cannot be told, for want of descriptors say.
    """
    try:
        with open(f"{proc}/{pid}/stat", "rb", buffering=0) as file:
            after_name = file.read(4096).rpartition(b") ")[2].split()
        # Where only the first thread has ended, there are others.
        has_ended = after_name[0] in _ENDED and int(after_name[17]) <= 1
        return None if has_ended else int(after_name[19])
    except (FileNotFoundError, ProcessLookupError, ValueError, IndexError):
        return None


def _pipe(reads: contextlib.ExitStack, writes: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe of which these close the ends."""
    source, sink = os.pipe()
    return _closed_by(reads, source), _closed_by(writes, sink)


def _closed_by(stack: contextlib.ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd
