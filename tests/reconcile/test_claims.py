"""Claims through the whole of it: orders in, journal, specs, children, a simulated kernel."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from agent.host.model import Address
from agent.simulate import UdevMode
from agent.simulate.host import arc_b50, arc_b60
from agent.vfio.journal import FILE_NAME, Journal
from agent.vfio.model import Recover
from agent.vfio.problems import Code
from agent.vfio.state import Deadlines, Phase
from tests.reconcile.claims_rig import ClaimsRig

B50, B60 = "0000:03:00.0", "0000:07:00.0"
NAME = "0000-03-00-0-0xe212"
GPU = {"intel.com/gpu": [NAME]}
VFIO = {"intel.com/gpu-vfio": [NAME]}


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[ClaimsRig]:
    """A host with one GPU; the agent is for the test to run."""
    rig = ClaimsRig(tmp_path)
    await rig.do(rig.make_host)
    await rig.do(rig.kernel.plug, *arc_b50())
    yield rig
    await rig.close()


async def test_the_only_gpu_is_claimed_and_released_again_and_again(host: ClaimsRig) -> None:
    """Both directions of the fault that started it; every call is made twice."""
    async with host.agent():
        for _ in range(5):
            for _ in range(2):
                answer = await host.prepare("vm", B50)
                assert answer.problems == ()
                assert answer.names == (f"intel.com/gpu-vfio={NAME}",)
                assert host.published() == VFIO
                assert await host.driver_of(B50) == "vfio-pci"
            for _ in range(2):
                answer = await host.release("vm")
                assert answer.problems == ()
                assert host.published() == GPU
                assert await host.driver_of(B50) == "xe"
        assert (host.folder / "host/sys/bus/pci/devices" / B50 / "driver_override").read_text() == (
            "(null)\n"
        )


async def test_two_prepares_at_once_are_one(host: ClaimsRig) -> None:
    async with host.agent():
        answers = await asyncio.gather(*(host.prepare("vm", B50) for _ in range(3)))
        assert [answer.names for answer in answers] == [(f"intel.com/gpu-vfio={NAME}",)] * 3


async def test_a_second_claim_is_refused_and_told_by_whom(host: ClaimsRig) -> None:
    async with host.agent():
        await host.prepare("one", B50)
        answer = await host.prepare("two", B50)
        assert answer.problems[0].code is Code.CLAIMED
        assert "one" in answer.problems[0].sentence
        assert host.published() == VFIO


async def test_a_client_that_stops_waiting_changes_nothing(host: ClaimsRig) -> None:
    async with host.agent():
        asking = asyncio.create_task(host.prepare("vm", B50))
        await host.until(lambda state: "vm" in state.claims.live)
        asking.cancel()
        await host.until(
            lambda state: (
                (claim := state.claims.live.get("vm")) is not None and claim.phase is Phase.DONE
            )
        )
        assert host.published() == VFIO


async def test_a_claim_outlives_the_agent(host: ClaimsRig) -> None:
    async with host.agent():
        await host.prepare("vm", B50)
    async with host.agent():
        assert host.published() == VFIO
        assert (await host.prepare("vm", B50)).names == (f"intel.com/gpu-vfio={NAME}",)
        assert (await host.release("vm")).ok
        assert host.published() == GPU


async def test_what_a_lost_journal_leaves_is_told_at_every_start(host: ClaimsRig) -> None:
    """Nothing is done about it until a person does; the log has to say what and about which."""
    async with host.agent():
        await host.prepare("vm", B50)
    await host.do((host.folder / "state" / FILE_NAME).write_text, "torn")
    for _ in range(2):
        with capture_logs() as logs:
            async with host.agent():
                await host.until(lambda state: B50 in state.claims.strays)
        (told,) = [line for line in logs if line["event"] == "stranded"]
        assert (told["device"], told["log_level"]) == (B50, "error")
        assert told["hint"] == f"`cdi-agent recover {B50}` brings it back"
        assert await host.driver_of(B50) == "vfio-pci"


async def test_two_gpus_are_claimed_together_or_not_at_all(host: ClaimsRig) -> None:
    await host.do(host.kernel.plug, *arc_b60())
    await host.do(host.kernel.fail_probe, B60, 16)
    async with host.agent():
        answer = await host.prepare("vm", B50, B60)
        assert answer.problems[0].code is Code.MOVE_FAILED
        await host.do(host.kernel.heal)
        state = await host.until(lambda state: not state.claims.live)
        assert {str(address) for address in state.claims.strays} <= {B60}
        assert await host.driver_of(B50) == "xe"


async def test_a_journal_that_cannot_be_saved_touches_nothing(host: ClaimsRig) -> None:
    async with host.agent():
        host.journal.fault = "no space left on device"
        answer = await host.prepare("vm", B50)
        assert answer.problems[0].code is Code.JOURNAL_FAILED
        assert await host.driver_of(B50) == "xe"
        await host.until(lambda state: not state.claims.live)
        assert host.published() == GPU
        host.journal.fault = None
        assert (await host.prepare("vm", B50)).ok


def replace_by_a_link(folder: Path) -> None:
    """As some administrators do with a directory of another name; no consumer follows it."""
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def put_back(folder: Path) -> None:
    folder.unlink()
    folder.with_name("elsewhere").rename(folder)


async def test_without_a_spec_directory_every_order_is_answered(host: ClaimsRig) -> None:
    """And what had to wait for it goes on as soon as there is one again."""
    await host.do(host.kernel.plug, *arc_b60())
    async with host.agent():
        assert (await host.prepare("vm", B50)).ok
        await host.do(replace_by_a_link, host.specs)
        for answer in (await host.release("vm"), await host.prepare("other", B60)):
            assert [each.code for each in answer.problems] == [Code.SPECS_UNKNOWN]
            assert "symbolic link" in answer.problems[0].sentence
        assert (await host.submit(Recover(Address(B60)))).ok, "it is where it should be"
        assert await host.driver_of(B50) == "vfio-pci", "its entry may still be used"
        await host.do(put_back, host.specs)
        await host.until(lambda state: not state.claims.live)
        assert await host.driver_of(B50) == "xe"


async def test_an_agent_that_finds_no_spec_directory_undoes_what_was_under_way(
    host: ClaimsRig,
) -> None:
    async with host.agent():
        assert (await host.prepare("vm", B50)).ok
    await _tear(host)
    await host.do(replace_by_a_link, host.specs)
    host.deadlines = Deadlines(withdraw=0.01, restore=0.01)
    async with host.agent():
        await host.until(lambda state: not state.claims.live)
        assert await host.driver_of(B50) == "xe"


async def _tear(host: ClaimsRig) -> None:
    """Let the journal be as if the agent had died before its claim was in force."""
    journal = Journal(str(host.folder / "state"))
    durable = (await asyncio.to_thread(journal.load)).durable
    assert durable is not None
    (record,) = durable.claims
    await journal.save(structs.replace(durable, claims=(structs.replace(record, done=False),)))


async def test_without_a_look_at_the_host_every_order_is_refused(host: ClaimsRig) -> None:
    """Nothing is begun by a look of before, and nothing later by an order of then."""
    async with host.agent():
        host.scanner.fault = "too many open files"
        for answer in (await host.prepare("vm", B50), await host.submit(Recover(Address(B50)))):
            assert [each.code for each in answer.problems] == [Code.HOST_UNKNOWN]
            assert answer.problems[0].retryable
            assert "too many open files" in answer.problems[0].sentence
        host.scanner.fault = None
        state = await host.until(lambda state: not state.problems)
        assert not state.claims.live
        assert (await host.prepare("vm", B50)).ok


async def test_who_waits_for_a_claim_hears_when_the_host_cannot_be_looked_at(
    host: ClaimsRig,
) -> None:
    """What they wait for goes on when it can."""
    host.deadlines = Deadlines(withdraw=0.01)
    async with host.agent():
        asking = asyncio.create_task(host.prepare("vm", B50))
        await host.until(lambda state: "vm" in state.claims.live)
        host.scanner.fault = "too many open files"
        host.hint()
        answer = await asking
        assert [each.code for each in answer.problems] == [Code.HOST_UNKNOWN]
        host.scanner.fault = None
        assert (await host.prepare("vm", B50)).ok


FOREIGN = """cdiVersion: "0.5.0"
kind: intel.com/gpu-vfio
devices:
- name: "0000-03-00-0-0xe212"
  containerEdits: {deviceNodes: [{path: /dev/null}]}
