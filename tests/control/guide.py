"""The examples of the control socket in the README: what a reader of it would run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_README: Final = Path(__file__).parents[2] / "README.md"
_EXAMPLE: Final = re.compile(
    r"^agent http://localhost(\S+)(?: --request (\S+))?(?: --data '(.*)')?$", re.MULTILINE
)


def examples() -> Iterator[tuple[str, str, object]]:
    """Method, path and body of each, in the order in which they stand there."""
    for route, method, data in _EXAMPLE.findall(_README.read_text()):
        yield method or "GET", route, json.loads(data) if data else None
