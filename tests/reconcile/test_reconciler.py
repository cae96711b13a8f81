"""The loop on a simulated host: the promise, scene by scene, with real files."""

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from msgspec import structs

from agent.cdi.desired import Reason
from agent.cdi.files import Action, Disk
from agent.cdi.store import Store
from agent.errors import ConfigError, StoreError
from agent.host.hints import Hint, Scope
from agent.host.model import Address, Inventory
from agent.host.scan import Scanner
from agent.reconcile.messages import SPECS, NewRules, Stop
from agent.reconcile.reconciler import Reconciler
from agent.reconcile.state import State
from agent.simulate import UdevMode
from agent.simulate.host import arc_b50, arc_b60, instinct, npu
from agent.troubles import QUIET
from tests.reconcile.rig import Rig

B50, B60 = "0000:03:00.0", "0000:07:00.0"
MI, NPU = "0001:c1:00.0", "0000:00:0b.0"
GPU_FILE = "cdi-agent_intel.com-gpu.yaml"
NAME_B50, NAME_B60 = "0000-03-00-0-0xe212", "0000-07-00-0-0xe211"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    yield Rig(tmp_path)
    structlog.reset_defaults()


@pytest.fixture
async def one_gpu(rig: Rig) -> Rig:
    """A host with one published GPU."""
    await rig.do(rig.kernel.plug, *arc_b50())
    await rig.quiet()
    assert rig.published() == {"intel.com/gpu": [NAME_B50]}
    return rig


@pytest.fixture
async def two_gpus(rig: Rig) -> Rig:
    """A host with two published GPUs."""
    await rig.do(rig.kernel.plug, *arc_b50(), *arc_b60())
    await rig.quiet()
    assert rig.published() == {"intel.com/gpu": [NAME_B50, NAME_B60]}
    return rig


def closed_to_others(rig: Rig) -> None:
    (rig.specs / GPU_FILE).chmod(0o600)


def defined_twice(rig: Rig) -> None:
    edits = "{deviceNodes: [{path: /dev/null}]}"
    device = f"{{name: {NAME_B60}, containerEdits: {edits}}}"
    text = f"cdiVersion: 0.6.0\nkind: intel.com/gpu\ndevices: [{device}]\n"
    (rig.specs / "vendor.yaml").write_text(text)


SEEN: dict[Callable[[Rig], None], Callable[[Rig], bool]] = {
    closed_to_others: lambda rig: (rig.specs / GPU_FILE).stat().st_mode & 0o777 == 0o644,
    defined_twice: lambda rig: rig.reasons().get(B60) is Reason.FOREIGN_DUPLICATE,
}
"""What is so when the agent has seen a change by others."""


async def started_with_one_gpu_less(rig: Rig) -> "asyncio.Task[None]":
    """Let the agent run on, and one GPU go, so that its file is written anew."""
    while not rig.reports.empty():
        rig.reports.get_nowait()
    running = asyncio.create_task(rig.reconciler.run())
    assert (await asyncio.wait_for(rig.reports.get(), 10)).reasons == {"start": 1}
    await rig.do(rig.kernel.unbind, B50)
    for hint in rig.hints():
        rig.inbox.hint(hint)
    while not (await asyncio.wait_for(rig.reports.get(), 10)).withdrew:
        pass
    return running


async def test_the_only_gpu_goes_to_vfio_and_comes_back(one_gpu: Rig) -> None:
    """The fault that started it, in both directions, ten times."""
    for _ in range(10):
        await one_gpu.do(one_gpu.kernel.move, B50, "vfio-pci")
        report = await one_gpu.step()
        assert one_gpu.published() == {}
        assert report.withdraw_latency is not None
        await one_gpu.step(0.06)
        assert one_gpu.published() == {"intel.com/gpu-vfio": [NAME_B50]}
        await one_gpu.do(one_gpu.kernel.move, B50, "xe")
        await one_gpu.step()
        assert one_gpu.published() == {}
        await one_gpu.step(0.06)
        assert one_gpu.published() == {"intel.com/gpu": [NAME_B50]}


