"""The journal: on disk before anybody relies on it, and whole or set aside: never just empty."""

import asyncio
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from msgspec import structs

from agent.vfio.journal import FILE_NAME, VERSION, Journal, JournalError, Loaded, boot_id
from agent.vfio.model import (
    Child,
    Durable,
    Identity,
    Origin,
    Prepare,
    Record,
    Stray,
    Write,
)
from agent.vfio.problems import Problem
from tests.vfio.journals import BOOT, FULL, RECORD


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def path_in(state: Path) -> Path:
    return state / "claims.json"


def load(state: Path) -> Loaded:
    """Read it as an agent that starts does."""
    return Journal(str(state)).load()


def save(state: Path, durable: Durable) -> None:
    journal = Journal(str(state))
    journal.load()
    asyncio.run(journal.save(durable))


@pytest.mark.parametrize(
    "durable",
    [
        pytest.param(Durable(), id="empty"),
        pytest.param(Durable(BOOT), id="no claim"),
        pytest.param(FULL, id="everything"),
    ],
)
def test_it_is_read_back_as_it_was_written(state: Path, durable: Durable) -> None:
    save(state, durable)
    assert load(state) == Loaded(durable)


def test_it_is_for_root_alone_and_leaves_no_other_file(state: Path) -> None:
    save(state, FULL)
    save(state, Durable(BOOT))
    assert os.listdir(state) == ["claims.json"]
    assert path_in(state).stat().st_mode & 0o777 == 0o600


def test_without_a_journal_nothing_is_claimed(state: Path) -> None:
    """On the first start there is not even a state directory."""
    assert load(state) == Loaded(Durable())
    assert not state.exists()


def test_what_is_on_disk_already_is_not_written_again(state: Path) -> None:
    save(state, FULL)
    journal = Journal(str(state))
    journal.load()
    assert journal.saved == FULL
    before = path_in(state).stat()
    asyncio.run(journal.save(structs.replace(FULL)))
    assert path_in(state).stat().st_mtime_ns == before.st_mtime_ns
    assert path_in(state).stat().st_ino == before.st_ino


def test_claims_that_could_not_be_read_back_are_not_written(state: Path) -> None:
    """JSON has no infinity: a journal with one would be set aside at the next start."""
    save(state, FULL)
    wrong = structs.replace(RECORD, expires_at=float("inf"))
    with pytest.raises(JournalError, match="cannot be written down"):
        save(state, Durable(BOOT, (wrong,)))
    assert load(state).durable == FULL


# --- what cannot be used --------------------------------------------------------------------------


def journal_of(content: Any, *, version: int = VERSION) -> bytes:  # noqa: ANN401 - JSON
    """A journal with the right checksum."""
    text = json.dumps(content)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"version": {version}, "checksum": "{checksum}", "content": {text}}}'.encode()


def write(content: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(content)

    return make


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**30)


