"""QEMU's machine protocol: one command at a time, and the events that come in between."""

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from tests.guest.lines import JsonLines, Message

_ANSWER_SECONDS: Final = 120.0


class QmpError(Exception):
    """QEMU refused a command, or is gone; the text is QEMU's."""


class Qmp:
    """A QMP session. Any thread may use it."""

    def __init__(self, connected: socket.socket) -> None:
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._one_command = threading.Lock()
        self._events: list[Message] = []
        self._news = threading.Condition()
        self._lines = JsonLines(connected, "qmp", self._take, self._ended)
        try:
            self._answers.get(timeout=_ANSWER_SECONDS)  # the greeting
            self.execute("qmp_capabilities")
        except BaseException:
            self.close()
            raise

    def execute(self, command: str, **arguments: object) -> Any:  # noqa: ANN401 - QEMU's JSON
        """Run a command; `_` in an argument's name stands for QMP's `-`.

        Raises:
            QmpError: QEMU refused it or is gone.
        """
        named = {name.replace("_", "-"): value for name, value in arguments.items()}
        with self._one_command:
            try:
                self._lines.send({"execute": command, "arguments": named})
                answer = self._answers.get(timeout=_ANSWER_SECONDS)
            except (OSError, queue.Empty) as error:
                raise QmpError(f"QEMU does not answer {command}") from error
        if "error" in answer:
            raise QmpError(f"{command}: {answer['error']['desc']}")
        return answer["return"]

    def seen(self) -> int:
        """Count the events so far: where `wait_for` begins to look, if told to."""
        with self._news:
            return len(self._events)

    def wait_for(
        self, event: str, matches: Callable[[Message], bool], *, since: int, seconds: float
    ) -> None:
        """Wait for an event whose data matches, among those after the first `since`.

        Raises:
            TimeoutError: It did not come in time.
        """
        end = time.monotonic() + seconds
        with self._news:
            while not any(
                found["event"] == event and matches(found.get("data", {}))
                for found in self._events[since:]
            ):
                if not self._news.wait(end - time.monotonic()):
                    raise TimeoutError(f"QEMU sent no {event} in {seconds:g} s")

    def close(self) -> None:
        self._lines.close()

    def _take(self, message: Message) -> None:
        if "event" in message:
            with self._news:
                self._events.append(message)
                self._news.notify_all()
        else:
            self._answers.put(message)

    def _ended(self) -> None:
        self._answers.put({"error": {"desc": "QEMU has hung up"}})
