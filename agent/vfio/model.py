"""The words of a claim as values: what is asked for, what is remembered, what has to be done.

Pure. ``vfio.claim`` decides with these, ``vfio.journal`` writes the durable ones to disk,
``vfio.worker`` performs effects and answers with results. What is durable is only what an agent
that starts after a crash cannot find out again: who asked for what, and what each function was.
"""

import dataclasses
import enum

from agent.host.model import Address, Function, HoldMode


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Which card it is: another one in the same slot differs in at least one of these."""

    vendor: int
    device: int
    subsystem_vendor: int | None
    subsystem_device: int | None
    class_code: int
    inode: int
    """Of the sysfs folder; new after each plug, so it means nothing after a reboot."""

    @classmethod
    def of(cls, function: Function) -> "Identity":
        """The identity of a function as a look saw it."""
        return cls(
            function.vendor,
            function.device,
            function.subsystem_vendor,
            function.subsystem_device,
            function.class_code,
            function.inode,
        )


# --- what is asked for ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Prepare:
    """Hold these devices in a mode. Repeated with the same content it joins what is under way."""

    id: str
    mode: HoldMode
    devices: tuple[Address, ...]
    client: str = ""
    """Who asks, for people."""
    force: bool = False
    """Take even the display of the console."""
    named: tuple[Address, ...] = ()
    """Other endpoints of the IOMMU group that may be moved too; companions need no naming."""
    driver: str | None = None
    """The VFIO driver to use instead of the best one for each device."""
    from_vfio: bool = False
    """``mode: drm`` may take a device off VFIO that somebody else put there."""
    lease: float | None = None
    """Seconds after which the claim is released unless it was prepared again."""
    owner_pid: int | None = None
    """The claim is released when this process has gone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """Give the devices of a claim back. Success if there is no such claim."""

    id: str
    client: str = ""
    force: bool = False
    """Even while a process holds a node of the device open."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recover:
    """Bring a stranded device back to its recorded driver, or to the one the kernel prefers."""

    address: Address
    client: str = ""
    force: bool = False


Order = Prepare | Release | Recover


# --- what is remembered ---------------------------------------------------------------------------


class Step(enum.StrEnum):
    """One write to sysfs; in this order they move a function."""

    OVERRIDE = "override"
    """``<function>/driver_override``."""
    UNBIND = "unbind"
    """``<function>/driver/unbind``."""
    PROBE = "probe"
    """``/sys/bus/pci/drivers_probe``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What a function was before anybody claimed it; the first origin wins until released."""

    address: Address
    identity: Identity
    driver: str | None
    override: str | None
    """The ``driver_override`` that somebody else had set; None if there was none."""
    target: str | None
    """The driver that the claim wants; None where the claim does not move the function."""
    companion: bool = False


# --- what has to be done --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Inspect:
    """Read what can block or needs rights: overrides, holders of nodes, managers, drivers."""

    claim: str
    addresses: tuple[Address, ...]
    node_paths: tuple[str, ...]
    """Every node of these functions, the VFIO ones too."""
    drivers: tuple[str, ...] = ()
    """Drivers that must be available; their modules are loaded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Write:
    """One write for one function, by a child that can be abandoned."""

    claim: str
    address: Address
    step: Step
    value: str
    """What is written: a driver's name or a newline, an address."""


Effect = Inspect | Write


# --- what came of it ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """A process that has a node open."""

    pid: int
    command: str
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class Inspection:
    """The answer to ``Inspect``. What could not be read in time is unknown, and unknown refuses."""

    effect: Inspect
    overrides: tuple[tuple[Address, str | None], ...] = ()
    """Only of functions whose override could be read."""
    holders: tuple[Holder, ...] = ()
    holders_known: bool = False
    managed: tuple[tuple[Address, str], ...] = ()
    """Functions that driverctl or libvirt manages, and which of them."""
    unavailable: tuple[tuple[str, str], ...] = ()
    """Drivers that are not to be had, and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """The answer to ``Write``."""

    effect: Write
    errno: int = 0
    """0 is success."""
    hung: bool = False
    """Past its deadline, the child was killed and is not gone yet."""
    gone: bool = False
    """A child that had hung has ended after all; nothing is known of its effect but by looking."""


Result = Inspection | Written
