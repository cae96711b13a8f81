"""The agent on a real kernel beyond the scenario files: its ends, its users, its log, groups."""

import json
from collections.abc import Callable
from typing import Final

import pytest

from agent.simulate.stage import Driver
from tests.guest.channel import Result
from tests.guest.client import virtual_machine
from tests.guest.observers import AGENT, DISPLAY, SPECS, VIRTIO_GPU, Observers
from tests.guest.rig import Guest
from tests.guest.stage import CARD, GPU, Cast, Function, GuestStage
from tests.guest.topology import slot

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

THE_GPU: Final = Function(GPU, f"{slot(0)}.0")
ONLY: Final[Cast] = {"gpu": THE_GPU}
VFIO: Final = f"{VIRTIO_GPU}-vfio"
OWN_FILE: Final = f"{SPECS}/cdi-agent_virtio.org-gpu.yaml"

# --- it ends, and the truth is found again --------------------------------------------------------


def killed(guest: Guest, meanwhile: Callable[[], None]) -> None:
    guest.sh(f"systemctl kill --kill-whom=main --signal=KILL {AGENT}")
    meanwhile()


def hung(guest: Guest, meanwhile: Callable[[], None]) -> None:
    """The watchdog bites; shipped are 30 s, which nobody wants to wait for."""
    guest.write(f"/run/systemd/system/{AGENT}.d/soon.conf", "[Service]\nWatchdogSec=10\n")
    guest.sh(f"systemctl daemon-reload; systemctl restart {AGENT}")
    guest.sh(f"systemctl kill --kill-whom=main --signal=STOP {AGENT}")
    meanwhile()
    guest.wait_until(f"journalctl --unit={AGENT} --grep='Watchdog timeout' --quiet >/dev/null")


def stopped_and_started(guest: Guest, meanwhile: Callable[[], None]) -> None:
    """Nobody keeps the specs true in between, but containers go on: the file stays."""
    guest.sh(f"systemctl stop {AGENT}")
    meanwhile()
    guest.sh(f"test -e {OWN_FILE}; systemctl start {AGENT}")


@pytest.mark.parametrize("end", [killed, hung, stopped_and_started])
def test_what_happened_while_it_was_away_is_found(
    one_gpu: Guest, end: Callable[[Guest, Callable[[], None]], None]
) -> None:
    """The only GPU goes to VFIO while nobody listens, and the old spec is gone in the end."""
    observers = Observers(one_gpu)
    stage = GuestStage(one_gpu, ONLY)
    observers.agree(holds={VIRTIO_GPU: [THE_GPU.device]})
    end(one_gpu, lambda: stage.move("gpu", Driver.VFIO))
    observers.agree(holds={VFIO: [THE_GPU.device]}, without=[VIRTIO_GPU])
    assert observers.faults() == []
    stage.move("gpu", Driver.OWN)
    observers.agree(holds={VIRTIO_GPU: [THE_GPU.device]}, without=[VFIO])


# --- who uses the specs ---------------------------------------------------------------------------

BOX: Final = "/srv/box"


def podman(guest: Guest, device: str, command: str) -> Result:
    """Run a container that has a device."""
    run = f"podman run --rm --network=none --device={device} --rootfs {BOX} /bin/busybox sh -c"
    return guest.sh(f"{run} '{command}'", check=False)


def test_podman_gives_what_is_there_and_refuses_what_is_gone(one_gpu: Guest) -> None:
    observers = Observers(one_gpu)
    stage = GuestStage(one_gpu, ONLY)
    one_gpu.sh(f"mkdir -p {BOX}/bin {BOX}/dev {BOX}/proc {BOX}/sys; cp /bin/busybox {BOX}/bin")
    own, vfio = f"{VIRTIO_GPU}={THE_GPU.device}", f"{VFIO}={THE_GPU.device}"
    look = "/bin/busybox ls /dev/dri; : <>/dev/dri/renderD128 && echo opened"
    given = "card0\nrenderD128\nopened\n"
    assert podman(one_gpu, f"{VIRTIO_GPU}=all", look).out == given

    stage.move("gpu", Driver.VFIO)
    group = observers.agree(holds={VFIO: [THE_GPU.device]}, without=[VIRTIO_GPU]).functions[
        THE_GPU.address
    ]["group"]
    refused = podman(one_gpu, own, "true")
    assert refused.rc != 0
    assert f"unresolvable CDI devices {own}" in refused.err
    open_group = f"/bin/busybox ls /dev/vfio; : <>/dev/vfio/{group} && echo opened"
    assert podman(one_gpu, vfio, open_group).out == f"{group}\nvfio\nopened\n"

    stage.move("gpu", Driver.OWN)
    observers.agree(holds={VIRTIO_GPU: [THE_GPU.device]}, without=[VFIO])
    assert podman(one_gpu, own, look).out == given


def test_a_device_that_a_virtual_machine_keeps_holds_up_nothing_else(many_gpus: Guest) -> None:
    """The unbind blocks in the kernel, and whoever touches the device's lock hangs with it."""
    observers = Observers(many_gpus)
    other = Function(GPU, f"{slot(1)}.0")
    stage = GuestStage(many_gpus, {"gpu": THE_GPU, "other": other})
    stage.move("gpu", Driver.VFIO)
    on_vfio = observers.agree(holds={VFIO: [THE_GPU.device], VIRTIO_GPU: [other.device]})
    group = on_vfio.functions[THE_GPU.address]["group"]
    with virtual_machine(many_gpus, group, THE_GPU.address):
        unbind = f"echo {THE_GPU.address} >/sys/bus/pci/drivers/vfio-pci/unbind"
        many_gpus.sh(f"systemd-run --quiet --collect --no-block --unit=unbinder sh -c '{unbind}'")
        many_gpus.wait_until(f"! test -e {THE_GPU.path}/driver")
        stage.unbind("other")
        kept = {VFIO: [THE_GPU.device]}
        observers.agree(holds=kept, without=[VIRTIO_GPU], quiet=True, in_use=True)
        stage.bind("other")
        observers.agree(holds={**kept, VIRTIO_GPU: [other.device]}, in_use=True)

    observers.agree(holds={VIRTIO_GPU: [other.device]}, without=[VFIO])
    assert observers.faults() == []


