"""Everything that can fail on the way, there and back, one by one; each claim is asked for twice.

A claim that fails leaves its devices as they were, or says which of them are stranded; then
`recover` brings them back as soon as the kernel lets it. (Every write of every shape with every
errno is a matter for the pure machine: ``tests/vfio``.)
"""

import errno
import itertools

import pytest

from tests.claims.conftest import MakeHost
from tests.claims.host import ClaimHost, Document, Gate
from tests.claims.shapes import AUDIO, B50, B60, ONE, TWO, VFIO_NAME, Shape

pytestmark = pytest.mark.claims

OVERRIDE, UNBIND, PROBE = "driver_override", "unbind", "drivers_probe"
NOTHING_DONE = 0
"""What a write answers that the kernel takes and does nothing about."""
FOREVER = 1 << 30


def name_of(answer: int) -> str:
    return errno.errorcode.get(answer, "nothing done")


def codes(answer: Document) -> list[str]:
    return [problem["code"] for problem in answer["problems"]]


def nth(number: int, answer: int, hit: list[str]) -> Gate:
    """Answer the n-th write so, and do not do it; what it was goes into the list."""
    arrived = itertools.count(1)

    def gate(path: str, _text: str) -> int | None:
        if next(arrived) != number:
            return None
        hit.append(path)
        return answer

    return gate


def each_first(answer: int) -> Gate:
    """Answer each write so when it is made for the first time, and do not do it."""
    seen: set[tuple[str, str]] = set()

    def gate(path: str, text: str) -> int | None:
        if (path, text) in seen:
            return None
        seen.add((path, text))
        return answer

    return gate


def always(name: str, answer: int) -> Gate:
    """Answer every write to files of that name so."""
    return lambda path, _text: answer if path.endswith(name) else None


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "answer", [errno.EBUSY, errno.ENODEV, errno.EIO, NOTHING_DONE], ids=name_of
)
def test_one_write_fails(make_host: MakeHost, answer: int) -> None:
    """It is made again, and the claim comes to what it should, whichever write it was."""
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        for number in itertools.count(1):
            hit: list[str] = []
            with host.gate(nth(number, answer, hit)):
                _there_and_back(host, ONE, free)
            if not hit:
                break
        assert number == 8


@pytest.mark.parametrize(
    "answer", [errno.EBUSY, errno.ENODEV, errno.EIO, NOTHING_DONE], ids=name_of
)
def test_every_write_fails_the_first_time(make_host: MakeHost, answer: int) -> None:
    with AUDIO.make(make_host) as host:
        AUDIO.start(host)
        with host.gate(each_first(answer)):
            _there_and_back(host, AUDIO, host.world())


def _there_and_back(host: ClaimHost, shape: Shape, free: Document) -> None:
    for _ in range(2):
        assert shape.prepare(host)["problems"] == []
    for address, driver in shape.moves.items():
        assert host.world()["functions"][address] == (driver, driver)
    for _ in range(2):
        assert host.release("vm")["problems"] == []
    assert host.world() == free
    assert host.claims()["stranded"] == []


@pytest.mark.parametrize("answer", [errno.EBUSY, NOTHING_DONE], ids=name_of)
@pytest.mark.parametrize("name", [OVERRIDE, UNBIND])
def test_a_write_that_always_fails_there(make_host: MakeHost, name: str, answer: int) -> None:
    """Nothing has come of it, so nothing is lost."""
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        with host.gate(always(name, answer)):
            for _ in range(2):
                found = codes(host.prepare("vm", B50))
                assert found[0] == "move-failed"
                host.quiet()
        if name == OVERRIDE or not answer:
            host.kernel.override(B50, None)  # what could not be cleared
        assert host.prepare("vm", B50)["names"] == [VFIO_NAME]
        assert host.release("vm")["ok"]
        assert host.world() == free


@pytest.mark.parametrize("answer", [errno.ENODEV, NOTHING_DONE], ids=name_of)
def test_a_probe_that_always_fails_there(make_host: MakeHost, answer: int) -> None:
    """The driver that it came from cannot have it back either: stranded, until the kernel can."""
    with TWO.make(make_host) as host:
        TWO.start(host)
        free = host.world()
        with host.gate(lambda path, text: answer if (path[-5:], text) == ("probe", B50) else None):
            answers = [TWO.prepare(host) for _ in range(2)]
            assert [codes(each)[0] for each in answers] == ["move-failed", "stranded"]
            assert host.kernel.driver_of(B50) is None
            assert host.kernel.driver_of(B60) == "xe", "its neighbour is undone all the same"
            _is_stranded_until_recovered(host, B50)
        assert host.recover(B50)["ok"]
        assert host.world() == free
        assert TWO.prepare(host)["ok"]


