"""Finds out what a look must not ask, because asking may block or needs rights.

Everything is asked at once, and what is not known in time is unknown. A question whose child is
still stuck from the last time is not asked again, so stuck children do not pile up.
"""

import asyncio
import collections
import errno
import os
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from agent.host.files import OUT_OF_MEANS, read_regular
from agent.host.model import Address
from agent.vfio import holders, modules
from agent.vfio.children import Child, Children, program
from agent.vfio.managed import managers
from agent.vfio.model import Holder, Inspect, Inspection
from agent.vfio.roots import Roots, Timeouts
from agent.vfio.spares import Spares
from agent.vfio.writer import BEGUN, HEAD, parse

_log = structlog.get_logger()

HOLDERS: Final = program(holders)

_READERS: Final = 16
"""Attributes that are read at a time; each costs a process."""


_PASSES: Final = OUT_OF_MEANS | {errno.EAGAIN}
"""Why a program cannot be started now, and can be later; EAGAIN: no more processes."""


class _UnknownError(Exception):
    """A question has no answer; the text says why."""


class _UnaskedError(_UnknownError):
    """There was no process to be had that would have asked."""


class Inspector:
    """Answers ``Inspect``.

    Args:
        children: Starts children.
        roots: Where the parts of the host are.
        timeouts: How long each question may take.
        readers: Start the program that reads an attribute, as ``agent/vfio/writer.py``.
        load: Makes the command that loads a driver's module.
    """

    def __init__(
        self,
        children: Children,
        *,
        roots: Roots,
        timeouts: Timeouts,
        readers: Spares,
        load: Callable[[str], Sequence[str]],
    ) -> None:
        self._children = children
        self._roots = roots
        self._timeouts = timeouts
        self._readers = readers
        self._searchers = Spares(children, HOLDERS, most=min(1, readers.most))
        self._load = load
        self._stuck: dict[str, Child] = {}
        self._said: dict[tuple[str, Address], str] = {}
        self._reading = asyncio.Semaphore(_READERS)
        self._loading: collections.defaultdict[str, asyncio.Lock] = collections.defaultdict(
            asyncio.Lock
        )

    async def inspect(self, effect: Inspect) -> Inspection:
        """Find out what an effect wants to know."""
        roots = self._roots
        unasked: list[str] = []
        async with asyncio.TaskGroup() as group:
            overrides = [
                group.create_task(self._override(each, unasked)) for each in effect.addresses
            ]
            asked = effect.addresses if effect.alive else ()
            dead = [group.create_task(self._dead(each, unasked)) for each in asked]
            drivers = [
                group.create_task(self._unavailable(each, effect, unasked))
                for each in effect.drivers
            ]
            natives = [group.create_task(self._unsuitable(*each)) for each in effect.natives]
            held = group.create_task(self._holders(effect, unasked))
            managed = group.create_task(
                asyncio.to_thread(
                    managers, effect.addresses, etc=roots.etc, run=roots.run, sys=roots.sys
                )
            )
        found, blind = held.result()
        return Inspection(
            effect,
            overrides=tuple(each for task in overrides for each in task.result()),
            holders=found,
            holders_known=not blind,
            blind=blind,
            managed=managed.result(),
            unavailable=tuple(each for task in drivers for each in task.result()),
            unsuitable=tuple(each for task in natives for each in task.result()),
            dead=tuple(each for task in dead for each in task.result()),
            unasked=next(iter(unasked), ""),
            noiommu=await asyncio.to_thread(self._noiommu),  # once its module is there
        )

    def close(self) -> None:
        """Have no child wait for another question."""
        self._searchers.close()

    async def _override(
        self, address: Address, unasked: list[str]
    ) -> tuple[tuple[Address, str | None], ...]:
        """The ``driver_override`` of a function, if it can be had."""
        path = f"{self._roots.sys}/bus/pci/devices/{address}/driver_override"
        async with self._reading:
            try:
                child = await self._ask(self._readers, ("read", path), self._timeouts.read)
                override = _override_in(child.output())
            except _UnknownError as error:
                _note(error, unasked)
                self._say_once("override-unknown", address, str(error))
                return ()
        self._said.pop(("override-unknown", address), None)
        return ((address, override),)

    async def _dead(self, address: Address, unasked: list[str]) -> tuple[Address, ...]:
        """The function itself if it does not answer, which the bus reports as ones."""
        path = f"{self._roots.sys}/bus/pci/devices/{address}/config"
        async with self._reading:
            try:
                child = await self._ask(self._readers, ("head", path), self._timeouts.read)
                code, head = _answer_in(child.output())
            except _UnknownError as error:
                _note(error, unasked)
                self._say_once("config-unknown", address, str(error))
                return ()
        self._said.pop(("config-unknown", address), None)
        # Not its ids alone: a VF that is well reads ones there (SR-IOV 1.1, 3.4.1).
        is_dead = not code and head == b"\xff" * HEAD
        return (address,) if is_dead else ()

    async def _holders(
        self, effect: Inspect, unasked: list[str]
    ) -> tuple[tuple[Holder, ...], tuple[str, ...]]:
        """Who holds the nodes, and why there may be others."""
        if not effect.node_paths and not effect.used:
            return (), ()
        roots = self._roots
        functions = (",".join(effect.addresses), ",".join(effect.used))
        argv = (roots.proc, roots.dev, roots.sys, *functions, *effect.node_paths)
        try:
            child = await self._ask(self._searchers, argv, self._timeouts.holders)
            found, blind = _holders_in(child.output())
        except _UnknownError as error:
            _note(error, unasked)
            found, blind = (), (str(error),)
        first = next(iter(effect.addresses), Address(""))
        if blind:
            self._say_once("holders-unknown", first, blind[0])
        else:
            self._said.pop(("holders-unknown", first), None)
        return found, blind

    async def _unavailable(
        self, driver: str, effect: Inspect, unasked: list[str]
    ) -> tuple[tuple[str, str], ...]:
        """Why a driver is not to be had; nothing if it is there or could be loaded."""
        if not modules.is_driver_name(driver):
            return ((driver, "no driver can be called so"),)
        sys = self._roots.sys
        async with self._loading[driver]:
            if await asyncio.to_thread(modules.registered, sys, driver) is not None:
                return ()
            reason = await asyncio.to_thread(self._unloadable, driver, effect)
            if reason or not effect.loads:
                return ((driver, reason),) if reason else ()
            try:
                loader = Spares(self._children, self._load(driver), most=0)
                child = await self._ask(loader, (), self._timeouts.load)
            except _UnknownError as error:
                if getattr(error.__cause__, "errno", None) in _PASSES:  # not: no modprobe
                    _note(error, unasked)
                return ((driver, f"its module could not be loaded: {error}"),)
            if await asyncio.to_thread(modules.registered, sys, driver) is not None:
                return ()
            said = _one_line(child.output()) if child.gone.result() else ""
            where = self._roots.modules
            reason = await asyncio.to_thread(modules.missing, driver, said, modules=where)
            return ((driver, reason),)

    def _unloadable(self, driver: str, effect: Inspect) -> str:
        """Why a driver's module is not even to be loaded; empty if it is."""
        roots = self._roots
        for address, native in effect.natives:
            if native == driver and not modules.is_meant(
                driver, roots.sys, address, modules=roots.modules
            ):
                return f"it is not loaded, and no module of that name announces {address}"
        if not effect.loads and modules.is_missing(driver, modules=roots.modules):
            return modules.missing(driver, "", modules=roots.modules)
        return ""

    async def _unsuitable(self, address: Address, driver: str) -> tuple[tuple[Address, str], ...]:
        """The function and the driver if that is for other devices."""
        roots = self._roots
        is_for_others = await asyncio.to_thread(
            modules.is_for_others, driver, roots.sys, address, modules=roots.modules
        )
        return ((address, driver),) if is_for_others else ()

    def _noiommu(self) -> bool:
        path = f"{self._roots.sys}/module/vfio/parameters/enable_unsafe_noiommu_mode"
        try:
            return read_regular(path, 4096).strip() in (b"Y", b"1")
        except OSError:
            return False

    def _say_once(self, event: str, address: Address, problem: str) -> None:
        """Say what cannot be known about a function, until it can be or the reason is another."""
        if self._said.get((event, address)) != problem:
            self._said[event, address] = problem
            _log.warning(event, function=address, problem=problem)

    async def _ask(self, program: Spares, arguments: Sequence[str], seconds: float) -> Child:
        """Let a child find something out.

        Raises:
            _UnaskedError: There is no child to be had.
            _UnknownError: It did not end in time.
        """
        question = " ".join((*program.program, *arguments))
        if question in self._stuck:
            raise _UnknownError(f"process {self._stuck[question].pid} is still stuck in it")
        try:
            child = program.start(*arguments)
        except OSError as error:
            reason = f"{program.program[0]} cannot be started: {error.strerror}"
            raise _UnaskedError(reason) from error
        if not await child.ends_within(seconds):
            self._stuck[question] = child
            child.gone.add_done_callback(lambda _: self._stuck.pop(question, None))
            child.kill()
            raise _UnknownError(f"it did not end in {seconds:g} s")
        return child


