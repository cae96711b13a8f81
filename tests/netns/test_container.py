"""The agent in a container, with the options that the README gives: it does what it does on a host.

The image is not built here, for that needs Debian's mirror: what it holds, the agent and its
libraries, is lent to the container from where these tests run.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.netns.outside import PrivateHost
from tests.netns.process import CONFIG, NOTIFY
from tests.netns.story import (
    SETTINGS,
    A,
    B,
    becomes,
    becomes_true,
    log_entries,
    published,
    truth,
)

pytestmark = pytest.mark.podman

ROOT = Path(__file__).parents[2]
NOT_HERE = ("--detach", "--name=", "--restart=")
"""What only an administrator needs."""


def options() -> list[str]:
    """The options of the README's command."""
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"^podman run ((?:.*\\\n)*) *cdi-agent$", readme, re.MULTILINE)
    assert found is not None
    return [o for o in shlex.split(found[1].replace("\\\n", "")) if not o.startswith(NOT_HERE)]


def lent(host: PrivateHost) -> list[str]:
    """What stands in for the image, and what a private host needs beside."""
    places = {str(ROOT), sys.prefix, sys.base_prefix, "/usr"}
    return [
        *(f"--volume={place}:{place}:ro" for place in sorted(places)),
        f"--volume={Path(CONFIG).parent}:{Path(CONFIG).parent}:ro",
        *("--sdnotify=ignore", f"--volume={NOTIFY}:{NOTIFY}", f"--env=NOTIFY_SOCKET={NOTIFY}"),
        *("--env=SYSTEMD_DEVICE_VERIFY_SYSFS=0", f"--workdir={ROOT}"),
        *("--rootfs", host.inside.root_of_an_image()),
    ]


def start_in_container(host: PrivateHost) -> None:
    """Start the agent there, and wait until it is ready."""
    through = [*host.inside.podman_run(), *options(), *lent(host)]
    host.inside.start_agent(SETTINGS, through=through)


def test_it_publishes_the_same_as_on_the_host_and_follows_it(host: PrivateHost) -> None:
    host.kernel.plug(A.hardware)
    start_in_container(host)
    assert published(host) == truth(host)
    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)
    host.kernel.plug(B.hardware)
    becomes_true(host)
    assert host.kernel.move(A.address, "xe") == 0
    becomes_true(host)
    for source in ("kernel", "udev"):
        assert host.metrics()[f'cdi_agent_source_up{{source="{source}"}}'] == 1
    assert host.metrics()["cdi_agent_spec_watch_up"] == 1
    assert log_entries(host, "crashed") == []


def test_a_container_gets_from_it_what_it_gets_from_the_service(host: PrivateHost) -> None:
    """Its specs are the host's specs to the byte, so the next start of the service writes none."""
    host.kernel.plug(A.hardware)
    start_in_container(host)
    assert host.inside.podman([A.own], "ls", "/dev/dri").output == "card0\nrenderD128\n"
    files = host.inside.files("/run/cdi")
    assert host.inside.end_agent() == 0
    becomes(host, truth(host))
    host.inside.start_agent(SETTINGS)
    assert host.inside.files("/run/cdi") == files


def test_the_kernels_own_dev_is_recognised_in_it() -> None:
    """/dev is mounted at its own place, so that nothing has to be configured."""
    assert "--volume=/dev:/dev:ro" in options()
    assert "--network=host" in options()
