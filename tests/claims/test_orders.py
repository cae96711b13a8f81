"""What people and programs do with claims, and what the rest of the host does to them meanwhile."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent.simulate import Features, VfioKind
from agent.simulate.host import arc_b50, arc_b60, integrated_intel
from tests.claims.conftest import MakeHost
from tests.claims.host import DRIVERS, ClaimHost, Document
from tests.claims.shapes import B50, B60, NAME, NATIVE, ONE, VFIO_NAME
from tests.control.guide import examples

pytestmark = pytest.mark.claims

GPU = f"intel.com/gpu={NAME}"
CONSOLE = "0000:00:02.0"
ASK = """
import sys
from agent.control.client import call
call(sys.argv[1], "PUT", "/v1/claims/vm", {"devices": sys.argv[2:]})
"""


def codes(answer: Document) -> list[str]:
    return [problem["code"] for problem in answer["problems"]]


@contextlib.contextmanager
def _at_unbind(host: ClaimHost, then: Callable[[], object]) -> Iterator[None]:
    """Do something when the agent's first ``unbind`` has arrived, beside it."""
    acting: list[threading.Thread] = []

    def gate(path: str, _text: str) -> None:
        if path.endswith("unbind") and not acting:
            acting.append(threading.Thread(target=then))
            acting[0].start()

    with host.gate(gate):
        yield
    acting[0].join()


# --- in use ---------------------------------------------------------------------------------------


def test_a_process_that_holds_the_group_while_it_is_released(make_host: MakeHost) -> None:
    """It is named; when it has ended, whoever asks again is told so at once."""
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        host.prepare("vm", B50)
        held = host.world()
        (group,) = (p for p in host.kernel.node_paths(B50) if p.count("/") == 3)
        hold = host.kernel.hold(group, command="qemu")
        for _ in range(2):
            (problem,) = host.release("vm")["problems"]
            assert problem["code"] == "in-use"
            assert problem["retryable"]
            assert f"process {hold.pid} (qemu) holds {group} open" in problem["sentence"]
        assert host.world()["functions"] == held["functions"]
        assert host.phase("vm") == "freeing"
        assert codes(host.prepare("vm", B50)) == ["ending"]
        hold.release()
        for _ in range(2):
            assert host.release("vm")["problems"] == []
        assert host.world() == free


def test_a_device_goes_back_by_itself_when_its_user_has_ended(make_host: MakeHost) -> None:
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        host.prepare("vm", B50)
        with host.kernel.hold(host.kernel.node_paths(B50)[0]):
            assert codes(host.release("vm")) == ["in-use"]
        host.until(lambda: host.claims()["claims"] == [])
        assert host.world() == free


def test_a_release_that_is_forced(make_host: MakeHost) -> None:
    """Also after one that was not; the kernel itself waits until the user lets go of VFIO."""
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        host.prepare("vm", B50)
        hold = host.kernel.hold(host.kernel.node_paths(B50)[0])
        assert codes(host.release("vm")) == ["in-use"]
        with _at_unbind(host, hold.release):
            assert host.release("vm", force=True)["ok"]
        assert host.release("vm", force=True)["ok"]
        assert host.world() == free


def test_a_process_that_holds_the_card_before_it_is_claimed(make_host: MakeHost) -> None:
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        render = next(path for path in host.kernel.node_paths(B50) if "render" in path)
        with host.kernel.hold(render, command="ffmpeg") as hold:
            for _ in range(2):
                (problem,) = host.prepare("vm", B50)["problems"]
                assert problem["code"] == "in-use"
                assert f"process {hold.pid} (ffmpeg)" in problem["sentence"]
            assert host.world() == free
        assert host.prepare("vm", B50)["ok"]


# --- claims that end by themselves ----------------------------------------------------------------


def test_a_lease_ends_unless_it_is_renewed(make_host: MakeHost) -> None:
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        for _ in range(2):
            assert host.prepare("vm", B50, lease=1000)["ok"]
        (claim,) = host.claims()["claims"]
        assert 900 < claim["expires_in_seconds"] <= 1000
        assert host.prepare("vm", B50, lease=0.1)["ok"]
        host.until(lambda: host.claims()["claims"] == [])
        assert host.world() == free


