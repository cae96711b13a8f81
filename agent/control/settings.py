"""What the configuration says about the metrics port."""

import msgspec

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
