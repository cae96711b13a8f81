"""A folder of things that take long to make, each complete or absent.

    <root>/<name>-<key>/           one finished thing: `name` says what, `key` what went into it
    <root>/<name>-<key>.lock       held exclusively while it is made, shared while it is used
    <root>/.making-<name>-<key>-*/ one being made: renamed when whole; swept when its maker is gone

Two processes that want the same thing make it once: the second waits for the first. Older keys
of the same name are removed after a newer one is made, unless some process still uses them.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Final

_MAKING: Final = ".making-"


def default_root() -> Path:
    """Where the guest's files are kept: CDI_AGENT_GUEST_CACHE, or a folder in XDG's cache."""
    if chosen := os.environ.get("CDI_AGENT_GUEST_CACHE"):
        return Path(chosen).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "cdi-agent-guest"


def key_of(*parts: str | bytes | Path) -> str:
    """Hash what goes into a thing; a Path stands for the bytes of that file."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            data = part.read_bytes()
        else:
            data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big"))
        total.update(data)
    return total.hexdigest()[:16]


class Cache:
    """The folder, and the locks that this process holds in it until `close`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self._held: dict[Path, IO[bytes]] = {}

    def get(self, name: str, key: str, make: Callable[[Path], None], *, keep: int = 1) -> Path:
        """The finished thing, made by `make(folder)` if it is not there.

        It stays on disk as long as this process lives or until `close`.

        Args:
            name: What it is, as `image`.
            key: What went into it.
            make: Fills a folder that is then renamed into place; whatever it raises leaves nothing.
            keep: How many things of this name may stay, the one returned included.
        """
        final = self.root / f"{name}-{key}"
        if final not in self._held:
            lock = _open_lock(final)
            try:
                self._made(name, final, make, keep, lock)
            except BaseException:
                lock.close()
                raise
            self._held[final] = lock
        os.utime(final)
        return final

    def close(self) -> None:
        """Let go of everything that `get` returned."""
        for lock in self._held.values():
            lock.close()
        self._held.clear()

    def clear(self) -> None:
        """Remove everything that no process uses."""
        self.close()
        _remove_unused(folder for folder in self.root.iterdir() if folder.is_dir())

    def _made(
        self,
        name: str,
        final: Path,
        make: Callable[[Path], None],
        keep: int,
        lock: IO[bytes],
    ) -> None:
        while True:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if final.is_dir():
                return
            # flock(2) lets go before it takes the other lock: somebody may have made it since, or
            # may remove it before the next turn
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not final.is_dir():
                with self._making(final) as folder:
                    make(folder)
                self._forget_others(name, final, keep)

    @contextlib.contextmanager
    def _making(self, final: Path) -> Iterator[Path]:
        for left in self.root.glob(f"{_MAKING}*"):
            if _made_of(left) == final:
                shutil.rmtree(left)  # nobody's: the lock to make it is ours
            else:
                _remove_unused([left])
        folder = Path(tempfile.mkdtemp(prefix=f"{_MAKING}{final.name}-", dir=self.root))
        try:
            yield folder
            folder.rename(final)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _forget_others(self, name: str, final: Path, keep: int) -> None:
        others = [
            folder
            for folder in self.root.glob(f"{name}-{'[0-9a-f]' * 16}")
            if folder != final and folder.is_dir()
        ]
        others.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        _remove_unused(others[keep - 1 :])


def _made_of(folder: Path) -> Path:
    """What a folder is, or is to become."""
    if not folder.name.startswith(_MAKING):
        return folder
    return folder.with_name(folder.name.removeprefix(_MAKING).rpartition("-")[0])


def _open_lock(final: Path) -> IO[bytes]:
    return final.with_name(final.name + ".lock").open("wb")


def _remove_unused(folders: Iterable[Path]) -> None:
    for folder in folders:
        with _open_lock(_made_of(folder)) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            # The lock file stays: another process may already wait for it.
