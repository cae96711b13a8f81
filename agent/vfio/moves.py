"""The one rule by which a function is moved: what it is on, what it should be on, what to write.

Pure. A function is never moved by a list of steps that is walked through, but by looking at it: as
long as it is not where it should be, there is one write that is due. So it does not matter whether
a write failed, had no effect, or was made by an agent that died: the next look says what is left
to do, and the way there, the way back, undoing and going on after a crash are one.

A driver is always bound by its name, in ``driver_override``: without it the kernel gives the
function to the first driver that wants it, which may be another one than it came from. Only then
the override that the function is to keep is written.
"""

import msgspec

from agent.host.model import Function, normalise_driver
from agent.vfio.model import ANY_DRIVER, Origin, Step

CLEAR = "\n"
"""Written to ``driver_override``, it clears it; zero bytes would do nothing."""


class Goal(msgspec.Struct, frozen=True):
    """Where a function should end."""

    driver: str | None
    """None is no driver; ``ANY_DRIVER`` is one that the kernel prefers and that is not VFIO's."""
    override: str | None
    """The ``driver_override`` that it keeps; None is none."""


class Override(msgspec.Struct, frozen=True):
    """The ``driver_override`` of a function, as it was read or successfully written."""

    value: str | None


def goal_there(origin: Origin) -> Goal:
    """What a claim wants of a function that it moves."""
    return Goal(origin.target, origin.target or None)


def goal_back(origin: Origin) -> Goal:
    """What a function was."""
    return Goal(origin.driver, origin.override) if origin.known else Goal(ANY_DRIVER, None)


def has_driver(function: Function, driver: str | None) -> bool:
    """Whether a function is on a driver, as ``Goal.driver`` means it."""
    if driver == ANY_DRIVER:
        return function.driver is not None and not function.on_vfio
    return _same(function.driver, driver)


def next_step(function: Function, goal: Goal, override: Override | None) -> tuple[Step, str] | None:
    """Tell what to write next; None if the function is where it should be.

    Args:
        function: As the latest look saw it.
        override: Its ``driver_override``; None if it is not known, and then it is written.
    """
    wanted = override_for(function, goal)
    if override is None or not _same(override.value, wanted.value):
        return Step.OVERRIDE, wanted.value or CLEAR
    if has_driver(function, goal.driver):
        return None
    if function.driver is not None:
        return Step.UNBIND, function.address
    return Step.PROBE, function.address


def override_for(function: Function, goal: Goal) -> Override:
    """The override that a function needs now: the driver to bind, or in the end what it keeps."""
    if goal.driver is None or has_driver(function, goal.driver):
        return Override(goal.override)
    return Override(goal.driver or None)


def is_explained(function: Function, origin: Origin) -> bool:
    """Whether a function that we move is on a driver that we, or its origin, account for.

    On any other one somebody else put it, and it is not ours to move any more.
    """
    return (
        not origin.known
        or function.driver is None
        or has_driver(function, origin.driver)
        or (origin.target is not None and has_driver(function, origin.target))
    )


def is_back(function: Function, origin: Origin) -> bool:
    """Whether it is on the driver that it came from."""
    return has_driver(function, goal_back(origin).driver)


def _same(one: str | None, two: str | None) -> bool:
    if one is None or two is None:
        return one is two
    return normalise_driver(one) == normalise_driver(two)