@pytest.mark.parametrize("answer", [errno.EIO, NOTHING_DONE], ids=name_of)
@pytest.mark.parametrize("name", [OVERRIDE, UNBIND, PROBE])
def test_a_write_that_always_fails_back(make_host: MakeHost, name: str, answer: int) -> None:
    """Stranded, with the reason; recovered by the command that the hint names."""
    with ONE.make(make_host) as host:
        host.start()
        free = host.world()
        host.prepare("vm", B50)
        with host.gate(always(name, answer)):
            assert "stranded" in codes(host.release("vm"))
            assert host.release("vm")["ok"], "there is no such claim any more"
            _is_stranded_until_recovered(host, B50)
        assert host.recover(B50)["ok"]
        assert host.world() == free


def _is_stranded_until_recovered(host: ClaimHost, address: str) -> None:
    """It is told, kept over a restart, and `recover` does not make it worse."""
    (stray,) = host.quiet()["stranded"]
    assert stray["address"] == address
    assert stray["hint"] == f"`cdi-agent recover {address}` brings it back"
    assert host.ask("GET", "/v1/status")["stranded"] == [address]
    assert host.prepare("other", address)["problems"][0]["code"] == "stranded"
    before = host.world()["functions"]
    (move,) = host.recover(address, "?dry_run=true")["moves"]
    assert (move["address"], move["after"]) == (address, "xe")
    assert host.world()["functions"] == before
    assert not host.recover(address)["ok"]
    assert host.stop() == 0
    host.start()
    (stray,) = host.quiet()["stranded"]
    assert stray["address"] == address


# --- a kernel that does not return ----------------------------------------------------------------

HASTY = {"vfio": {"write_timeout": 1.0}}


def test_a_write_that_hangs_there(make_host: MakeHost) -> None:
    """It is named, others go on, and when the kernel has returned the undo is finished."""
    with TWO.make(make_host, HASTY) as host:
        TWO.start(host)
        free = host.world()
        host.kernel.hang(B50)
        assert codes(host.prepare("vm", B50))[0] == "hung"
        _others_go_on(host)
        assert codes(host.prepare("vm", B50))[0] == "hung"
        host.kernel.heal()
        host.until(lambda: host.claims()["claims"] == [])
        assert host.claims()["hung"] == []
        assert host.world() == free
        assert host.prepare("vm", B50)["ok"]


def test_a_write_that_hangs_back(make_host: MakeHost) -> None:
    with TWO.make(make_host, HASTY) as host:
        TWO.start(host)
        free = host.world()
        host.prepare("vm", B50)
        host.kernel.hang(B50)
        assert codes(host.release("vm"))[0] == "hung"
        _others_go_on(host)
        host.kernel.heal()
        host.until(lambda: host.claims()["hung"] == [])
        for _ in range(2):
            assert host.release("vm")["ok"]
        assert host.world() == free


@pytest.mark.timeout(300)
def test_whichever_write_hangs(make_host: MakeHost) -> None:
    """It is named, none is made after it, and with the kernel's return all is as it was."""
    with ONE.make(make_host, HASTY) as host:
        host.start()
        free = host.world()
        for number in itertools.count(1):
            arrived: list[str] = []
            with host.gate(_hang_at(host, number, arrived)):
                there = host.prepare("vm", B50)
                told = host.release("vm") if there["ok"] else there
                if told["ok"]:
                    break
                assert codes(told)[0] == "hung"
                assert [each["address"] for each in host.claims()["hung"]] == [B50]
                assert len(arrived) == number
                host.kernel.heal()
                host.until(lambda: host.claims()["hung"] == [])
                for _ in range(2):
                    assert host.release("vm")["ok"]
            assert (host.claims()["claims"], host.claims()["stranded"]) == ([], [])
            assert host.world() == free
        assert number == 8


def _hang_at(host: ClaimHost, number: int, arrived: list[str]) -> Gate:
    def gate(path: str, _text: str) -> None:
        arrived.append(path)
        if len(arrived) == number:
            host.kernel.hang(B50, now=True)

    return gate


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("told", [False, True], ids=["at once", "when it is known to hang"])
def test_killed_while_a_write_hangs(make_host: MakeHost, *, back: bool, told: bool) -> None:
    """The next agent writes nothing to that device before the kernel has returned."""
    with TWO.make(make_host, HASTY) as host:
        TWO.start(host)
        free = host.world()
        if back:
            host.prepare("vm", B50)
        host.kernel.hang(B50)
        arrived: list[str] = []
        with host.gate(_kill_at_unbind(host, arrived, kill=not told)):
            if back:
                host.try_ask("DELETE", "/v1/claims/vm")
            else:
                host.try_ask("PUT", "/v1/claims/vm", {"devices": [B50]})
            if told:
                assert [each["address"] for each in host.claims()["hung"]] == [B50]
                host.kill()
            host.await_end()
            before = len(arrived)
            host.start()
            _others_go_on(host, hung=told)
            assert [path for path in arrived[before:] if B50 in path] == []
        host.kernel.heal()
        host.until(lambda: host.claims()["claims"] == [])
        assert (host.claims()["stranded"], host.claims()["hung"]) == ([], [])
        assert host.world() == free