async def test_no_gpu_at_start_and_zero_one_zero(rig: Rig) -> None:
    await rig.step()
    assert rig.published() == {}
    assert rig.reconciler.ready.is_set()
    for _ in range(2):
        await rig.do(rig.kernel.plug, *arc_b50())
        await rig.quiet()
        assert rig.published() == {"intel.com/gpu": [NAME_B50]}
        await rig.do(rig.kernel.unplug, B50)
        await rig.step()
        assert rig.published() == {}


async def test_a_half_gone_device_is_withdrawn_whole(one_gpu: Rig) -> None:
    await one_gpu.do(one_gpu.kernel.lose, "/dev/dri/card0")
    await one_gpu.step(0, Hint(reason="kernel", node_path="/dev/dri/card0"))
    assert one_gpu.published() == {}
    assert one_gpu.reasons()[B50] == Reason.NODE_MISSING


async def test_a_storm_writes_nothing_and_delays_nothing(one_gpu: Rig) -> None:
    file = one_gpu.specs / "cdi-agent_intel.com-gpu.yaml"
    before = file.stat()
    await one_gpu.do(one_gpu.kernel.storm, B50, 30)
    await one_gpu.step()
    assert file.stat() == before
    await one_gpu.do(one_gpu.kernel.plug, *arc_b60())
    for _ in range(7):
        await one_gpu.do(one_gpu.kernel.storm, B50, 5)
        await one_gpu.step(0.01)
    assert one_gpu.published() == {"intel.com/gpu": [NAME_B50, NAME_B60]}


async def test_a_card_that_is_renumbered_while_something_holds_it(one_gpu: Rig) -> None:
    hold = await asyncio.to_thread(one_gpu.kernel.hold, "/dev/dri/card0")
    await one_gpu.do(one_gpu.kernel.unbind, B50)
    await one_gpu.do(one_gpu.kernel.bind, B50, "xe")
    await one_gpu.quiet()
    assert "/dev/dri/card1" in (one_gpu.specs / "cdi-agent_intel.com-gpu.yaml").read_text()
    await one_gpu.do(hold.release)


async def test_two_cards_that_swap_numbers(rig: Rig) -> None:
    await rig.do(rig.kernel.plug, *arc_b50(), *arc_b60())
    await rig.quiet()
    await rig.do(rig.kernel.unbind, B50)
    await rig.do(rig.kernel.unbind, B60)
    await rig.do(rig.kernel.bind, B60, "xe")
    await rig.do(rig.kernel.bind, B50, "xe")
    await rig.step()
    assert rig.published() == {}
    await rig.step(0.06)
    assert rig.published() == {"intel.com/gpu": [NAME_B50, NAME_B60]}
    text = (rig.specs / "cdi-agent_intel.com-gpu.yaml").read_text()
    assert text.index("/dev/dri/card1") < text.index("/dev/dri/card0")


@pytest.fixture
async def lost_message(rig: Rig) -> Rig:
    """A host whose only GPU went, and nobody said so: neither the kernel nor a link of udev's."""
    await rig.do(rig.set_udev, UdevMode.OFF)
    await rig.do(rig.kernel.plug, *arc_b50())
    await rig.quiet()
    await rig.do(rig.kernel.unplug, B50)
    rig.events.clear()
    await rig.step(1.0)
    assert rig.published() == {"intel.com/gpu": [NAME_B50]}
    return rig


async def test_a_lost_message_is_made_up_for_by_the_resync(lost_message: Rig) -> None:
    report = await lost_message.step(lost_message.rules.resync)
    assert report.looked_at is None
    assert lost_message.published() == {}


async def test_a_blind_agent_looks_more_often(lost_message: Rig) -> None:
    lost_message.blind = True
    await lost_message.step(lost_message.rules.resync_blind)
    assert lost_message.published() == {}


async def test_a_slow_udev_is_waited_for(rig: Rig) -> None:
    await rig.do(rig.set_udev, UdevMode.MANUAL)
    await rig.do(rig.kernel.plug, *arc_b50())
    await rig.step()
    await rig.step(0.5)
    assert rig.reasons()[B50] == Reason.UDEV
    assert not rig.reconciler.ready.is_set()
    await rig.do(rig.kernel.udev_settle)
    await rig.step()
    assert rig.published() == {"intel.com/gpu": [NAME_B50]}
    assert rig.reconciler.ready.is_set()


