"""Two instances never write at once."""

from pathlib import Path

import pytest

from agent.cli.lock import instance_lock
from agent.errors import AlreadyRunningError


def test_it_can_be_had_again_and_again_but_not_twice_at_once(tmp_path: Path) -> None:
    for _ in range(2):
        with instance_lock(tmp_path / "state", [tmp_path / "cdi"]):
            with (
                pytest.raises(AlreadyRunningError),
                instance_lock(tmp_path / "state", [tmp_path / "cdi"]),
            ):
                pass
            # The second attempt has taken nothing away from the first.
            with (
                pytest.raises(AlreadyRunningError),
                instance_lock(tmp_path / "state", [tmp_path / "cdi"]),
            ):
                pass


def test_what_goes_wrong_under_the_lock_is_no_other_instance(tmp_path: Path) -> None:
    """An error that looks like a lock that is taken is told as what it is."""
    full = BlockingIOError("a full pipe")
    with (
        pytest.raises(BlockingIOError) as caught,
        instance_lock(tmp_path / "state", [tmp_path / "cdi"]),
    ):
        raise full
    assert caught.value is full


def test_without_a_state_directory_the_work_goes_on(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    done = False
    with instance_lock(tmp_path / "state", [tmp_path / "cdi"]):
        done = True
    assert done


@pytest.mark.parametrize("exists", [True, False], ids=["that is there", "that is missing"])
def test_two_states_do_not_share_one_directory_for_specs(tmp_path: Path, *, exists: bool) -> None:
    if exists:
        (tmp_path / "cdi").mkdir()
    with (
        instance_lock(tmp_path / "one", [tmp_path / "cdi"]),
        pytest.raises(AlreadyRunningError, match=r"/cdi\Z"),
        instance_lock(tmp_path / "two", [tmp_path / "cdi"]),
    ):
        pass
    with instance_lock(tmp_path / "two", [tmp_path / "cdi"]):
        pass
    assert list((tmp_path / "cdi").iterdir()) == []


def test_a_directory_that_is_taken_later_is_held_as_the_first_one_and_with_it(
    tmp_path: Path,
) -> None:
    with instance_lock(tmp_path / "one", [tmp_path / "cdi"]) as lock:
        lock.take_specs([tmp_path / "new"])
        for directory in ("cdi", "new"):
            with (
                pytest.raises(AlreadyRunningError),
                instance_lock(tmp_path / "two", [tmp_path / directory]),
            ):
                pass
        with (
            instance_lock(tmp_path / "two", [tmp_path / "other"]),
            pytest.raises(AlreadyRunningError, match=r"/other\Z"),
        ):
            lock.take_specs([tmp_path / "other"])
    with instance_lock(tmp_path / "two", [tmp_path / "new"]):
        pass


def test_a_directory_under_another_name_is_no_other_directory(tmp_path: Path) -> None:
    """As /var/run/cdi is /run/cdi."""
    (tmp_path / "run").mkdir()
    (tmp_path / "var-run").symlink_to("run")
    with instance_lock(tmp_path / "state", [tmp_path / "run/cdi"]) as lock:
        lock.take_specs([tmp_path / "var-run/cdi"])


@pytest.mark.parametrize(
    ("one", "two"),
    [(("cdi", "etc"), ("etc", "cdi")), (("cdi", "etc"), ("mine", "cdi"))],
    ids=["each where the other looks", "one where the other looks"],
)
def test_nobody_writes_where_another_instance_looks(
    tmp_path: Path, one: tuple[str, ...], two: tuple[str, ...]
) -> None:
    """Each would take the other's files for left over, and delete them."""
    with (
        instance_lock(tmp_path / "one", [tmp_path / name for name in one]),
        pytest.raises(AlreadyRunningError) as caught,
        instance_lock(tmp_path / "two", [tmp_path / name for name in two]),
    ):
        pass
    assert caught.value.sentence == f"another cdi-agent holds {tmp_path}/cdi"
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("another cdi.other_directories")


def test_a_directory_that_is_only_looked_into_is_not_made(tmp_path: Path) -> None:
    with instance_lock(tmp_path / "state", [tmp_path / "cdi", tmp_path / "etc"]):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cdi", "state"]
