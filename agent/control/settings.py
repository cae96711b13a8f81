"""What the configuration says about the metrics port and the control socket."""

from typing import Annotated

import msgspec
from msgspec import Meta

from agent.control.sockets import parse_address


class MetricsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section ``metrics``."""

    listen: str | None = "127.0.0.1:9478"
    """``address:port`` with a numeric address (``[::1]:9478`` for IPv6), or the path of a Unix
    socket; null opens no port. A socket that systemd hands over takes precedence."""

    def __post_init__(self) -> None:
        """Refuse what can never be listened to.

        Raises:
            ValueError: ``listen`` is no address; msgspec adds the key's path.
        """
        if self.listen is not None:
            parse_address(self.listen)


GroupName = Annotated[
    str, Meta(pattern=r"\A[a-z_][a-z0-9_-]{0,31}\Z", description="the name of a group")
]


class ControlSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section ``control``."""

    socket: str | None = "/run/cdi-agent/control.sock"
    """The path of the socket on which orders are taken; null takes none. A socket that systemd
    hands over takes precedence."""
    group: GroupName | None = None
    """Whose members may give orders beside root. With the socket unit, its ``SocketGroup=`` says
    so instead."""

    def __post_init__(self) -> None:
        """Refuse what is no path.

        Raises:
            ValueError: ``socket`` is no path of a socket; msgspec adds the key's path.
        """
        if self.socket is None:
            return
        if not self.socket.startswith("/"):
            raise ValueError(f"{self.socket!r} is not the absolute path of a socket")
        parse_address(self.socket)
