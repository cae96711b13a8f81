"""What the service needs to claim devices, built and run: journal, worker, desk, control socket.

Without a boot id nothing could be believed after a crash, and without a journal that can be looked
for nobody knows what is claimed: then the service keeps specs true and claims nothing, and says so.
"""

import asyncio
import contextlib
import functools
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import Final

import structlog
from msgspec import structs

from agent.compose import claim_rules
from agent.config import Config
from agent.errors import AgentError
from agent.host.model import HoldMode, parse_address
from agent.reconcile.desk import Desk
from agent.reconcile.messages import Finished, Inbox
from agent.vfio.journal import Journal, boot_id
from agent.vfio.model import RECOVERY, Answer, Order, Prepare, Recover
from agent.vfio.owners import owners_gone
from agent.vfio.problems import Code, problem
from agent.vfio.roots import Roots, Timeouts
from agent.vfio.settings import AssignSettings
from agent.vfio.worker import WRITER, Worker

_log = structlog.get_logger()

LAST_WRITE: Final = 8.0
"""Seconds that a write to a device may still take at the end; then it is left to the journal."""
ASSIGN_AGAIN: Final = 30.0
"""Seconds before a device that could not be assigned is tried again, and doubled each time if time
alone cannot help."""
ASSIGN_AGAIN_MAX: Final = 3600.0
"""The longest that it becomes."""
ASSIGN_MOVES: Final = 5
"""How often in a row a device may fail to be moved: each time it is taken from whoever uses it."""
MODULES_VARIABLE: Final = "CDI_AGENT_MODULES"
"""Where the kernel's modules are; a unit that hides /lib/modules shows them elsewhere."""
ASSIGNER: Final = "configuration"
"""Who claims what ``vfio.assign`` says."""


Submit = Callable[[Order], Awaitable[Answer]]


class Claiming:
    """The parts that claim devices, in one service.

    Args:
        config: A checked configuration.
        inbox: Where results go.
        environ: May say the boot's id, and where the kernel's modules are.
        writer: The program that reads and writes attributes; a simulated host has its own.
    """

    def __init__(
        self,
        config: Config,
        inbox: Inbox,
        environ: MutableMapping[str, str],
        *,
        writer: Sequence[str] = WRITER,
    ) -> None:
        self.desk: Desk | None = None
        self._lacks: AgentError | None = None
        self.assign_again = asyncio.Event()
        """Set when the configuration has changed."""
        self._worker: Worker | None = None
        self.modules = environ.get(MODULES_VARIABLE, "/lib/modules")
        """Where the kernel's modules are."""
        journal = Journal(config.state_directory)
        try:
            boot = boot_id(environ, config.host.proc)
            found = journal.load()
        except AgentError as error:
            _log.error("no-claims", problem=error.sentence, hint=error.hint)
            self._lacks = error
            return
        if found.problem:
            _log.error("journal-unusable", problem=found.problem, path=found.set_aside)
        settings = config.vfio
        self._worker = Worker(
            lambda result: inbox.order(Finished(result)),
            state_directory=config.state_directory,
            roots=Roots(
                sys=config.host.sys,
                dev=config.host.dev,
                proc=config.host.proc,
                run=config.host.run,
                modules=self.modules,
            ),
            timeouts=Timeouts(write=settings.write_timeout, load=settings.load_timeout),
            writer=writer,
        )
        self.desk = Desk(
            journal=journal,
            found=found.durable,
            worker=self._worker,
            rules=claim_rules(config, modules=self.modules),
            boot_id=boot,
            owners_gone=functools.partial(owners_gone, proc=config.host.proc),
        )

    def root_tasks(self) -> Mapping[str, Coroutine[object, object, object]]:
        """What has to run beside the reconciler, by name."""
        return {} if self._worker is None else {"worker": self._worker.run()}

    def refusal(self, order: Order) -> Answer | None:
        """The answer to every order where nothing can be claimed; None where something can."""
        if self._lacks is None:
            return None
        name = f"{RECOVERY}{order.address}" if isinstance(order, Recover) else order.id
        why = problem(Code.JOURNAL_FAILED, f"nothing can be claimed: {self._lacks.sentence}")
        return Answer(0, name, problems=(structs.replace(why, hint=self._lacks.hint or ""),))

    async def assign(
        self,
        submit: Submit,
        wanted: Callable[[], Sequence[AssignSettings]],
        ready: asyncio.Event,
    ) -> None:
        """Claim what the configuration says: at the start, once each, and later what is new.

        What could not be claimed is tried again, later and later if a person has to do something
        about it; a device that could not be moved a few times is left alone until the configuration
        is read again. What somebody has released stays released.

        Args:
            submit: The reconciler's.
            wanted: What is to be claimed now.
            ready: Set when the start's waiting is over. Before, at boot, a device may have no
                driver *yet*, and a claim would remember that it had none.
        """
        await ready.wait()
        clock = asyncio.get_running_loop().time
        done: set[AssignSettings] = set()
        said: dict[str, str] = {}
        delays: dict[AssignSettings, float] = {}
        due_at: dict[AssignSettings, float] = {}
        while True:
            self.assign_again.clear()
            now = clock()
            due = [e for e in wanted() if e not in done and due_at.get(e, now) <= now]
            answers = await asyncio.gather(*(submit(_order(entry)) for entry in due))
            for entry, answer in zip(due, answers, strict=True):
                if answer.ok or answer.problems[0].code is Code.CANCELLED:  # by its release
                    done.add(entry)
                    due_at.pop(entry, None)
                    continue
                why = answer.problems[0]
                delay = delays.get(entry, ASSIGN_AGAIN)
                if not why.retryable:
                    delays[entry] = min(2 * delay, ASSIGN_AGAIN_MAX)
                gives_up = self._is_worn(entry)
                due_at[entry] = math.inf if gives_up else clock() + delay
                if gives_up or said.get(entry.id) != why.sentence:
                    said[entry.id] = why.sentence
                    _log.error(
                        "not-assigned", claim=entry.id, problem=why.sentence, gives_up=gives_up
                    )
            next_at = min((at for e, at in due_at.items() if e in wanted()), default=math.inf)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if math.isinf(next_at) else next_at):
                    await self.assign_again.wait()
                    delays, due_at = {}, {}

    def _is_worn(self, entry: AssignSettings) -> bool:
        """Whether one of its devices has failed to be moved too often."""
        cooling = {} if self.desk is None else self.desk.claims.cooling
        found = (cooling.get(parse_address(device)) for device in entry.devices)
        return any(each is not None and each.failures >= ASSIGN_MOVES for each in found)

    async def finish(self) -> None:
        """Let writes that are under way come to their end, bounded; the journal has the rest."""
        if self._worker is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WRITE):
                    await self._worker.finish()


def _order(entry: AssignSettings) -> Prepare:
    return Prepare(
        id=entry.id,
        mode=HoldMode(entry.mode),
        devices=tuple(map(parse_address, entry.devices)),
        client=ASSIGNER,
        force=entry.force,
        named=tuple(map(parse_address, entry.named)),
        driver=entry.driver,
    )
