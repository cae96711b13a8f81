"""The commands that talk to a running agent: what they ask goes over its control socket.

What a claim is asked for with is checked by the agent, not here; its words are passed on. A refusal
is printed as the agent's sentence and hint, and ends with a code of its own.
"""

import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click

from agent import config
from agent.cdi.entry import address_in_name
from agent.cdi.rules import ALL
from agent.cli.options import Duration, config_option, output_option
from agent.cli.output import columns, echo_json, good, heading, notable
from agent.control.client import call
from agent.errors import AgentError, ExitCode

Document = dict[str, Any]

DONE: Final = "done"
"""The phase of a claim that is in force."""
IN_FORCE: Final = "in force"
"""What people are told of it: `done` would read as though it were over."""


class RefusedError(AgentError):
    """The agent did not do what it was asked; the sentence and the hint are its own."""

    code = "refused"
    exit_code = ExitCode.FAILURE


class RefusedForNowError(RefusedError):
    """As ``RefusedError``; the same may be possible later."""

    retryable = True
    exit_code = ExitCode.TEMPORARY


def _ask(config_path: Path | None, method: str, route: str, body: object = None) -> Document:
    """Ask the agent; its document.

    Raises:
        AgentError: No agent takes orders, or it refused.
    """
    path = config.load(config_path).control.socket
    if path is None:
        raise AgentError("this configuration has no control socket", hint="see control.socket")
    status, document = call(path, method, route, body)
    problems = document.get("problems")
    if status < 400 or not problems:  # noqa: PLR2004 - the first status of an error
        return document
    first, *others = problems
    for other in others:
        click.echo(f"cdi-agent: {other['sentence']} ({other['code']})", err=True)
        if other["hint"] is not None:
            click.echo(f"  hint: {other['hint']}", err=True)
    kind = RefusedForNowError if first["retryable"] else RefusedError
    raise kind(f"{first['sentence']} ({first['code']})", hint=first["hint"])


def _quoted(text: str) -> str:
    # What is no text goes as the bytes that were typed, for the agent to refuse.
    return urllib.parse.quote(text, safe="", errors="surrogateescape")


# --- claims ---------------------------------------------------------------------------------------


@click.command("claim")
@click.argument("claim_id", metavar="ID")
@click.argument("devices", nargs=-1, required=True)
@config_option
@output_option
@click.option("--mode", type=click.Choice(["vfio", "drm"]), default="vfio", show_default=True)
@click.option("--dry-run", is_flag=True, help="Run every check and say what would be moved.")
@click.option(
    "--with",
    "named",
    multiple=True,
    metavar="ADDRESS",
    help="Another function of the IOMMU group that may be moved too; may be given several times. "
    "The API and the configuration call these `named`.",
)
@click.option("--driver", help="The VFIO driver, instead of the best one there is.")
@click.option(
    "--force",
    is_flag=True,
    help="Take even the display of the console, and a device whose users are not to be seen.",
)
@click.option("--from-vfio", is_flag=True, help="With --mode drm: take a device off VFIO.")
@click.option(
    "--lease",
    type=Duration(),
    help="Release it after this time (90, 90s, 5m, 1h) unless it is claimed again.",
)
@click.option(
    "--owner-pid", type=click.IntRange(min=1), help="Release it when this process has ended."
)
def claim(  # noqa: PLR0913 - one argument for each option
    claim_id: str,
    devices: Sequence[str],
    *,
    config_path: Path | None,
    output: str,
    mode: str,
    named: Sequence[str],
    driver: str | None,
    lease: float | None,
    owner_pid: int | None,
    dry_run: bool,
    force: bool,
    from_vfio: bool,
) -> None:
    """Hold DEVICES in a mode until they are released; all of them or none.

    DEVICES are PCI addresses, or names of published devices (intel.com/gpu=…). ID is a name of your
    choice. The same claim again changes nothing and is answered as before. Prints the CDI names
    under which the devices are published now.
    """
    body: Document = {
        "devices": list(devices),
        "mode": mode,
        "named": list(named),
        "driver": driver,
        "force": force,
        "from_vfio": from_vfio,
        "dry_run": dry_run,
        "lease": lease,
        "owner_pid": owner_pid,
    }
    document = _ask(config_path, "PUT", f"/v1/claims/{_quoted(claim_id)}", body)
    if output == "json":
        echo_json(document)
    elif dry_run:
        for move in document["moves"]:
            along = " (moves along)" if move["companion"] else ""
            click.echo(
                f"{move['address']}: {move['before'] or 'no driver'} -> "
                f"{move['after'] or 'the driver that the kernel prefers'}{along}"
            )
        if not document["moves"]:
            click.echo("nothing would be moved")
    else:
        for name in document["names"]:
            click.echo(name)


