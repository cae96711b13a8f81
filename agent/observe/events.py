"""The name of every log entry, with its level and meaning: what people may search for.

A name is stable: in the journal it is the field ``CDI_AGENT_EVENT``, in JSON the key ``event``. The
packages below this one cannot import it and write the name at the call; a test reads their calls
and compares. ``level`` is the highest at which an entry is written.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

EventLevel = Literal["debug", "info", "warning", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One row of the guide's table."""

    level: EventLevel
    meaning: str


EVENTS: Final[Mapping[str, Event]] = {
    "library-message": Event(
        "error", "A library, or Python itself, had something to say; `logger` names it."
    ),
    "metrics-listening": Event("info", "The metrics port is open at `address`."),
    "metrics-unavailable": Event(
        "warning",
        "The metrics port cannot be opened (taken, or not allowed). It is tried again with growing "
        "delay; everything else goes on.",
    ),
    "page-failed": Event("error", "A page of the metrics port could not be made; a bug."),
    "notify-failed": Event(
        "warning", "systemd could not be told something; said once until it works again."
    ),
    "notify-unsupported": Event(
        "warning", "NOTIFY_SOCKET has a form that is not understood; systemd is told nothing."
    ),
}
