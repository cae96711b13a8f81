"""The unmodified agent on a private host: real netlink, real nodes, real libudev.

The host's `host` fixture fails each of these tests too if a consumer ever saw a bad directory.
"""

import itertools
import random
import signal

import pytest

from agent.simulate.events import Source
from agent.simulate.udev import UdevMode
from tests.netns.outside import PrivateHost
from tests.netns.story import (
    ALL,
    GPU_FILE,
    MEI_FILE,
    SETTINGS,
    VFIO_FILE,
    A,
    B,
    C,
    Published,
    becomes,
    becomes_true,
    files_written,
    full_looks,
    published,
    start,
    truth,
)

pytestmark = pytest.mark.netns

CARD_CHANGED = {
    "ACTION": "change",
    "DEVPATH": f"{A.hardware.devpath}/drm/card0",
    "SUBSYSTEM": "drm",
    "DEVTYPE": "drm_minor",
    "DEVNAME": "dri/card0",
    "MAJOR": "226",
    "MINOR": "0",
    "HOTPLUG": "1",
}


# --- one GPU, several GPUs ------------------------------------------------------------------------


def test_the_only_gpu_goes_to_vfio_and_back(host: PrivateHost) -> None:
    """The fault that started it: its file is deleted, not left stale and not written empty."""
    start(host, A)
    own = published(host)

    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)
    assert published(host).keys() == {A.vfio}
    *before, last = files_written(host)
    assert sorted(before) == [("deleted", MEI_FILE), ("deleted", GPU_FILE)]
    assert last == ("written", VFIO_FILE)

    assert host.kernel.move(A.address, "xe") == 0
    becomes(host, own)
    first, *after = files_written(host)
    assert first == ("deleted", VFIO_FILE)
    assert sorted(after) == [("written", MEI_FILE), ("written", GPU_FILE)]


def test_of_two_gpus_one_goes_to_vfio_and_the_other_stays(host: PrivateHost) -> None:
    start(host, A, B)
    stays = published(host)[B.own]

    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)
    assert published(host)[B.own] == stays
    assert published(host)[ALL] == stays
    assert ("deleted", GPU_FILE) not in files_written(host)

    assert host.kernel.move(A.address, "xe") == 0
    becomes_true(host)
    assert ALL in published(host)


# --- numbers that change --------------------------------------------------------------------------


def test_a_gpu_that_comes_back_with_other_numbers_is_published_with_those(
    host: PrivateHost,
) -> None:
    """A process that holds the old card keeps its number taken."""
    start(host, A)
    before = published(host)[A.own]
    host.inside.hold("/dev/dri/card0")
    assert host.kernel.unbind(A.address) == 0
    becomes(host, {})
    assert host.kernel.probe(A.address) == 0
    becomes_true(host)
    assert published(host)[A.own] != before


def test_two_gpus_that_swap_their_numbers_are_never_mixed_up(host: PrivateHost) -> None:
    start(host, A, B)
    before = published(host)
    assert host.kernel.unbind(A.address) == host.kernel.unbind(B.address) == 0
    assert host.kernel.probe(B.address) == host.kernel.probe(A.address) == 0
    becomes_true(host)
    after = published(host)
    assert (after[A.own], after[B.own]) == (before[B.own], before[A.own])


# --- nodes that come and go -----------------------------------------------------------------------


def test_the_firmwares_display_is_not_published_and_takes_no_gpus_place(host: PrivateHost) -> None:
    """It has card0 until the real driver comes; then every GPU's number is another."""
    host.kernel.plug_platform("simple-framebuffer.0", "simple-framebuffer")
    start(host, A)
    assert "/dev/dri/card1" in published(host)[A.own]
    host.kernel.unplug_platform("simple-framebuffer.0")
    host.kernel.plug(B.hardware)
    becomes_true(host)
    assert "/dev/dri/card0" in published(host)[B.own]


