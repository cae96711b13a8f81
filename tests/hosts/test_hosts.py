"""Every captured host in this folder, against what was published for it before.

README.md tells how a capture becomes a test. A host is loaded into the simulated kernel and looked
at there, so what is shown goes from files in /sys to the bytes of a spec.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agent.cdi.desired import desired
from agent.cdi.files import file_name
from agent.cdi.offers import Policy
from agent.cdi.profile import shared_paths
from agent.cdi.profiles import load_builtin
from agent.host import capture
from agent.host.hints import EVERYTHING
from agent.host.model import Inventory
from agent.host.scan import Scanner
from agent.simulate import captured, stat_plain
from tests.cdi.worlds import sheets

HERE = Path(__file__).parent
HOSTS = sorted(HERE.glob("*.yaml"))
WRITE = os.environ.get("GOLDEN") == "write"


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


@pytest.mark.parametrize("path", HOSTS, ids=lambda path: path.stem)
def test_a_captured_host_gets_the_specs_that_are_kept_beside_it(path: Path, tmp_path: Path) -> None:
    text = "".join(outcome(look(capture.load(path), tmp_path / "host")))
    golden = path.with_suffix(".golden")
    if WRITE:
        golden.write_text(text)
    assert golden.exists(), "run once with GOLDEN=write, and read what it wrote"
    assert text == golden.read_text()


@pytest.mark.parametrize("path", HOSTS, ids=lambda path: path.stem)
def test_a_captured_host_looks_the_same_when_it_is_built_again(path: Path, tmp_path: Path) -> None:
    host = capture.load(path)
    again = capture.capture(
        look(host, tmp_path / "host"), description=host.description, kernel=host.kernel
    )
    # Of a function that could not be read nothing is known that could be built.
    assert again.inventory() == msgspec.structs.replace(host, dropped=()).inventory()


def test_every_golden_file_has_its_host() -> None:
    assert {path.stem for path in HERE.glob("*.golden")} == {path.stem for path in HOSTS}
    assert HOSTS
