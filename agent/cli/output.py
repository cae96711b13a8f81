"""How results look: aligned columns for people, JSON for programs.

Colour is click's, which leaves it out where standard output is no terminal. Columns are never cut
or folded: what a command prints can be searched, copied and piped.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence

import click
import msgspec

from agent.observe import log as logs
from agent.observe.settings import LogSettings

QUIET: LogSettings = LogSettings(level="warning")
"""For a command whose output is the answer: of the log only what somebody has to know."""


@contextlib.contextmanager
def log_to_stderr(settings: LogSettings = QUIET) -> Iterator[None]:
    """Send the log to standard error while a command works; its results go to standard output."""
    log = logs.configure(settings, environ=os.environ)
    try:
        yield
    finally:
        logs.reset()
        log.close()


def columns(rows: Sequence[Sequence[str]], *, indent: str = "") -> list[str]:
    """Align cells to columns two blanks apart; the last cell of a row is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    return [
        indent
        + "  ".join(
            [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)] + [row[-1]]
        ).rstrip()
        for row in rows
    ]


def good(text: str) -> str:
    """What is as it should be."""
    return click.style(text, fg="green")


def notable(text: str) -> str:
    """What somebody may want to look at."""
    return click.style(text, fg="yellow")


def heading(text: str) -> str:
    """What the following lines are about."""
    return click.style(text, bold=True)


def echo_json(document: object) -> None:
    """Print a document of plain values for a program."""
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
