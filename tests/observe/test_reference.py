"""The README's tables of metrics, log entries, codes and reasons are what the code says.

``GOLDEN=write`` writes them anew.
"""

import ast
import enum
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from agent.cdi.offers import Reason
from agent.control import api
from agent.observe.claim_metrics import ClaimMetrics
from agent.observe.events import EVENTS
from agent.reconcile.state import State
from agent.vfio.problems import RETRYABLE, Code
from tests.observe.test_metrics import Rig

README = Path(__file__).parents[2] / "README.md"
WRITE = os.environ.get("GOLDEN") == "write"


class Desk:
    """Claims of which there are none."""

    ended: dict[tuple[str, ...], int] = {}  # noqa: RUF012 - stays empty
    durations: list[tuple[str, float]] = []  # noqa: RUF012
    hung = 0


def families() -> Iterator[Metric]:
    """Every metric of ours; the library's own about the process are its to document."""
    yield from Rig().metrics.collect()
    yield from ClaimMetrics(Desk(), State).collect()


def metric_row(family: Metric) -> str:
    """A line for one metric, with its labels."""
    suffix = "_total" if family.type == "counter" else ""
    labels = [name for name in family.samples[0].labels if name != "le"] if family.samples else []
    of = f"{{{','.join(labels)}}}" if labels else ""
    return f"| `{family.name}{suffix}{of}` | {family.type} | {family.documentation} |"


def docstrings(cls: type[enum.StrEnum]) -> Iterator[tuple[str, str]]:
    """What stands below each member of an enumeration, by its value."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assert isinstance(after, ast.Expr), f"{node.targets[0].id} says nothing of itself"
            assert isinstance(after.value, ast.Constant)
            yield cls[node.targets[0].id].value, _plain(str(after.value.value))


def _plain(docstring: str) -> str:
    """One line of a table, with the marks of Markdown."""
    return " ".join(docstring.split()).replace("``", "`")


def code_rows() -> Iterator[str]:
    """A line for each code of a refusal, in order."""
    told = {
        code: (api.STATUS.get(Code(code), 409), Code(code) in RETRYABLE, meaning)
        for code, meaning in docstrings(Code)
    }
    told |= {code: (status, later, meaning) for code, status, later, meaning in api.OWN_CODES}
    for code, (status, later, meaning) in sorted(told.items()):
        yield f"| `{code}` | {status} | {'yes' if later else 'no'} | {meaning} |"


TABLES = {
    "metrics": [
        "| metric | type | meaning |",
        "|---|---|---|",
        *(
            metric_row(family)
            for family in sorted(families(), key=lambda family: family.name)
            if family.name.startswith("cdi_agent_")
        ),
    ],
    "log entries": [
        "| entry | at most | meaning |",
        "|---|---|---|",
        *(f"| `{name}` | {EVENTS[name].level} | {EVENTS[name].meaning} |" for name in EVENTS),
    ],
    "codes of refusals": [
        "| code | status | may succeed later | meaning |",
        "|---|---|---|---|",
        *code_rows(),
    ],
    "reasons for which a device is withheld": [
        "| reason | meaning |",
        "|---|---|",
        *(f"| `{reason}` | {meaning} |" for reason, meaning in sorted(docstrings(Reason))),
    ],
}


@pytest.mark.parametrize("name", TABLES)
def test_the_table_in_the_readme_is_complete_and_true(name: str) -> None:
    text = README.read_text()
    pattern = re.compile(rf"(<summary>All {name}</summary>\n\n)(.*?)(\n\n</details>)", re.DOTALL)
    found = pattern.search(text)
    assert found is not None
    if WRITE:
        README.write_text(
            pattern.sub(lambda match: match[1] + "\n".join(TABLES[name]) + match[3], text)
        )
        return
    assert found[2].splitlines() == TABLES[name]


def test_every_metric_has_a_row_of_its_own() -> None:
    names = [family.name for family in families() if family.name.startswith("cdi_agent_")]
    assert len(names) == len(set(names)) == len(TABLES["metrics"]) - 2
    assert "cdi_agent_claims" in names
