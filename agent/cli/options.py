"""Options that several commands take."""

from pathlib import Path
from typing import Final

import click

config_option: Final = click.option(
    "-c",
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
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
