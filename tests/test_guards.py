"""The guards of conftest.py bite: each offence fails, and what is in order passes.

The offences run in a pytest of their own, under copies of this project's conftest and settings.
"""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).parent

OFFENCES = """
    import asyncio, os, subprocess, threading, time
    import pytest
    import agent

    kept = []  # so that no garbage collection tidies up

    def test_in_order(tmp_path):
        with open(tmp_path / "file", "w") as file:
            file.write("x")
        subprocess.run(["true"], check=True)

    async def test_in_order_in_the_loop():
        await asyncio.create_task(asyncio.sleep(0))
        await asyncio.to_thread(time.sleep, 0)
        await (await asyncio.create_subprocess_exec("true")).wait()

    def test_blocking_outside_the_loop():
        as_if_agents["nap"]()

    # Code counts as the agent's by the file that it was compiled for.
    as_if_agents = {}
    source = "import time\\ndef nap(): time.sleep(0)"
    exec(compile(source, f"{agent.__path__[0]}/nap.py", "exec"), as_if_agents)

    async def test_blocks_the_loop():
        as_if_agents["nap"]()

    def test_leaves_a_file():
        kept.append(open("/dev/null"))

    def test_leaves_a_child():
        kept.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))

    def test_leaves_a_zombie():
        kept.append(os.posix_spawn("/bin/true", ["true"], {}))

    def test_leaves_a_thread():
        kept.append(threading.Event())
        threading.Thread(target=kept[-1].wait, daemon=True).start()

    async def test_leaves_a_task():
        kept.append(asyncio.create_task(asyncio.Event().wait()))

    def test_warns():
        import warnings
        warnings.warn("careful")

    @pytest.mark.prometheus
    def test_needs_prometheus():
        pass
"""


def outcomes(folder: Path, environment: Mapping[str, str], *arguments: str) -> dict[str, str]:
    """Run the offences; map each test's name to its worst outcome."""
    (folder / "tests").mkdir()
    for name in ("conftest.py", "__init__.py"):
        shutil.copy(HERE / name, folder / "tests" / name)
    shutil.copy(HERE.parent / "pyproject.toml", folder)
    (folder / "tests/test_offences.py").write_text(textwrap.dedent(OFFENCES))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, str] = {}
    for line in run.stdout.splitlines():
        match line.split(" ", 2):
            case [("PASSED" | "FAILED" | "ERROR" | "SKIPPED") as outcome, test, *_]:
                # A skip is summed up by its place and reason, everything else has its name.
                name = "skipped" if outcome == "SKIPPED" else test.partition("::")[2]
                if found.get(name) in {None, "PASSED"}:
                    found[name] = outcome
            case _:
                continue
    return found


@pytest.fixture(scope="module")
def at_home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Outcomes with CI unset."""
    return outcomes(tmp_path_factory.mktemp("home"), {"PATH": os.environ["PATH"]})


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("test_in_order", "PASSED"),
        ("test_in_order_in_the_loop", "PASSED"),
        ("test_blocking_outside_the_loop", "PASSED"),
        ("test_blocks_the_loop", "FAILED"),
        ("test_leaves_a_file", "ERROR"),
        ("test_leaves_a_child", "ERROR"),
        ("test_leaves_a_zombie", "ERROR"),
        ("test_leaves_a_thread", "ERROR"),
        ("test_leaves_a_task", "ERROR"),
        ("test_warns", "FAILED"),
    ],
)
def test_a_guard_tells_right_from_wrong(at_home: dict[str, str], test: str, outcome: str) -> None:
    """Each offence is found, and only that."""
    assert at_home[test] == outcome


@pytest.mark.parametrize(
    ("environment", "name", "outcome"),
    [
        pytest.param({}, "skipped", "SKIPPED", id="at home a skip"),
        pytest.param({"CI": "true"}, "test_needs_prometheus", "ERROR", id="in CI a failure"),
    ],
)
def test_what_the_machine_lacks(
    tmp_path: Path, environment: dict[str, str], name: str, outcome: str
) -> None:
    """A test whose programs are not there is left out at home, and never in CI."""
    nothing_here = {"PATH": str(tmp_path)}
    assert outcomes(tmp_path, nothing_here | environment, "-k", "prometheus") == {name: outcome}
