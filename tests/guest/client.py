"""Who takes devices in a guest: a client of the agent, and a virtual machine."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests.guest.observers import TOOLS
from tests.guest.rig import Guest

CLAIM: Final = "desktop"
"""What the client's only claim is called."""

_SECONDS: Final = 300.0
_PAUSE: Final = 0.3  # whoever asks takes time from him who is asked
_SOCKET: Final = "/run/cdi-agent/control.sock"
_PATH: Final = f"claims/{CLAIM}"

# What an agent answers that could not find out in time what it has to know.
_TOO_BUSY: Final = frozenset({"override-unknown", "holders-unknown"})
_TRIES: Final = 10

Json = dict[str, Any]


class Client:
    """Orders and questions over the control socket; the command would take seconds to start.

    An order is given again while the agent says that this machine is too busy for it to tell.
    """

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    def claim(self, *devices: str, **more: object) -> Json:
        """Claim devices; `more` is what else stands in the body."""
        return self._order("PUT", _PATH, _body(*devices, **more))

    def begin(self, *devices: str) -> None:
        """Claim devices, and do not wait for the answer."""
        curl = ("curl", "--silent", "--unix-socket", _SOCKET, "--request", "PUT")
        url = f"http://localhost/v1/{_PATH}"
        self._guest.start("client", *curl, "--data", _body(*devices), url)

    def release(self) -> Json:
        return self._order("DELETE", _PATH)

    def recover(self, address: str) -> Json:
        return self._order("POST", f"recover/{address}")

    def claims(self) -> Json:
        """What is claimed, stranded and hung."""
        return self._ask("GET", "claims")

    def phase(self) -> str | None:
        """The phase of the claim; None if there is none."""
        claims = self.claims()["claims"]
        return claims[0]["phase"] if claims else None

    def wait_until_ready(self) -> None:
        """Wait until the agent has done what it does at its start."""
        while not self._ask("GET", "status")["ready"]:
            time.sleep(_PAUSE)

    def wait_for_phase(self, *phases: str | None) -> str | None:
        """Wait until the claim is in one of these phases; in which."""
        while (phase := self.phase()) not in phases:
            time.sleep(_PAUSE)
        return phase

    def _order(self, method: str, path: str, body: str = "") -> Json:
        for _ in range(_TRIES):
            answer = self._ask(method, path, body)
            if _TOO_BUSY.isdisjoint(codes(answer)):
                return answer
        return self._ask(method, path, body)

    def _ask(self, method: str, path: str, body: str = "") -> Json:
        head = f"{method} /v1/{path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"
        request = "\r\n".join((*head, "Connection: close", "", body))
        answer = self._guest.exchange(_SOCKET, request, seconds=_SECONDS)
        document: Json = json.loads(answer.partition("\r\n\r\n")[2])
        return document


def codes(answer: Json) -> list[str]:
    """What is wrong, in short."""
    return [problem["code"] for problem in answer["problems"]]


def twice(order: Callable[[], Json]) -> Json:
    """Give an order twice: the second time changes nothing, so the answer is the same."""
    first, again = order(), order()
    assert first == again
    return first


@contextmanager
def virtual_machine(guest: Guest, group: str, address: str) -> Iterator[None]:
    """Have a virtual machine that uses a device, until the block ends."""
    log = "/run/launcher.log"
    launcher = ("python3", f"{TOOLS}/inside/launcher.py", group, address)
    guest.start("launcher", f"--property=StandardOutput=file:{log}", *launcher)
    guest.wait_until(f"grep -q running {log}")
    yield
    guest.stop("launcher")


def _body(*devices: str, **more: object) -> str:
    return json.dumps({"devices": devices, **more})
