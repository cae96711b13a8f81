"""What has to survive a crash of the agent: ``claims.json`` in the state directory.

It is on disk before the first write to a device that it tells of, so it may say more than was
done and never less. A journal that cannot be used (torn, of another version, changed by hand) is
set aside and said, and is *not* an empty one: nobody knows what was claimed, and a device that is
on VFIO is of unknown origin. So it is until a new journal is saved, which tells of those devices,
however often the agent is killed before. As long as the file that was set aside is there, each
start says so again; whoever has dealt with it deletes it. Nothing is ever saved over a journal
that could not be set aside.

A journal of an earlier boot can be used: what it says of numbers and drivers is void, since the
reboot has undone it, but who had claimed what is still true.

``load`` blocks. ``save`` may be cancelled and is finished all the same.
"""

import asyncio
import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from agent.errors import AgentError, ExitCode
from agent.host.files import OUT_OF_MEANS, StateFile, Step, no_step, read_regular
from agent.vfio.model import Durable
from agent.vfio.soundness import find_nonsense

VERSION: Final = 2
"""Raise it with every change of ``Durable`` that an older agent must not overlook."""

READABLE: Final = (1, VERSION)
"""Version 1 knows nothing of what is lost."""

FILE_NAME: Final = "claims.json"

BOOT_ID_VARIABLE: Final = "CDI_AGENT_BOOT_ID"
"""A unit that hides /proc/sys sets it to ``%b``."""

_BOOT_ID: Final = re.compile(r"[0-9a-f]{32}")
_MAX_SIZE: Final = 16 * 1024 * 1024  # a claim has about a KiB


class JournalError(AgentError):
    """The journal could not be written, or not even be looked for."""

    code = "journal-failed"
    retryable = True
    exit_code = ExitCode.CANNOT_CREATE


class Loaded(msgspec.Struct, frozen=True):
    """What was found at the start."""

    durable: Durable | None
    """What the journal says; None if it could not be used. Without a journal nothing is claimed."""
    problem: str = ""
    """Why it could not be used, or that an earlier one could not; one sentence for people."""
    set_aside: str = ""
    """Where a journal that could not be used is kept, be it from this start or an earlier one."""


class Journal:
    """The journal on disk; one agent has it at a time.

    Args:
        directory: The state directory; made when it is first needed.
        step: Told of each step.
    """

    def __init__(self, directory: str, step: Step = no_step) -> None:
        self._file = StateFile(directory, FILE_NAME, limit=_MAX_SIZE, step=step)
        self._saved: Durable | None = None
        self._unusable = False
        self._one_at_a_time = asyncio.Lock()

    @property
    def path(self) -> str:
        """Where it is."""
        return self._file.path

    @property
    def saved(self) -> Durable | None:
        """What is on disk; None if that is not known."""
        return self._saved

    def load(self) -> Loaded:
        """Read it, and set it aside if it cannot be used. Blocks: call it in a thread.

        Raises:
            JournalError: This process lacks the means to look; that says nothing about the journal.
        """
        try:
            self._saved = _parse(self._file.read())
        except FileNotFoundError:
            if os.path.lexists(self._file.aside):
                # The agent that set it aside ended before it had saved what became of it.
                problem = f"{self.path} is missing since one that could not be used was set aside"
                return Loaded(None, problem, self._file.aside)
            self._saved = Durable()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in OUT_OF_MEANS:
                raise self._fault("read", error) from error
            return self._set_aside(error)
        aside = self._file.aside if os.path.lexists(self._file.aside) else ""
        problem = f"an earlier journal could not be used and is kept as {aside}" if aside else ""
        return Loaded(self._saved, problem, aside)

    async def save(self, durable: Durable) -> None:
        """Make it say this, durably; nothing is done if it does already.

        Raises:
            JournalError: It could not be done; what it says is the old or the new.
        """
        writing = asyncio.ensure_future(self._save(durable))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # Never a late rename: the next journal would be replaced by this one.
            while not writing.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait((writing,))
            if not writing.cancelled():
                writing.exception()
            raise

    async def _save(self, durable: Durable) -> None:
        async with self._one_at_a_time:
            if durable != self._saved:
                await asyncio.to_thread(self._replace, durable)

    # --- in a thread ------------------------------------------------------------------------------

    def _replace(self, durable: Durable) -> None:
        content = _render(durable)
        self._saved = None
        try:
            if self._unusable:
                self._file.set_aside()
                self._unusable = False
            self._file.replace(content)
        except OSError as error:
            raise self._fault("write", error) from error
        self._saved = durable

    def _set_aside(self, error: OSError | ValueError) -> Loaded:
        reason = getattr(error, "strerror", None) or str(error)
        try:
            self._file.set_aside()
        except OSError as failure:
            # Saving tries again, and fails as long as this does.
            self._unusable = True
            problem = f"{self.path} cannot be used ({reason}), nor set aside ({failure.strerror})"
            return Loaded(None, problem, self.path)
        return Loaded(None, f"{self.path} cannot be used: {reason}", self._file.aside)

    def _fault(self, doing: str, error: OSError) -> JournalError:
        reason = error.strerror or str(error)
        return JournalError(
            f"cannot {doing} {self.path}: {reason[:1].lower()}{reason[1:]}",
            hint="the state directory needs space, and has to be writable for the agent",
        )


