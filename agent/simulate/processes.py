"""Processes of a simulated host that have nodes open, as /proc shows them.

Who holds a node of a display keeps its numbers taken after it has gone; who holds a node of VFIO
keeps the driver from leaving.
"""

import os
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from agent.simulate.devices import Life, Sysfs


class Hold:
    """A process that has a node open, until `release`; also a context manager."""

    def __init__(self, path: str, pid: int, release: Callable[["Hold"], None]) -> None:
        self.path: Final = path
        self.pid: Final = pid
        self._release = release

    def release(self) -> None:
        """Close the node and end the process; nothing happens the second time."""
        self._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Processes:
    """The processes and what they hold.

    Args:
        sysfs: Where the nodes come from.
    """

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs
        self._tree = sysfs.tree
        self._lives: dict[Hold, Life] = {}
        self._next_pid = 1000

    def start(self, path: str, command: str, release: Callable[[Hold], None]) -> Hold:
        """Start a process that opens a node.

        Raises:
            FileNotFoundError: There is no such node.
        """
        life = self._sysfs.lives.get(path)
        if life is None or not self._tree.exists(path):
            raise FileNotFoundError(f"there is no node {path}")
        life.hold()
        hold = Hold(path, self._next_pid, release)
        self._next_pid += 1
        self._lives[hold] = life
        self._tree.file(f"/proc/{hold.pid}/comm", f"{command}\n")
        self._tree.file(f"/proc/{hold.pid}/cmdline", f"{command}\0")
        self._tree.folder(f"/proc/{hold.pid}/fd")
        os.symlink(path, self._descriptor(hold))
        return hold

    def end(self, hold: Hold) -> None:
        """End a process."""
        life = self._lives.pop(hold, None)
        if life is not None:
            life.release()
            self._tree.remove(f"/proc/{hold.pid}")

    def mark_deleted(self) -> None:
        """Show which held nodes are gone, as the kernel does."""
        for hold, life in self._lives.items():
            gone = f"{hold.path} (deleted)"
            entry = self._descriptor(hold)
            if self._sysfs.lives.get(hold.path) is not life and os.readlink(entry) != gone:
                os.unlink(entry)
                os.symlink(gone, entry)

    def _descriptor(self, hold: Hold) -> str:
        return self._tree.real(f"/proc/{hold.pid}/fd/3")
