"""The unmodified agent on each captured host: what it writes is what is kept beside the host."""

from pathlib import Path

import pytest

from tests.conftest import IN_CI
from tests.hosts.test_consumer import HOSTS, golden_specs
from tests.netns.inside import SPECS
from tests.netns.outside import PrivateHost, UnusableError

pytestmark = pytest.mark.netns

SETTINGS = {"host": {"static_dev": True}}
"""A private host has no devtmpfs, which is the kernel's alone."""


@pytest.mark.parametrize("path", HOSTS, ids=lambda path: path.stem)
def test_the_agent_publishes_what_is_kept_and_withdraws_what_goes(
    path: Path, tmp_path: Path
) -> None:
    """At its start; and then, function by function, nothing is left that is not there.

    Whoever loads the specs all the while finds nothing empty, invalid or doubled.
    """
    try:
        host = PrivateHost(tmp_path, captured=path)
    except UnusableError as error:
        reason = f"no private host can be made here: {error}"
        if IN_CI:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with host:
        host.inside.start_reader()
        host.inside.start_agent(SETTINGS)
        kept = {name: text.removesuffix("\n") for name, text in golden_specs(path).items()}
        assert host.inside.files(SPECS) == kept, host.inside.agent_log()
        while functions := host.kernel.functions:
            host.kernel.unplug(next(iter(functions)))
        left = host.until(lambda: host.inside.files(SPECS), lambda files: not files)
        assert left == {}, host.inside.agent_log()
        assert host.inside.end_agent() == 0
        findings = host.end_reader()
        assert findings["faults"] == []
        assert findings["looks"] > 0
