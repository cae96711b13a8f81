"""Lets other processes write to a simulated host, each write as blocking as on a real one.

`Server` listens on a socket; ``simulate/writer.py`` is what connects, in the place of the child by
which the agent writes to /sys (``vfio/writer.py``). One connection is one ``write(2)``: a message
with path and content goes in, an errno comes back when the kernel has answered, and if it never
does, the child waits.

A child that is killed in a write is not gone on a real host until the kernel returns. Here it is;
but the descriptors that came with its message, its lock among them, stay open in the server until
the kernel returns, so the lock says what it would say.
"""

import array
import contextlib
import os
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from agent.simulate.kernel import Kernel

WRITER: Final = os.path.join(os.path.dirname(__file__), "writer.py")
"""The script to run: ``python -I -S WRITER SOCKET …`` and then as ``vfio/writer.py``."""

_MESSAGE: Final = 8192
_DESCRIPTORS: Final = 4


class Server:
    """Answers writes from other processes, each in a thread of its own; a context manager.

    Args:
        kernel: Whom they write to.
        path: Where the socket is made; its folder must be there.
    """

    def __init__(self, kernel: Kernel, path: Path) -> None:
        self.path: Final = path
        self._kernel = kernel
        self._threads: list[threading.Thread] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(str(path))
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise
        self._listener = threading.Thread(target=self._listen, name="simulated kernel")
        self._listener.start()

    def close(self) -> None:
        """End all hangs, then wait until each write has been answered.

        Processes that hold nodes of VFIO must have let go of them.
        """
        # Closing a listening socket wakes nobody who waits on it; shutting it down does.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._socket.close()
        self.path.unlink()
        self._kernel.heal()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # `close` has shut it down
            thread = threading.Thread(
                target=self._answer, args=(connection,), name="simulated write"
            )
            self._threads.append(thread)
            thread.start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            message, descriptors = _receive(connection)
            try:
                path, _, content = message.partition(b"\0")
                error = self._kernel.write(os.fsdecode(path), content.decode(errors="replace"))
                # Who was killed meanwhile hears nothing.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.send(b"%d" % error)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One message, and the descriptors that came with it."""
    descriptors = array.array("i")
    size = socket.CMSG_LEN(_DESCRIPTORS * descriptors.itemsize)
    message, extras, _, _ = connection.recvmsg(_MESSAGE, size)
    for level, kind, data in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, descriptors.tolist()
