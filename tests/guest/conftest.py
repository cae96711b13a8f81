"""Guests as fixtures: `no_gpu`, `one_gpu` and `many_gpus`, each resumed anew for every test.

Among others these tests come last, and what they need is made beside those before them; by
themselves they make it first. Only the topologies are made that they ask for.

When a test fails, what its guest knew is put beside pytest's temp files (or into
CDI_AGENT_GUEST_EVIDENCE) and the end of the journal into the report. A machine that cannot run a
guest skips these tests with the reason; with CI=true they fail.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import missing
from tests.guest import layers, settings
from tests.guest.bundle import PROJECT
from tests.guest.cache import Cache, default_root
from tests.guest.evidence import collect
from tests.guest.layers import Installed
from tests.guest.rig import Guest
from tests.guest.topology import MANY_GPUS, NO_GPU, ONE_GPU, TOPOLOGIES, Topology

_BY_FIXTURE: Final = {"no_gpu": NO_GPU, "one_gpu": ONE_GPU, "many_gpus": MANY_GPUS}
_FAILED: Final = pytest.StashKey[bool]()
_JOURNAL_LINES: Final = 60

Frozen = dict[str, Path]


# --- made beside other tests ----------------------------------------------------------------------


def _is_for_guests(item: pytest.Item) -> bool:
    return item.get_closest_marker("guest") is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the guests' tests come last, in the order that they were given."""
    items.sort(key=_is_for_guests)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Begin with what the guests need, if there is something to run meanwhile."""
    asked = _asked(session.items)
    mixed = asked and not all(map(_is_for_guests, session.items))
    if mixed and not session.config.option.collectonly and not missing("guest"):
        with _made_beside(asked):
            return (yield)
    return (yield)


def _asked(items: Iterable[pytest.Item]) -> tuple[Topology, ...]:
    """The topologies of the guests that these tests resume."""
    asked: set[Topology] = set()
    for item in items:
        names = set(getattr(item, "fixturenames", ()))
        if "frozen" in names:
            parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
            named = {_BY_FIXTURE[name] for name in names & _BY_FIXTURE.keys()}
            named |= {value for value in parameters if isinstance(value, Topology)}
            # A test that names none and resumes guests by itself may take any.
            asked |= named or set(TOPOLOGIES)
    return tuple(topology for topology in TOPOLOGIES if topology in asked)


@contextlib.contextmanager
def _made_beside(topologies: tuple[Topology, ...]) -> Iterator[None]:
    """Fill the cache in a process of its own; what keeps it from that, the fixtures will say."""
    build = (sys.executable, "-m", "tests.guest", "build", *(each.name for each in topologies))
    making = subprocess.Popen(
        ["setpriv", "--pdeathsig=TERM", "nice", *build],
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    # Waited for at once: a child that has ended would slow down each test that looks for its own.
    waiter = threading.Thread(target=making.wait, name="guests", daemon=True)
    waiter.start()
    try:
        yield
    finally:
        if waiter.is_alive():  # the run was broken off
            with contextlib.suppress(ProcessLookupError):
                os.killpg(making.pid, signal.SIGTERM)
            waiter.join()


# --- fixtures -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _or_skipped() -> Iterator[None]:
    try:
        yield
    except settings.CannotRunError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{error} (and CI leaves nothing out)", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def guest_cache() -> Iterator[Cache]:
    """Where image and frozen guests are kept."""
    cache = Cache(default_root())
    yield cache
    cache.close()


@pytest.fixture(scope="session")
def installed(guest_cache: Cache) -> Installed:
    """A disk with this tree's agent installed."""
    with _or_skipped():
        return layers.installed(guest_cache)


@pytest.fixture(scope="session")
def frozen(request: pytest.FixtureRequest, guest_cache: Cache, installed: Installed) -> Frozen:
    """The folders of the frozen guests that this run needs, by topology."""
    with _or_skipped():
        return layers.all_frozen(guest_cache, installed, _asked(request.session.items))


@pytest.fixture(scope="session")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what a failed test's guest knew is put."""
    chosen = os.environ.get("CDI_AGENT_GUEST_EVIDENCE")
    return Path(chosen) if chosen else tmp_path_factory.getbasetemp()


Resume = Callable[[Topology], contextlib.AbstractContextManager[Guest]]


@pytest.fixture
def resume(
    request: pytest.FixtureRequest, installed: Installed, frozen: Frozen, evidence: Path
) -> Resume:
    """Resume a guest; one more than the fixtures below give, where a test needs it."""

    @contextlib.contextmanager
    def resumed(topology: Topology) -> Iterator[Guest]:
        with Guest.resume(installed.image, topology, frozen[topology.name]) as guest:
            failed = True  # a test that resumes guests itself fails in here
            try:
                yield guest
                failed = request.node.stash.get(_FAILED, False)
            finally:
                if failed:
                    _keep(request.node, guest, evidence / f"guest-{request.node.name}")

    return resumed


@pytest.fixture
def no_gpu(resume: Resume) -> Iterator[Guest]:
    """A guest without a GPU; any root port takes one."""
    with resume(NO_GPU) as guest:
        yield guest


@pytest.fixture
def one_gpu(resume: Resume) -> Iterator[Guest]:
    """A guest whose only GPU, with card and render node, is 0000:01:00.0."""
    with resume(ONE_GPU) as guest:
        yield guest


@pytest.fixture
def many_gpus(resume: Resume) -> Iterator[Guest]:
    """A guest with two GPUs, two functions in one slot, and two devices behind one bridge."""
    with resume(MANY_GPUS) as guest:
        yield guest


def _keep(item: pytest.Item, guest: Guest, folder: Path) -> None:
    collect(guest, folder)
    journal = (folder / "journal.txt").read_text().splitlines()[-_JOURNAL_LINES:]
    title = f"guest's journal (all of it, and more, in {folder})"
    item.add_report_section("teardown", title, "\n".join(journal))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember, for the guest's fixture, that the test itself failed."""
    report = yield
    if report.when == "call" and report.failed:
        item.stash[_FAILED] = True
    return report
