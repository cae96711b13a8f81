"""The commands that talk to an agent: what they ask, and how they tell what they were answered."""

import asyncio
import errno
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from agent.cli import execute
from agent.control.api import application
from agent.control.server import HttpService
from agent.control.sockets import UnixAddress, bind
from agent.errors import ExitCode
from agent.host.model import HoldMode
from agent.vfio.model import Answer, Move, Prepare, Recover, Release
from agent.vfio.problems import Code, Problem
from tests.control.fake_agent import NAME, A, B, FakeAgent

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    """An agent that answers on a control socket, in a loop of another thread."""
    # The agent's log would go to the same output as the command's.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    fake = FakeAgent()
    listener = bind(UnixAddress(str(tmp_path / "control.sock")))
    loop = asyncio.new_event_loop()
    app = application(fake, clock=lambda: 130.0)

    async def serve() -> None:
        await HttpService("control", app, where=[listener]).run()

    task = loop.create_task(serve())
    thread = threading.Thread(target=loop.run_until_complete, args=(asyncio.wait([task]),))
    thread.start()
    yield fake
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    listener.close()  # a server that was cancelled before it began has not closed it
    structlog.reset_defaults()


@pytest.fixture
def run(agent: FakeAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command against that agent: its exit code, output and errors."""
    config = tmp_path / "config.yaml"
    config.write_text(f"control: {{socket: {tmp_path}/control.sock}}\n")

    def run(*argv: str) -> tuple[int, str, str]:
        code = execute([*argv, "-c", str(config)])
        return code, *capsys.readouterr()

    return run


def test_claim_prints_the_names_under_which_the_devices_are_published(
    run: Run, agent: FakeAgent
) -> None:
    assert run("claim", "vm", "03:00.0", "--lease", "60") == (0, f"{NAME}\n", "")
    (order,) = agent.orders
    assert isinstance(order, Prepare)
    assert (order.id, order.mode, order.devices, order.lease) == ("vm", HoldMode.VFIO, (A,), 60)


def test_a_dry_run_says_what_would_be_moved(run: Run, agent: FakeAgent) -> None:
    moves = (Move(A, "xe", "vfio-pci"), Move(B, None, "vfio-pci", companion=True))
    agent.reply = Answer(1, "vm", moves=moves)
    assert run("claim", "vm", "03:00.0", "--dry-run") == (
        0,
        f"{A}: xe -> vfio-pci\n{B}: no driver -> vfio-pci (moves along)\n",
        "",
    )


@pytest.mark.parametrize(
    ("retryable", "code"), [(True, ExitCode.TEMPORARY), (False, ExitCode.FAILURE)]
)
def test_a_refusal_is_a_sentence_a_hint_and_a_code(
    run: Run, agent: FakeAgent, *, retryable: bool, code: ExitCode
) -> None:
    problem = Problem(Code.IN_USE, "pid 7 (vm) has /dev/dri/card0 open", "stop it", retryable)
    agent.reply = Answer(1, "vm", problems=(problem,))
    got, out, err = run("claim", "vm", "03:00.0")
    assert (got, out) == (code, "")
    assert err == ("cdi-agent: pid 7 (vm) has /dev/dri/card0 open (in-use)\n  hint: stop it\n")


def test_each_reason_of_a_refusal_has_its_code_and_hint_and_the_first_comes_last(
    run: Run, agent: FakeAgent
) -> None:
    agent.reply = Answer(
        1,
        "vm",
        problems=(
            Problem(Code.IN_USE, "pid 7 has it open", "stop it", retryable=True),
            Problem(Code.CLAIMED, "vm holds it", "", retryable=True),
            Problem(Code.PAUSED, "it is paused", "resume", retryable=True),
        ),
    )
    assert run("claim", "vm", "03:00.0")[2].splitlines() == [
        "cdi-agent: vm holds it (claimed)",
        "cdi-agent: it is paused (paused)",
        "  hint: resume",
        "cdi-agent: pid 7 has it open (in-use)",
        "  hint: stop it",
    ]


@pytest.mark.parametrize(
    "option",
    [
        *(("--lease", value) for value in ("0", "-1", "nan", "inf", "1e30", "366d", "5 weeks")),
        ("--owner-pid", "0"),
    ],
    ids=" ".join,
)
def test_an_option_that_can_never_be_right_is_refused_before_the_agent_is_asked(
    run: Run, agent: FakeAgent, option: tuple[str, str]
) -> None:
    code, _, err = run("claim", "vm", "03:00.0", *option)
    assert (code, agent.orders) == (ExitCode.USAGE, [])
    assert f"Invalid value for '{option[0]}'" in err
    if option[0] == "--lease":
        assert f"{option[1]!r} is not a duration such as 90, 90s, 5m or 1h, of more than 0" in err


@pytest.mark.parametrize(
    ("lease", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400), ("500ms", 0.5)]
)
def test_a_lease_is_said_as_durations_are_in_the_configuration(
    run: Run, agent: FakeAgent, lease: str, seconds: float
) -> None:
    assert run("claim", "vm", "03:00.0", "--lease", lease)[0] == 0
    assert agent.prepared[0].lease == seconds


def test_recover_says_how_it_is_now(run: Run) -> None:
    assert run("recover", A)[1] == f"{A} is where it belongs\n"
    assert run("recover", A, "--dry-run")[1] == "nothing would be moved\n"


def test_release_and_recover_ask_for_what_they_say(run: Run, agent: FakeAgent) -> None:
    assert run("release", "vm", "--force")[0] == 0
    assert run("recover", A, "--dry-run")[0] == 0
    release, recover = agent.orders
    assert isinstance(release, Release)
    assert isinstance(recover, Recover)
    assert (release.id, release.force) == ("vm", True)
    assert (recover.address, recover.dry_run, recover.force) == (A, True, False)


def test_claims_shows_who_holds_what_and_what_is_left_behind(run: Run) -> None:
    _, out, _ = run("claims")
    header, claim, *rest = out.splitlines()
    columns = ["ID", "MODE", "PHASE", "AGE", "LEASE", "OWNER", "CLIENT", "FUNCTIONS"]
    assert re.split(r"  +", header) == columns
    terms = ["30s", "30s", "pid 5", "pid 7, uid 0"]
    assert re.split(r"  +", claim) == ["vm", "vfio", "in force", *terms, B]
    assert f"stranded: {B} on vfio-pci: it did not come back" in rest
    assert f"hung: a write (unbind) to {A} has not returned" in rest


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_pause_and_resume(run: Run, agent: FakeAgent, verb: str) -> None:
    assert run(verb) == (0, "", "")
    assert agent.paused is (verb == "pause")


def test_status_is_a_few_lines_and_a_code(run: Run) -> None:
    code, out, _ = run("status")
    assert code == 0
    assert out.startswith("cdi-agent 1: healthy\n")
    assert "intel.com/gpu: 1" in out
    assert "  withheld   1\n" in out


def test_status_says_what_is_withheld_and_why(run: Run, agent: FakeAgent) -> None:
    """For `scan` knows of no claim, and would say that it is published."""
    assert f"  {B}  intel.com/gpu  held  claim vm holds it\n" in run("status")[1]
    agent.withheld = False
    out = run("status")[1]
    assert "  withheld   nothing\n" in out
    assert B not in out.partition("hung")[2]


def test_explain_says_what_is_known_of_a_function(run: Run) -> None:
    code, out, _ = run("explain", B)
    assert code == 0
    terms = "of pid 7, uid 0; ends in 30s unless it is claimed again; ends with process 5"
    assert f"claim vm: the claim is in force; {terms}\n" in out
    assert "withheld: intel.com/gpu (held): claim vm holds it" in out


@pytest.mark.parametrize(
    ("device", "address"),
    [
        pytest.param("intel.com/gpu=0000-03-00-0-0xe212", A, id="published"),
        pytest.param("intel.com/gpu=0000-04-00-0-0xe212", B, id="withheld"),
        pytest.param("intel.com/gpu=0000:04:00.0", B, id="withheld, called by its address"),
        pytest.param("04:00.0", B, id="an address"),
    ],
)
def test_explain_takes_the_name_that_an_engine_complains_of(
    run: Run, device: str, address: str
) -> None:
    code, out, _ = run("explain", device)
    assert code == 0
    assert out.startswith(f"{address}  8086:e212 ")


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("intel.com/gpu=all", "intel.com/gpu=all is every device of its kind"),
        ("intel.com/gpu=card7", "intel.com/gpu=card7 is the name of no published device"),
        ("intel.com/gpu", "'intel.com/gpu' is not a PCI address such as 0000:03:00.0 (invalid)"),
    ],
)
def test_explain_says_what_is_no_device(run: Run, device: str, sentence: str) -> None:
    code, out, err = run("explain", device)
    assert (code, out) == (ExitCode.FAILURE, "")
    assert err.splitlines()[0] == f"cdi-agent: {sentence}"


@pytest.mark.parametrize("command", ["status", "claims"])
def test_json_is_what_the_socket_says(run: Run, command: str) -> None:
    code, out, _ = run(command, "-o", "json")
    assert code == 0
    assert out.startswith("{")


def test_who_may_not_open_the_socket_is_told_so_and_not_that_there_is_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may open every socket; so the kernel's answer is made up."""

    def refuse(_self: object, _path: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket, "socket", type("S", (socket.socket,), {"connect": refuse}))
    config = tmp_path / "config.yaml"
    config.write_text(f"control: {{socket: {tmp_path}/control.sock}}\n")
    assert execute(["status", "-c", str(config)]) == ExitCode.NO_PERMISSION
    assert capsys.readouterr().err.splitlines() == [
        f"cdi-agent: {tmp_path}/control.sock may not be opened by this user",
        "  hint: ask as root, or as a member of control.group",
    ]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("release", "\udcff"), "a claim's id has 1 to 127 letters"),
        (("claim", "vm", "\udcff"), "devices[0] must be a PCI address"),
        (("claim", "vm", A, "--driver", "\udcff"), "driver must be the name of a driver"),
        (("explain", "\udcff"), "is not a PCI address"),
        (("recover", "\udcff"), "is not a PCI address"),
    ],
)
def test_what_is_no_text_is_refused_as_any_other_word(
    run: Run, argv: tuple[str, ...], said: str
) -> None:
    """A byte that is none of UTF-8: a slip of the hand on the command line."""
    code, out, err = run(*argv)
    assert (code, out) == (ExitCode.FAILURE, "")
    assert said in err


def test_without_an_agent_one_sentence_and_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"control: {{socket: {tmp_path}/none.sock}}\n")
    assert execute(["status", "-c", str(config)]) == ExitCode.UNAVAILABLE
    err = capsys.readouterr().err
    assert err.startswith(f"cdi-agent: no agent answers at {tmp_path}/none.sock: ")
    assert "hint: systemctl status cdi-agent" in err
