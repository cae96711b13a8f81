"""The text of a configuration as a tree in which every value knows its line. Pure.

Everything is bounded before it is built: size, depth, number of values. What would make a file
mean something else than it seems to is refused here: a second document, tags, anchors and aliases
(with which a short file can mean a huge one). The types of bare words are YAML 1.2's: ``on`` and
``yes`` are text, ``0777`` is not octal.

The parser's events are taken one by one: PyYAML's composer recurses in C as deep as a file nests.
"""

import dataclasses
import re
from typing import Final

import yaml

MAX_SIZE: Final = 2**20
"""Bytes; a configuration with a profile for every device id there is has a tenth of it."""

_MAX_DEPTH: Final = 24
_MAX_EVENTS: Final = 100_000
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE: Final = frozenset({"true", "True", "TRUE"})
_FALSE: Final = frozenset({"false", "False", "FALSE"})
_INT: Final = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]{1,3})?")


class DocumentError(ValueError):
    """The text is no document that can be read; ``line`` says where, if that is known."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.line = line


@dataclasses.dataclass(frozen=True, slots=True)
class Scalar:
    """A single value, as it was written."""

    line: int
    text: str
    quoted: bool

    @property
    def value(self) -> str | float | bool | None:
        """What it means where nothing says which type is wanted."""
        text = self.text
        if self.quoted:
            return text
        if text in _NULL:
            return None
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if _INT.fullmatch(text):
            return int(text)
        return float(text) if _FLOAT.fullmatch(text) else text


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    line: int
    items: list["Node"]


@dataclasses.dataclass(frozen=True, slots=True)
class Pairs:
    """A mapping, in the order in which it was written; keys may be given twice."""

    line: int
    pairs: list[tuple["Node", "Node"]]


Node = Scalar | Items | Pairs


def read(content: bytes) -> Node:
    """Read a document; an empty one is a mapping without keys.

    Raises:
        DocumentError: It is not one document of bounded size.
    """
    if len(content) > MAX_SIZE:
        raise DocumentError(f"it has more than {MAX_SIZE // 2**20} MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DocumentError("it is not text in UTF-8", line) from None
    try:
        return _build(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise DocumentError(
            f"it is not YAML: {problem}", None if mark is None else mark.line + 1
        ) from error
    except yaml.YAMLError as error:
        raise DocumentError(f"it is not YAML: {error}") from error


def _build(text: str) -> Node:
    builder = _Builder()
    for number, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        if number == _MAX_EVENTS:
            raise DocumentError("it has too many values")
        match event:
            case yaml.ScalarEvent():
                _refuse_extras(event)
                line = _line(event)
                builder.place(Scalar(line, event.value, quoted=not event.implicit[0]))
            case yaml.MappingStartEvent():
                _refuse_extras(event)
                builder.open(Pairs(_line(event), []))
            case yaml.SequenceStartEvent():
                _refuse_extras(event)
                builder.open(Items(_line(event), []))
            case yaml.CollectionEndEvent():
                builder.close()
            case yaml.AliasEvent():
                raise DocumentError("aliases (*name) are not supported", _line(event))
            case _:
                continue
    return builder.root or Pairs(1, [])


def _line(event: yaml.Event) -> int:
    return 1 if event.start_mark is None else event.start_mark.line + 1


def _refuse_extras(event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> None:
    line = _line(event)
    if event.anchor is not None:
        raise DocumentError("anchors (&name) are not supported", line)
    # The parser gives a tag only to what carries one.
    if event.tag is not None:
        raise DocumentError("tags (!name) are not supported", line)


class _Builder:
    """Puts the tree together without recursion."""

    def __init__(self) -> None:
        self.root: Node | None = None
        self._open: list[Items | Pairs] = []
        self._keys: list[Node | None] = []
        """For each open mapping the key whose value comes next."""

    def place(self, node: Node) -> None:
        if not self._open:
            if self.root is not None:
                raise DocumentError("it has a second document", node.line)
            self.root = node
            return
        parent = self._open[-1]
        if isinstance(parent, Items):
            parent.items.append(node)
        elif (key := self._keys[-1]) is None:
            self._keys[-1] = node
        else:
            parent.pairs.append((key, node))
            self._keys[-1] = None

    def open(self, node: Items | Pairs) -> None:
        if len(self._open) == _MAX_DEPTH:
            raise DocumentError(f"it nests more than {_MAX_DEPTH} deep", node.line)
        self.place(node)
        self._open.append(node)
        self._keys.append(None)

    def close(self) -> None:
        self._open.pop()
        self._keys.pop()
