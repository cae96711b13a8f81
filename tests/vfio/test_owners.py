"""A claim ends with the process that owns it, and with nothing else."""

from pathlib import Path

import pytest

from agent.host.model import HoldMode
from agent.vfio.model import Prepare, Record
from agent.vfio.owners import owners_gone
from agent.vfio.state import Claim, Claims
from tests.vfio.world import GPU

STAT = "77 (a vm) {} 1" + " 0" * 15 + " 1 0 {} 0\n"


def claims(pid: int | None, *, dry_run: bool = False) -> Claims:
    request = Prepare("vm", HoldMode.VFIO, (GPU,), owner_pid=pid, owner_started=4711)
    return Claims(live={"vm": Claim(Record(request, ()), (), dry_run=dry_run)})


@pytest.fixture
def stat(tmp_path: Path) -> Path:
    (tmp_path / "77").mkdir()
    return tmp_path / "77/stat"


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        pytest.param(STAT.format("S", 4711), False, id="runs"),
        pytest.param(STAT.format("Z", 4711), True, id="nobody has noticed its end"),
        pytest.param(STAT.format("S", 4712), True, id="its pid was given out again"),
    ],
)
def test_an_owner_is_a_pid_and_its_start(stat: Path, text: str, *, gone: bool) -> None:
    stat.write_text(text)
    assert owners_gone(claims(77), str(stat.parents[1])) == ({"vm"} if gone else set())


def test_an_owner_who_is_not_there_has_gone(tmp_path: Path) -> None:
    assert owners_gone(claims(78), str(tmp_path)) == {"vm"}


def test_an_owner_who_cannot_be_asked_after_has_not_gone(stat: Path) -> None:
    """An agent that is short of descriptors takes no device from a machine that runs."""
    stat.symlink_to("stat")
    assert owners_gone(claims(77), str(stat.parents[1])) == set()


def test_without_an_owner_nobody_can_have_gone(tmp_path: Path) -> None:
    assert owners_gone(claims(None), str(tmp_path)) == set()
    assert owners_gone(claims(78, dry_run=True), str(tmp_path)) == set()
