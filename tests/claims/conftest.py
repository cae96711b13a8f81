"""Agents for the tests of claims, and the hosts on which they run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.simulate import Features, Hardware
from tests.claims.host import FEATURES, ClaimHost, Settings
from tests.claims.nursery import Nursery

MakeHost = Callable[..., ClaimHost]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where agents come from."""
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def make_host(tmp_path: Path, nursery: Nursery) -> Iterator[MakeHost]:
    """Makes a host; whoever reads its specs all the while must have found nothing wrong."""
    made: list[ClaimHost] = []

    def make(
        *hardware: Hardware, features: Features = FEATURES, settings: Settings | None = None
    ) -> ClaimHost:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(ClaimHost(folder, nursery, *hardware, features=features, settings=settings))
        return made[-1]

    yield make
    for host in made:
        assert host.reader.faults == []
        assert host.reader.findings.looks
