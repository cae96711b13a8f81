"""Reading the spec directories: what is ours, what is left over, what others define."""

import asyncio
import errno
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent.cdi.directory import Directory
from agent.cdi.files import PREFIX, DeleteSpec, Disk, ForeignFile, SpecFile
from agent.cdi.reader import MAX_FOREIGN_SIZE
from agent.cdi.render import render
from agent.cdi.store import Store
from agent.cdi.tree import MAX_SIZE
from agent.errors import StoreError
from tests.cdi.stores import GPU, NAME, Place, content_of, spec_of

FOREIGN = b"""
cdiVersion: "0.5.0"
kind: intel.com/gpu
devices:
- name: theirs
  containerEdits:
    deviceNodes: [{path: /dev/dri/card9}]
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    place.directory.mkdir(parents=True)
    place.other.mkdir(parents=True)
    return place


def publish(place: Place, *cards: int) -> None:
    asyncio.run(place.store().apply(place.write(*cards)))


def lose_record(place: Place) -> None:
    (place.state / "specs.json").unlink()


def only(disk: Disk) -> ForeignFile:
    (file,) = disk.foreign
    return file


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, OSError]:
    """What opening or listing something fails with, by its name or the end of its path."""
    errors: dict[str, OSError] = {}
    real_open, real_scandir = os.open, os.scandir

    def check(name: str) -> None:
        for end, error in errors.items():
            if name.endswith(end):
                raise error

    def opening(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        check(path)
        return real_open(path, flags, mode, dir_fd=dir_fd)

    def listing(fd: int) -> object:
        check(f"list {os.readlink(f'/proc/self/fd/{fd}')}")
        return real_scandir(fd)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "scandir", listing)
    return errors


# --- ours -----------------------------------------------------------------------------------------


def test_no_directory_is_an_empty_one(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.store().read() == Disk(str(place.directory))
    assert not place.directory.exists()
    assert not place.state.exists()


def test_our_file_is_found_with_its_content(place: Place) -> None:
    publish(place, 1)
    disk = place.store().read()
    assert disk.ours == {str(place.path): SpecFile(str(place.path), content_of(1), spec_of(1))}
    assert list(disk.ours[str(place.path)].devices) == ["card1"]


def test_without_the_record_the_first_line_tells(place: Place) -> None:
    publish(place, 1)
    lose_record(place)
    store = place.store()
    with capture_logs() as logs:
        assert list(store.read().ours) == [str(place.path)]
        store.read()
    assert [(entry["event"], entry["path"]) for entry in logs] == [
        ("spec-file-recognised", str(place.path))
    ]


def test_without_the_record_json_of_exactly_our_form_is_ours(place: Place) -> None:
    path = place.path.with_suffix(".json")
    path.write_bytes(content_of(1, suffix="json"))
    assert list(place.store().read().ours) == [str(path)]
    path.write_bytes(render(spec_of(1), suffix="json", version="1.0.0"))
    assert list(place.store().read().ours) == [str(path)]
    path.write_bytes(content_of(1, suffix="json").replace(b"  ", b" "))
    assert place.store().read().ours == {}


def test_our_prefix_alone_makes_nothing_ours(place: Place) -> None:
    place.path.write_bytes(FOREIGN)
    disk = place.store().read()
    assert disk.ours == {}
    assert only(disk) == ForeignFile(str(place.path), GPU, frozenset({"theirs"}))


def test_our_first_line_under_another_name_is_a_foreign_file(place: Place) -> None:
    """Somebody's copy: it defines our devices a second time."""
    (place.directory / "backup.yaml").write_bytes(content_of(1))
    assert only(place.store().read()).names == {"card1"}


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff", b"cdiVersion: [", b"a: 1\n" * 5, b"[" * 100_000],
    ids=["empty", "binary", "torn", "other", "deep"],
)
def test_our_file_with_garbage_in_it_is_ours_and_publishes_nothing(
    place: Place, content: bytes
) -> None:
    publish(place, 1)
    place.path.write_bytes(content)
    with capture_logs() as logs:
        file = place.store().read().ours[str(place.path)]
    assert (file.content, file.spec) == (content, None)
    assert {entry["event"] for entry in logs} == {"spec-file-changed", "spec-file-unreadable"}


def test_an_edit_behind_our_back_is_said_once_until_it_is_put_right(place: Place) -> None:
    async def story() -> list[str]:
        store = place.store()
        await store.apply(place.write(1))
        with capture_logs() as logs:
            for _ in range(2):
                place.path.write_bytes(content_of(1, 2))
                await asyncio.to_thread(store.read)
                await asyncio.to_thread(store.read)
                await store.apply(place.write(1))
                await asyncio.to_thread(store.read)
        return [entry["event"] for entry in logs]

    assert asyncio.run(story()) == ["spec-file-changed"] * 2


def test_a_rewrite_of_our_own_is_no_edit(place: Place) -> None:
    async def story() -> None:
        store = place.store()
        for cards in ((1,), (1, 2), (2,)):
            await store.apply(place.write(*cards))
            await asyncio.to_thread(store.read)

    with capture_logs() as logs:
        asyncio.run(story())
        place.store().read()  # the next process, whose record lags behind
    assert logs == []


# --- what is not a file ---------------------------------------------------------------------------


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_SIZE + 1)


STRANGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("fifo", os.mkfifo, "it is not a regular file"),
    ("socket", make_socket, "it is not a regular file"),
    ("device", lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
    ("dangling", lambda path: path.symlink_to("nowhere"), "leads nowhere"),
    ("loop", lambda path: path.symlink_to(path.name), "ymbolic link"),
    ("folder", lambda path: path.symlink_to(path.parent), "it is not a regular file"),
    ("large", make_large, "it is larger than 8 MiB"),
]
STRANGERS = pytest.mark.parametrize(
    ("make", "problem"), [pytest.param(make, problem, id=name) for name, make, problem in STRANGE]
)


@STRANGERS
def test_what_cannot_be_read_is_named_and_never_waited_for(
    place: Place, make: Callable[[Path], None], problem: str
) -> None:
    make(place.directory / "strange.yaml")
    publish(place, 1)
    disk = place.store().read()
    assert list(disk.ours) == [str(place.path)]
    assert only(disk).kind is None
    assert problem in (only(disk).problem or "")


@STRANGERS
def test_what_cannot_be_read_in_the_place_of_our_file_is_to_be_written_again(
    place: Place, make: Callable[[Path], None], problem: str
) -> None:
    publish(place, 1)
    place.path.unlink()
    make(place.path)
    disk = place.store().read()
    assert disk.ours[str(place.path)] == SpecFile(str(place.path), b"", None)
    assert disk.foreign == ()
    publish(place, 1)
    assert place.path.read_bytes() == content_of(1)


@pytest.mark.parametrize("what", ["run/cdi", "etc/cdi", NAME, "vendor.yaml", "specs.json"])
def test_what_this_process_lacks_says_nothing_about_any_file(
    place: Place, failing: dict[str, OSError], what: str
) -> None:
    """Taken for an unreadable file, a foreign definition would be doubled, and a record be lost."""
    publish(place, 1)
    (place.directory / "vendor.yaml").write_bytes(FOREIGN)
    store = place.store()
    failing[what] = OSError(errno.EMFILE, "Too many open files")
    with pytest.raises(StoreError, match="too many open files"):
        store.read()
    asyncio.run(store.save_record())
    failing.clear()
    disk = store.read()
    assert list(disk.ours) == [str(place.path)]
    assert only(disk).kind == GPU
    assert os.listdir(place.state) == ["specs.json"]


