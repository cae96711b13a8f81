"""Children that wait for what they are to do: used once each, replaced, and let go when idle."""

import asyncio
import os
import select
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent.vfio import spares as module
from agent.vfio.children import PYTHON, Child, Children
from agent.vfio.spares import Spares
from agent.vfio.worker import WRITER
from agent.vfio.writer import parse

CONTENT = b"(null)\n"
SCRIPT = (
    f"import os, sys; sys.path.append({os.path.dirname(module.__file__)!r}); import arguments; "
    "os.write(1, '\\0'.join(arguments.given(sys.argv[1:])).encode())"
)
ECHO = (*PYTHON, "-c", SCRIPT)
"""Says what it was told."""


@pytest.fixture
async def children(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Children]:
    """All that a test starts; none is left."""
    monkeypatch.setattr(module, "REPLACE", 0.0)
    children = Children()
    yield children
    async with asyncio.timeout(30):
        while len(children):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)


async def read(spares: Spares, path: Path) -> Child:
    """Let a child read a file, and wait until others wait."""
    child = spares.start("read", str(path))
    assert await child.ends_within(None)
    assert parse(child.output()) == (0, CONTENT)
    return child


async def waiting(children: Children, number: int) -> None:
    async with asyncio.timeout(30):
        while len(children) != number:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)


async def test_each_child_does_one_thing_and_others_wait(
    children: Children, tmp_path: Path
) -> None:
    path = tmp_path / "attribute"
    path.write_bytes(CONTENT)
    spares = Spares(children, WRITER, most=2)
    pids = set()
    for _ in range(5):
        pids.add((await read(spares, path)).pid)
        await waiting(children, 2)
    assert len(pids) == 5
    spares.close()


async def test_any_argument_gets_through(children: Children, tmp_path: Path) -> None:
    """Empty ones, newlines and bytes that are no text, as on a command line."""
    path, lock = tmp_path / "attribute", str(tmp_path / "lock")
    path.write_bytes(b"0123456789")
    spares = Spares(children, WRITER, most=1)
    for text, content in (("\n", b"\n123456789"), ("\udce4 x", b"\xe4 x3456789")):
        for _ in range(2):  # the first child is told by its arguments
            child = spares.start("write", lock, str(path), text)
            assert await child.ends_within(None)
            assert parse(child.output()) == (0, b"")
            assert path.read_bytes() == content
            await waiting(children, 1)
    spares.close()


@pytest.mark.parametrize("letter", ["x", "ä"], ids=["ascii", "two bytes"])
@pytest.mark.parametrize("beyond", [0, 1])
async def test_nobody_is_told_half_of_what_it_is_to_do(
    children: Children, letter: str, *, beyond: int
) -> None:
    """More than a pipe takes at once goes to a new child; a list of nodes may be long."""
    spares = Spares(children, ECHO, most=1)
    assert await spares.start("first").ends_within(None)
    await waiting(children, 1)
    (spare,) = spares._waiting  # noqa: SLF001 - as below
    first = letter * 1500
    filler = "x" * (select.PIPE_BUF - len(f"{first}\0".encode()) + beyond)
    child = spares.start(first, filler)
    assert await child.ends_within(None)
    assert child.output().decode() == f"{first}\0{filler}"
    assert (child is spare) is (beyond == 0)
    spares.close()


async def test_those_that_nobody_wants_end_by_themselves(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE", 0.0)
    path = tmp_path / "attribute"
    path.write_bytes(CONTENT)
    await read(Spares(children, WRITER), path)
    await waiting(children, 0)


async def test_one_that_was_killed_is_passed_over(children: Children, tmp_path: Path) -> None:
    path = tmp_path / "attribute"
    path.write_bytes(CONTENT)
    spares = Spares(children, WRITER, most=1)
    await read(spares, path)
    await waiting(children, 1)
    (spare,) = spares._waiting  # noqa: SLF001 - nothing else tells which it is
    spare.kill()
    assert await spare.ends_within(None)
    await read(spares, path)
    spares.close()


async def test_one_whose_agent_has_died_does_nothing(children: Children) -> None:
    """The end of its input is all that it hears."""
    child = children.start(WRITER, waits=True)
    child.dismiss()
    assert await child.ends_within(None)
    assert (child.gone.result(), child.output()) == (0, b"")


async def test_abandoned_with_those_that_work(tmp_path: Path) -> None:
    children = Children()
    spares = Spares(children, WRITER, most=3)
    path = tmp_path / "attribute"
    path.write_bytes(CONTENT)
    await read(spares, path)
    await waiting(children, 3)
    left = [child.pid for child in spares._waiting]  # noqa: SLF001 - as above
    spares.close()
    children.abandon()
    for pid in left:
        try:
            await asyncio.to_thread(os.waitpid, pid, 0)
        except ChildProcessError:
            continue  # `abandon` could take its status at once
    await asyncio.sleep(0)
    assert len(children) == 0


async def test_closed_no_other_waits(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the place of the one that has just ended nor of the one that works still."""
    path = tmp_path / "attribute"
    path.write_bytes(CONTENT)
    spares = Spares(children, WRITER, most=1)
    started: list[Child] = []
    start = Children.start

    def note(*args: Any, **kwargs: Any) -> Child:  # noqa: ANN401 - whatever `start` takes
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(Children, "start", note)
    await read(spares, path)
    working = spares.start("read", str(path))
    spares.close()
    assert await working.ends_within(None)
    await waiting(children, 0)
    await asyncio.sleep(0)
    assert len(started) == 2
