"""What the configuration says about claims."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.host.settings import Delay, Duration

ClaimId = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,126}\Z",
        description="letters, digits and any of . _ : -, beginning with one of the former",
    ),
]
DriverName = Annotated[
    str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z", description="the name of a driver")
]
PciAddress = Annotated[
    str,
    Meta(
        pattern=r"\A(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]\Z",
        description='an address such as "0000:03:00.0"',
    ),
]
PciId = Annotated[
    str,
    Meta(pattern=r"\A[0-9A-Fa-f]{4}:[0-9A-Fa-f]{4}\Z", description='an id such as "8086:e212"'),
]


class AssignSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of ``vfio.assign``: a claim that the agent makes itself at every start."""

    id: ClaimId
    """The claim's id."""
    devices: Annotated[tuple[PciAddress, ...], Meta(min_length=1)]
    """What is claimed, all or nothing."""
    mode: Literal["vfio", "drm"] = "vfio"
    """What it is claimed for."""
    named: tuple[PciAddress, ...] = ()
    """Other endpoints of the IOMMU group that may be taken from the host too."""
    driver: DriverName | None = None
    """The VFIO driver; null takes the one of ``drivers`` or of the profile, or the best one."""
    force: bool = False
    """Take even the display of the console, and a device whose users are not to be seen."""


class VfioSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section ``vfio``."""

    assign: tuple[AssignSettings, ...] = ()
    """Claims that the agent makes itself at every start."""
    drivers: dict[PciId, DriverName] = {}
    """VFIO drivers by vendor and device id, instead of the profile's or the best one there is."""
    allow_no_iommu: bool = False
    """Let a device be claimed in VFIO's no-IOMMU mode, in which it can reach all memory."""
    write_timeout: Delay = 30.0
    """After this a write to sysfs counts as hung; the device is left alone until it returns."""
    load_timeout: Delay = 30.0
    """How long loading a driver's module may take."""
    move_timeout: Delay = 60.0
    """How long moving all devices of a claim may take; a write that hangs is not counted."""
    publish_timeout: Delay = 10.0
    """How long to wait, then, for the entries to be published."""
    retry: Delay = 0.25
    """How long after a refused write it is tried again; doubles each time."""
    tries: Annotated[int, Meta(ge=1, le=20)] = 3
    """How often a write is tried at most."""
    cool_down: Duration = 10.0
    """How long a device that could not be moved is left alone; doubles each time in a row."""
