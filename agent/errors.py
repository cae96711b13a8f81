"""The error tree: everything that this program tells a person went wrong.

An error has a stable ``code`` (for programs, metrics and the log), one sentence (its text), and
perhaps a ``hint``: what to do about it. ``retryable`` says whether trying the same thing again
later can help without a person: the reconciler retries those with growing delay, and reports the
others once. Errors of the operating system are wrapped at the boundary where they arise, with the
original as the cause; nothing above that boundary looks at an errno.
"""

import enum
from typing import ClassVar


class ExitCode(enum.IntEnum):
    """Exit codes of the command line, after sysexits.h."""

    OK = 0
    FAILURE = 1
    USAGE = 64
    DATA = 65
    NO_INPUT = 66
    UNAVAILABLE = 69
    SOFTWARE = 70
    OS = 71
    CANNOT_CREATE = 73
    IO = 74
    TEMPORARY = 75
    NO_PERMISSION = 77
    CONFIG = 78


class AgentError(Exception):
    """The root of the tree.

    Args:
        sentence: What went wrong, as one sentence without a newline.
        hint: What the reader can do about it, or nothing.
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE

    def __init__(self, sentence: str, *, hint: str | None = None) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.hint = hint


class ConfigError(AgentError):
    """The configuration cannot be used; the text lists every fault found in it.

    Args:
        summary: What cannot be used.
        hint: What the reader can do about it.
        faults: Each fault by itself, with its line and key.
    """

    code = "config"
    exit_code = ExitCode.CONFIG

    def __init__(
        self, summary: str, *, hint: str | None = None, faults: tuple[str, ...] = ()
    ) -> None:
        super().__init__(f"{summary}: {'; '.join(faults)}" if faults else summary, hint=hint)
        self.summary = summary
        self.faults = faults


class SpecError(AgentError):
    """A spec would break a rule of CDI; it is never written."""

    code = "spec-invalid"
    exit_code = ExitCode.DATA


class StoreError(AgentError):
    """A spec file could not be written, replaced or deleted."""

    code = "store"
    retryable = True
    exit_code = ExitCode.CANNOT_CREATE


class SourceError(AgentError):
    """A source of events could not be opened, or went deaf."""

    code = "source"
    retryable = True
    exit_code = ExitCode.OS


class SourceUnavailableError(SourceError):
    """This process can never open a source of events: it may not, or libudev is missing."""

    code = "source-unavailable"
    retryable = False


class LookError(AgentError):
    """A look failed as a whole: nothing is known, which is not the same as "there is nothing"."""

    code = "look"
    retryable = True
    exit_code = ExitCode.OS


class CaptureError(AgentError):
    """A captured host cannot be read, or does not have the form of one."""

    code = "capture"
    exit_code = ExitCode.DATA


class OutputError(AgentError):
    """Standard output takes no more: its disk is full, or what it is broke."""

    code = "output"
    exit_code = ExitCode.IO


class AlreadyRunningError(AgentError):
    """Another instance holds the lock of the state directory."""

    code = "already-running"
    exit_code = ExitCode.TEMPORARY
