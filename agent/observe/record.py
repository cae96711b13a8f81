"""A log entry as bounded plain values, and its three forms: text, JSON, journal fields.

Pure. What comes in may be anything that a message of the kernel, a file name or a foreign library
put into it. What goes out is bounded in length, and no value can begin a line of its own, move the
cursor of a terminal or end a journal field early.

An entry has a name, the constant first argument of the logging call (``events`` lists ours), and
fields. Two fields are sentences for people: ``problem``, which follows the name, and ``hint``.
"""

import itertools
import re
import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

IDENTIFIER: Final = "cdi-agent"
PREFIX: Final = "CDI_AGENT_"
"""Begins each journal field of ours."""
PRIORITIES: Final[Mapping[str, int]] = {
    "debug": 7,
    "info": 6,
    "warning": 4,
    "error": 3,
    "critical": 2,
}
"""Syslog's numbers for the levels."""

MAX_TEXT: Final = 2048
"""Characters of one value."""
MAX_ITEMS: Final = 64
"""Members of one collection, fields of one entry, lines of one traceback."""
MAX_MEMBER: Final = 256
"""Characters of a text in a collection."""
MAX_DEPTH: Final = 2
"""Collections in collections; what is deeper is text."""
MAX_LINE: Final = 16_384
"""Bytes of one line of text."""
MAX_ENTRY: Final = 131_072
"""Bytes of one entry for the journal: a datagram of the default send buffer holds 200 KiB."""
CUT: Final = "…"

