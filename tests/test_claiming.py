"""What the service needs to claim devices, built or done without; what is claimed at a start."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from agent import claiming, config
from agent.claiming import ASSIGNER, Claiming
from agent.host.model import Address, HoldMode
from agent.reconcile.messages import Inbox
from agent.vfio.model import Answer, Order, Prepare, Recover, Release
from agent.vfio.problems import Code, Problem
from agent.vfio.settings import AssignSettings
from agent.vfio.state import Cooling

BOOT = {"CDI_AGENT_BOOT_ID": "0" * 32}
ONE = AssignSettings(id="one", devices=("03:00.0",))
TWO = AssignSettings(id="two", devices=("0000:04:00.0",), mode="drm", force=True)
THREE = AssignSettings(id="three", devices=("0000:05:00.0",))


def settings(state: Path) -> config.Config:
    return config.parse(f"{{state_directory: {state}}}")


# --- what it takes --------------------------------------------------------------------------------


def test_with_a_boot_and_a_journal_devices_are_claimed(tmp_path: Path) -> None:
    parts = Claiming(settings(tmp_path / "state"), Inbox(), dict(BOOT))
    assert parts.desk is not None
    assert parts.refusal(Release("vm")) is None
    tasks = parts.root_tasks()
    assert tasks.keys() == {"worker"}
    tasks["worker"].close()


def test_without_a_boot_nothing_is_claimed_and_that_is_said(tmp_path: Path) -> None:
    """Nothing could be believed after a crash; specs are kept true all the same."""
    with capture_logs() as logs:
        parts = Claiming(settings(tmp_path), Inbox(), {"CDI_AGENT_BOOT_ID": "today"})
    assert parts.desk is None
    assert parts.root_tasks() == {}
    asyncio.run(parts.finish())
    (said,) = logs
    assert (said["event"], said["log_level"]) == ("no-claims", "error")
    assert "which boot" in said["problem"]
    for order, name in ((Release("vm"), "vm"), (Recover(Address("0000:03:00.0")), "recover:0000")):
        answer = parts.refusal(order)
        assert answer is not None
        assert answer.claim.startswith(name)
        (problem,) = answer.problems
        assert problem.code is Code.JOURNAL_FAILED
        assert said["problem"] in problem.sentence
        assert problem.hint == said["hint"]


def test_a_journal_that_cannot_be_used_is_said_with_where_it_is_kept(tmp_path: Path) -> None:
    (tmp_path / "claims.json").write_text("torn")
    with capture_logs() as logs:
        parts = Claiming(settings(tmp_path), Inbox(), dict(BOOT))
    assert parts.desk is not None
    (said,) = logs
    assert (said["event"], said["log_level"]) == ("journal-unusable", "error")
    assert Path(said["path"]).read_text() == "torn"


# --- what is claimed at a start -------------------------------------------------------------------


class Assigning:
    """The task that claims what the configuration says, and whoever takes its orders."""

    def __init__(self, folder: Path) -> None:
        self.parts = Claiming(settings(folder), Inbox(), dict(BOOT))
        self.wanted: Sequence[AssignSettings] = (ONE, TWO)
        self.ready = asyncio.Event()
        self.orders: asyncio.Queue[tuple[Prepare, asyncio.Future[Answer]]] = asyncio.Queue()

    async def submit(self, order: Order) -> Answer:
        assert isinstance(order, Prepare)
        reply: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.orders.put_nowait((order, reply))
        return await reply

    async def run(self) -> None:
        await self.parts.assign(self.submit, lambda: self.wanted, self.ready)

    async def asked(self) -> tuple[Prepare, Callable[[str], None]]:
        """The next order, and what answers it: an empty text is a success."""
        order, reply = await asyncio.wait_for(self.orders.get(), 10)

        def answer(problem: str) -> None:
            problems = (Problem(Code.IN_USE, problem),) if problem else ()
            reply.set_result(Answer(1, order.id, problems=problems))

        return order, answer


@pytest.fixture
async def assigning(tmp_path: Path) -> AsyncIterator[Assigning]:
    assigning = await asyncio.to_thread(Assigning, tmp_path)  # it reads files
    task = asyncio.create_task(assigning.run())
    yield assigning
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_nothing_is_claimed_before_the_start_has_ended(assigning: Assigning) -> None:
    """A device may have no driver yet, and its claim would remember that it had none."""
    await asyncio.sleep(0)
    assert assigning.orders.empty()
    assigning.ready.set()
    assert (await assigning.asked())[0] == Prepare(
        "one", HoldMode.VFIO, (Address("0000:03:00.0"),), client=ASSIGNER
    )
    assert (await assigning.asked())[0] == Prepare(
        "two", HoldMode.DRM, (Address("0000:04:00.0"),), client=ASSIGNER, force=True
    )


async def test_a_claim_that_takes_its_time_holds_up_no_other(assigning: Assigning) -> None:
    assigning.ready.set()
    asked = [await assigning.asked() for _ in range(2)]
    assert [order.id for order, _ in asked] == ["one", "two"]


async def test_what_could_not_be_claimed_is_tried_again_and_said_once(
    assigning: Assigning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "ASSIGN_AGAIN", 0.0)
    assigning.ready.set()
    with capture_logs() as logs:
        for problem in ("it is in use", "it is in use", "it hangs"):
            for _ in assigning.wanted:
                order, answer = await assigning.asked()
                answer(problem if order.id == "one" else "")
            assigning.wanted = (ONE,)
        order, answer = await assigning.asked()
    assert order.id == "one"
    assert [(said["claim"], said["problem"]) for said in logs] == [
        ("one", "it is in use"),
        ("one", "it hangs"),
    ]


async def test_what_has_been_claimed_once_is_not_claimed_again(assigning: Assigning) -> None:
    """Whoever has released it wanted it to be; what a reload brings is claimed."""
    assigning.ready.set()
    for _ in range(2):
        (await assigning.asked())[1]("")
    assigning.wanted = (ONE, TWO, THREE)
    assigning.parts.assign_again.set()
    assert (await assigning.asked())[0].id == "three"
    assert assigning.orders.empty()


async def test_what_somebody_releases_before_it_is_in_force_stays_released(
    assigning: Assigning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "ASSIGN_AGAIN", 0.0)
    assigning.wanted = (ONE,)
    assigning.ready.set()
    with capture_logs() as logs:
        order, reply = await asyncio.wait_for(assigning.orders.get(), 10)
        cancelled = Problem(Code.CANCELLED, "claim one was released before it was in force")
        reply.set_result(Answer(1, order.id, problems=(cancelled,)))
        await asyncio.sleep(0)
        assigning.wanted = (ONE, TWO)
        assigning.parts.assign_again.set()
        assert (await assigning.asked())[0].id == "two"
    assert assigning.orders.empty()
    assert logs == []


async def test_what_could_not_be_moved_too_often_is_left_alone_until_a_reload(
    assigning: Assigning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the device would be taken from whoever uses it, for ever."""
    monkeypatch.setattr(claiming, "ASSIGN_AGAIN", 0.0)
    assigning.wanted = (ONE,)
    assigning.ready.set()
    desk = assigning.parts.desk
    assert desk is not None
    address = Address("0000:03:00.0")
    with capture_logs() as logs:
        for failures in range(1, claiming.ASSIGN_MOVES + 1):
            _, answer = await assigning.asked()
            cooling = Cooling(0.0, "its entry did not come", failures)
            desk.claims = structs.replace(desk.claims, cooling={address: cooling})
            answer("its entry did not come")
        assigning.wanted = (ONE, TWO)
        assigning.parts.assign_again.set()
        asked = [(await assigning.asked())[0].id for _ in range(2)]
    assert [said["gives_up"] for said in logs] == [False, True]
    assert asked == ["one", "two"], "once for each reload"
