"""What cannot change while the service runs: it was handed to something made once, at the start."""

from collections.abc import Mapping
from typing import Final

import msgspec

from agent.config import Config, require_agreement
from agent.control.settings import ControlSettings, MetricsSettings
from agent.observe.settings import LogSettings

FINAL_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("state_directory",),
    "host": ("sys", "dev", "run", "proc", "receive_buffer"),
    "reconcile": ("queue_size",),
    "log": LogSettings.__struct_fields__,
    "metrics": MetricsSettings.__struct_fields__,
    "control": ControlSettings.__struct_fields__,
    "vfio": ("write_timeout", "load_timeout"),
}
"""Keys by section; those of no section first."""


def keep_finals(old: Config, new: Config) -> tuple[Config, list[str]]:
    """Give a new configuration the old one's values of `FINAL_KEYS`; which of them it changed.

    Raises:
        ConfigError: With those values it contradicts itself.
    """
    changed = []
    for section, keys in FINAL_KEYS.items():
        before, after = (getattr(config, section) if section else config for config in (old, new))
        kept = {key: getattr(before, key) for key in keys}
        changed += [
            f"{section}.{key}".removeprefix(".") for key in keys if getattr(after, key) != kept[key]
        ]
        after = msgspec.structs.replace(after, **kept)
        new = msgspec.structs.replace(new, **{section: after}) if section else after
    require_agreement(new)
    return new, sorted(changed)
