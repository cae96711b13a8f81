"""What the reconciler knows, as one immutable value, and what a pass reports.

The reconciler's own task is the only one that makes a new ``State``; everybody else reads the
latest as a snapshot. Nothing in it outlives the process but what is on disk: after a start the
first looks find all of it again.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import msgspec

from agent.cdi.desired import Desired, Fingerprint, Offer, Withheld
from agent.cdi.files import Disk
from agent.cdi.sheet import Sheet
from agent.cdi.spec import Kind
from agent.host.model import Address, DeviceNumber, Inventory
from agent.vfio.state import Claims

Key = tuple[Kind, Address]
"""One device in one kind."""


class Track(msgspec.Struct, frozen=True):
    """What is remembered of an offer from pass to pass."""

    fingerprint: Fingerprint
    since: float
    """Monotonic time at which these facts were first seen; ``settle`` counts from here."""
    first: float
    """When the facts began to change; ``settle_max`` counts from here."""
    heard: float
    """When the message arrived that led to the first look at these facts."""
    trusted: bool = True
    """An entry of its name that is on disk and gives the same nodes is true and may stay. Not so
    from the moment at which the facts change until the device is ready again."""


class Retry(msgspec.Struct, frozen=True):
    """A spec file whose last write or deletion failed."""

    attempts: int
    at: float
    """Monotonic time before which the same content is not tried again."""
    content: bytes | None
    """What could not be written; None for a deletion."""
    problem: str


class Recheck(msgspec.Struct, frozen=True):
    """Contradictory facts that no event may resolve: looked at again with growing delay."""

    addresses: frozenset[Address] = frozenset()
    attempts: int = 0
    at: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """All that ``plan`` has to remember between two passes: time as data."""

    offers: tuple[Offer, ...] = dataclasses.field(default=(), repr=False)
    """What was offered last."""
    tracks: Mapping[Key, Track] = dataclasses.field(default_factory=dict)
    """What is remembered of each of them."""
    udev_done: frozenset[tuple[str, DeviceNumber]] = frozenset()
    """Nodes (path, number) that udev's own messages said it has dealt with."""
    retries: Mapping[str, Retry] = dataclasses.field(default_factory=dict)
    """By path of the spec file."""
    recheck: Recheck = dataclasses.field(default_factory=Recheck)
    sheets: Mapping[Kind, Sheet] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    """What the files should hold. What is on disk just so, and offered still, is at rest; and the
    next sheets are made from them."""


class State(msgspec.Struct, frozen=True):
    """A snapshot: what was seen, what is wanted, what is on disk, what is waited for."""

    inventory: Inventory = msgspec.field(default_factory=Inventory)
    desired: Desired = msgspec.field(default_factory=Desired)
    disk: Disk | None = None
    memory: Memory = msgspec.field(default_factory=Memory)
    published: Mapping[Key, str] = msgspec.field(default_factory=dict)
    """The CDI device name of everything that is on disk now."""
    withheld: tuple[Withheld, ...] = ()
    """Everything that is not, with its reason."""
    passes: int = 0
    claims: Claims = msgspec.field(default_factory=Claims)
    """Who holds which device, and what is stranded."""
    paused: bool = False
    """No claim may begin to move a device."""
    problems: tuple[str, ...] = ()
    """Why this host's specs may not be true, one sentence each; empty is healthy."""


Result = Literal["ok", "failed"]


class PassReport(msgspec.Struct, frozen=True):
    """What one pass did: the source of its log line and of the metrics."""

    id: int
    reasons: Mapping[str, int]
    """How many hints of each reason it answered."""
    started: float
    """Monotonic time in seconds."""
    duration: float
    """Seconds."""
    looked_at: int | None
    """How many functions it read; None for all."""
    wrote: tuple[tuple[Kind, str], ...] = ()
    deleted: tuple[tuple[Kind | None, str], ...] = ()
    failed: tuple[tuple[Kind | None, str, str], ...] = ()
    """Kind, path and problem of what could not be written or deleted."""
    problems: tuple[str, ...] = ()
    """Why it ended before it could decide anything."""
    withdrew: tuple[Key, ...] = ()
    published: tuple[Key, ...] = ()
    withdraw_latency: float | None = None
    """Seconds from the message to the moment at which the entries were off the disk."""
    publish_latencies: tuple[float, ...] = ()
    """Seconds from the message about the last fact of each device to its entry on disk."""

    @property
    def result(self) -> Result:
        """Whether everything that had to reach the disk did."""
        return "failed" if self.failed or self.problems else "ok"

    @property
    def changed(self) -> bool:
        """Whether it did anything worth a line."""
        return bool(self.wrote or self.deleted or self.failed)
