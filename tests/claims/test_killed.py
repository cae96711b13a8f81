"""`kill -9` at every step of a claim, there and back; then another agent begins.

Nothing may be stranded. A claim that was answered is in force; any other is in force as a whole or
undone as a whole, and all that it touched is as it was.
"""

import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.claims.conftest import MakeHost
from tests.claims.host import ClaimHost, Document
from tests.claims.shapes import (
    AUDIO,
    BOUND,
    DRIVERLESS,
    NAMED,
    NATIVE,
    ONE,
    OVERRIDDEN,
    SHARED_SLOT,
    TWO,
    VARIANT,
    VIRTUAL,
    Shape,
)

pytestmark = pytest.mark.claims

Arm = Callable[[int], contextlib.AbstractContextManager[None]]
"""Lets the agent die at the n-th step from now."""


class Killing:
    """A claim that is made and released again and again, while the agent is killed.

    Args:
        host: Where.
        shape: The claim.
    """

    def __init__(self, host: ClaimHost, shape: Shape) -> None:
        self.host = host
        self.shape = shape
        self.kills = 0
        shape.start(host)
        self.free = host.world()
        self.prepare()
        self.held = host.world()
        self.release()

    def prepare(self) -> None:
        """Claim it."""
        answer = self.shape.prepare(self.host)
        assert answer["ok"], answer
        assert tuple(answer["names"]) == self.shape.names

    def release(self) -> None:
        """Give it back."""
        answer = self.host.release("vm")
        assert answer["ok"], answer
        assert self.host.world() == self.free

    def everywhere(self, arm: Arm) -> None:
        """Kill the agent at each step of both."""
        body = {"devices": self.shape.devices, **self.shape.more}
        for step in itertools.count(1):
            if not self._dies(arm, step, "PUT", body):
                break
        assert self.host.world() == self.held
        for step in itertools.count(1):
            if not self._dies(arm, step, "DELETE"):
                break
            self.prepare()
        assert self.host.world() == self.free

    def _dies(self, arm: Arm, step: int, method: str, body: Document | None = None) -> bool:
        """Whether the agent dies at this step; the next one has then put everything right."""
        with arm(step):
            answer = self.host.try_ask(method, "/v1/claims/vm", body)
        if answer is not None:
            assert answer["ok"], answer
            return False
        assert self.host.await_end() == -signal.SIGKILL
        self.kills += 1
        self.host.start()
        found = self.host.quiet()
        assert found["stranded"] == found["hung"] == []
        if found["claims"]:
            assert [claim["phase"] for claim in found["claims"]] == ["done"]
            assert self.host.world() == self.held
            self.prepare()
            self.release()
        else:
            assert self.host.world() == self.free
        return True


def at_write(
    host: ClaimHost, number: int, *, lost: bool
) -> contextlib.AbstractContextManager[None]:
    """Kill the agent when its n-th write has arrived in the kernel.

    Args:
        lost: Its child dies with it, so the write is not done.
    """
    arrived = itertools.count(1)

    def gate(_path: str, _text: str) -> int | None:
        if next(arrived) != number:
            return None
        host.kill()
        return 5 if lost else None

    return host.gate(gate)


@contextlib.contextmanager
def at_moment(host: ClaimHost, number: int) -> Iterator[None]:
    """Kill the agent at its n-th moment (see `trap`)."""
    host.set_trap(number)
    yield


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("shape", "kills"),
    [(ONE, 31), (BOUND, 5)],
    ids=lambda value: value.name if isinstance(value, Shape) else "",
)
def test_killed_at_every_moment(make_host: MakeHost, shape: Shape, kills: int) -> None:
    """Before each file is opened, renamed or deleted, each child started, each answer given."""
    with shape.make(make_host) as host:
        killing = Killing(host, shape)
        killing.everywhere(lambda number: at_moment(host, number))
        # How many there are, depends on how many children were started before they were wanted.
        assert killing.kills >= kills, "the trap was not set"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", [False, True], ids=["done", "lost"])
def test_killed_at_every_write(make_host: MakeHost, *, lost: bool) -> None:
    """With the write that was on its way done after the agent's death, and not done at all."""
    with ONE.make(make_host) as host:
        killing = Killing(host, ONE)
        killing.everywhere(lambda number: at_write(host, number, lost=lost))
        assert killing.kills == 7


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("shape", "kills"),
    [
        (TWO, 14),
        (AUDIO, 14),
        (NAMED, 14),
        (VIRTUAL, 7),
        (VARIANT, 7),
        (SHARED_SLOT, 7),
        (DRIVERLESS, 4),
        (OVERRIDDEN, 6),
        (NATIVE, 6),
    ],
    ids=lambda value: value.name if isinstance(value, Shape) else "",
)
def test_killed_at_every_write_of_each_shape(make_host: MakeHost, shape: Shape, kills: int) -> None:
    """Every second write is lost."""
    with shape.make(make_host) as host:
        killing = Killing(host, shape)
        killing.everywhere(lambda number: at_write(host, number, lost=number % 2 == 0))
        assert killing.kills == kills
