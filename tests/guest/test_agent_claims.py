"""Claims of devices that are in use, or do not come alone, on a real kernel."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from tests.guest.observers import DISPLAY, TOOLS, VIRTIO_GPU, Observers
from tests.guest.rig import Guest
from tests.guest.stage import CARD, GPU, Function
from tests.guest.topology import slot

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

THE_GPU: Final = Function(GPU, f"{slot(0)}.0")
VFIO: Final = f"{VIRTIO_GPU}-vfio"

Json = dict[str, Any]


class Client:
    """Orders and questions over the control socket; the command would take seconds to start."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    def claim(self, *devices: str) -> Json:
        """Claim devices; again while the agent says that this machine is too busy to tell."""
        body = json.dumps({"devices": devices, "mode": "vfio"})
        while True:
            answer = self._ask("claims/desktop", "--request", "PUT", "--data", body)
            codes = {problem["code"] for problem in answer["problems"]}
            if not codes & {"override-unknown", "holders-unknown"}:
                return answer

    def release(self) -> Json:
        return self._ask("claims/desktop", "--request", "DELETE")

    def claims(self) -> Json:
        return self._ask("claims")

    def _ask(self, path: str, *more: str) -> Json:
        socket = ("--silent", "--unix-socket", "/run/cdi-agent/control.sock")
        url = f"http://localhost/v1/{path}"
        answer: Json = json.loads(self._guest.run("curl", *socket, *more, url, seconds=200).out)
        return answer


@contextmanager
def running(guest: Guest, group: str) -> Iterator[None]:
    """A virtual machine has the GPU."""
    log = "/run/launcher.log"
    launcher = ("python3", f"{TOOLS}/inside/launcher.py", group, THE_GPU.address)
    guest.start("launcher", f"--property=StandardOutput=file:{log}", *launcher)
    guest.wait_until(f"grep -q running {log}")
    yield
    guest.stop("launcher")


def assert_back(guest: Guest, observers: Observers, client: Client) -> None:
    """The GPU is on its own driver, is published as before, and nothing is left of the claim."""
    agreed = observers.agree(holds={VIRTIO_GPU: [THE_GPU.device]}, without=[VFIO])
    assert agreed.functions[THE_GPU.address]["driver"] == "virtio-pci"
    assert guest.read(f"{THE_GPU.path}/driver_override") == "(null)\n"
    left = client.claims()
    assert (left["claims"], left["stranded"], left["hung"]) == ([], [], [])
    assert observers.faults() == []


def test_a_virtual_machine_keeps_its_gpu_until_it_ends(one_gpu: Guest) -> None:
    """An unbind would block in the kernel; so none is written before the GPU is free."""
    observers, client = Observers(one_gpu), Client(one_gpu)
    for _again in range(2):
        answer = client.claim(THE_GPU.address)
        assert (answer["ok"], answer["names"]) == (True, [f"{VFIO}={THE_GPU.device}"])
    agreed = observers.agree(holds={VFIO: [THE_GPU.device]}, without=[VIRTIO_GPU])
    with running(one_gpu, agreed.functions[THE_GPU.address]["group"]):
        kept = client.release()
        assert [problem["code"] for problem in kept["problems"]] == ["in-use"]
        assert one_gpu.sh(f"readlink {THE_GPU.path}/driver").out.endswith("/vfio-pci\n")
    assert_back(one_gpu, observers, client)
    assert client.release()["ok"], "what is released already stays so"


def test_a_gpu_in_use_is_not_claimed_and_the_process_is_named(one_gpu: Guest) -> None:
    observers, client = Observers(one_gpu), Client(one_gpu)
    sleep = "sleep infinity </dev/null >/dev/null 2>&1 & echo $!"
    pid = one_gpu.sh(f"exec 3</dev/dri/renderD128; {sleep}").out.strip()
    refused = client.claim(THE_GPU.address)
    assert not refused["ok"]
    assert f"process {pid} (sleep) holds /dev/dri/renderD128 open" in json.dumps(refused)
    assert observers.agree(holds={VIRTIO_GPU: [THE_GPU.device]}, without=[VFIO]).writes == 1
    one_gpu.sh(f"kill {pid}")
    assert_back(one_gpu, observers, client)


def test_what_shares_slot_and_group_is_moved_along(many_gpus: Guest) -> None:
    observers, client = Observers(many_gpus), Client(many_gpus)
    twins = [Function(CARD, f"{slot(2)}.{number}") for number in (0, 1)]
    assert client.claim(twins[0].address)["ok"]
    agreed = observers.agree(holds={f"{DISPLAY}-vfio": [twin.device for twin in twins]})
    assert {agreed.functions[twin.address]["driver"] for twin in twins} == {"vfio-pci"}
    assert client.release()["ok"]
    agreed = observers.agree(without=[f"{DISPLAY}-vfio"])
    assert {agreed.functions[twin.address]["driver"] for twin in twins} == {"bochs-drm"}
    assert observers.faults() == []
