"""The watch tells of every change of a spec directory, whatever becomes of the directory."""

import asyncio
import errno
import itertools
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import inotify_simple
import pytest
from structlog.testing import capture_logs

from agent.cdi.files import PREFIX
from agent.cdi.watch import FIRST_REST, LONGEST_REST, SpecWatch

Action = Callable[[], object]


class Timers:
    """Timers that ring at the loop's next turn, or when they are told to."""

    def __init__(self) -> None:
        self.wait = False
        self.rests: list[float] = []
        self._ring: Action = lambda: None

    def __call__(self, seconds: float, ring: Action) -> asyncio.Handle:
        self.rests.append(seconds)
        self._ring = ring
        later = (lambda: None) if self.wait else ring
        return asyncio.get_running_loop().call_soon(later)

    def ring(self) -> None:
        """Let the timer that was set last ring."""
        self._ring()


class Watched:
    """Two directories, of which the second does not exist, and what is told of them."""

    def __init__(self, folder: Path) -> None:
        self.own, self.other = folder / "own", folder / "other"
        self.own.mkdir()
        self.file = self.own / "spec.yaml"
        self.timers = Timers()
        self.told: asyncio.Queue[float] = asyncio.Queue()
        self.watch = SpecWatch(
            [str(self.own), str(self.other)], self.told.put_nowait, later=self.timers
        )

    async def tells(self) -> None:
        """Wait until something is told, and forget it with what comes right after it."""
        async with asyncio.timeout(10):
            await self.told.get()
        await self.count()

    async def count(self, *actions: Action) -> int:
        """How often something is told when this is done.

        The kernel has queued the events when an action returns, so some turns of the loop are
        enough to hear of all of them.
        """
        if actions:
            await asyncio.to_thread(lambda: [action() for action in actions])
        for _ in range(10):
            await asyncio.sleep(0)
        count = self.told.qsize()
        for _ in range(count):
            self.told.get_nowait()
        return count

    async def renews(self) -> None:
        """Let it look for directories that it does not watch yet; there is one."""
        self.watch.renew()
        await self.tells()


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    watched = Watched(tmp_path)
    await asyncio.to_thread(watched.watch.open)
    running = asyncio.create_task(watched.watch.run())
    yield watched
    running.cancel()
    await asyncio.wait([running])


def replace(path: Path) -> Action:
    """Put a file in place by renaming it: one event."""

    def act() -> None:
        temp = path.with_suffix(".new")
        temp.write_text("text")
        temp.rename(path)

    return act


async def test_every_way_to_change_a_spec_is_told(watched: Watched) -> None:
    for action in (
        lambda: watched.file.write_text("made in place"),
        lambda: watched.file.write_text("written in place"),
        lambda: watched.file.chmod(0o600),
        replace(watched.file),
        lambda: watched.file.rename(watched.own / "spec.json"),
        lambda: os.unlink(watched.own / "spec.json"),
        lambda: os.symlink("/nowhere", watched.file),
    ):
        assert await watched.count(action) >= 1


async def test_what_no_consumer_loads_is_not_told(watched: Watched) -> None:
    silent = await watched.count(
        lambda: (watched.own / f"{PREFIX}.0123456789abcdef.tmp").write_text("half"),
        lambda: (watched.own / "README").write_text("text"),
        lambda: os.mkdir(watched.own / "folder"),
    )
    assert silent == 0
    assert await watched.count(replace(watched.file)) == 1


@pytest.mark.parametrize("way", ["removed", "renamed"])
async def test_a_directory_that_goes_is_told_and_watched_again_once_it_is_back(
    watched: Watched, way: str
) -> None:
    away = watched.own.with_name("away")
    leave = (
        (lambda: os.rmdir(watched.own)) if way == "removed" else lambda: watched.own.rename(away)
    )
    assert await watched.count(leave) >= 1
    assert watched.watch.watched == frozenset()
    await asyncio.to_thread(os.mkdir, watched.own)
    await watched.renews()
    assert await watched.count(replace(watched.file)) == 1
    if way == "renamed":
        assert await watched.count(replace(away / "spec.yaml")) == 0


async def test_what_happens_between_opening_and_running_is_told(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    await asyncio.to_thread(watched.watch.open)
    await asyncio.to_thread(replace(watched.file))
    assert watched.told.empty()
    running = asyncio.create_task(watched.watch.run())
    await watched.tells()
    running.cancel()
    await asyncio.wait([running])


async def test_a_directory_that_is_made_later_is_watched_from_then_on(watched: Watched) -> None:
    await asyncio.to_thread(os.mkdir, watched.other)
    await watched.renews()
    assert await watched.count(replace(watched.other / "a.json")) == 1
    assert await watched.count(replace(watched.file)) == 1


async def test_other_directories_can_be_followed(watched: Watched) -> None:
    await asyncio.to_thread(os.mkdir, watched.other)
    watched.watch.follow([str(watched.other)])
    await watched.told.get()
    assert watched.watch.watched == {str(watched.other)}
    assert await watched.count() == 0, "that the first is given up was told as a change of it"
    assert await watched.count(replace(watched.file)) == 0
    assert await watched.count(replace(watched.other / "a.yaml")) == 1


async def test_two_names_of_one_directory_are_one(tmp_path: Path) -> None:
    """As ``/var/run`` is a link to ``/run``: a change is told once, and nothing for ever."""
    watched = Watched(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    names = [str(watched.own), str(tmp_path / "link" / "own")]
    watched.watch.follow(names)
    await asyncio.to_thread(watched.watch.open)
    running = asyncio.create_task(watched.watch.run())
    assert watched.watch.watched == set(names)
    assert await watched.count(replace(watched.file)) == 1
    watched.watch.renew()
    assert await watched.count(replace(watched.file)) == 1
    assert watched.watch.watched == set(names)
    running.cancel()
    await asyncio.wait([running])


async def test_changes_without_end_are_told_ever_more_rarely(watched: Watched) -> None:
    watched.timers.wait = True
    watched.timers.rests.clear()
    assert await watched.count(replace(watched.file)) == 1
    while watched.timers.rests[-1] < LONGEST_REST:
        assert await watched.count(replace(watched.file), replace(watched.file)) == 0
        watched.timers.ring()
        assert await watched.count() == 1
    rests = watched.timers.rests
    assert rests[0] == FIRST_REST
    assert all(b == min(2 * a, LONGEST_REST) for a, b in itertools.pairwise(rests))
    watched.timers.ring()  # nothing has happened since
    assert await watched.count(replace(watched.file)) == 1
    assert rests[-1] == FIRST_REST


async def test_without_a_descriptor_it_is_said_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)
    delays: list[float] = []
    real = inotify_simple.INotify

    def open_at_the_third_try(*, nonblocking: bool) -> object:
        if len(delays) < 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(nonblocking=nonblocking)

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    monkeypatch.setattr(inotify_simple, "INotify", open_at_the_third_try)
    watch = SpecWatch(
        [str(watched.own)], watched.told.put_nowait, sleep=sleep, later=watched.timers
    )
    with capture_logs() as logs:
        await asyncio.to_thread(watch.open)
        running = asyncio.create_task(watch.run())
        await watched.tells()
        running.cancel()
        await asyncio.wait([running])
    assert delays == [1.0, 2.0]
    (said,) = logs
    assert said["event"] == "spec-watch-unavailable"
    assert "max_user_instances" in said["hint"]
