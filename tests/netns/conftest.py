"""A private host for each test that asks for one, with a consumer that watches all the while."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import IN_CI
from tests.netns.outside import PrivateHost, UnusableError


@pytest.fixture
def host(tmp_path: Path) -> Iterator[PrivateHost]:
    """A host without devices, on which no agent runs yet.

    From its start to its end a consumer loads the spec directory. Whatever the test is about, it
    fails if that ever saw a spec that is empty, invalid or doubled, or if the agent does not end in
    order when it is told to. What others make bad on purpose, a test puts into
    `host.expected_faults`.
    """
    try:
        host = PrivateHost(tmp_path)
    except UnusableError as error:
        reason = f"no private host can be made here: {error}"
        if IN_CI:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with host:
        host.inside.start_reader()
        yield host
        if host.inside.agent_runs():
            assert host.inside.end_agent() == 0, host.inside.agent_log()
        findings = host.end_reader()
        assert [fault for fault in findings["faults"] if fault not in host.expected_faults] == []
        assert findings["looks"] > 0
