"""``cdi-agent run``: the service; it imports no other command."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Final

import click
import msgspec
import structlog

from agent import config
from agent.cli.lock import instance_lock
from agent.cli.options import config_option
from agent.daemon import Daemon
from agent.errors import AgentError, ExitCode
from agent.host.files import make_directories
from agent.observe import log as logs

RUNTIME: Final = "/run/cdi-agent"
"""Where our sockets lie, unless the configuration says otherwise."""


@click.command("run")
@config_option
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default=None,
    help="Overrides log.level of the configuration.",
)
def command(config_path: Path | None, log_level: str | None) -> int:
    """Follow the host and keep its CDI specs true, until SIGTERM.

    SIGHUP reads the configuration again.
    """

    def load() -> config.Config:
        """Read the configuration, now or later: what the command line says holds for both."""
        settings = config.load(config_path)
        if log_level is None:
            return settings
        return msgspec.structs.replace(
            settings, log=msgspec.structs.replace(settings.log, level=log_level)
        )

    settings = load()
    log = logs.configure(settings.log, environ=os.environ)
    try:
        with instance_lock(settings.state_directory, settings.cdi.directories) as lock:
            _make_runtime_directory(settings)
            daemon = Daemon(
                settings,
                reload=load,
                occupy=lock.take_specs,
                log=log,
                environ=os.environ,
            )
            asyncio.run(daemon.run())
    except AgentError as error:
        structlog.get_logger().error("ended", problem=error.sentence, hint=error.hint)
        return error.exit_code
    except Exception:  # noqa: BLE001 - the log is where the traceback is looked for
        structlog.get_logger().exception("crashed")
        return ExitCode.SOFTWARE
    finally:
        log.close()
        sys.stderr.flush()
    return ExitCode.OK


def _make_runtime_directory(settings: config.Config) -> None:
    """Make the folder of our sockets, if one is to be opened there.

    A unit has RuntimeDirectory= for that. If it cannot be made, the socket's own task says so.
    """
    sockets = (settings.control.socket, settings.metrics.listen)
    if any(path is not None and os.path.dirname(path) == RUNTIME for path in sockets):
        with contextlib.suppress(OSError):
            make_directories(RUNTIME)