@pytest.mark.parametrize("restarted", [False, True], ids=["same agent", "another agent"])
def test_a_claim_ends_with_its_owner(make_host: MakeHost, *, restarted: bool) -> None:
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        tree = host.kernel.tree
        tree.file("/proc/77/stat", "77 (a vm) S" + " 0" * 18 + " 4711 0\n")
        assert codes(host.prepare("vm", B50, owner_pid=78)) == ["invalid"]
        for _ in range(2):
            assert host.prepare("vm", B50, owner_pid=77)["ok"]
        if restarted:
            host.kill()
            host.await_end()
            host.start()
        assert host.phase("vm") == "done"
        tree.file("/proc/77/stat", "77 (another) S" + " 0" * 18 + " 4712 0\n")
        host.until(lambda: host.claims()["claims"] == [])
        assert host.world() == free


# --- at every start -------------------------------------------------------------------------------

ASSIGN = {"vfio": {"assign": [{"id": "boot", "devices": [B50]}]}}


def test_what_the_configuration_assigns_is_claimed_at_every_start(make_host: MakeHost) -> None:
    """Also after an agent that was killed; what somebody has released stays released."""
    with ONE.make(make_host, ASSIGN) as host:
        for _ in range(2):
            host.start()
            host.until(lambda: host.phase("boot") == "done")
            assert host.kernel.driver_of(B50) == "vfio-pci"
            host.kill()
            host.await_end()
        host.start()
        assert host.release("boot")["ok"]
        host.reload(reconcile={"settle": 0.02})
        assert host.kernel.driver_of(B50) == "xe"
        assert host.stop() == 0
        host.start()
        host.until(lambda: host.phase("boot") == "done")


def test_what_a_reload_assigns_is_claimed(make_host: MakeHost) -> None:
    with ONE.make(make_host) as host:
        host.start()
        host.reload(**ASSIGN)
        host.until(lambda: host.phase("boot") == "done")


# --- what others do -------------------------------------------------------------------------------


def test_a_device_that_somebody_else_moves_is_lost(make_host: MakeHost) -> None:
    """It is told, and never moved again; its release writes nothing."""
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        host.prepare("vm", B50)
        host.reader.patience = 8
        host.kernel.move(B50, "xe")
        host.until(lambda: host.phase("vm") == "lost")
        assert codes(host.prepare("vm", B50)) == ["lost"]
        writes: list[str] = []
        with host.gate(lambda path, _text: writes.append(path)):
            for _ in range(2):
                assert host.release("vm")["ok"]
        assert writes == []
        assert host.claims()["stranded"] == []
        host.until(lambda: host.world() == free)
        assert host.prepare("vm", B50)["ok"]


def test_a_lost_device_is_moved_by_no_agent_that_starts_later(make_host: MakeHost) -> None:
    """Not though an administrator has bound it to VFIO again, nor when its claim is released."""
    with ONE.make(make_host) as host:
        host.start()
        ONE.prepare(host)
        host.reader.patience = 8
        host.kernel.move(B50, "xe")
        host.until(lambda: host.phase("vm") == "lost")
        host.kernel.move(B50, "vfio-pci")
        for _ in range(2):
            host.kill()
            host.await_end()
            host.start()
            host.release("vm")
            assert host.quiet()["claims"] == []
            assert host.kernel.driver_of(B50) == "vfio-pci"
        assert host.recover(B50)["ok"]
        assert host.kernel.driver_of(B50) == "xe"


def test_a_device_that_is_pulled_out_is_lost(make_host: MakeHost) -> None:
    with ONE.make(make_host) as host:
        host.start()
        host.prepare("vm", B50)
        host.reader.patience = 8
        host.kernel.unplug(B50)
        host.until(lambda: host.phase("vm") == "lost")
        host.kernel.plug(*arc_b50())
        host.until(lambda: "intel.com/gpu" in host.published())
        for _ in range(2):
            assert host.release("vm")["ok"]
        assert host.claims()["stranded"] == []
        assert host.prepare("vm", B50)["ok"]


def test_a_device_that_libvirt_manages(make_host: MakeHost) -> None:
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        address = '<address domain="0x0" bus="0x3" slot="0x0" function="0x0"/>'
        device = f'<hostdev type="pci"><source>{address}</source></hostdev>'
        state = f"<domain><devices>{device}</devices></domain>"
        folder = host.folder / "host/run/libvirt/qemu"
        folder.mkdir(parents=True)
        (folder / "guest.xml").write_text(state)
        for _ in range(2):
            (problem,) = host.prepare("vm", B50)["problems"]
            assert problem["code"] == "managed"
            assert "virtual machine guest" in problem["sentence"]
        assert host.world() == free
        (folder / "guest.xml").unlink()
        assert host.prepare("vm", B50)["ok"]


