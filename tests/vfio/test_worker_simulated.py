"""The worker against a kernel that answers, refuses, and does not return."""

import asyncio
import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from agent.host.model import Address
from agent.simulate import Kernel
from agent.simulate.host import arc_b50, network_card
from agent.simulate.serve import WRITER, Server
from agent.vfio.children import PYTHON
from agent.vfio.model import Holder, Inspect, Written
from agent.vfio.roots import Roots, Timeouts
from tests.vfio.rig import PATIENT, Rig, override, probe, unbind, working

GPU: Final = Address("0000:03:00.0")
NETWORK: Final = Address("0000:0a:00.0")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    kernel = Kernel(tmp_path / "host", lambda _: None)
    kernel.plug(*arc_b50(), *network_card())
    return kernel


@pytest.fixture
def server(kernel: Kernel, tmp_path: Path) -> Iterator[Server]:
    with Server(kernel, tmp_path / "socket") as server:
        yield server


def at(
    kernel: Kernel, server: Server, timeouts: Timeouts = PATIENT
) -> "contextlib.AbstractAsyncContextManager[Rig]":
    folder = kernel.root
    roots = Roots(
        sys=f"{folder}/sys",
        dev=f"{folder}/dev",
        proc=f"{folder}/proc",
        run=f"{folder}/run",
        etc=f"{folder}/etc",
    )
    writer = (*PYTHON, WRITER, str(server.path))
    return working(folder.parent / "state", roots, timeouts, writer=writer)


async def test_a_gpu_goes_to_vfio_and_comes_back(kernel: Kernel, server: Server) -> None:
    async with at(kernel, server) as worker:
        for target, value in (("vfio-pci", "vfio-pci"), ("xe", "xe")):
            for effect in (override(value), unbind(), probe()):
                worker.start(effect)
                assert await worker.written() == Written(effect)
            assert kernel.driver_of(GPU) == target
        worker.start(override("\n"))
        assert await worker.written() == Written(override("\n"))
        inspection = await worker.inspected(Inspect("vm", (GPU,), kernel.node_paths(GPU)))
    assert inspection.overrides == ((GPU, None),)
    assert (inspection.holders, inspection.holders_known) == ((), True)


async def test_devices_proceed_side_by_side(kernel: Kernel, server: Server) -> None:
    await asyncio.to_thread(kernel.hang, GPU, now=True)
    async with at(kernel, server) as worker:
        worker.start(unbind(GPU), unbind(NETWORK))
        assert await worker.written() == Written(unbind(NETWORK))
        await asyncio.to_thread(kernel.heal)
        assert await worker.written() == Written(unbind(GPU))


async def test_what_the_kernel_refuses_is_told(kernel: Kernel, server: Server) -> None:
    await asyncio.to_thread(kernel.fail, "*/drivers_probe", errno.EBUSY, 1)
    async with at(kernel, server) as worker:
        for code in (errno.EBUSY, 0):
            worker.start(probe())
            assert await worker.written() == Written(probe(), errno=code)


async def test_a_write_is_gone_when_the_kernel_returns_and_not_when_its_child_is_killed(
    kernel: Kernel, server: Server
) -> None:
    """Its driver may be half-way through: nothing else may be written until it is done."""
    await asyncio.to_thread(kernel.hang, GPU)
    async with at(kernel, server, Timeouts(write=1.0, read=0.05)) as worker:
        worker.start(unbind())
        hung = await worker.written()
        assert hung.hung
        inspection = await worker.inspected(Inspect("vm", (GPU,), ()))
        assert inspection.overrides == (), "a reader of the override would hang, too"
        worker.start(override("xe"))
        assert await worker.written() == Written(override("xe"), hung=True)
        assert worker.waiting == 0
        await asyncio.to_thread(kernel.heal)
        assert {await worker.written() for _ in range(2)} == {
            Written(unbind(), gone=True),
            Written(override("xe"), gone=True),
        }
    assert kernel.driver_of(GPU) is None


async def test_who_holds_a_node_is_found(kernel: Kernel, server: Server) -> None:
    paths = kernel.node_paths(GPU)
    hold = await asyncio.to_thread(lambda: kernel.hold(paths[0], command="ffmpeg"))
    async with at(kernel, server) as worker:
        inspection = await worker.inspected(Inspect("vm", (GPU,), paths))
    assert inspection.holders == (Holder(hold.pid, "ffmpeg", paths[0]),)
    assert inspection.holders_known
