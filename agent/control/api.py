"""The control socket: HTTP and JSON for whoever may open it; only here can anything be changed.

===========  =============================  ========================================================
``GET``      ``/v1/status``                 what the agent does, in a few numbers
``GET``      ``/v1/devices``                every device, published or not, and why not
``GET``      ``/v1/explain/ADDRESS``        all that is known of a function
``GET``      ``/v1/claims``                 who holds what; what is stranded or hung
``GET``      ``/v1/claims/ID``              one claim
``PUT``      ``/v1/claims/ID``              prepare: the body is a `body.PrepareBody`
``DELETE``   ``/v1/claims/ID``              release; ``?force=true`` even while it is in use
``POST``     ``/v1/recover/ADDRESS``        bring a stranded device back; ``?force=``, ``?dry_run=``
``POST``     ``/v1/pause``, ``/v1/resume``  let no claim begin to move a device, or let them again
===========  =============================  ========================================================

An order is answered when it is done or refused, which takes seconds at most and the time that the
kernel takes. Whoever hangs up changes nothing of what has begun: the same order again joins the one
under way. What had to wait and has not begun by then is not begun any more. An answer that is no
success has ``problems``, each with a stable ``code``, a sentence and a hint; a body that is not
understood is answered with the path of the field. A body or a word of the query that means nothing
to a path is refused: who writes ``?dryrun=true`` wants nothing to be done. Who asked stands in the
log.
"""

import asyncio
import json
import re
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Final, Protocol

import msgspec
import structlog

from agent.control import body as bodies
from agent.control import views
from agent.control.http import Application, Receive, Scope, Send
from agent.host.model import Address, HoldMode, parse_address
from agent.reconcile.state import State
from agent.vfio.children import started_at
from agent.vfio.model import Answer, Order, Prepare, Recover, Release
from agent.vfio.problems import Code

_log = structlog.get_logger()

MAX_BODY: Final = 65_536
_UNAVAILABLE: Final = 503
UNAVAILABLE: Final = "unavailable"
UNKNOWN_CLAIM: Final = "unknown-claim"
OWN_CODES: Final = (
    (UNAVAILABLE, _UNAVAILABLE, True, "The process that is to own the claim cannot be looked for."),
    (UNKNOWN_CLAIM, 404, False, "There is no such claim to tell about."),
)
"""Codes that only this module knows: with the status, whether the same may succeed later, and
what it means."""
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,126}")

STATUS: Final = {
    Code.INVALID: 400,
    Code.UNKNOWN_DEVICE: 404,
    Code.NOT_STRANDED: 404,
    Code.INTERRUPTED: _UNAVAILABLE,
}
"""What an order that failed is answered with; everything else is a conflict, 409."""


_Reply = tuple[int, object]
"""A status and a document."""


class Agent(Protocol):
    """What the socket talks to."""

    def snapshot(self) -> State:
        """The state after the latest pass."""

    async def submit(self, order: Order) -> Answer:
        """Ask for something; returns when it is done or refused."""

    async def pause(self, *, paused: bool) -> None:
        """Let no claim begin to move a device, or let them again; returns when it is so."""

    def overview(self) -> views.Document:
        """Version, health and sources."""