async def test_a_udev_that_never_comes_is_not_waited_for_for_ever(rig: Rig) -> None:
    await rig.do(rig.set_udev, UdevMode.MANUAL)
    await rig.do(rig.kernel.plug, *arc_b50())
    await rig.step()
    await rig.step(rig.rules.timing.udev_timeout)
    assert rig.published() == {"intel.com/gpu": [NAME_B50]}
    assert {line["kind"] for line in rig.logged("published-without-udev")} == {
        "intel.com/gpu",
        "intel.com/gpu-mei",
    }


async def test_without_udevd_nothing_is_waited_for(rig: Rig) -> None:
    await rig.do(rig.set_udev, UdevMode.OFF)
    await rig.do(rig.kernel.plug, *arc_b50())
    await rig.quiet()
    assert rig.published() == {"intel.com/gpu": [NAME_B50]}
    assert len(rig.logged("udev-absent")) == 1


async def test_what_somebody_deletes_or_edits_is_put_right(one_gpu: Rig) -> None:
    file = one_gpu.specs / "cdi-agent_intel.com-gpu.yaml"
    content = await asyncio.to_thread(file.read_bytes)
    for harm in (
        file.unlink,
        functools.partial(file.write_bytes, b"x: 1"),
        functools.partial(file.write_bytes, b""),
    ):
        await one_gpu.do(harm)
        await one_gpu.step(0.1)
        assert file.read_bytes() == content