"""


async def test_who_asks_again_is_told_when_no_spec_has_the_names_any_more(host: ClaimsRig) -> None:
    """Another file defines the device too, which makes both useless; and hears when one has."""
    async with host.agent():
        assert (await host.prepare("vm", B50)).ok
        other = host.specs / "other.yaml"
        await host.do(other.write_text, FOREIGN)
        host.hint()
        await host.until(lambda state: not any(a == B50 for _, a in state.published))
        rules = host.desk.rules
        host.desk.rules = structs.replace(rules, deadlines=Deadlines(publish=0.01))
        answer = await host.prepare("vm", B50)
        assert [each.code for each in answer.problems] == [Code.NOT_PUBLISHED]
        assert str(other) in answer.problems[0].sentence
        host.desk.rules = rules
        asking = asyncio.create_task(host.prepare("vm", B50))
        await host.until(lambda state: bool(state.claims.live["vm"].waiters))
        await host.do(other.unlink)
        host.hint()
        assert (await asking).names == (f"intel.com/gpu-vfio={NAME}",)


async def test_a_claim_waits_for_a_driver_that_is_coming_and_gives_it_back(host: ClaimsRig) -> None:
    """Udev has been told of a card, and the driver of the claimed one has not come yet."""
    async with host.agent():
        await host.do(host.kernel.unbind, B50)
        await host.do(setattr, host.kernel, "udev", UdevMode.MANUAL)
        await host.do(host.kernel.plug, *arc_b60())
        asking = asyncio.create_task(host.prepare("vm", B50))
        await host.until(lambda state: state.inventory.environment.udev_queue)
        state = await host.until(lambda state: Address(B60) in state.inventory.functions)
        assert not state.claims.live
        await host.do(host.kernel.move, B50, "xe")
        await host.do(host.kernel.udev_settle)
        assert (await asking).ok
        assert (await host.release("vm")).ok
        assert await host.driver_of(B50) == "xe"
