"""The service: builds the objects, starts them in the order that matters, ends them in order.

**Start.** The caller has made sure that no other instance writes. Signal handlers come first, so
that nothing is ever ended half-way. Then both sources are opened, and collect messages from here
on. Only then comes the first look, so what happens in between is not lost. READY is said when the
first passes are done, and not before: engines are ordered after this unit: containers start then.

**Root tasks** live in one task group, each named. One that returns, or raises what is not
expected, is a bug: it ends the process, systemd starts it again, and a start is as good as any
pass. A source that this process can never have is no bug; the agent looks regularly instead.

**End.** SIGTERM asks the reconciler to stop; the pass under way finishes, so no rename comes late.
Then everything else is cancelled. The spec files stay (containers go on), unless
``cdi.remove_on_stop`` says otherwise. A second signal ends the process at once.
"""

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, MutableMapping, Sequence
from typing import Final, NoReturn

import structlog

from agent import __version__, compose
from agent.cdi.files import DeleteSpec
from agent.cdi.profile import enabled
from agent.cdi.watch import SpecWatch
from agent.claiming import Claiming
from agent.config import Config
from agent.config.finals import keep_finals
from agent.control.api import application as api
from agent.control.http import Limits
from agent.control.pages import application, document, probe
from agent.control.server import HttpService
from agent.control.sockets import UnixAddress, parse_address, passed_sockets
from agent.errors import AgentError, SourceUnavailableError, StoreError
from agent.host.devnodes import StatNode, lstat_node
from agent.host.hints import Hint
from agent.host.monitor import Monitor, SourceState
from agent.observe.claim_metrics import ClaimMetrics
from agent.observe.health import Verdict, health, readiness
from agent.observe.log import Log
from agent.observe.metrics import CONTENT_TYPE, Metrics
from agent.observe.readiness import ReadyNotice
from agent.observe.systemd import Notifier
from agent.reconcile.messages import RELOAD, RELOAD_REFUSED, SPECS, Inbox, NewRules, Stop
from agent.reconcile.reconciler import Reconciler
from agent.reconcile.state import PassReport, State
from agent.vfio.model import Answer, Order
from agent.vfio.worker import WRITER

_log = structlog.get_logger()

SOURCES: Final = ("kernel", "udev")
ORDERS: Final = Limits(connections=32, seconds=180.0, request_bytes=131_072)
"""For the control socket: an order takes as long as the kernel takes to move a device."""
PATIENCE: Final = 60.0
"""Seconds beyond ``resync`` after which a loop that has not passed counts as stuck."""