def test_the_display_of_the_console(make_host: MakeHost) -> None:
    with make_host(*integrated_intel()) as host:
        host.start()
        free = host.world()
        for _ in range(2):
            assert codes(host.prepare("vm", CONSOLE)) == ["boot-display"]
        assert host.world() == free
        assert host.prepare("vm", CONSOLE, force=True)["ok"]
        assert host.release("vm")["ok"]
        assert host.world() == free


def test_where_nothing_can_be_claimed_whoever_asks_is_told_so_and_why(make_host: MakeHost) -> None:
    """And so on a socket that systemd keeps open, too: nobody waits there in vain."""
    with ONE.make(make_host) as host:
        host.environ["CDI_AGENT_BOOT_ID"] = "today"
        host.start()
        for _ in range(2):
            for answer in (host.prepare("vm", B50), host.release("vm"), host.recover(B50)):
                (problem,) = answer["problems"]
                assert problem["code"] == "journal-failed"
                assert "which boot this is" in problem["sentence"]
                assert "CDI_AGENT_BOOT_ID" in problem["hint"]
        assert host.claims()["claims"] == []
        assert "intel.com/gpu" in host.published()
        assert host.kernel.driver_of(B50) == "xe"


def test_a_host_without_an_iommu(make_host: MakeHost) -> None:
    with make_host(*arc_b50(), features=Features(iommu=False, drivers=DRIVERS)) as host:
        host.start()
        free = host.world()
        for _ in range(2):
            assert codes(host.prepare("vm", B50)) == ["iommu-off"]
        assert host.world() == free


@pytest.mark.parametrize("kind", [VfioKind.GROUP, VfioKind.CDEV], ids=lambda kind: kind.name)
def test_one_back_end_of_vfio_is_published(make_host: MakeHost, kind: VfioKind) -> None:
    with make_host(*arc_b50(), features=Features(vfio=kind, drivers=DRIVERS)) as host:
        host.start()
        free = host.world()
        for _ in range(2):
            for _ in range(2):
                assert host.prepare("vm", B50)["names"] == [VFIO_NAME]
            for _ in range(2):
                assert host.release("vm")["ok"]
            assert host.world() == free


# --- a second claim, a dry run, a client that goes ------------------------------------------------


def test_a_second_claim_is_told_who_has_the_device(make_host: MakeHost) -> None:
    with ONE.make(make_host) as host:
        host.start()
        host.prepare("vm", B50)
        for _ in range(2):
            (problem,) = host.prepare("other", B50)["problems"]
            assert problem["code"] == "claimed"
            assert f"claim vm of pid {os.getpid()}" in problem["sentence"]
        assert codes(host.prepare("vm", B50, mode="drm")) == ["claimed"]


def test_a_dry_run_touches_nothing(make_host: MakeHost) -> None:
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        journal = host.folder / "state/claims.json"
        said = journal.read_bytes()
        for _ in range(2):
            answer = host.prepare("vm", GPU, dry_run=True)
            assert answer["moves"] == [
                {"address": B50, "before": "xe", "after": "vfio-pci", "companion": False}
            ]
        assert host.world() == free
        assert host.claims()["claims"] == []
        assert journal.read_bytes() == said


def test_the_examples_of_the_guide_do_what_it_says_one_after_another(make_host: MakeHost) -> None:
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        for method, route, body in examples():
            answer = host.ask(method, route, body)
            assert answer.get("problems", []) == [], (method, route)
        assert host.world() == free


def test_two_claims_at_once_proceed_side_by_side(make_host: MakeHost) -> None:
    with make_host(*arc_b50(), *arc_b60()) as host:
        host.start()
        free = host.world()
        claims, devices = ("one", "two", "one", "two"), (B50, B60, B50, B60)
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(host.prepare, claims, devices))
            answers += pool.map(host.release, claims)
        assert [answer["problems"] for answer in answers] == [[]] * 8
        assert host.world() == free


def test_a_client_that_is_killed_changes_nothing(make_host: MakeHost) -> None:
    """Its order goes on, and the same again joins it."""
    with ONE.make(make_host) as host:
        host.start()
        client: list[subprocess.Popen[bytes]] = []

        def gate(_path: str, _text: str) -> None:
            client[0].kill()

        with host.gate(gate):
            control = str(host.folder / "control")
            client.append(subprocess.Popen([sys.executable, "-c", ASK, control, B50]))
            assert client[0].wait() == -signal.SIGKILL
        assert host.prepare("vm", B50)["names"] == [VFIO_NAME]


