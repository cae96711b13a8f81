"""What takes long to make is there whole, or not at all."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guest.bundle import PROJECT
from tests.guest.cache import Cache, key_of


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    cache = Cache(tmp_path)
    yield cache
    cache.close()


def put(text: str, made: list[str]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        made.append(text)
        (folder / "file").write_text(text)

    return make


class StoppedError(Exception):
    """What interrupts a maker half-way."""


def test_a_thing_is_made_once(cache: Cache, tmp_path: Path) -> None:
    made: list[str] = []
    first = cache.get("thing", key_of("a"), put("a", made))
    cache.close()
    with_another = Cache(tmp_path)
    assert with_another.get("thing", key_of("a"), put("a", made)) == first
    with_another.close()
    assert made == ["a"]


def test_an_interrupted_make_leaves_nothing(cache: Cache, tmp_path: Path) -> None:
    def stopped_half_way(folder: Path) -> None:
        (folder / "file").write_text("half")
        raise StoppedError

    with pytest.raises(StoppedError):
        cache.get("thing", key_of("a"), stopped_half_way)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    folder = cache.get("thing", key_of("a"), put("whole", []))
    assert (folder / "file").read_text() == "whole"


@pytest.mark.parametrize("key", ["a", "b"], ids=["of the same", "of an older key"])
def test_what_a_killed_maker_left_is_swept(cache: Cache, tmp_path: Path, key: str) -> None:
    killed = (
        "import os, pathlib, signal, sys; from tests.guest.cache import Cache, key_of\n"
        "def make(folder):\n"
        "    (folder / 'file').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "Cache(pathlib.Path(sys.argv[1])).get('thing', key_of('a'), make)"
    )
    done = subprocess.run([sys.executable, "-c", killed, tmp_path], cwd=PROJECT, check=False)
    assert done.returncode == -9
    folder = cache.get("thing", key_of(key), put("whole", []))
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


def test_two_processes_use_the_same_thing_at_once(cache: Cache, tmp_path: Path) -> None:
    made: list[str] = []
    elsewhere = Cache(tmp_path)  # flock is about open files, not about processes
    mine, theirs = (each.get("thing", key_of("a"), put("a", made)) for each in (cache, elsewhere))
    elsewhere.close()
    assert (mine, made) == (theirs, ["a"])


def test_an_older_key_goes_when_a_newer_is_made(cache: Cache, tmp_path: Path) -> None:
    old = cache.get("thing", key_of("a"), put("a", []))
    other = cache.get("other", key_of("a"), put("a", []))
    cache.close()
    new = cache.get("thing", key_of("b"), put("b", []))
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == {other, new}
    assert not old.exists()


def test_an_older_key_stays_while_it_is_used(cache: Cache, tmp_path: Path) -> None:
    old = cache.get("thing", key_of("a"), put("a", []))
    elsewhere = Cache(tmp_path)
    elsewhere.get("thing", key_of("b"), put("b", []))
    elsewhere.close()
    assert old.is_dir()


def test_clear_removes_all_but_what_another_uses(cache: Cache, tmp_path: Path) -> None:
    mine = cache.get("mine", key_of("a"), put("a", []))
    elsewhere = Cache(tmp_path)
    theirs = elsewhere.get("theirs", key_of("a"), put("a", []))
    cache.clear()
    assert (mine.exists(), theirs.exists()) == (False, True)
    elsewhere.close()


def test_what_another_is_making_stays(cache: Cache, tmp_path: Path) -> None:
    """Neither a clean nor who makes something else takes it away half made."""

    def make(folder: Path) -> None:
        (folder / "file").write_text("whole")
        elsewhere = Cache(tmp_path)
        elsewhere.get("thing", key_of("b"), put("b", []))
        elsewhere.clear()

    folder = cache.get("thing", key_of("a"), make)
    assert (folder / "file").read_text() == "whole"


def test_a_key_tells_parts_apart(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("bc")
    assert key_of("a", file) == key_of("a", "bc") == key_of(b"a", b"bc")
    assert key_of("a", "bc") != key_of("ab", "c")
