"""Claims on a real kernel: a GPU goes to a virtual machine and comes back, whatever happens."""

import json
from typing import Final

import pytest

from tests.guest import observers
from tests.guest.client import CLAIM, Client, codes, twice, virtual_machine
from tests.guest.observers import AGENT, DISPLAY, SPECS, VIRTIO_GPU, Observers
from tests.guest.rig import Guest
from tests.guest.settings import ALL
from tests.guest.stage import CARD, GPU, NEIGHBOUR, NETWORK, Function, GuestStage
from tests.guest.topology import slot

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

THE_GPU: Final = Function(GPU, f"{slot(0)}.0")
VFIO: Final = f"{VIRTIO_GPU}-vfio"
OWN_FILE: Final = f"{SPECS}/cdi-agent_virtio.org-gpu.yaml"
VFIO_FILE: Final = f"{SPECS}/cdi-agent_virtio.org-gpu-vfio.yaml"
JOURNAL: Final = "/var/lib/cdi-agent/claims.json"
COMMAND: Final = "/opt/cdi-agent/bin/cdi-agent"


def on(driver: str) -> str:
    """A condition of test(1): the only GPU is on this driver."""
    return f"{THE_GPU.path}/driver -ef /sys/bus/pci/drivers/{driver}"


def driver_of(guest: Guest, function: Function) -> str:
    return guest.run("readlink", f"{function.path}/driver").out.strip().rpartition("/")[2]


def override_of(guest: Guest, function: Function) -> str:
    return guest.read(f"{function.path}/driver_override").strip()


def assert_own(guest: Guest, *functions: Function) -> None:
    """They are on their own drivers, nothing of ours is left on them, and no claim either."""
    for each in functions:
        assert driver_of(guest, each) == each.model.driver
        assert override_of(guest, each) == "(null)"
    left = Client(guest).claims()
    assert (left["claims"], left["stranded"], left["hung"]) == ([], [], [])


def assert_back(guest: Guest) -> None:
    """The only GPU is published as it was, and has been by no file that an engine refuses."""
    seen = Observers(guest)
    seen.agree(holds={VIRTIO_GPU: [THE_GPU.device]}, without=[VFIO])
    assert_own(guest, THE_GPU)
    assert seen.faults() == []


# --- there and back -------------------------------------------------------------------------------


def test_the_only_gpu_is_claimed_and_released_ten_times(one_gpu: Guest) -> None:
    """The fault that started this project, both ways."""
    client = Client(one_gpu)
    for _ in range(10):
        claimed = twice(lambda: client.claim(THE_GPU.address))
        assert (claimed["ok"], claimed["names"]) == (True, [f"{VFIO}={THE_GPU.device}"])
        group = f"$(grep -om1 '/dev/vfio/[0-9]*' {VFIO_FILE})"
        one_gpu.sh(f"test {on('vfio-pci')} -a ! -e {OWN_FILE} && : <>{group}")
        assert twice(client.release)["ok"]
        one_gpu.wait_until(f"test -e {OWN_FILE} -a ! -e {VFIO_FILE}")
        one_gpu.sh(f"test {on('virtio-pci')} && grep -q null {THE_GPU.path}/driver_override")
    assert_back(one_gpu)
    ended = Observers(one_gpu).agree().metrics
    assert ended['claims_ended_total{mode="vfio",outcome="released"}'] == 10


def test_a_virtual_machine_keeps_its_gpu_until_it_ends(one_gpu: Guest) -> None:
    """An unbind would block in the kernel; so none is written before the GPU is free."""
    client = Client(one_gpu)
    assert client.claim(THE_GPU.address)["ok"]
    agreed = Observers(one_gpu).agree(holds={VFIO: [THE_GPU.device]}, without=[VIRTIO_GPU])
    with virtual_machine(one_gpu, agreed.functions[THE_GPU.address]["group"], THE_GPU.address):
        kept = twice(client.release)
        assert codes(kept) == ["in-use"]
        assert "(python3) holds /dev/vfio/" in kept["problems"][0]["sentence"]
        assert driver_of(one_gpu, THE_GPU) == "vfio-pci"
    client.wait_for_phase(None)
    assert_back(one_gpu)


def test_a_gpu_in_use_is_not_claimed_and_the_process_is_named(one_gpu: Guest) -> None:
    client = Client(one_gpu)
    sleep = "sleep infinity </dev/null >/dev/null 2>&1 & echo $!"
    pid = one_gpu.sh(f"exec 3</dev/dri/renderD128; {sleep}").out.strip()
    refused = twice(lambda: client.claim(THE_GPU.address))
    assert not refused["ok"]
    assert f"process {pid} (sleep) holds /dev/dri/renderD128 open" in json.dumps(refused)
    agreed = Observers(one_gpu).agree(holds={VIRTIO_GPU: [THE_GPU.device]}, without=[VFIO])
    assert agreed.writes == 1
    one_gpu.sh(f"kill {pid}")
    assert_back(one_gpu)


