"""Writing and deleting spec files: whole, durable, and nothing that is not ours."""

import asyncio
import dataclasses
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.cdi.files import DeleteSpec, SetAside, WriteSpec
from agent.errors import StoreError
from tests.cdi.stores import GPU, NAME, Place, consume, content_of, spec_of


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


class Steps(list[str]):
    """Notes the steps, and lets a test do something at one of them."""

    def __init__(self, at: str = "", do: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._at = at
        self._do = do

    def __call__(self, name: str) -> None:
        self.append(name)
        if name == self._at:
            self._do()


# --- what a write leaves behind -------------------------------------------------------------------


async def test_first_write_makes_the_directory_and_a_file_that_all_can_read(
    place: Place, umask: int
) -> None:
    await place.store().apply(place.write(1))
    assert place.path.read_bytes() == content_of(1)
    assert mode_of(place.path) == 0o644
    assert [mode_of(place.directory), mode_of(place.directory.parent)] == [0o755, 0o755]
    assert place.names() == [NAME]


async def test_a_directory_that_is_there_keeps_its_mode(place: Place) -> None:
    place.directory.mkdir(parents=True)
    place.directory.chmod(0o711)
    await place.store().apply(place.write(1))
    assert mode_of(place.directory) == 0o711


async def test_prepare_makes_the_directory_for_consumers_that_start_first(place: Place) -> None:
    await place.store().prepare()
    assert mode_of(place.directory) == 0o755
    await place.store().prepare()


async def test_a_write_replaces_the_file_and_not_its_content(place: Place) -> None:
    """A reader that has the old file open goes on to read the old file."""
    store = place.store()
    await store.apply(place.write(1))
    with place.path.open("rb") as opened:
        await store.apply(place.write(1, 2))
        assert opened.read() == content_of(1)
    assert place.path.read_bytes() == content_of(1, 2)
    assert place.names() == [NAME]


async def test_equal_bytes_are_not_written(place: Place) -> None:
    store = place.store()
    await store.apply(place.write(1))
    before = place.path.stat()
    await store.apply(place.write(1))
    after = place.path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


async def test_equal_bytes_that_not_all_can_read_are_written(place: Place) -> None:
    store = place.store()
    await store.apply(place.write(1))
    place.path.chmod(0o600)
    disk = await asyncio.to_thread(store.read)
    assert disk.ours[str(place.path)].content == b""  # so that the plan asks for a write
    await store.apply(place.write(1))
    assert mode_of(place.path) == 0o644


async def test_deleting_what_is_gone_is_success(place: Place) -> None:
    store = place.store()
    await store.apply(place.delete())  # not even a directory
    await store.apply(place.write(1))
    await store.apply(place.delete())
    await store.apply(place.delete())
    assert place.names() == []
    assert place.directory.is_dir()


async def test_a_large_spec_arrives_whole(place: Place) -> None:
    await place.store().apply(place.write(*range(2000)))
    assert place.path.read_bytes() == content_of(*range(2000))


# --- the order of steps ---------------------------------------------------------------------------

WRITE_STEPS = [
    "directory-made",
    "record-written",
    "record-synced",
    "record-renamed",
    "record-directory-synced",
    "recorded",
    "temp-made",
    "written",
    "mode",
    "synced",
    "renamed",
    "directory-synced",
]
REWRITE_STEPS = [s for s in WRITE_STEPS if not s.startswith("record")]
DELETE_STEPS = ["unlinked", "directory-synced"]


async def test_a_new_name_is_recorded_before_anything_else(place: Place) -> None:
    steps = Steps()
    await place.store(steps).apply(place.write(1))
    assert steps == WRITE_STEPS


@pytest.fixture
def durable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced, renamed and deleted, in order; temporary names as ``temp``."""
    done: list[str] = []

    def note(verb: str, path: str | Path) -> None:
        name = os.path.basename(path)
        done.append(f"{verb} {'temp' if name.endswith('.tmp') else name}")

    def watch(verb: str, name: str, path: Callable[..., str]) -> None:
        call = getattr(os, name)

        def watched(*args: object, **fds: int) -> None:
            note(verb, path(*args))
            call(*args, **fds)

        monkeypatch.setattr(os, name, watched)

    watch("sync", "fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    watch("name", "rename", lambda _old, new: new)
    watch("delete", "unlink", lambda path: path)
    return done


async def test_a_content_is_durable_before_it_has_its_name_and_then_the_name(
    place: Place, durable: list[str]
) -> None:
    """A machine that loses power keeps the old file or the new one, whole; deleted is deleted."""
    store = place.store()
    await store.apply(place.write(1))
    record = ["delete temp", "sync temp", "name specs.json", "sync state"]
    assert durable[-7:] == [*record, "sync temp", f"name {NAME}", "sync cdi"]
    del durable[:]
    await store.apply(place.delete())
    assert durable == [f"delete {NAME}", "sync cdi"]


async def test_a_withdrawal_never_waits_for_the_record(place: Place) -> None:
    await place.store().apply(place.write(1, 2))
    steps = Steps()
    store = place.store(steps)
    await store.apply(place.write(1))
    assert steps == REWRITE_STEPS
    del steps[:]
    await store.apply(place.delete())
    assert steps == DELETE_STEPS


async def test_a_withdrawal_waits_for_no_record_that_was_lost(place: Place) -> None:
    await place.store().apply(place.write(1, 2))
    (place.state / "specs.json").unlink()
    steps = Steps()
    withdrawal = dataclasses.replace(place.write(1), publishes=(), withdraws=("card2",))
    await place.store(steps).apply(withdrawal)
    assert steps == REWRITE_STEPS


async def test_a_record_that_was_lost_is_made_anew_with_the_next_publication(place: Place) -> None:
    await place.store().apply(place.write(1))
    (place.state / "specs.json").unlink()
    steps = Steps()
    await place.store(steps).apply(place.write(1, 2))
    assert steps == WRITE_STEPS


async def test_the_record_can_be_saved_when_there_is_time(place: Place) -> None:
    steps = Steps()
    store = place.store(steps)
    await store.apply(place.write(1))
    await store.apply(place.write(2))
    del steps[:]
    await store.save_record()
    assert steps == [step for step in WRITE_STEPS if step.startswith("record-")]
    await store.save_record()  # nothing new
    assert steps == [step for step in WRITE_STEPS if step.startswith("record-")]


@pytest.mark.parametrize("step", REWRITE_STEPS[: REWRITE_STEPS.index("renamed")])
async def test_a_write_that_fails_before_the_rename_leaves_the_old_file_and_nothing_else(
    place: Place, step: str
) -> None:
    await place.store().apply(place.write(1))

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StoreError, match=r"cannot write .*: no space left on device \(ENOSPC") as e:
        await place.store(Steps(step, fail)).apply(place.write(2))
    assert e.value.retryable
    assert str(place.path) in e.value.sentence
    assert e.value.hint is not None
    assert place.path.read_bytes() == content_of(1)
    assert place.names() == [NAME]


async def test_a_write_whose_directory_cannot_be_synced_is_an_error_until_it_can(
    place: Place,
) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    steps = Steps("renamed", fail)
    store = place.store(steps)
    with pytest.raises(StoreError, match="EIO"):
        await store.apply(place.write(1))
    await store.apply(place.write(1))
    assert consume(place.directory) == {"card1": NAME}


async def test_a_withdrawal_that_cannot_be_written_deletes_if_told_so(place: Place) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = place.store(Steps("written", fail))
    with pytest.raises(StoreError):
        await store.apply(place.write(1))
    assert place.names() == []
    await place.store().apply(place.write(1, 2))
    with pytest.raises(StoreError, match=r"ENOSPC.*; the file was deleted"):
        await store.apply(place.write(1, delete_if_unwritable=True))
    assert place.names() == []


# --- cancelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["directory-made", "written", "synced", "renamed"])
@pytest.mark.parametrize("times", [1, 3])
async def test_cancelling_waits_for_the_write(place: Place, step: str, times: int) -> None:
    """No rename comes after ``apply`` has ended, however often it was cancelled."""
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        go_on.wait(30)

    task = asyncio.create_task(place.store(Steps(step, wait)).apply(place.write(1)))
    await asyncio.to_thread(reached.wait, 30)
    for _ in range(times):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert place.path.read_bytes() == content_of(1)
    assert place.names() == [NAME]


async def test_cancelling_a_delete_waits_for_it(place: Place) -> None:
    await place.store().apply(place.write(1))
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        go_on.wait(30)

    task = asyncio.create_task(place.store(Steps("unlinked", wait)).apply(place.delete()))
    await asyncio.to_thread(reached.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_does_not_swallow_why_the_write_failed(place: Place) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def fail() -> None:
        reached.set()
        go_on.wait(30)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    task = asyncio.create_task(place.store(Steps("synced", fail)).apply(place.write(1)))
    await asyncio.to_thread(reached.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert isinstance(caught.value.__cause__, StoreError)
    assert place.names() == []


async def test_writes_at_once_do_not_disturb_each_other(place: Place) -> None:
    store = place.store()
    kinds = [f"vendor{number}.com/gpu" for number in range(8)]
    actions = [
        WriteSpec(
            f"{place.directory}/cdi-agent_vendor{number}.com-gpu.yaml",
            GPU,
            content_of(number),
        )
        for number in range(len(kinds))
    ]
    await asyncio.gather(*map(store.apply, actions))
    assert len(consume(place.directory)) == len(kinds)
    disk = await asyncio.to_thread(place.store().read)
    assert len(disk.ours) == len(kinds)


# --- nothing that is not ours ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "intel.com-gpu.yaml",
        "../escape/cdi-agent_intel.com-gpu.yaml",
        "sub/cdi-agent_intel.com-gpu.yaml",
        "cdi-agent_intel.com-gpu.yaml.tmp",
        "cdi-agent_intel.com-gpu",
        "",
    ],
)
async def test_no_other_place_is_written_or_deleted(place: Place, name: str) -> None:
    for folder in ("sub", "../escape"):
        (place.directory / folder).mkdir(parents=True)
    victim = place.directory / name
    if name:
        victim.write_bytes(b"theirs")
    path = f"{place.directory}/{name}"
    for action in (WriteSpec(path, GPU, content_of(1)), DeleteSpec(path, None)):
        with pytest.raises(StoreError, match="it is not its own"):
            await place.store().apply(action)
    if name:
        assert victim.read_bytes() == b"theirs"


async def test_a_foreign_file_of_our_name_is_neither_replaced_nor_deleted(place: Place) -> None:
    place.directory.mkdir(parents=True)
    place.path.write_bytes(b'cdiVersion: "0.5.0"\n')
    for action in (place.write(1), place.delete()):
        with pytest.raises(StoreError, match="was not written by cdi-agent"):
            await place.store().apply(action)
    assert place.path.read_bytes() == b'cdiVersion: "0.5.0"\n'


async def test_a_file_of_ours_that_was_edited_is_still_ours(place: Place) -> None:
    await place.store().apply(place.write(1))
    place.path.write_bytes(b"nonsense")
    await place.store().apply(place.write(1))
    assert place.path.read_bytes() == content_of(1)


async def test_a_directory_at_our_name_is_a_clear_error(place: Place) -> None:
    place.path.mkdir(parents=True)
    for action in (place.write(1), place.delete()):
        with pytest.raises(StoreError, match=f"{NAME} is a directory"):
            await place.store().apply(action)
    assert place.path.is_dir()


@pytest.mark.parametrize("delete", [False, True], ids=["write", "delete"])
async def test_a_link_at_the_place_of_our_file_is_replaced_and_never_followed(
    place: Place, tmp_path: Path, *, delete: bool
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(content_of(7))
    await place.store().apply(place.write(1))
    place.path.unlink()
    place.path.symlink_to(victim)
    await place.store().apply(place.delete() if delete else place.write(1))
    assert victim.read_bytes() == content_of(7)
    assert place.names() == [] if delete else not place.path.is_symlink()


async def test_a_link_that_we_did_not_write_is_foreign_even_to_a_file_of_ours(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "copy").write_bytes(content_of(1))
    place.directory.mkdir(parents=True)
    place.path.symlink_to(tmp_path / "copy")
    with pytest.raises(StoreError, match="was not written by cdi-agent"):
        await place.store().apply(place.write(1))
    assert place.path.is_symlink()


async def test_a_fifo_at_the_place_of_our_file_is_replaced_without_being_opened(
    place: Place,
) -> None:
    await place.store().apply(place.write(1))
    place.path.unlink()
    os.mkfifo(place.path)
    await place.store().apply(place.write(1))
    assert place.path.read_bytes() == content_of(1)


async def test_a_directory_that_is_a_link_is_refused(place: Place, tmp_path: Path) -> None:
    """Consumers do not follow it, so what we wrote there would be published nowhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place.directory.parent.mkdir(parents=True)
    place.directory.symlink_to(elsewhere)
    with pytest.raises(StoreError, match="is a symbolic link, which CDI consumers do not follow"):
        await place.store().apply(place.write(1))
    assert list(elsewhere.iterdir()) == []


async def test_a_file_in_the_place_of_the_directory_is_a_clear_error(place: Place) -> None:
    place.directory.parent.mkdir(parents=True)
    place.directory.write_bytes(b"")
    for attempt in (place.store().prepare(), place.store().apply(place.write(1))):
        with pytest.raises(StoreError, match="ENOTDIR"):
            await attempt


@pytest.mark.parametrize("step", ["recorded", "written", "renamed"])
@pytest.mark.parametrize("by", ["nothing", "directory", "link"])
async def test_a_directory_that_is_swapped_meanwhile_is_noticed(
    place: Place, step: str, by: str
) -> None:
    away = place.root / "away"

    def swap() -> None:
        place.directory.rename(away)
        if by == "directory":
            place.directory.mkdir()
        elif by == "link":
            place.directory.symlink_to(place.root)

    await place.store().prepare()
    with pytest.raises(StoreError, match=r"the directory was replaced meanwhile \(ESTALE"):
        await place.store(Steps(step, swap)).apply(place.write(1))
    assert not any(name.name.startswith("cdi-agent") for name in place.root.iterdir())
    if by != "link":
        await place.store().apply(place.write(1))
        assert consume(place.directory) == {"card1": NAME}


# --- setting aside (cdi.adopt) --------------------------------------------------------------------


async def test_a_foreign_file_is_set_aside_unchanged_where_no_consumer_reads_it(
    place: Place,
) -> None:
    place.directory.mkdir(parents=True)
    foreign = place.directory / "vendor.yaml"
    store = place.store()
    for content in (b"first", b"second", b"second", b"first"):  # the same again takes no room
        foreign.write_bytes(content)
        await store.apply(SetAside(str(foreign), GPU))
    assert consume(place.directory) == {}
    aside = [place.directory / f"vendor.yaml.set-aside-by-cdi-agent{end}" for end in ("", "-2")]
    assert [path.read_bytes() for path in aside] == [b"first", b"second"]
    assert place.names() == sorted(path.name for path in aside)
    await store.apply(SetAside(str(foreign), GPU))  # gone


@pytest.mark.parametrize("name", [b"\xff.yaml", b"a\nb.json", b"a\\b.yaml"], ids=repr)
async def test_a_foreign_file_is_set_aside_whatever_it_is_called(place: Place, name: bytes) -> None:
    """It is known by the name that can be printed; its own may be no text."""
    place.directory.mkdir(parents=True)
    (place.directory / os.fsdecode(name)).write_bytes(content_of(1))
    store = place.store()
    (foreign,) = (await asyncio.to_thread(store.read)).foreign
    await store.apply(SetAside(foreign.path, GPU))
    assert os.listdir(os.fsencode(place.directory)) == [name + b".set-aside-by-cdi-agent"]


@pytest.mark.parametrize("path", ["etc/cdi/vendor.yaml", f"run/cdi/{NAME}", "run/cdi/vendor.txt"])
async def test_only_foreign_specs_in_our_directory_are_set_aside(place: Place, path: str) -> None:
    target = place.root / path
    target.parent.mkdir(parents=True)
    target.write_bytes(b"kept")
    with pytest.raises(StoreError, match="does not set aside"):
        await place.store().apply(SetAside(str(target), None))
    assert target.read_bytes() == b"kept"


# --- a reader that looks all the while ------------------------------------------------------------


async def test_a_reader_never_sees_anything_but_whole_specs(place: Place) -> None:
    store = place.store()
    await store.prepare()
    seen: set[frozenset[str]] = set()
    done, failures = threading.Event(), list[Exception]()

    def look() -> None:
        while not done.is_set():
            try:
                seen.add(frozenset(consume(place.directory)))
            except Exception as error:  # noqa: BLE001 - whatever it is, the test tells
                failures.append(error)
                return

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for turn in range(60):
            await store.apply(place.write(1))
            await store.apply(place.write(1, 2))
            if turn % 3 == 0:
                await store.apply(place.delete())
    finally:
        done.set()
        await asyncio.to_thread(reader.join)
    assert failures == []
    assert seen
    assert seen <= {frozenset(), frozenset({"card1"}), frozenset({"card1", "card2"})}


async def test_what_was_written_need_not_be_parsed_when_it_is_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place.store()
    action = WriteSpec(str(place.path), GPU, content_of(1), spec=spec_of(1))
    await store.apply(action)
    monkeypatch.setattr("agent.cdi.reader.parse", None)
    disk = await asyncio.to_thread(store.read)
    assert disk.ours[str(place.path)].spec == spec_of(1)
