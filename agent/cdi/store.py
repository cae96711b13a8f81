"""The one writer of the spec directories.

It owns every file there whose name begins with ``cdi-agent_`` and that the record knows or whose
first line is ours. It never changes a file that it does not own, decides nothing about what should
be there (``reconcile.plan`` does), and removes no directory.

A write is: make the directory if it is missing, record a new name, temporary file in the same
directory, mode, fsync, rename, fsync of the directory. So whoever reads the directory, whenever,
and whenever this process is killed, sees the old file or the new one. Cancelling a write waits for
it: no rename comes late. Only a *new* name waits for the record to be on disk; a withdrawal never
does.

``read`` blocks and is called in a thread. It costs one listing and one ``lstat`` a file while
nothing changes.
"""

import asyncio
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import aiofiles

from agent.cdi.directory import (
    FILE_MODE,
    Directory,
    Draft,
    Entry,
    fault,
    is_spec_name,
    is_temp,
    printable,
    require_in_place,
)
from agent.cdi.files import (
    PREFIX,
    Action,
    DeleteSpec,
    Disk,
    SetAside,
    SpecFile,
    WriteSpec,
)
from agent.cdi.reader import Reader, is_authentic
from agent.cdi.record import Ledger
from agent.errors import StoreError
from agent.host.files import Step, make_directories, no_step

CDI_DIRECTORIES: Final = ("/etc/cdi", "/var/run/cdi")
"""Where consumers look; in the second a definition wins over one of the same name in the first."""

SET_ASIDE: Final = ".set-aside-by-cdi-agent"
"""Ends the name of a foreign file that we set aside: no consumer reads it, a person sees why."""


