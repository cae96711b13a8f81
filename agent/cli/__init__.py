"""The command line: one function per command, whose module is imported when it is asked for.

A command raises; this module alone turns an error into a sentence, a hint and an exit code after
sysexits.h. Results go to standard output, everything else to standard error.
"""

import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

import click

from agent import __version__
from agent.errors import AgentError, ConfigError, ExitCode, OutputError
from agent.observe.colour import allows_colour

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "run": ("run.command", "Follow the host and keep its CDI specs true: the service."),
    "scan": ("scan.command", "Show what this host has, what would be published, and why not."),
    "generate": ("generate.command", "Bring the CDI specs up to date once."),
    "status": ("orders.status", "Show how the running agent is."),
    "explain": ("orders.explain", "Say all that the running agent knows of a function."),
    "claim": (
        "orders.claim",
        "Hold devices in a mode, for a virtual machine, until they are released.",
    ),
    "release": ("orders.release", "Give the devices of a claim back."),
    "claims": ("orders.claims", "Show who holds which devices, and what is stranded or hangs."),
    "recover": ("orders.recover", "Bring a stranded device back to its driver."),
    "pause": ("orders.pause", "Let no claim begin to move a device."),
    "resume": ("orders.resume", "Let claims move devices again."),
    "check-config": ("check_config.command", "Check a configuration file."),
    "demo": (
        "demo.command",
        "Watch the agent at work on a simulated host; needs no GPU and no root.",
    ),
}
"""Every command: where it is below ``agent.cli``, and its help line."""


class _Commands(click.Group):
    """A group that knows its commands by name and imports the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        cmd_name: str,
    ) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(".")
        command: click.Command = getattr(importlib.import_module(f"agent.cli.{module}"), name)
        return command

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        """List the commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


EXIT_CODES: Final = (
    "Exit codes: 0 done, and `status` is healthy; 1 refused, or `status` is not; 64 wrong use; "
    "69 no service answers; 74 the output cannot be written; 75 refused, but the same may succeed "
    "later; 77 this user may not ask; 78 a wrong configuration; others as in sysexits.h."
)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
@click.version_option(
    __version__, "-V", "--version", prog_name="cdi-agent", message="%(prog)s %(version)s"
)
def cli() -> None:
    """Keep a GPU host's CDI specs true."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process with its exit code."""
    _open_standard_descriptors()
    if (found := sys.__stdout__) is not None:
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_StandardOutput(found.fileno(), "w", closefd=False)),
            encoding=found.encoding,
            errors=found.errors,
            line_buffering=found.isatty(),
        )
    sys.exit(execute(argv))


class _StandardOutput(io.FileIO):
    """Standard output, whose errors are told from those of every other file."""

    _is_given_up = False

    def write(self, data: "Buffer", /) -> int:
        """Write some of it.

        Raises:
            BrokenPipeError: The reader has seen enough.
            OutputError: It takes no more; the rest is dropped, at the end of the process too.
        """
        if self._is_given_up:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._is_given_up = True
            raise OutputError(f"the output cannot be written: {error.strerror}") from error


def _open_standard_descriptors() -> None:
    """Lead standard descriptors that are closed to /dev/null.

    Else the next files that are opened get their numbers, and a spec or a socket gets the log.
    """
    for number in range(3):
        with contextlib.suppress(OSError):
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # Python found it closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the process's life


def execute(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors become a sentence on standard error and an exit code."""
    try:
        # It also ends quietly, with 1, once the reader (a pager, `head`) has seen enough.
        result = cli.main(
            args=argv,
            prog_name="cdi-agent",
            standalone_mode=False,
            color=None if allows_colour(os.environ) else False,
        )
    except click.ClickException as error:
        with contextlib.suppress(OSError):  # as `report`
            error.show()
        return ExitCode.USAGE if isinstance(error, click.UsageError) else ExitCode.FAILURE
    except AgentError as error:
        report(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return int(result) if isinstance(result, int) else ExitCode.OK


def report(error: AgentError) -> None:
    """Tell a person what went wrong and what to do about it; what is many things, one a line.

    Where standard error takes nothing, the exit code has to do.
    """
    with contextlib.suppress(OSError):
        _report(error)


def _report(error: AgentError) -> None:
    if isinstance(error, ConfigError) and error.faults:
        click.echo(f"cdi-agent: {error.summary}:", err=True)
        for fault in error.faults:
            click.echo(f"  {fault}", err=True)
    else:
        click.echo(f"cdi-agent: {error.sentence}", err=True)
    if error.hint is not None:
        click.echo(f"  hint: {error.hint}", err=True)
