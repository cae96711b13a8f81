"""Every captured host in this folder, against what was published for it before.

README.md tells how a capture becomes a test. A host is loaded into the simulated kernel and looked
at there, so what is shown goes from files in /sys to the bytes of a spec.
"""

import shutil
from pathlib import Path

import msgspec
import pytest

from agent.host import capture
from tests.hosts.golden import HERE, look, outcome, write_all

HOSTS = sorted(HERE.glob("*.yaml"))


@pytest.mark.parametrize("path", HOSTS, ids=lambda path: path.stem)
def test_a_captured_host_gets_the_specs_that_are_kept_beside_it(path: Path, tmp_path: Path) -> None:
    text = "".join(outcome(look(capture.load(path), tmp_path / "host")))
    golden = path.with_suffix(".golden")
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


def test_a_host_that_is_put_into_the_folder_gets_its_golden_file(tmp_path: Path) -> None:
    """And one that cannot be read keeps no other one from it."""
    (folder := tmp_path / "hosts").mkdir()
    (folder / "a-torn-one.yaml").write_text("version: 1\nfunctions: [")
    shutil.copy(HERE / "bmc-only.yaml", folder / "new.yaml")
    write_all(folder, tmp_path / "scratch")
    assert [path.name for path in folder.glob("*.golden")] == ["new.golden"]
    assert (folder / "new.golden").read_text() == (HERE / "bmc-only.golden").read_text()