def _kill_at_unbind(host: ClaimHost, arrived: list[str], *, kill: bool) -> Gate:
    def gate(path: str, text: str) -> None:
        arrived.append(f"{path} {text}")
        if kill and [each for each in arrived if f"/{UNBIND} " in each] == arrived[-1:]:
            host.kill()

    return gate


def _others_go_on(host: ClaimHost, *, hung: bool = True) -> None:
    """Another device is claimed and released while one hangs."""
    if hung:
        assert [each["address"] for each in host.claims()["hung"]] == [B50]
        assert host.ask("GET", "/v1/status")["hung"] == [B50]
    for _ in range(2):
        assert host.prepare("other", B60)["ok"]
    for _ in range(2):
        assert host.release("other")["ok"]


# --- a disk that fails ----------------------------------------------------------------------------

SPECS, JOURNAL = "cdi-agent", "claims.json"
QUICK = {
    "reconcile": {"settle": 0.01, "retry_first": 0.05, "retry_max": 0.1},
    "vfio": {"publish_timeout": 1.0},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("only", [SPECS, JOURNAL], ids=["specs", "journal"])
def test_a_file_that_fails_once(make_host: MakeHost, only: str) -> None:
    """Whichever step of whichever file it is: the claim is done or undone as a whole."""
    with ONE.make(make_host, QUICK) as host:
        host.start()
        free = host.world()
        for number in itertools.count(1):
            host.set_trap(number, errno.ENOSPC, only=only)
            answers = [host.prepare("vm", B50) for _ in range(2)]
            assert answers[-1]["ok"], answers
            for _ in range(2):
                host.release("vm")
            host.until(lambda: host.claims()["claims"] == [] and host.world() == free)
            assert host.claims()["stranded"] == []
            if f"trap: moment {number}:" not in host.log():
                break
        assert number > 3


def test_a_journal_that_cannot_be_written(make_host: MakeHost) -> None:
    """There, no device is touched; back, the claim stays until it can be written again."""
    with ONE.make(make_host, QUICK) as host:
        host.start()
        free = host.world()
        host.set_trap(1, errno.ENOSPC, times=FOREVER, only=JOURNAL)
        for _ in range(2):
            assert codes(host.prepare("vm", B50)) == ["journal-failed"]
            assert host.world() == free
        host.set_trap(0)
        assert host.prepare("vm", B50)["ok"]
        held = host.world()
        host.set_trap(1, errno.EIO, times=FOREVER, only=JOURNAL)
        for _ in range(2):
            assert codes(host.release("vm")) == ["journal-failed"]
            assert host.kernel.driver_of(B50) == "vfio-pci"
        assert host.world()["functions"] == held["functions"]
        host.set_trap(0)
        assert host.release("vm")["ok"]
        assert host.world() == free


def test_specs_that_cannot_be_written(make_host: MakeHost) -> None:
    """The claim is undone, and the specs come back as soon as they can be written."""
    with ONE.make(make_host, QUICK) as host:
        host.start()
        free = host.world()
        host.set_trap(1, errno.ENOSPC, times=FOREVER, only="open cdi-agent_.")
        for _ in range(2):
            assert codes(host.prepare("vm", B50))[0] == "not-published"
            assert host.kernel.driver_of(B50) == "xe"
        host.set_trap(0)
        host.until(lambda: host.world() == free)
        assert host.prepare("vm", B50)["ok"]


def test_a_spec_directory_that_becomes_a_link_in_the_middle_of_a_claim(make_host: MakeHost) -> None:
    """No consumer follows it. The claim is undone, and who asks is told."""
    quickly: dict[str, dict[str, object]] = {
        "reconcile": {"settle": 0.01, "resync_blind": 1},
        "vfio": {"publish_timeout": 1},
    }
    with ONE.make(make_host, quickly) as host:
        host.start()
        free = host.world()
        moved = host.folder / "moved"

        def gate(path: str, _text: str) -> None:
            if path.endswith(UNBIND) and not moved.exists():
                host.specs.rename(moved)
                host.specs.symlink_to(moved)

        with host.gate(gate):
            assert codes(host.prepare("vm", B50)) == ["specs-unknown"]
        assert host.kernel.driver_of(B50) == "xe"
        assert host.release("vm")["ok"]
        assert codes(host.prepare("vm", B50)) == ["specs-unknown"]
        host.specs.unlink()
        moved.rename(host.specs)
        host.until(lambda: host.world() == free)
        assert host.quiet()["stranded"] == []
        assert host.prepare("vm", B50)["ok"]
