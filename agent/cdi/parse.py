"""Reading spec files: strictly what is ours, leniently what is not.

Pure: takes bytes. ``parse`` reads what ``render`` wrote and refuses everything else. ``peek``
tells what a foreign file defines for the consumers that exist: their library is strict (a field
it does not know, a key given twice, a device without edits or a name given twice makes it ignore
the whole file), so a file is taken to define something unless every consumer would refuse it.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from agent.cdi import rules
from agent.cdi.spec import ContainerEdits, Device, DeviceNode, Hook, Kind, Mount, Spec
from agent.cdi.tree import Tree, UnreadableError, read
from agent.errors import SpecError
from agent.host.document import Scalar, one_line


class Peek(NamedTuple):
    """What a foreign file defines."""

    kind: Kind | None
    """None if no consumer can read it: then it defines nothing."""
    names: frozenset[str] = frozenset()
    problem: str | None = None
    """Why no consumer can read it, as one sentence."""


def parse(content: bytes) -> Spec:
    """Read a file that ``render`` wrote.

    Raises:
        SpecError: It is not what ``render`` would write, in content.
    """
    try:
        file = msgspec.convert(_typed(read(content, strict=True)), _File)
    except (UnreadableError, msgspec.ValidationError) as error:
        raise SpecError(one_line(f"not a spec of ours: {error}")) from error
    if file.cdi_version not in rules.VERSIONS:
        raise SpecError(f"not a spec of ours: cdiVersion {file.cdi_version!r} is unknown")
    spec = file.to_spec()
    rules.check(spec)
    return spec


def peek(content: bytes) -> Peek:
    """Tell what a foreign file defines; never raises."""
    try:
        return _definitions(read(content))
    except UnreadableError as error:
        return Peek(None, problem=str(error))


# --- what is ours ---------------------------------------------------------------------------------


class _Wire(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """A part of a file, with CDI's names."""


class _Node(_Wire):
    path: str
    host_path: str | None = None
    permissions: str | None = None
    file_mode: int | None = None
    uid: int | None = None
    gid: int | None = None


class _Mount(_Wire):
    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    type: str | None = None


class _Hook(_Wire):
    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


class _Edits(_Wire):
    device_nodes: tuple[_Node, ...] = ()
    mounts: tuple[_Mount, ...] = ()
    env: tuple[str, ...] = ()
    hooks: tuple[_Hook, ...] = ()
    additional_gids: tuple[int, ...] = ()

    def to_edits(self) -> ContainerEdits:
        return ContainerEdits(
            tuple(
                DeviceNode(n.path, n.host_path, n.permissions, n.file_mode, n.uid, n.gid)
                for n in self.device_nodes
            ),
            tuple(Mount(m.host_path, m.container_path, m.options, m.type) for m in self.mounts),
            self.env,
            tuple(Hook(h.hook_name, h.path, h.args, h.env, h.timeout) for h in self.hooks),
            self.additional_gids,
        )


class _Device(_Wire):
    name: str
    container_edits: _Edits
    annotations: dict[str, str] = {}


class _File(_Wire):
    cdi_version: str
    kind: str
    devices: tuple[_Device, ...]
    annotations: dict[str, str] = {}

    def to_spec(self) -> Spec:
        devices = (
            Device(d.name, d.container_edits.to_edits(), tuple(d.annotations.items()))
            for d in self.devices
        )
        return Spec(Kind(self.kind), tuple(devices), tuple(self.annotations.items()))


_MAX_DIGITS: Final = 18
"""No number of ours has more than ten; of more than 4300, Python's ``int`` makes an error."""


def _typed(value: Tree) -> object:
    """Give scalars their types; the value has no alias, so its depth bounds the recursion.

    Raises:
        UnreadableError: A number is too long.
    """
    match value:
        case Scalar():
            is_number = value.plain and value.text.isdecimal() and value.text.isascii()
            if is_number and len(value.text) > _MAX_DIGITS:
                raise UnreadableError(f"a number has more than {_MAX_DIGITS} digits")
            return int(value.text) if is_number else value.text
        case list():
            return [_typed(each) for each in value]
        case dict():
            return {key: _typed(each) for key, each in value.items()}


# --- what is foreign ------------------------------------------------------------------------------

