"""The real reconciler with claims: real journal, worker and children, on a simulated kernel.

Children run in real time, so the clock is the real one, and nothing here waits for time: a test
waits for answers and for what passes report.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import ParamSpec

from agent.cdi.offers import Policy
from agent.cdi.parse import parse
from agent.cdi.profiles import load_builtin
from agent.cdi.store import Store
from agent.errors import LookError
from agent.host.hints import Hint, Scope
from agent.host.model import Address, HoldMode, Inventory
from agent.host.scan import Scanner
from agent.reconcile.desk import Desk
from agent.reconcile.messages import Finished, Inbox, Stop
from agent.reconcile.reconciler import Reconciler
from agent.reconcile.rules import Layout, Rules, Timing
from agent.reconcile.state import PassReport, State
from agent.simulate import Kernel, Uevent, hint_of, stat_plain
from agent.simulate.serve import WRITER, Server
from agent.vfio.journal import Journal, JournalError
from agent.vfio.model import Answer, Durable, Order, Prepare, Release
from agent.vfio.roots import Roots, Timeouts
from agent.vfio.state import Deadlines
from agent.vfio.state import Rules as ClaimRules
from agent.vfio.worker import Worker

BOOT = "0" * 32
PROFILES = load_builtin()
P = ParamSpec("P")


class FailingScanner(Scanner):
    """The real scanner, in a process that can be made to lack the means to look."""

    fault: str | None = None

    def scan(self, scope: Scope, previous: Inventory) -> Inventory:
        if self.fault is not None:
            raise LookError(self.fault)
        return super().scan(scope, previous)


class FailingJournal(Journal):
    """The real journal, on a disk that can be made to fail."""

    fault: str | None = None

    async def save(self, durable: Durable) -> None:
        if self.fault is not None:
            raise JournalError(self.fault)
        await super().save(durable)


class ClaimsRig:
    """A host on which an agent with claims runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.specs = folder / "cdi"
        self.inbox = Inbox()
        self.passes: asyncio.Queue[tuple[PassReport, State]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.timeouts = Timeouts()
        self.deadlines = Deadlines()

    def make_host(self) -> None:
        """Blocks."""
        self.kernel = Kernel(self.folder / "host", self._heard)
        self.server = Server(self.kernel, self.folder / "kernel.sock")

    def _heard(self, event: Uevent) -> None:
        hint = hint_of(event, time.monotonic())
        self._loop.call_soon_threadsafe(self.inbox.hint, hint)

    @contextlib.asynccontextmanager
    async def agent(self) -> AsyncIterator["ClaimsRig"]:
        """Run an agent; it ends in order, as at SIGTERM."""
        host = self.folder / "host"
        state = str(self.folder / "state")
        self.journal = FailingJournal(state)
        found = await asyncio.to_thread(self.journal.load)
        self.inbox = Inbox()
        self.worker = Worker(
            lambda result: self.inbox.order(Finished(result)),
            state_directory=state,
            roots=Roots(
                sys=str(host / "sys"),
                dev=str(host / "dev"),
                proc=str(host / "proc"),
                run=str(host / "run"),
                etc=str(host / "etc"),
                modules=str(host / "modules"),
            ),
            timeouts=self.timeouts,
            writer=(sys.executable, "-I", "-S", WRITER, str(self.server.path)),
            spares=0,  # they would be left behind: this process lives on
        )
        self.desk = Desk(
            journal=self.journal,
            found=found.durable,
            worker=self.worker,
            rules=ClaimRules(
                deadlines=self.deadlines,
                directory=str(self.specs),
                makes_nodes=lambda function: function.driver == "xe",
            ),
            boot_id=BOOT,
        )
        self.store = Store(self.specs, self.folder / "state", ())
        self.scanner = FailingScanner(
            sys=host / "sys",
            dev=host / "dev",
            run=host / "run",
            proc=host / "proc",
            stat_node=stat_plain,
        )
        self.reconciler = Reconciler(
            inbox=self.inbox,
            scanner=self.scanner,
            store=self.store,
            rules=Rules(
                profiles=PROFILES,
                policy=Policy(),
                layout=Layout(directory=str(self.specs)),
                timing=Timing(),
                resync_blind=0.05,
            ),
            desk=self.desk,
            on_pass=lambda report, state: self.passes.put_nowait((report, state)),
        )
        worker = asyncio.create_task(self.worker.run())
        passes = asyncio.create_task(self.reconciler.run())
        try:
            await self.until(lambda _state: self.reconciler.ready.is_set())
            yield self
        finally:
            self.inbox.order(Stop())
            await passes
            worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await worker

    async def close(self) -> None:
        await asyncio.to_thread(self.server.close)

    async def do(self, action: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Let something happen to the host; it reads and writes files, so in a thread."""
        await asyncio.to_thread(action, *args, **kwargs)

    async def until(self, condition: Callable[[State], bool]) -> State:
        """Wait for a pass after which something is so."""
        async with asyncio.timeout(30):
            while not condition(state := self.reconciler.snapshot()):
                await self.passes.get()
        return state

    async def submit(self, order: Order) -> Answer:
        return await asyncio.wait_for(self.reconciler.submit(order), 30)

    async def prepare(self, claim: str, *devices: str) -> Answer:
        return await self.submit(Prepare(claim, HoldMode.VFIO, tuple(map(Address, devices))))

    async def release(self, claim: str) -> Answer:
        return await self.submit(Release(claim))

    def hint(self) -> None:
        """Let something have happened, whatever it was."""
        self.inbox.hint(Hint("test", everything=True, received=time.monotonic()))

    async def driver_of(self, address: str) -> str | None:
        return await asyncio.to_thread(self.kernel.driver_of, address)

    def published(self) -> dict[str, list[str]]:
        """What the files say: the device names of each kind, without ``all`` and without MEI."""
        found = {}
        for path in sorted(self.specs.glob("*.yaml")):
            spec = parse(path.read_bytes())
            if spec.kind != "intel.com/gpu-mei":
                found[str(spec.kind)] = [d.name for d in spec.devices if d.name != "all"]
        return found
