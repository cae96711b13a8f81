"""Claims through the whole of it: orders in, journal, specs, children, a simulated kernel."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent.simulate.host import arc_b50, arc_b60
from agent.vfio.journal import FILE_NAME
from agent.vfio.problems import Code
from agent.vfio.state import Phase
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
