"""What a reader of the log should hear about once: the difference of two states. Pure.

A condition is told when it begins, and again only when it has changed. What ends by itself within
a second (settling, udev at work) is not news.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from agent.cdi.desired import Reason
from agent.cdi.files import ForeignFile
from agent.reconcile.plan import TRANSIENT
from agent.reconcile.state import Key, State

_QUIET_REASONS = frozenset({Reason.UNMATCHED, Reason.IGNORED, Reason.POLICY, Reason.HELD})
"""Reasons that somebody chose, or that are the normal state of most functions."""


class News(msgspec.Struct, frozen=True):
    """One line for the log."""

    level: int
    event: str
    fields: Mapping[str, object]


def news(before: State, after: State, *, unconfirmed: Sequence[Key] = ()) -> Iterator[News]:
    """What is new in ``after``.

    Args:
        before: The state before a pass.
        after: The state after it.
        unconfirmed: Devices that were published without udev's word.
    """
    yield from _environment(before, after)
    yield from _withheld(before, after)
    yield from _foreign(before, after)
    for kind, address in unconfirmed:
        if (kind, address) in after.published and (kind, address) not in before.published:
            yield News(
                logging.WARNING,
                "published-without-udev",
                {
                    "device": address,
                    "kind": kind,
                    "problem": "udev did not deal with its nodes in time: owner, mode and "
                    "links of the nodes may still change",
                },
            )


def _environment(before: State, after: State) -> Iterator[News]:
    old, new = before.inventory.environment, after.inventory.environment
    first = before.passes == 0
    if _is_withheld(after, Reason.STATIC_DEV) and not _is_withheld(before, Reason.STATIC_DEV):
        yield News(
            logging.WARNING,
            "static-dev",
            {
                "problem": "/dev is not the kernel's devtmpfs: it may be a container's snapshot, "
                "in which nodes neither come nor go",
                "hint": "mount the host's /dev, or set host.static_dev to allow it",
            },
        )
    if new.udevd != (True if first else old.udevd):
        yield News(
            logging.WARNING if not new.udevd else logging.INFO,
            "udev-absent" if not new.udevd else "udev-present",
            {
                "problem": "no udevd answers under /run/udev: nodes are published without "
                "waiting for their permissions and links",
            }
            if not new.udevd
            else {},
        )
    for address, problem in after.inventory.dropped.items():
        if before.inventory.dropped.get(address) != problem:
            yield News(
                logging.WARNING, "function-unreadable", {"device": address, "problem": problem}
            )


def _is_withheld(state: State, reason: Reason) -> bool:
    return any(withheld.reason is reason for withheld in state.withheld)


def _withheld(before: State, after: State) -> Iterator[News]:
    known = {(w.address, w.kind, w.reason) for w in before.withheld}
    for withheld in after.withheld:
        if withheld.reason in TRANSIENT:
            continue
        if (withheld.address, withheld.kind, withheld.reason) in known:
            continue
        yield News(
            logging.DEBUG if withheld.reason in _QUIET_REASONS else logging.INFO,
            "withheld",
            {
                "device": withheld.address,
                "kind": withheld.kind,
                "reason": withheld.reason.value,
                "problem": withheld.detail,
            },
        )


def _foreign(before: State, after: State) -> Iterator[News]:
    """Foreign definitions of what we publish, in the directory that ours hides or that hides ours.

    Told when they meet, and again when ours goes: then a container gets what the other file says.
    """
    old_files = before.disk.foreign if before.disk is not None else ()
    new_files = after.disk.foreign if after.disk is not None else ()
    known_problems = {(file.path, file.problem) for file in old_files}
    for file in new_files:
        if file.problem is not None and (file.path, file.problem) not in known_problems:
            yield News(
                logging.INFO, "foreign-unreadable", {"path": file.path, "problem": file.problem}
            )
    met_before = set(_meetings(before, old_files))
    met_now = set(_meetings(after, new_files))
    for path, kind, name in sorted(met_now - met_before):
        yield News(
            logging.WARNING,
            "foreign-definition",
            {
                "path": path,
                "device": f"{kind}={name}",
                "problem": "another file defines this device in another CDI directory",
            },
        )
    still_there = {
        (file.path, file.kind, name) for file in new_files for name in file.names if file.kind
    }
    for path, kind, name in sorted((met_before - met_now) & still_there):
        yield News(
            logging.WARNING,
            "foreign-uncovered",
            {
                "path": path,
                "device": f"{kind}={name}",
                "problem": "this device is withdrawn, and the other file's definition is in force",
            },
        )


def _meetings(state: State, files: Sequence[ForeignFile]) -> Iterator[tuple[str, str, str]]:
    theirs = [
        (file.path, file.kind, name)
        for file in files
        if file.kind is not None and not file.same_directory
        for name in file.names
    ]
    ours = {(kind, name) for (kind, _), name in state.published.items()} if theirs else set()
    yield from (each for each in theirs if each[1:] in ours)
