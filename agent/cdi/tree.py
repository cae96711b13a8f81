"""A spec file of unknown origin as a tree of scalars, sequences and mappings, as consumers see it.

Pure. Merge keys are resolved, and what an alias repeats is one value in several places, so the tree
of a small file is small.
"""

from typing import Final

from agent.host import document
from agent.host.document import Bounds, DocumentError, Items, Node, Scalar, one_line

MAX_SIZE: Final = 8 * 2**20
"""Bytes. The largest specs known, with a driver's libraries as mounts, have a few hundred KiB."""

# A spec nests six deep, and one of 512 devices has 15,000 values.
_BOUNDS: Final = Bounds(size=MAX_SIZE, values=250_000, depth=32)
_MAX_MERGED: Final = 100_000  # keys copied by `<<` in a whole file


class UnreadableError(Exception):
    """The content is no tree, or a bound is passed; the text says why, as one sentence."""


Tree = Scalar | list["Tree"] | dict[str, "Tree"]


def read(content: bytes, *, strict: bool = False) -> Tree:
    """Read the first document, as consumers do: they ignore what follows it.

    Args:
        strict: Refuse anchors, tags and further documents, which a file of ours never has.

    Raises:
        UnreadableError: The content is not what it should be.
    """
    try:
        root = document.read(content, _BOUNDS, strict=strict)
    except DocumentError as error:
        where = "" if error.line is None else f" in line {error.line}"
        raise UnreadableError(f"{error}{where}") from error
    if root is None:
        raise UnreadableError("it is empty")
    return _Grower().grow(root)


class _Grower:
    """Makes trees of nodes; what is one node becomes one value."""

    def __init__(self) -> None:
        self._grown: dict[int, Tree] = {}
        self._merged = 0

    def grow(self, node: Node) -> Tree:
        """The tree of a node; the bound on depth bounds the recursion."""
        if isinstance(node, Scalar):
            return node
        grown = self._grown.get(id(node))
        if grown is not None:
            return grown
        if isinstance(node, Items):
            items: list[Tree] = []
            self._grown[id(node)] = items
            items.extend(map(self.grow, node.items))
            return items
        fields: dict[str, Tree] = {}
        self._grown[id(node)] = fields
        for key, value in node.pairs:
            if not isinstance(key, Scalar):
                raise UnreadableError("a key of a mapping is no scalar")
            if key.text in fields:
                raise UnreadableError(one_line(f"the key {key.text[:40]!r} is given twice"))
            fields[key.text] = self.grow(value)
        if "<<" in fields:
            self._merge(fields)
        return fields

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
