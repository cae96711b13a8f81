"""A private host, seen from the test: its kernel, its agent, and what a consumer sees."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast

from agent.simulate.kernel import Kernel
from tests.netns.inside import METRICS, Inside

Value = TypeVar("Value")

PATIENCE: Final = 15.0
"""Seconds until something that must come about counts as not coming."""
_PAUSE: Final = 0.01
_QUIET: Final = 0.15
_BUSY: Final = ("cdi_agent_passes_total", "cdi_agent_events_total")


class UnusableError(Exception):
    """This machine does not let a private host be made."""


class _Remote:
    """Hands each call of a method, and each use of a property, to the object inside."""

    def __init__(self, host: "PrivateHost", target: str, kind: type) -> None:
        self.__dict__.update(_host=host, _target=target, _kind=kind)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever that object has
        if isinstance(getattr(self._kind, name), property):
            return self._host.call(self._target, name)
        return lambda *args, **kwargs: self._host.call(self._target, name, *args, **kwargs)

    def __setattr__(self, name: str, value: object) -> None:
        self._host.call(self._target, f"={name}", value)


class PrivateHost:
    """A host in namespaces of its own, until `close`.

    Attributes:
        kernel: Its simulated kernel; what it says goes out over real netlink.
        inside: Everything else in there.
        expected_faults: What the consumer may find fault with.

    Args:
        work: An empty folder; a tmpfs is mounted there, inside only.
        captured: The file of a captured host that it is to be; else it is one without devices.

    Raises:
        UnusableError: The machine does not let it be made.
    """

    def __init__(self, work: Path, captured: Path | None = None) -> None:
        self.expected_faults: set[str] = set()
        self._findings: dict[str, Any] | None = None
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                [
                    # If this test dies, its end of the socket closes; if unshare does, so does all.
                    *("unshare", "--net", "--mount", "--propagation=private"),
                    *("--pid", "--fork", "--kill-child", "--mount-proc"),
                    *(sys.executable, "-c", "from tests.netns.inside import main; main()"),
                    *(str(theirs.fileno()), str(work)),
                    *(() if captured is None else (str(captured),)),
                ],
                cwd=Path(__file__).parents[2],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._connection = Connection(ours.detach())
        self.inside = cast("Inside", _Remote(self, "inside", Inside))
        self.kernel = cast("Kernel", _Remote(self, "kernel", Kernel))
        try:
            self._receive()
        except RuntimeError as error:
            self.close()
            raise UnusableError(str(error)) from error
        except EOFError as error:
            complaints = self.close()
            if complaints.startswith("unshare:"):
                raise UnusableError(complaints) from error
            raise RuntimeError(complaints) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> str:
        """End it with all its processes; what it had to complain about."""
        self._connection.close()
        try:
            _, complaints = self._process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            _, complaints = self._process.communicate()
        return complaints

    def call(self, target: str, name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - see `_Remote`
        """Do something inside."""
        self._connection.send((target, name, args, kwargs))
        return self._receive()

    def _receive(self) -> Any:  # noqa: ANN401 - see `_Remote`
        done, value = self._connection.recv()
        if not done:
            raise RuntimeError(value)
        return value

    def end_reader(self) -> dict[str, Any]:
        """End the consumer, if it still looks; what it found (`reader.Findings`)."""
        if self._findings is None:
            self._findings = self.inside.end_reader()
        return self._findings

    def until(
        self,
        look: Callable[[], Value],
        expected: Callable[[Value], bool],
        patience: float = PATIENCE,
    ) -> Value:
        """Look until what is seen is as expected; what was seen at last in any case."""
        deadline = time.monotonic() + patience
        while not expected(value := look()) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        return value

    def quiet(self) -> None:
        """Wait until the agent has nothing left to do.

        That is, no message waits and no pass has begun for longer than a device must settle. On a
        slow machine this may be wrong: then what follows is tested less sharply, and still right.
        """
        seen: list[float] = []
        unchanged_since = deadline = time.monotonic()
        deadline += PATIENCE
        while (now := time.monotonic()) < deadline and now - unchanged_since < _QUIET:
            metrics = self.metrics()
            busy = [value for name, value in metrics.items() if name.startswith(_BUSY)]
            if busy != seen or metrics["cdi_agent_queue_length"]:
                seen, unchanged_since = busy, now
            time.sleep(_PAUSE)

    def metrics(self) -> dict[str, float]:
        """Every sample of the agent's metrics, by name and labels as they are exported."""
        lines = self.inside.get(METRICS).splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}
