"""``cdi-agent generate``: bring the CDI specs up to date once, or show what that would do."""

import asyncio
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
from msgspec import structs

from agent import compose, config
from agent.cli.lock import instance_lock
from agent.cli.options import config_option
from agent.cli.output import log_to_stderr
from agent.cli.preview import preview
from agent.errors import ExitCode
from agent.reconcile.messages import Inbox
from agent.reconcile.reconciler import Reconciler


@click.command("generate")
@config_option
@click.option("--dry-run", is_flag=True, help="Write nothing; say what would be done.")
@click.option("--diff", is_flag=True, help="Show how each file changes.")
@click.option("--delete", is_flag=True, help="Delete every spec file of ours instead.")
def command(config_path: Path | None, *, dry_run: bool, diff: bool, delete: bool) -> int:
    """Bring the CDI specs up to date once.

    For hosts without the service, and for images. Where the service runs, it does this all the
    time; the two cannot run at once.
    """
    settings = config.load(config_path)
    parts = compose.parts(settings)
    if delete:
        policy = structs.replace(parts.rules.policy, publish=False)
        parts = structs.replace(parts, rules=structs.replace(parts.rules, policy=policy))
    with log_to_stderr():
        seen = preview(parts)
    before = {path: file.content for path, file in seen.disk.ours.items()}
    if dry_run:
        if diff:
            _show_diff(before, seen.after)
        else:
            for action in seen.plan.actions:
                click.echo(action.describe())
        if not seen.plan.actions:
            click.echo("nothing to do", err=True)
        return ExitCode.OK

    with (
        log_to_stderr(settings.log),
        instance_lock(settings.state_directory, settings.cdi.directories, tidy=True),
    ):
        reconciler = Reconciler(
            inbox=Inbox(), scanner=parts.scanner, store=parts.store, rules=parts.rules
        )
        state = asyncio.run(reconciler.settle())
    if diff and state.disk is not None:
        _show_diff(before, {path: file.content for path, file in state.disk.ours.items()})
    return ExitCode.CANNOT_CREATE if state.problems else ExitCode.OK


def _show_diff(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
    for path in sorted({*before, *after}):
        for line in diff_lines(path, before.get(path), after.get(path)):
            click.echo(line)


def diff_lines(path: str, before: bytes | None, after: bytes | None) -> Iterator[str]:
    """A unified diff of one file; None is a file that is not there."""
    yield from difflib.unified_diff(
        _lines(before),
        _lines(after),
        path if before is not None else "/dev/null",
        path if after is not None else "/dev/null",
        lineterm="",
    )


def _lines(content: bytes | None) -> list[str]:
    return [] if content is None else content.decode(errors="replace").splitlines()