# --- groups ---------------------------------------------------------------------------------------


def test_what_shares_slot_and_group_moves_along_and_goes_back_to_its_own_driver(
    no_gpu: Guest,
) -> None:
    """As the audio of a GPU does: it has another driver, and is no device of ours."""
    seen, client = Observers(no_gpu), Client(no_gpu)
    card, neighbour = Function(CARD, f"{slot(2)}.0"), Function(NEIGHBOUR, f"{slot(2)}.1")
    GuestStage(no_gpu, {"card": card, "neighbour": neighbour}).plug(["card", "neighbour"])
    seen.agree(holds={DISPLAY: [card.device]})
    planned = client.claim(card.address, dry_run=True)["moves"]
    assert [(move["address"], move["companion"]) for move in planned] == [
        (card.address, False),
        (neighbour.address, True),
    ]
    assert twice(lambda: client.claim(card.address))["ok"]
    seen.agree(holds={f"{DISPLAY}-vfio": [card.device]}, without=[DISPLAY])
    assert driver_of(no_gpu, neighbour) == "vfio-pci"
    assert twice(client.release)["ok"]
    seen.agree(holds={DISPLAY: [card.device]}, without=[f"{DISPLAY}-vfio"])
    assert_own(no_gpu, card, neighbour)
    assert seen.faults() == []


BRIDGED: Final = "a card behind the same bridge"
IN_THE_WAY: Final = {
    BRIDGED: (
        Function(CARD, "0000:08:01.0"),
        Function(CARD, "0000:08:02.0"),
    ),
    "a network card in the same slot": (
        Function(CARD, f"{slot(3)}.0"),
        Function(NETWORK, f"{slot(3)}.1"),
    ),
}


@pytest.mark.parametrize("which", IN_THE_WAY if ALL else [BRIDGED])
def test_what_is_in_the_way_is_named_and_moved_only_if_its_name_is_given(
    many_gpus: Guest, which: str
) -> None:
    seen, client = Observers(many_gpus), Client(many_gpus)
    card, other = IN_THE_WAY[which]
    stage = GuestStage(many_gpus, {"card": card, "other": other})
    there = many_gpus.sh("ls /sys/bus/pci/devices").out.split()
    stage.plug([name for name, each in stage.cast.items() if each.address not in there])
    before = seen.agree(there=[card.address, other.address], quiet=True)

    uevents = "/run/uevents.jsonl"
    many_gpus.start("uevents", "/usr/local/sbin/rig-uevents", uevents, "pci")
    many_gpus.wait_until(f"grep -q ready {uevents}")
    refused = twice(lambda: client.claim(card.address))
    assert codes(refused) == ["group-not-viable"]
    sentence = refused["problems"][0]["sentence"]
    assert sentence.startswith(f"{other.address} of IOMMU group ")
    assert f" is on {other.model.driver} " in sentence
    after = seen.agree(quiet=True)
    assert (after.specs, after.functions) == (before.specs, before.functions)
    assert after.writes == before.writes
    assert_own(many_gpus, card, other)
    assert len(many_gpus.read(uevents).splitlines()) == 1, "nothing was unbound or bound"

    assert client.claim(card.address, named=[other.address])["ok"]
    assert {driver_of(many_gpus, each) for each in (card, other)} == {"vfio-pci"}
    assert client.release()["ok"]
    # The two come back side by side, and which gets which number is the kernel's affair.
    after = seen.agree(without=[f"{DISPLAY}-vfio"])
    assert {k: set(v) for k, v in after.specs.items()} == {
        k: set(v) for k, v in before.specs.items()
    }
    assert_own(many_gpus, card, other)
    assert seen.faults() == []


# --- interrupted ----------------------------------------------------------------------------------

UNBOUND: Final = "the GPU has left its driver"
MOMENTS: Final = {
    "its intent is in the journal": f"grep -q {CLAIM} {JOURNAL}",
    UNBOUND: f"! test {on('virtio-pci')}",
    "the GPU is published on VFIO": f"test -e {VFIO_FILE}",
}