def test_another_directory_that_cannot_be_listed_costs_only_what_is_in_it(
    place: Place, failing: dict[str, OSError]
) -> None:
    publish(place, 1)
    failing["list " + str(place.other)] = OSError(errno.EIO, "Input/output error")
    disk = place.store().read()
    assert list(disk.ours) == [str(place.path)]
    assert "input/output error (EIO)" in (only(disk).problem or "")
    failing["list " + str(place.directory)] = failing.popitem()[1]
    with pytest.raises(StoreError, match="input/output error"):
        place.store().read()


def test_a_directory_of_our_name_is_in_the_way_and_others_are_passed_over(place: Place) -> None:
    place.path.mkdir()
    (place.directory / "theirs.yaml").mkdir()
    assert only(place.store().read()).problem == "it is a directory"


def test_consumers_do_not_look_below_so_neither_do_we(place: Place) -> None:
    (place.directory / "sub").mkdir()
    (place.directory / "sub" / "vendor.yaml").write_bytes(FOREIGN)
    assert place.store().read().foreign == ()


# --- foreign --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vendor.yaml", ".hidden.yaml", ".yaml", "vendor.json"])
def test_foreign_definitions_are_known_by_kind_and_name(place: Place, name: str) -> None:
    (place.directory / name).write_bytes(FOREIGN)
    (place.directory / "vendor.yml").write_bytes(FOREIGN)  # no consumer loads it
    (place.directory / "vendor.yaml.bak").write_bytes(FOREIGN)
    path = f"{place.directory}/{name}"
    assert only(place.store().read()) == ForeignFile(path, GPU, frozenset({"theirs"}))


def test_a_definition_in_the_other_directory_is_told_from_one_in_ours(place: Place) -> None:
    (place.other / "vendor.yaml").write_bytes(FOREIGN)
    file = only(place.store().read())
    assert not file.same_directory
    assert file.names == {"theirs"}


def test_a_link_to_a_foreign_file_is_read_as_consumers_read_it(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "spec").write_bytes(FOREIGN)
    (place.directory / "link.yaml").symlink_to(tmp_path / "spec")
    store = place.store()
    assert only(store.read()).names == {"theirs"}
    (tmp_path / "spec").write_bytes(FOREIGN.replace(b"theirs", b"others"))
    assert only(store.read()).names == {"others"}


@pytest.mark.parametrize("name", ["vendor.yaml", f"{PREFIX}vendor.yaml"])
def test_a_link_to_our_file_defines_all_that_was_in_it(place: Place, name: str) -> None:
    """Else what it doubles would be withdrawn and published for ever."""
    publish(place, 1)
    link = place.directory / name
    link.symlink_to(place.path.name)
    store = place.store()
    assert only(store.read()).names == {"card1"}
    place.path.write_bytes(content_of(2))
    assert only(store.read()).names == {"card1", "card2"}
    place.path.unlink()
    for _ in range(2):
        assert only(store.read()) == ForeignFile(str(link), GPU, frozenset({"card1", "card2"}))
    link.unlink()
    assert store.read().foreign == ()


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"kind: [", b"[" * 100_000],
    ids=["empty", "binary", "torn", "deep"],
)
def test_a_foreign_file_that_nobody_can_read_defines_nothing(place: Place, content: bytes) -> None:
    (place.directory / "vendor.yaml").write_bytes(content)
    file = only(place.store().read())
    assert (file.kind, file.names) == (None, frozenset())
    assert file.problem


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        pytest.param(b"\xff.yaml", r"\xff.yaml", id="no text"),
        pytest.param(b"a\nb.yaml", r"a\nb.yaml", id="two lines"),
        pytest.param(b"\x1b[31m.yaml", r"\x1b[31m.yaml", id="a terminal's escape"),
        pytest.param(b"\\xff.yaml", r"\\xff.yaml", id="what an escape looks like"),
        pytest.param(
            "k\u00e4rte \u202e.yaml".encode(), "k\u00e4rte \\u202e.yaml", id="right to left"
        ),
    ],
)
def test_any_name_can_be_printed_on_one_line(place: Place, name: bytes, shown: str) -> None:
    Path(os.fsdecode(os.fsencode(place.directory) + b"/" + name)).write_bytes(FOREIGN)
    assert only(place.store().read()).path == f"{place.directory}/{shown}"


