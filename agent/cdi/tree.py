"""Bytes of unknown origin as a tree of scalars, sequences and mappings, safely.

Pure. Any byte may stand in a directory that others write to, and reading it must neither bring
the agent down nor hold it up. PyYAML's composer recurses in C as deep as a document nests, so the
events of its parser are taken one by one instead, with a bound on size, number and depth; an alias
is a second reference to one value, never a copy of it. A scalar keeps its text: what type a bare
word has depends on the reader. JSON is YAML enough for the same parser.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import yaml

MAX_SIZE: Final = 8 * 1024 * 1024
"""Bytes. The largest specs known, with a driver's libraries as mounts, have a few hundred KiB."""

_MAX_DEPTH: Final = 32  # a spec nests six deep
_MAX_EVENTS: Final = 250_000  # about a second; a spec of 512 devices has 15,000
_MAX_MERGED: Final = 100_000  # keys copied by `<<` in a whole file
_MAX_SENTENCE: Final = 200
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class UnreadableError(Exception):
    """The content is no tree, or a bound is passed; the text says why, as one sentence."""


def one_line(text: str) -> str:
    """Make a sentence that quotes from a file fit to be logged: one line, printable, bounded."""
    line = " ".join(text.split())[:_MAX_SENTENCE]
    return "".join(char if char.isprintable() else "?" for char in line)


class Scalar(NamedTuple):
    """A scalar as it was written, its type not yet guessed."""

    text: str
    plain: bool
    """It stood bare, so a reader may take it for a number, a boolean or nothing."""


Tree = Scalar | list["Tree"] | dict[str, "Tree"]


def read(content: bytes, *, plain: bool = False) -> Tree:
    """Read the first document, as consumers do: they ignore what follows it.

    Args:
        plain: Refuse anchors, aliases and further documents, which a file of ours never has.

    Raises:
        UnreadableError: The content is not what it should be.
    """
    if len(content) > MAX_SIZE:
        raise UnreadableError(f"it has more than {MAX_SIZE // 1024 // 1024} MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableError("it is not text in UTF-8") from None
    try:
        return _build(yaml.parse(text, Loader=_LOADER), _Builder(plain=plain))
    except yaml.YAMLError as error:
        raise UnreadableError(_sentence(error)) from error


class _Builder:
    """Builds the tree from events, without recursion."""

    def __init__(self, *, plain: bool) -> None:
        self.plain = plain
        self._documents: list[Tree] = []
        # Open collections, innermost last; a mapping with the key whose value comes next.
        self._open: list[tuple[list[Tree] | dict[str, Tree], str | None]] = []
        self._anchors: dict[str, Tree] = {}
        self._merged = 0

    def result(self) -> Tree:
        """The one document."""
        if len(self._documents) != 1:
            raise UnreadableError(
                "it has more than one document" if self._documents else "it is empty",
            )
        return self._documents[0]

    def place(self, value: Tree, anchor: str | None = None) -> None:
        """Put a value where it belongs: into the innermost open collection."""
        if anchor is not None:
            if self.plain:
                raise UnreadableError("it has an anchor")
            self._anchors[anchor] = value
        if not self._open:
            self._documents.append(value)
            return
        parent, key = self._open[-1]
        if isinstance(parent, list):
            parent.append(value)
        elif key is not None:
            parent[key] = value
            self._open[-1] = (parent, None)
        elif not isinstance(value, Scalar):
            raise UnreadableError("a key of a mapping is no scalar")
        elif value.text in parent:
            raise UnreadableError(f"the key {value.text[:40]!r} is given twice")
        else:
            self._open[-1] = (parent, value.text)

    def open(self, collection: list[Tree] | dict[str, Tree], anchor: str | None) -> None:
        """Start a collection inside the innermost one."""
        if len(self._open) == _MAX_DEPTH:
            raise UnreadableError(f"it nests more than {_MAX_DEPTH} deep")
        self.place(collection, anchor)
        self._open.append((collection, None))

    def close(self) -> None:
        """End the innermost collection."""
        collection, _ = self._open.pop()
        if isinstance(collection, dict) and "<<" in collection:
            self._merge(collection)

    def place_alias(self, anchor: str | None) -> None:
        """Put what an anchor names here too."""
        if anchor is None or anchor not in self._anchors:
            raise UnreadableError("an alias refers to nothing")
        self.place(self._anchors[anchor])

    def _merge(self, mapping: dict[str, Tree]) -> None:
        """Resolve YAML 1.1's merge key; what stands in the mapping itself wins."""
        source = mapping.pop("<<")
        for each in source if isinstance(source, list) else [source]:
            if not isinstance(each, dict):
                raise UnreadableError("a merge key is no mapping")
            self._merged += len(each)
            if self._merged > _MAX_MERGED:
                raise UnreadableError("it merges too much")
            for key, value in each.items():
                mapping.setdefault(key, value)


def _sentence(error: yaml.YAMLError) -> str:
    """One line of an error's text, of bounded length."""
    text = str(error)
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        text = f"{error.problem or 'it is not YAML'}"
        text += "" if mark is None else f" in line {mark.line + 1}"
    return one_line(text)


def _build(events: Iterator[yaml.Event], builder: _Builder) -> Tree:
    for number, event in enumerate(events):
        if number == _MAX_EVENTS:
            raise UnreadableError("it has too many values")
        match event:
            case yaml.ScalarEvent():
                builder.place(Scalar(event.value, plain=event.implicit[0]), event.anchor)
            case yaml.MappingStartEvent():
                builder.open({}, event.anchor)
            case yaml.SequenceStartEvent():
                builder.open([], event.anchor)
            case yaml.CollectionEndEvent():
                builder.close()
            case yaml.AliasEvent():
                builder.place_alias(event.anchor)
            case yaml.DocumentEndEvent() if not builder.plain:
                break
    return builder.result()
