"""The one form of a spec as bytes.

Pure. The same facts give the same bytes: devices by name in natural order, nodes by path, and
whoever compares bytes compares facts. Nothing that breaks a rule of CDI leaves this module.

Strings are always quoted, keys are words that no YAML reader takes for anything else, and numbers
are decimal, so YAML 1.1 and 1.2 read the same. The few forms that a spec needs are written here
directly: for 512 devices that costs a tenth of PyYAML's C dumper, and its choice of quotes and
line breaks is not ours to keep stable. ``Entry`` is the text of one device with what is needed to
put several together, so that of a large spec only what has changed is written anew.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import structs

from agent.cdi import rules
from agent.cdi.spec import ContainerEdits, Device, DeviceNode, Hook, Kind, Mount, Spec
from agent.errors import SpecError

HEADER: Final = "# Written by cdi-agent, which rewrites it when devices come and go: do not edit.\n"
"""The first line of a YAML file of ours; JSON has no comments."""

Suffix = Literal["yaml", "json"]
"""The end of a spec file's name, which tells its format."""

Value = str | int | Sequence["Value"] | Mapping[str, "Value"]

Order = tuple[int | str, ...]
"""Text and numbers in turn."""

_NATURAL: Final = re.compile(r"(\d+)")

_Edit = TypeVar("_Edit", DeviceNode, Mount)


def natural(name: str) -> Order:
    """Order names as people do: ``card2`` before ``card10``."""
    parts = _NATURAL.split(name)  # the numbers are at the odd places
    return tuple(int(part) if place % 2 else part for place, part in enumerate(parts))


def render(spec: Spec, *, version: str | None = None, suffix: Suffix = "yaml") -> bytes:
    """Give the content of a spec's file.

    Args:
        version: The ``cdiVersion`` to write; by default the lowest that the content needs.

    Raises:
        SpecError: A rule of CDI is broken, or the content needs a newer version than asked for.
    """
    rules.check(spec)
    needed = rules.minimum_version(spec)
    if not rules.fits(needed, version):
        raise SpecError(f"the spec of {spec.kind} needs cdiVersion {needed}, not {version}")
    if suffix == "yaml":
        entries = map(_entry, spec.devices)
        return _file(spec.kind, version or needed, entries, spec.annotations)
    content = _without_empty(
        cdiVersion=version or needed,
        kind=spec.kind,
        annotations=dict(sorted(spec.annotations)),
        devices=[_device(d) for d in sorted(spec.devices, key=lambda device: natural(device.name))],
    )
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


# --- entries --------------------------------------------------------------------------------------


class Part(NamedTuple, Generic[_Edit]):
    """A node or a mount as it is written in an entry."""

    order: Order
    text: str
    edit: _Edit


class Common(NamedTuple):
    """What an entry has beside its nodes and mounts: mostly that of all of a profile."""

    env: tuple[str, ...]
    hooks: tuple[Hook, ...]
    additional_gids: tuple[int, ...]
    annotations: tuple[tuple[str, str], ...]


class Entry(msgspec.Struct, frozen=True):
    """A device as it is written in a YAML file; it breaks no rule."""

    device: Device
    order: Order
    version: str
    """The lowest ``cdiVersion`` that carries it."""
    nodes: Mapping[str, Part[DeviceNode]]
    """By path."""
    mounts: Mapping[str, Part[Mount]]
    """By mount point."""
    common: Common
    text: str


def entry_of(device: Device) -> Entry:
    """Give the entry of a device.

    Raises:
        SpecError: A rule of CDI is broken.
    """
    if problems := rules.device_problems(device):
        raise SpecError(f"the entry {device.name} is invalid: {'; '.join(problems)}")
    return _entry(device)


def union_of(name: str, entries: Sequence[Entry]) -> Entry:
    """Give one entry that gives what all of these give; what several give, once.

    Raises:
        SpecError: Together they break a rule of CDI.
    """
    nodes: dict[str, Part[DeviceNode]] = {}
    mounts: dict[str, Part[Mount]] = {}
    for entry in entries:
        nodes |= entry.nodes
        if entry.mounts:
            mounts |= entry.mounts
    mounts = {path: part for path, part in mounts.items() if path not in nodes}
    # Devices differ in their nodes; the rest is the profile's, and few profiles share a kind.
    common = dict.fromkeys([entry.common for entry in entries])
    env = {text.partition("=")[0]: text for each in common for text in each.env}
    edits = ContainerEdits(
        device_nodes=tuple([part.edit for part in nodes.values()]),
        mounts=tuple([part.edit for part in mounts.values()]),
        env=tuple(env.values()),
        hooks=tuple(dict.fromkeys(hook for each in common for hook in each.hooks)),
        additional_gids=tuple(sorted({gid for each in common for gid in each.additional_gids})),
    )
    annotations = dict(pair for each in common for pair in each.annotations)
    union = Device(name, edits, tuple(sorted(annotations.items())))
    # What is a rule of one edit holds, as it does in the entries; none is there twice by now.
    if problems := list(rules.annotation_problems(union.annotations)):
        raise SpecError(f"the entry {name} is invalid: {'; '.join(problems)}")
    return _put_together(union, nodes, mounts)


def content_of(kind: Kind, entries: Sequence[Entry]) -> bytes:
    """Give the content of a kind's YAML file with these entries, as ``render`` does.

    Raises:
        SpecError: A rule of CDI is broken.
    """
    problems = rules.kind_problems(kind)
    if len({entry.device.name for entry in entries}) < len(entries):
        problems.append("a device name is given more than once")
    if problems or not entries:
        raise SpecError(f"the spec of {kind} is invalid: {'; '.join(problems) or 'no device'}")
    versions = {rules.kind_version(kind), *(entry.version for entry in entries)}
    return _file(kind, max(versions, key=rules.VERSIONS.index), entries)