class Store:
    """Reads and changes the spec directories.

    Args:
        directory: Where our spec files go: an absolute path.
        state_directory: Where the record of them is kept.
        other_directories: Where consumers look beside ``directory``.
        ledger: The record as an earlier store of this process has it. What is on disk may be less:
            a state directory need not be writable.
        step: Told the name of each step once it is done.
    """

    def __init__(
        self,
        directory: str | Path,
        state_directory: str | Path,
        other_directories: Sequence[str | Path] = CDI_DIRECTORIES,
        *,
        ledger: Ledger | None = None,
        step: Step = no_step,
    ) -> None:
        self.directory = os.path.normpath(directory)
        others = [os.path.normpath(path) for path in other_directories]
        self._others = tuple(path for path in others if path != self.directory)
        self._step = step
        self.ledger = ledger or Ledger(os.path.normpath(state_directory), step)
        """What this process knows of the files that it wrote."""
        self._reader = Reader(self.directory, self._others, self.ledger)
        self._unfinished: set[str] = set()
        self._one_at_a_time = asyncio.Lock()

    @property
    def directories(self) -> tuple[str, ...]:
        """Every directory in which a change matters, the one that we write to first."""
        return (self.directory, *self._others)

    def read(self) -> Disk:
        """What is in the spec directories now. Blocks: call it in a thread.

        Raises:
            StoreError: The directory that we write to is there and cannot be read.
        """
        return self._reader.read(self._unfinished)

    async def prepare(self) -> None:
        """Make the directory if it is missing: consumers that start without it may never see it.

        Raises:
            StoreError: It could not be made.
        """
        await asyncio.to_thread(self._prepare)

    async def require_usable(self) -> None:
        """See that specs can be written, before those in another directory are given up for them.

        Raises:
            StoreError: The directory cannot be made, or not be written to.
        """
        await asyncio.to_thread(self._require_usable)

    async def apply(self, action: Action) -> None:
        """Perform one action, atomically and durably; once begun, it is finished even if cancelled.

        Raises:
            StoreError: It could not be done. The old file is as it was; or it is gone, if the
                action prefers that.
        """
        await _to_the_end(self._apply(action))

    async def save_record(self) -> None:
        """Bring the record on disk up to date with the latest hashes; never fails, never urgent."""
        await _to_the_end(asyncio.to_thread(self.ledger.save))

    async def _apply(self, action: Action) -> None:
        async with self._one_at_a_time:
            match action:
                case WriteSpec():
                    await self._write(action)
                case DeleteSpec():
                    await asyncio.to_thread(self._delete, action.path)
                case SetAside():
                    await asyncio.to_thread(self._set_aside, action.path)

    async def _write(self, action: WriteSpec) -> None:
        try:
            await self._replace(action)
        except StoreError as error:
            if not action.delete_if_unwritable:
                raise
            await asyncio.to_thread(self._delete, action.path)
            raise StoreError(
                f"{error.sentence}; the file was deleted, as it gave a node to the wrong device",
                hint=error.hint,
            ) from error

    async def _replace(self, action: WriteSpec) -> None:
        draft = await asyncio.to_thread(self._begin, action)
        if draft is None:
            return
        self._unfinished.add(draft.temp)
        try:
            async with aiofiles.open(draft.temp, "xb", buffering=0, opener=draft.opener) as file:
                self._step("temp-made")
                rest = memoryview(action.content)
                while rest:
                    rest = rest[await file.write(rest) :]
                await asyncio.to_thread(draft.commit, file.fileno())
        except OSError as error:
            raise fault("write", action.path, error) from error
        finally:
            await asyncio.to_thread(self._finish, draft, action)
            self._unfinished.discard(draft.temp)

    # --- in a thread ------------------------------------------------------------------------------

    def _prepare(self) -> None:
        try:
            make_directories(self.directory)
            Directory.open(self.directory).close()
        except OSError as error:
            raise fault("make", self.directory, error) from error

    def _require_usable(self) -> None:
        self._prepare()
        if not os.access(self.directory, os.W_OK):
            raise StoreError(
                f"cannot write to {printable(self.directory)}",
                hint="is its file system read-only, or does a unit lack ReadWritePaths= for it?",
            )

    def _begin(self, action: WriteSpec) -> Draft | None:
        """Open the directory and record the name; None if the file is already as it should be."""
        parent, name = os.path.split(action.path)
        if parent != self.directory or not is_our_name(name):
            raise StoreError(
                f"cdi-agent does not write {printable(action.path)}: it is not its own"
            )
        try:
            make_directories(self.directory)
            self._step("directory-made")
            directory = Directory.open(self.directory)
        except OSError as error:
            raise fault("write", action.path, error) from error
        try:
            draft = self._draft(directory, name, action)
        except OSError as error:
            directory.close()
            raise fault("write", action.path, error) from error
        except BaseException:
            directory.close()
            raise
        if draft is None:
            directory.close()
        return draft

    def _draft(self, directory: Directory, name: str, action: WriteSpec) -> Draft | None:
        real = os.path.realpath(self.directory)
        entry = directory.entry(name)
        if entry is not None:
            self._require_ours(directory, real, entry)
        if (
            entry is not None
            and entry.mode == FILE_MODE
            and _holds(directory, entry, action.content)
        ):
            directory.sync()  # an earlier try may have failed at just that
            require_in_place(directory)
            self._wrote(action, real, name)
            return None
        # A new file must not exist without its name in the record. One that is there, while the
        # record was lost, is known by its first line: its withdrawals need not wait.
        is_urgent = entry is not None and not action.publishes
        if not is_urgent and not self.ledger.record.knows(real, name):
            self.ledger.announce(real, name, action.content)
            self._step("recorded")
        return Draft(directory, name, self._step)

    def _require_ours(self, directory: Directory, real: str, entry: Entry) -> None:
        """Refuse to touch what is not ours.

        Raises:
            StoreError: It is not ours to replace or delete.
        """
        path = f"{directory.path}/{entry.name}"
        if entry.is_directory:
            raise StoreError(
                f"{path} is a directory, and the name of a spec file of cdi-agent",
                hint="move it away; cdi-agent removes no directory",
            )
        if self.ledger.record.knows(real, entry.name):
            return
        content = _content(directory, entry)
        if content is None or not is_authentic(entry.name, content):
            raise StoreError(
                f"{path} was not written by cdi-agent",
                hint="move it away if nothing needs it; cdi-agent changes no file of others",
            )

    def _finish(self, draft: Draft, action: WriteSpec) -> None:
        """Let go of everything; a name that came to nothing is not ours to keep."""
        real = os.path.realpath(self.directory)
        gone = not draft.placed and draft.directory.entry(draft.name) is None
        draft.close()
        if draft.placed:
            self._wrote(action, real, draft.name)
        elif gone:
            self.ledger.remove(real, draft.name)

    def _wrote(self, action: WriteSpec, real: str, name: str) -> None:
        mark = self.ledger.confirm(real, name, action.content)
        if action.spec is not None:
            self._reader.expect(SpecFile(action.path, action.content, action.spec), mark)

    def _delete(self, path: str) -> None:
        parent, name = os.path.split(path)
        known = {self.directory, *self._others, *self.ledger.record.directories}
        if parent not in known or not (is_our_name(name) or is_temp(name)):
            raise StoreError(f"cdi-agent does not delete {printable(path)}: it is not its own")
        try:
            with Directory.open(parent) as directory:
                real = os.path.realpath(parent)
                entry = directory.entry(name)
                if entry is not None and not is_temp(name):
                    self._require_ours(directory, real, entry)
                directory.unlink(name)
                self._step("unlinked")
                directory.sync()
                self._step("directory-synced")
                require_in_place(directory)
        except FileNotFoundError:
            pass  # with its directory
        except OSError as error:
            raise fault("delete", path, error) from error
        self.ledger.remove(os.path.realpath(parent), name)

    def _set_aside(self, path: str) -> None:
        """Rename a foreign file so that no consumer reads it; no content is lost.

        Args:
            path: As it can be printed, which is how foreign files are known.
        """
        parent, shown = os.path.split(path)
        if parent != printable(self.directory) or not is_spec_name(shown) or is_our_name(shown):
            raise StoreError(f"cdi-agent does not set aside {path}")
        try:
            with Directory.open(self.directory) as directory:
                names = [name for name in directory.names() if printable(name) == shown]
                if not names:
                    return
                name = names[0]
                directory.rename(name, _place_aside(directory, name))
                directory.sync()
                require_in_place(directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise fault("set aside", path, error) from error


def _content(directory: Directory, entry: Entry) -> bytes | None:
    """What a file holds; None if it is none, or cannot be read."""
    if not entry.is_file:
        return None
    try:
        return directory.read(entry.name)[1]
    except OSError:
        return None


def _holds(directory: Directory, entry: Entry, content: bytes) -> bool:
    """Whether a file has this content; mostly its size tells that it has not."""
    return entry.status.st_size == len(content) and _content(directory, entry) == content


def is_our_name(name: str) -> bool:
    """Whether a spec file of ours could have this name."""
    return name.startswith(PREFIX) and is_spec_name(name)


def _place_aside(directory: Directory, name: str) -> str:
    """Where to put a foreign file: nowhere yet used, or where just its content is already.

    A tool that writes its file again and again must not fill the directory.
    """
    entry = directory.entry(name)
    content = None if entry is None else _content(directory, entry)
    aside, number = name + SET_ASIDE, 1
    while (there := directory.entry(aside)) is not None:
        if content is not None and _holds(directory, there, content):
            break
        number += 1
        aside = f"{name}{SET_ASIDE}-{number}"
    return aside


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Do all of it: being cancelled meanwhile waits for it, and is not forgotten."""
    task = asyncio.create_task(work, name="store")
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        task.result()
        return
    if not task.cancelled() and (problem := task.exception()) is not None:
        raise cancelled from problem
    raise cancelled
