"""The files of a simulated host: ``sys/``, ``dev/``, ``run/`` and ``proc/`` in one folder.

Owns every change of a file below its root, and makes each one atomic: a reader in any process,
at any moment, finds an attribute with its old or its new content, a link or no link, a folder or
no folder. Which of these moments follow one another is the business of the modules above.

What is about to appear, or has just gone, lies in ``.staging`` beside the four folders, out of
every reader's sight. A folder that is removed leaves first and is emptied then; the empty folder
of a PCI function stays there for good, because sysfs gives no inode out twice, and a file system
on disk does.
"""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final


class Tree:
    """The files below a root; paths are those of the host: ``/sys/bus/pci``, ``/dev/dri``.

    Args:
        root: The folder; made if it is not there, and must be empty if it is.
        changed: Called after every single change, for tests that look at each moment.
    """

    def __init__(self, root: Path, changed: Callable[[], None] | None = None) -> None:
        self.root: Final = os.path.realpath(root)
        self.changed = changed
        self._serial = itertools.count()
        os.makedirs(self.root, exist_ok=True)
        if os.listdir(self.root):
            raise FileExistsError(
                f"{self.root} is not empty: a simulated host needs its own folder"
            )
        self._staging = os.path.join(self.root, ".staging")
        for folder in (".staging", "sys", "dev", "run", "proc"):
            os.mkdir(os.path.join(self.root, folder))

    def real(self, path: str) -> str:
        """Where a path of the host is on this machine."""
        return self.root + path

    def resolve(self, path: str) -> str:
        """Follow all links of a path of the host, or of the same path with the root before it."""
        if not path.startswith(f"{self.root}/"):
            path = self.real(os.path.join("/", path))
        return os.path.realpath(path).removeprefix(self.root)

    def exists(self, path: str) -> bool:
        """Whether something is there, be it a dangling link."""
        return os.path.lexists(self.real(path))

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted; none if there is no such folder."""
        try:
            return sorted(os.listdir(self.real(path)))
        except FileNotFoundError:
            return []

    def read(self, path: str) -> str:
        """The content of a file."""
        with open(self.real(path), encoding="utf-8") as file:
            return file.read()

    def folder(self, path: str) -> None:
        """Make a folder, and those above it."""
        try:
            os.mkdir(self.real(path))
        except FileExistsError:
            return
        except FileNotFoundError:
            os.makedirs(self.real(path))
        self._tell()

    def file(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        """Make a file, or replace it whole."""
        staged = self._stage()
        with open(staged, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(staged, mode)
        try:
            os.replace(staged, self.real(path))
        except FileNotFoundError:
            self.folder(os.path.dirname(path))
            os.replace(staged, self.real(path))
        self._tell()

    def fifo(self, path: str) -> None:
        """Put a named pipe in a file's place: whoever opens it to read waits for a writer."""
        staged = self._stage()
        os.mkfifo(staged)
        os.replace(staged, self.real(path))
        self._tell()

    def link(self, path: str, target: str) -> None:
        """Make a relative link, as sysfs does; one that is there is replaced in one step."""
        place = self.real(path)
        leads = os.path.relpath(target, os.path.dirname(path))
        try:
            os.symlink(leads, place)
        except FileNotFoundError:
            self.folder(os.path.dirname(path))
            os.symlink(leads, place)
        except FileExistsError:
            # As udevd does it, and only udevd replaces a link. Beside it, for /dev may be a mount.
            beside = os.path.join(os.path.dirname(place), f".#{os.path.basename(place)}")
            os.symlink(leads, beside)
            os.replace(beside, place)
        self._tell()

    def unlink(self, path: str) -> bool:
        """Remove a file or link; False if it was gone."""
        try:
            os.unlink(self.real(path))
        except FileNotFoundError:
            return False
        self._tell()
        return True

    def remove(self, path: str, *, keep_inode: bool = False) -> None:
        """Remove a folder with all that is in it, in one step.

        Args:
            path: The folder.
            keep_inode: No other folder shall ever get its inode.
        """
        gone = self._stage()
        os.rename(self.real(path), gone)
        self._tell()
        if not keep_inode:
            shutil.rmtree(gone)
            return
        with os.scandir(gone) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry)
                else:
                    os.unlink(entry)

    def prune(self, path: str, stop: str) -> None:
        """Remove a folder if it is empty, then the one above it, up to ``stop``, which stays."""
        while path != stop:
            try:
                os.rmdir(self.real(path))
            except OSError:
                return
            self._tell()
            path = os.path.dirname(path)

    def announce(self) -> None:
        """Say that a file was changed in another way than through these methods."""
        self._tell()

    def _stage(self) -> str:
        return os.path.join(self._staging, str(next(self._serial)))

    def _tell(self) -> None:
        if self.changed is not None:
            self.changed()
