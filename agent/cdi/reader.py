"""Reading the spec directories: what is ours, what is left over, what others define.

It changes nothing. Everything is read as consumers read it: not below sub-directories, hidden
files too, through a symbolic link to a file but not to a directory. One directory under two names
is one directory.

While nothing changes a reading costs one listing, and one ``lstat`` a file: a file whose inode,
size and times are the same is not opened again, unless it was changed so shortly before it was
read that a second change could have left the same times.

What others put there is bounded, file by file and together: whatever lies in the directories, a
reading ends soon and keeps little. What is ours is read first, and always.
"""

import errno
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger

from agent.cdi.directory import FILE_MODE, Directory, Entry, fault, is_temp, printable
from agent.cdi.files import PREFIX, Disk, ForeignFile, SpecFile
from agent.cdi.parse import Peek, parse, peek
from agent.cdi.record import Ledger, digest
from agent.cdi.render import HEADER, render
from agent.cdi.tree import MAX_SIZE
from agent.errors import SpecError
from agent.host.files import OUT_OF_MEANS

_SIGNATURE: Final = HEADER.partition(",")[0].encode()
"""What the first line has begun with in every version."""

_COARSE: Final = 100_000_000
"""Nanoseconds within which two changes of a file may leave it with the same times."""

MAX_FOREIGN_FILES: Final = 1000
"""Files of others that one reading reads; a host has a few, one for each vendor's tool."""
MAX_FOREIGN_SIZE: Final = 2 * MAX_SIZE
"""Bytes that these may have together."""

_NOT_FOLLOWED: Final = (errno.ENOTDIR, errno.ELOOP)
"""What is at the place of a directory and that consumers pass over without a word."""

_log: FilteringBoundLogger = structlog.get_logger(__name__)


def is_authentic(name: str, content: bytes) -> bool:
    """Whether a file says itself that we wrote it: a comment in YAML, our exact form in JSON."""
    if not name.startswith(PREFIX):
        return False
    if not name.endswith(".json"):
        return content.startswith(_SIGNATURE)
    try:
        spec = parse(content)
        version = msgspec.json.decode(content, type=_Version).cdi_version
        return render(spec, version=version, suffix="json") == content
    except (SpecError, msgspec.DecodeError):
        return False


class _Content(msgspec.Struct, frozen=True):
    """What a file held when it was last read."""

    key: tuple[int, ...]
    stable: bool
    """It cannot have been changed since without a trace in ``key``."""
    data: bytes | None
    """None if it could not be read, or cannot be ours by its name: then ``peeked`` is all of it."""
    problem: str | None = None
    authentic: bool = False
    digest: str = ""
    peeked: Peek | None = None


_TOO_MUCH: Final = (
    f"it has more files of others than are read ({MAX_FOREIGN_FILES}, or"
    f" {MAX_FOREIGN_SIZE // 2**20} MiB together): nothing is known of what the rest defines"
)


class _Ours(msgspec.Struct, frozen=True):
    """What a content means: as long as a file has it, it is the same object."""

    file: SpecFile
    digest: str


class _Budget:
    """What one reading may still read of others."""

    def __init__(self) -> None:
        self.exceeded = False
        """A file was not allowed since this was last put back."""
        self._files = MAX_FOREIGN_FILES
        self._size = MAX_FOREIGN_SIZE

    def allows_more(self) -> bool:
        """Whether any file may be read any more."""
        self.exceeded |= self._files <= 0
        return self._files > 0

    def allows(self, size: int) -> bool:
        """Whether a file of this size may be read; if so, it counts as read."""
        size = size if size <= MAX_SIZE else 0  # it will be refused by itself
        self.exceeded |= size > self._size
        if size > self._size or not self.allows_more():
            return False
        self._files -= 1
        self._size -= size
        return True


