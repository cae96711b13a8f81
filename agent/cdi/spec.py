"""CDI specs as values.

Pure, and only the types: ``cdi.rules`` says what is allowed in them and which version that needs,
``cdi.render`` gives a spec its one form as bytes, ``cdi.parse`` reads bytes back. A spec is built
from tuples and compared by value.
"""

import dataclasses
from typing import NewType

import msgspec

Kind = NewType("Kind", str)
"""A qualified kind, ``vendor.tld/class``: ``intel.com/gpu``."""


class DeviceNode(msgspec.Struct, frozen=True, order=True):
    """A device node that a container gets; host and container path are usually equal."""

    path: str
    host_path: str | None = None
    permissions: str | None = None
    """Access by the device cgroup: a selection of ``rwm``."""
    file_mode: int | None = None
    uid: int | None = None
    gid: int | None = None


class Mount(msgspec.Struct, frozen=True, order=True):
    """A path of the host that a container sees."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    type: str | None = None


class Hook(msgspec.Struct, frozen=True, order=True):
    """An OCI hook that the engine runs."""

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None
    """Seconds."""


class ContainerEdits(msgspec.Struct, frozen=True):
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
    paths: frozenset[str] = dataclasses.field(init=False, repr=False, compare=False)
    """The nodes of the host that it gives, by path."""

    def __post_init__(self) -> None:
        nodes = self.edits.device_nodes
        object.__setattr__(self, "paths", frozenset([n.host_path or n.path for n in nodes]))


class Spec(msgspec.Struct, frozen=True):
    """The content of one spec file: one kind and at least one device."""

    kind: Kind
    devices: tuple[Device, ...]
    annotations: tuple[tuple[str, str], ...] = ()
