"""The pages of the metrics port: a few names, each made when somebody asks.

An ASGI application by hand: GET and HEAD, exact paths, nothing that changes anything. A page that
fails or takes too long is an answer too, and never the end of the server.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

import msgspec
import structlog

from agent.control.http import Application, Receive, Scope, Send

_log = structlog.get_logger()

TEXT: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"
PAGE_SECONDS: Final = 5.0
"""How long a page may take to be made."""


class Reply(msgspec.Struct, frozen=True):
    """An answer."""

    body: bytes
    status: int = 200
    content_type: str = TEXT
    headers: tuple[tuple[bytes, bytes], ...] = ()


Page = Callable[[], Awaitable[Reply]]


class Verdict(Protocol):
    """A probe's answer: ``observe.health.Verdict``."""

    @property
    def ok(self) -> bool:
        """Yes or no."""

    @property
    def document(self) -> Mapping[str, object]:
        """The whole of it, for JSON."""


def probe(verdict: Callable[[], Verdict]) -> Page:
    """A page for whoever asks whether all is well: 200 or 503, with the reasons as JSON."""

    async def page() -> Reply:
        answer = verdict()
        body = msgspec.json.encode(answer.document) + b"\n"
        return Reply(body, 200 if answer.ok else 503, JSON)

    return page


def document(render: Callable[[], Awaitable[bytes]], content_type: str) -> Page:
    """A page of bytes."""

    async def page() -> Reply:
        return Reply(await render(), content_type=content_type)

    return page


def application(pages: Mapping[str, Page]) -> Application:
    """Serve these pages by their exact paths, and a list of them at ``/``."""
    index = Reply("".join(f"{path}\n" for path in pages).encode())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del receive  # no page reads a body
        reply = await _reply(pages, index, scope["method"], scope["path"])
        headers = [
            (b"content-type", reply.content_type.encode()),
            (b"content-length", str(len(reply.body)).encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
            *reply.headers,
        ]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})

    return app


async def _reply(pages: Mapping[str, Page], index: Reply, method: str, path: str) -> Reply:
    """Make the answer to one request."""
    page = pages.get(path)
    if page is None and path != "/":
        return Reply(b"no such page\n", 404)
    if method not in {"GET", "HEAD"}:
        return Reply(b"nothing here can be changed\n", 405, headers=((b"allow", b"GET, HEAD"),))
    if page is None:
        return index
    try:
        async with asyncio.timeout(PAGE_SECONDS):
            return await page()
    except TimeoutError:
        return Reply(b"this page takes too long\n", 503)
    except Exception:  # noqa: BLE001 - a page's bug is an answer and a log entry, with its traceback
        _log.exception("page-failed", path=path)
        return Reply(b"this page could not be made; the log says why\n", 500)
