"""Who takes devices in a guest: a client of the agent, and a virtual machine."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests.guest.observers import TOOLS
from tests.guest.rig import Guest

CLAIM: Final = "desktop"
"""What the client's only claim is called."""

_SECONDS: Final = 300.0
_CURL: Final = ("curl", "--silent", "--unix-socket", "/run/cdi-agent/control.sock")
_URL: Final = "http://localhost/v1"

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
        return self._order(*_prepare(*devices, **more))

    def begin(self, *devices: str) -> None:
        """Claim devices, and do not wait for the answer."""
        path, *arguments = _prepare(*devices)
        self._guest.start("client", *_CURL, *arguments, f"{_URL}/{path}")

    def release(self) -> Json:
        return self._order(f"claims/{CLAIM}", "--request", "DELETE")

    def recover(self, address: str) -> Json:
        return self._order(f"recover/{address}", "--request", "POST")

    def claims(self) -> Json:
        """What is claimed, stranded and hung."""
        return self._ask("claims")

    def phase(self) -> str | None:
        """The phase of the claim; None if there is none."""
        claims = self.claims()["claims"]
        return claims[0]["phase"] if claims else None

    def wait_until_ready(self) -> None:
        """Wait until the agent has done what it does at its start."""
        while not self._ask("status")["ready"]:
            pass  # each question takes the guest a while

    def wait_for_phase(self, *phases: str | None) -> str | None:
        """Wait until the claim is in one of these phases; in which."""
        while (phase := self.phase()) not in phases:
            pass
        return phase

    def _order(self, path: str, *arguments: str) -> Json:
        for _ in range(_TRIES):
            answer = self._ask(path, *arguments)
            if _TOO_BUSY.isdisjoint(codes(answer)):
                return answer
        return self._ask(path, *arguments)

    def _ask(self, path: str, *arguments: str) -> Json:
        argv = (*_CURL, *arguments, f"{_URL}/{path}")
        answer: Json = json.loads(self._guest.run(*argv, seconds=_SECONDS).out)
        return answer


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


def _prepare(*devices: str, **more: object) -> tuple[str, ...]:
    body = json.dumps({"devices": devices, **more})
    return (f"claims/{CLAIM}", "--request", "PUT", "--data", body)
