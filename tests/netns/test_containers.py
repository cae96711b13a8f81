"""What a container engine makes of it: podman with crun, on a private host."""

import pytest

from tests.netns.consumers import Ended
from tests.netns.outside import PrivateHost
from tests.netns.story import ALL, A, B, becomes_true, published, start

pytestmark = pytest.mark.podman

LIST = (
    "find",
    "/dev/dri",
    "/dev/vfio",
    "-type",
    "c",
    "-exec",
    "stat",
    "-c",
    "%n %t:%T %a",
    "{}",
    ";",
)


def nodes(ended: Ended) -> dict[str, str]:
    """The nodes that a container saw: path to number in hex, and mode."""
    assert "\n" in ended.output, ended
    return dict(line.split(" ", 1) for line in sorted(ended.output.splitlines()))


def test_a_container_gets_exactly_the_published_nodes_with_their_modes(host: PrivateHost) -> None:
    start(host, A, B)
    assert nodes(host.inside.podman([A.own], *LIST)) == {
        "/dev/dri/card0": "e2:0 666",
        "/dev/dri/renderD128": "e2:80 666",
    }
    assert nodes(host.inside.podman([ALL], *LIST)) == {
        "/dev/dri/card0": "e2:0 666",
        "/dev/dri/card1": "e2:1 666",
        "/dev/dri/renderD128": "e2:80 666",
        "/dev/dri/renderD129": "e2:81 666",
    }


def test_after_the_withdrawal_the_request_is_refused_and_the_vfio_one_is_met(
    host: PrivateHost,
) -> None:
    start(host, A)
    assert host.inside.podman([A.own], "ls", "/dev/dri").status == 0
    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)

    refused = host.inside.podman([A.own], "ls", "/dev/dri")
    assert refused.status != 0
    assert "unresolvable" in refused.errors

    seen = nodes(host.inside.podman([A.vfio], *LIST))
    assert seen.keys() == set(published(host)[A.vfio])
    # Usable by a launcher that is not root, though the host's own node is root's alone.
    assert all(mode.endswith(" 666") for mode in seen.values())

    assert host.kernel.move(A.address, "xe") == 0
    becomes_true(host)
    assert host.inside.podman([A.own], "ls", "/dev/dri").status == 0
