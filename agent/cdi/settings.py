"""What the configuration says about specs: where, in which form, and of what."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from agent.cdi.profile import Profile
from agent.host.model import parse_address
from agent.host.settings import AbsolutePath, normalise

Pin = Literal["0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0"]
"""The versions that can carry an entry of ours: ``hostPath`` came with 0.5.0."""

Ignored = Annotated[
    str,
    Meta(
        pattern=r"\A(?:(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]"
        r"|[0-9A-Fa-f]{4}:[0-9A-Fa-f]{4})\Z",
        description='an address such as "0000:03:00.0" or an id such as "8086:e212"',
    ),
]


UserProfile = Annotated[dict[str, Any], Meta(extra={"partly": Profile})]
"""Any of a profile's keys, as plain values: the rest may come from a profile of the same name."""


class CdiSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section ``cdi``."""

    directory: AbsolutePath = "/var/run/cdi"
    """Where spec files are written. It is made if it is missing, and never removed."""
    other_directories: tuple[AbsolutePath, ...] = ("/etc/cdi", "/var/run/cdi")
    """Where container engines look too: what others define there is reported. No other instance may
    write there."""
    format: Literal["yaml", "json"] = "yaml"
    """The form of spec files; all engines read both."""
    version: Pin | None = None
    """The highest ``cdiVersion`` that may be written; what needs more is withheld. null writes
    the lowest that each file needs."""
    adopt: bool = False
    """Set a file of others in ``directory`` aside if it defines a device that we publish; without
    that, the device is withheld, since two definitions make both useless."""
    remove_on_stop: bool = False
    """Delete our spec files on an orderly stop. Containers that run are not affected either way."""
    ignore: tuple[Ignored, ...] = ()
    """Devices that are never published nor moved, by address or by vendor and device id."""
    profiles: tuple[UserProfile, ...] = ()
    """Profiles of your own, before those that come with the program. One with the name of such a
    one changes it: each key that is given replaces its value."""

    def __post_init__(self) -> None:
        """Give the paths the one form in which paths are compared."""
        others = tuple(dict.fromkeys(map(normalise, self.other_directories)))
        msgspec.structs.force_setattr(self, "directory", normalise(self.directory))
        msgspec.structs.force_setattr(self, "other_directories", others)

    @property
    def directories(self) -> tuple[str, ...]:
        """Every directory that is looked into, the one that is written to first."""
        return tuple(dict.fromkeys((self.directory, *self.other_directories)))

    @property
    def ignored(self) -> frozenset[str]:
        """``ignore`` in the one form that addresses and ids have elsewhere."""
        return frozenset(
            parse_address(text) if "." in text else text.lower() for text in self.ignore
        )