def test_a_gpu_that_loses_one_node_is_withdrawn_whole(host: PrivateHost) -> None:
    """As between the removals of its card and of its render node; what needs neither stays."""
    start(host, A)
    other = {name: nodes for name, nodes in published(host).items() if "gpu-mei" in name}
    host.kernel.lose("/dev/dri/renderD128")
    host.inside.send(Source.KERNEL, {**CARD_CHANGED, "ACTION": "remove"})
    becomes(host, other)
    host.kernel.restore("/dev/dri/renderD128")
    host.inside.send(Source.KERNEL, {**CARD_CHANGED, "ACTION": "add"})
    becomes_true(host)


# --- storms, losses, nonsense ---------------------------------------------------------------------


def test_a_connector_storm_writes_nothing_and_delays_no_other_device(host: PrivateHost) -> None:
    start(host, A)
    host.inside.begin_storm(A.address)
    host.kernel.plug(B.hardware)
    becomes_true(host)
    host.inside.end_storm()
    assert sorted(files_written(host)) == [("written", MEI_FILE), ("written", GPU_FILE)]


def test_a_device_that_becomes_ready_during_its_own_storm_is_published(host: PrivateHost) -> None:
    """Events restart no timer; only facts do."""
    start(host)
    host.kernel.udev = UdevMode.MANUAL
    host.kernel.plug(A.hardware)
    host.inside.begin_storm(A.address)
    host.kernel.udev = UdevMode.AUTO
    becomes_true(host)
    host.inside.end_storm()


def test_after_an_overflow_the_state_is_right_and_one_full_look_each_sufficed(
    host: PrivateHost,
) -> None:
    """The loop is stopped, more comes than the sockets hold, and the GPU moves unheard."""
    host.kernel.plug(A.hardware)
    host.inside.start_agent({**SETTINGS, "host": {"static_dev": True, "receive_buffer": 65536}})
    before = full_looks(host)
    host.inside.signal_agent(signal.SIGSTOP)
    for source in Source:
        host.inside.send(source, CARD_CHANGED, times=2_000)
    assert host.kernel.move(A.address, "vfio-pci") == 0
    host.inside.signal_agent(signal.SIGCONT)
    becomes_true(host)
    metrics = host.metrics()
    overflows = [metrics[f'cdi_agent_event_overflows_total{{source="{name}"}}'] for name in Source]
    assert min(overflows) >= 1
    assert 1 <= full_looks(host) - before <= sum(overflows)
    assert [metrics[f'cdi_agent_source_up{{source="{name}"}}'] for name in Source] == [1, 1]

    assert host.kernel.move(A.address, "xe") == 0
    becomes_true(host)


def test_a_flood_of_100000_messages_takes_no_memory_and_ends_in_the_right_state(
    host: PrivateHost,
) -> None:
    start(host, A)
    before = host.inside.agent_memory()
    host.inside.send(Source.UDEV, CARD_CHANGED, times=100_000)
    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)
    assert host.inside.agent_memory() - before < 8 * 1024


@pytest.mark.parametrize("lost", list(Source))
def test_either_source_alone_suffices_in_the_end(host: PrivateHost, lost: Source) -> None:
    start(host, A)
    host.inside.mute(lost)
    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)
    assert host.kernel.move(A.address, "xe") == 0
    becomes_true(host)


def test_malformed_messages_are_counted_and_change_nothing(host: PrivateHost) -> None:
    start(host, A)
    for payload in (b"", b"\xff" * 200, b"add@/x\0ACTION=add\0", b"x" * 9000):
        for source in Source:
            host.inside.send_raw(source, payload)
    host.kernel.plug(B.hardware)
    becomes_true(host)
    assert sorted(files_written(host)) == [("written", MEI_FILE), ("written", GPU_FILE)]
    malformed = 'cdi_agent_event_malformed_total{source="udev"}'
    assert host.metrics()[malformed] > 0


def test_forged_messages_cost_a_look_and_publish_nothing(host: PrivateHost) -> None:
    start(host, A)
    for action in ("add", "remove", "bind", "unbind", "change"):
        for devpath in (f"/devices/pci0000:00/{C.address}", CARD_CHANGED["DEVPATH"]):
            message = {"ACTION": action, "DEVPATH": devpath, "SUBSYSTEM": "pci"}
            for source in Source:
                host.inside.send(source, message)
    host.kernel.plug(B.hardware)
    becomes_true(host)
    assert sorted(files_written(host)) == [("written", MEI_FILE), ("written", GPU_FILE)]


