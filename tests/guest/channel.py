"""Commands in the guest, over the virtio serial port that `inside/rig_channel.py` serves."""

import base64
import itertools
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from tests.guest.lines import JsonLines, Message

_PING_SECONDS: Final = 1.0
# How long after a command's own time-out its answer may still be on the way.
_GRACE_SECONDS: Final = 30.0


class GuestGoneError(Exception):
    """The guest no longer answers: it has ended, or its channel is dead."""


class CommandFailedError(Exception):
    """A command in the guest ended with another code than 0; the text shows what it said."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a command in the guest ended."""

    command: str
    rc: int
    """Its exit code; 124 if it was killed for its time-out, -N if signal N ended it."""
    out: str
    err: str
    seconds: float
    """How long it took, by the guest's clock."""

    def check(self) -> "Result":
        """Return itself, or raise CommandFailedError unless the exit code is 0."""
        if self.rc != 0:
            raise CommandFailedError(f"exit code {self.rc}: {self.command}\n{self.out}{self.err}")
        return self


class Channel:
    """Any number of commands at a time, from any thread."""

    def __init__(self, connected: socket.socket) -> None:
        # Answers of an earlier connection may still be in the port: ids are never used twice.
        self._ids = itertools.count(time.monotonic_ns())
        self._waiting: dict[int, Future[Message]] = {}
        self._lock = threading.Lock()
        self._open = True
        self._lines = JsonLines(connected, "channel", self._take, self._ended)

    def wait_until_answered(self, seconds: float) -> None:
        """Wait until the guest's side runs and answers.

        Raises:
            TimeoutError: It does not in this time.
            GuestGoneError: It no longer can.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                self._ask({"ping": True}, _PING_SECONDS)
            except TimeoutError:
                if time.monotonic() > end:
                    raise TimeoutError(f"the guest did not answer in {seconds:g} s") from None
            else:
                return

    def run(self, argv: Sequence[str], *, seconds: float, stdin: bytes, cwd: str) -> Result:
        """Run a command to its end, or kill it and its children after `seconds`."""
        name = argv[-1] if argv[0] == "/bin/sh" else " ".join(argv)
        return self._result(name, seconds, stdin, argv=list(argv), cwd=cwd)

    def exchange(self, path: str, message: bytes, *, seconds: float) -> Result:
        """Send a message to a unix socket, and take what is answered until it is closed."""
        return self._result(path, seconds, message, socket=path)

    def _result(self, name: str, seconds: float, stdin: bytes, **what: object) -> Result:
        given = base64.b64encode(stdin).decode()
        request = {"timeout": seconds, "stdin": given, **what}
        answer = self._ask(request, seconds + _GRACE_SECONDS)
        out, err = (
            base64.b64decode(answer[key]).decode("utf-8", "replace") for key in ("out", "err")
        )
        return Result(name, answer["rc"], out, err, answer["secs"])

    def close(self) -> None:
        self._lines.close()

    def _ask(self, request: Message, seconds: float) -> Message:
        answer: Future[Message] = Future()
        with self._lock:
            if not self._open:
                raise GuestGoneError("the guest has ended")
            number = next(self._ids)
            self._waiting[number] = answer
        try:
            self._lines.send({**request, "id": number})
            return answer.result(timeout=seconds)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise GuestGoneError("the guest has hung up") from error
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def _take(self, message: Message) -> None:
        with self._lock:
            answer = self._waiting.get(message.get("id", 0))
        if answer is not None:
            answer.set_result(message)

    def _ended(self) -> None:
        with self._lock:
            self._open = False
            waiting = list(self._waiting.values())
        for answer in waiting:
            if not answer.done():
                answer.set_exception(GuestGoneError("the guest ended before it answered"))
