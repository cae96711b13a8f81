"""Whatever lies in the spec directories, a reading ends soon, keeps little, and knows ours."""

import asyncio
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent.cdi.files import PREFIX, ForeignFile
from agent.cdi.reader import MAX_FOREIGN_FILES, MAX_FOREIGN_SIZE
from agent.cdi.tree import MAX_SIZE
from tests.cdi.stores import NAME, Place, content_of

FOREIGN = b"""
cdiVersion: "0.5.0"
kind: theirs.com/gpu
devices:
- name: theirs
  containerEdits:
    deviceNodes: [{path: /dev/dri/card9}]
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Directories with one file of ours; it is not in the record, so it has to be read."""
    place = Place(tmp_path)
    asyncio.run(place.store().apply(place.write(1)))
    (place.state / "specs.json").unlink()
    place.other.mkdir(parents=True)
    return place


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all files that are opened from here on."""
    names: list[str] = []
    real_open = os.open

    def opening(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:
            names.append(path)
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", opening)
    return names


def test_of_too_many_foreign_files_the_first_are_read_and_ours_always(
    place: Place, opened: list[str]
) -> None:
    temp = place.directory / f"{PREFIX}.{'0' * 16}.tmp"
    temp.touch()
    for number in range(MAX_FOREIGN_FILES + 50):
        (place.directory / f"{number:04}.yaml").write_bytes(FOREIGN)
    (place.other / "vendor.yaml").write_bytes(FOREIGN)
    store = place.store()
    disk = store.read()
    assert list(disk.ours) == [str(place.path)]
    assert disk.ours[str(place.path)].content == content_of(1)
    assert disk.leftovers == (str(temp),)
    assert len([file for file in disk.foreign if file.kind is not None]) == MAX_FOREIGN_FILES - 1
    assert [file.path for file in disk.foreign if file.problem] == [
        str(place.directory),
        str(place.other),
    ]
    assert len(opened) == MAX_FOREIGN_FILES
    (place.directory / "another.yaml").write_bytes(FOREIGN)
    assert store.read() == disk, "it is nothing to be told again"


def test_of_foreign_files_that_are_too_large_together_some_are_not_read(
    place: Place, opened: list[str]
) -> None:
    """A file that is too large by itself is named, and costs the others nothing."""
    with (place.directory / "0.yaml").open("wb") as file:
        file.truncate(MAX_SIZE + 1)
    for number in range(1, 5):
        (place.directory / f"{number}.yaml").write_bytes(FOREIGN)
        with (place.directory / f"{number}.yaml").open("ab") as file:
            file.truncate(MAX_SIZE)
    disk = place.store().read()
    assert list(disk.ours) == [str(place.path)]
    problems = {os.path.basename(file.path): file.problem for file in disk.foreign}
    assert list(problems) == ["0.yaml", "1.yaml", "cdi"]
    assert problems["0.yaml"] == f"it is larger than {MAX_SIZE // 2**20} MiB"
    assert f"{MAX_FOREIGN_SIZE // 2**20} MiB together" in (problems["cdi"] or "")
    assert opened == [NAME, "1.yaml"]


def test_files_with_our_prefix_that_are_not_ours_are_bounded_too(place: Place) -> None:
    """What the record knows is read all the same."""
    store = place.store()
    asyncio.run(store.apply(place.write(1, 2)))
    for number in range(MAX_FOREIGN_FILES + 50):
        (place.directory / f"{PREFIX}{number:04}.yaml").write_bytes(FOREIGN)
    disk = store.read()
    assert list(disk.ours) == [str(place.path)]
    assert len(disk.foreign) == MAX_FOREIGN_FILES + 1
    assert disk.foreign[-1] == ForeignFile(
        str(place.directory), None, same_directory=False, problem=disk.foreign[-1].problem
    )


def test_what_was_said_of_a_file_is_forgotten_with_it(place: Place) -> None:
    """Files come and go for months under ever new names; one that comes back is told of again."""
    store = place.store()
    content = place.path.read_bytes()
    with capture_logs() as logs:
        for _ in range(2):
            place.path.write_bytes(content)
            store.read()
            store.read()
            place.path.unlink()
            store.read()
    assert [entry["event"] for entry in logs] == ["spec-file-recognised"] * 2
