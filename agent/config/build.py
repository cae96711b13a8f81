"""From a document to typed settings, with every fault in it at once. Pure.

The types are those of the settings' Structs; msgspec checks each single value, this module walks
them, because msgspec stops at the first fault and does not know lines. Text is taken as it was
written: a bare ``8086`` is the text "8086" where text is wanted, and never the number 8086.
"""

import contextlib
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Meta, inspect

from agent.errors import AgentError
from agent.host.document import Items, Node, Pairs, Scalar, one_line

T = TypeVar("T", bound=msgspec.Struct)

_DURATION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h)")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_FAILED: Final = object()

# The types of bare words are YAML 1.2's: `on` and `yes` are text, `0777` is not octal.
_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE: Final = frozenset({"true", "True", "TRUE"})
_FALSE: Final = frozenset({"false", "False", "FALSE"})
_INT: Final = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]{1,3})?")


class Fault(msgspec.Struct, frozen=True):
    """One thing that is wrong with a configuration."""

    path: str
    """The key, as ``cdi.profiles[0].match.vendor``; empty for the file as a whole."""
    line: int | None
    text: str
    """What is wrong and what is allowed, after the name of the key."""

    def __str__(self) -> str:
        """One line for people."""
        where = "" if self.line is None else f"line {self.line}: "
        return f"{where}{self.path}: {self.text}" if self.path else f"{where}{self.text}"


