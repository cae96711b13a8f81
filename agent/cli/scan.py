"""``cdi-agent scan``: what this host has, what would be published, and why not."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.cli.options import config_option, output_option

if TYPE_CHECKING:
    from agent.cdi.spec import Kind
    from agent.cli.preview import Preview
    from agent.host.model import Address, Function


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
    from agent import compose, config
    from agent.cli.preview import preview
    from agent.host import capture as captures

    parts = compose.parts(config.load(config_path))
    inventory = None if source is None else captures.load(source).inventory()
    seen = preview(parts, inventory)
    if capture is not None:
        text = captures.dump(captures.capture(seen.inventory))
        if capture == "-":
            sys.stdout.write(text)
        else:
            Path(capture).write_text(text)
            click.echo(f"wrote {capture}", err=True)
        return
    rows = list(_rows(seen, everything=everything))
    if output == "json":
        import msgspec

        document = {
            "devices": rows,
            "environment": dataclasses.asdict(seen.inventory.environment),
            "foreign": [dataclasses.asdict(file) for file in seen.disk.foreign],
        }
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        _table(seen, rows)


def _rows(seen: "Preview", *, everything: bool) -> Iterator[Mapping[str, object]]:
    """One row for each device and kind, in order of address."""
    told: set[str] = set()
    names = {(offer.kind, offer.address): offer.device.name for offer in seen.desired.offers}
    outcomes: list[tuple[Address, Kind | None, str | None, str, str]] = [
        (address, kind, names[kind, address], "publish", "")
        for kind, address in seen.plan.published
    ]
    outcomes += [
        (w.address, w.kind, names.get((w.kind, w.address)) if w.kind else None, w.reason, w.detail)
        for w in seen.plan.withheld
    ]
    for address, kind, name, state, detail in sorted(
        outcomes, key=lambda row: (row[0], row[1] or "")
    ):
        told.add(address)
        function = seen.inventory.functions.get(address)
        yield {
            "address": address,
            **(_facts(function) if function is not None else {}),
            "kind": kind,
            "name": name,
            "state": str(state),
            "detail": detail,
        }
    for node in seen.desired.nodes:
        yield {
            "address": None,
            "nodes": [node.path],
            "kind": None,
            "name": None,
            "state": str(node.reason),
            "detail": node.detail,
        }
    if everything:
        for address, function in seen.inventory.functions.items():
            if address not in told:
                yield {"address": address, **_facts(function), "state": "other"}


def _facts(function: "Function") -> Mapping[str, object]:
    return {
        "id": function.pci_id,
        "class": f"0x{function.class_code:06x}",
        "driver": function.driver,
        "iommu_group": function.iommu_group,
        "numa_node": function.numa_node,
        "pcie_root": function.pcie_root,
        "physfn": function.physfn,
        "virtfns": list(function.virtfns),
        "nodes": [node.path for node in function.nodes],
    }


def _table(seen: "Preview", rows: list[Mapping[str, object]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not rows:
        console.print("No device that could be published.")
    else:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("address", "id", "driver", "group", "nodes", "device", "state"):
            table.add_column(heading, overflow="fold")
        for row in rows:
            nodes = row.get("nodes")
            device = f"{row['kind']}={row['name']}" if row.get("name") else row.get("kind") or ""
            published = row["state"] == "publish"
            state = Text(
                "publish" if published else str(row["state"]), "green" if published else "yellow"
            )
            if row.get("detail"):
                state.append(f"\n{row['detail']}", "dim")
            table.add_row(
                _text(row.get("address")),
                _text(row.get("id")),
                _text(row.get("driver")),
                _text(row.get("iommu_group")),
                Text("\n".join(map(str, nodes)) if isinstance(nodes, list) and nodes else "-"),
                Text(str(device) or "-"),
                state,
            )
        console.print(table)
    for line in _remarks(seen):
        console.print(Text(line, "yellow"))


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _remarks(seen: "Preview") -> Iterator[str]:
    """What is remarkable about the host and its spec directories."""
    from agent.reconcile.news import news
    from agent.reconcile.state import State

    after = State(
        inventory=seen.inventory,
        desired=seen.desired,
        disk=seen.disk,
        published=seen.plan.published,
        passes=1,
    )
    for item in news(State(), after):
        where = item.fields.get("path") or item.fields.get("device") or item.fields.get("kind")
        yield f"{f'{where}: ' if where else ''}{item.fields.get('problem', item.event)}"