@click.command("release")
@click.argument("claim_id", metavar="ID")
@config_option
@output_option
@click.option(
    "--force",
    is_flag=True,
    help="Even while a process holds a node of it open, or another claim needs its IOMMU group.",
)
def release(claim_id: str, config_path: Path | None, output: str, *, force: bool) -> None:
    """Give the devices of a claim back; success if there is no such claim.

    If a process still uses them, or another claim needs their IOMMU group, it says so; the devices
    go back as soon as that has ended.
    """
    query = "?force=true" if force else ""
    document = _ask(config_path, "DELETE", f"/v1/claims/{_quoted(claim_id)}{query}")
    if output == "json":
        echo_json(document)


@click.command("claims")
@config_option
@output_option
def claims(config_path: Path | None, output: str) -> None:
    """Show who holds which devices, and what is stranded or hangs.

    LEASE is the time after which the claim ends by itself, OWNER the process with which it ends.
    """
    document = _ask(config_path, "GET", "/v1/claims")
    if output == "json":
        echo_json(document)
        return
    rows = [
        (
            claimed["id"],
            claimed["mode"],
            IN_FORCE if claimed["phase"] == DONE else claimed["phase"],
            _age(claimed["age_seconds"]),
            "-" if claimed["expires_in_seconds"] is None else _age(claimed["expires_in_seconds"]),
            "-" if claimed["owner_pid"] is None else f"pid {claimed['owner_pid']}",
            claimed["client"] or "-",
            " ".join(function["address"] for function in claimed["functions"]),
        )
        for claimed in document["claims"]
    ]
    if rows:
        header = ("ID", "MODE", "PHASE", "AGE", "LEASE", "OWNER", "CLIENT", "FUNCTIONS")
        lines = columns([header, *rows])
        click.echo(heading(lines[0]))
        for line, claimed in zip(lines[1:], document["claims"], strict=True):
            click.echo(line)
            if claimed["phase"] != DONE:
                click.echo(f"  {claimed['explanation']}")
    else:
        click.echo("nothing is claimed")
    for line in _left_behind(document):
        click.echo(notable(line))


def _left_behind(document: Document) -> Iterator[str]:
    for stray in document["stranded"]:
        where = f"{stray['address']} on {stray['driver'] or 'no driver'}"
        yield f"stranded: {where}: {stray['sentence']}"
        if stray["hint"]:
            yield f"  {stray['hint']}"
    for child in document["hung"]:
        yield f"hung: a write ({child['step']}) to {child['address']} has not returned"
    if document["paused"]:
        yield "paused: no claim begins to move a device; `cdi-agent resume` ends that"


def _terms(claimed: Document) -> Iterator[str]:
    """Whose a claim is, and when it ends by itself."""
    if claimed["client"]:
        yield f"of {claimed['client']}"
    if claimed["expires_in_seconds"] is not None:
        left = _age(claimed["expires_in_seconds"])
        yield f"ends in {left} unless it is claimed again"
    if claimed["owner_pid"] is not None:
        yield f"ends with process {claimed['owner_pid']}"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


@click.command("recover")
@click.argument("address")
@config_option
@output_option
@click.option("--dry-run", is_flag=True, help="Say what would be moved.")
@click.option(
    "--force",
    is_flag=True,
    help="Even if it is in use, another program moves it, or this agent did not move it.",
)
def recover(
    address: str, config_path: Path | None, output: str, *, dry_run: bool, force: bool
) -> None:
    """Bring a stranded device back to the driver that it came from."""
    flags = {"force": force, "dry_run": dry_run}
    query = "&".join(f"{name}=true" for name, given in flags.items() if given)
    document = _ask(config_path, "POST", f"/v1/recover/{_quoted(address)}?{query}")
    if output == "json":
        echo_json(document)
        return
    for move in document["moves"]:
        after = move["after"] or "the driver that the kernel prefers"
        click.echo(f"{move['address']}: {move['before'] or 'no driver'} -> {after}")
    if not dry_run:
        click.echo(good(f"{address} is where it belongs"))
    elif not document["moves"]:
        click.echo("nothing would be moved")


