"""The lock files say what pyproject.toml says, by hash, and nothing about where to get it."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOCKS = sorted(ROOT.glob("requirements*.lock"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS = PROJECT["dependency-groups"]


def names(requirements: list[str]) -> set[str]:
    """Names of packages as an index normalises them, without versions and markers."""
    found = (re.match(r"[A-Za-z0-9._-]+", line) for line in requirements)
    return {re.sub(r"[-_.]+", "-", match[0]).lower() for match in found if match}


def entries(lock: Path) -> list[str]:
    """Each entry of a lock file as one line, comments left out."""
    lines = lock.read_text().replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_each_entry_is_one_release_with_its_hashes(lock: Path) -> None:
    """No option, no address: an index or folder to look in is the business of whoever installs."""
    for entry in entries(lock):
        assert re.fullmatch(
            r"[a-z0-9-]+==[^\s;]+(\s+;[^\\]+?)?(\s+--hash=sha256:[0-9a-f]{64})+\s*", entry
        )


@pytest.mark.parametrize(
    ("wanted", "locks"),
    [
        pytest.param(PROJECT["project"]["dependencies"], ["", "-dev"], id="dependencies"),
        pytest.param(GROUPS["build"], ["-build"], id="build"),
        pytest.param(GROUPS["dev"], ["-dev"], id="dev"),
    ],
)
def test_what_the_project_names_is_locked(wanted: list[str], locks: list[str]) -> None:
    """A dependency that is added without `make lock` is found here."""
    for lock in locks:
        assert names(wanted) <= names(entries(ROOT / f"requirements{lock}.lock"))


def test_one_release_everywhere() -> None:
    """Running, building and developing take the same release of a package that they share."""
    releases: dict[str, set[str]] = {}
    for lock in LOCKS:
        for entry in entries(lock):
            name, _, version = entry.split(maxsplit=1)[0].partition("==")
            releases.setdefault(name, set()).add(version)
    assert {name: found for name, found in releases.items() if len(found) > 1} == {}
