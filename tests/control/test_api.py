"""The control socket over a real one: orders, questions, and everything that is not understood."""

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from structlog.testing import capture_logs

from agent.control.api import ROUTES, application
from agent.control.client import UnreachableError, call
from agent.control.http import Limits, Message
from agent.control.server import HttpService
from agent.control.sockets import UnixAddress, bind
from agent.host.model import HoldMode
from agent.vfio.children import started_at
from agent.vfio.model import Answer, Move, Prepare, Recover, Release
from agent.vfio.problems import Code, Problem
from tests.control.fake_agent import GONE, NAME, REUSED, A, B, FakeAgent
from tests.control.guide import examples

US = f"pid {os.getpid()}, uid {os.getuid()}"


@dataclasses.dataclass
class Socket:
    agent: FakeAgent
    path: str
    serving: "asyncio.Task[NoReturn]"

    async def stop(self) -> None:
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)

    async def call(
        self, method: str, route: str, body: object = None
    ) -> tuple[int, dict[str, Any]]:
        return await asyncio.to_thread(call, self.path, method, route, body)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A procfs in which this process is the only one."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    return proc


@pytest.fixture
async def control(tmp_path: Path, proc: Path) -> AsyncIterator[Socket]:
    agent = FakeAgent()
    path = str(tmp_path / "control.sock")
    app = application(agent, proc=str(proc), clock=lambda: 130.0)
    limits = Limits(request_bytes=131_072)
    listener = await asyncio.to_thread(bind, UnixAddress(path))
    service = HttpService("control", app, where=[listener], limits=limits)
    task = asyncio.create_task(service.run())
    socket = Socket(agent, path, task)
    yield socket
    await socket.stop()
    listener.close()  # a server that was cancelled before it began has not closed it


class TestQuestions:
    async def test_status(self, control: Socket) -> None:
        status, document = await control.call("GET", "/v1/status")
        assert status == 200
        assert document["published"] == {"intel.com/gpu": 1}
        assert (document["claims"], document["stranded"], document["hung"]) == (1, [B], [A])

    async def test_devices_with_the_reason_of_each_that_is_not_published(
        self, control: Socket
    ) -> None:
        _, document = await control.call("GET", "/v1/devices")
        assert [(d["address"], d["state"], d["reason"]) for d in document["devices"]] == [
            (A, "published", None),
            (B, "withheld", "held"),
        ]

    async def test_claims_with_age_client_and_state(self, control: Socket) -> None:
        _, document = await control.call("GET", "/v1/claims")
        (claim,) = document["claims"]
        assert claim["id"] == "vm"
        assert claim["phase"] == "done"
        assert claim["client"] == "pid 7, uid 0"
        assert (claim["age_seconds"], claim["expires_in_seconds"]) == (30.0, 30.0)
        (held,) = claim["functions"]
        assert (held["address"], held["driver"], held["came_from"]) == (B, "vfio-pci", "xe")
        assert document["stranded"][0]["code"] == "stranded"
        assert document["hung"] == [{"address": A, "step": "unbind", "pid": 99}]

    async def test_one_claim_is_told_of_as_in_the_list(self, control: Socket) -> None:
        _, document = await control.call("GET", "/v1/claims")
        assert await control.call("GET", "/v1/claims/vm") == (200, document["claims"][0])

    async def test_a_claim_that_there_is_not(self, control: Socket) -> None:
        status, document = await control.call("GET", "/v1/claims/other")
        (problem,) = document["problems"]
        assert (status, problem["code"]) == (404, "unknown-claim")
        assert problem["sentence"] == "there is no claim other"

    async def test_a_dry_run_is_no_claim(self, control: Socket) -> None:
        control.agent.dry_run = True
        _, status = await control.call("GET", "/v1/status")
        _, document = await control.call("GET", "/v1/claims")
        assert (status["claims"], document["claims"]) == (0, [])

    async def test_explain_says_all_of_a_function(self, control: Socket) -> None:
        _, document = await control.call("GET", f"/v1/explain/{B}")
        claim = document["claim"]
        assert (claim["id"], claim["client"]) == ("vm", "pid 7, uid 0")
        assert claim["expires_in_seconds"] == 30.0
        assert document["stranded"]["sentence"] == "it did not come back"

    async def test_explain_says_how_long_a_function_is_left_alone(self, control: Socket) -> None:
        """No pass comes when that time is over; it is over all the same."""
        cooling = [(await control.call("GET", f"/v1/explain/{each}"))[1] for each in (A, B)]
        assert [document["cooling_down"] for document in cooling] == [True, False]

    async def test_explain_of_what_is_not_there(self, control: Socket) -> None:
        status, document = await control.call("GET", "/v1/explain/0000:99:00.0")
        assert (status, document["problems"][0]["code"]) == (404, "unknown-device")


