"""A YAML text of unknown origin as a tree in which every value knows its line. Pure.

Any byte may stand in a file that others write, and reading it must neither bring the agent down nor
hold it up. PyYAML's composer recurses in C as deep as a text nests, so the events of its parser are
taken one by one, within bounds on size, number and depth. A scalar keeps its text: what type a bare
word has depends on who reads it. JSON is YAML enough for the same parser.

*Strictly*, a text is one document without anchors, aliases and tags, which make a text mean
something else than it seems to. *Leniently*, the first document counts, as for the consumers of
CDI, and an alias is a second reference to one value, never a copy of it.
"""

import dataclasses
import re
from typing import Final, NamedTuple

import msgspec
import yaml

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_SENTENCE: Final = 200
# What the parser's reader refuses (YAML 1.1, "printable characters").
_NOT_YAML: Final = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class DocumentError(ValueError):
    """The text is no document, or passes a bound; ``line`` says where, if that is known."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(one_line(text))
        self.line = line


class Bounds(msgspec.Struct, frozen=True):
    """How much is read."""

    size: int
    """Bytes."""
    values: int
    """Scalars, and twice each collection: about four microseconds each."""
    depth: int
    """Collections in collections."""


class Scalar(NamedTuple):
    """A single value, as it was written."""

    line: int
    text: str
    plain: bool
    """It stood bare, so a reader may take it for a number, a boolean or nothing."""


@dataclasses.dataclass(eq=False, slots=True)
class Items:
    """A list."""

    line: int
    items: list["Node"] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, slots=True)
class Pairs:
    """A mapping, in the order in which it was written; a key may be anything, and given twice."""

    line: int
    pairs: list[tuple["Node", "Node"]] = dataclasses.field(default_factory=list)


Node = Scalar | Items | Pairs


def one_line(text: str) -> str:
    """Make a sentence that quotes from a file fit to be logged: one line, printable, bounded."""
    line = " ".join(text.split())[:_MAX_SENTENCE]
    return "".join(char if char.isprintable() else "?" for char in line)


def read(content: bytes, bounds: Bounds, *, strict: bool = True) -> Node | None:
    """Read a text; None if there is nothing in it.

    Raises:
        DocumentError: It is not what it should be.
    """
    if len(content) > bounds.size:
        raise DocumentError(f"it has more than {bounds.size // 2**20} MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content.count(b"\n", 0, error.start)
        raise DocumentError("it is not text in UTF-8", before + 1) from None
    builder = _Builder(bounds, strict=strict)
    try:
        for number, event in enumerate(yaml.parse(text, Loader=_LOADER)):
            if number == bounds.values:
                raise DocumentError("it has too many values", _line(event))
            if isinstance(event, yaml.DocumentEndEvent) and not strict:
                break
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        line = None if mark is None else mark.line + 1
        raise DocumentError(f"it is not YAML: {problem}", line) from error
    except yaml.YAMLError as error:  # the reader's: of a character, by its number
        if (found := _NOT_YAML.search(text)) is None:
            raise DocumentError(f"it is not YAML: {error}") from error
        problem = f"it is not YAML: the character U+{ord(found[0]):04X} is not allowed"
        raise DocumentError(problem, text.count("\n", 0, found.start()) + 1) from error
    return builder.root


class _Builder:
    """Puts the tree together, without recursion."""

    def __init__(self, bounds: Bounds, *, strict: bool) -> None:
        self.root: Node | None = None
        self._bounds = bounds
        self._strict = strict
        self._anchors: dict[str, Node] = {}
        self._open: list[Items | Pairs] = []
        self._keys: list[Node | None] = []
        """For each open mapping the key whose value comes next."""

    def take(self, event: yaml.Event) -> None:
        """Take the next event."""
        match event:
            case yaml.ScalarEvent():
                self._place(Scalar(_line(event), event.value, event.implicit[0]), event)
            case yaml.MappingStartEvent():
                self._start(Pairs(_line(event)), event)
            case yaml.SequenceStartEvent():
                self._start(Items(_line(event)), event)
            case yaml.CollectionEndEvent():
                self._open.pop()
                self._keys.pop()
            case yaml.AliasEvent():
                if self._strict:
                    raise DocumentError("aliases (*name) are not supported", _line(event))
                if event.anchor not in self._anchors:
                    raise DocumentError("an alias refers to nothing", _line(event))
                self._put(self._anchors[event.anchor])
            case _:
                pass  # the ends of the document and of the stream

    def _start(self, node: Items | Pairs, event: yaml.CollectionStartEvent) -> None:
        if len(self._open) == self._bounds.depth:
            raise DocumentError(f"it nests more than {self._bounds.depth} deep", node.line)
        self._place(node, event)
        self._open.append(node)
        self._keys.append(None)

    def _place(self, node: Node, event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> None:
        if event.anchor is not None:
            if self._strict:
                raise DocumentError("anchors (&name) are not supported", node.line)
            self._anchors[event.anchor] = node
        if event.tag is not None and self._strict:  # the parser gives none to what carries none
            raise DocumentError("tags (!name) are not supported", node.line)
        self._put(node)

    def _put(self, node: Node) -> None:
        """Put a value where it belongs: into the innermost open collection."""
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


def _line(event: yaml.Event) -> int:
    return 1 if event.start_mark is None else event.start_mark.line + 1