# --- directories ----------------------------------------------------------------------------------


def test_one_directory_under_two_names_is_one_directory(place: Place, tmp_path: Path) -> None:
    """As /var/run is a link to /run."""
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "run").symlink_to(tmp_path / "run")
    publish(place, 1)
    (place.directory / "vendor.yaml").write_bytes(FOREIGN)
    alias = tmp_path / "var" / "run" / "cdi"
    disk = Store(alias, place.state, (place.directory, place.other)).read()
    assert list(disk.ours) == [f"{alias}/{NAME}"]
    assert disk.leftovers == ()
    assert only(disk).same_directory
    assert only(disk).path == f"{alias}/vendor.yaml"


def test_another_directory_that_is_a_link_is_not_followed(place: Place) -> None:
    publish(place, 1)
    place.other.rmdir()
    place.other.symlink_to(place.directory)
    disk = place.store().read()
    assert (list(disk.ours), disk.leftovers, disk.foreign) == ([str(place.path)], (), ())


def test_a_file_in_the_place_of_another_directory_is_passed_over(place: Place) -> None:
    place.other.rmdir()
    place.other.write_bytes(b"")
    assert place.store().read().foreign == ()


def test_a_directory_of_ours_that_is_a_link_is_an_error(place: Place) -> None:
    place.directory.rmdir()
    place.directory.symlink_to(place.other)
    with pytest.raises(StoreError, match="is a symbolic link, which CDI consumers do not follow"):
        place.store().read()


def test_trailing_slashes_and_dots_make_no_other_directory(place: Place) -> None:
    publish(place, 1)
    store = Store(f"{place.directory}/../cdi/", place.state, (f"{place.directory}/",))
    disk = store.read()
    assert (list(disk.ours), disk.leftovers) == ([str(place.path)], ())


# --- leftovers ------------------------------------------------------------------------------------


def test_a_temporary_file_of_a_killed_process_is_left_over(place: Place) -> None:
    left = place.directory / "cdi-agent_.0123456789abcdef.tmp"
    left.write_bytes(b"half")
    (place.directory / "cdi-agent_.mine.tmp").write_bytes(b"a person's")
    store = place.store()
    assert store.read().leftovers == (str(left),)


def test_a_temporary_file_that_is_being_written_is_not(place: Place) -> None:
    disks: list[Disk] = []

    def look(step: str) -> None:
        if step == "written":
            disks.append(store.read())

    store = place.store(look)
    asyncio.run(store.apply(place.write(1)))
    assert [disk.leftovers for disk in disks] == [()]


@pytest.mark.parametrize("record", [True, False], ids=["recorded", "record-lost"])
def test_after_a_move_our_file_in_the_other_directory_is_left_over(
    place: Place, *, record: bool
) -> None:
    publish(place, 1)
    if not record:
        lose_record(place)
    moved = Store(place.other, place.state, (place.directory,))
    assert moved.read().leftovers == (str(place.path),)


def test_after_two_moves_our_file_in_a_directory_that_no_setting_names_is_left_over(
    place: Place, tmp_path: Path
) -> None:
    """Foreign files there concern nobody: no consumer reads that directory."""
    publish(place, 1)
    (place.directory / "vendor.yaml").write_bytes(FOREIGN)
    store = Store(tmp_path / "new", place.state, ())
    disk = store.read()
    assert disk.leftovers == (str(place.path.resolve()),)
    assert disk.foreign == ()