# --- pause ----------------------------------------------------------------------------------------


def test_paused_nothing_begins_to_move(make_host: MakeHost) -> None:
    """Neither there nor back; withdrawals go on, and so do claims that move nothing."""
    with make_host(*arc_b50(), *arc_b60()) as host:
        host.kernel.move(B60, "vfio-pci")
        host.start()
        free = host.world()
        host.prepare("vm", B50)
        held = host.world()
        assert host.ask("POST", "/v1/pause") == {"paused": True}
        assert host.claims()["paused"]
        for _ in range(2):
            assert codes(host.release("vm")) == ["paused"]
        assert host.world()["functions"] == held["functions"]
        assert host.prepare("bound", B60)["ok"]
        host.ask("POST", "/v1/resume")
        assert not host.claims()["paused"]
        for _ in range(2):
            assert host.release("vm")["ok"]
        assert host.release("bound")["ok"]
        assert host.world() == free
        host.ask("POST", "/v1/pause")
        assert host.claims()["paused"]
        for _ in range(2):
            assert codes(host.prepare("vm", B50)) == ["paused"]


# --- another configuration ------------------------------------------------------------------------

RENAMED = {
    "cdi": {
        "profiles": [
            {
                "name": "intel-gpu",
                "vfio": {"kind": "example.com/gpu-vfio"},
            }
        ]
    }
}


def test_a_reload_that_would_rename_what_a_claim_holds_is_refused(make_host: MakeHost) -> None:
    with ONE.make(make_host) as host:
        host.start()
        host.prepare("vm", B50)
        held = host.world()
        for change in (RENAMED, {"cdi": {"directory": str(host.folder / "elsewhere")}}):
            before = host.settings
            host.settings = {section: dict(keys) for section, keys in before.items()}
            host.reload(**change)
            host.settings = before
            assert "reload-refused" in host.log()
            assert "claim vm holds" in host.log()
            assert host.world() == held
        host.reload()
        assert host.release("vm")["ok"]
        host.reload(**RENAMED)
        assert host.prepare("vm", B50)["names"] == [f"example.com/gpu-vfio={NAME}"]


def test_a_reload_changes_what_may_be_claimed(make_host: MakeHost) -> None:
    with ONE.make(make_host) as host:
        host.start()
        host.reload(cdi={"ignore": [B50]})
        for _ in range(2):
            assert "ignored" in codes(host.prepare("vm", B50))
        host.reload(cdi={"ignore": []})
        assert host.prepare("vm", B50)["ok"]


# --- the end, and another boot --------------------------------------------------------------------


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_stopped_in_the_middle_of_a_move(make_host: MakeHost, method: str, number: int) -> None:
    """The write on its way is finished, nothing else is begun, and the next agent ends it."""
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        if method == "DELETE":
            host.prepare("vm", B50)
        arrived: list[str] = []

        def gate(path: str, _text: str) -> None:
            arrived.append(path)
            if len(arrived) == number:
                host.signal(signal.SIGTERM)

        with host.gate(gate):
            body = {"devices": [B50]}
            told = host.ask(method, "/v1/claims/vm", body if method == "PUT" else None)
            assert codes(told) == ["interrupted"]
            assert host.await_end() == 0
            assert len(arrived) == number
        host.start()
        found = host.quiet()
        assert (found["claims"], found["stranded"], found["hung"]) == ([], [], [])
        assert host.world() == free


def test_a_stop_does_not_wait_for_a_kernel_that_hangs(make_host: MakeHost) -> None:
    with ONE.make(make_host, {"vfio": {"write_timeout": 0.5}}) as host:
        host.start()
        free = host.world()
        host.kernel.hang(B50)
        assert codes(host.prepare("vm", B50)) == ["hung"]
        assert host.stop() == 0
        host.start()
        host.kernel.heal()
        host.until(lambda: host.claims()["claims"] == [] and host.claims()["hung"] == [])
        assert host.world() == free


