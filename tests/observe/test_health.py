"""Health is what is true after the latest pass, neither more nor less."""

import dataclasses
from collections.abc import Mapping

import pytest

from agent.observe.health import Verdict, health, readiness


@dataclasses.dataclass
class FakeSource:
    """A source of events."""

    source: str = "udev"
    state: str = "up"
    events: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    overflows: int = 0
    malformed: int = 0


@pytest.mark.parametrize(
    ("problems", "state", "last_pass", "expected"),
    [
        pytest.param((), "up", 990.0, Verdict(ok=True), id="well"),
        pytest.param(
            ("no space left",), "up", 990.0, Verdict(False, ("no space left",)), id="a failed write"
        ),
        pytest.param(
            (),
            "deaf",
            990.0,
            Verdict(
                True,
                notes=("the source udev is deaf: changes are found by looking regularly",),
            ),
            id="a deaf source is a note",
        ),
        pytest.param(
            (),
            "up",
            600.0,
            Verdict(False, ("the last pass ended 400 s ago: the loop is stuck",)),
            id="stuck",
        ),
        pytest.param((), "up", None, Verdict(False, ("no pass has ended yet",)), id="starting"),
    ],
)
def test_health(
    problems: tuple[str, ...], state: str, last_pass: float | None, expected: Verdict
) -> None:
    verdict = health(
        problems=problems,
        sources=[FakeSource(state=state)],
        last_pass=last_pass,
        now=1000.0,
        patience=360.0,
    )
    assert verdict == expected


def test_a_source_that_can_never_be_had_is_a_note_and_no_problem() -> None:
    verdict = health(
        problems=(),
        sources=[FakeSource(state="up")],
        last_pass=990.0,
        now=1000.0,
        patience=360.0,
        unavailable=["udev"],
    )
    assert verdict.ok
    assert verdict.notes == (
        "the source udev is unavailable: changes are found by looking regularly",
    )


@pytest.mark.parametrize(
    ("ready", "stopping", "ok"),
    [(True, False, True), (False, False, False), (True, True, False), (False, True, False)],
)
def test_readiness(
    ready: bool,  # noqa: FBT001 - a table
    stopping: bool,  # noqa: FBT001
    ok: bool,  # noqa: FBT001
) -> None:
    verdict = readiness(ready=ready, stopping=stopping)
    assert verdict.ok is ok
    assert bool(verdict.problems) is not ok
    assert verdict.document == {"ok": ok, "problems": verdict.problems, "notes": ()}