class Reader:
    """Reads the spec directories.

    Args:
        directory: The one that we write to.
        others: Those that consumers read beside it.
        ledger: What we wrote.
    """

    def __init__(self, directory: str, others: Sequence[str], ledger: Ledger) -> None:
        self._directory = directory
        self._others = tuple(others)
        self._ledger = ledger
        self._lock = threading.Lock()
        self._contents: dict[str, _Content] = {}
        self._ours: dict[str, _Ours] = {}
        self._foreign: dict[str, tuple[bytes, ForeignFile]] = {}
        self._seen: set[str] = set()
        self._budget = _Budget()
        self._said: set[tuple[str, str]] = set()

    def expect(self, file: SpecFile, digest: str) -> None:
        """Learn what a content means, so that it need not be understood when it is found."""
        with self._lock:
            self._ours[file.path] = _Ours(file, digest)

    def read(self, unfinished: Collection[str] = ()) -> Disk:
        """Read everything.

        Args:
            unfinished: Names of temporary files that are being written at the moment.

        Raises:
            StoreError: The directory that we write to is there and cannot be read, or this process
                lacks the means to read at all.
        """
        with self._lock:
            self._seen, self._budget = set(), _Budget()
            ours: dict[str, SpecFile] = {}
            leftovers: list[str] = []
            foreign: list[ForeignFile] = []
            for found in self._directories():
                if isinstance(found, ForeignFile):
                    foreign.append(found)
                    continue
                for item in self._listed(found, unfinished):
                    match item:
                        case SpecFile():
                            ours[item.path] = item
                        case ForeignFile():
                            foreign.append(item)
                        case str():
                            leftovers.append(item)
            for cache in (self._contents, self._ours, self._foreign):
                for path in cache.keys() - self._seen:
                    del cache[path]
            self._said = {said for said in self._said if said[1] in self._seen}
            return Disk(self._directory, ours, tuple(leftovers), tuple(foreign))

    def _directories(self) -> Iterator[Directory | ForeignFile]:
        """Every directory once, open for as long as the caller looks at it, or why it is closed."""
        seen: set[tuple[int, int]] = set()
        # Where nothing of ours is left, another instance may be at home by now.
        recorded = [path for path, names in self._ledger.record.directories.items() if names]
        for path in dict.fromkeys((self._directory, *self._others, *recorded)):
            try:
                directory = Directory.open(path)
            except OSError as error:
                if error.errno == errno.ENOENT:
                    continue
                closed = self._closed(path, error)
                if path in self._others and error.errno not in _NOT_FOLLOWED:
                    yield closed
                continue
            with directory:
                if directory.identity not in seen:
                    seen.add(directory.identity)
                    yield directory

    def _closed(self, path: str, error: OSError) -> ForeignFile:
        """What is to be said of a directory that cannot be read.

        Raises:
            StoreError: It is the one that we write to, or this process lacks the means to read any.
        """
        problem = fault("read", path, error)
        if path == self._directory or error.errno in OUT_OF_MEANS:
            raise problem from error
        return ForeignFile(printable(path), None, same_directory=False, problem=problem.sentence)

    def _listed(
        self, directory: Directory, unfinished: Collection[str]
    ) -> Sequence[SpecFile | ForeignFile | str]:
        """What a directory holds, or why that cannot be said."""
        try:
            return list(self._files(directory, unfinished))
        except OSError as error:
            return [self._closed(directory.path, error)]

    def _files(
        self, directory: Directory, unfinished: Collection[str]
    ) -> Iterator[SpecFile | ForeignFile | str]:
        """What a directory holds; a leftover of ours as its path."""
        real = os.path.realpath(directory.path)
        self._budget.exceeded = False
        for name in directory.names():
            if not (name.startswith(PREFIX) or self._budget.allows_more()):
                break
            entry = None if name in unfinished else directory.entry(name)
            found = None if entry is None else self._found(directory, real, entry)
            if found is not None:
                yield found
        if self._budget.exceeded:
            shown = printable(directory.path)
            yield ForeignFile(shown, None, same_directory=False, problem=_TOO_MUCH)

    def _found(
        self, directory: Directory, real: str, entry: Entry
    ) -> SpecFile | ForeignFile | str | None:
        """What is in a directory under a name; None if it is of no concern, or too much."""
        path = f"{directory.path}/{entry.name}"
        if not entry.is_directory:
            return path if is_temp(entry.name) else self._file(directory, real, entry, path)
        in_the_way = entry.name.startswith(PREFIX) and not is_temp(entry.name)
        if directory.path == self._directory and in_the_way:
            return ForeignFile(printable(path), None, problem="it is a directory")
        return None

    def _file(
        self, directory: Directory, real: str, entry: Entry, path: str
    ) -> SpecFile | ForeignFile | str | None:
        own = directory.path == self._directory
        is_looked_into = own or directory.path in self._others
        content = self._content(directory, real, entry, path)
        if content is None:
            return None
        if self._is_recorded(real, entry) or (
            is_looked_into and self._is_recognised(real, entry, path, content)
        ):
            return self._our_file(real, entry, path, content) if own else path
        return self._foreign_file(path, content, own=own) if is_looked_into else None

    def _is_recorded(self, real: str, entry: Entry) -> bool:
        return entry.name.startswith(PREFIX) and self._ledger.record.knows(real, entry.name)

    def _is_recognised(self, real: str, entry: Entry, path: str, content: _Content) -> bool:
        """Whether a file that the record does not know says itself that it is ours."""
        if not (entry.is_file and content.authentic):
            return False
        if (recognised := ("spec-file-recognised", path)) not in self._said:
            self._said.add(recognised)
            reason = "by its first line, not the record"
            _log.info(recognised[0], path=f"{real}/{entry.name}", reason=reason)
        return True

    def _content(self, directory: Directory, real: str, entry: Entry, path: str) -> _Content | None:
        """Read a file if it may have changed; None if it is gone, or too much."""
        old = self._contents.get(path)
        try:
            status = entry.status
            if entry.is_link:
                status = os.stat(entry.name, dir_fd=directory.fd)
            if not (self._is_recorded(real, entry) or self._budget.allows(status.st_size)):
                return None
            key = _key(entry.status) + _key(status)
            if old is not None and old.stable and old.key == key:
                self._seen.add(path)
                return old
            now = time.time_ns()
            status, data = directory.read(entry.name, follow=entry.is_link)
        except OSError as error:
            if error.errno in OUT_OF_MEANS:
                raise
            if directory.entry(entry.name) is None:
                return None
            reason = (
                "it is a symbolic link that leads nowhere"
                if error.errno == errno.ENOENT
                else error.strerror or str(error)
            )
            content = _Content((), stable=False, data=None, problem=reason)
        else:
            key = _key(entry.status) + _key(status)
            stable = status.st_ctime_ns < now - _COARSE
            content = _understood(entry.name, data, old, key=key, stable=stable)
        if old is not None and entry.is_link and not self._is_recorded(real, entry):
            content = _with_earlier(content, old) if _leads_to_ours(real, entry.name) else content
        self._contents[path] = content
        self._seen.add(path)
        return content

    def _our_file(self, real: str, entry: Entry, path: str, content: _Content) -> SpecFile:
        """A file of ours; without content if it has to be written again whatever it says."""
        data = content.data
        if data is None:
            self._say_once("spec-file-changed", path, problem=content.problem)
            return SpecFile(path, b"", None)
        known = self._ours.get(path)
        if known is None or known.file.content != data:
            known = self._ours[path] = _Ours(self._parsed(path, data), digest(data))
        expected = self._ledger.expected_hash(real, entry.name, authentic=content.authentic)
        if expected is None or expected == known.digest:
            self._said.discard(("spec-file-changed", path))
        else:
            self._say_once("spec-file-changed", path, problem="it is not what cdi-agent wrote")
        if entry.is_file and entry.mode == FILE_MODE:
            return known.file
        return SpecFile(path, b"", known.file.spec)

    def _parsed(self, path: str, data: bytes) -> SpecFile:
        try:
            return SpecFile(path, data, parse(data))
        except SpecError as error:
            self._say_once("spec-file-unreadable", path, problem=error.sentence)
            return SpecFile(path, data, None)

    def _foreign_file(self, path: str, content: _Content, *, own: bool) -> ForeignFile:
        shown = printable(path)
        if content.peeked is not None:
            kind, names, problem = content.peeked
            return ForeignFile(shown, kind, names, same_directory=own, problem=problem)
        if content.data is None:
            return ForeignFile(shown, None, same_directory=own, problem=content.problem)
        known = self._foreign.get(path)
        if known is None or known[0] != content.data:
            kind, names, problem = peek(content.data)
            file = ForeignFile(shown, kind, names, same_directory=own, problem=problem)
            known = (content.data, file)
            self._foreign[path] = known
        return known[1]

    def _say_once(self, event: str, path: str, **fields: str | None) -> None:
        if (event, path) not in self._said:
            self._said.add((event, path))
            _log.warning(event, path=printable(path), **fields)


