"""A scenario file says what it means, or is refused with the place and the reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.host.model import NodeRole
from agent.simulate import UdevMode
from agent.simulate.scenario import (
    MAX_BYTES,
    Act,
    Expectation,
    Kind,
    ScenarioError,
    WaitQuiet,
    load,
    parse,
    play,
)
from agent.simulate.stage import Driver


class Notes:
    """A stage that notes what is done on it, and a witness that notes what is expected."""

    def __init__(self) -> None:
        self.notes: list[tuple[object, ...]] = []

    def __getattr__(self, verb: str) -> Any:  # noqa: ANN401 - stands for every verb
        return lambda *arguments: self.notes.append((verb, *arguments))


def scenario(*steps: object, **more: object) -> dict[str, object]:
    parts = {"gpu": "gpu", "other": "gpu", "pair": "twins"}
    return {"title": "a title", "parts": parts, "steps": list(steps), **more}


@pytest.mark.parametrize(
    ("step", "done"),
    [
        ({"plug": ["gpu", "other"]}, [("plug", ("gpu", "other"))]),
        ({"unplug": "gpu"}, [("unplug", ("gpu",))]),
        ({"remove": ["gpu", "other"]}, [("remove", "gpu"), ("remove", "other")]),
        ("rescan", [("rescan",)]),
        (
            {"move": {"gpu": "vfio", "other": "own"}},
            [("move", "gpu", Driver.VFIO), ("move", "other", Driver.OWN)],
        ),
        ({"unbind": "pair's twin"}, [("unbind", "pair's twin")]),
        ({"bind": "gpu"}, [("bind", "gpu")]),
        ({"unload": "gpu"}, [("unload", "gpu")]),
        ({"load": "gpu"}, [("load", "gpu")]),
        ({"hold": {"gpu": "card"}}, [("hold", "gpu", NodeRole.CARD)]),
        ("let-go", [("let_go",)]),
        (
            {"renumber": "gpu"},
            [("hold", "gpu", NodeRole.CARD), ("unbind", "gpu"), ("bind", "gpu"), ("let_go",)],
        ),
        (
            {"swap": ["gpu", "other"]},
            [("unbind", "gpu"), ("unbind", "other"), ("bind", "other"), ("bind", "gpu")],
        ),
        ({"storm": {"gpu": 3}}, [("storm", "gpu", 3)]),
        ({"lose": {"gpu": "render"}}, [("lose", "gpu", NodeRole.RENDER)]),
        ({"restore": "gpu"}, [("restore", "gpu")]),
        ({"trigger": "gpu"}, [("trigger", "gpu")]),
        ({"vfs": {"gpu": 0}}, [("create_vfs", "gpu", 0)]),
        ({"udev": "slow"}, [("udev", UdevMode.MANUAL)]),
        ("udev-catches-up", [("udev_catches_up",)]),
        ("wait-quiet", [("wait_quiet",)]),
        ({"repeat": {"times": 2, "steps": ["rescan"]}}, [("rescan",), ("rescan",)]),
        (
            {"expect": {"published": {"own": ["gpu's VF 3"]}, "unwritten": True}},
            [("expect", Expectation({Kind.OWN: ("gpu's VF 3",)}, unwritten=True))],
        ),
    ],
    ids=str,
)
def test_what_a_step_does(step: object, done: list[tuple[object, ...]]) -> None:
    notes = Notes()
    for _ in play(parse(scenario(step)), notes, notes):
        pass
    assert notes.notes == done


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param([], "Expected `object`", id="a list"),
        pytest.param({"title": "x"}, "parts", id="no parts"),
        pytest.param(scenario(more=1), "unknown field `more`", id="unknown key"),
        pytest.param(scenario(start=["third"]), "third", id="unknown at the start"),
        pytest.param(scenario(udev="lazy"), "usual, slow, absent, not lazy", id="unknown udev"),
        pytest.param(scenario({"dance": "gpu"}), "step 1: nobody knows", id="unknown verb"),
        pytest.param(scenario("rescan", 7), "step 2: a step is a word", id="a number as a step"),
        pytest.param(scenario({"plug": "gpu", "unplug": "gpu"}), "one word", id="two verbs"),
        pytest.param(scenario({"unbind": "third"}), "no part is called third", id="unknown part"),
        pytest.param(scenario({"unbind": "gpu's twin"}), "gpu's twin", id="twin of a single"),
        pytest.param(scenario({"rescan": "gpu"}), "whole host", id="argument too many"),
        pytest.param(scenario({"move": "gpu"}), "object", id="argument missing"),
        pytest.param(scenario({"move": {"gpu": "nouveau"}}), "Invalid enum", id="unknown driver"),
        pytest.param(scenario({"storm": {"gpu": "many"}}), "int", id="a word for a number"),
        pytest.param(scenario({"expect": {"seen": []}}), "unknown field", id="expects nonsense"),
        pytest.param(scenario({"expect": {"deleted": ["gpu"]}}), "enum", id="unknown kind"),
        pytest.param(
            scenario({"repeat": {"times": 2, "steps": ["rescan", "dance"]}}),
            "step 1: step 2: nobody knows how to dance",
            id="within a repetition",
        ),
        pytest.param(
            scenario({"repeat": {"times": 10**9, "steps": ["rescan"]}}), "10000", id="for ever"
        ),
    ],
)
def test_what_is_no_scenario(data: object, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ScenarioError, match=reason) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"[" * 50_000, id="deep"),
        pytest.param(b"x" * (MAX_BYTES + 1), id="huge"),
        pytest.param(b"\xff\xfe\x00\x00", id="binary"),
        pytest.param(b"", id="empty"),
        pytest.param(b"a: *nothing", id="dangling alias"),
    ],
)
def test_a_hostile_file_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    with pytest.raises(ScenarioError):
        load(path)


@pytest.mark.parametrize(
    ("expected", "published", "fault"),
    [
        pytest.param(Expectation(), {}, "", id="nothing asked"),
        pytest.param(
            Expectation({Kind.OWN: ("a", "b")}),
            {Kind.OWN: {"b", "a"}, Kind.VFIO: {"c"}},
            "",
            id="so",
        ),
        pytest.param(
            Expectation({Kind.OWN: ("a",)}),
            {},
            "there is no file for own, which should hold a",
            id="no file",
        ),
        pytest.param(
            Expectation({Kind.OWN: ("a",)}),
            {Kind.OWN: {"a", "b"}},
            "own should hold a, and holds a, b",
            id="one too many",
        ),
        pytest.param(
            Expectation(deleted=(Kind.VFIO,)),
            {Kind.VFIO: set()},
            "vfio should be gone, and holds nothing",
            id="left empty",
        ),
    ],
)
def test_how_an_expectation_differs(
    expected: Expectation, published: dict[Kind, set[str]], fault: str
) -> None:
    assert expected.fault({kind: frozenset(names) for kind, names in published.items()}) == fault


def test_a_step_can_be_told() -> None:
    steps = parse(scenario({"move": {"gpu": "vfio"}}, {"swap": ["gpu", "other"]}, "wait-quiet"))
    assert [step.text for step in steps.steps if isinstance(step, Act)] == [
        "move gpu vfio",
        "swap gpu, other",
    ]
    assert isinstance(steps.steps[-1], WaitQuiet)