@pytest.mark.parametrize("done", [False, True], ids=["under way", "in force"])
def test_another_boot_knows_of_no_claim(make_host: MakeHost, *, done: bool) -> None:
    """With the boot every binding of ours has gone, and so have the specs."""
    with ONE.make(make_host) as before:
        before.start()
        if done:
            before.prepare("vm", B50)
        else:
            with before.gate(lambda _path, _text: before.kill()):
                before.try_ask("PUT", "/v1/claims/vm", {"devices": [B50]})
            before.await_end()
        journal = (before.folder / "state/claims.json").read_bytes()
    with ONE.make(make_host) as host:
        host.environ["CDI_AGENT_BOOT_ID"] = "f" * 32
        (host.folder / "state").mkdir()
        (host.folder / "state/claims.json").write_bytes(journal)
        host.start()
        found = host.claims()
        assert (found["claims"], found["stranded"], found["hung"]) == ([], [], [])
        assert "claim-void" in host.log()
        assert host.prepare("vm", B50)["ok"]
        assert host.release("vm")["ok"]


@pytest.mark.parametrize("content", [b"", b'{"version": 1, "checks', b"\0" * 4096])
def test_a_journal_that_was_torn(make_host: MakeHost, content: bytes) -> None:
    """What is on VFIO may have been moved by us: it is told, and moved by nobody but `recover`."""
    with make_host(*arc_b50(), *arc_b60()) as host:
        host.start()
        free = host.world()
        host.prepare("vm", B50)
        held = host.world()
        host.kill()
        host.await_end()
        (host.folder / "state/claims.json").write_bytes(content)
        host.start()
        assert [each["address"] for each in host.quiet()["stranded"]] == [B50]
        assert "journal-unusable" in host.log()
        assert host.world() == held
        assert host.prepare("other", B60)["ok"]
        assert host.release("other")["ok"]
        (move,) = host.recover(B50, "?dry_run=true")["moves"]
        assert (move["before"], move["after"]) == ("vfio-pci", "")
        for _ in range(2):
            assert host.recover(B50)["ok"]
        host.until(lambda: host.world() == free)


# --- recover --------------------------------------------------------------------------------------


def test_what_is_in_use_is_recovered_only_by_force(make_host: MakeHost) -> None:
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        host.prepare("vm", B50)
        with host.gate(lambda path, _text: errno.EIO if path.endswith("unbind") else None):
            assert "stranded" in codes(host.release("vm"))
        group = host.kernel.node_paths(B50)[0]
        with host.kernel.hold(group, command="qemu"):
            for query in ("?dry_run=true", "", ""):
                assert codes(host.recover(B50, query)) == ["in-use"]
            assert [each["address"] for each in host.claims()["stranded"]] == [B50]
        hold = host.kernel.hold(group)
        with _at_unbind(host, hold.release):
            assert host.recover(B50, "?force=true")["ok"]
        assert host.claims()["stranded"] == []
        assert host.world() == free


def test_what_this_agent_did_not_move_is_recovered_only_by_force(make_host: MakeHost) -> None:
    with NATIVE.make(make_host) as host:
        NATIVE.start(host)
        for _ in range(2):
            assert codes(host.recover(B50)) == ["not-stranded"]
        assert host.kernel.driver_of(B50) == "vfio-pci"
        for _ in range(2):
            assert host.recover(B50, "?force=true")["ok"]
        assert host.kernel.driver_of(B50) == "xe"


# --- a device that does not survive its virtual machine -------------------------------------------


def test_a_device_that_came_back_dead_is_not_published(make_host: MakeHost) -> None:
    """Its driver has it, and it answers nothing: stranded, until somebody has reset it."""
    with make_host(*arc_b50(), *arc_b60()) as host:
        tree = host.kernel.tree
        config = tree.resolve(f"/sys/bus/pci/devices/{B50}/config")
        alive = bytes.fromhex("868012e2") + bytes(60)
        tree.file(config, alive)
        host.start()
        free = host.world()
        host.prepare("vm", B50)
        tree.file(config, b"\xff" * 64)
        (problem,) = host.release("vm")["problems"]
        assert problem["code"] == "stranded"
        assert "does not answer" in problem["sentence"]
        for _ in range(2):
            (stray,) = host.quiet()["stranded"]
            assert (stray["address"], stray["code"]) == (B50, "dead")
            assert f"cdi-agent recover {B50}" in stray["hint"]
            assert host.world()["functions"] == free["functions"]
            assert host.published()["intel.com/gpu"] == {"0000-07-00-0-0xe211"}
            devices = host.ask("GET", f"/v1/explain/{B50}")["devices"]
            assert {device["reason"] for device in devices} == {"dead"}
            assert codes(host.prepare("vm", B50))[0] == "stranded"
            assert codes(host.recover(B50)) == ["dead"]
            host.stop()
            host.start()
        tree.file(config, alive)
        for _ in range(2):
            assert host.recover(B50)["ok"]
        host.until(lambda: host.world() == free)