@click.command("pause")
@config_option
def pause(config_path: Path | None) -> None:
    """Let no claim begin to move a device; specs are kept true all the same.

    It ends with `resume`, and when the service is started again.
    """
    _ask(config_path, "POST", "/v1/pause")


@click.command("resume")
@config_option
def resume(config_path: Path | None) -> None:
    """Let claims move devices again."""
    _ask(config_path, "POST", "/v1/resume")


# --- questions ------------------------------------------------------------------------------------


@click.command("status")
@config_option
@output_option
def status(config_path: Path | None, output: str) -> int:
    """Show how the running agent is; ends with 1 if it is not healthy."""
    document = _ask(config_path, "GET", "/v1/status")
    if output == "json":
        echo_json(document)
    else:
        word = good("healthy") if document["healthy"] else notable("not healthy")
        click.echo(f"cdi-agent {document['version']}: {word}")
        for problem in document["problems"]:
            click.echo(notable(f"  {problem}"))
        sources = [f"{name} is {state}" for name, state in document["sources"].items()]
        devices = _ask(config_path, "GET", "/v1/devices")["devices"]
        withheld = [
            (row["address"], row["kind"] or "-", row["reason"], row["detail"])
            for row in devices
            if row["reason"] is not None
        ]
        published = [f"{kind}: {count}" for kind, count in document["published"].items()]
        rows = [
            ("published", ", ".join(published) or "nothing"),
            ("withheld", str(len(withheld)) if withheld else "nothing"),
            ("claims", str(document["claims"]) + (" (paused)" if document["paused"] else "")),
            ("stranded", ", ".join(document["stranded"]) or "none"),
            ("hung", ", ".join(document["hung"]) or "none"),
            ("sources", ", ".join(sources) or "none"),
        ]
        for line in columns(rows, indent="  "):
            click.echo(line)
        if withheld:
            click.echo("withheld:")
        for line in columns(withheld, indent="  "):
            click.echo(line)
    return ExitCode.OK if document["healthy"] else ExitCode.FAILURE


def _address_of(config_path: Path | None, device: str) -> str:
    """The address of a device that is called by its CDI name, as in an engine's message.

    Raises:
        AgentError: No agent answers, or the name tells nothing.
    """
    kind, equals, name = device.rpartition("=")
    if not equals:
        return device
    for row in _ask(config_path, "GET", "/v1/devices")["devices"]:
        if (row["kind"], row["name"]) == (kind, name):
            return str(row["address"])
    if (address := address_in_name(name)) is not None:
        return address  # withheld, which is why an engine does not find it
    what = "every device of its kind" if name == ALL else "the name of no published device"
    raise AgentError(
        f"{device} is {what}", hint="`cdi-agent scan` shows the address of each device"
    )


@click.command("explain")
@click.argument("device")
@config_option
@output_option
def explain(device: str, config_path: Path | None, output: str) -> None:
    """Say all that the running agent knows of a function, and what it waits for.

    DEVICE is a PCI address, or a CDI name (intel.com/gpu=…) as a container engine's message has it,
    whether it is published or not.
    """
    address = _address_of(config_path, device)
    document = _ask(config_path, "GET", f"/v1/explain/{_quoted(address)}")
    if output == "json":
        echo_json(document)
        return
    group = document["iommu_group"]
    click.echo(
        heading(
            f"{document['address']}  {document['id'] or 'unreadable'}  "
            f"driver {document['driver'] or 'none'}  "
            f"IOMMU group {'none' if group is None else group}"
        )
    )
    for node in document["nodes"]:
        udev = "" if node["settled"] else ", udev has not dealt with it"
        click.echo(f"  {node['path']}: {node['state']}{udev}")
    for row in document["devices"]:
        name = f"{row['kind'] or 'no kind'}" + (f"={row['name']}" if row["name"] else "")
        detail = f" ({row['reason']}): {row['detail']}" if row["reason"] else ""
        click.echo(f"  {row['state']}: {name}{detail}")
    if document["claim"] is not None:
        claimed = document["claim"]
        click.echo(
            f"  claim {claimed['id']}: {'; '.join((claimed['explanation'], *_terms(claimed)))}"
        )
    if document["stranded"] is not None:
        click.echo(notable(f"  stranded: {document['stranded']['sentence']}"))
        click.echo(f"    {document['stranded']['hint']}")
    if document["hung"]:
        click.echo(notable("  a write to it has not returned; it is left alone until it does"))
    if document["cooling_down"]:
        click.echo("  it could not be moved a moment ago, and is left alone for now")