_CONTROLS: Final = {
    code: f"\\x{code:02x}"
    for code in (*range(0x20), *range(0x7F, 0xA0))  # C0 (ends of lines, escapes), DEL, C1
} | {
    code: f"\\u{code:04x}"
    # Separators of lines and paragraphs, and what turns the direction of writing.
    for code in (*range(0x2028, 0x202F), *range(0x2066, 0x206A))
}
_CONTROLS.update({0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"})
_NOT_BARE: Final = re.compile(r"[\s\"'={}\[\]]")
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Z0-9]+")
_WORD: Final = re.compile(r"[a-z0-9]+")

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
"""What JSON knows."""


class Record(msgspec.Struct, frozen=True):
    """One entry, bounded and plain."""

    level: str
    name: str
    """Lower case, digits and dashes: ``source-up``."""
    fields: Mapping[str, Plain]
    traceback: tuple[str, ...] = ()


class Palette(msgspec.Struct, frozen=True):
    """The escape sequences of a terminal; all empty where there is no colour."""

    levels: Mapping[str, str] = msgspec.field(default_factory=dict)
    dim: str = ""
    bold: str = ""
    key: str = ""
    reset: str = ""


MONOCHROME: Final = Palette()
COLOUR: Final = Palette(
    levels={
        "debug": "\x1b[34m",
        "info": "\x1b[32m",
        "warning": "\x1b[33m",
        "error": "\x1b[31m",
        "critical": "\x1b[1;31m",
    },
    dim="\x1b[2m",
    bold="\x1b[1m",
    key="\x1b[36m",
    reset="\x1b[0m",
)


def event_name(phrase: str) -> str:
    """A name to search for, whatever was given as one: ``Source up`` is ``source-up``."""
    return "-".join(_WORD.findall(phrase.lower()[:MAX_TEXT]))


def harmless(text: str, limit: int = MAX_TEXT) -> str:
    """The text, bounded, without what could act on a terminal or begin a line."""
    if len(text) > limit:
        text = text[: limit - 1] + CUT
    if not text.isprintable():
        # A lone surrogate stands for a byte of a file name that is not UTF-8.
        text = text.translate(_CONTROLS).encode("utf-8", "backslashreplace").decode()
    return text


def plain(value: object, depth: int = MAX_DEPTH) -> Plain:
    """Any value as one that JSON knows; never raises, whatever the value's own methods do."""
    try:
        return _plain(value, depth)
    except Exception as error:  # noqa: BLE001 - foreign code; logging must not fail
        return f"<{type(value).__name__}, unprintable: {type(error).__name__}>"


def _plain(value: object, depth: int) -> Plain:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        # Beyond 64 bits JSON's readers differ, and str() refuses numbers of thousands of digits.
        return int(value) if -(2**63) <= value < 2**64 else harmless(hex(value))
    if isinstance(value, bytes):
        value = value[:MAX_TEXT].decode("utf-8", "backslashreplace")
    if depth and isinstance(value, Mapping):
        some = itertools.islice(value.items(), MAX_ITEMS)
        return {harmless(str(key), MAX_MEMBER): plain(member, depth - 1) for key, member in some}
    if depth and isinstance(value, tuple | list | set | frozenset):
        ordered = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [plain(member, depth - 1) for member in itertools.islice(ordered, MAX_ITEMS)]
    return harmless(str(value), MAX_TEXT if depth == MAX_DEPTH else MAX_MEMBER)


def shown(value: Plain) -> str:
    """A value as one word of text: quoted only where it would not be read as one."""
    match value:
        case str():
            if value and not _NOT_BARE.search(value):
                return value
            return '"' + value.replace('"', '\\"') + '"'
        case float():
            return f"{value:.6g}"
        case _:
            return harmless(msgspec.json.encode(value).decode())


def text(record: Record, palette: Palette = MONOCHROME) -> str:
    """The name, the problem and the fields on one line: what people read, in the journal too."""
    words = [f"{palette.bold}{record.name}{palette.reset}"]
    fields = dict(record.fields)
    if isinstance(fields.get("problem"), str):
        words = [f"{words[0]}: {fields.pop('problem')}"]
    words += [f"{palette.key}{key}{palette.reset}={shown(fields[key])}" for key in fields]
    return " ".join(words)


def text_lines(record: Record, now: float, palette: Palette = MONOCHROME) -> bytes:
    """For a terminal or a file: time, level and text; a traceback follows, indented.

    Args:
        record: The entry.
        now: Seconds since 1970.
        palette: The colours.
    """
    level = f"{palette.levels.get(record.level, '')}{record.level:<8}{palette.reset}"
    lines = [f"{palette.dim}{timestamp(now)}{palette.reset} {level} {text(record, palette)}"]
    lines += [f"    {line}" for line in record.traceback]
    return _encoded(lines)


def prefixed_lines(record: Record) -> bytes:
    """For a journal that reads standard error: every line begins with its priority, ``<6>``."""
    prefix = f"<{PRIORITIES.get(record.level, 6)}>"
    return _encoded(
        [f"{prefix}{text(record)}", *(f"{prefix}    {line}" for line in record.traceback)]
    )


def json_line(record: Record, now: float) -> bytes:
    """One JSON object on one line; a field of ours never hides one of the fixed ones."""
    document: dict[str, object] = {
        "time": timestamp(now),
        "level": record.level,
        "event": record.name,
    }
    document |= {
        f"{key}_" if key in document or key == "traceback" else key: value
        for key, value in record.fields.items()
    }
    if record.traceback:
        document["traceback"] = record.traceback
    return msgspec.json.encode(document) + b"\n"


def journal_entry(record: Record) -> bytes:
    """The entry in the journal's native form, each of our fields as one of its own.

    ``NAME=value`` and a newline; a value that holds a newline follows its name on the next line,
    after its length as 64 bits. What no longer fits is left out, and ``CDI_AGENT_CUT=1`` says so.
    """
    fixed = [
        ("MESSAGE", text(record)[:MAX_LINE]),
        ("PRIORITY", str(PRIORITIES.get(record.level, 6))),
        ("SYSLOG_IDENTIFIER", IDENTIFIER),
        (f"{PREFIX}EVENT", record.name),
        (f"{PREFIX}TRACEBACK", "\n".join(record.traceback)),
    ]
    ours = [
        (_journal_name(key), value if isinstance(value, str) else shown(value))
        for key, value in record.fields.items()
    ]
    entry = bytearray()
    for name, value in (*fixed, *ours):
        data = value.encode()
        if not data:
            continue
        if len(entry) + len(data) > MAX_ENTRY:
            entry += f"{PREFIX}CUT=1\n".encode()
            break
        if b"\n" in data:
            entry += name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"
        else:
            entry += name.encode() + b"=" + data + b"\n"
    return bytes(entry)


def timestamp(now: float) -> str:
    """Universal time in milliseconds, as RFC 3339 writes it."""
    when = datetime.fromtimestamp(now, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _journal_name(key: str) -> str:
    """A valid field name: upper case, digits and underscores, 64 characters at most."""
    return (PREFIX + _NOT_IN_A_NAME.sub("_", key.upper()).strip("_"))[:64]


def _encoded(lines: list[str]) -> bytes:
    """The lines as bytes, each bounded and with its end."""
    return b"".join(
        line.encode()[:MAX_LINE].decode(errors="ignore").encode() + b"\n" for line in lines
    )
