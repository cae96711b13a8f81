"""Two instances never write at once."""

import contextlib
import errno
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent.cli.lock import SPECS_LOCK, STATE_LOCK, instance_lock
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
    with instance_lock(tmp_path / "two", [tmp_path / "cdi"], tidy=True):
        pass
    assert list((tmp_path / "cdi").iterdir()) == []


def test_a_command_deletes_its_own_lock_file_and_no_other(tmp_path: Path) -> None:
    """Not the one that another instance has by now, nor that of the state directory."""
    with contextlib.ExitStack() as other:
        with instance_lock(tmp_path / "one", [tmp_path / "cdi"], tidy=True):
            (tmp_path / "cdi" / SPECS_LOCK).unlink()
            other.enter_context(instance_lock(tmp_path / "two", [tmp_path / "cdi"]))
        with (
            pytest.raises(AlreadyRunningError),
            instance_lock(tmp_path / "three", [tmp_path / "cdi"]),
        ):
            pass
    assert (tmp_path / "one" / STATE_LOCK).exists()


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


def test_who_is_refused_leaves_no_directory_behind(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    with instance_lock(tmp_path / "one", [tmp_path / "cdi", tmp_path / "seen"]):
        before = sorted(tmp_path.iterdir())
        for state, directories in (
            ("new/state", ["cdi"]),
            ("new/state", ["new/cdi", "seen"]),
            ("one", ["new/cdi"]),
        ):
            with (
                pytest.raises(AlreadyRunningError),
                instance_lock(tmp_path / state, [tmp_path / each for each in directories]),
            ):
                pass
            assert sorted(tmp_path.iterdir()) == before


def test_a_directory_that_is_only_looked_into_is_not_made(tmp_path: Path) -> None:
    with instance_lock(tmp_path / "state", [tmp_path / "cdi", tmp_path / "etc"]):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cdi", "state"]


@contextlib.contextmanager
def somebody_else(*paths: Path) -> Iterator[None]:
    """A local user who locks whatever it can open."""
    script = (
        "import fcntl, os, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "for path in sys.argv[1:]:\n"
        "    for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT):\n"
        "        try: fcntl.flock(os.open(path, flags), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "        except OSError: pass\n"
        "print(flush=True); sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", script, *map(str, paths)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_no_other_user_can_keep_an_instance_from_starting() -> None:
    """Whoever may read a directory may lock it, and a file that it may read too."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        state, cdi = Path(folder, "state"), Path(folder, "cdi")
        with instance_lock(state, [cdi]):
            pass
        locks = (cdi / SPECS_LOCK, state / STATE_LOCK)
        assert [stat.S_IMODE(path.stat().st_mode) for path in locks] == [0o600] * 2
        with somebody_else(cdi, state, *locks), instance_lock(state, [cdi]):
            pass


def test_an_instance_leaves_a_file_that_the_next_one_uses(tmp_path: Path) -> None:
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi" / SPECS_LOCK).touch(0o644)
    with instance_lock(tmp_path / "state", [tmp_path / "cdi"]):
        pass
    status = (tmp_path / "cdi" / SPECS_LOCK).stat()
    assert (stat.S_IMODE(status.st_mode), status.st_size) == (0o600, 0)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _of_another(path: Path) -> None:
    path.touch()
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    ("put", "why"),
    [
        pytest.param(lambda path: path.symlink_to("victim"), "it is a symbolic link", id="link"),
        pytest.param(lambda path: path.mkdir(), "Is a directory", id="directory"),
        pytest.param(_fifo, "it is no regular file", id="fifo"),
        pytest.param(
            _of_another,
            "it belongs to user 65534",
            id="of another",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_what_is_no_lock_file_is_left_alone_and_said(
    tmp_path: Path, put: Callable[[Path], object], why: str
) -> None:
    """It keeps nobody from starting, and nothing is made or changed through it."""
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi/victim").touch(0o644)
    path = tmp_path / "cdi" / SPECS_LOCK
    put(path)
    before = path.lstat()
    with capture_logs() as logs, instance_lock(tmp_path / "state", [tmp_path / "cdi"]):
        pass
    assert [(entry["event"], entry["path"]) for entry in logs] == [("no-lock", str(path))]
    assert why in logs[0]["problem"]
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_uid) == (
        before.st_ino,
        before.st_mode,
        before.st_uid,
    )
    assert stat.S_IMODE((tmp_path / "cdi/victim").stat().st_mode) == 0o644


def test_a_lock_file_that_is_deleted_while_one_waits_at_it_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or two would hold one directory: the one a file that has gone, the other the next."""
    flock = fcntl.flock
    path = tmp_path / "cdi" / SPECS_LOCK

    def too_late(fd: int, operation: int) -> None:
        flock(fd, operation)
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()

    with instance_lock(tmp_path / "one", [tmp_path / "etc"]) as one:
        monkeypatch.setattr(fcntl, "flock", too_late)
        one.take_specs([tmp_path / "cdi"])
        assert path.exists()
        with (
            pytest.raises(AlreadyRunningError),
            instance_lock(tmp_path / "two", [tmp_path / "cdi"]),
        ):
            pass


def test_a_directory_that_cannot_be_written_is_only_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a read-only /etc: nobody is told, since nobody can write there."""

    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / "etc").mkdir()
    with instance_lock(tmp_path / "state", [tmp_path / "cdi"]) as lock, capture_logs() as logs:
        monkeypatch.setattr("agent.cli.lock._open", read_only)
        lock.take_specs([tmp_path / "cdi", tmp_path / "etc"])
    assert logs == []