def _understood(
    name: str, data: bytes, old: _Content | None, *, key: tuple[int, ...], stable: bool
) -> _Content:
    """What is kept of a file's bytes: all, or where it cannot be ours only what it defines."""
    if not name.startswith(PREFIX):
        mark = digest(data)
        known = old.peeked if old is not None and old.digest == mark else None
        return _Content(key, stable, data=None, digest=mark, peeked=known or peek(data))
    if old is not None and old.data == data:
        return _Content(key, stable, data, authentic=old.authentic)
    return _Content(key, stable, data, authentic=is_authentic(name, data))


def _leads_to_ours(real: str, name: str) -> bool:
    """Whether a link leads to a file of ours beside it, be that there or not."""
    parent, target = os.path.split(os.path.realpath(f"{real}/{name}"))
    return parent == real and target.startswith(PREFIX)


def _with_earlier(content: _Content, old: _Content) -> _Content:
    """What a link to a file of ours defines: all that was ever in that file.

    It doubles whatever we publish. Were it believed to define nothing once that is withdrawn, the
    same would be published and withdrawn for ever.
    """
    now, before = (each.peeked or peek(each.data or b"") for each in (content, old))
    peeked = Peek(now.kind or before.kind, now.names | before.names)
    return content if peeked.kind is None else msgspec.structs.replace(content, peeked=peeked)


class _Version(msgspec.Struct, rename="camel"):
    cdi_version: str


def _key(status: os.stat_result) -> tuple[int, ...]:
    return (
        status.st_dev,
        status.st_ino,
        status.st_mode,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
