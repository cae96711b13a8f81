"""What the configuration says about looking at the host, and the types that all settings share."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

_SECONDS: Final = {"unit": "seconds"}
_YEAR: Final = 31_536_000

Duration = Annotated[float, Meta(ge=0, le=_YEAR, extra=_SECONDS)]
"""Seconds. In the configuration a number, or a number with ``ms``, ``s``, ``m`` or ``h``."""

Delay = Annotated[float, Meta(ge=0.01, le=_YEAR, extra=_SECONDS)]
"""A duration that something is repeated after, so it may not be nothing."""

Period = Annotated[float, Meta(ge=1, le=_YEAR, extra=_SECONDS)]
"""A duration that something costly is repeated after."""

AbsolutePath = Annotated[
    str,
    Meta(
        pattern=r"\A(?:/(?!\.\.(?:/|\Z))[^/\x00-\x1f]+)+/?\Z",
        max_length=4096,
        description="an absolute path below / that has no '..' in it",
    ),
]
"""A path that means the same wherever the process stands; never the root itself. What ``..`` means
depends on links, and two such paths cannot be compared."""


def normalise(path: str) -> str:
    """The one form of an absolute path: no slash at its end, no single dots in between."""
    return "/" + "/".join(name for name in path.split("/") if name not in {"", "."})


DevicePath = Annotated[
    str,
    Meta(
        pattern=r"\A/dev(?:/(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f]+)+\Z",
        max_length=4096,
        description="the path of a node below /dev, without '.' and '..'",
    ),
]


class HostSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section ``host``."""

    sys: AbsolutePath = "/sys"
    """Where the host's sysfs is mounted; another path in a container that has it elsewhere."""
    dev: AbsolutePath = "/dev"
    """Where the host's devtmpfs is mounted. Specs name nodes as ``/dev/...`` whatever this is."""
    run: AbsolutePath = "/run"
    """Where the host's /run is mounted; udev's database lies in it."""
    proc: AbsolutePath = "/proc"
    """Where a procfs is mounted."""
    extra_nodes: tuple[DevicePath, ...] = ()
    """Nodes of no single device that are looked at beside those that profiles name."""
    static_dev: bool = False
    """Publish even if ``dev`` is not the kernel's own devtmpfs, so that its nodes may be old."""
    receive_buffer: Annotated[int, Meta(ge=65_536, le=2**30)] | None = None
    """Bytes that the kernel keeps for each of the two sockets; null leaves it to libudev."""
