"""Performs effects: what can block for ever, in children that can be abandoned.

Effects proceed side by side, and their results come through one call in the order in which they
are done. A result was true at some moment since its effect was started; whoever decides looks
again.

**A write** gets one child and one deadline. Past it the child is killed, and the result says
*hung*: a killed child in an uninterruptible call is still there, and so is its lock on the
function. When the lock is free, a second result says *gone*. In between no child of any agent
writes to that function: it would wait for the same lock, and be reported hung itself.

**At the end** ``finish`` lets the writes under way come to theirs, bounded by their deadline; then
cancelling ``run`` abandons what is left. Nothing is joined.
"""

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NoReturn

import structlog

from agent.host.files import make_directories
from agent.host.model import Address
from agent.vfio import modules, writer
from agent.vfio.children import Child, Children, program, started_at
from agent.vfio.inspector import Inspector
from agent.vfio.model import Effect, Inspect, Result, Step, Watch, Write, Written
from agent.vfio.roots import Roots, Timeouts
from agent.vfio.spares import MOST, Spares

_log = structlog.get_logger()

WRITER: Final = program(writer)

_WRITERS: Final = 16
"""Writes that are under way at a time: a claim may have hundreds of functions, and each costs a
process (`TasksMax` in the unit) and two descriptors. One that hangs makes room."""

_AGAIN: Final = 1.0
"""Seconds until what could not be started is tried again."""


