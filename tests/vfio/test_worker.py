"""Writes: one at a time for a function, side by side for all, and hung ones hold up nobody."""

import asyncio
import errno
import fcntl
import functools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.host.model import Address
from agent.vfio.children import Child as Running
from agent.vfio.children import Children, started_at
from agent.vfio.model import Child, Step, Watch, Write, Written
from tests.conftest import IN_CI, children
from tests.vfio.rig import AUDIO, GPU, HASTY, Host, override, probe, rig, unbind


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@contextmanager
def held(host: Host, address: str = GPU) -> Iterator[None]:
    """The lock of a function, held by somebody else as if by a child of an earlier agent."""
    (host.state / "busy").mkdir(parents=True, exist_ok=True)
    with (host.state / "busy" / address).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize(
    ("effect", "path", "content"),
    [
        (override("vfio-pci"), "devices/0000:03:00.0/driver_override", "vfio-pci"),
        (override("\n"), "devices/0000:03:00.0/driver_override", "\nnull)\n"),
        (unbind(), "drivers/xe/unbind", GPU),
        (probe(), "drivers_probe", GPU),
    ],
    ids=["override", "clear", "unbind", "probe"],
)
async def test_each_step_is_one_file(host: Host, effect: Write, path: str, content: str) -> None:
    async with rig(host) as at:
        at.start(effect)
        assert await at.written() == Written(effect)
    assert (host.root / "sys/bus/pci" / path).read_text() == content


async def test_what_the_kernel_refuses_is_the_result(host: Host) -> None:
    """A function without a driver has nothing to be unbound from."""
    async with rig(host) as at:
        at.start(unbind(AUDIO))
        assert await at.written() == Written(unbind(AUDIO), errno=errno.ENOENT)


@pytest.mark.parametrize(
    ("registered", "given", "written"),
    [
        pytest.param("qat_vfio_pci", "qat-vfio-pci", "qat_vfio_pci", id="spelt by the kernel"),
        pytest.param("vfio-pci", "vfio-pci", "vfio-pci", id="the same"),
        pytest.param("vfio-pci", "vfio_pci", "vfio_pci", id="restored as it was"),
        pytest.param("vfio-pci", "pci-stub", "pci-stub", id="not there"),
    ],
)
async def test_an_override_is_spelt_as_the_kernel_does(
    host: Host, registered: str, given: str, written: str
) -> None:
    """The kernel compares letter by letter, and a module's driver may have dashes."""
    (host.root / "sys/bus/pci/drivers" / registered).mkdir()
    host.override(GPU).write_text("")
    async with rig(host) as at:
        at.start(override(given))
        assert not (await at.written()).errno
    assert host.override(GPU).read_text() == written


async def test_a_state_directory_that_cannot_be_written_prevents_writes(host: Host) -> None:
    host.state.write_text("not a folder")
    async with rig(host) as at:
        at.start(override("vfio-pci"))
        assert "Not a directory" in (await at.written()).unmade
    assert host.override(GPU).read_text() == "(null)\n"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("print('begun'); import sys; sys.exit('no')", id="fails"),
        pytest.param("print('begun', flush=True); import os; os.kill(0, 9)", id="is killed"),
    ],
)
async def test_a_write_that_was_begun_without_an_answer_is_an_error(
    host: Host, script: str
) -> None:
    async with rig(host, writer=(sys.executable, "-I", "-S", "-c", script)) as at:
        at.start(probe())
        assert await at.written() == Written(probe(), errno=errno.EIO)


@pytest.mark.parametrize(
    ("writer", "why"),
    [
        pytest.param(("/no/such/python",), "No such file or directory", id="is not there"),
        pytest.param(("sh", "-c", "exit 3"), "status 3", id="fails"),
        pytest.param(("sh", "-c", "kill -KILL $$"), "status -9", id="is killed"),
    ],
)
async def test_a_write_that_no_child_has_begun_is_not_made(
    host: Host, writer: tuple[str, ...], why: str
) -> None:
    """For want of memory, say: that tells nothing about the function."""
    async with rig(host, writer=writer) as at:
        at.start(probe())
        result = await at.written()
        assert why in result.unmade
        assert result == Written(probe(), unmade=result.unmade)