_Schema = None | list["_Schema"] | dict[str, "_Schema"]

# Every field of every version; None: anything. In lower case, since older consumers ignore case.
_NODE: Final[_Schema] = dict.fromkeys(
    ("path", "hostpath", "type", "major", "minor", "filemode", "permissions", "uid", "gid"),
)
_MOUNT: Final[_Schema] = dict.fromkeys(("hostpath", "containerpath", "options", "type"))
_HOOK: Final[_Schema] = dict.fromkeys(("hookname", "path", "args", "env", "timeout"))
_EDITS: Final[dict[str, _Schema]] = {
    "env": [None],
    "devicenodes": [_NODE],
    "mounts": [_MOUNT],
    "hooks": [_HOOK],
    "additionalgids": [None],
    "intelrdt": None,
    "netdevices": [None],
}
_DEVICE: Final[_Schema] = {"name": None, "annotations": None, "containeredits": dict(_EDITS)}
_FILE: Final[_Schema] = {
    "cdiversion": None,
    "kind": None,
    "annotations": None,
    "containeredits": dict(_EDITS),
    "devices": [_DEVICE],
}

_VERSION: Final = re.compile(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})")
_OLD_VERSIONS: Final = ("0.1.0", "0.2.0")
_INTEGER: Final = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE: Final = frozenset({"y", "yes", "on", "true"})
_FALSE: Final = frozenset({"n", "no", "off", "false"})


def _definitions(file: Tree) -> Peek:
    top = _fields(file)
    version = _text(top.get("cdiversion")).removeprefix("v")
    if _VERSION.fullmatch(version) is None:
        raise UnreadableError(f"cdiVersion {version[:40]!r} is none")
    newest = tuple(map(int, rules.VERSIONS[-1].split(".")))
    if tuple(map(int, version.split("."))) <= newest:
        if version not in (*_OLD_VERSIONS, *rules.VERSIONS):
            raise UnreadableError(f"cdiVersion {version!r} was never released")
        _check_fields(file, _FILE, set())
    kind = _text(top.get("kind"))
    if problems := rules.foreign_kind_problems(kind):
        raise UnreadableError(problems[0])
    devices = top.get("devices")
    if not isinstance(devices, list) or not devices:
        raise UnreadableError("it has no devices")
    names: set[str] = set()
    for device in devices:
        fields = _fields(device)
        name = _text(fields.get("name"))
        if not rules.is_device_name(name):
            raise UnreadableError(f"device name {name[:40]!r} is invalid")
        if name in names:
            raise UnreadableError(f"device name {name[:40]!r} is given twice")
        edits = fields.get("containeredits")
        if not isinstance(edits, dict) or not any(map(_is_edit, edits.values())):
            raise UnreadableError(f"device {name[:40]!r} has no edits")
        names.add(name)
    return Peek(Kind(kind), frozenset(names))


def _is_edit(value: Tree) -> bool:
    return not isinstance(value, Scalar) and bool(value)


def _fields(value: Tree) -> Mapping[str, Tree]:
    if not isinstance(value, dict):
        raise UnreadableError("it has not the form of a spec")
    return {key.lower(): each for key, each in value.items()}


def _check_fields(value: Tree, schema: _Schema, seen: set[int]) -> None:
    """Refuse a field that no version has. What an alias repeats is checked once."""
    if schema is None or isinstance(value, Scalar) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(schema, list):
        if not isinstance(value, list):
            raise UnreadableError("a list is none")
        for each in value:
            _check_fields(each, schema[0], seen)
        return
    for key, each in _fields(value).items():
        if key not in schema:
            raise UnreadableError(f"the field {key[:40]!r} is in no version of CDI")
        _check_fields(each, schema[key], seen)


def _text(value: Tree | None) -> str:
    """A scalar as consumers read it where they expect text: numbers and booleans are converted."""
    if not isinstance(value, Scalar):
        return ""
    text = value.text
    if not value.plain:
        return text
    if text in _NULL:
        return ""
    if text.lower() in _TRUE | _FALSE:
        return "true" if text.lower() in _TRUE else "false"
    if _INTEGER.fullmatch(text) and len(text) < len(str(2**64)):
        return str(int(text))
    return text
