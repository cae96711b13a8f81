"""The record of what we wrote: before the file, whole or set aside, and never in the way."""

import asyncio
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent.cdi.record import Record, RecordFile, digest
from tests.cdi.stores import NAME, Place, content_of


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def record_file(place: Place) -> Path:
    return place.state / "specs.json"


def test_a_record_is_read_back_as_it_was_written(place: Place) -> None:
    record = Record().with_file("/run/cdi", NAME, b"x").with_file("/etc/cdi", NAME, b"y")
    file = RecordFile(str(place.state))
    file.save(record)
    assert file.load() == (record, None)
    assert record.knows("/run/cdi", NAME)
    assert record.hash_of("/etc/cdi", NAME) == digest(b"y")
    assert sorted(os.listdir(place.state)) == ["specs.json"]
    assert record_file(place).stat().st_mode & 0o777 == 0o600


def test_a_directory_stays_known_when_its_last_file_is_gone(place: Place) -> None:
    record = Record().with_file("/run/cdi", NAME, b"x").without_file("/run/cdi", NAME)
    assert not record.knows("/run/cdi", NAME)
    assert list(record.directories) == ["/run/cdi"]


async def test_the_name_is_on_disk_before_the_file_is(place: Place) -> None:
    found: list[bool] = []

    def look(step: str) -> None:
        if step == "recorded":
            record, _ = RecordFile(str(place.state)).load()
            found.append(record.knows(os.path.realpath(place.directory), NAME))
            found.append(place.path.exists())

    await place.store(look).apply(place.write(1))
    assert found == [True, False]


async def test_a_name_that_came_to_nothing_is_not_kept(place: Place) -> None:
    """Otherwise a file that somebody else puts there later would count as ours."""

    def fail(step: str) -> None:
        if step == "written":
            raise OSError(28, "no space")

    store = place.store(fail)
    with pytest.raises(Exception, match="no space"):
        await store.apply(place.write(1))
    place.path.write_bytes(b"theirs")
    disk = await asyncio.to_thread(store.read)
    assert disk.ours == {}


# --- a record that cannot be used -----------------------------------------------------------------


def checksummed(directories: object, version: int = 1) -> bytes:
    text = json.dumps(directories, separators=(",", ":"), sort_keys=True)
    body = {"version": version, "checksum": digest(text.encode()), "directories": directories}
    return json.dumps(body).encode()


def write(content: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(content)

    return make


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**30)


BROKEN: list[tuple[str, Callable[[Path], None], str]] = [
    ("empty", write(b""), "it is not a record"),
    ("torn", write(checksummed({"/run/cdi": {NAME: "0"}})[:-9]), "it is not a record"),
    ("binary", write(b"\xff\x00\xfe"), "it is not a record"),
    ("deep", write(b"[" * 200_000), "it is not a record"),
    ("list", write(b"[]"), "it is not a record"),
    ("no-version", write(b"{}"), "it is not a record"),
    ("newer", write(b'{"version": 2, "more": {}}'), "it has version 2"),
    ("unknown-field", write(checksummed({})[:-1] + b', "x": 1}'), "it is not a record"),
    ("flipped", write(checksummed({}).replace(b"{}", b'{"/a": {}}')), "its checksum"),
    ("foreign-name", write(checksummed({"/run/cdi": {"x.yaml": "0"}})), "cannot be ours"),
    ("climbing", write(checksummed({"/run": {"cdi-agent_/../x.yaml": "0"}})), "cannot be ours"),
    ("relative", write(checksummed({"run/cdi": {}})), "cannot be ours"),
    ("fifo", os.mkfifo, "it is not a regular file"),
    ("directory", Path.mkdir, "it is not a regular file"),
    ("device", lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
    ("large", make_large, "it is larger"),
]


@pytest.mark.parametrize(
    ("make", "problem"), [pytest.param(make, problem, id=name) for name, make, problem in BROKEN]
)
async def test_a_record_that_cannot_be_used_is_set_aside_and_said(
    place: Place, make: Callable[[Path], None], problem: str
) -> None:
    """It stops nothing: our files are known by their first line, and a new record is begun."""
    await place.store().apply(place.write(1))
    record_file(place).unlink()
    make(record_file(place))
    store = place.store()
    with capture_logs() as logs:
        disk = await asyncio.to_thread(store.read)
        await store.apply(place.write(1, 2))
        await store.save_record()
    said = [entry for entry in logs if entry["event"] == "spec-record-unusable"]
    assert len(said) == 1
    assert problem in said[0]["problem"]
    assert list(disk.ours) == [str(place.path)]
    assert place.path.read_bytes() == content_of(1, 2)
    assert sorted(os.listdir(place.state)) == ["specs.json", "specs.json.set-aside"]
    assert (await asyncio.to_thread(RecordFile(str(place.state)).load))[1] is None


def test_who_only_looks_changes_no_record(place: Place) -> None:
    """As ``scan`` does: a broken one is for the service to set aside."""
    place.state.mkdir(parents=True)
    record_file(place).write_bytes(b"{")
    place.store().read()
    assert os.listdir(place.state) == ["specs.json"]


@pytest.mark.parametrize(("user", "said"), [(0, ["spec-record-unusable"]), (1000, [])])
def test_a_record_that_may_not_be_read_is_no_trouble_of_an_ordinary_user(
    place: Place, monkeypatch: pytest.MonkeyPatch, user: int, said: list[str]
) -> None:
    """Root may read everything, unless something is wrong."""

    def refuse(_path: str, _limit: int) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    asyncio.run(place.store().apply(place.write(1)))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr("agent.host.files.read_regular", refuse)
    with capture_logs() as logs:
        disk = place.store().read()
    assert [entry["event"] for entry in logs if entry["log_level"] != "info"] == said
    assert list(disk.ours) == [str(place.path)], "known by its first line"


# --- a state directory that cannot be written -----------------------------------------------------


async def test_without_a_state_directory_specs_are_written_and_it_is_said_once(
    place: Place,
) -> None:
    place.state.write_bytes(b"a file where the directory should be")
    store = place.store()
    with capture_logs() as logs:
        for cards in ((1,), (1, 2)):
            await store.apply(place.write(*cards))
            await store.save_record()
        await store.apply(place.delete())
        await store.apply(place.write(1))
    assert place.path.read_bytes() == content_of(1)
    assert [e["event"] for e in logs] == ["spec-record-unusable", "spec-record-unwritable"]
    assert "ENOTDIR" in logs[1]["problem"]


async def test_a_state_directory_that_can_be_written_again_is_used_again(place: Place) -> None:
    place.state.write_bytes(b"")
    store = place.store()
    await store.apply(place.write(1))
    place.state.unlink()
    await store.save_record()
    record, problem = await asyncio.to_thread(RecordFile(str(place.state)).load)
    assert problem is None
    assert record.knows(str(place.directory), NAME)


@pytest.mark.parametrize("step", ["record-written", "record-renamed"])
def test_a_record_that_cannot_be_written_leaves_the_old_one(place: Place, step: str) -> None:
    old = Record().with_file("/run/cdi", NAME, b"old")
    new = Record().with_file("/run/cdi", NAME, b"new")
    RecordFile(str(place.state)).save(old)

    def fail(name: str) -> None:
        if name == step:
            raise OSError(5, "broken")

    with pytest.raises(OSError, match="broken"):
        RecordFile(str(place.state), fail).save(new)
    expected = old if step == "record-written" else new
    assert RecordFile(str(place.state)).load() == (expected, None)
    assert os.listdir(place.state) == ["specs.json"]
