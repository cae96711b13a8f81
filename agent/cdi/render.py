"""The one form of a spec as bytes.

Pure. The same facts give the same bytes: devices by name in natural order, nodes by path, and
whoever compares bytes compares facts. Nothing that breaks a rule of CDI leaves this module.

Strings are always quoted, keys are words that no YAML reader takes for anything else, and numbers
are decimal, so YAML 1.1 and 1.2 read the same. The few forms that a spec needs are written here
directly: for 512 devices that costs a tenth of PyYAML's C dumper, and its choice of quotes and
line breaks is not ours to keep stable. The text of an entry is kept from one pass to the next.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from agent.cdi import rules
from agent.cdi.spec import ContainerEdits, Device, DeviceNode, Hook, Mount, Spec
from agent.errors import SpecError

HEADER: Final = "# Written by cdi-agent, which rewrites it when devices come and go: do not edit.\n"
"""The first line of a YAML file of ours; JSON has no comments."""

Suffix = Literal["yaml", "json"]
"""The end of a spec file's name, which tells its format."""

Value = str | int | Sequence["Value"] | Mapping[str, "Value"]

_NATURAL: Final = re.compile(r"(\d+)")


@functools.lru_cache(maxsize=4096)
def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Order names as people do: ``card2`` before ``card10``."""
    return tuple(
        (0, int(part)) if part.isdecimal() else (1, part) for part in _NATURAL.split(name) if part
    )


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
    devices = sorted(spec.devices, key=lambda device: natural(device.name))
    head: dict[str, Value] = {"cdiVersion": version or needed, "kind": spec.kind}
    annotations = dict(sorted(spec.annotations))
    if suffix == "json":
        content = head | _without_empty(
            annotations=annotations,
            devices=[_device(device) for device in devices],
        )
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    lines = (HEADER, *_mapping(head, ""), *_annotations(annotations, ""), "devices:\n")
    return "".join((*lines, *map(_entry, devices))).encode()


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
        deviceNodes=[_node(node) for node in _sorted_nodes(edits)],
        mounts=[_mount(mount) for mount in mounts],
        env=sorted(edits.env),
        # In the profile's order: a later hook sees what an earlier one did.
        hooks=[_hook(hook) for hook in edits.hooks],
        additionalGids=sorted(edits.additional_gids),
    )


def _sorted_nodes(edits: ContainerEdits) -> list[DeviceNode]:
    return sorted(edits.device_nodes, key=lambda node: natural(node.path))


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


@rules.remembered
def _entry(device: Device) -> str:
    lines = [f"  - name: {_scalar(device.name)}\n"]
    lines += _annotations(dict(sorted(device.annotations)), "    ")
    lines.append("    containerEdits:\n")
    if device.edits.device_nodes:
        lines.append("      deviceNodes:\n")
        lines += map(_node_text, _sorted_nodes(device.edits))
    others = dataclasses.replace(device.edits, device_nodes=())
    lines += _mapping(_edits(others), "      ")
    return "".join(lines)


@functools.lru_cache(maxsize=2048)
def _node_text(node: DeviceNode) -> str:
    # Apart, because an entry `all` has the nodes of its whole kind and few of them change.
    return "".join(_sequence([_node(node)], "        "))


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
