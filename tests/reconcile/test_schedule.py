"""When a pass is due, and when the service is ready."""

import math

import pytest
from msgspec import structs

from agent.cdi.offers import Policy
from agent.reconcile.rules import Layout, Rules, Timing
from agent.reconcile.schedule import BOOT_POLL, Schedule

RULES = Rules(profiles=(), policy=Policy(), layout=Layout(), timing=Timing())
STARTED = 100.0
PATIENCE = RULES.ready_timeout


@pytest.mark.parametrize(
    ("wakes", "now", "starting", "ready", "wake_at"),
    [
        pytest.param((), 1, False, True, math.inf, id="nothing to wait for"),
        pytest.param((105.0, 103.0), 1, False, True, 103.0, id="the first of what is waited for"),
        pytest.param((), 1, True, False, STARTED + 1 + BOOT_POLL, id="starting"),
        pytest.param((101.01,), 1, True, False, 101.01, id="starting, and something comes sooner"),
        pytest.param((), PATIENCE, True, True, math.inf, id="started long enough"),
    ],
)
def test_after_a_pass(
    wakes: tuple[float, ...], now: float, wake_at: float, *, starting: bool, ready: bool
) -> None:
    schedule = Schedule(STARTED)
    schedule.passed(wakes, RULES, STARTED + now, starting=starting)
    assert (schedule.ready.is_set(), schedule.wake_at) == (ready, wake_at)


def test_ready_stays() -> None:
    schedule = Schedule(STARTED)
    schedule.passed((), RULES, STARTED, starting=False)
    schedule.passed((), RULES, STARTED, starting=True)
    assert schedule.ready.is_set()
    assert schedule.wake_at == math.inf


@pytest.mark.parametrize(
    ("patience", "now", "ready", "wake_at"),
    [
        pytest.param(1000.0, 1, False, STARTED + 1 + RULES.resync_blind, id="starting"),
        pytest.param(2.0, 1, False, STARTED + 2, id="the start's patience ends first"),
        pytest.param(2.0, 2, True, STARTED + 2 + RULES.resync_blind, id="started long enough"),
    ],
)
def test_after_a_pass_that_came_to_nothing(
    patience: float, now: float, wake_at: float, *, ready: bool
) -> None:
    rules = structs.replace(RULES, ready_timeout=patience)
    schedule = Schedule(STARTED)
    schedule.failed(rules, STARTED + now)
    assert (schedule.ready.is_set(), schedule.wake_at) == (ready, wake_at)
    assert schedule.resync_at(rules, blind=False) == STARTED + now + rules.resync


def test_who_hears_little_looks_more_often() -> None:
    schedule = Schedule(STARTED)
    assert schedule.resync_at(RULES, blind=False) == -math.inf
    schedule.looked_at_all(STARTED)
    assert schedule.resync_at(RULES, blind=False) == STARTED + RULES.resync
    assert schedule.resync_at(RULES, blind=True) == STARTED + RULES.resync_blind
    eager = structs.replace(RULES, resync=RULES.resync_blind / 2)
    assert schedule.resync_at(eager, blind=True) == STARTED + eager.resync
