"""What a claim is asked for with: the body of a prepare, read field by field. Pure.

Each field is converted by itself, so that what is wrong is told by its path and with what is
allowed there, in words of this program rather than of its decoder.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from agent.cdi.rules import ALL
from agent.host.model import Address, parse_address

MAX_LEASE: Final = 31_536_000
"""Seconds; a year."""
_SHOWN: Final = 60
"""Characters of a wrong value that are told."""


class BodyError(ValueError):
    """A body cannot be understood: a sentence, and perhaps what to do about it."""

    def __init__(self, sentence: str, hint: str | None = None) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.hint = hint


class PrepareBody(msgspec.Struct, frozen=True, kw_only=True):
    """What a claim is asked for with; each field says for people what is allowed."""

    devices: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            max_length=512,
            description="a list of 1 to 512 PCI addresses or names of published devices",
        ),
    ]
    mode: Annotated[Literal["vfio", "drm"], Meta(description="vfio or drm")] = "vfio"
    named: Annotated[
        tuple[str, ...],
        Meta(max_length=512, description="a list of at most 512 PCI addresses"),
    ] = ()
    """Addresses of other endpoints of the IOMMU group that may be moved too."""
    driver: (
        Annotated[
            str,
            Meta(
                pattern=r"\A[A-Za-z0-9_-]{1,64}\Z",
                description="the name of a driver (1 to 64 letters, digits, _ and -)",
            ),
        ]
        | None
    ) = None
    force: bool = False
    from_vfio: bool = False
    dry_run: bool = False
    lease: (
        Annotated[
            float,
            Meta(gt=0, le=MAX_LEASE, description=f"seconds, more than 0 and at most {MAX_LEASE}"),
        ]
        | None
    ) = None
    """Seconds."""
    owner_pid: (
        Annotated[int, Meta(gt=0, lt=2**31, description="the number of a process")] | None
    ) = None


_FIELDS: Final = {field.name: field for field in msgspec.structs.fields(PrepareBody)}


def read(content: bytes) -> PrepareBody:
    """Read a body.

    Raises:
        BodyError: It is not understood.
    """
    try:
        document = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        what = "is not JSON" if content else "is missing"
        raise BodyError(f"the body {what}; it must be a JSON object with devices") from error
    if not isinstance(document, dict):
        shown = _shown(document)
        raise BodyError(f"the body must be a JSON object with devices, not {shown}")
    for name in document:
        if name not in _FIELDS:
            raise BodyError(_unknown(name))
    if "devices" not in document:
        raise BodyError(f"devices is missing; it must be {_allowed('devices')}")
    for name, value in document.items():
        _check(name, value)
    return msgspec.convert(document, PrepareBody)


def addresses(
    names: Mapping[str, Address], texts: tuple[str, ...], field: str
) -> tuple[Address, ...]:
    """The functions that a client means, by address or by name.

    Args:
        names: What qualified CDI names mean.
        field: Where they were said.

    Raises:
        BodyError: One is neither.
    """
    found = []
    for number, text in enumerate(texts):
        try:
            found.append(names.get(text) or parse_address(text))
        except ValueError as error:
            raise _no_device(names, text, f"{field}[{number}]") from error
    return tuple(found)


def _no_device(names: Mapping[str, Address], text: str, path: str) -> BodyError:
    kind, equals, name = text.rpartition("=")
    shown = _shown(text)
    if equals and name == ALL:
        members = ", ".join(each for each in names if each.startswith(f"{kind}="))
        return BodyError(
            f"{path}: {shown} is every device of its kind, and cannot be claimed as such",
            f"name each device by itself: {members or 'none of this kind is published'}",
        )
    return BodyError(
        f"{path} must be a PCI address such as 0000:03:00.0 or the name of a published device, "
        f"not {shown}",
        "`cdi-agent scan` lists what this host has and what is published",
    )


def _check(name: str, value: object) -> None:
    """Is this the value of a field?

    Raises:
        BodyError: It is not allowed there.
    """
    if isinstance(value, list):
        for number, item in enumerate(value):
            if not isinstance(item, str):
                raise BodyError(f"{name}[{number}] must be text, not {_shown(item)}")
    try:
        msgspec.convert(value, _FIELDS[name].type)
    except msgspec.ValidationError as error:
        raise BodyError(f"{name} must be {_allowed(name)}, not {_shown(value)}") from error


def _allowed(name: str) -> str:
    info = msgspec.inspect.type_info(_FIELDS[name].type)
    members = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    for member in members:
        if isinstance(member, msgspec.inspect.Metadata) and member.extra_json_schema:
            return str(member.extra_json_schema["description"])
    return "true or false"


def _unknown(name: str) -> str:
    shown = _shown(name)
    close = difflib.get_close_matches(name[:_SHOWN], _FIELDS, n=1)
    if close:
        return f"there is no field {shown}; did you mean {close[0]}?"
    return f"there is no field {shown}; there are {', '.join(_FIELDS)}"


def _shown(value: object) -> str:
    """What was given instead, short."""
    match value:
        case list():
            return "a list" if value else "an empty list"
        case dict():
            return "an object"
        case _:
            text = msgspec.json.encode(value).decode()
            return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
