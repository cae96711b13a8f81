"""What can go wrong around the agent on a private host: ports, files, file systems that hang."""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from agent.cli.lock import SPECS_LOCK
from tests.netns.process import NOBODY, START, AgentProcess

_libc: Final = ctypes.CDLL(None, use_errno=True)
_FUSE: Final = os.makedev(10, 229)
_READ_ONLY: Final = 1  # MS_RDONLY
_DETACH: Final = 2  # MNT_DETACH


class Mischief(AgentProcess):
    """Does things to the host that an agent has to live with."""

    def __init__(self, work: str) -> None:
        super().__init__(work)
        self._port: socket.socket | None = None
        self._hanging: dict[str, int] = {}
        self._occupied: list[int] = []

    # --- the metrics port -------------------------------------------------------------------------

    def take_port(self, port: int) -> None:
        """Listen there, so that nobody else can."""
        self._port = socket.create_server(("127.0.0.1", port))

    def free_port(self) -> None:
        """End it."""
        assert self._port is not None
        self._port.close()

    def answers(self, url: str) -> bool:
        """Whether somebody answers."""
        try:
            with urllib.request.urlopen(url, timeout=START):  # noqa: S310 - ours
                return True
        except urllib.error.URLError:
            return False

    def get_or_nothing(self, url: str) -> str:
        """What is answered, or nothing if nobody does."""
        try:
            with urllib.request.urlopen(url, timeout=START) as answer:  # noqa: S310 - ours
                text: str = answer.read().decode()
                return text
        except urllib.error.URLError:
            return ""

    # --- the agent --------------------------------------------------------------------------------

    def kill_after(self, seconds: float) -> None:
        """Kill it so much later, and wait for that."""
        process = self._running_agent()
        timer = threading.Timer(seconds, process.send_signal, [signal.SIGKILL])
        timer.start()
        process.wait(START)
        timer.join()

    # --- files ------------------------------------------------------------------------------------

    def write_file(self, path: str, text: str) -> None:
        """Write a file in place, as an editor that knows no better does."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).write_text(text)

    def read_file(self, path: str) -> str:
        """What a file says."""
        return Path(path).read_text()

    def put_file(self, path: str, text: str) -> None:
        """Replace a file by renaming another one, as most editors do."""
        Path(f"{path}.tmp").write_text(text)
        os.rename(f"{path}.tmp", path)

    def chmod(self, path: str, mode: int) -> None:
        """Change the permissions of a file."""
        os.chmod(path, mode)

    def chown(self, path: str) -> None:
        """Give it to the user without privileges."""
        os.chown(path, NOBODY, NOBODY)

    def files(self, directory: str) -> dict[str, str]:
        """What every file in a directory says, but the agent's lock."""
        found = {}
        for name in set(os.listdir(directory)) - {SPECS_LOCK}:
            with contextlib.suppress(FileNotFoundError):
                found[name] = Path(directory, name).read_text()
        return found

    def remove_all(self, directory: str) -> None:
        """Delete a directory with what is in it."""
        shutil.rmtree(directory)

    def put_spec(self, path: str, kind: str, names: Iterable[str]) -> None:
        """Write the spec file of somebody else, whole from the first moment."""
        devices = "".join(
            f'- name: "{name}"\n  containerEdits:\n    env:\n    - "WHOSE=theirs"\n'
            for name in names
        )
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(f"{path}.tmp").write_text(f'cdiVersion: "0.5.0"\nkind: "{kind}"\ndevices:\n{devices}')
        os.rename(f"{path}.tmp", path)

    def remove(self, path: str) -> None:
        """Delete a file, or an empty directory."""
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        else:
            os.unlink(path)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or a directory."""
        os.rename(old, new)

    def listing(self, directory: str) -> list[str]:
        """The names of what is in a directory, but of the agent's lock."""
        return sorted(set(os.listdir(directory)) - {SPECS_LOCK})

    def mode(self, path: str) -> int:
        """The permissions of a file."""
        return stat.S_IMODE(os.stat(path).st_mode)

    def identity(self, path: str) -> Mapping[str, int]:
        """What tells that a file is the same and was not written again."""
        status = os.stat(path)
        return {"inode": status.st_ino, "time": status.st_mtime_ns}

    def mount_read_only(self, directory: str) -> None:
        """Mount a file system there that nobody can write to."""
        os.makedirs(directory)
        if _libc.mount(b"tmpfs", directory.encode(), b"tmpfs", _READ_ONLY, None) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), directory)

    def occupy(self, directory: str) -> None:
        """Hold a directory for specs as another agent does."""
        os.makedirs(directory)
        path = f"{directory}/{SPECS_LOCK}"
        self._occupied.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        fcntl.flock(self._occupied[-1], fcntl.LOCK_EX)

    # --- a file system that hangs -----------------------------------------------------------------

    def hang(self, directory: str) -> None:
        """Let everything that looks into a directory wait: its file system does not answer."""
        os.makedirs(directory, exist_ok=True)
        if not os.path.exists("/dev/fuse"):
            os.mknod("/dev/fuse", stat.S_IFCHR | 0o600, _FUSE)
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
        if _libc.mount(b"hangs", directory.encode(), b"fuse", 0, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), directory)
        self._hanging[directory] = server

    def unhang(self, directory: str) -> None:
        """Let who waits go on; the directory is as it was before."""
        os.close(self._hanging.pop(directory))
        if _libc.umount2(directory.encode(), _DETACH) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), directory)