# --- udev -----------------------------------------------------------------------------------------


def test_a_device_is_published_only_when_udev_has_dealt_with_its_nodes(host: PrivateHost) -> None:
    start(host)
    host.kernel.udev = UdevMode.MANUAL
    host.kernel.plug(A.hardware)
    own = truth(host)[A.own]
    seen: Published = {}
    while host.kernel.udev_step():
        # Longer than a device must settle: what is published too early has time to show itself.
        seen = host.until(lambda: published(host), lambda now: A.own in now, patience=0.1)
        if A.own in seen:
            assert all(host.inside.udev_knows(node) for node in own)
    becomes_true(host)


def test_a_slow_udev_is_not_waited_for_without_end(host: PrivateHost) -> None:
    start(host)
    host.kernel.udev = UdevMode.MANUAL
    host.kernel.plug(A.hardware)
    becomes_true(host)  # after udev_timeout, 5 s
    assert host.kernel.udev_waiting
    host.kernel.udev = UdevMode.AUTO
    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)


def test_without_udevd_devices_are_published_at_once_and_followed(host: PrivateHost) -> None:
    host.kernel.udev = UdevMode.OFF
    start(host, A)
    assert host.metrics()['cdi_agent_source_up{source="udev"}'] == 0
    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)
    host.kernel.plug(B.hardware)
    becomes_true(host)


def test_a_udevd_that_starts_later_is_heard(host: PrivateHost) -> None:
    host.kernel.udev = UdevMode.OFF
    start(host, A)
    host.kernel.udev = UdevMode.AUTO
    up = 'cdi_agent_source_up{source="udev"}'
    assert host.until(lambda: host.metrics()[up], lambda value: value == 1) == 1
    host.kernel.plug(B.hardware)
    becomes_true(host)


# --- the process ----------------------------------------------------------------------------------


def test_what_happened_while_no_agent_ran_is_found_at_its_start(host: PrivateHost) -> None:
    start(host, A, B)
    assert host.inside.end_agent(signal.SIGKILL) == -signal.SIGKILL
    assert host.kernel.move(A.address, "vfio-pci") == 0
    host.kernel.unplug(B.address)
    host.inside.start_agent(SETTINGS)
    assert published(host) == truth(host)


def test_it_ends_when_it_is_told_to_and_leaves_the_specs(host: PrivateHost) -> None:
    start(host, A)
    assert host.inside.end_agent(signal.SIGTERM) == 0
    assert published(host) == truth(host)
    assert files_written(host) == []


def test_a_start_that_finds_everything_as_it_should_be_writes_nothing(host: PrivateHost) -> None:
    start(host, A, B)
    assert host.inside.end_agent() == 0
    host.inside.start_agent(SETTINGS)
    assert published(host) == truth(host)
    assert files_written(host) == []


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_in_whatever_order_the_end_is_true(host: PrivateHost, seed: int) -> None:
    """Sixty random steps without a pause, kills among them; then the truth is on disk."""
    choose = random.Random(seed)
    start(host, A, B)
    gpus = (A, B, C)
    for step in itertools.count():
        if step == 60:
            break
        gpu = choose.choice(gpus)
        if gpu.address not in host.kernel.functions:
            host.kernel.plug(gpu.hardware)
            continue
        match choose.randrange(8):
            case 0:
                host.kernel.unplug(gpu.address)
            case 1 | 2:
                host.kernel.move(gpu.address, "vfio-pci")
            case 3 | 4:
                host.kernel.move(gpu.address, "xe")
            case 5:
                host.kernel.unbind(gpu.address)
            case 6 if host.kernel.driver_of(gpu.address) == "xe":
                host.kernel.storm(gpu.address, 3)
            case 7 if step % 20 == 0:
                host.inside.end_agent(signal.SIGKILL)
                host.inside.start_agent(SETTINGS)
    becomes_true(host)
