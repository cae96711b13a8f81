"""Claims on a real kernel: the fault that started it, both ways, by the unit as it is shipped."""

import json
from typing import Any, Final

import pytest

from tests.guest.observers import AGENT, SPECS, VIRTIO_GPU
from tests.guest.rig import Guest
from tests.guest.topology import slot

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

GPU: Final = f"{slot(0)}.0"
NAME: Final = f"{GPU.replace(':', '-').replace('.', '-')}-0x1050"
SYSFS: Final = f"/sys/bus/pci/devices/{GPU}"
OWN_FILE: Final = f"{SPECS}/cdi-agent_virtio.org-gpu.yaml"
VFIO_FILE: Final = f"{SPECS}/cdi-agent_virtio.org-gpu-vfio.yaml"
CURL: Final = "curl --silent --max-time 170 --unix-socket /run/cdi-agent/control.sock"
CLAIM: Final = f'{CURL} --request PUT http://x/v1/claims/vm --data \'{{"devices": ["{GPU}"]}}\''
RELEASE: Final = f"{CURL} --request DELETE http://x/v1/claims/vm"


def ask(guest: Guest, command: str) -> dict[str, Any]:
    """Give an order; the answer."""
    answer: dict[str, Any] = json.loads(guest.sh(command, seconds=180).out)
    return answer


def driver_of(guest: Guest) -> str:
    return guest.sh(f"basename $(readlink {SYSFS}/driver || echo none)").out.strip()


def is_back(guest: Guest) -> None:
    """On its own driver, published as it was, and nothing of ours is left on it."""
    guest.wait_until(f"test -e {OWN_FILE} -a ! -e {VFIO_FILE}", seconds=60)
    assert driver_of(guest) == "virtio-pci"
    assert guest.read(f"{SYSFS}/driver_override") == "(null)\n"
    claims = ask(guest, f"{CURL} http://x/v1/claims")
    assert (claims["claims"], claims["stranded"], claims["hung"]) == ([], [], [])


def test_the_only_gpu_is_claimed_and_released_ten_times(one_gpu: Guest) -> None:
    for _ in range(10):
        claimed = ask(one_gpu, CLAIM)
        assert claimed["problems"] == []
        assert claimed["names"] == [f"{VIRTIO_GPU}-vfio={NAME}"]
        assert driver_of(one_gpu) == "vfio-pci"
        one_gpu.sh(f"test ! -e {OWN_FILE} -a -e {VFIO_FILE}")
        group = one_gpu.sh(f"basename $(readlink {SYSFS}/iommu_group)").out.strip()
        one_gpu.sh(f"grep -q /dev/vfio/{group} {VFIO_FILE}; : <>/dev/vfio/{group}")
        assert ask(one_gpu, RELEASE)["problems"] == []
        is_back(one_gpu)


def test_a_process_that_holds_the_group_is_named_and_waited_for(one_gpu: Guest) -> None:
    assert ask(one_gpu, CLAIM)["problems"] == []
    group = one_gpu.sh(f"basename $(readlink {SYSFS}/iommu_group)").out.strip()
    one_gpu.start("holder", "sh", "-c", f"exec 3<>/dev/vfio/{group}; exec sleep 600")
    one_gpu.wait_until(f"ls -l /proc/*/fd 2>/dev/null | grep -q /dev/vfio/{group}")
    refused = ask(one_gpu, RELEASE)
    assert refused["problems"][0]["code"] == "in-use"
    assert "sleep" in refused["problems"][0]["sentence"]
    assert driver_of(one_gpu) == "vfio-pci"
    one_gpu.stop("holder")
    is_back(one_gpu)


@pytest.mark.parametrize("after", [0.1, 0.5, 1.5])
def test_a_kill_in_the_middle_strands_nothing(one_gpu: Guest, after: float) -> None:
    """Wherever it is killed: the next agent ends the claim in force, or undoes it."""
    one_gpu.sh(f"({CLAIM} >/dev/null 2>&1 &) ; sleep {after}")
    one_gpu.sh(f"systemctl kill --kill-whom=main --signal=KILL {AGENT}")
    one_gpu.wait_until(f"{CURL} http://x/v1/status | grep -q '\"ready\": true'", seconds=120)
    one_gpu.wait_until(
        f'{CURL} http://x/v1/claims | grep -q -e \'"claims": \\[\\]\' -e \'"phase": "done"\'',
        seconds=60,
    )
    assert ask(one_gpu, RELEASE)["problems"] == []
    is_back(one_gpu)


def test_what_a_lost_journal_leaves_is_stranded_until_somebody_recovers_it(one_gpu: Guest) -> None:
    assert ask(one_gpu, CLAIM)["problems"] == []
    one_gpu.sh(f"systemctl stop {AGENT}; echo torn >/var/lib/cdi-agent/claims.json")
    one_gpu.sh(f"systemctl start {AGENT}", seconds=120)
    claims = ask(one_gpu, f"{CURL} http://x/v1/claims")
    assert [stray["address"] for stray in claims["stranded"]] == [GPU]
    assert driver_of(one_gpu) == "vfio-pci", "nothing is guessed"
    recovered = ask(one_gpu, f"{CURL} --request POST 'http://x/v1/recover/{GPU}?force=true'")
    assert recovered["problems"] == []
    is_back(one_gpu)
