"""Options that several commands take."""

import math
from pathlib import Path
from typing import Final

import click

from agent.config.build import seconds
from agent.control.body import MAX_LEASE


class Duration(click.ParamType[float]):
    """A time such as ``90``, ``90s``, ``5m`` or ``1.5h``, as in the configuration: seconds."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read one that may be a lease."""
        try:
            found = float(str(seconds(value)))
        except ValueError:
            found = math.nan
        if not 0 < found <= MAX_LEASE:
            days = MAX_LEASE // 86_400
            self.fail(
                f"{value!r} is not a duration such as 90, 90s, 5m or 1h, of more than 0 and at "
                f"most {days} days",
                param,
                ctx,
            )
        return found


config_option: Final = click.option(
    "-c",
    "--config",
    "config_path",
    type=click.Path(path_type=Path, readable=False),  # what cannot be read is no wrong usage
    default=None,
    envvar="CDI_AGENT_CONFIG",
    help="Configuration file; default: /etc/cdi-agent/config.yaml if it exists.",
)

output_option: Final = click.option(
    "-o",
    "--output",
    "output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="A table for people, or JSON for programs.",
)
