"""What ``desired`` decides: offers, and what is withheld with the reason. Pure; only types."""

import dataclasses
import enum

import msgspec

from agent.cdi.spec import Device, Kind
from agent.host.model import Address, DeviceNumber, Node, address_order


class Reason(enum.StrEnum):
    """Why a device is not published: a closed set, used as a metric's label.

    The guide's table is made of the members' docstrings.
    """

    UNMATCHED = "unmatched"
    """No profile recognises the function, though it has nodes or a display class."""
    IGNORED = "ignored"
    """The configuration says so."""
    POLICY = "policy"
    """A profile recognises it and publishes nothing for it (PF with VFs, partition, switched off,
    …), or nothing is to be published at all."""
    NO_DRIVER = "no-driver"
    """No driver has it."""
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
    GROUP_NOT_VIABLE = "group-not-viable"
    """It is on VFIO, but a function of its IOMMU group is on a driver of the host."""
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


class Fingerprint(msgspec.Struct, frozen=True):
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
    key: tuple[Kind, Address] = dataclasses.field(init=False, repr=False, compare=False)
    """What it is an offer of."""
    order: tuple[int, str] = dataclasses.field(init=False, repr=False, compare=False)
    """Its place by address."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.kind, self.address))
        object.__setattr__(self, "order", address_order(self.address))


class Withheld(msgspec.Struct, frozen=True):
    """A device that is not published, and why."""

    address: Address
    kind: Kind | None
    """The kind in which it is missing; None if no profile that is on gives that of it."""
    reason: Reason
    detail: str
    """One sentence for people."""


class WithheldNode(msgspec.Struct, frozen=True):
    """A node of no PCI function, which is not published: a partition, a card of the firmware's."""

    path: str
    reason: Reason
    detail: str
    """One sentence for people."""


class Policy(msgspec.Struct, frozen=True):
    """What the configuration decides beside the profiles."""

    ignore: frozenset[str] = frozenset()
    """Addresses (``0000:03:00.0``) and ids (``8086:e212``), in lower case."""
    static_dev: bool = False
    """Publish even if /dev is not the kernel's own."""
    version: str | None = None
    """The pin: no entry may need a later ``cdiVersion``."""
    publish: bool = True
    """Whether anything is published; without it, all that was is taken back."""
