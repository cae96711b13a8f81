"""The text of a captured host as plain data, in which every key knows its line. Pure.

Each scalar stays the text that it was written as: YAML 1.1 takes an unquoted ``226:0`` or
``0000:03:00.0`` for a number to the base 60, and what a word means is for its field's type to say.
"""

from collections.abc import Mapping
from typing import Final

from agent.host import document
from agent.host.document import Bounds, DocumentError, Items, Node, Scalar

MAX_BYTES: Final = 8 * 2**20
"""A host with 512 GPUs takes about 200 KiB."""

_BOUNDS: Final = Bounds(size=MAX_BYTES, values=1_000_000, depth=12)

Data = str | list["Data"] | dict[str, "Data"] | None


def read(content: bytes) -> tuple[Data, Mapping[str, int]]:
    """Read a text.

    Returns:
        Its content, and the line of every key by its path: ``functions[0].id``.

    Raises:
        DocumentError: It is not a YAML document, or more than a captured host needs.
    """
    node = document.read(content, _BOUNDS)
    lines: dict[str, int] = {}
    return (None if node is None else _data(node, "", lines)), lines


def _data(node: Node, path: str, lines: dict[str, int]) -> Data:
    lines.setdefault(path, node.line)
    if isinstance(node, Scalar):
        return node.text
    if isinstance(node, Items):
        return [_data(item, f"{path}[{index}]", lines) for index, item in enumerate(node.items)]
    found: dict[str, Data] = {}
    for key, value in node.pairs:
        if not isinstance(key, Scalar):
            raise DocumentError("a key is a word", key.line)
        if key.text in found:
            raise DocumentError(f"{key.text!r} is given twice", key.line)
        inner = f"{path}.{key.text}".lstrip(".")
        lines.setdefault(inner, key.line)
        found[key.text] = _data(value, inner, lines)
    return found
