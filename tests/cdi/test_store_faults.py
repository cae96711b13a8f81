"""The store where it is killed, and where the file system refuses: real processes, real mounts."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

import pytest

from agent.cdi.files import DeleteSpec
from tests.cdi.stores import NAME, Place, consume, content_of
from tests.cdi.test_store import DELETE_STEPS, REWRITE_STEPS, WRITE_STEPS

ROOT = Path(__file__).parents[2]
"""Where the package of tests lies; the agent may be installed elsewhere."""

CHILD = (sys.executable, "-m", "tests.cdi.store_child")


def run_child(
    *arguments: str | Path, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, *CHILD, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


# --- kill -9 at each step -------------------------------------------------------------------------


def start_again(place: Place) -> None:
    """Do what the first pass of the next process does: clean up, and write what is wanted."""

    async def first_pass() -> None:
        store = place.store()
        disk = await asyncio.to_thread(store.read)
        for path in disk.leftovers:
            await store.apply(DeleteSpec(path, None))
        await store.apply(place.write(1, 2))

    asyncio.run(first_pass())
    assert place.path.read_bytes() == content_of(1, 2)
    assert place.names() == [NAME]
    assert sorted(os.listdir(place.state)) == ["specs.json"]
    disk = place.store().read()
    assert list(disk.ours) == [str(place.path)]
    assert (disk.leftovers, disk.foreign) == ((), ())


OLD = {"card1": NAME}
NEW = {"card1": NAME, "card2": NAME}

KILLS = [
    *(pytest.param(False, "write", step, id=f"first-write-{step}") for step in WRITE_STEPS),
    *(pytest.param(True, "write", step, id=f"rewrite-{step}") for step in REWRITE_STEPS),
    *(pytest.param(True, "delete", step, id=f"delete-{step}") for step in DELETE_STEPS),
]


@pytest.mark.parametrize(("published", "action", "step"), KILLS)
def test_killed_at_any_step_a_reader_sees_the_old_or_the_new(
    tmp_path: Path, action: str, step: str, *, published: bool
) -> None:
    """Never anything empty, partial, invalid or double; and the next start puts it right."""
    place = Place(tmp_path)
    place.directory.mkdir(parents=True)
    if published:
        asyncio.run(place.store().apply(place.write(1)))
    child = run_child("killed", tmp_path, action, step)
    assert child.returncode == -signal.SIGKILL, child.stderr
    if step in ("renamed", "directory-synced", "unlinked"):
        assert consume(place.directory) == (NEW if action == "write" else {})
    else:
        assert consume(place.directory) == (OLD if published else {})
    start_again(place)


# --- a file system that refuses -------------------------------------------------------------------


class Outcome(TypedDict):
    """What the child prints."""

    sentences: list[str]
    names: list[str]


def refused(*arguments: str | Path, before: tuple[str, ...] = ()) -> Outcome:
    child = run_child("refused", *arguments, before=before)
    assert child.returncode == 0, child.stderr
    outcome: Outcome = json.loads(child.stdout.splitlines()[-1])
    return outcome


def on_a_small_tmpfs(root: Path) -> tuple[str, ...]:
    """What starts a program whose ``root`` is a file system of 64 KiB of its own."""
    script = f'mount -t tmpfs -o size=64k,mode=755 tmpfs {root} && exec "$0" "$@"'
    return ("unshare", "--mount", "sh", "-c", script)


def test_a_limit_on_file_sizes_is_reported_and_leaves_nothing_partial(tmp_path: Path) -> None:
    outcome = refused(tmp_path, "file-size")
    kept, deleted = outcome["sentences"]
    path = f"{tmp_path}/run/cdi/{NAME}"
    assert kept == f"cannot write {path}: file too large (EFBIG)"
    assert deleted == f"{kept}; the file was deleted, as it gave a node to the wrong device"
    assert outcome["names"] == []


@pytest.mark.netns
def test_a_full_disk_is_reported_and_old_entries_can_still_go(tmp_path: Path) -> None:
    outcome = refused(tmp_path, "full", before=on_a_small_tmpfs(tmp_path))
    kept, deleted = outcome["sentences"]
    assert kept.endswith(f"{NAME}: no space left on device (ENOSPC)")
    assert deleted.endswith("; the file was deleted, as it gave a node to the wrong device")
    assert outcome["names"] == []


@pytest.mark.netns
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        pytest.param("read-only", "read-only file system (EROFS)", id="EROFS"),
        pytest.param("unprivileged", "permission denied (EACCES)", id="EACCES"),
    ],
)
def test_a_directory_that_cannot_be_written_is_reported(
    tmp_path: Path, how: str, reason: str
) -> None:
    """Then the old file can be neither replaced nor deleted, and both sentences say so."""
    # Somewhere that nobody may reach too, which a test's own folder is not.
    root = Path("/mnt")
    outcome = refused(root, how, before=on_a_small_tmpfs(root))
    path = f"/mnt/run/cdi/{NAME}"
    assert outcome["sentences"] == [
        f"cannot write {path}: {reason}",
        f"cannot delete {path}: {reason}",
    ]
    assert outcome["names"] == [NAME]