class _RefusedError(Exception):
    """A request that is not understood, or cannot be at the moment.

    Args:
        status: Of HTTP.
        sentence: What is wrong with it.
        hint: What to do about it.
    """

    def __init__(self, status: int, sentence: str, hint: str | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.hint = hint


class _Request(msgspec.Struct, frozen=True):
    method: str
    parts: tuple[str, ...]
    query: dict[str, str]
    body: bytes
    client: str


def application(
    agent: Agent, *, proc: str = "/proc", clock: Callable[[], float] = time.monotonic
) -> Application:
    """The application that answers on the control socket.

    Args:
        agent: What it talks to.
        proc: Where a claim's owner is looked for.
        clock: Monotonic seconds.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = await _read(scope, receive)
            answered = await _while_waited_for(_Api(agent, proc, clock).answer(request), receive)
            if answered is None:
                return
            status, document = answered
        except _RefusedError as refused:
            status, document = refused.status, _refusal(refused)
        except asyncio.CancelledError:  # by the server, which ends and waits a moment for this
            status, document = STATUS[Code.INTERRUPTED], _INTERRUPTED
        body = json.dumps(document, indent=2).encode() + b"\n"
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


async def _while_waited_for(
    answer: Coroutine[object, object, _Reply], receive: Receive
) -> _Reply | None:
    """The answer, unless whoever asked hangs up before it is there; None then.

    Who hangs up stops waiting. What has begun goes on, and what has not is not begun any more.
    """
    answering = asyncio.create_task(answer)
    leaving = asyncio.create_task(_until_hung_up(receive))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else None
    finally:
        answering.cancel()
        leaving.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _until_hung_up(receive: Receive) -> None:
    """Wait until the client is gone; it has said all that it may say."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Api:
    """The routes."""

    def __init__(self, agent: Agent, proc: str, clock: Callable[[], float]) -> None:
        self._agent = agent
        self._proc = proc
        self._clock = clock

    async def answer(self, request: _Request) -> _Reply:
        """Do what a request asks for.

        Raises:
            _RefusedError: It is not understood.
        """
        version, *rest = request.parts
        if version != "v1" or not rest or (rest[0], len(rest)) not in _RESOURCES:
            raise _RefusedError(404, "no such path")
        route = ROUTES.get((request.method, rest[0], len(rest)))
        if route is None:
            raise _RefusedError(405, f"{request.method} is not for this path")
        if request.body and not route.has_body:
            raise _RefusedError(400, f"{request.method} of this path has no body")
        for name in request.query.keys() - route.flags:
            raise _RefusedError(
                400, f"?{name[:40]}= means nothing to {request.method} of this path"
            )
        return await route.answer(self, request, *rest[1:])

    async def status(self, _request: _Request) -> _Reply:
        state = self._agent.snapshot()
        return 200, {**self._agent.overview(), **views.status(state)}

    async def devices(self, _request: _Request) -> _Reply:
        return 200, {"devices": views.devices(self._agent.snapshot())}

    async def claims(self, _request: _Request) -> _Reply:
        return 200, views.claims(self._agent.snapshot(), self._clock())

    async def claim(self, _request: _Request, text: str) -> _Reply:
        found = views.claim(self._agent.snapshot(), _claim_id(text), self._clock())
        if found is None:
            return 404, _error(UNKNOWN_CLAIM, f"there is no claim {text}")
        return 200, found

    async def explain(self, _request: _Request, text: str) -> _Reply:
        found = views.explanation(self._agent.snapshot(), _address(text), self._clock())
        if found is None:
            return 404, _error(Code.UNKNOWN_DEVICE.value, f"this host has no function {text}")
        return 200, found

    async def prepare(self, request: _Request, claim: str) -> _Reply:
        state = self._agent.snapshot()
        return await self._order(await self._prepare(state, claim, request), request)

    async def release(self, request: _Request, claim: str) -> _Reply:
        order = Release(_claim_id(claim), client=request.client, force=_flag(request, "force"))
        return await self._order(order, request)

    async def recover(self, request: _Request, text: str) -> _Reply:
        order = Recover(
            _address(text),
            client=request.client,
            force=_flag(request, "force"),
            dry_run=_flag(request, "dry_run"),
        )
        return await self._order(order, request)

    async def pause(self, request: _Request) -> _Reply:
        paused = request.parts[1] == "pause"
        _log.info("order", order=request.parts[1], client=request.client)
        await self._agent.pause(paused=paused)
        return 200, {"paused": paused}

    async def _order(self, order: Order, request: _Request) -> _Reply:
        fields = {
            "order": type(order).__name__.lower(),
            "claim": getattr(order, "id", None),
            "device": getattr(order, "address", None),
            "client": request.client,
        }
        if getattr(order, "dry_run", False):
            fields["dry_run"] = True
        _log.info("order", **fields)
        answered = await self._agent.submit(order)
        if answered.ok:
            return 200, views.answer(answered)
        code = answered.problems[0].code
        _log.info("order-refused", **fields, code=code.value, problem=answered.problems[0].sentence)
        return STATUS.get(code, 409), views.answer(answered)

    async def _prepare(self, state: State, claim: str, request: _Request) -> Prepare:
        id_ = _claim_id(claim)
        names = _names(state, id_)
        try:
            body = bodies.read(request.body)
            devices = bodies.addresses(names, body.devices, "devices")
            named = bodies.addresses(names, body.named, "named")
        except bodies.BodyError as error:
            raise _RefusedError(400, error.sentence, error.hint) from error
        started = None
        if body.owner_pid is not None:
            try:
                started = await asyncio.to_thread(started_at, body.owner_pid, self._proc)
            except OSError as error:
                what = f"process {body.owner_pid} cannot be looked for: {error.strerror}"
                raise _RefusedError(_UNAVAILABLE, what) from error
            if started is None:
                raise _RefusedError(400, f"owner_pid: there is no process {body.owner_pid}")
        return Prepare(
            id=id_,
            mode=HoldMode(body.mode),
            devices=devices,
            client=request.client,
            force=body.force,
            named=named,
            driver=body.driver,
            from_vfio=body.from_vfio,
            lease=body.lease,
            owner_pid=body.owner_pid,
            owner_started=started,
            dry_run=body.dry_run,
            called=tuple(
                (text, names[text])
                for text in dict.fromkeys((*body.devices, *body.named))
                if text in names
            ),
        )


class _Route(msgspec.Struct, frozen=True):
    """What a method of a path does, and what may be said with it."""

    answer: Callable[..., Awaitable[_Reply]]
    flags: frozenset[str] = frozenset()
    """Words in the query; each is true or false."""
    has_body: bool = False


ROUTES: Final[Mapping[tuple[str, str, int], _Route]] = {
    ("GET", "status", 1): _Route(_Api.status),
    ("GET", "devices", 1): _Route(_Api.devices),
    ("GET", "explain", 2): _Route(_Api.explain),
    ("GET", "claims", 1): _Route(_Api.claims),
    ("GET", "claims", 2): _Route(_Api.claim),
    ("PUT", "claims", 2): _Route(_Api.prepare, has_body=True),
    ("DELETE", "claims", 2): _Route(_Api.release, frozenset({"force"})),
    ("POST", "recover", 2): _Route(_Api.recover, frozenset({"force", "dry_run"})),
    ("POST", "pause", 1): _Route(_Api.pause),
    ("POST", "resume", 1): _Route(_Api.pause),
}
"""By method, first part of the path below ``/v1``, and number of parts."""
_RESOURCES: Final = frozenset((name, parts) for _, name, parts in ROUTES)


async def _read(scope: Scope, receive: Receive) -> _Request:
    """Read a whole request; the server has bounded its size and its time already."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _RefusedError(400, "the request ended before its body did")
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            raise _RefusedError(413, f"the body has more than {MAX_BODY} bytes")
        if not message.get("more_body", False):
            break
    try:
        target = scope["raw_path"].decode().removeprefix("/")  # it may be `*`, which has no slash
        path = [urllib.parse.unquote(part) for part in target.split("/")]
        words = urllib.parse.parse_qsl(scope["query_string"].decode(), keep_blank_values=True)
    except (UnicodeDecodeError, ValueError) as error:
        raise _RefusedError(400, "the path is not understood") from error
    query = dict(words)
    if len(query) < len(words):
        raise _RefusedError(400, "the query says the same word twice")
    client = scope.get("state", {}).get("peer", "unknown")
    return _Request(scope["method"], tuple(path), query, body, client)


def _error(
    code: str, sentence: str, *, hint: str | None = None, retryable: bool = False
) -> views.Document:
    problem = {"code": code, "sentence": sentence, "hint": hint, "retryable": retryable}
    return {"ok": False, "problems": [problem]}


_INTERRUPTED: Final = _error(
    Code.INTERRUPTED.value,
    "the agent was stopped before this was done",
    hint="ask again when it runs again; until then its journal has what has begun",
    retryable=True,
)


def _refusal(refused: _RefusedError) -> views.Document:
    if refused.status == _UNAVAILABLE:
        return _error(UNAVAILABLE, refused.sentence, retryable=True)
    return _error(Code.INVALID.value, refused.sentence, hint=refused.hint)


def _claim_id(text: str) -> str:
    if _ID.fullmatch(text) is None:
        raise _RefusedError(
            400,
            "a claim's id has 1 to 127 letters, digits and ._:- and begins with one of the former",
        )
    return text


def _address(text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise _RefusedError(400, str(error)) from error


def _names(state: State, id_: str) -> Mapping[str, Address]:
    """What CDI names mean: those of published devices, and those by which this claim was made."""
    names = {f"{kind}={name}": address for (kind, address), name in state.published.items()}
    claim = state.claims.live.get(id_)
    return names if claim is None else names | dict(claim.record.request.called)


def _flag(request: _Request, name: str) -> bool:
    value = request.query.get(name, "false")
    if value not in {"true", "false"}:
        raise _RefusedError(400, f"?{name}= is true or false, not {value[:20]!r}")
    return value == "true"
