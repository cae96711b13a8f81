"""The text of a captured host as plain data, in which every key knows its line. Pure.

Each scalar stays the text that it was written as: YAML 1.1 takes an unquoted ``226:0`` or
``0000:03:00.0`` for a number to the base 60, and what a word means is for its field's type to say.
Aliases and depth are refused, so no small file becomes a large one, and the parser's events are
taken one by one: PyYAML's composer recurses in C as deep as a file nests.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final

import yaml

_MAX_DEPTH: Final = 12

Data = str | list["Data"] | dict[str, "Data"] | None


class TextError(ValueError):
    """What is wrong with the text, and in which line, if that is known."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


@dataclasses.dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not come yet."""

    value: list[Data] | dict[str, Data]
    path: str
    key: str | None = None
    """In a mapping: the key whose value comes next."""


def read(text: str) -> tuple[Data, Mapping[str, int]]:
    """Read a text.

    Returns:
        Its content, and the line of every key by its path: ``functions[0].id``.

    Raises:
        TextError: It is not YAML, or more than a captured host needs.
    """
    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=yaml.CBaseLoader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        line = None if error.problem_mark is None else error.problem_mark.line + 1
        raise TextError(str(error.problem), line) from error
    except (yaml.YAMLError, UnicodeError) as error:  # of characters, which have no line
        raise TextError(" ".join(str(error).split())) from error
    return builder.root, builder.lines


class _Builder:
    """Builds the data from events."""

    def __init__(self) -> None:
        self.root: Data = None
        self.lines: dict[str, int] = {}
        self._documents = 0
        self._open: list[_Open] = []

    def take(self, event: yaml.Event) -> None:
        """Take the next event."""
        line = 1 if event.start_mark is None else event.start_mark.line + 1
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise TextError("a captured host is one document", line)
            case yaml.AliasEvent():
                raise TextError("aliases have no place in a captured host", line)
            case yaml.ScalarEvent():
                self._put(event.value, line)
            case yaml.SequenceStartEvent():
                self._start([], line)
            case yaml.MappingStartEvent():
                self._start({}, line)
            case yaml.CollectionEndEvent():
                self._open.pop()
            case _:
                pass  # the ends of documents and of the stream

    def _start(self, value: list[Data] | dict[str, Data], line: int) -> None:
        if len(self._open) == _MAX_DEPTH:
            raise TextError("nested too deeply for a captured host", line)
        self._open.append(_Open(value, self._put(value, line)))

    def _put(self, value: Data, line: int) -> str:
        """Put a value where it belongs; answers its path."""
        if not self._open:
            self.root = value
            return ""
        top = self._open[-1]
        if isinstance(top.value, list):
            path = f"{top.path}[{len(top.value)}]"
            top.value.append(value)
        elif top.key is None:
            if not isinstance(value, str):
                raise TextError("a key is a word", line)
            if value in top.value:
                raise TextError(f"{value!r} is given twice", line)
            top.key = value
            path = f"{top.path}.{value}".lstrip(".")
        else:
            path = f"{top.path}.{top.key}".lstrip(".")
            top.value[top.key] = value
            top.key = None
        self.lines.setdefault(path, line)
        return path