def _override_in(output: bytes) -> str | None:
    """The ``driver_override`` that a child has read; None if none is set.

    Raises:
        _UnknownError: It could not read it.
    """
    code, content = _answer_in(output)
    if code:
        raise _UnknownError(os.strerror(code))
    if not content.isascii():
        raise _UnknownError("it is no text")
    text = content.decode().removesuffix("\n")
    return None if text in ("(null)", "") else text


def _answer_in(output: bytes) -> tuple[int, bytes]:
    """What a child had to say which reads an attribute: errno and content.

    Raises:
        _UnaskedError: It ended before it had begun.
        _UnknownError: It ended before it had read it.
    """
    answer = parse(output)
    if answer is not None:
        return answer
    reason = _one_line(output) or "it said nothing"
    raise _UnknownError(reason) if BEGUN in output else _UnaskedError(reason)


def _note(error: _UnknownError, unasked: list[str]) -> None:
    """Tell a question that has no answer from one that nobody was there to ask."""
    if isinstance(error, _UnaskedError):
        unasked.append(str(error))


def _holders_in(output: bytes) -> tuple[tuple[Holder, ...], tuple[str, ...]]:
    """What the child had to say which looks for holders: who, and why there may be others.

    Raises:
        _UnknownError: It did not come to its end.
    """
    found: list[Holder] = []
    blind: list[str] = []
    for line in output.decode("utf-8", "replace").split("\n"):
        match line.split("\t"):
            case ["held", pid, path, command] if pid.isdecimal():
                found.append(Holder(int(pid), command, path))
            case ["blind", reason]:
                blind.append(reason)
            case ["done"]:
                return tuple(found), tuple(blind)
            case _:
                break
    raise _UnknownError(_one_line(output) or "it said nothing")


def _one_line(output: bytes) -> str:
    """What a child had to say, fit for a sentence."""
    text = " ".join(output.decode("utf-8", "replace").split())[-200:]
    return "".join(char if char.isprintable() else "?" for char in text)