class TestFailures:
    async def test_a_write_that_fails_is_reported_and_retried(self, rig: Rig) -> None:
        """Health recovers by itself once the disk takes the file."""
        await rig.do(rig.kernel.plug, *arc_b50())
        rig.store.fault = "no space left on device"
        await rig.step()
        report = await rig.step(0.06)
        assert report.result == "failed"
        assert rig.reconciler.snapshot().problems == ("no space left on device",) * 2
        assert rig.reasons()[B50] == Reason.STORE
        assert rig.logged("spec-write-failed")
        rig.store.fault = None
        await rig.step(0.1)
        assert rig.published() == {}, "it is not tried again before its time"
        await rig.step(0.5)
        assert rig.published() == {"intel.com/gpu": [NAME_B50]}
        assert rig.reconciler.snapshot().problems == ()

    async def test_the_same_failure_is_told_once_a_minute(self, one_gpu: Rig) -> None:
        """However often a device comes and goes meanwhile; the metrics count every case."""

        async def flap() -> int:
            failed = 0
            for driver in ("vfio-pci", "xe"):
                await one_gpu.do(one_gpu.kernel.move, B50, driver)
                failed += len((await one_gpu.step(0.1)).failed)
            return failed

        def told() -> tuple[int, int]:
            passes = [line for line in one_gpu.logged("pass") if line["log_level"] == "info"]
            return len(one_gpu.logged("spec-delete-failed")), len(passes)

        failures, passes = told()
        one_gpu.store.fault = "read-only file system"
        assert sum([await flap() for _ in range(3)]) == 6
        assert told() == (failures + 2, passes + 1)  # one for each of its two files
        await one_gpu.step(QUIET)
        await flap()
        assert told() == (failures + 4, passes + 2)

    async def test_a_withdrawal_that_fails_keeps_its_nodes_from_others(self, one_gpu: Rig) -> None:
        """card0 goes to another device while the old entry cannot be taken off the disk."""
        one_gpu.store.fault = "read-only file system"
        await one_gpu.do(one_gpu.kernel.unplug, B50)
        await one_gpu.step()
        assert one_gpu.published() == {"intel.com/gpu": [NAME_B50]}
        await one_gpu.do(one_gpu.kernel.plug, *arc_b60())
        await one_gpu.quiet()
        assert one_gpu.reasons()[B60] == Reason.BLOCKED
        one_gpu.store.fault = None
        await one_gpu.step(5.0)
        assert one_gpu.published() == {"intel.com/gpu": [NAME_B60]}

    async def test_a_withdrawal_that_is_due_again_while_others_fail_keeps_its_nodes_too(
        self, one_gpu: Rig
    ) -> None:
        """A pass decides at one moment: what was not tried in it is not taken for done."""
        await one_gpu.do(one_gpu.kernel.plug, *npu())
        await one_gpu.quiet()
        one_gpu.store.fault = "read-only file system"
        await one_gpu.do(one_gpu.kernel.unplug, B50)
        await one_gpu.step()
        await one_gpu.do(one_gpu.kernel.plug, *instinct())
        await one_gpu.step(0.1)
        await one_gpu.step(0.1)
        assert one_gpu.reasons()[MI] == Reason.BLOCKED, "card0 is in the old entry"

        async def fail_once() -> None:
            one_gpu.now += one_gpu.rules.timing.retry_first
            one_gpu.store.fault = None

        one_gpu.store.fails = fail_once
        await one_gpu.do(one_gpu.kernel.unplug, NPU)
        report = await one_gpu.step()
        assert [kind for kind, _, _ in report.failed] == ["intel.com/npu"]
        assert one_gpu.reasons()[MI] == Reason.BLOCKED
        await one_gpu.step()
        assert list(one_gpu.published()) == ["amd.com/gpu", "intel.com/npu"]

    async def test_what_is_found_untrue_once_another_withdrawal_failed_goes_in_the_same_pass(
        self, one_gpu: Rig
    ) -> None:
        """Somebody puts an old file back meanwhile; the change that this is was read already."""
        file = one_gpu.specs / "cdi-agent_intel.com-gpu.yaml"
        old = await asyncio.to_thread(file.read_bytes)
        await one_gpu.do(one_gpu.kernel.plug, *npu())
        await one_gpu.quiet()
        await one_gpu.do(one_gpu.kernel.unplug, B50)
        await one_gpu.step()
        assert not file.exists()

        async def fail_once() -> None:
            await one_gpu.do(file.write_bytes, old)
            one_gpu.store.fault = None

        one_gpu.store.fault, one_gpu.store.fails = "read-only file system", fail_once
        await one_gpu.do(one_gpu.kernel.unplug, NPU)
        await one_gpu.step()
        assert one_gpu.published() == {"intel.com/npu": ["0000-00-0b-0-0x7d1d"]}

    async def test_something_else_at_our_path_is_not_touched(self, rig: Rig) -> None:
        in_the_way = rig.specs / "cdi-agent_intel.com-gpu.yaml"
        await rig.do(os.makedirs, in_the_way)
        await rig.do(rig.kernel.plug, *arc_b50())
        await rig.step()
        await rig.step(0.06)
        assert in_the_way.is_dir()
        assert rig.reconciler.snapshot().withheld[0].reason == Reason.FOREIGN_FILE

    async def test_a_link_to_our_own_file_makes_it_come_and_go_once(self, one_gpu: Rig) -> None:
        """It doubles our devices: that they are withdrawn is no reason to publish them again."""
        link = one_gpu.specs / "vendor.yaml"
        await one_gpu.do(link.symlink_to, "cdi-agent_intel.com-gpu.yaml")
        reports = [await one_gpu.step(1.0) for _ in range(4)]
        assert [report.changed for report in reports] == [True, False, False, False]
        assert one_gpu.reasons()["0000:03:00.0"] == Reason.FOREIGN_DUPLICATE
        await one_gpu.do(link.unlink)
        assert (await one_gpu.step(1.0)).published

    async def test_an_unreadable_directory_loses_nothing(self, one_gpu: Rig) -> None:
        """Nothing is concluded from a directory that cannot be read."""
        await one_gpu.do(os.rename, one_gpu.specs, one_gpu.specs.with_name("away"))
        await one_gpu.do(one_gpu.specs.write_text, "a file where the directory was")
        report = await one_gpu.step(0.1)
        assert report.result == "failed"
        assert one_gpu.reconciler.snapshot().problems
        await one_gpu.do(one_gpu.specs.unlink)
        await one_gpu.do(os.rename, one_gpu.specs.with_name("away"), one_gpu.specs)
        await one_gpu.step(one_gpu.rules.resync_blind)
        assert one_gpu.published() == {"intel.com/gpu": [NAME_B50]}
        assert one_gpu.reconciler.snapshot().problems == ()

    async def test_what_cannot_be_read_is_tried_again_by_the_clock_or_by_a_message(
        self, one_gpu: Rig
    ) -> None:
        """And everything is looked at then, whatever the message was about."""
        await one_gpu.do(os.rename, one_gpu.specs, one_gpu.specs.with_name("away"))
        await one_gpu.do(one_gpu.specs.symlink_to, "away")
        one_gpu.inbox.order(Stop())
        await asyncio.wait_for(one_gpu.reconciler.run(), 10)
        assert [one_gpu.reports.get_nowait().result for _ in range(3)] == ["ok", "ok", "failed"]
        assert one_gpu.reports.empty(), "it is not tried again before its time"
        await one_gpu.do(one_gpu.specs.unlink)
        await one_gpu.do(os.rename, one_gpu.specs.with_name("away"), one_gpu.specs)
        report = await one_gpu.step(0, Hint(reason="kernel", node_path="/dev/dri/card0"))
        assert (report.result, report.looked_at) == ("ok", None)

    async def test_a_start_that_can_read_nothing_ends_too(self, rig: Rig) -> None:
        """READY comes after ``ready_timeout``; what is wrong is for health to say."""
        await rig.do(rig.specs.symlink_to, "away")
        await rig.step()
        assert not rig.reconciler.ready.is_set()
        await rig.step(rig.rules.ready_timeout)
        assert rig.reconciler.ready.is_set()
        assert rig.reconciler.snapshot().problems

    async def test_a_directory_that_cannot_be_read_back_ends_a_pass_and_no_more(
        self, one_gpu: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its files are written already, or could not be; the next pass finds out which."""
        read, readings = one_gpu.store.read, iter((True, False))

        def read_once() -> Disk:
            if not next(readings):
                raise StoreError("the directory is gone")
            return read()

        one_gpu.store.fault = "read-only file system"
        monkeypatch.setattr(one_gpu.store, "read", read_once)
        await one_gpu.do(one_gpu.kernel.unplug, B50)
        report = await one_gpu.step()
        assert report.problems == ("the directory is gone",)
        monkeypatch.undo()
        one_gpu.store.fault = None
        await one_gpu.step(one_gpu.rules.resync_blind)
        assert one_gpu.published() == {}
        assert one_gpu.reconciler.snapshot().problems == ()

    async def test_what_was_written_and_cannot_be_read_back_counts_as_published(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or a claim would move a device while a spec offers it."""
        apply = rig.store.apply

        def lost() -> Disk:
            raise StoreError("the directory is gone")

        async def apply_once(action: Action) -> None:
            await apply(action)
            monkeypatch.setattr(rig.store, "read", lost)

        monkeypatch.setattr(rig.store, "apply", apply_once)
        await rig.do(rig.kernel.plug, *arc_b50())
        await rig.quiet()
        state = rig.reconciler.snapshot()
        assert state.problems == ("the directory is gone",)
        assert NAME_B50 in state.published.values()


class TestLog:
    async def test_one_line_a_pass_that_says_what_changed(self, rig: Rig) -> None:
        await rig.do(rig.kernel.plug, *arc_b50())
        await rig.quiet()
        published = [line for line in rig.logged("pass") if line["published"]]
        assert [line["published"] for line in published] == [
            [f"intel.com/gpu={NAME_B50}", f"intel.com/gpu-mei={NAME_B50}"]
        ]
        assert published[0]["log_level"] == "info"

    async def test_a_pass_that_changes_nothing_is_for_those_who_debug(self, one_gpu: Rig) -> None:
        await one_gpu.do(one_gpu.kernel.storm, B50, 3)
        await one_gpu.step()
        assert one_gpu.logged("pass")[-1]["log_level"] == "debug"


class TestRun:
    async def test_stops_after_the_pass_that_is_under_way(self, rig: Rig) -> None:
        rig.inbox.order(Stop())
        await asyncio.wait_for(rig.reconciler.run(), 10)
        assert rig.reconciler.snapshot().passes == 1

    async def test_a_host_slower_than_its_timers_hears_all_the_same_that_it_is_to_stop(
        self, rig: Rig
    ) -> None:
        """Each pass takes longer than ``resync``, so the next one is due when it ends."""
        rig.slowness = rig.rules.resync
        rig.inbox.order(Stop())
        await asyncio.wait_for(rig.reconciler.run(), 10)
        assert rig.reconciler.snapshot().passes == 1

    @pytest.mark.parametrize("change", [closed_to_others, defined_twice])
    async def test_what_others_change_while_a_pass_writes_is_seen_at_once(
        self, two_gpus: Rig, monkeypatch: pytest.MonkeyPatch, change: Callable[[Rig], None]
    ) -> None:
        """Its message is older than the reading that ends the pass, as those of our own writes."""
        is_right = functools.partial(SEEN[change], two_gpus)
        apply = two_gpus.store.apply

        async def apply_and_change(action: Action) -> None:
            await apply(action)
            if action.path.endswith(GPU_FILE):
                monkeypatch.setattr(two_gpus.store, "apply", apply)
                await two_gpus.do(change, two_gpus)

        monkeypatch.setattr(two_gpus.store, "apply", apply_and_change)
        running = await started_with_one_gpu_less(two_gpus)
        while not is_right():
            await asyncio.wait_for(two_gpus.reports.get(), 10)
        two_gpus.inbox.order(Stop())
        await running

    async def test_a_disk_that_keeps_no_mode_is_not_written_to_again_and_again(
        self, two_gpus: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        apply = two_gpus.store.apply

        async def apply_and_change(action: Action) -> None:
            await apply(action)
            if action.path.endswith(GPU_FILE):
                await two_gpus.do(closed_to_others, two_gpus)

        monkeypatch.setattr(two_gpus.store, "apply", apply_and_change)
        running = await started_with_one_gpu_less(two_gpus)
        assert (await asyncio.wait_for(two_gpus.reports.get(), 10)).wrote, "it is tried once more"
        two_gpus.inbox.order(Stop())
        await running
        assert two_gpus.reports.empty()

    async def test_a_record_that_takes_its_time_holds_up_nothing(self, one_gpu: Rig) -> None:
        """The disk of the state directory hangs in ``fsync``; specs lie on another."""
        asked, disk = asyncio.Event(), asyncio.Event()

        async def save_record() -> None:
            asked.set()
            await disk.wait()

        one_gpu.store.save_record = save_record  # type: ignore[method-assign]
        running = asyncio.create_task(one_gpu.reconciler.run())
        await asyncio.wait_for(asked.wait(), 10)
        await one_gpu.do(one_gpu.kernel.unplug, B50)
        for hint in one_gpu.hints():
            one_gpu.inbox.hint(hint)
        while not (await asyncio.wait_for(one_gpu.reports.get(), 10)).withdrew:
            pass
        assert one_gpu.published() == {}
        one_gpu.inbox.order(Stop())
        disk.set()
        await asyncio.wait_for(running, 10)

    async def test_a_new_configuration_is_applied_at_once(self, one_gpu: Rig) -> None:
        rules = structs.replace(
            one_gpu.rules,
            policy=structs.replace(one_gpu.rules.policy, ignore=frozenset({B50})),
        )
        new = NewRules(rules, one_gpu.scanner, one_gpu.store)
        taking = asyncio.create_task(one_gpu.reconciler.reconfigure(new))
        running = asyncio.create_task(one_gpu.reconciler.run())
        while (await one_gpu.reports.get()).reasons != {"reload": 1}:
            assert not one_gpu.logged("reloaded"), "it is not in force while it waits"
        assert one_gpu.logged("reloaded")
        await taking
        assert one_gpu.published() == {}
        assert one_gpu.reasons()[B50] == Reason.IGNORED
        one_gpu.inbox.order(Stop())
        await asyncio.wait_for(running, 10)

    async def test_a_new_configuration_is_checked_against_what_is_true_when_it_is_taken(
        self, one_gpu: Rig
    ) -> None:
        """A claim may have come into force since it was asked whether there is any."""
        passes = one_gpu.reconciler.snapshot().passes
        seen = []

        def check(state: State) -> None:
            seen.append(state.passes)
            raise ConfigError("it would rename what a claim holds")

        new = NewRules(one_gpu.rules, one_gpu.scanner, Store("/none", "/none", ()), check=check)
        taking = asyncio.create_task(one_gpu.reconciler.reconfigure(new))
        running = asyncio.create_task(one_gpu.reconciler.run())
        with pytest.raises(ConfigError, match="rename"):
            await taking
        assert seen == [passes + 1]
        assert not one_gpu.logged("reloaded")
        one_gpu.inbox.order(Stop())
        await asyncio.wait_for(running, 10)
        assert one_gpu.published(), "the old one stays in force"

    async def test_a_change_of_the_specs_that_was_read_since_leads_to_no_pass(
        self, one_gpu: Rig
    ) -> None:
        """Our own writes are changes too; what others did afterwards is put right."""
        file = one_gpu.specs / "cdi-agent_intel.com-gpu.yaml"
        running = asyncio.create_task(one_gpu.reconciler.run())
        while (await one_gpu.reports.get()).reasons != {"start": 1}:
            pass
        await one_gpu.do(file.unlink)
        one_gpu.inbox.hint(Hint(reason=SPECS, received=one_gpu.now - 1))
        one_gpu.inbox.hint(Hint(reason="kernel", address=Address(B60), received=one_gpu.now - 1))
        assert (await one_gpu.reports.get()).reasons == {"kernel": 1}
        await one_gpu.do(file.unlink)
        one_gpu.inbox.hint(Hint(reason=SPECS, received=one_gpu.now))
        report = await one_gpu.reports.get()
        assert report.reasons == {"specs": 1}
        assert report.looked_at == 0
        assert file.exists()
        one_gpu.inbox.order(Stop())
        await asyncio.wait_for(running, 10)

    async def test_a_directory_that_somebody_removed_is_made_again(self, rig: Rig) -> None:
        """Consumers expect it, even while there is nothing to publish."""
        await rig.step()
        await rig.do(rig.specs.rmdir)
        await rig.step(rig.rules.resync)
        assert rig.specs.is_dir()

    async def test_a_directory_that_cannot_be_made_is_said_once(self, rig: Rig) -> None:
        await rig.do(rig.specs.write_text, "in the way")
        await rig.step()
        await rig.step(rig.rules.resync)
        assert len(rig.logged("spec-directory-missing")) == 1
        await rig.do(rig.specs.unlink)
        await rig.step(rig.rules.resync)
        assert rig.specs.is_dir()


class Watchdog:
    """What takes silence for death."""

    watchdog_interval = 0.0

    def __init__(self) -> None:
        self.signs: asyncio.Queue[None] = asyncio.Queue()

    def feed_watchdog(self) -> None:
        """Note a sign of life."""
        self.signs.put_nowait(None)


class HangingScanner:
    """The real one, behind a gate."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self.entered = threading.Event()
        self.gate = threading.Event()

    def scan(self, scope: Scope, previous: Inventory) -> Inventory:
        """Look once the gate is open."""
        self.entered.set()
        self.gate.wait()
        return self._scanner.scan(scope, previous)


async def test_signs_of_life_end_when_the_work_stands_still(rig: Rig) -> None:
    """The loop itself goes on meanwhile: a task beside the work would go on feeding."""
    watchdog, scanner = Watchdog(), HangingScanner(rig.scanner)
    reconciler = Reconciler(
        inbox=rig.inbox, scanner=scanner, store=rig.store, rules=rig.rules, watchdog=watchdog
    )
    scanner.gate.set()
    running = asyncio.create_task(reconciler.run())
    for _ in range(3):
        await watchdog.signs.get()
    scanner.gate.clear()
    scanner.entered.clear()
    rig.inbox.hint(Hint(reason="kernel", everything=True))
    await asyncio.to_thread(scanner.entered.wait)
    before = watchdog.signs.qsize()
    for _ in range(100):
        await asyncio.sleep(0)
    assert watchdog.signs.qsize() == before
    scanner.gate.set()
    for _ in range(before + 1):
        await watchdog.signs.get()
    rig.inbox.order(Stop())
    await running
