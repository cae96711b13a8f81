"""A simulated host with an agent that is a process, and everything that a test does to both.

The kernel lives in the test's process, so a test can stop at each write that arrives. Nothing here
waits for time: a test waits for answers, for the end of a process, or for the agent to have passed.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from agent.cdi.parse import parse
from agent.control.client import UnreachableError, call
from agent.simulate import Features, Hardware, Kernel, Uevent, hint_of
from agent.simulate.serve import Server
from tests.claims.agent import MESSAGE, SET, FromKernel, Start
from tests.claims.nursery import PATIENCE, Nursery
from tests.claims.reader import Reader
from tests.claims.trap import Orders

BOOT: Final = "0123456789abcdef" * 2
DRIVERS: Final = (
    *("pcieport", "xe", "i915", "nouveau", "amdgpu", "snd_hda_intel", "xhci_hcd", "ccp"),
    "vfio-pci",
)
FEATURES: Final = Features(drivers=DRIVERS)

Document = dict[str, Any]
Settings = Mapping[str, Mapping[str, object]]
"""Sections of a configuration."""
Gate = Callable[[str, str], int | None]
"""Asked before a write is done, with its path and content; an errno refuses it."""


class WatchedKernel(Kernel):
    """The simulated kernel, with a gate before each write, and a clock at it."""

    def __init__(self, root: Path, emit: Callable[[Uevent], None], features: Features) -> None:
        self.gate: Gate | None = None
        self.busy: list[tuple[float, float]] = []
        """When each write began and ended; monotonic seconds."""
        super().__init__(root, emit, features=features)

    def write(self, path: str, text: str) -> int:
        """Do it, unless the gate refuses."""
        gate = self.gate
        began = time.monotonic()
        error = None if gate is None else gate(path, text)
        answer = super().write(path, text) if error is None else error
        self.busy.append((began, time.monotonic()))
        return answer

    def override_of(self, address: str) -> str | None:
        """The ``driver_override`` of a function."""
        with self._changed:
            return self._function(address).override


class ClaimHost:
    """A host, and the agent on it; a context manager.

    Args:
        folder: An empty folder.
        nursery: Starts the agent.
        hardware: What is plugged in.
        features: What kind of host it is.
        settings: The agent's configuration, over what a host needs.
    """

    def __init__(
        self,
        folder: Path,
        nursery: Nursery,
        *hardware: Hardware,
        features: Features = FEATURES,
        settings: Settings | None = None,
    ) -> None:
        self.folder: Final = folder
        self.specs: Final = folder / "cdi"
        self.settings: dict[str, dict[str, object]] = {
            "reconcile": {"settle": 0.01},
            "vfio": {"retry": 0.01, "cool_down": 0, "write_timeout": 20, "publish_timeout": 5},
        }
        for section, keys in (settings or {}).items():
            self.settings.setdefault(section, {}).update(keys)
        self.environ: dict[str, str] = {"CDI_AGENT_BOOT_ID": BOOT}
        self.asks_twice = True
        """Whether an order that was done is given again each time."""
        self._nursery = nursery
        self._pid: int | None = None
        self._news = threading.Condition()
        self._passes = 0
        self._sets = 0
        self._is_ready = False
        self._agent: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(folder / "events"))
        self._listener.listen()
        self._listener.setblocking(False)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(folder / "notify"))
        self._end, self._ended = socket.socketpair()
        for each in (self._listener, self._notify, self._ended):
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._hear, name="what the agent says")
        self._thread.start()
        self.kernel = WatchedKernel(folder / "host", self._emit, features)
        self.kernel.plug(*hardware)
        self._server = Server(self.kernel, folder / "writes")
        self.reader = Reader(self.specs, folder / "host/dev", lambda: self._passes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            print(self.log())
        self.kernel.gate = None
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
            self.await_end()
        self.reader.close()
        self._server.close()
        self._end.close()
        self._thread.join()
        for each in (self._listener, self._notify, self._ended, self._agent, self._selector):
            if each is not None:
                each.close()

    # --- the agent's life -------------------------------------------------------------------------

    def start(self, **settings: Mapping[str, object]) -> None:
        """Start the agent, and wait until it is ready.

        Args:
            settings: Sections of its configuration, over what it had.
        """
        self.configure(**settings)
        with self._news:
            self._is_ready = False
        self._pid = self._nursery.start(
            Start(
                config=str(self.folder / "config.yaml"),
                events=str(self.folder / "events"),
                writes=str(self.folder / "writes"),
                log=str(self.folder / "agent.log"),
                environ={**self.environ, "NOTIFY_SOCKET": str(self.folder / "notify")},
            )
        )
        self._wait(lambda: self._is_ready)
        self.until(lambda: self.try_ask("GET", "/v1/status") is not None)

    def configure(self, **settings: Mapping[str, object]) -> None:
        """Change its configuration, which it reads at its start and at SIGHUP."""
        for section, keys in settings.items():
            self.settings.setdefault(section, {}).update(keys)
        host = self.folder / "host"
        always: dict[str, Any] = {
            "state_directory": str(self.folder / "state"),
            "host": {name: str(host / name) for name in ("sys", "dev", "run", "proc")},
            "cdi": {"directory": str(self.specs), "other_directories": []},
            "log": {"format": "text"},
            "metrics": {"listen": None},
            "control": {"socket": str(self.folder / "control")},
        }
        for section, keys in self.settings.items():
            always[section] = {**always.get(section, {}), **keys}
        (self.folder / "config.yaml").write_text(json.dumps(always))

    def reload(self, **settings: Mapping[str, object]) -> None:
        """Let it read its configuration again, and wait until it has dealt with that."""
        self.configure(**settings)
        with self._news:
            self._is_ready = False
        self.signal(signal.SIGHUP)
        self._wait(lambda: self._is_ready)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._pid is not None
        os.kill(self._pid, number)

    def kill(self) -> None:
        """Kill it, and return when it is dead; somebody has to call `await_end`, too."""
        assert self._pid is not None
        pidfd = os.pidfd_open(self._pid)
        try:
            self.signal(signal.SIGKILL)
            with selectors.DefaultSelector() as selector:
                selector.register(pidfd, selectors.EVENT_READ)
                selector.select(PATIENCE)
        finally:
            os.close(pidfd)

    def await_end(self) -> int:
        """Wait until it has ended; its status."""
        status = self._nursery.await_end()
        self._pid = None
        return status

    def stop(self) -> int:
        """End it as systemd does; its status."""
        self.signal(signal.SIGTERM)
        return self.await_end()

    def log(self) -> str:
        """All that the agents have logged."""
        try:
            return (self.folder / "agent.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    # --- what is asked ----------------------------------------------------------------------------

    def try_ask(self, method: str, route: str, body: object = None) -> Document | None:
        """Ask the agent over its control socket; None if it died or does not listen."""
        try:
            _, document = call(str(self.folder / "control"), method, route, body)
        except UnreachableError:
            return None
        return document

    def ask(self, method: str, route: str, body: object = None) -> Document:
        """Ask it; it must answer."""
        document = self.try_ask(method, route, body)
        if document is None:
            status = self.await_end()  # it may have more to say
            raise AssertionError(f"ended with {status}:\n{self.log()[-6000:]}")
        return document

    def prepare(self, claim: str, *devices: str, **more: object) -> Document:
        """Claim devices, twice."""
        body = {"devices": devices, **more}
        # A lease may have ended in between.
        return self._ask("PUT", f"/v1/claims/{claim}", body, twice="lease" not in more)

    def release(self, claim: str, *, force: bool = False) -> Document:
        """Give them back, twice."""
        path = f"/v1/claims/{claim}" + ("?force=true" if force else "")
        return self._ask("DELETE", path, None, twice=True)

    def _ask(self, method: str, path: str, body: Document | None, *, twice: bool) -> Document:
        """Whatever a test is about: what is done may be asked for again, and is answered alike."""
        told = self.ask(method, path, body)
        if told["ok"] and twice and self.asks_twice:
            assert self.ask(method, path, body) == told
        return told

    def recover(self, address: str, query: str = "") -> Document:
        """Bring a stranded device back."""
        return self.ask("POST", f"/v1/recover/{address}{query}")

    def claims(self) -> Document:
        """Who holds what, and what is stranded or hung."""
        return self.ask("GET", "/v1/claims")

    def phase(self, claim: str) -> str | None:
        """What a claim waits for; None if there is none of that name."""
        found = (c["phase"] for c in self.claims()["claims"] if c["id"] == claim)
        return next(found, None)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so; it is asked again after each of the agent's passes."""
        while True:
            with self._news:
                passes = self._passes
            if condition():
                return
            self._wait(lambda: self._passes > passes)  # noqa: B023 - it is called at once

    def quiet(self) -> Document:
        """Wait until no claim is on its way, there or back; the claims then."""
        self.until(lambda: all(c["phase"] in {"done", "lost"} for c in self.claims()["claims"]))
        return self.claims()

    # --- what is true -----------------------------------------------------------------------------

    def published(self) -> dict[str, set[str]]:
        """The device names of each kind that are on disk, without ``all``."""
        found = {}
        for path in sorted(self.specs.glob("*.yaml")):
            with contextlib.suppress(FileNotFoundError):
                spec = parse(path.read_bytes())
                found[str(spec.kind)] = {d.name for d in spec.devices if d.name != "all"}
        return found

    def world(self) -> Document:
        """All that a claim may have changed: what is published, drivers, overrides."""
        return {
            "published": self.published(),
            "functions": {
                str(address): (driver, self.kernel.override_of(address))
                for address, driver in self.kernel.functions.items()
            },
        }

    # --- what goes wrong --------------------------------------------------------------------------

    def set_trap(
        self, at: int, errno: int | None = None, *, times: int = 1, only: str = ""
    ) -> None:
        """Set the agent's trap; it has heard of it when this returns. 0 is none."""
        with self._news:
            sets = self._sets
        self._send(FromKernel(trap=Orders(at, errno, times, only)))
        self._wait(lambda: self._sets > sets)

    @contextlib.contextmanager
    def gate(self, gate: Gate) -> Iterator[None]:
        """Ask this before each write meanwhile."""
        self.kernel.gate = gate
        try:
            yield
        finally:
            self.kernel.gate = None

    # --- between kernel and agent -----------------------------------------------------------------

    def _emit(self, event: Uevent) -> None:
        self._send(FromKernel(hint=hint_of(event, time.monotonic())))

    def _send(self, message: FromKernel) -> None:
        """Tell the agent, if there is one that listens."""
        with self._news:
            self._accept()
            if self._agent is not None:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._agent.send(msgspec.json.encode(message))

    def _accept(self) -> None:
        """Take who has connected: from that moment on it misses nothing."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                if self._agent is not None:
                    self._forget()
                self._agent = connection
                self._selector.register(connection, selectors.EVENT_READ)

    def _forget(self) -> None:
        assert self._agent is not None
        self._selector.unregister(self._agent)
        self._agent.close()
        self._agent = None

    def _hear(self) -> None:
        """Read all that the agent says, in a thread."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._ended:
                    return
                with self._news:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._notify:
                        self._is_ready |= b"READY=1" in self._notify.recv(MESSAGE)
                    elif key.fileobj is self._agent:
                        self._hear_agent(self._agent)
                    self._news.notify_all()

    def _hear_agent(self, agent: socket.socket) -> None:
        try:
            said = agent.recv(MESSAGE)
        except ConnectionResetError:
            said = b""
        if not said:
            self._forget()
        elif said == SET:
            self._sets += 1
        else:
            self._passes += 1

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._news:
            if not self._news.wait_for(condition, PATIENCE):
                raise AssertionError(f"waited in vain:\n{self.log()[-6000:]}")