def flipped(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"driver":"xe"', b'"driver":"ex"'))


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


PATH: Final = "../../../../etc"
BROKEN: Final[list[tuple[str, Callable[[Path], None], str]]] = [
    ("empty", write(b""), "it is not a journal"),
    ("zeros", write(bytes(4096)), "it is not a journal"),
    ("torn", torn, "it is not a journal"),
    ("flipped", flipped, "its checksum does not match"),
    ("binary", write(b"\xff\x00\xfe"), "it is not a journal"),
    ("deep", write(b"[" * 200_000), "it is not a journal"),
    ("deep-content", write(journal_of({})[:-3] + b"[" * 200_000), "it is not a journal"),
    ("list", write(b"[]"), "it is not a journal"),
    ("no-version", write(b"{}"), "it is not a journal"),
    ("newer", write(journal_of({"more": 1}, version=3)), "it has version 3"),
    ("wrong-type", write(journal_of({"claims": 7})), "it is not a journal"),
    ("wrong-word", write(journal_of({"children": [{}]})), "it is not a journal"),
    ("unknown-key", write(journal_of({})[:-1] + b', "x": 1}'), "it is not a journal"),
    ("no-function", write(journal_of(json.loads(
        json.dumps({"children": [{"write": {"claim": "a", "address": PATH, "step": "probe",
                                            "value": ""}, "pid": 1}]})))), "it names a function"),
    ("fifo", os.mkfifo, "it is not a regular file"),
    ("directory", Path.mkdir, "it is not a regular file"),
    ("device", lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
    ("loop", lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    ("large", make_large, "it is larger than 16 MiB"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "problem"), [pytest.param(make, problem, id=name) for name, make, problem in BROKEN]
)
def test_a_journal_that_cannot_be_used_is_set_aside_and_is_not_empty(
    state: Path, make: Callable[[Path], None], problem: str
) -> None:
    save(state, FULL)
    if make not in (flipped, torn):
        path_in(state).unlink()
    make(path_in(state))
    loaded = load(state)
    assert loaded.durable is None
    assert problem in loaded.problem
    assert loaded.set_aside == f"{path_in(state)}.set-aside"
    assert os.listdir(state) == ["claims.json.set-aside"]


def test_a_journal_that_was_set_aside_is_told_of_until_somebody_deletes_it(state: Path) -> None:
    """Also when a new one has been begun: the devices of the old one are still where they are."""
    state.mkdir()
    path_in(state).write_bytes(b"torn")
    journal = Journal(str(state))
    assert journal.load().durable is None
    asyncio.run(journal.save(FULL))
    loaded = load(state)
    assert loaded.durable == FULL
    assert loaded.set_aside in loaded.problem
    Path(loaded.set_aside).unlink()
    assert load(state) == Loaded(FULL)


def test_what_was_set_aside_is_no_empty_journal_until_a_new_one_is_saved(state: Path) -> None:
    """An agent that is killed in between has told nobody which devices nobody knows about."""
    state.mkdir()
    path_in(state).write_bytes(b"torn")
    aside = load(state).set_aside
    for _ in range(2):
        loaded = load(state)
        assert (loaded.durable, loaded.set_aside) == (None, aside)
        assert "is missing since" in loaded.problem
    Path(aside).unlink()
    assert load(state) == Loaded(Durable())


def test_nothing_is_saved_over_a_journal_that_could_not_be_set_aside(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.mkdir()
    path_in(state).write_bytes(b"torn")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    journal = Journal(str(state))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        loaded = journal.load()
        assert (loaded.durable, loaded.set_aside) == (None, str(path_in(state)))
        assert "nor set aside (Operation not permitted)" in loaded.problem
        with pytest.raises(JournalError, match="operation not permitted"):
            asyncio.run(journal.save(FULL))
    assert path_in(state).read_bytes() == b"torn"
    asyncio.run(journal.save(FULL))
    assert load(state).durable == FULL
    assert Path(f"{path_in(state)}.set-aside").read_bytes() == b"torn"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_this_process_lacks_says_nothing_about_the_journal(
    state: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(state, FULL)

    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(JournalError, match="cannot read"):
            load(state)
    assert load(state) == Loaded(FULL)


def test_what_cannot_be_saved_is_said_with_its_reason(state: Path) -> None:
    state.write_text("not a folder")
    with pytest.raises(JournalError, match="not a directory") as raised:
        asyncio.run(Journal(str(state)).save(FULL))
    assert raised.value.code == "journal-failed"
    assert raised.value.retryable


def test_a_save_that_failed_is_done_again(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it is not known how far it came: then nothing is known to be on disk."""
    journal = Journal(str(state))
    journal.load()
    real = os.fsync

    def fail_for_folders(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    state.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_for_folders)
        with pytest.raises(JournalError, match="input/output error"):
            asyncio.run(journal.save(FULL))
    assert journal.saved is None
    asyncio.run(journal.save(FULL))
    assert journal.saved == FULL


async def test_a_save_that_is_cancelled_is_finished(state: Path) -> None:
    """A rename that comes late would undo what the next agent has written."""
    reached, let_go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def step(name: str) -> None:
        if name == "written":
            loop.call_soon_threadsafe(reached.set)
            asyncio.run_coroutine_threadsafe(let_go.wait(), loop).result()

    journal = Journal(str(state), step)
    saving = asyncio.create_task(journal.save(FULL))
    await reached.wait()
    saving.cancel()
    await asyncio.sleep(0)
    assert not saving.done()
    let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert (await asyncio.to_thread(load, state)).durable == FULL


async def test_saves_come_to_disk_in_their_order(state: Path) -> None:
    journal = Journal(str(state))
    versions = [structs.replace(FULL, boot_id=f"{number:032x}") for number in range(5)]
    await asyncio.gather(*map(journal.save, versions))
    assert (await asyncio.to_thread(load, state)).durable == versions[-1]


# --- killed ---------------------------------------------------------------------------------------

KILLED = """
import asyncio, os, signal, sys
from agent.vfio.journal import Journal
from tests.vfio.journals import FULL
state, step = sys.argv[1:]
journal = Journal(state, lambda name: name == step and os.kill(os.getpid(), signal.SIGKILL))
journal.load()
asyncio.run(journal.save(FULL))
"""


@pytest.mark.parametrize("step", ["written", "synced", "renamed", "directory-synced"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "replaces"])
def test_killed_at_any_step_it_is_the_old_or_the_new(
    state: Path, step: str, *, first: bool
) -> None:
    """And never one that is set aside; what the dead one left behind is in nobody's way."""
    old = Durable() if first else Durable(BOOT, (structs.replace(RECORD, done=False),))
    if not first:
        save(state, old)
    argv = (sys.executable, "-c", KILLED, state, step)
    child = subprocess.run(argv, cwd=Path(__file__).parents[2], check=False, capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert load(state) == Loaded(FULL if step in ("renamed", "directory-synced") else old)
    save(state, FULL)
    assert load(state) == Loaded(FULL)
    assert os.listdir(state) == ["claims.json"]


# --- its form -------------------------------------------------------------------------------------


def fields(cls: type) -> dict[str, Any]:
    """The fields of a struct, with those of the structs in it."""
    return {
        field.name: fields(inner) if (inner := INNER.get((cls, field.name))) else str(field.type)
        for field in structs.fields(cls)
    }


INNER: Final[dict[tuple[type, str], type]] = {
    (Durable, "claims"): Record,
    (Durable, "strays"): Stray,
    (Durable, "children"): Child,
    (Record, "request"): Prepare,
    (Record, "origins"): Origin,
    (Origin, "identity"): Identity,
    (Stray, "origin"): Origin,
    (Stray, "problem"): Problem,
    (Child, "write"): Write,
}


def without_lost(what: Any) -> Any:  # noqa: ANN401 - JSON
    """The same, as an agent wrote it that knew of nothing lost."""
    if isinstance(what, dict):
        return {key: without_lost(value) for key, value in what.items() if key != "lost"}
    return [without_lost(each) for each in what] if isinstance(what, list) else what


async def test_a_journal_of_version_1_can_be_read(state: Path) -> None:
    """It knows nothing of what is lost: an agent is made newer while claims are in force."""
    content = without_lost(msgspec.to_builtins(FULL))
    make = write(journal_of(content, version=1))
    await asyncio.to_thread(state.mkdir)
    await asyncio.to_thread(make, state / FILE_NAME)
    assert (await asyncio.to_thread(load, state)).durable == FULL
    durable = structs.replace(FULL, claims=(structs.replace(RECORD, lost="it was moved"),))
    await Journal(str(state)).save(durable)
    assert (await asyncio.to_thread(load, state)).durable == durable


def test_its_form_has_the_version_that_it_says() -> None:
    """Another form that an older agent must not take for this one needs a higher VERSION.

    If it does not (a field that may be overlooked), the digest here is all that changes.
    """
    form = json.dumps(fields(Durable), sort_keys=True)
    assert hashlib.sha256(form.encode()).hexdigest()[:16] == "a3d6baa062fe486b"


# --- the boot -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "file"),
    [
        pytest.param({"CDI_AGENT_BOOT_ID": BOOT}, None, id="systemd's %b"),
        pytest.param({}, "6f2b7f3c-0d4e-4a57-9d0c-5a1e6c1d2e3f\n", id="the kernel's"),
        pytest.param({"CDI_AGENT_BOOT_ID": BOOT.upper()}, "no such", id="systemd's first"),
    ],
)
def test_a_boot_has_one_name(tmp_path: Path, environ: dict[str, str], file: str | None) -> None:
    """However it is learnt, or each change of the unit would look like a reboot."""
    put_boot_id(tmp_path, file)
    assert boot_id(environ, str(tmp_path)) == BOOT


@pytest.mark.parametrize(
    ("environ", "file", "problem"),
    [
        pytest.param({}, None, "No such file or directory", id="hidden"),
        pytest.param({}, "", "'' is no boot id", id="empty"),
        pytest.param({"CDI_AGENT_BOOT_ID": "%b"}, None, "'%b' is no boot id", id="not expanded"),
    ],
)
def test_a_boot_without_a_name_is_an_error(
    tmp_path: Path, environ: dict[str, str], file: str | None, problem: str
) -> None:
    """A journal of which nobody knows whether it is of this boot is worth nothing."""
    put_boot_id(tmp_path, file)
    with pytest.raises(JournalError, match=problem) as raised:
        boot_id(environ, str(tmp_path))
    assert "CDI_AGENT_BOOT_ID=%b" in (raised.value.hint or "")


def put_boot_id(proc: Path, content: str | None) -> None:
    if content is not None:
        (proc / "sys/kernel/random").mkdir(parents=True)
        (proc / "sys/kernel/random/boot_id").write_text(content)
