"""What a journal may say: whatever else it says, an agent would fail of it, or do harm. Pure.

A journal with the right checksum may still be none of ours: written by another program, or by hand.
What stands in it is believed, ends in paths and in sysfs, and is counted with; so it is looked at
once, where it is read, and a journal that says nonsense is unusable as a whole.
"""

import math
from collections.abc import Iterator
from typing import Final

from agent.host.model import ADDRESS_PATTERN, Address
from agent.vfio.model import RECOVERY, Durable, Origin, Record
from agent.vfio.moves import CLEAR

_MAX_PID: Final = 2**31 - 1
_MAX_TICKS: Final = 2**63 - 1
_MAX_NAME: Final = 255
"""Bytes of a name in sysfs, which is a file's."""
_MAX_ATTRIBUTE: Final = 4096
"""Bytes that can be written to an attribute of sysfs."""
_MAX_ID: Final = 512


def find_nonsense(durable: Durable) -> str | None:
    """What is wrong with what a journal says; None if it can be believed."""
    return next(_nonsense(durable), None)


def _nonsense(durable: Durable) -> Iterator[str]:
    seen: set[Address] = set()
    ids: set[str] = set()
    for record in durable.claims:
        yield from _in_record(record)
        if record.id in ids:
            yield f"it has two claims {record.id}"
        ids.add(record.id)
        for origin in record.origins:
            if origin.address in seen:
                yield f"it has {origin.address} twice in its claims"
            seen.add(origin.address)
    for stray in durable.strays:
        yield from _in_origin(stray.origin)
    for child in durable.children:
        yield from _in_address(child.write.address)
        if not _is_attribute(child.write.value.removesuffix(CLEAR)):
            yield "it tells of a write that nobody can have made"
        if not 0 <= child.pid <= _MAX_PID or not 0 <= (child.started or 0) <= _MAX_TICKS:
            yield "it names a process that cannot be one"


def _in_record(record: Record) -> Iterator[str]:
    request = record.request
    if not (0 < len(request.id) <= _MAX_ID and request.id.isprintable()):
        yield "it has a claim that cannot be called so"
    if request.id.startswith(RECOVERY) != record.recovery:
        yield f"it has a recovery that is called as none is, or a claim called {request.id}"
    if not record.origins:
        yield f"its claim {request.id} has no device"
    for address in (*request.devices, *request.named):
        yield from _in_address(address)
    for origin in record.origins:
        yield from _in_origin(origin)
    if not {origin.address for origin in record.origins} >= {*request.devices}:
        yield f"its claim {request.id} lacks a device that was asked for"
    if not all(name.isprintable() for name in record.names):
        yield f"its claim {request.id} has a name that cannot be one"
    moments = (record.since, record.expires_at or 0.0, request.lease or 0.0)
    if not all(map(math.isfinite, moments)):
        yield f"its claim {request.id} has a moment that never comes"
    owner = (request.owner_pid or 0, request.owner_started or 0)
    if not 0 <= owner[0] <= _MAX_PID or not 0 <= owner[1] <= _MAX_TICKS:
        yield "it names a process that cannot be one"


def _in_origin(origin: Origin) -> Iterator[str]:
    yield from _in_address(origin.address)
    if not all(_is_name(driver) for driver in (origin.driver, origin.target) if driver):
        yield f"it has {origin.address} on a driver that cannot be called so"
    if origin.override is not None and not _is_attribute(origin.override):
        yield f"it has a driver_override of {origin.address} that cannot be one"


def _in_address(address: Address) -> Iterator[str]:
    """Every address is one that a write may be made to."""
    if ADDRESS_PATTERN.fullmatch(address) is None:
        yield "it names a function that cannot be one"


def _is_name(text: str) -> bool:
    """Whether a folder of sysfs can be called so."""
    is_one = text not in {".", ".."} and "/" not in text and text.isprintable()
    return is_one and len(text.encode("utf-8", "replace")) <= _MAX_NAME


def _is_attribute(text: str) -> bool:
    """Whether an attribute of sysfs can hold it: no kernel stores a NUL or the end of a line."""
    size = len(text.encode("utf-8", "replace"))
    return not {"\0", "\n"} & {*text} and size < _MAX_ATTRIBUTE
