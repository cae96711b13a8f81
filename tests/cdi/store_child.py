"""A process that uses the store and may be killed at a step, or meet a file system that refuses.

``python -m tests.cdi.store_child SCENARIO ROOT [ARGUMENT ...]`` prints what happened as JSON.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from agent.cdi.store import Store
from agent.errors import StoreError
from tests.cdi.stores import Place


def die_at(step: str) -> Callable[[str], None]:
    """End this process as nothing can prevent it, once that step is done."""

    def check(name: str) -> None:
        if name == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return check


def killed(root: Path, action: str, step: str) -> None:
    """Write or delete, and die at that step."""
    place = Place(root)
    store = place.store(die_at(step))
    asyncio.run(store.apply(place.delete() if action == "delete" else place.write(1, 2)))


def refused(root: Path, how: str) -> None:
    """Publish a first content, make the file system refuse, and try to publish another."""
    place = Place(root)
    store = place.store()
    asyncio.run(store.apply(place.write(1)))
    REFUSALS[how](root)
    sentences = [sentence(store, place, delete=delete) for delete in (False, True)]
    print(json.dumps({"sentences": sentences, "names": place.names()}))


def fill(root: Path) -> None:
    """Leave no space."""
    with (root / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1024)):
            pass


def limit(root: Path) -> None:
    """Let no file grow beyond a few bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))


def drop(root: Path) -> None:
    """Be nobody."""
    os.setresuid(65534, 65534, 65534)


def remount(root: Path) -> None:
    """Make the file system read-only."""
    subprocess.run(["mount", "-o", "remount,ro", root], check=True)


REFUSALS = {"full": fill, "file-size": limit, "unprivileged": drop, "read-only": remount}


def sentence(store: Store, place: Place, *, delete: bool) -> str | None:
    """What a write that fails says."""
    try:
        asyncio.run(store.apply(place.write(*range(40), delete_if_unwritable=delete)))
    except StoreError as error:
        return error.sentence
    return None


if __name__ == "__main__":
    scenario, folder, *arguments = sys.argv[1:]
    if scenario == "killed":
        killed(Path(folder), *arguments)
    else:
        refused(Path(folder), *arguments)