class Builder:
    """Builds settings, and collects what is wrong."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.lines: dict[str, int] = {}
        """The line of every key that was given."""

    def fault(self, path: str, text: str, line: int | None = None) -> None:
        """Note a fault; without a line, that of the key or of what it lies in."""
        known = path
        while line is None and known:
            line = self.lines.get(known)
            known = known[: max(known.rfind("."), known.rfind("["), 0)]
        self.faults.append(Fault(path, line, one_line(text)))

    def build(self, node: Node | None, cls: type[T]) -> T | None:
        """Build a Struct of the whole document.

        Where there is a fault the default stands in, so that what depends on other keys can still
        be checked. None if there is nothing to stand in.
        """
        if node is None or _is_null(node):
            node = Pairs(1)
        built = self._struct(node, cls, "")
        return built if isinstance(built, cls) else None

    def is_sound(self, path: str) -> bool:
        """Whether a key, with all that is in it, has its value without a fault."""
        return not any(
            fault.path == path
            or fault.path.startswith((f"{path}.", f"{path}["))
            or path.startswith((f"{fault.path}.", f"{fault.path}["))
            for fault in self.faults
        )

    def _value(self, node: Node, wanted: Any, path: str) -> object:  # noqa: ANN401 - a type
        """A value of the wanted type, or ``_FAILED`` after the fault was noted."""
        if not _is_null(node):
            wanted = _without_null(wanted)
        bare, metas = _bare(wanted)
        origin = typing.get_origin(bare)
        partly = next((m.extra["partly"] for m in metas if m.extra and "partly" in m.extra), None)
        if partly is not None:
            return self._part(node, partly, path)
        if _is_struct(bare):
            return self._struct(node, bare, path)
        if origin in (tuple, list):
            return self._items(node, wanted, path)
        if origin is dict:
            return self._dict(node, wanted, path)
        return self._single(node, wanted, path)

    def _struct(self, node: Node, cls: type[msgspec.Struct], path: str) -> object:
        """A Struct with everything that it requires."""
        values = self._fields(node, cls, path)
        if values is None:
            return _FAILED
        fields = msgspec.structs.fields(cls)
        for field in fields:
            if field.required and field.encode_name not in values:
                name, allowed = field.encode_name, describe(field.type)
                text = f"the key {name} is missing; it must be {allowed}"
                self.fault(path, text, node.line)
                values[name] = _FAILED
        if any(values.get(field.encode_name) is _FAILED for field in fields if field.required):
            return _FAILED
        given = {f.name: values[f.encode_name] for f in fields if f.encode_name in values}
        try:
            return cls(**{name: value for name, value in given.items() if value is not _FAILED})
        except (ValueError, AgentError) as error:
            culprit = f"{path}.{next(iter(values))}" if len(values) == 1 and path else path
            self.fault(culprit, str(error))
            return _FAILED

    def _part(self, node: Node, cls: type[msgspec.Struct], path: str) -> object:
        """Some of a Struct's keys, as plain values."""
        before = len(self.faults)
        values = self._fields(node, cls, path)
        if values is None or len(self.faults) > before:
            return _FAILED
        return {name: msgspec.to_builtins(value) for name, value in values.items()}

    def _fields(self, node: Node, cls: type[msgspec.Struct], path: str) -> dict[str, object] | None:
        """The values of the known keys that were given, ``_FAILED`` where there was a fault."""
        if not isinstance(node, Pairs):
            self._wrong(node, cls, path)
            return None
        fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
        values: dict[str, object] = {}
        for name, value, inner in self._entries(node, path):
            field = fields.get(name)
            if field is None:
                self.fault(inner, _unknown(name, fields))
            elif not (_is_null(value) and _may_be_left_out(field.type)):
                values[name] = self._value(value, field.type, inner)
        return values

    def _entries(self, node: Pairs, path: str) -> Iterator[tuple[str, Node, str]]:
        """The entries of a mapping whose keys are text and given once: name, value, path."""
        seen: dict[str, int] = {}
        for key, value in node.pairs:
            if not isinstance(key, Scalar) or not isinstance(_meaning(key), str):
                self.fault(path, f"a key must be text, not {_shown(key)}", key.line)
                continue
            name = key.text
            inner = f"{path}.{name}" if path else name
            if name in seen:
                self.fault(inner, f"it is given twice, first in line {seen[name]}", key.line)
                continue
            seen[name] = self.lines[inner] = key.line
            yield name, value, inner

    def _items(self, node: Node, wanted: Any, path: str) -> object:  # noqa: ANN401 - a type
        bare, metas = _bare(wanted)
        if not isinstance(node, Items):
            self._wrong(node, wanted, path)
            return _FAILED
        if len(node.items) < max((meta.min_length or 0 for meta in metas), default=0):
            self.fault(path, "the list must not be empty", node.line)
            return _FAILED
        item_type = typing.get_args(bare)[0]
        built: list[object] = []
        for number, item in enumerate(node.items):
            inner = f"{path}[{number}]"
            self.lines[inner] = item.line
            built.append(self._value(item, item_type, inner))
        return _FAILED if _FAILED in built else typing.get_origin(bare)(built)

    def _dict(self, node: Node, wanted: Any, path: str) -> object:  # noqa: ANN401 - a type
        bare, _ = _bare(wanted)
        if not isinstance(node, Pairs):
            self._wrong(node, wanted, path)
            return _FAILED
        before = len(self.faults)
        key_type, value_type = typing.get_args(bare)
        built: dict[str, object] = {}
        for name, value, inner in self._entries(node, path):
            try:
                msgspec.convert(name, key_type)
            except msgspec.ValidationError:
                self.fault(inner, f"the key must be {describe(key_type)}", value.line)
            built[name] = self._value(value, value_type, inner)
        return _FAILED if len(self.faults) > before else built

    def _single(self, node: Node, wanted: Any, path: str) -> object:  # noqa: ANN401 - a type
        if isinstance(node, Scalar):
            bare, metas = _bare(wanted)
            value: object = _meaning(node)
            if _is_duration(metas):
                value = seconds(value)
            elif isinstance(value, int | float) and not isinstance(value, bool) and _is_text(bare):
                value = node.text
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.convert(value, wanted)
        self._wrong(node, wanted, path)
        return _FAILED

    def _wrong(self, node: Node, wanted: Any, path: str) -> None:  # noqa: ANN401 - a type
        """Note that a value is of another type than wanted."""
        self.fault(path, f"it must be {describe(wanted)}, not {_shown(node)}", node.line)


def _meaning(scalar: Scalar) -> str | float | bool | None:
    """What a value means where nothing says which type is wanted."""
    text = scalar.text
    if not scalar.plain:
        return text
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


# --- types ----------------------------------------------------------------------------------------


def _bare(wanted: Any) -> tuple[Any, tuple[Meta, ...]]:  # noqa: ANN401 - types
    """A type without its annotations, and what they say."""
    metas: tuple[Meta, ...] = ()
    while typing.get_origin(wanted) is typing.Annotated:
        metas += tuple(meta for meta in wanted.__metadata__ if isinstance(meta, Meta))
        wanted = wanted.__origin__
    return wanted, metas


