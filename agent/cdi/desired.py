"""What should be published, were every device ready: facts and profiles in, offers out.

Pure. ``desired`` makes one ``Offer`` for each device and kind that a profile publishes, and one
``Withheld`` with its reason for each device that it does not. It knows nothing of time or of the
disk: whether an offer is already published, must settle first, or would double a foreign
definition is decided by ``reconcile.plan``.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.cdi.spec import Device, Kind
    from agent.host.model import Address, DeviceNumber, Node


class Reason(enum.StrEnum):
    """Why a device is not published: a closed set, used as a metric's label."""

    UNMATCHED = "unmatched"
    """No profile recognises the function, though it has nodes or a display class."""
    IGNORED = "ignored"
    """The configuration says so."""
    POLICY = "policy"
    """The profile recognises it and publishes nothing for it (PF with VFs, partition, …)."""
    NO_DRIVER = "no-driver"
    FOREIGN_DRIVER = "foreign-driver"
    """Its driver belongs to another toolkit, or is none that the profile knows."""
    NODE_MISSING = "node-missing"
    """A node that the profile requires does not exist (yet)."""
    NODE_MISMATCH = "node-mismatch"
    """A node's number differs from what sysfs says, or something else is at its path."""
    PATH_CONFLICT = "path-conflict"
    """Two functions with one node path: both look again."""
    SETTLING = "settling"
    """Ready but for ``settle``: the facts are too new."""
    UDEV = "udev"
    """udev has not dealt with all of its nodes yet."""
    HELD = "held"
    """A claim holds it."""
    FOREIGN_DUPLICATE = "foreign-duplicate"
    """A foreign file in the same directory defines the same device."""
    FOREIGN_FILE = "foreign-file"
    """A file that is not ours has the name of the spec file."""
    STATIC_DEV = "static-dev"
    """/dev is not the kernel's own, and the configuration does not allow that."""
    INVALID = "invalid"
    """Its entry would break a rule of CDI."""
    VERSION_PIN = "version-pin"
    """Its entry needs a newer ``cdiVersion`` than the configuration allows."""
    UNREADABLE = "unreadable"
    """The function could not be read."""
    DEAD = "dead"
    """It does not answer any more."""
    BLOCKED = "blocked"
    """A withdrawal of one of its paths failed; it waits until that is done."""
    STORE = "store"
    """Its spec file could not be written; it is tried again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """The facts that a published entry depends on: if they differ, the entry goes at once."""

    inode: int
    driver: str | None
    nodes: tuple[tuple[str, DeviceNumber | None], ...]
    """Path and number of each node that the entry gives, sorted by path; shared ones too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """What one device contributes to one kind."""

    kind: Kind
    address: Address
    device: Device
    """Its entry, valid by CDI's rules."""
    fingerprint: Fingerprint
    unsettled: tuple[Node, ...] = ()
    """Nodes that udev's database does not have yet."""
    in_all: bool = False
    """Whether ``all`` includes it: on its own driver, no VF, not claimed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Withheld:
    """A device that is not published, and why."""

    address: Address
    kind: Kind | None
    """The kind in which it is missing; None if no profile recognises it."""
    reason: Reason
    detail: str
    """One sentence for people."""


@dataclasses.dataclass(frozen=True, slots=True)
class Desired:
    """The result of ``desired``; at most one offer for a device in a kind."""

    offers: tuple[Offer, ...] = ()
    withheld: tuple[Withheld, ...] = ()
