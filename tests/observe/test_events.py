"""The table of events is true: what the code logs stands in it, and what stands in it is logged."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import agent
from agent.observe.events import EVENTS
from agent.observe.record import event_name

AGENT = Path(agent.__file__).parent
METHODS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
}
LEVELS = ("debug", "info", "warning", "error")
PASSED_ON = {"event", "item.event", "recognised[0]"}
"""Names that come through a variable; their origins (``News``, ``_say_once``) are read too."""


class Use(NamedTuple):
    """A place that logs."""

    place: str
    names: frozenset[str]
    levels: frozenset[str]


def constants(node: ast.AST) -> Iterator[str]:
    """The texts that an expression can be; the test of a conditional is none of them."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=body, orelse=orelse):
            yield from constants(body)
            yield from constants(orelse)
        case ast.Tuple(elts=elements):
            for element in elements[:1]:
                yield from constants(element)
        case _:
            return


def level_names(node: ast.AST) -> frozenset[str]:
    """The levels that an expression mentions: ``logging.INFO``."""
    return frozenset(
        part.attr.lower()
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and part.attr.lower() in LEVELS
    )


def uses() -> Iterator[Use]:
    """Every call in the program that names an event."""
    for path in sorted(AGENT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            place = f"{path.relative_to(AGENT.parent)}:{node.lineno}"
            name, levels = node.args[0], frozenset[str]()
            match node.func:
                case ast.Attribute(value=ast.Name(id="_log" | "log"), attr=method) if (
                    method in METHODS
                ):
                    levels = frozenset({METHODS[method]})
                case ast.Attribute(value=ast.Call(func=called), attr=method) if (
                    method in METHODS and ast.unparse(called) == "structlog.get_logger"
                ):
                    levels = frozenset({METHODS[method]})
                case ast.Attribute(value=ast.Name(id="_log"), attr="log"):
                    name, levels = node.args[1], level_names(node.args[0])
                case ast.Name(id="News"):
                    name, levels = node.args[1], level_names(node.args[0])
                case ast.Attribute(attr="_say_once"):
                    levels = frozenset({"warning"})
                case _:
                    continue
            found = frozenset(constants(name))
            if not found and ast.unparse(name) in PASSED_ON:
                continue
            yield Use(place, found, levels)


def test_every_call_names_an_event_of_the_table() -> None:
    """A name that is computed cannot be searched for, and one that is not listed is not known."""
    wrong = [use for use in uses() if not use.names or not use.names <= EVENTS.keys()]
    assert wrong == []


def test_every_event_of_the_table_is_logged_somewhere() -> None:
    texts = "".join(path.read_text() for path in AGENT.rglob("*.py") if path.name != "events.py")
    assert [name for name in EVENTS if f'"{name}"' not in texts] == []


def test_the_level_in_the_table_is_the_highest_that_the_code_uses() -> None:
    highest: dict[str, int] = {}
    for use in uses():
        for name in use.names:
            level = max(LEVELS.index(level) for level in use.levels)
            highest[name] = max(highest.get(name, 0), level)
    told = {name: LEVELS.index(EVENTS[name].level) for name in highest if name in EVENTS}
    # A call with two names and two levels does not say which belong together.
    pairs = {name for use in uses() if len(use.names) > 1 for name in use.names}
    assert {n: level for n, level in told.items() if n not in pairs} == {
        n: level for n, level in highest.items() if n in told and n not in pairs
    }


@pytest.mark.parametrize("name", EVENTS)
def test_a_name_is_its_own_stable_form_and_has_a_sentence(name: str) -> None:
    assert event_name(name) == name
    assert EVENTS[name].meaning.endswith(".")