class _Head(msgspec.Struct):
    version: int


class _Body(_Head, forbid_unknown_fields=True):
    checksum: str
    content: msgspec.Raw


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _render(durable: Durable) -> bytes:
    """Write it down.

    Raises:
        JournalError: It could not be read back; a bug, found before it does harm.
    """
    try:
        content = msgspec.json.encode(durable)
        body = _Body(VERSION, _checksum(content), msgspec.Raw(content))
        rendered = msgspec.json.encode(body) + b"\n"
        same = _parse(rendered) == durable
    except ValueError as error:
        raise JournalError(f"the claims cannot be written down: {error}") from error
    if not same:
        raise JournalError("the claims cannot be written down: they would say something else")
    return rendered


def _parse(content: bytes) -> Durable:
    """Read it.

    Raises:
        ValueError: It is no journal, or none that can be trusted.
    """
    try:
        version = msgspec.json.decode(content, type=_Head).version
        if version not in READABLE:
            raise ValueError(f"it has version {version}, and this agent reads up to {VERSION}")
        body = msgspec.json.decode(content, type=_Body)
        if body.checksum != _checksum(bytes(body.content)):
            raise ValueError("its checksum does not match")
        durable = msgspec.json.decode(body.content, type=Durable)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not a journal: {error}") from error
    nonsense = find_nonsense(durable)
    if nonsense is not None:
        raise ValueError(nonsense)
    return durable


# --- the boot -------------------------------------------------------------------------------------


def boot_id(environ: Mapping[str, str], proc: str = "/proc") -> str:
    """Which boot this is: 32 hex digits.

    Args:
        environ: The environment, for ``CDI_AGENT_BOOT_ID``.
        proc: Where a procfs is, for ``sys/kernel/random/boot_id``.

    Raises:
        JournalError: Nobody says; then nothing could be believed after a crash.
    """
    said = environ.get(BOOT_ID_VARIABLE)
    path = f"{proc}/sys/kernel/random/boot_id"
    if said is None:
        try:
            said = read_regular(path, 4096).decode("ascii", "replace")
        except OSError as error:
            raise _unknown_boot(f"{path}: {error.strerror}") from error
    plain = said.strip().replace("-", "").lower()
    if _BOOT_ID.fullmatch(plain) is None:
        raise _unknown_boot(f"{said.strip()[:40]!r} is no boot id")
    return plain


def _unknown_boot(reason: str) -> JournalError:
    return JournalError(
        f"it cannot be told which boot this is: {reason}",
        hint=f"a unit that hides /proc/sys needs Environment={BOOT_ID_VARIABLE}=%b",
    )