# --- what it logs ---------------------------------------------------------------------------------


def test_the_journal_is_asked_by_the_names_of_the_fields_of_a_pass(one_gpu: Guest) -> None:
    observers = Observers(one_gpu)
    stage = GuestStage(one_gpu, ONLY)
    stage.unbind("gpu")
    observers.agree(without=[VIRTIO_GPU])
    assert one_gpu.sh("ls -d /dev/dri", check=False).rc != 0, "/dev/dri itself is gone"
    stage.bind("gpu")
    agreed = observers.agree(holds={VIRTIO_GPU: [THE_GPU.device]}, quiet=True)

    name = f"{VIRTIO_GPU}={THE_GPU.device}"
    path = f"/var{OWN_FILE}"
    (withdrawal,) = observers.entries(f'CDI_AGENT_DELETED=["{path}"]')
    assert withdrawal["CDI_AGENT_EVENT"] == "pass"
    assert json.loads(withdrawal["CDI_AGENT_WITHDREW"]) == [name]
    assert float(withdrawal["CDI_AGENT_WITHDRAW_MS"]) > 0
    assert withdrawal["_TRANSPORT"] == "journal"
    assert withdrawal["PRIORITY"] == "6"
    assert withdrawal["_SYSTEMD_UNIT"] == AGENT
    same = observers.entries(f"CDI_AGENT_PASS_ID={withdrawal['CDI_AGENT_PASS_ID']}")
    assert same == [withdrawal]

    publications = observers.entries(f'CDI_AGENT_PUBLISHED=["{name}"]', "CDI_AGENT_EVENT=pass")
    assert [json.loads(entry["CDI_AGENT_WROTE"]) for entry in publications] == [[path], [path]]

    why = observers.entries("CDI_AGENT_EVENT=withheld", f"CDI_AGENT_DEVICE={THE_GPU.address}")
    assert {entry["CDI_AGENT_REASON"] for entry in why} <= {"no-driver", "node-missing"}
    assert why

    # What journal and metrics count is the same.
    to_disk = {
        action: agreed.metrics[f'message_to_disk_seconds_count{{action="{action}"}}']
        for action in ("withdraw", "publish")
    }
    assert to_disk == {"withdraw": 1, "publish": len(publications)}
    assert agreed.writes == 3


# --- groups ---------------------------------------------------------------------------------------

PAIRS: Final = {
    "functions of one slot": (f"{slot(2)}.0", f"{slot(2)}.1"),
    "devices behind one bridge": ("0000:08:01.0", "0000:08:02.0"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_group_is_published_on_vfio_when_all_of_it_can_be_used(
    many_gpus: Guest, pair: str
) -> None:
    observers = Observers(many_gpus)
    cards = {address: Function(CARD, address) for two in PAIRS.values() for address in two}
    stage = GuestStage(many_gpus, cards)
    one, other = PAIRS[pair]
    kind = f"{DISPLAY}-vfio"

    def become(*on_vfio: str, withdrawn: tuple[str, ...] = ()) -> dict[str, float]:
        own = [cards[a].device for a in cards if a not in {*on_vfio, *withdrawn}]
        vfio = {kind: [cards[a].device for a in on_vfio]}
        agreed = (
            observers.agree(holds={DISPLAY: own, **vfio})
            if on_vfio
            else observers.agree(holds={DISPLAY: own}, without=[kind])
        )
        nodes = agreed.specs.get(kind, {}).values()
        assert len({tuple(each) for each in nodes}) <= 1, "they share one group's node"
        return agreed.metrics

    not_viable = 'withheld{reason="group-not-viable"}'
    stage.move(one, Driver.VFIO)
    assert become(withdrawn=(one,))[not_viable] == 1
    stage.move(other, Driver.VFIO)
    assert become(one, other)[not_viable] == 0
    stage.unbind(other)
    become(one, withdrawn=(other,))
    stage.move(other, Driver.OWN)
    become(withdrawn=(one,))
    stage.move(one, Driver.OWN)
    become()
    assert observers.faults() == []


# --- what is none of ours -------------------------------------------------------------------------


def test_a_card_without_a_render_node_and_without_a_profile_is_not_published(
    no_gpu: Guest,
) -> None:
    """As the display chip of a board's management controller, which takes card0."""
    observers = Observers(no_gpu)
    stage = GuestStage(no_gpu, {"chip": Function(CARD, f"{slot(3)}.0")})
    no_gpu.sh(f"rm /etc/cdi-agent/config.yaml; systemctl reload {AGENT}")
    stage.plug(["chip"])
    agreed = observers.agree(rules=[], there=[f"{slot(3)}.0"], quiet=True)
    assert agreed.functions[f"{slot(3)}.0"]["nodes"]["card0"] == "/dev/dri/card0"
    assert agreed.specs == {}
    assert agreed.writes == 0
    stage.move("chip", Driver.VFIO)
    assert observers.agree(rules=[], quiet=True).specs == {}
