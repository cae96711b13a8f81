"""What the log tells once, and when it tells it again."""

import logging

from msgspec import structs

from agent.cdi.desired import Reason, Withheld
from agent.cdi.files import Disk, ForeignFile
from agent.host.model import Environment, Inventory
from agent.reconcile.news import news
from agent.reconcile.state import State
from tests.reconcile.build import GPU, A

START = State(passes=0)
RUNNING = State(passes=1)


def events(before: State, after: State) -> list[str]:
    return [item.event for item in news(before, after)]


def with_environment(state: State, **facts: bool) -> State:
    environment = structs.replace(Environment(), **facts)
    return structs.replace(state, inventory=Inventory(environment=environment))


def with_foreign(*files: ForeignFile, published: bool) -> State:
    return State(
        passes=1,
        disk=Disk("/var/run/cdi", foreign=files),
        published={(GPU, A): "a"} if published else {},
    )


def test_an_ordinary_start_says_nothing() -> None:
    assert events(START, RUNNING) == []


def test_a_static_dev_is_said_once_where_it_costs_something() -> None:
    """Not where the configuration allows it, nor where there is nothing to publish."""
    static = with_environment(RUNNING, devtmpfs=False)
    assert events(START, static) == []
    why = Withheld(A, GPU, Reason.STATIC_DEV, "why")
    withheld = structs.replace(static, withheld=(why,))
    assert events(static, withheld) == ["static-dev", "withheld"]
    assert events(withheld, withheld) == []


def test_udevd_going_and_coming_is_said_each_time() -> None:
    without = with_environment(RUNNING, udevd=False)
    assert events(START, without) == ["udev-absent"]
    assert events(without, without) == []
    assert events(without, RUNNING) == ["udev-present"]
    assert events(RUNNING, without) == ["udev-absent"]


def test_a_withheld_device_is_told_once_for_each_reason() -> None:
    missing = State(passes=1, withheld=(Withheld(A, GPU, Reason.NODE_MISSING, "no card0"),))
    driverless = State(passes=1, withheld=(Withheld(A, GPU, Reason.NO_DRIVER, "no driver"),))
    assert events(RUNNING, missing) == ["withheld"]
    assert events(missing, missing) == []
    assert events(missing, driverless) == ["withheld"]


def test_what_ends_by_itself_is_not_told() -> None:
    settling = State(passes=1, withheld=(Withheld(A, GPU, Reason.SETTLING, "too new"),))
    assert events(RUNNING, settling) == []


def test_what_nobody_asked_for_is_told_to_those_who_debug() -> None:
    unmatched = State(passes=1, withheld=(Withheld(A, None, Reason.UNMATCHED, "a bridge"),))
    assert [item.level for item in news(RUNNING, unmatched)] == [logging.DEBUG]


def test_a_foreign_definition_is_told_when_met_and_when_uncovered() -> None:
    other = ForeignFile("/etc/cdi/intel.yaml", GPU, frozenset({"a"}), same_directory=False)
    covered = with_foreign(other, published=True)
    uncovered = with_foreign(other, published=False)
    assert events(RUNNING, covered) == ["foreign-definition"]
    assert events(covered, covered) == []
    assert events(covered, uncovered) == ["foreign-uncovered"]
    assert events(uncovered, covered) == ["foreign-definition"]


def test_both_going_together_uncovers_nothing() -> None:
    other = ForeignFile("/etc/cdi/intel.yaml", GPU, frozenset({"a"}), same_directory=False)
    assert events(with_foreign(other, published=True), with_foreign(published=False)) == []


def test_an_unreadable_foreign_file_is_told_once() -> None:
    broken = with_foreign(ForeignFile("/etc/cdi/x.yaml", None, problem="not YAML"), published=False)
    assert events(RUNNING, broken) == ["foreign-unreadable"]
    assert events(broken, broken) == []


def test_a_device_published_without_udevs_word_is_told() -> None:
    published = State(passes=2, published={(GPU, A): "a"})
    assert [item.event for item in news(RUNNING, published, unconfirmed=[(GPU, A)])] == [
        "published-without-udev"
    ]
