"""What systemd is told: readiness, status, reloads, stopping, and that the loop still works.

The protocol is one datagram of ``NAME=value`` lines to the socket that ``NOTIFY_SOCKET`` names
(sd_notify(3)). Nothing here blocks or raises: an agent that cannot tell systemd how it is goes on
working. But it says so in the log, once a minute while that lasts.

The watchdog must be fed by the loop that does the work, never by a task of its own: a task beside
it would go on feeding while the work hangs.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Final, Self

import structlog

from agent.troubles import Troubles

_log = structlog.get_logger()

MAX_STATUS: Final = 512
"""Characters; what is longer nobody reads in ``systemctl status``."""


class Notifier:
    """The service manager as a peer; a silent one where there is no service manager.

    Args:
        address: A path, or ``@`` and a name for an abstract socket; None to tell nobody.
        watchdog: Seconds after which systemd takes silence for death; None if it does not watch.
        clock: Monotonic seconds, the kernel's CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        address: str | None,
        *,
        watchdog: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watchdog_interval: Final = None if watchdog is None else watchdog / 2
        """Seconds between two signs of life; None if nobody waits for any."""
        self.failures = 0
        """Messages that did not arrive."""
        self._clock = clock
        self._fed_at: float | None = None
        self._unsent: dict[str, str] = {}
        """What did not arrive goes with the next message: a lost READY would be fatal."""
        self._status = ""
        self._troubles = Troubles()
        self._address: str | None = None
        self._socket: socket.socket | None = None
        if address is None:
            return
        if not address.startswith(("/", "@")) or len(address) < 2:  # noqa: PLR2004 - more than `/`
            _log.warning("notify-unsupported", address=address)
            return
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str], pid: int | None = None) -> Self:
        """Take systemd's variables out of the environment, so that no child speaks for us.

        Args:
            environ: ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID`` are removed.
            pid: Our process id; a watchdog for another process is not ours to feed.
        """
        address = environ.pop("NOTIFY_SOCKET", None)
        microseconds = environ.pop("WATCHDOG_USEC", "")
        whose = environ.pop("WATCHDOG_PID", "")
        ours = not whose or whose == str(os.getpid() if pid is None else pid)
        watchdog = int(microseconds) / 1e6 if microseconds.isdecimal() and ours else None
        return cls(address, watchdog=watchdog or None)

    @property
    def enabled(self) -> bool:
        """Whether anybody is told."""
        return self._socket is not None

    def ready(self, status: str) -> None:
        """The first pass is done, or a reload: what was started after us may go on."""
        self._status = status
        for superseded in ("RELOADING", "MONOTONIC_USEC"):
            self._unsent.pop(superseded, None)
        self._send({"READY": "1", "STATUS": status})

    def status(self, status: str) -> None:
        """What ``systemctl status`` shows; the same again is not sent."""
        if status != self._status:
            self._status = status
            self._send({"STATUS": status})

    def reloading(self) -> None:
        """The configuration is read again; `ready` says that it is done."""
        self._send({"RELOADING": "1", "MONOTONIC_USEC": str(int(self._clock() * 1e6))})

    def stopping(self) -> None:
        """The orderly end has begun."""
        self._send({"STOPPING": "1", "STATUS": "stopping"})

    def feed_watchdog(self) -> None:
        """Say that the loop works, if it is time to; cheap enough for every turn of the loop."""
        if self.watchdog_interval is None:
            return
        now = self._clock()
        # A turn that comes a little early counts, or the next would come too late.
        if self._fed_at is None or now - self._fed_at >= self.watchdog_interval * 0.9:
            self._fed_at = now
            self._send({"WATCHDOG": "1"})

    def close(self) -> None:
        """Close the socket; nothing is told any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: Mapping[str, str]) -> None:
        if self._socket is None or self._address is None:
            return
        self._unsent |= message
        lines = "".join(f"{name}={_one_line(value)}\n" for name, value in self._unsent.items())
        try:
            self._socket.sendto(lines.encode("utf-8", "backslashreplace"), self._address)
        except OSError as error:
            self.failures += 1
            if self._troubles.is_news(error.errno, self._clock()):
                _log.warning("notify-failed", problem=f"systemd was not told: {error}")
        else:
            self._unsent = {}


def _one_line(value: str) -> str:
    """A value that cannot become two: the protocol has no escape for a newline."""
    return " ".join(value.split())[:MAX_STATUS]
