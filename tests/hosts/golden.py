"""What follows from a captured host, as its golden file keeps it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from agent.cdi.desired import desired
from agent.cdi.files import file_name
from agent.cdi.offers import Policy
from agent.cdi.profile import shared_paths
from agent.cdi.profiles import load_builtin
from agent.errors import CaptureError
from agent.host import capture
from agent.host.hints import EVERYTHING
from agent.host.model import Inventory
from agent.host.scan import Scanner
from agent.simulate import captured, stat_plain
from tests.cdi.worlds import sheets

HERE = Path(__file__).parent


def look(host: capture.Capture, root: Path) -> Inventory:
    """Look at the simulated host that a capture becomes."""
    captured.load(host, root, lambda _message: None)
    return Scanner(
        sys=root / "sys",
        dev=root / "dev",
        run=root / "run",
        proc=root / "proc",
        stat_node=stat_plain,
        extra_nodes=tuple(shared_paths(load_builtin())),
    ).scan(EVERYTHING, Inventory())


def outcome(inventory: Inventory) -> Iterator[str]:
    """What follows from the facts: each spec file, then what is withheld and why."""
    wanted = desired(inventory, load_builtin(), (), Policy())
    for kind, sheet in sheets(wanted.offers).items():
        yield f"==> {file_name(kind)} <==\n{sheet.content.decode()}\n"
    yield "==> withheld <==\n"
    for withheld in wanted.withheld:
        who = f"{withheld.address} {withheld.kind or ''}".rstrip()
        yield f"{who}: {withheld.reason}: {withheld.detail}\n"
    for node in wanted.nodes:
        yield f"{node.path}: {node.reason}: {node.detail}\n"


def write_all(folder: Path, scratch: Path) -> None:
    """Write the golden file of every captured host; of one that cannot be read its test tells."""
    for path in sorted(folder.glob("*.yaml")):
        with contextlib.suppress(CaptureError):
            host = capture.load(path)
            text = "".join(outcome(look(host, scratch / path.stem)))
            path.with_suffix(".golden").write_text(text)
