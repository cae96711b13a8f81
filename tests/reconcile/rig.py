"""The real reconciler, scanner, store and profiles on a simulated host, with a clock of ours."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ParamSpec

import structlog
from structlog.testing import LogCapture

from agent.cdi.desired import Policy, Reason
from agent.cdi.files import Action
from agent.cdi.parse import parse
from agent.cdi.profiles import load_builtin
from agent.cdi.store import Store
from agent.errors import StoreError
from agent.host.hints import Hint
from agent.host.scan import Scanner
from agent.reconcile.messages import Inbox
from agent.reconcile.reconciler import Reconciler
from agent.reconcile.rules import Layout, Rules, Timing
from agent.reconcile.state import PassReport
from agent.simulate import Kernel, UdevMode, Uevent, hint_of, stat_plain

P = ParamSpec("P")


class FailingStore(Store):
    """The real store, on a disk that can be made to fail."""

    fault: str | None = None
    fails: Callable[[], Awaitable[None]] | None = None
    """What happens whenever an action fails."""

    async def apply(self, action: Action) -> None:
        if (fault := self.fault) is not None:
            if self.fails is not None:
                await self.fails()
            raise StoreError(fault)
        await super().apply(action)


class Rig:
    """A host, and an agent that passes when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.slowness = 0.0
        """Seconds that pass between two looks at the clock."""
        self.events: list[Uevent] = []
        self.kernel = Kernel(folder / "host", self.events.append)
        self.specs = folder / "cdi"
        self.inbox = Inbox()
        self.reports: asyncio.Queue[PassReport] = asyncio.Queue()
        self.blind = False
        self.log = LogCapture()
        structlog.configure(processors=[self.log])
        self.rules = Rules(
            profiles=load_builtin(),
            policy=Policy(),
            layout=Layout(directory=str(self.specs)),
            timing=Timing(),
        )
        self.scanner = Scanner(
            sys=folder / "host/sys",
            dev=folder / "host/dev",
            run=folder / "host/run",
            proc=folder / "host/proc",
            stat_node=stat_plain,
            extra_nodes=(),
        )
        self.store = FailingStore(self.specs, folder / "state", (folder / "etc-cdi",))
        self.reconciler = Reconciler(
            inbox=self.inbox,
            scanner=self.scanner,
            store=self.store,
            rules=self.rules,
            on_pass=lambda report, _state: self.reports.put_nowait(report),
            blind=lambda: self.blind,
            clock=self.clock,
        )

    def clock(self) -> float:
        """What the agent takes for the time."""
        self.now += self.slowness
        return self.now

    async def do(self, action: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Let something happen to the host; it reads and writes files, so in a thread."""
        await asyncio.to_thread(action, *args, **kwargs)

    def set_udev(self, mode: UdevMode) -> None:
        """Make udevd slow, or take it away."""
        self.kernel.udev = mode

    def hints(self) -> list[Hint]:
        """What the messages since the last pass hint at."""
        hints = [hint_of(event, self.now) for event in self.events]
        self.events.clear()
        return hints

    async def step(self, seconds: float = 0.0, *hints: Hint) -> PassReport:
        """Let time pass, then one pass."""
        self.now += seconds
        return await self.reconciler.run_pass([*self.hints(), *hints])

    async def quiet(self) -> None:
        """Pass until everything has settled."""
        await self.step()
        await self.step(0.06)

    def published(self) -> dict[str, list[str]]:
        """What the files say: the device names of each kind, without ``all`` and without MEI."""
        found = {}
        for path in sorted(self.specs.glob("*")):
            assert path.suffix == ".yaml", path
            spec = parse(path.read_bytes())
            if spec.kind == "intel.com/gpu-mei":
                continue
            found[str(spec.kind)] = [d.name for d in spec.devices if d.name != "all"]
        return found

    def reasons(self) -> dict[str, Reason]:
        """Why the devices that are not published are not."""
        return {w.address: w.reason for w in self.reconciler.snapshot().withheld}

    def logged(self, event: str) -> list[dict[str, object]]:
        """The log's entries with this name."""
        return [dict(entry) for entry in self.log.entries if entry["event"] == event]
