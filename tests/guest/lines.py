"""One JSON object a line, both ways over a unix socket: what QMP and the rig's channel speak."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Message = dict[str, Any]


class JsonLines:
    """A connection whose messages a thread of its own hands on, until `close`.

    `on_message` and `on_end` are called in that thread; `on_end` once, when the other side has
    gone or `close` was called.
    """

    def __init__(
        self,
        connected: socket.socket,
        name: str,
        on_message: Callable[[Message], None],
        on_end: Callable[[], None],
    ) -> None:
        self._socket = connected
        self._on_message = on_message
        self._on_end = on_end
        self._write_lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, name=f"{name} reader")
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send one message; raises OSError when the other side has gone."""
        with self._write_lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Hang up, and wait for the thread."""
        # close() alone would leave the thread in recv()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        # An answer can be megabytes, in small pieces: no piece is searched or copied twice.
        pieces: list[bytes] = []
        while chunk := self._receive():
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                # The guest's channel may begin or end in the middle of a line.
                with contextlib.suppress(json.JSONDecodeError):
                    self._on_message(json.loads(b"".join((*pieces, end))))
                pieces.clear()
            pieces.append(rest)
        self._on_end()

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(1 << 16)
        except OSError:
            return b""


def connect(path: Path, still_possible: Callable[[], bool], seconds: float) -> socket.socket:
    """Connect to a unix socket, waiting until it is there.

    Raises:
        TimeoutError: It was not there in time, or no longer can be.
    """
    end = time.monotonic() + seconds
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            if time.monotonic() > end or not still_possible():
                raise TimeoutError(f"nothing listens at {path}") from error
            time.sleep(0.01)
        else:
            return sock