def test_another_instance_in_a_directory_that_was_left_is_left_alone(
    place: Place, tmp_path: Path
) -> None:
    """What says there that cdi-agent wrote it was written by the other one."""
    publish(place, 1)
    left = Store(tmp_path / "new", place.state, ())
    (leftover,) = left.read().leftovers
    (place.directory / f"{PREFIX}other.com-gpu.yaml").write_bytes(content_of(2))
    assert left.read().leftovers == (leftover,)
    asyncio.run(left.apply(DeleteSpec(leftover, None)))
    asyncio.run(left.save_record())
    other = Store(place.directory, tmp_path / "state-of-other", ())
    asyncio.run(other.apply(place.write(1)))
    (place.directory / f"{PREFIX}.0123456789abcdef.tmp").touch()
    for store in (left, Store(tmp_path / "new", place.state, ())):
        assert store.read().leftovers == ()


# --- cost -----------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that were opened, with every file as if it had been written long ago."""
    names: list[str] = []
    real = Directory.read

    def read(self: Directory, name: str, *, follow: bool = False) -> tuple[os.stat_result, bytes]:
        names.append(name)
        return real(self, name, follow=follow)

    monkeypatch.setattr(Directory, "read", read)
    monkeypatch.setattr("agent.cdi.reader._COARSE", -(10**12))
    return names


def test_an_unchanged_directory_is_listed_and_no_file_is_opened(
    place: Place, opened: list[str]
) -> None:
    publish(place, 1)
    (place.directory / "vendor.yaml").write_bytes(FOREIGN)
    store = place.store()
    first = store.read()
    del opened[:]
    assert store.read() == first
    assert opened == []


@pytest.mark.parametrize("change", ["content", "mode", "replaced", "deleted", "added"])
def test_a_change_is_seen(place: Place, opened: list[str], change: str) -> None:
    publish(place, 1)
    vendor = place.directory / "vendor.yaml"
    vendor.write_bytes(FOREIGN)
    store = place.store()
    first = store.read()
    match change:
        case "content":
            vendor.write_bytes(FOREIGN.replace(b"theirs", b"others"))
        case "mode":
            place.path.chmod(0o600)
        case "replaced":
            place.path.unlink()
            place.path.write_bytes(content_of(2))
        case "deleted":
            vendor.unlink()
        case _:
            (place.directory / "more.json").write_bytes(FOREIGN)
    assert store.read() != first


def test_a_file_that_has_just_been_changed_is_read_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two changes within one tick of the file system's clock leave the same times."""
    vendor = place.directory / "vendor.yaml"
    vendor.write_bytes(FOREIGN)
    monkeypatch.setattr("agent.cdi.reader._COARSE", 10**15)
    monkeypatch.setattr("agent.cdi.reader._key", lambda _status: (0,))
    store = place.store()
    assert only(store.read()).names == {"theirs"}
    vendor.write_bytes(FOREIGN.replace(b"theirs", b"others"))
    assert only(store.read()).names == {"others"}


def test_equal_bytes_are_not_parsed_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(place, 1)
    (place.directory / "vendor.yaml").write_bytes(FOREIGN)
    monkeypatch.setattr("agent.cdi.reader._COARSE", 10**15)
    store = place.store()
    first = store.read()
    monkeypatch.setattr("agent.cdi.reader.parse", None)
    monkeypatch.setattr("agent.cdi.reader.peek", None)
    assert store.read() == first


def test_the_bytes_of_foreign_files_are_not_kept(place: Place) -> None:
    """A directory with many large files costs what they define, not what they weigh."""
    size = MAX_FOREIGN_SIZE // 4
    for number in range(4):
        text = b"#" * size
        (place.directory / f"{number}.yaml").write_bytes(text[len(FOREIGN) :] + FOREIGN)
    store = place.store()
    tracemalloc.start()
    try:
        assert len(store.read().foreign) == 4
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < size / 8
    assert most < 5 * size  # one at a time: its bytes, its text, the parser's


def test_what_vanishes_is_forgotten(place: Place) -> None:
    store = place.store()
    for _ in range(2):
        (place.directory / "vendor.yaml").write_bytes(FOREIGN)
        assert only(store.read()).names == {"theirs"}
        (place.directory / "vendor.yaml").unlink()
        assert store.read().foreign == ()