async def test_a_claim_of_many_functions_needs_no_more_than_a_few_processes_at_a_time(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so few descriptors."""
    alive = []
    start = Children.start

    def counted(self: Children, argv: Sequence[str], *, waits: bool = False) -> Running:
        child = start(self, argv, waits=waits)
        alive.append(len(self))
        return child

    monkeypatch.setattr(Children, "start", counted)
    addresses = [Address(f"0000:04:{slot:02x}.0") for slot in range(32)]
    async with rig(host) as at:
        at.start(*(probe(each) for each in addresses))
        written = [await at.written() for _ in addresses]
    assert {each.effect.address for each in written} == set(addresses)
    assert not any(each.errno or each.unmade for each in written)
    assert max(alive) <= 16


async def test_writes_that_hang_make_room_for_others(host: Host) -> None:
    host.block(host.probe)
    addresses = [Address(f"0000:04:{slot:02x}.0") for slot in range(20)]
    async with rig(host, HASTY) as at:
        at.start(*(probe(each) for each in addresses))
        late = set[str]()
        while len(late) < len(addresses):
            result = await at.written()
            assert result.hung or result.gone
            late.add(result.effect.address)


async def test_a_write_that_waits_its_turn_at_the_end_is_not_begun(host: Host) -> None:
    host.block(host.probe)
    addresses = [Address(f"0000:04:{slot:02x}.0") for slot in range(17)]
    others = await asyncio.to_thread(children)
    async with rig(host) as at:
        at.start(*(probe(each) for each in addresses))
        begun = 0
        while begun < 16:  # nothing tells that another child has begun
            await asyncio.sleep(0.001)
            begun = len(await asyncio.to_thread(children)) - len(others)
        finishing = asyncio.create_task(at.worker.finish())
        await asyncio.to_thread(_read_until, host.probe, finishing.done)
        await finishing
        unmade = [each.unmade for each in [await at.written() for _ in addresses] if each.unmade]
        assert [why.endswith("the agent ends") for why in unmade] == [True]


def _read_until(pipe: Path, is_done: Callable[[], bool]) -> None:
    """Let those who write to a pipe do so, until all of them have."""
    fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while not is_done():
            select.select((fd,), (), (), 0.01)
    finally:
        os.close(fd)


# --- what hangs -----------------------------------------------------------------------------------


async def test_a_write_past_its_deadline_is_hung_and_then_gone(host: Host) -> None:
    host.block(host.unbind())
    async with rig(host, HASTY) as at:
        at.start(unbind())
        hung = await at.written()
        assert (hung.effect, hung.hung, hung.gone) == (unbind(), True, False)
        assert hung.pid > 0
        assert hung.started is not None
        assert await at.written() == Written(unbind(), gone=True)
        assert at.worker.hung == frozenset()


async def test_others_go_on_while_one_hangs(host: Host) -> None:
    """Its function stays busy as long as the lock is held, whoever has been killed."""
    with held(host):
        async with rig(host, HASTY) as at:
            at.start(unbind())
            assert (await at.written()).hung
            at.start(override("vfio-pci", AUDIO))
            result = await at.written()
            # A slow machine makes this one late, too; then it has been written all the same.
            assert result.effect == override("vfio-pci", AUDIO)
            assert at.worker.hung >= {GPU}


async def test_a_function_with_a_write_that_hangs_gets_no_other(host: Host) -> None:
    with held(host):
        async with rig(host, HASTY) as at:
            at.start(unbind())
            assert (await at.written()).hung
            at.start(override("vfio-pci"))
            assert await at.written() == Written(override("vfio-pci"), hung=True)
            assert at.waiting == 0
    assert host.override(GPU).read_text() == "(null)\n"
    assert host.unbind().read_text() == ""


async def test_writes_of_a_hung_function_are_gone_when_its_lock_is_free(host: Host) -> None:
    async with rig(host, HASTY) as at:
        with held(host):
            at.start(unbind(), override("vfio-pci"))
            assert [(await at.written()).hung for _ in range(2)] == [True, True]
        results = [await at.written() for _ in range(2)]
    assert all(result.gone for result in results)
    assert {result.effect.step for result in results} == {Step.UNBIND, Step.OVERRIDE}
    assert host.override(GPU).read_text() == "(null)\n"


async def test_a_write_waits_its_turn(host: Host) -> None:
    """A child of an agent that was killed may be about to be done: then it is only waited for."""
    async with rig(host) as at:
        with held(host):
            at.start(probe())
            while not await asyncio.to_thread(children):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.001)
            assert at.waiting == 0
        assert await at.written() == Written(probe())


# --- children of an earlier agent -----------------------------------------------------------------


@contextmanager
def earlier_child() -> "Iterator[subprocess.Popen[bytes]]":
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_the_end_of_a_child_of_an_earlier_agent_is_told(host: Host) -> None:
    with earlier_child() as process:
        child = Child(unbind(), process.pid, started_at(process.pid))
        async with rig(host) as at:
            at.start(Watch(child))
            at.start(probe())
            assert await at.written() == Written(probe(), hung=True)
            process.kill()
            results = [await at.written() for _ in range(2)]
            assert results == [Written(unbind(), gone=True), Written(probe(), gone=True)]
            assert at.worker.hung == frozenset()


@pytest.mark.parametrize("known", [True, False], ids=["another start", "no start"])
async def test_another_process_with_its_pid_is_not_waited_for(host: Host, *, known: bool) -> None:
    with earlier_child() as process:
        async with rig(host) as at:
            at.start(Watch(Child(unbind(), process.pid, 1 if known else None)))
            assert await at.written() == Written(unbind(), gone=True)


async def test_a_child_whose_pid_means_nothing_here_is_known_by_its_lock(host: Host) -> None:
    """In another process namespace, as after an upgrade of a container."""
    async with rig(host) as at:
        with held(host):
            at.start(Watch(Child(unbind(), 1, 1)), probe())
            assert await at.written() == Written(probe(), hung=True)
        assert {(await at.written()).effect for _ in range(2)} == {unbind(), probe()}


# --- a real kernel that does not return -----------------------------------------------------------

KILLED_AGENT = """
import asyncio, sys
from agent.vfio.roots import Roots
from agent.vfio.worker import Worker
from tests.vfio.rig import unbind

async def main(root):
    worker = Worker(print, state_directory=root + "/state", roots=Roots(sys=root + "/sys"))
    worker.start(unbind())
    await worker.run()

asyncio.run(main(sys.argv[1]))
"""


@contextmanager
def frozen(host: Host) -> Iterator[Callable[[], None]]:
    """Let every write to the driver's files block, uninterruptibly, until it is called.

    They lie on a file system of their own, and nothing is written to one that is frozen.
    """
    folder, image = host.unbind().parent, host.root / "image"
    run = functools.partial(subprocess.run, check=True, capture_output=True)
    with image.open("wb") as file:
        file.truncate(8 * 2**20)
    try:
        run(["mkfs.ext4", "-q", image])
        run(["mount", "-o", "loop", image, folder])
    except (OSError, subprocess.CalledProcessError) as error:
        reason = f"no file system can be made here that freezes: {error}"
        pytest.fail(reason) if IN_CI else pytest.skip(reason)
    thawed = False

    def thaw() -> None:
        nonlocal thawed
        run(["fsfreeze", "--unfreeze", folder])
        thawed = True

    try:
        host.unbind().touch()
        run(["fsfreeze", "--freeze", folder])
        try:
            yield thaw
        finally:
            if not thawed:
                thaw()
    finally:
        run(["umount", "--lazy", folder])


def agent_killed_in_a_write(host: Host) -> tuple[int, int | None]:
    """Let an agent, and then its child, be killed when the child is stuck; which child that is."""
    argv = (sys.executable, "-c", KILLED_AGENT, host.root)
    with subprocess.Popen(argv, cwd=Path(__file__).parents[2]) as agent:
        try:
            while not (stuck := children_of(agent.pid, state="D")):
                time.sleep(0.01)
        finally:
            agent.kill()
    (pid,) = stuck
    os.kill(pid, signal.SIGKILL)
    return pid, started_at(pid)


def children_of(parent: int, *, state: str) -> list[int]:
    """The children of a process that are in a state of the kernel's."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.read_text().partition(" ")[0], stat.read_text().rpartition(") ")[2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if rest.split()[:2] == [state, str(parent)]:
            found.append(int(pid))
    return found


@pytest.mark.netns
async def test_an_agent_killed_while_a_child_is_stuck_in_the_kernel(host: Host) -> None:
    """A real one, in a call that no signal interrupts: the next agent waits for it."""
    with frozen(host) as thaw:
        pid, started = await asyncio.to_thread(agent_killed_in_a_write, host)
        child = Child(unbind(), pid, started)
        assert started is not None
        assert started_at(pid) == started, "killed, and still there"
        async with rig(host) as at:
            # One agent has it in its journal; another, that lost it, finds the lock.
            at.start(Watch(child))
            at.start(override("vfio-pci"))
            assert await at.written() == Written(override("vfio-pci"), hung=True)
        async with rig(host, HASTY) as at:
            at.start(override("vfio-pci"))
            assert (await at.written()).hung
            assert at.waiting == 0
            thaw()
            assert await at.written() == Written(override("vfio-pci"), gone=True)


async def test_the_end_abandons_what_hangs_and_finishes_what_does_not(host: Host) -> None:
    host.block(host.unbind())
    async with rig(host) as at:
        at.start(unbind(), probe(AUDIO))
        assert await at.written() == Written(probe(AUDIO))
        finishing = asyncio.create_task(at.worker.finish())
        await asyncio.sleep(0)
        assert not finishing.done(), "unbind is under way"
        # Somebody reads at last: the write ends.
        await asyncio.to_thread(host.unbind().read_bytes)
        await finishing
        assert await at.written() == Written(unbind())


async def test_finishing_does_not_wait_for_what_hangs(host: Host) -> None:
    with held(host):
        async with rig(host, HASTY) as at:
            at.start(unbind())
            assert (await at.written()).hung
            await at.worker.finish()


async def test_the_end_leaves_no_task_and_no_result(host: Host) -> None:
    host.block(host.unbind())
    async with rig(host) as at:
        at.start(unbind())
        while not await asyncio.to_thread(children):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)
    assert at.waiting == 0
