"""The agent as a process on a private host, and what stands in for its service manager.

It is started as a unit would start it; what it tells its manager (sd_notify) is kept in order, with
the time, and a `Supervisor` ends it as systemd does if it gives no sign of life.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

import yaml

import agent

START: Final = 30.0
"""Seconds in which the agent must be ready, and in which it must have ended."""
NOTIFY: Final = "/run/notify"
NOBODY: Final = 65534
CONFIG: Final = "/etc/cdi-agent/config.yaml"
PYTHON: Final = os.environ.get("CDI_AGENT_PYTHON", sys.executable)
"""What runs the agent: for numbers, one that has only the packages of a user's installation."""
_ENVIRONMENT: Final = {"SYSTEMD_DEVICE_VERIFY_SYSFS": "0", "NOTIFY_SOCKET": NOTIFY}


def refusing(what: str) -> tuple[str, ...]:
    """What to start the agent through so that the kernel keeps something from it (`refuse`)."""
    return sys.executable, "-m", "tests.netns.refuse", what


def unprivileged() -> tuple[str, ...]:
    """What to start the agent through so that it is an ordinary user.

    One that may read everything, as the program may lie where only its owner may look.
    """
    reads = "dac_read_search"
    return (
        *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
        *(f"--bounding-set=-all,+{reads}", f"--inh-caps=-all,+{reads}", f"--ambient-caps=+{reads}"),
    )


class News(NamedTuple):
    """What is heard of the agent: that it is ready, or that a process has ended."""

    ended: int | None = None
    """The id of the process; None is READY."""
    status: int = 0


class Told(NamedTuple):
    """One message to the service manager."""

    at: float
    """Monotonic seconds."""
    fields: dict[str, str]


class AgentProcess:
    """The agent: started, told things, ended.

    Args:
        work: A folder for its configuration and its log.
    """

    def __init__(self, work: str) -> None:
        self._folder = Path(work)
        self._agent: subprocess.Popen[bytes] | None = None
        self._news: SimpleQueue[News] = SimpleQueue()
        self._told: list[Told] = []
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(NOTIFY)
        os.chmod(NOTIFY, 0o666)  # noqa: S103 - as systemd's
        threading.Thread(target=self._hear, args=(notify,), daemon=True).start()

    # --- its life ---------------------------------------------------------------------------------

    def start_agent(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        through: Sequence[str] = (),
        wait: bool = True,
    ) -> None:
        """Start it, and wait until it says that it is ready.

        Args:
            settings: Its configuration.
            environ: More of its environment.
            through: A command that the agent's own is appended to, and that becomes the agent.
            wait: Whether to wait.

        Raises:
            RuntimeError: It ended, or was not ready in time.
        """
        self.configure(yaml.safe_dump(dict(settings or {})))
        while not self._news.empty():
            self._news.get()  # of an agent that has ended
        self._told.clear()
        with open(self._folder / "agent.log", "ab") as log:
            self._agent = subprocess.Popen(
                [*through, PYTHON, "-m", "agent", "run", "--config", CONFIG],
                cwd=Path(agent.__file__).parents[1],
                env={**os.environ, **_ENVIRONMENT, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        threading.Thread(target=self._await_end, args=(self._agent,), daemon=True).start()
        if wait:
            self.await_ready()

    def await_ready(self) -> None:
        """Wait until it says (again) that it is ready.

        Raises:
            RuntimeError: It ended, or was not ready in time.
        """
        process = self._running_agent()
        while True:
            try:
                news = self._news.get(timeout=START)
            except Empty:
                raise RuntimeError(f"not ready in {START} s:\n{self.agent_log()}") from None
            if news.ended is None:
                return
            if news.ended == process.pid:
                raise RuntimeError(f"it ended with {news.status}:\n{self.agent_log()}")

    def signal_agent(self, number: int) -> None:
        """Send it a signal."""
        self._running_agent().send_signal(number)

    def signal_children(self, number: int) -> None:
        """Send a signal to what the program that it was started through has started."""
        for child in self._children():
            os.kill(child, number)

    def agent_hangs(self) -> bool:
        """Whether it is in a system call that no signal interrupts (state D in proc(5))."""
        processes = (self._running_agent().pid, *self._children())
        stats = (stat for pid in processes for stat in Path(f"/proc/{pid}/task").glob("*/stat"))
        return any(stat.read_text().rpartition(") ")[2].startswith("D") for stat in stats)

    def end_agent(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal and wait until it has ended; its exit status."""
        process = self._running_agent()
        process.send_signal(number)
        return process.wait(START)

    def await_end(self) -> int:
        """Wait until it has ended by itself, or by what was done to it; its exit status."""
        assert self._agent is not None
        return self._agent.wait(START)

    def agent_runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._agent is not None and self._agent.poll() is None

    def supervise(self, watchdog: float) -> None:
        """End it as systemd does (SIGABRT, then SIGKILL) once it has been silent for so long."""
        process = self._running_agent()

        def watch() -> None:
            while process.poll() is None:
                signs = [told.at for told in list(self._told) if "WATCHDOG" in told.fields]
                if signs and time.monotonic() - signs[-1] > watchdog:
                    process.send_signal(signal.SIGABRT)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.2)
                    process.kill()
                    return
                time.sleep(0.01)

        threading.Thread(target=watch, daemon=True).start()

    # --- what it is told, and what it says --------------------------------------------------------

    def configure(self, text: str) -> None:
        """Write its configuration; it reads it at its start and at SIGHUP."""
        os.makedirs(os.path.dirname(CONFIG), exist_ok=True)
        Path(CONFIG).write_text(text)

    def reload(self, settings: Mapping[str, Any]) -> None:
        """Change its configuration, and wait until it says that it has dealt with that."""
        self.reload_text(yaml.safe_dump(dict(settings)))

    def reload_text(self, text: str) -> None:
        """The same with any text."""
        self.configure(text)
        while not self._news.empty():
            self._news.get()
        self.signal_agent(signal.SIGHUP)
        self.await_ready()

    def told(self) -> list[dict[str, str]]:
        """What its service manager was told since its start, in order."""
        return [told.fields for told in list(self._told)]

    def agent_log(self) -> str:
        """All that it and its predecessors wrote."""
        return (self._folder / "agent.log").read_text(errors="replace")

    def log_stream(self) -> str:
        """What systemd would call the stream of its log (JOURNAL_STREAM)."""
        log = self._folder / "agent.log"
        log.touch()
        status = log.stat()
        return f"{status.st_dev}:{status.st_ino}"

    def agent_memory(self) -> int:
        """Its resident memory in KiB."""
        status = Path(f"/proc/{self._running_agent().pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    def _children(self) -> list[int]:
        pid = self._running_agent().pid
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]

    def _running_agent(self) -> subprocess.Popen[bytes]:
        if self._agent is None or not self.agent_runs():
            raise RuntimeError(f"the agent does not run:\n{self.agent_log()}")
        return self._agent

    def _hear(self, notify: socket.socket) -> None:
        """Read all that the agent tells its service manager, as systemd does."""
        while True:
            lines = notify.recv(65536).decode().splitlines()
            fields = dict(line.split("=", 1) for line in lines)
            self._told.append(Told(time.monotonic(), fields))
            if fields.get("READY") == "1":
                self._news.put(News())

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        self._news.put(News(process.pid, process.wait()))
