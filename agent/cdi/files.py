"""What is on disk, and what is to be done about it, as values.

Pure. ``cdi.store`` reads a ``Disk`` and performs actions; ``reconcile.plan`` compares a ``Disk``
with what is desired and makes actions. An action describes itself, so a dry run costs nothing.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final

import msgspec

from agent.cdi.spec import Device, Kind, Spec

PREFIX: Final = "cdi-agent_"
"""Begins the name of every spec file of ours; the vendors' own tools use the plain name."""


def file_name(kind: Kind, suffix: str = "yaml") -> str:
    """The one file of a kind: ``cdi-agent_intel.com-gpu.yaml``."""
    return f"{PREFIX}{kind.replace('/', '-')}.{suffix}"


@dataclasses.dataclass(frozen=True, slots=True)
class SpecFile:
    """A spec file of ours, as it is on disk."""

    path: str
    content: bytes
    """Empty if the file has to be written again whatever it says: its mode, or what it is."""
    spec: Spec | None
    """What it says; None if that cannot be read, in which case it publishes nothing usable."""

    devices: Mapping[str, Device] = dataclasses.field(init=False, repr=False, compare=False)
    """Its entries by name, ``all`` included; empty if it says nothing."""

    def __post_init__(self) -> None:
        devices = () if self.spec is None else self.spec.devices
        object.__setattr__(self, "devices", {device.name: device for device in devices})


class ForeignFile(msgspec.Struct, frozen=True):
    """A spec file that we did not write, as far as it concerns us."""

    path: str
    kind: Kind | None
    """None if no consumer could read it either; then it defines nothing."""
    names: frozenset[str] = frozenset()
    same_directory: bool = True
    """It lies in the directory that we write to: two definitions there make both useless."""
    problem: str | None = None
    """Why it cannot be read, for people."""


class Disk(msgspec.Struct, frozen=True):
    """The spec directories as one reading found them."""

    directory: str
    """The directory that we write to."""
    ours: Mapping[str, SpecFile] = msgspec.field(default_factory=dict)
    """Our files in ``directory``, by path."""
    leftovers: tuple[str, ...] = ()
    """Paths of files of ours that nothing can want any more: in earlier directories, temp files."""
    foreign: tuple[ForeignFile, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class WriteSpec:
    """Replace a spec file by these bytes, atomically."""

    path: str
    kind: Kind
    content: bytes
    withdraws: tuple[str, ...] = ()
    publishes: tuple[str, ...] = ()
    loses: frozenset[str] = frozenset()
    """Node paths that an entry of the old file gives and the same entry no longer would."""
    delete_if_unwritable: bool = False
    """Rather no file than this old one: a path in it now belongs to another device."""
    spec: Spec | None = dataclasses.field(default=None, compare=False, repr=False)
    """What ``content`` says, if at hand: then it need not be parsed when it is read back."""

    def describe(self) -> str:
        """One line for people."""
        changes = [f"+{name}" for name in self.publishes] + [f"-{name}" for name in self.withdraws]
        return f"write {self.path}: {' '.join(changes) or 'same devices, other edits'}"


class DeleteSpec(msgspec.Struct, frozen=True):
    """Delete a spec file: its kind has no device left, or it is a leftover of ours."""

    path: str
    kind: Kind | None
    withdraws: tuple[str, ...] = ()
    loses: frozenset[str] = frozenset()
    """Node paths that the entries of the file give."""

    def describe(self) -> str:
        """One line for people."""
        return (
            f"delete {self.path}: {' '.join(f'-{name}' for name in self.withdraws) or 'leftover'}"
        )


class SetAside(msgspec.Struct, frozen=True):
    """Rename a foreign spec file so that no consumer reads it (``cdi.adopt``)."""

    path: str
    kind: Kind | None
    loses: frozenset[str] = frozenset()
    """Nothing of ours."""

    def describe(self) -> str:
        """One line for people."""
        return f"set aside {self.path}: it defines devices that cdi-agent publishes"


Action = WriteSpec | DeleteSpec | SetAside
