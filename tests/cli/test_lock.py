"""Two instances never write at once."""

from pathlib import Path

import pytest

from agent.cli.lock import instance_lock
from agent.errors import AlreadyRunningError


def test_it_can_be_had_again_and_again_but_not_twice_at_once(tmp_path: Path) -> None:
    for _ in range(2):
        with instance_lock(tmp_path / "state"):
            with pytest.raises(AlreadyRunningError), instance_lock(tmp_path / "state"):
                pass
            # The second attempt has taken nothing away from the first.
            with pytest.raises(AlreadyRunningError), instance_lock(tmp_path / "state"):
                pass


def test_what_goes_wrong_under_the_lock_is_no_other_instance(tmp_path: Path) -> None:
    """An error that looks like a lock that is taken is told as what it is."""
    full = BlockingIOError("a full pipe")
    with pytest.raises(BlockingIOError) as caught, instance_lock(tmp_path / "state"):
        raise full
    assert caught.value is full


def test_without_a_state_directory_the_work_goes_on(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    done = False
    with instance_lock(tmp_path / "state"):
        done = True
    assert done