class TestOrders:
    async def test_prepare_has_every_word_of_its_body(self, control: Socket) -> None:
        status, document = await control.call(
            "PUT",
            "/v1/claims/vm-1",
            {
                "devices": ["03:00.0", "intel.com/gpu=0000-03-00-0-0xe212"],
                "mode": "drm",
                "named": [str(B)],
                "driver": "xe-vfio-pci",
                "force": True,
                "from_vfio": True,
                "dry_run": True,
                "lease": 60,
                "owner_pid": os.getpid(),
            },
        )
        assert (status, document["names"]) == (200, [NAME])
        (order,) = control.agent.orders
        assert order == Prepare(
            "vm-1",
            HoldMode.DRM,
            (A, A),
            client=US,
            force=True,
            named=(B,),
            driver="xe-vfio-pci",
            from_vfio=True,
            lease=60,
            owner_pid=os.getpid(),
            owner_started=started_at(os.getpid()),
            dry_run=True,
            called=(("intel.com/gpu=0000-03-00-0-0xe212", A),),
        )

    async def test_a_repeated_prepare_means_the_same_device_by_the_name_that_has_gone(
        self, control: Socket
    ) -> None:
        """While it is claimed it has another one, and its own may be given to another device."""
        for name in (GONE, REUSED):
            assert (await control.call("PUT", "/v1/claims/vm", {"devices": [name]}))[0] == 200
        assert [order.devices for order in control.agent.prepared] == [(B,), (B,)]
        assert [order.called for order in control.agent.prepared] == [((GONE, B),), ((REUSED, B),)]
        status, document = await control.call("PUT", "/v1/claims/other", {"devices": [GONE]})
        assert (status, document["problems"][0]["code"]) == (400, "invalid")

    async def test_release_and_recover(self, control: Socket) -> None:
        await control.call("DELETE", "/v1/claims/vm?force=true")
        await control.call("POST", f"/v1/recover/{A}?dry_run=true")
        assert control.agent.orders == [
            Release("vm", client=US, force=True),
            Recover(A, client=US, dry_run=True),
        ]

    @pytest.mark.parametrize("verb", ["pause", "resume"])
    async def test_pause_and_resume(self, control: Socket, verb: str) -> None:
        assert (await control.call("POST", f"/v1/{verb}"))[0] == 200
        assert control.agent.paused is (verb == "pause")

    @pytest.mark.parametrize(
        ("code", "status"),
        [(Code.IN_USE, 409), (Code.UNKNOWN_DEVICE, 404), (Code.INVALID, 400), (Code.CLAIMED, 409)],
    )
    async def test_a_refusal_has_its_code_sentence_and_hint(
        self, control: Socket, code: Code, status: int
    ) -> None:
        problem = Problem(code, "no", "do this", retryable=True)
        control.agent.reply = Answer(1, "vm", problems=(problem,), moves=(Move(A, "xe", None),))
        got, document = await control.call("PUT", "/v1/claims/vm", {"devices": [str(A)]})
        assert got == status
        assert document["problems"] == [
            {"code": code.value, "sentence": "no", "hint": "do this", "retryable": True}
        ]


