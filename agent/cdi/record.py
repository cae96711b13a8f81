"""What this agent wrote, and where: the part of ownership that outlives the process.

``specs.json`` in the state directory names every directory that was ever written to, and in each
the spec files of ours with the hash of their content. A name is recorded *before* its file is
first written, so a crash in between leaves a name too many and never a file too many. Hashes may
lag behind: they only tell a file that we wrote from one that was edited, where the file itself
(its first line) does not.

A record that cannot be read is set aside before the next is written, never trusted in part and
never a reason to stop: files of ours are then known by their first line. That somebody who only
looks, and is not root, may not read it is nothing to speak of.

``Record`` is an immutable value; ``RecordFile`` and ``Ledger`` block and belong in a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Mapping
from typing import Final

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger

from agent.cdi.directory import fault, is_spec_name
from agent.cdi.files import PREFIX
from agent.host.files import OUT_OF_MEANS, StateFile, Step, no_step

VERSION: Final = 1

FILE_NAME: Final = "specs.json"

_MAX_SIZE: Final = 8 * 2**20  # a name has about 150 bytes

_log: FilteringBoundLogger = structlog.get_logger(__name__)


def digest(content: bytes) -> str:
    """The hash by which a content is recorded."""
    return hashlib.sha256(content).hexdigest()


class Record(msgspec.Struct, frozen=True):
    """Hashes of our files, by directory (its real path) and name."""

    directories: Mapping[str, Mapping[str, str]] = msgspec.field(default_factory=dict)

    def knows(self, directory: str, name: str) -> bool:
        """Whether we wrote, or were about to write, a file of this name there."""
        return name in self.directories.get(directory, {})

    def hash_of(self, directory: str, name: str) -> str | None:
        """The hash of what we wrote last, as far as that is recorded."""
        return self.directories.get(directory, {}).get(name)

    def with_file(self, directory: str, name: str, content: bytes) -> Record:
        """The record once this content is ours."""
        known, written = self.directories.get(directory, {}), digest(content)
        if known.get(name) == written:
            return self
        return Record({**self.directories, directory: {**known, name: written}})

    def without_file(self, directory: str, name: str) -> Record:
        """The record once that file is gone; its directory stays known."""
        if not self.knows(directory, name):
            return self
        files = {n: h for n, h in self.directories[directory].items() if n != name}
        return Record({**self.directories, directory: files})


class _Head(msgspec.Struct):
    version: int


class _Body(_Head, forbid_unknown_fields=True):
    checksum: str
    directories: dict[str, dict[str, str]]


class RecordFile:
    """The record on disk.

    Args:
        directory: The state directory; made when it is first needed.
        step: Told of each step.
    """

    def __init__(self, directory: str, step: Step = no_step) -> None:
        self._file = StateFile(
            directory, FILE_NAME, limit=_MAX_SIZE, step=lambda name: step(f"record-{name}")
        )
        self._is_unusable = False

    @property
    def path(self) -> str:
        """Where it is."""
        return self._file.path

    def load(self) -> tuple[Record, str | None]:
        """The record, and why it had to be given up, if it had to be.

        Raises:
            StoreError: This process lacks the means to look; that says nothing about the record.
        """
        try:
            return _parse(self._file.read()), None
        except FileNotFoundError:
            return Record(), None
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in OUT_OF_MEANS:
                raise fault("read", self.path, error) from error
            if isinstance(error, PermissionError) and os.geteuid() != 0:
                return Record(), None
            self._is_unusable = True
            return Record(), getattr(error, "strerror", None) or str(error)

    def save(self, record: Record) -> None:
        """Make a record durable.

        One that could not be used is renamed, so that nothing overwrites it but the next such.

        Raises:
            OSError: It could not be; the old one is as it was.
        """
        if self._is_unusable:
            with contextlib.suppress(OSError):
                self._file.set_aside()
            self._is_unusable = False
        self._file.replace(_render(record))


class Ledger:
    """The record in memory and on disk; every thread of the store may use it.

    Args:
        directory: The state directory.
        step: Told of each step.
    """

    def __init__(self, directory: str, step: Step = no_step) -> None:
        self._file = RecordFile(directory, step)
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._record: Record | None = None
        self._saved: Record | None = None
        """What is on disk, if that is known."""
        self._failing = False
        self._confirmed: set[tuple[str, str]] = set()

    @property
    def record(self) -> Record:
        """The record; read from disk the first time.

        Raises:
            StoreError: This process lacks the means to.
        """
        with self._lock:
            return self._load()

    def expected_hash(self, directory: str, name: str, *, authentic: bool) -> str | None:
        """The hash that a file of ours must have, or None if that is not known for sure.

        What an earlier process recorded may lag behind a file that says itself that it is ours.
        """
        with self._lock:
            if authentic and (directory, name) not in self._confirmed:
                return None
            return self._load().hash_of(directory, name)

    def announce(self, directory: str, name: str, content: bytes) -> None:
        """Record a file that is about to be written, and wait until that is on disk."""
        with self._lock:
            self._record = self._load().with_file(directory, name, content)
        self.save()

    def confirm(self, directory: str, name: str, content: bytes) -> str:
        """Note that this content is on disk now, by our own hand; its hash."""
        with self._lock:
            self._record = self._load().with_file(directory, name, content)
            self._confirmed.add((directory, name))
            return self._record.directories[directory][name]

    def remove(self, directory: str, name: str) -> None:
        """Note that a file is gone."""
        with self._lock:
            self._record = self._load().without_file(directory, name)
            self._confirmed.discard((directory, name))

    def save(self) -> None:
        """Bring the record on disk up to date.

        A failure is said once, and costs nothing but certainty after the next start. Nobody else
        waits: the lock is not held while the disk works.
        """
        with self._saving:
            with self._lock:
                record = self._record
                if record is None or record == self._saved:
                    return
            try:
                self._file.save(record)
            except OSError as error:
                if not self._failing:
                    problem = fault("write", self._file.path, error)
                    _log.error(
                        "spec-record-unwritable", problem=problem.sentence, hint=problem.hint
                    )
                self._failing = True
            else:
                self._saved = record
                self._failing = False

    def _load(self) -> Record:
        if self._record is None:
            self._record, problem = self._file.load()
            self._saved = self._record
            if problem is not None:
                self._saved = None
                _log.error(
                    "spec-record-unusable",
                    path=self._file.path,
                    problem=problem,
                    hint="files of ours are known by their first line until they are written again",
                )
        return self._record


def _checksum(directories: Mapping[str, Mapping[str, str]]) -> str:
    return digest(msgspec.json.encode(directories, order="deterministic"))


def _render(record: Record) -> bytes:
    directories = {path: dict(files) for path, files in record.directories.items()}
    body = _Body(version=VERSION, checksum=_checksum(directories), directories=directories)
    return msgspec.json.format(msgspec.json.encode(body, order="deterministic")) + b"\n"


def _parse(content: bytes) -> Record:
    """Read a record.

    Raises:
        ValueError: It is not one, or not one that can be trusted.
    """
    try:
        version = msgspec.json.decode(content, type=_Head).version
        if version != VERSION:
            raise ValueError(f"it has version {version}, and this agent reads version {VERSION}")
        body = msgspec.json.decode(content, type=_Body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not a record: {error}") from error
    if body.checksum != _checksum(body.directories):
        raise ValueError("its checksum does not match")
    for path, files in body.directories.items():
        if not path.startswith("/") or not all(map(_is_ours, files)):
            raise ValueError("it names files that cannot be ours")
    return Record(body.directories)


def _is_ours(name: str) -> bool:
    return name.startswith(PREFIX) and is_spec_name(name) and "/" not in name
