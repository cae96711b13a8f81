"""A worker at work on a folder that looks like sysfs, and what it has answered."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Final, TypeVar

from agent.host.model import Address
from agent.vfio.model import Effect, Inspect, Inspection, Result, Step, Write, Written
from agent.vfio.modules import aliases_path
from agent.vfio.roots import Roots, Timeouts
from agent.vfio.worker import WRITER, Worker
from tests.conftest import children

Some = TypeVar("Some")

GPU: Final = Address("0000:03:00.0")
AUDIO: Final = Address("0000:03:00.1")

PATIENT: Final = Timeouts(write=60, read=60, holders=60, load=60)
HASTY: Final = Timeouts(write=0.05, read=0.05, holders=0.05, load=0.05)
"""For what hangs for sure: nobody needs to wait long for it."""


class Host:
    """The folders of a host, with functions that have an override and a driver."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / "state"
        self.roots = Roots(
            sys=f"{root}/sys",
            dev=f"{root}/dev",
            proc=f"{root}/proc",
            run=f"{root}/run",
            etc=f"{root}/etc",
            modules=f"{root}/modules",
        )
        for folder in (
            "sys/bus/pci/devices",
            "sys/bus/pci/drivers",
            "dev",
            "proc/self",
            "run",
            "etc",
        ):
            (root / folder).mkdir(parents=True)
        self.probe.touch()
        for address in (GPU, AUDIO):
            self.function(address).mkdir()
            self.override(address).write_text("(null)\n")
        (root / "sys/bus/pci/drivers/xe").mkdir()
        (root / "sys/bus/pci/drivers/xe/unbind").touch()
        (self.function(GPU) / "driver").symlink_to("../../drivers/xe")

    def function(self, address: Address) -> Path:
        return self.root / "sys/bus/pci/devices" / address

    def announce(self, aliases: str) -> None:
        """Let the running kernel's modules announce devices."""
        path = Path(aliases_path(self.roots.modules))
        path.parent.mkdir(parents=True)
        path.write_text(aliases)

    def override(self, address: Address) -> Path:
        return self.function(address) / "driver_override"

    @property
    def probe(self) -> Path:
        return self.root / "sys/bus/pci/drivers_probe"

    def unbind(self, driver: str = "xe") -> Path:
        return self.root / "sys/bus/pci/drivers" / driver / "unbind"

    def block(self, path: Path) -> None:
        """Let whoever opens it wait for ever: it becomes a pipe without another end."""
        path.unlink()
        os.mkfifo(path)


class Rig:
    """A worker, and what it has answered."""

    def __init__(self, worker: Worker, results: "asyncio.Queue[Result]") -> None:
        self.worker = worker
        self._results = results
        self.early: list[Result] = []

    def start(self, *effects: Effect) -> None:
        for effect in effects:
            self.worker.start(effect)

    async def result(self) -> Result:
        return await asyncio.wait_for(self._results.get(), 30)

    async def written(self) -> Written:
        result = await self.result()
        assert isinstance(result, Written)
        return result

    async def inspected(self, effect: Inspect) -> Inspection:
        self.start(effect)
        result = await self.result()
        assert isinstance(result, Inspection)
        assert result.effect == effect
        return result

    @property
    def waiting(self) -> int:
        """Results that nobody has taken yet."""
        return self._results.qsize()


def rig(
    host: Host,
    timeouts: Timeouts = PATIENT,
    *,
    writer: Sequence[str] = WRITER,
    load: Sequence[str] = ("false",),
) -> "contextlib.AbstractAsyncContextManager[Rig]":
    """Let a worker work on a folder."""
    return working(host.state, host.roots, timeouts, writer=writer, load=load)


@contextlib.asynccontextmanager
async def working(
    state: Path,
    roots: Roots,
    timeouts: Timeouts = PATIENT,
    *,
    writer: Sequence[str] = WRITER,
    load: Sequence[str] = ("false",),
) -> AsyncIterator[Rig]:
    """Let a worker work."""
    others = await asyncio.to_thread(children)
    results: asyncio.Queue[Result] = asyncio.Queue()
    worker = Worker(
        results.put_nowait,
        state_directory=str(state),
        roots=roots,
        timeouts=timeouts,
        writer=writer,
        load=lambda driver: (*load, driver),
        spares=0,  # what a test counts are children that do something
    )
    running = asyncio.create_task(worker.run())
    try:
        yield Rig(worker, results)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await reap(others)


async def reap(others: Collection[int]) -> None:
    """Take the status of children that were abandoned: here their parent lives on."""
    for pid in (await asyncio.to_thread(children)).keys() - others:
        await asyncio.to_thread(os.waitpid, pid, 0)


def override(value: str, address: Address = GPU) -> Write:
    return Write("vm", address, Step.OVERRIDE, value)


def unbind(address: Address = GPU) -> Write:
    return Write("vm", address, Step.UNBIND, address)


def probe(address: Address = GPU) -> Write:
    return Write("vm", address, Step.PROBE, address)