class TestWhoAsked:
    """Stands in the log, by the kernel's word, with what was asked and why it was refused."""

    async def test_of_an_order(self, control: Socket) -> None:
        refused = Problem(Code.IN_USE, "process 77 (qemu) holds it open")
        control.agent.reply = Answer(1, "vm", problems=(refused,))
        with capture_logs() as logs:
            await control.call("DELETE", "/v1/claims/vm")
        asked = {"order": "release", "claim": "vm", "device": None, "client": US}
        assert logs == [
            {"event": "order", "log_level": "info", **asked},
            {
                "event": "order-refused",
                "log_level": "info",
                "code": "in-use",
                "problem": refused.sentence,
                **asked,
            },
        ]

    @pytest.mark.parametrize(
        ("method", "route", "body"),
        [
            ("PUT", "/v1/claims/vm", {"devices": [str(A)], "dry_run": True}),
            ("POST", f"/v1/recover/{A}?dry_run=true", None),
        ],
        ids=["claim", "recover"],
    )
    async def test_of_a_dry_run_which_is_told_apart(
        self, control: Socket, method: str, route: str, body: object
    ) -> None:
        refused = Problem(Code.IN_USE, "process 77 (qemu) holds it open")
        control.agent.reply = Answer(1, "vm", problems=(refused,))
        with capture_logs() as logs:
            await control.call(method, route, body)
        assert [entry["event"] for entry in logs] == ["order", "order-refused"]
        assert [entry["dry_run"] for entry in logs] == [True, True]

    async def test_of_a_pause(self, control: Socket) -> None:
        with capture_logs() as logs:
            await control.call("POST", "/v1/pause")
        assert logs == [{"event": "order", "log_level": "info", "order": "pause", "client": US}]


async def test_the_guide_has_an_example_of_each_call_and_each_is_understood(
    control: Socket,
) -> None:
    shown = set()
    for method, example, body in await asyncio.to_thread(lambda: list(examples())):
        route = example.replace("desktop", "vm")  # what the agent here has
        status, document = await control.call(method, route, body)
        assert status == 200, document
        shown.add((method, route.split("/")[2].partition("?")[0], route.count("/") - 1))
    assert shown == ROUTES.keys()


class TestNotUnderstood:
    @pytest.mark.parametrize(
        ("method", "route", "body", "status", "word"),
        [
            pytest.param("GET", "/", None, 404, "path", id="root"),
            pytest.param("OPTIONS", "*", None, 404, "path", id="the server as a whole"),
            pytest.param("GET", "/v2/status", None, 404, "path", id="another version"),
            pytest.param("GET", "/v1/claims/vm/x", None, 404, "path", id="too deep"),
            pytest.param("DELETE", "/v1/status", None, 405, "DELETE", id="method"),
            pytest.param("PUT", "/v1/claims/vm", None, 400, "body", id="no body"),
            pytest.param("PUT", "/v1/claims/vm", [], 400, "object", id="a list"),
            pytest.param("PUT", "/v1/claims/vm", {}, 400, "devices", id="no devices"),
            pytest.param("PUT", "/v1/claims/vm", {"devices": []}, 400, "devices", id="none"),
            pytest.param(
                "PUT", "/v1/claims/vm", {"devices": [1]}, 400, "devices[0]", id="a number"
            ),
            pytest.param(
                "PUT", "/v1/claims/vm", {"devices": ["gpu0"]}, 400, "devices[0]", id="no address"
            ),
            pytest.param(
                "PUT",
                "/v1/claims/vm",
                {"devices": ["03:00.0"], "colour": 1},
                400,
                "colour",
                id="unknown field",
            ),
            pytest.param(
                "PUT",
                "/v1/claims/vm",
                {"devices": ["03:00.0"], "lease": -1},
                400,
                "lease",
                id="negative lease",
            ),
            pytest.param(
                "PUT",
                "/v1/claims/vm",
                {"devices": ["03:00.0"], "driver": "../x"},
                400,
                "driver",
                id="a driver that is a path",
            ),
            pytest.param(
                "PUT",
                "/v1/claims/vm",
                {"devices": ["03:00.0"], "owner_pid": 2**31 - 1},
                400,
                "owner_pid",
                id="no such owner",
            ),
            pytest.param(
                "PUT", "/v1/claims/a%2Fb", {"devices": ["03:00.0"]}, 400, "id", id="id with a slash"
            ),
            pytest.param("DELETE", "/v1/claims/vm?force=yes", None, 400, "force", id="flag"),
            pytest.param(
                "POST", f"/v1/recover/{A}?dryrun=true", None, 400, "dryrun", id="unknown word"
            ),
            pytest.param(
                "PUT",
                "/v1/claims/vm?dry_run=true",
                {"devices": ["03:00.0"]},
                400,
                "dry_run",
                id="a word that belongs into the body",
            ),
            pytest.param("GET", "/v1/claims?force=true", None, 400, "force", id="word of another"),
            pytest.param(
                "POST",
                f"/v1/recover/{A}?dry_run=true&dry_run=false",
                None,
                400,
                "twice",
                id="a word twice",
            ),
            pytest.param(
                "POST", f"/v1/recover/{A}", {"dry_run": True}, 400, "body", id="body of recover"
            ),
            pytest.param(
                "DELETE", "/v1/claims/vm", {"force": True}, 400, "body", id="body of release"
            ),
            pytest.param("POST", "/v1/recover/gpu0", None, 400, "gpu0", id="recover no address"),
            pytest.param("GET", "/v1/explain/%FF", None, 400, "address", id="path no text"),
        ],
    )
    async def test_one_clear_sentence_and_nothing_is_done(
        self,
        control: Socket,
        method: str,
        route: str,
        body: object,
        status: int,
        word: str,
    ) -> None:
        got, document = await control.call(method, route, body)
        assert got == status
        (problem,) = document["problems"]
        assert word in problem["sentence"]
        assert control.agent.orders == []

    async def test_an_owner_who_cannot_be_looked_for_may_be_found_later(
        self, control: Socket, proc: Path
    ) -> None:
        (proc / "77").mkdir()
        (proc / "77/stat").symlink_to("stat")
        body = {"devices": ["03:00.0"], "owner_pid": 77}
        status, document = await control.call("PUT", "/v1/claims/vm", body)
        (problem,) = document["problems"]
        assert (status, problem["code"], problem["retryable"]) == (503, "unavailable", True)
        assert "process 77" in problem["sentence"]
        assert control.agent.orders == []

    async def test_a_body_that_is_too_large_is_not_read(self, control: Socket) -> None:
        body = {"devices": ["03:00.0"], "driver": "x" * 70_000}
        assert (await control.call("PUT", "/v1/claims/vm", body))[0] == 413
        assert control.agent.orders == []


