"""What the configuration says about the log."""

from typing import Literal

import msgspec

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "text", "json", "journal"]


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section ``log``."""

    level: Level = "info"
    """The least important lines that are written."""
    format: Format = "auto"
    """``auto``: to the journal with fields if standard error leads there, else text, in colour on
    a terminal. ``text``, ``json``: one line each on standard error. ``journal``: with fields to the
    journal's socket, wherever standard error leads."""
