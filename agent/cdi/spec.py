"""CDI specs as values: their types, rules, lowest version, and their one form as bytes.

Pure. A spec is built from tuples, sorted, and rendered so that the same facts give the same bytes;
whoever compares bytes compares facts. Nothing that breaks a rule of CDI leaves this module:
``render`` validates first. The rules are those of the CDI specification and of the consumers'
parsers (one bad device makes them ignore the whole file, so the rules are checked per device
too, and the bad one can be left out).
"""

from __future__ import annotations

import dataclasses
from typing import NewType

Kind = NewType("Kind", str)
"""A qualified kind, ``vendor.tld/class``: ``intel.com/gpu``."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class DeviceNode:
    """A device node that a container gets; host and container path are usually equal."""

    path: str
    host_path: str | None = None
    permissions: str | None = None
    """Access by the device cgroup: a selection of ``rwm``."""
    file_mode: int | None = None
    uid: int | None = None
    gid: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Mount:
    """A path of the host that a container sees."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    type: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Hook:
    """An OCI hook that the engine runs."""

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None
    """Seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class ContainerEdits:
    """What a device adds to a container. Without any content it is invalid."""

    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    env: tuple[str, ...] = ()
    hooks: tuple[Hook, ...] = ()
    additional_gids: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is any edit."""
        return any(
            (
                self.device_nodes,
                self.mounts,
                self.env,
                self.hooks,
                self.additional_gids,
            ),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """A named device of a kind."""

    name: str
    edits: ContainerEdits
    annotations: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """The content of one spec file: one kind and at least one device."""

    kind: Kind
    devices: tuple[Device, ...]
    annotations: tuple[tuple[str, str], ...] = ()