async def test_a_client_without_an_agent_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="no agent answers at"):
        await asyncio.to_thread(call, str(tmp_path / "none.sock"), "GET", "/v1/status")


async def test_a_client_that_is_cut_off_does_not_say_that_there_is_no_agent(
    tmp_path: Path,
) -> None:
    """There may be too many: then the agent closes what it has no room for."""
    path = str(tmp_path / "full.sock")

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_unix_server(close, path):
        with pytest.raises(UnreachableError, match="has closed the connection") as caught:
            await asyncio.to_thread(call, path, "GET", "/v1/status")
    assert caught.value.hint is not None
    assert "ask again" in caught.value.hint


async def test_who_hangs_up_stops_waiting() -> None:
    """Then an order that has not begun is not begun any more; nothing is sent to nobody."""
    agent = FakeAgent()
    agent.has_time = asyncio.Event()
    said: asyncio.Queue[Message] = asyncio.Queue()
    said.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"method": "DELETE", "raw_path": b"/v1/claims/vm", "query_string": b""}
    asking = asyncio.ensure_future(application(agent)(scope, said.get, send))
    await asyncio.wait_for(agent.asked.wait(), 30)
    said.put_nowait({"type": "http.disconnect"})
    await asyncio.wait_for(asking, 30)
    assert agent.left == [Release("vm", client="unknown")]
    assert sent == []


async def test_who_waits_when_the_agent_ends_is_told_so(
    control: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order may have begun: whoever knows that it was interrupted can ask again."""
    monkeypatch.setattr("agent.control.http.SHUTDOWN_SECONDS", 0.01)
    control.agent.has_time = asyncio.Event()
    asking = asyncio.create_task(control.call("PUT", "/v1/claims/vm", {"devices": ["03:00.0"]}))
    await asyncio.wait_for(control.agent.asked.wait(), 30)
    await control.stop()
    status, document = await asking
    (problem,) = document["problems"]
    assert (status, document["ok"]) == (503, False)
    assert (problem["code"], problem["retryable"]) == ("interrupted", True)
    assert len(control.agent.left) == 1