@pytest.mark.parametrize("moment", MOMENTS if ALL else [UNBOUND])
def test_a_kill_in_the_middle_strands_nothing(one_gpu: Guest, moment: str) -> None:
    """Wherever it is killed: the next agent has the claim in force, or undoes it."""
    client = Client(one_gpu)
    client.begin(THE_GPU.address)
    pid = one_gpu.sh(f"systemctl show --property=MainPID --value {AGENT}").out.strip()
    one_gpu.sh(f"until {MOMENTS[moment]}; do sleep 0.01; done; kill -9 {pid}")
    client.wait_until_ready()
    phase = client.wait_for_phase("done", None)
    if phase is None:
        assert_back(one_gpu)
    else:
        Observers(one_gpu).agree(holds={VFIO: [THE_GPU.device]}, without=[VIRTIO_GPU])
    assert client.release()["ok"]
    assert_back(one_gpu)


def assert_void(guest: Guest) -> None:
    """After a reboot: it is a boot like any other, and says that the claim is no more."""
    assert guest.sh("systemctl is-system-running").out == "running\n"
    observers.start(guest)
    assert_back(guest)
    (said,) = Observers(guest).entries("CDI_AGENT_EVENT=claim-void")
    assert said["CDI_AGENT_CLAIM"] == CLAIM
    assert json.loads(said["CDI_AGENT_DEVICES"]) == [THE_GPU.address]
    assert CLAIM not in guest.read(JOURNAL)


def test_a_reset_in_the_middle_of_a_claim_leaves_nothing_of_it(one_gpu: Guest) -> None:
    """The power goes when the journal has the claim half done and the GPU is on VFIO already."""
    client = Client(one_gpu)
    # Without udev's word about the group's node its entry is not published, nor the claim in force.
    one_gpu.sh("systemctl kill --signal=STOP systemd-udevd.service")
    client.begin(THE_GPU.address)
    client.wait_for_phase("publishing")
    assert (driver_of(one_gpu, THE_GPU), override_of(one_gpu, THE_GPU)) == ("vfio-pci",) * 2
    assert '"done":false' in one_gpu.read(JOURNAL)
    one_gpu.reset()
    assert_void(one_gpu)
    assert one_gpu.run(COMMAND, "claims").out == "nothing is claimed\n"


def test_a_reboot_ends_a_claim_that_is_in_force(one_gpu: Guest) -> None:
    client = Client(one_gpu)
    assert client.claim(THE_GPU.address)["ok"]
    one_gpu.reboot()
    assert_void(one_gpu)


# --- stranded -------------------------------------------------------------------------------------


def test_what_a_lost_journal_leaves_is_stranded_until_somebody_recovers_it(one_gpu: Guest) -> None:
    """Nobody knows any more who put the GPU on VFIO, and nothing is guessed."""
    seen, client = Observers(one_gpu), Client(one_gpu)
    assert client.claim(THE_GPU.address)["ok"]
    one_gpu.sh(f"systemctl stop {AGENT}; echo torn >{JOURNAL}; systemctl start {AGENT}")
    agreed = seen.agree(holds={VFIO: [THE_GPU.device]}, without=[VIRTIO_GPU])
    assert agreed.metrics["devices_stranded"] == 1
    assert [stray["address"] for stray in client.claims()["stranded"]] == [THE_GPU.address]
    assert len(seen.entries("CDI_AGENT_EVENT=journal-unusable")) == 1
    (said,) = seen.entries("CDI_AGENT_EVENT=stranded")
    assert said["CDI_AGENT_DEVICE"] == THE_GPU.address
    assert f"cdi-agent recover {THE_GPU.address}" in said["CDI_AGENT_HINT"]
    assert driver_of(one_gpu, THE_GPU) == "vfio-pci"
    assert twice(lambda: client.recover(THE_GPU.address))["ok"]
    assert_back(one_gpu)


def test_what_finds_no_driver_is_stranded_until_there_is_one(no_gpu: Guest) -> None:
    """A release when the module of the card's own driver is gone; it is loaded again later."""
    seen, client = Observers(no_gpu), Client(no_gpu)
    card = Function(CARD, f"{slot(0)}.0")
    stage = GuestStage(no_gpu, {"card": card})
    stage.plug(["card"])
    seen.agree(holds={DISPLAY: [card.device]})
    assert client.claim(card.address)["ok"]
    stage.unload("card")
    assert codes(client.release()) == ["stranded"]
    agreed = seen.agree(without=[DISPLAY, f"{DISPLAY}-vfio"])
    assert agreed.metrics["devices_stranded"] == 1
    assert len(seen.entries("CDI_AGENT_EVENT=stranded")) == 1
    stage.load("card")
    seen.agree(holds={DISPLAY: [card.device]})
    no_gpu.wait_until(f"grep -q null {card.path}/driver_override")
    client.wait_for_phase(None)
    assert_own(no_gpu, card)
    assert seen.faults() == []