class Worker:
    """Performs effects, as long as `run` runs.

    Args:
        on_result: Takes each result, in the loop; must not block or raise.
        state_directory: Gets a folder ``busy`` with one lock file for each function.
        roots: Where the parts of the host are.
        timeouts: How long each child may take.
        writer: The program that reads and writes attributes, as ``agent/vfio/writer.py``.
        load: Makes the command that loads a driver's module; None leaves it to systemd, or to
            modprobe where there is no systemd.
        spares: How many children may wait for what they are to do; 0 if ``writer`` cannot wait.
    """

    def __init__(
        self,
        on_result: Callable[[Result], object],
        *,
        state_directory: str,
        roots: Roots = Roots(),  # noqa: B008 - immutable
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - immutable
        writer: Sequence[str] = WRITER,
        load: Callable[[str], Sequence[str]] | None = None,
        spares: int = MOST,
    ) -> None:
        self._on_result = on_result
        self._busy = f"{state_directory}/busy"
        self._roots = roots
        self._timeouts = timeouts
        self._effects: asyncio.Queue[Effect] = asyncio.Queue()
        self._children = Children()
        self._writers = Spares(self._children, writer, most=spares)
        self._inspector = Inspector(
            self._children,
            roots=roots,
            timeouts=timeouts,
            readers=self._writers,
            load=load or (lambda driver: modules.load_command(driver, run=roots.run)),
        )
        self._hung: dict[Address, asyncio.Event] = {}
        self._places = asyncio.Semaphore(_WRITERS)
        self._finishing = False
        self._writing = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def hung(self) -> frozenset[Address]:
        """Functions with a write that has not come back."""
        return frozenset(self._hung)

    def start(self, effect: Effect) -> None:
        """Begin with an effect; returns at once."""
        self._effects.put_nowait(effect)

    async def run(self) -> NoReturn:
        """Perform effects until cancelled; then abandon those that are under way."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    effect = await self._effects.get()
                    name = f"{type(effect).__name__.lower()} for a claim"
                    group.create_task(self._perform(effect), name=name)
        finally:
            self._writers.close()
            self._inspector.close()
            self._children.abandon()
        raise AssertionError  # pragma: no cover - only an exception ends the group

    async def finish(self) -> None:
        """Wait for the writes under way, each until its deadline at most, and begin no other."""
        self._finishing = True
        await self._quiet.wait()

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case Write():
                await self._write(effect)
            case Watch():
                await self._watch(effect)
            case Inspect():
                self._on_result(await self._inspector.inspect(effect))

    # --- a write ----------------------------------------------------------------------------------

    async def _write(self, effect: Write) -> None:
        if (free := self._hung.get(effect.address)) is not None:
            self._on_result(Written(effect, hung=True))
            await free.wait()
            self._on_result(Written(effect, gone=True))
            return
        with self._under_way():
            async with self._places:
                try:
                    child = await self._begin(effect)
                except OSError as error:
                    why = f"no process can be started for it: {error.strerror or error}"
                    self._on_result(Written(effect, unmade=why))
                    return
                if await child.ends_within(self._timeouts.write):
                    self._on_result(_written(effect, child))
                    return
        with self._hanging(effect.address):
            await self._hang(effect, child)
        self._on_result(Written(effect, gone=True))

    async def _begin(self, effect: Write) -> Child:
        """Start the child of a write.

        Raises:
            OSError: There is none to be had, or none is wanted any more.
        """
        path, text = await asyncio.to_thread(self._prepare, effect)
        if self._finishing:
            raise InterruptedError(errno.EINTR, "the agent ends")
        return self._start("write", effect.address, path, text)

    async def _hang(self, effect: Write, child: Child) -> None:
        """Report a write that does not come back, and wait until it has, if it ever does."""
        started = await asyncio.to_thread(_started_at, child.pid)
        begun = child.output().endswith(writer.BEGUN)
        child.kill()
        what = {"function": effect.address, "step": effect.step.value, "claim": effect.claim}
        _log.error(
            "write-hung",
            **what,
            pid=child.pid,
            problem="the kernel has not returned from it"
            if begun
            else "an earlier write to the function has not come back",
            hint="the kernel's log may say what it waits for; nothing else is written to it",
        )
        self._on_result(Written(effect, hung=True, pid=child.pid, started=started))
        await child.ends_within(None)
        await self._until_free(effect.address)
        _log.warning("write-returned", **what)

    async def _watch(self, effect: Watch) -> None:
        """Wait for a child of an earlier agent."""
        child = effect.child
        with self._hanging(child.write.address):
            await _until_ended(child.pid, child.started)
            await self._until_free(child.write.address)
        self._on_result(Written(child.write, gone=True))

    @contextlib.contextmanager
    def _hanging(self, address: Address) -> Iterator[None]:
        """Let no other write to a function begin meanwhile."""
        free = self._hung.setdefault(address, asyncio.Event())
        try:
            yield
        finally:
            self._hung.pop(address, None)
            free.set()

    async def _until_free(self, address: Address) -> None:
        """Wait until no child of any agent has the lock of a function."""
        while True:
            with contextlib.suppress(OSError):
                child = self._start("wait", address)
                await child.ends_within(None)
                if _errno(child) in (0, errno.ENOENT):  # without a folder of locks none is held
                    return
            await asyncio.sleep(_AGAIN)  # there is no process to be had, or somebody killed it

    def _prepare(self, effect: Write) -> tuple[str, str]:
        """Where a write goes, and what is written."""
        make_directories(self._busy, 0o700)
        function = f"{self._roots.sys}/bus/pci/devices/{effect.address}"
        match effect.step:
            case Step.OVERRIDE:
                return f"{function}/driver_override", self._spelling(effect.value)
            case Step.UNBIND:
                return f"{function}/driver/unbind", effect.value
            case Step.PROBE:
                return f"{self._roots.sys}/bus/pci/drivers_probe", effect.value

    def _spelling(self, driver: str) -> str:
        """A driver as the kernel spells it, which compares an override letter by letter.

        What has an underscore is so already, or was set so by others and is restored as it was.
        """
        if "_" in driver or not modules.is_driver_name(driver):
            return driver
        return modules.registered(self._roots.sys, driver) or driver

    def _start(self, verb: str, address: Address, *rest: str) -> Child:
        return self._writers.start(verb, f"{self._busy}/{address}", *rest)

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        self._writing += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._writing -= 1
            if not self._writing:
                self._quiet.set()


def _written(effect: Write, child: Child) -> Written:
    """What a child has done that has ended; what had not begun was not done."""
    code = _errno(child)
    if writer.BEGUN in child.output():
        return Written(effect, errno=code)
    status = child.gone.result()
    return Written(
        effect,
        unmade=f"its process ended before it had begun: {os.strerror(code)}, status {status}",
    )


def _errno(child: Child) -> int:
    """What a child answered that has ended."""
    answer = writer.parse(child.output())
    if answer is not None:
        return answer[0]
    _log.error(
        "child-failed",
        status=child.gone.result(),
        said=child.output()[-500:].decode("utf-8", "replace"),
    )
    return errno.EIO


def _started_at(pid: int) -> int | None:
    """When a process started, if that can be told; if not, its lock still tells of its end."""
    with contextlib.suppress(OSError):
        return started_at(pid)
    return None


async def _until_ended(pid: int, started: int | None) -> None:
    """Wait for a process that is not ours; one with its pid and another start is another."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if started is None or await asyncio.to_thread(_started_at, pid) != started:
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
    finally:
        os.close(pidfd)
