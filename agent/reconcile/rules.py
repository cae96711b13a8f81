"""What the configuration decides about a pass, as plain values. Pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from agent.cdi.desired import Policy
from agent.cdi.files import file_name
from agent.cdi.profile import Profile
from agent.cdi.spec import Kind


class Timing(msgspec.Struct, frozen=True):
    """How long things are waited for, in seconds."""

    settle: float = 0.05
    settle_max: float = 1.0
    udev_timeout: float = 5.0
    retry_first: float = 0.5
    """The first delay after a failed write or deletion; it doubles."""
    retry_max: float = 60.0
    recheck_first: float = 0.05
    """The first delay before contradictory facts are looked at again; it doubles."""
    recheck_max: float = 30.0


class Layout(msgspec.Struct, frozen=True):
    """Where spec files go and what form they have."""

    directory: str = "/var/run/cdi"
    format: Literal["yaml", "json"] = "yaml"
    adopt: bool = False
    """Set a foreign file aside if it defines what we publish."""

    def path(self, kind: Kind) -> str:
        """The file of a kind."""
        return f"{self.directory}/{file_name(kind, self.format)}"


class Rules(msgspec.Struct, frozen=True):
    """Everything that a pass takes from the configuration."""

    profiles: Sequence[Profile]
    policy: Policy
    layout: Layout
    timing: Timing
    resync: float = 300.0
    """Seconds between full looks that no message asked for."""
    resync_blind: float = 5.0
    """The same while a source of events is down or deaf."""
    ready_timeout: float = 10.0
    """Seconds after the start at which it counts as done, whatever is still waited for."""