def _entry(device: Device) -> Entry:
    nodes = {
        node.path: Part(natural(node.path), _item(_node(node)), node)
        for node in device.edits.device_nodes
    }
    mounts = {
        mount.container_path: Part(natural(mount.container_path), _item(_mount(mount)), mount)
        for mount in device.edits.mounts
    }
    return _put_together(device, nodes, mounts)


def _put_together(
    device: Device,
    nodes: Mapping[str, Part[DeviceNode]],
    mounts: Mapping[str, Part[Mount]],
) -> Entry:
    lines = [f"  - name: {_scalar(device.name)}\n"]
    lines += _annotations(dict(sorted(device.annotations)), "    ")
    lines.append("    containerEdits:\n")
    lines += _list("deviceNodes", nodes)
    lines += _list("mounts", mounts)
    others = structs.replace(device.edits, device_nodes=(), mounts=())
    lines += _mapping(_edits(others), "      ")
    version = rules.device_version(device)
    common = Common(others.env, others.hooks, others.additional_gids, device.annotations)
    return Entry(device, natural(device.name), version, nodes, mounts, common, "".join(lines))


def _list(key: str, parts: Mapping[str, Part[_Edit]]) -> list[str]:
    texts: list[str] = [part.text for part in sorted(parts.values(), key=attrgetter("order"))]
    return [f"      {key}:\n", *texts] if texts else []


def _item(content: Mapping[str, Value]) -> str:
    return "".join(_sequence([content], "        "))


def _file(
    kind: Kind,
    version: str,
    entries: Iterable[Entry],
    annotations: Iterable[tuple[str, str]] = (),
) -> bytes:
    lines = [HEADER, *_mapping({"cdiVersion": version, "kind": kind}, "")]
    lines += _annotations(dict(sorted(annotations)), "")
    lines.append("devices:\n")
    lines += [entry.text for entry in sorted(entries, key=attrgetter("order"))]
    return "".join(lines).encode()


# --- content --------------------------------------------------------------------------------------


def _device(device: Device) -> dict[str, Value]:
    content: dict[str, Value] = {"name": device.name}
    if device.annotations:
        content["annotations"] = dict(sorted(device.annotations))
    content["containerEdits"] = _edits(device.edits)
    return content


def _edits(edits: ContainerEdits) -> dict[str, Value]:
    mounts = sorted(edits.mounts, key=lambda mount: natural(mount.container_path))
    return _without_empty(
        deviceNodes=[_node(node) for node in sorted(edits.device_nodes, key=_path_order)],
        mounts=[_mount(mount) for mount in mounts],
        env=sorted(edits.env),
        # In the profile's order: a later hook sees what an earlier one did.
        hooks=[_hook(hook) for hook in edits.hooks],
        additionalGids=sorted(edits.additional_gids),
    )


def _path_order(node: DeviceNode) -> Order:
    return natural(node.path)


def _node(node: DeviceNode) -> dict[str, Value]:
    return _without_empty(
        path=node.path,
        hostPath=node.host_path,
        permissions=node.permissions,
        fileMode=node.file_mode,
        uid=node.uid,
        gid=node.gid,
    )


def _mount(mount: Mount) -> dict[str, Value]:
    return _without_empty(
        hostPath=mount.host_path,
        containerPath=mount.container_path,
        options=mount.options,
        type=mount.type,
    )


def _hook(hook: Hook) -> dict[str, Value]:
    return _without_empty(
        hookName=hook.hook_name,
        path=hook.path,
        args=hook.args,
        env=hook.env,
        timeout=hook.timeout,
    )


def _without_empty(**content: Value | None) -> dict[str, Value]:
    # A mode, user or group of 0 is something; an empty list is nothing.
    return {
        key: value
        for key, value in content.items()
        if value is not None and (isinstance(value, int) or value)
    }


# --- YAML -----------------------------------------------------------------------------------------


def _annotations(annotations: Mapping[str, str], indent: str) -> Iterator[str]:
    # The only keys that are not CDI's plain words: quoted, lest one be `yes` or `1.0`.
    if annotations:
        quoted = {_scalar(key): value for key, value in annotations.items()}
        yield f"{indent}annotations:\n"
        yield from _mapping(quoted, f"{indent}  ")


def _mapping(content: Mapping[str, Value], indent: str) -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, str | int):
            yield f"{indent}{key}: {_scalar(value)}\n"
        else:
            yield f"{indent}{key}:\n"
            yield from _block(value, f"{indent}  ")


def _sequence(content: Sequence[Value], indent: str) -> Iterator[str]:
    for value in content:
        if isinstance(value, str | int):
            yield f"{indent}- {_scalar(value)}\n"
        else:
            first, *rest = _block(value, f"{indent}  ")
            # The dash takes the place of the first line's innermost indent.
            yield f"{indent}- {first[len(indent) + 2 :]}"
            yield from rest


def _block(value: Sequence[Value] | Mapping[str, Value], indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        return _mapping(value, indent)
    return _sequence(value, indent)


def _scalar(value: str | int) -> str:
    # A JSON string is a YAML string as long as it escapes nothing beyond ASCII: YAML has no
    # surrogate pairs. What neither could carry bare is refused by the rules.
    return json.dumps(value, ensure_ascii=False)