def _members(wanted: Any) -> tuple[Any, ...]:  # noqa: ANN401 - types
    """The members of a union; a type that is none is its only one."""
    bare, _ = _bare(wanted)
    if typing.get_origin(bare) in (typing.Union, types.UnionType):
        return typing.get_args(bare)
    return (wanted,)


def _without_null(wanted: Any) -> Any:  # noqa: ANN401 - types
    """The one type of ``T | None`` that is not null; anything else as it is."""
    rest = [member for member in _members(wanted) if member is not types.NoneType]
    return rest[0] if len(rest) == 1 else wanted


def _may_be_left_out(wanted: Any) -> bool:  # noqa: ANN401 - a type
    """Whether a key without a value is as good as none: a section or list all commented out."""
    members = _members(wanted)
    bare, _ = _bare(members[0])
    is_collection = typing.get_origin(bare) in (tuple, list, dict)
    return types.NoneType not in members and (is_collection or _is_struct(bare))


def _is_struct(bare: Any) -> bool:  # noqa: ANN401 - a type
    return isinstance(bare, type) and issubclass(bare, msgspec.Struct)


def _is_text(bare: Any) -> bool:  # noqa: ANN401 - a type
    return bare is str or isinstance(inspect.type_info(bare), inspect.LiteralType)


def _is_duration(metas: tuple[Meta, ...]) -> bool:
    return any((meta.extra or {}).get("unit") == "seconds" for meta in metas)


def seconds(value: object) -> object:
    """The seconds of ``50ms``; what has no unit as it is."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    return value if match is None else float(match[1]) * _UNITS[match[2]]


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and _meaning(node) is None


# --- sentences ------------------------------------------------------------------------------------


def describe(wanted: Any) -> str:  # noqa: ANN401 - a type
    """What is allowed, for people."""
    return _describe(inspect.type_info(wanted))


def _describe(info: inspect.Type) -> str:  # noqa: PLR0911 - one for each form of type
    match info:
        case inspect.Metadata():
            if (info.extra or {}).get("unit") == "seconds":
                return f"a duration such as 50ms, 5s or 5m{_bounds(info.type, duration)}"
            told = (info.extra_json_schema or {}).get("description")
            return str(told) if told else _describe(info.type)
        case inspect.UnionType():
            return " or ".join(_describe(member) for member in info.types)
        case inspect.LiteralType():
            return _one_of(info.values)
        case inspect.EnumType():
            return _one_of(member.value for member in info.cls)
        case inspect.VarTupleType() | inspect.ListType():
            return f"a list (each item: {_describe(info.item_type)})"
        case _:
            return _WORDS.get(type(info), "a mapping") + _bounds(info, str)


_WORDS: Final[dict[type[inspect.Type], str]] = {
    inspect.BoolType: "true or false",
    inspect.FloatType: "a number",
    inspect.IntType: "a whole number",
    inspect.NoneType: "null",
    inspect.StrType: "text",
}


def _one_of(values: typing.Iterable[object]) -> str:
    names = [str(value) for value in values]
    return f"one of {', '.join(names)}" if len(names) > 1 else names[0]


def _bounds(info: inspect.Type, show: Callable[[float], str]) -> str:
    if not isinstance(info, inspect.IntType | inspect.FloatType):
        return ""
    low, high = info.ge, info.le
    if low is not None and high is not None:
        return f", from {show(low)} to {show(high)}"
    return "" if low is None else f", at least {show(low)}"


def duration(seconds: float) -> str:
    """Seconds as one writes them: ``50ms``, ``5m``."""
    for unit in ("h", "m", "s"):
        if seconds >= _UNITS[unit] and seconds % _UNITS[unit] == 0:
            return f"{seconds / _UNITS[unit]:g}{unit}"
    return f"{seconds * 1000:g}ms" if seconds else "0"


def _shown(node: Node) -> str:
    """What was given instead, short."""
    match node:
        case Items():
            return "a list"
        case Pairs():
            return "a mapping"
        case Scalar():
            meaning = _meaning(node)
            if meaning is None:
                return "null"
            shown = one_line(node.text)[:60]
            return repr(shown) if isinstance(meaning, str) else shown


def _unknown(name: str, fields: typing.Iterable[str]) -> str:
    names = list(fields)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"there is no such key; did you mean {close[0]}?"
    return f"there is no such key; there are {', '.join(names)}"
