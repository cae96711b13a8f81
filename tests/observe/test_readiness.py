"""When systemd is told READY, and when a person is."""

import pytest

from agent.cdi.desired import Reason, Withheld
from agent.cdi.spec import Kind
from agent.host.model import Address
from agent.observe.readiness import ReadyNotice

KIND = Kind("intel.com/gpu")
UNTIL = 110.0
SETTLING = (Withheld(Address("0000:03:00.0"), KIND, Reason.SETTLING, ""),)
FOR_GOOD = (Withheld(Address("0000:03:00.0"), KIND, Reason.NO_DRIVER, ""),)


def test_it_is_owed_once_the_start_is_over() -> None:
    notice = ReadyNotice()
    assert not notice.is_due((), started=False, now=0)
    assert notice.is_due(SETTLING, started=True, now=0), "the start has waited already"
    assert notice.given()
    assert not notice.is_due((), started=True, now=0)


@pytest.mark.parametrize(
    ("withheld", "now", "due"),
    [
        pytest.param((), 100, True, id="all is published"),
        pytest.param(SETTLING, 100, False, id="something is waited for"),
        pytest.param(SETTLING, UNTIL, True, id="waited long enough"),
        pytest.param(FOR_GOOD, 100, True, id="nothing that waiting helps"),
    ],
)
def test_after_a_reload(withheld: tuple[Withheld, ...], now: float, *, due: bool) -> None:
    notice = ReadyNotice()
    notice.given()
    notice.reloaded(taken=True, until=UNTIL)
    assert notice.is_due(withheld, started=True, now=now) is due


def test_the_end_of_a_reload_that_was_refused_is_news_to_systemd_only() -> None:
    notice = ReadyNotice()
    notice.given()
    notice.reloaded(taken=False, until=UNTIL)
    assert notice.is_due((), started=True, now=100)
    assert not notice.given()


def test_a_refusal_takes_no_news_from_the_reload_before_it() -> None:
    notice = ReadyNotice()
    notice.given()
    notice.reloaded(taken=True, until=UNTIL)
    notice.reloaded(taken=False, until=UNTIL)
    assert notice.given()


def test_a_new_reload_waits_anew() -> None:
    notice = ReadyNotice()
    notice.reloaded(taken=True, until=UNTIL)
    notice.given()
    notice.reloaded(taken=True, until=UNTIL + 100)
    assert not notice.is_due(SETTLING, started=True, now=UNTIL)