class Daemon:
    """The composition root of ``cdi-agent run``.

    Args:
        config: The configuration to start with.
        reload: Reads the configuration again; blocks, raises ConfigError.
        occupy: Keeps other instances out of directories for specs; blocks, raises
            AlreadyRunningError.
        log: Where the log goes.
        environ: The process's environment; what systemd put there for us is taken out.
        stat_node: Says what is at a path below /dev; a simulated host has its own.
        writer: The program that reads and writes attributes; a simulated host has its own.
    """

    def __init__(
        self,
        config: Config,
        *,
        reload: Callable[[], Config],
        occupy: Callable[[Sequence[str]], None],
        log: Log,
        environ: MutableMapping[str, str],
        stat_node: StatNode = lstat_node,
        writer: Sequence[str] = WRITER,
    ) -> None:
        self._config = config
        self._reload = reload
        self._occupy = occupy
        self._stat_node = stat_node
        self._notifier = Notifier.from_environment(environ)
        self._sockets = passed_sockets(environ)
        self._parts = compose.parts(config, stat_node=stat_node)
        self._inbox = Inbox(config.reconcile.queue_size)
        self._monitors: list[Monitor] = []
        self._unavailable: set[str] = set()
        """Sources that this process can never have."""
        self._last_pass: float | None = None
        self._stopping = False
        self._ready_notice = ReadyNotice()
        self._hangup = asyncio.Event()
        self._watch = SpecWatch(
            self._parts.store.directories,
            lambda at: self._inbox.hint(Hint(reason=SPECS, received=at)),
        )
        self._claiming = Claiming(config, self._inbox, environ, writer=writer)
        self._reconciler = Reconciler(
            inbox=self._inbox,
            scanner=self._parts.scanner,
            store=self._parts.store,
            rules=self._parts.rules,
            on_pass=self._on_pass,
            blind=self._is_blind,
            desk=self._claiming.desk,
            watchdog=self._notifier,
        )
        self._metrics = Metrics(
            version=__version__,
            sources=self._monitors,
            inbox=self._inbox,
            snapshot=self._reconciler.snapshot,
            health=self._health,
            log_dropped=lambda: log.dropped,
            proc=config.host.proc,
        )
        self._metrics.kinds = _kinds(self._parts)
        self._metrics.watched = lambda: self._parts.store.directory in self._watch.watched
        self._claim_metrics: ClaimMetrics | None = None
        if self._claiming.desk is not None:
            self._claim_metrics = ClaimMetrics(self._claiming.desk, self._reconciler.snapshot)
            self._metrics.add(self._claim_metrics)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        with self._signals(asyncio.get_running_loop()):
            _log.info("started", version=__version__, directory=self._config.cdi.directory)
            await asyncio.to_thread(self._open_sources)
            try:
                async with asyncio.TaskGroup() as group:
                    others = [
                        group.create_task(_endless(name, work), name=name)
                        for name, work in self._root_tasks().items()
                    ]
                    await self._reconciler.run()
                    self._notifier.stopping()
                    await self._claiming.finish()
                    for task in others:
                        task.cancel()
            finally:
                self._notifier.close()
            if self._config.cdi.remove_on_stop:
                await self._remove_specs()
            await self._parts.store.save_record()
            _log.info("stopped")

    # --- start ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Turn signals into messages for as long as the service runs."""
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._hangup.set)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        """End in order; whoever signals again wants an end at once."""
        if self._stopping:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            os._exit(128 + number)  # the first process of a container is not ended by that
        self._stopping = True
        _log.info("stopping", signal=number.name)
        self._inbox.order(Stop())

    def _open_sources(self) -> None:
        """Open all sources; from here on nothing that happens is lost. Runs in a thread."""
        self._watch.open()
        for source in SOURCES:
            try:
                self._monitors.append(
                    Monitor.open(
                        source,
                        self._inbox.hint,
                        receive_buffer=self._config.host.receive_buffer,
                    )
                )
            except SourceUnavailableError as error:
                self._do_without(source, error)

    def _do_without(self, source: str, error: SourceUnavailableError) -> None:
        self._unavailable.add(source)
        _log.warning("source-unavailable", source=source, problem=error.sentence, hint=error.hint)

    def _root_tasks(self) -> dict[str, Coroutine[object, object, object]]:
        """Everything that runs beside the reconciler, by name."""
        tasks: dict[str, Coroutine[object, object, object]] = {
            f"source-{monitor.source}": self._listen(monitor) for monitor in self._monitors
        }
        tasks["spec-watch"] = self._watch.run()
        tasks["reload"] = self._reload_on_hangup()
        where = self._sockets.get("metrics", ())
        listen = self._config.metrics.listen
        if where or listen is not None:
            pages = application(
                {
                    "/metrics": document(self._metrics.render, CONTENT_TYPE),
                    "/healthz": probe(self._health),
                    "/readyz": probe(self._readiness),
                }
            )
            address = where or parse_address(listen or "")
            tasks["metrics"] = HttpService("metrics", pages, where=address).run()
        tasks.update(self._claiming.root_tasks())
        if self._claiming.desk is not None:
            tasks["assign"] = self._claiming.assign(
                self._reconciler.submit,
                lambda: self._config.vfio.assign,
                self._reconciler.ready,
            )
        tasks.update(self._control())
        return tasks

    def _control(self) -> dict[str, Coroutine[object, object, object]]:
        """The socket on which orders are taken, if there is to be one."""
        sockets = self._sockets.get("control", ())
        settings = self._config.control
        if not sockets and settings.socket is None:
            return {}
        where = sockets or UnixAddress(settings.socket or "", settings.group)
        orders = api(self, proc=self._config.host.proc)
        return {"control": HttpService("control", orders, where=where, limits=ORDERS).run()}

    async def _listen(self, monitor: Monitor) -> None:
        """Read a source for ever; one that cannot be had any more is looked past."""
        try:
            await monitor.run()
        except SourceUnavailableError as error:
            self._do_without(monitor.source, error)
            await _for_ever()

    # --- what the control socket talks to ---------------------------------------------------------

    def snapshot(self) -> State:
        """The state after the latest pass."""
        return self._reconciler.snapshot()

    async def submit(self, order: Order) -> Answer:
        """Ask for a claim, its end, or a stranded device back."""
        return self._claiming.refusal(order) or await self._reconciler.submit(order)

    async def pause(self, *, paused: bool) -> None:
        """Let no claim begin to move a device, or let them again; returns when it is so."""
        await self._reconciler.pause(paused=paused)

    def overview(self) -> dict[str, object]:
        """Version, health and sources."""
        verdict = self._health()
        return {
            "version": __version__,
            "healthy": verdict.ok,
            "problems": list(verdict.problems),
            "ready": self._reconciler.ready.is_set(),
            "sources": dict.fromkeys(self._unavailable, "unavailable")
            | {monitor.source: monitor.state.value for monitor in self._monitors},
        }

    # --- while it runs ----------------------------------------------------------------------------

    def _is_blind(self) -> bool:
        """Whether changes may go unheard: then the reconciler looks more often.

        The kernel's messages alone tell of every change; udev's are needed only where a udevd is
        waited for.
        """
        up = {m.source for m in self._monitors if m.state is SourceState.UP}
        udevd = self._reconciler.snapshot().inventory.environment.udevd
        return "kernel" not in up or (udevd and "udev" not in up)

    def _on_pass(self, report: PassReport, state: State) -> None:
        self._last_pass = report.started + report.duration
        self._metrics.observe(report)
        if report.looked_at is None or report.wrote:
            self._watch.renew()  # directories may have come since
        if self._claim_metrics is not None:
            self._claim_metrics.observe()
        if not report.reasons.keys().isdisjoint((RELOAD, RELOAD_REFUSED)):
            self._ready_notice.reloaded(
                taken=RELOAD in report.reasons,
                until=self._last_pass + self._parts.rules.ready_timeout,
            )
        status = _status(state)
        started, now = self._reconciler.ready.is_set(), time.monotonic()
        if self._ready_notice.is_due(state.withheld, started=started, now=now):
            if self._ready_notice.given():
                _log.info("ready", status=status)
            self._notifier.ready(status)
        else:
            self._notifier.status(status)

    def _health(self) -> Verdict:
        return health(
            problems=self._reconciler.snapshot().problems,
            sources=self._monitors,
            last_pass=self._last_pass,
            now=time.monotonic(),
            patience=self._parts.rules.resync + PATIENCE,
            unavailable=self._unavailable,
        )

    def _readiness(self) -> Verdict:
        return readiness(ready=self._reconciler.ready.is_set(), stopping=self._stopping)

    async def _reload_on_hangup(self) -> NoReturn:
        """Take a new configuration after each SIGHUP; a bad one is refused, the old one stays."""
        while True:
            await self._hangup.wait()
            self._hangup.clear()
            self._notifier.reloading()
            try:
                await self._take(await asyncio.to_thread(self._reload))
            except AgentError as error:
                _log.error("reload-refused", problem=error.sentence, hint=error.hint)
                self._inbox.hint(
                    Hint(reason=RELOAD_REFUSED, everything=True, received=time.monotonic())
                )

    async def _take(self, config: Config) -> None:
        """Let a new configuration come into force.

        Raises:
            AgentError: It is refused, and the old one stays.
        """
        config = self._without_finals(config)
        parts = await asyncio.to_thread(
            compose.parts, config, stat_node=self._stat_node, ledger=self._parts.store.ledger
        )
        claim_rules = await asyncio.to_thread(
            compose.claim_rules, config, modules=self._claiming.modules
        )
        if parts.store.directory != self._parts.store.directory:
            await parts.store.require_usable()
        await asyncio.to_thread(self._occupy, parts.store.directories)
        check = functools.partial(compose.require_kept_names, new=parts.rules)
        self._watch.follow(parts.store.directories)  # before the first look at them
        try:
            await self._reconciler.reconfigure(
                NewRules(parts.rules, parts.scanner, parts.store, claim_rules, check)
            )
        except AgentError:
            self._watch.follow(self._parts.store.directories)
            raise
        self._config, self._parts = config, parts
        self._metrics.kinds = _kinds(parts)
        self._claiming.assign_again.set()

    def _without_finals(self, config: Config) -> Config:
        """Keep what cannot change while the service runs, and say what that is."""
        config, changed = keep_finals(self._config, config)
        if changed:
            _log.warning(
                "restart-needed",
                keys=changed,
                problem="these keys change only when the service is restarted",
            )
        return config

    # --- end --------------------------------------------------------------------------------------

    async def _remove_specs(self) -> None:
        disk = self._reconciler.snapshot().disk
        for path, file in ({} if disk is None else disk.ours).items():
            try:
                kind = None if file.spec is None else file.spec.kind
                await self._parts.store.apply(DeleteSpec(path, kind))
            except StoreError as error:
                _log.error("spec-delete-failed", path=path, problem=error.sentence, hint=error.hint)


async def _endless(name: str, work: Coroutine[object, object, object]) -> NoReturn:
    """Run a root task; its end is a bug."""
    await work
    raise RuntimeError(f"the task {name} has ended")


async def _for_ever() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError  # pragma: no cover - nothing completes that future


def _kinds(parts: compose.Parts) -> tuple[str, ...]:
    kinds = {kind for profile in enabled(parts.rules.profiles) for kind in profile.kinds}
    return tuple(sorted(kinds))


def _status(state: State) -> str:
    """One line for ``systemctl status``."""
    kinds = Counter(kind for kind, _ in state.published)
    published = ", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items()))
    text = f"publishing {published}" if published else "nothing to publish"
    return f"{text}; {state.problems[0]}" if state.problems else text
