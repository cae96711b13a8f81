"""What the configuration says about passes: how long things are waited for."""

from typing import Annotated

import msgspec
from msgspec import Meta

from agent.host.settings import Delay, Duration, Period


class ReconcileSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section ``reconcile``."""

    settle: Duration = 0.05
    """How long the facts of a device must stay the same before it is published."""
    settle_max: Duration = 1.0
    """A device that never holds still is published after this all the same."""
    udev_timeout: Duration = 5.0
    """How long to wait for udev to deal with a node; then it is published with a warning."""
    resync: Period = 300.0
    """How often to look at everything though no message came."""
    resync_blind: Period = 5.0
    """The same while messages cannot be heard."""
    ready_timeout: Duration = 10.0
    """The longest that the start waits for devices that are still coming up at boot, and that a
    claim waits for a driver which udev is still loading."""
    retry_first: Delay = 0.5
    """How long after a failed write it is tried again; the delay doubles each time."""
    retry_max: Delay = 60.0
    """The longest such delay."""
    queue_size: Annotated[int, Meta(ge=16, le=1_000_000)] = 4096
    """Messages that may wait; when there are more, everything is looked at once instead."""
