"""``cdi-agent scan``: what this host has, what would be published, and why not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from agent import compose, config
from agent.cli.options import config_option, output_option
from agent.cli.output import columns, echo_json, good, heading, log_to_stderr, notable
from agent.cli.preview import Preview, preview
from agent.errors import AgentError, ExitCode
from agent.host import capture as captures
from agent.host.model import Address, Function, address_order
from agent.reconcile.news import news
from agent.reconcile.state import State

PUBLISH = "publish"
OTHER = "other"
"""The state of a function that nobody asked about; shown with ``--all``."""


class CaptureWriteError(AgentError):
    """The facts of this host could not be written to the file that was asked for."""

    code = "capture-write"
    exit_code = ExitCode.CANNOT_CREATE


@click.command("scan")
@config_option
@output_option
@click.option("--all", "everything", is_flag=True, help="Show every PCI function.")
@click.option(
    "--capture",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write the facts of this host to a file (- for standard output), for a bug report or a "
    "test. No serial numbers, no names.",
)
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Look at a captured host instead of this one.",
)
def command(
    config_path: Path | None,
    output: str,
    capture: str | None,
    source: Path | None,
    *,
    everything: bool,
) -> None:
    """Show what this host has, what would be published, and why not.

    Reads only; needs no root.
    """
    if capture is not None and output == "json":
        raise click.UsageError("--capture writes YAML: -o json cannot be given with it")
    parts = compose.parts(config.load(config_path))
    inventory = None if source is None else captures.load(source).inventory()
    with log_to_stderr():
        seen = preview(parts, inventory)
    if capture is not None:
        _write_capture(seen, capture)
        return
    rows = _rows(seen)
    if everything:
        rows += _others(seen, {row.address for row in rows})
        rows.sort(key=_order)
    if output == "json":
        echo_json(
            {
                "devices": [row.document(seen) for row in rows],
                "environment": msgspec.to_builtins(seen.inventory.environment),
                "foreign": msgspec.to_builtins(seen.disk.foreign),
            }
        )
        return
    _print(seen, rows)


class _Row(msgspec.Struct, frozen=True):
    """One device in one kind, or what is nobody's."""

    address: Address | None
    state: str
    kind: str | None = None
    name: str | None = None
    nodes: tuple[str, ...] = ()
    """Of the entry, if there is one; else of the function."""
    detail: str = ""

    @property
    def device(self) -> str:
        if self.address is None:
            return " ".join(self.nodes)
        return f"{self.kind}={self.name}" if self.name is not None else self.kind or "-"

    def document(self, seen: Preview) -> dict[str, Any]:
        function = None if self.address is None else seen.inventory.functions.get(self.address)
        facts = {} if function is None else _facts(function)
        return {**facts, **msgspec.structs.asdict(self)}


def _rows(seen: Preview) -> list[_Row]:
    """Everything that a profile or a person asks about, in order of address."""
    offers = {(offer.kind, offer.address): offer for offer in seen.desired.offers}
    rows = []
    for key, name in seen.plan.published.items():
        nodes = tuple(node.path for node in offers[key].device.edits.device_nodes)
        rows.append(_Row(key[1], PUBLISH, key[0], name, nodes))
    for withheld in seen.plan.withheld:
        function = seen.inventory.functions.get(withheld.address)
        offer = None if withheld.kind is None else offers.get((withheld.kind, withheld.address))
        rows.append(
            _Row(
                withheld.address,
                withheld.reason.value,
                withheld.kind,
                None if offer is None else offer.device.name,
                () if function is None else tuple(node.path for node in function.nodes),
                withheld.detail,
            )
        )
    rows += [
        _Row(None, node.reason.value, nodes=(node.path,), detail=node.detail)
        for node in seen.desired.nodes
    ]
    return sorted(rows, key=_order)


def _order(row: _Row) -> tuple[bool, tuple[int, str], str]:
    """By address; what has none comes last."""
    if row.address is None:
        return (True, (0, ""), "")
    return (False, address_order(row.address), row.kind or "")


def _others(seen: Preview, told: set[Address | None]) -> Iterator[_Row]:
    for address, function in seen.inventory.functions.items():
        if address not in told:
            yield _Row(address, OTHER, nodes=tuple(node.path for node in function.nodes))


def _facts(function: Function) -> dict[str, object]:
    return {
        "id": function.pci_id,
        "class": f"0x{function.class_code:06x}",
        "driver": function.driver,
        "iommu_group": function.iommu_group,
        "numa_node": function.numa_node,
        "pcie_root": function.pcie_root,
        "physfn": function.physfn,
        "virtfns": list(function.virtfns),
    }


def _write_capture(seen: Preview, target: str) -> None:
    text = captures.dump(captures.capture(seen.inventory))
    if target == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CaptureWriteError(f"{target} cannot be written: {error.strerror}") from error
    click.echo(f"wrote {target}", err=True)


def _print(seen: Preview, rows: list[_Row]) -> None:
    """A block for each function: what it is, and below what becomes of it."""
    if not rows:
        click.echo(
            "This host has no device that could be published (--all shows every PCI function)."
        )
    lines = columns([(row.state, row.device, why) for row, why in _explained(rows)], indent="  ")
    shown: object = ()
    for row, line in zip(rows, lines, strict=True):
        if row.address != shown:
            click.echo(heading(_title(seen, row.address)))
            shown = row.address
        paint = good if row.state == PUBLISH else notable
        click.echo(line.replace(row.state, paint(row.state), 1))
    for remark in _remarks(seen):
        click.echo(notable(remark))


def _title(seen: Preview, address: Address | None) -> str:
    if address is None:
        return "no PCI function"
    function = seen.inventory.functions.get(address)
    if function is None:
        return address
    group = "none" if function.iommu_group is None else function.iommu_group
    return (
        f"{address}  {function.pci_id}  class {function.class_code:06x}  "
        f"driver {function.driver or 'none'}  IOMMU group {group}"
    )


def _explained(rows: list[_Row]) -> Iterator[tuple[_Row, str]]:
    """Each row with what there is to say of it; what is long, of many nodes alike, only once."""
    before: _Row | None = None
    for row in rows:
        alike = before is not None and row.address is None and row.detail == before.detail
        yield row, "as above" if alike else row.detail or " ".join(row.nodes) or "-"
        before = row


def _remarks(seen: Preview) -> Iterator[str]:
    """What is remarkable about the host and its spec directories."""
    after = State(
        inventory=seen.inventory,
        desired=seen.desired,
        disk=seen.disk,
        published=seen.plan.published,
        passes=1,
    )
    for item in news(State(), after):
        where = item.fields.get("path") or item.fields.get("device")
        yield f"{f'{where}: ' if where else ''}{item.fields.get('problem', item.event)}"
