"""``cdi-agent check-config``: say everything that is wrong with a configuration file."""

from pathlib import Path

import click

from agent import config
from agent.cli.options import config_option


@click.command("check-config")
@click.argument("path", type=click.Path(path_type=Path), required=False)
@config_option
def command(path: Path | None, config_path: Path | None) -> None:
    """Check a configuration file; without PATH, the one that the service would read.

    Faults are told together, each with its line, its key and what is allowed. Rules about several
    keys are checked once each of these keys is good by itself.
    """
    chosen = path if path is not None else config_path
    config.load(chosen)
    if chosen is None and not config.DEFAULT_PATH.exists():
        click.echo(f"{config.DEFAULT_PATH} does not exist: every key has its default")
    else:
        click.echo(f"{chosen or config.DEFAULT_PATH} is good")
