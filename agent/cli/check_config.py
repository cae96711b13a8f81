"""``cdi-agent check-config``: say everything that is wrong with a configuration file."""

import grp
from pathlib import Path

import click

from agent import config
from agent.cli.options import config_option
from agent.cli.output import notable
from agent.errors import ConfigError


@click.command("check-config")
# Whether it can be read is told as for every other command, with the exit code of a configuration.
@click.argument("path", type=click.Path(path_type=Path, readable=False), required=False)
@config_option
@click.option("--example", is_flag=True, help="Print every key with its default, and end.")
def command(path: Path | None, config_path: Path | None, *, example: bool) -> None:
    """Check a configuration file; without PATH, the one that the service would read.

    PATH may be - for standard input. Faults are told together, each with its line, its key and what
    is allowed. Rules about several keys are checked once each of these keys is good by itself.
    """
    if example:
        click.echo(config.example(), nl=False)
        return
    chosen = path if path is not None else config_path
    if chosen == Path("-"):
        shown = "standard input"
        settings = config.parse(_standard_input(), shown)
    else:
        shown = str(chosen or config.DEFAULT_PATH)
        settings = config.load(chosen)
    _warn(settings)
    if chosen is None and not config.DEFAULT_PATH.exists():
        click.echo(f"{shown} does not exist: every key has its default")
    else:
        click.echo(f"{shown} is good")


def _standard_input() -> bytes:
    try:
        with open(0, "rb", closefd=False) as stream:
            return stream.read(config.MAX_SIZE + 1)
    except OSError as error:
        raise ConfigError(f"standard input cannot be read: {error.strerror}") from error


def _warn(settings: config.Config) -> None:
    """Say what is no fault of the file, and may be one on the host that it is for."""
    group = settings.control.group
    if group is None:
        return
    try:
        grp.getgrnam(group)
    except KeyError:
        lack = f"this host has no group {group}, and without it the socket cannot be opened"
        click.echo(notable(f"warning: control.group: {lack}"), err=True)
