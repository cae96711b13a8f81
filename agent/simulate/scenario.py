"""Scenarios: what happens to a host, and what must be published then, as files.

A scenario names the functions of a host, says which of them are there at the start, and goes on in
steps. It is played on a `Stage`, simulated or real, before a `Witness`, who knows what is
published: the agent itself, or a look at the host by other means. Nothing in a file says where it
is played: no address, no driver's name, no kind.

    title: The only GPU goes to VFIO by hand and comes back
    parts: {gpu: gpu}
    start: [gpu]
    steps:
      - expect: {published: {own: [gpu]}, deleted: [vfio]}
      - move: {gpu: vfio}
      - expect: {published: {vfio: [gpu]}, deleted: [own]}

==========================================  ========================================================
``plug: [gpu]``, ``unplug: [gpu]``          together, if several
``remove: gpu``, ``rescan``                 through sysfs
``move: {gpu: vfio}``                       or ``own``; override, unbind, probe
``unbind: gpu``, ``bind: gpu``              bind to its own driver
``unload: gpu``, ``load: gpu``              the module of its own driver
``hold: {gpu: card}``, ``let-go``           a process opens a node; all such processes end
``renumber: gpu``                           its numbers change: rebound while a node is held
``swap: [gpu, other]``                      their numbers change places
``storm: {gpu: 100}``                       connectors come and go so often
``lose: {gpu: render}``, ``restore: gpu``   a node goes from /dev without a word, and comes back
``trigger: gpu``                            its messages are repeated
``vfs: {gpu: 2}``                           it has so many VFs from now on: ``gpu's VF 0``, …
``udev: slow``                              or ``absent``, ``usual``; ``udev-catches-up``
``wait-quiet``                              until host and witness have nothing left to do
``repeat: {times: 10, steps: [...]}``
``expect: {...}``                           see `Expectation`
==========================================  ========================================================
"""

import dataclasses
import enum
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
import yaml

from agent.host.model import NodeRole
from agent.simulate.stage import Driver, Part, Stage, twin_of
from agent.simulate.udev import UdevMode

MAX_BYTES: Final = 2**16
_T = TypeVar("_T")
_Times = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class ScenarioError(Exception):
    """A file is no scenario; the text says where and why."""


class Kind(enum.StrEnum):
    """Which spec file: that of functions on their own driver, or that of VFIO."""

    OWN = "own"
    VFIO = "vfio"


Published = Mapping[Kind, frozenset[str]]
"""The functions in each spec file that exists, by their names in the scenario."""


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """What must be published when all is quiet."""

    published: dict[Kind, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """All functions in these files, and no others."""
    deleted: tuple[Kind, ...] = ()
    """These files are not there."""
    unwritten: bool = False
    """No spec file was written or deleted since the last expectation."""

    def fault(self, published: Published) -> str:
        """Say in which way something else is published; empty if it is as expected."""
        for kind, names in self.published.items():
            found = published.get(kind)
            if found is None:
                return f"there is no file for {kind}, which should hold {_names(names)}"
            if found != frozenset(names):
                return f"{kind} should hold {_names(names)}, and holds {_names(found)}"
        for kind in self.deleted:
            if kind in published:
                return f"{kind} should be gone, and holds {_names(published[kind])}"
        return ""


class Witness(Protocol):
    """Knows what is published."""

    def wait_quiet(self) -> None:
        """Wait until everything that has happened has been dealt with."""

    def expect(self, expected: Expectation) -> None:
        """Wait until what is expected is so; give up after a time of its own.

        Raises:
            AssertionError: It did not become so; the text says how it differs.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Act:
    """One thing that is done to the host."""

    text: str
    """As the file says it."""
    do: Callable[[Stage], object] = dataclasses.field(compare=False)


class WaitQuiet(msgspec.Struct, frozen=True):
    """Nothing is left to do."""


Step = Act | Expectation | WaitQuiet


class Scenario(msgspec.Struct, frozen=True):
    """A host, and what happens to it."""

    title: str
    parts: Mapping[str, Part]
    start: tuple[str, ...]
    """What is there when the host boots."""
    udev: UdevMode
    """How udevd is when the host boots."""
    steps: tuple[Step, ...]


def play(scenario: Scenario, stage: Stage, witness: Witness) -> Iterator[Step]:
    """Play a scenario on a stage that has booted with what is there at the start.

    Yields:
        Each step, when it has been done.

    Raises:
        AssertionError: The witness says that something else is published than should be.
        OSError: The host refuses an act.
    """
    for step in scenario.steps:
        match step:
            case Act():
                step.do(stage)
            case WaitQuiet():
                witness.wait_quiet()
            case Expectation():
                witness.expect(step)
        yield step


# --- reading --------------------------------------------------------------------------------------


class _File(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    parts: dict[str, Part]
    steps: list[Any]
    start: tuple[str, ...] = ()
    udev: str = "usual"


class _Repeat(msgspec.Struct, forbid_unknown_fields=True):
    times: _Times
    steps: list[Any]


def load(path: str | os.PathLike[str]) -> Scenario:
    """Read a scenario.

    Raises:
        ScenarioError: The file is none.
        OSError: The file cannot be read.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ScenarioError(f"{name} is longer than {MAX_BYTES} bytes")
    try:
        return parse(yaml.safe_load(content))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ScenarioError(f"{name}: {error}") from error


def parse(data: object) -> Scenario:
    """Make a scenario of what a YAML file holds.

    Raises:
        ValueError: It is none.
    """
    file = _convert(data, _File)
    names = {*file.parts, *(twin_of(n) for n, part in file.parts.items() if part is Part.TWINS)}
    _known(file.start, names)
    return Scenario(
        title=file.title,
        parts=file.parts,
        start=file.start,
        udev=_udev(file.udev),
        steps=tuple(_steps(file.steps, names)),
    )


def _steps(items: Iterable[object], names: set[str]) -> Iterator[Step]:
    for number, item in enumerate(items, start=1):
        try:
            yield from _step(item, names)
        except ValueError as error:
            raise ValueError(f"step {number}: {error}") from error


def _step(item: object, names: set[str]) -> Iterator[Step]:
    if isinstance(item, str):
        verb, argument = item, None
    elif isinstance(item, dict) and len(item) == 1:
        ((verb, argument),) = item.items()
    else:
        raise ValueError("a step is a word, or one word with what it is done to")
    if verb == "wait-quiet" and argument is None:
        yield WaitQuiet()
    elif verb == "expect":
        expected = _convert(argument, Expectation)
        for published in expected.published.values():
            _known(published, names)
        yield expected
    elif verb == "repeat":
        repeat = _convert(argument, _Repeat)
        yield from repeat.times * tuple(_steps(repeat.steps, names))
    elif verb in _VERBS:
        yield Act(_text(verb, argument), _VERBS[verb](argument, names))
    else:
        raise ValueError(f"nobody knows how to {verb}")


_Do = Callable[[Stage], object]


def _on_each(do: Callable[[Stage, str], object]) -> Callable[[object, set[str]], _Do]:
    """A verb that is done to a function, or to several one after another."""

    def make(argument: object, names: set[str]) -> _Do:
        wanted = _convert([argument] if isinstance(argument, str) else argument, tuple[str, ...])
        _known(wanted, names)

        def act(stage: Stage) -> None:
            for name in wanted:
                do(stage, name)

        return act

    return make


def _on_all(do: Callable[[Stage, tuple[str, ...]], object]) -> Callable[[object, set[str]], _Do]:
    """A verb that is done to several functions together."""

    def make(argument: object, names: set[str]) -> _Do:
        wanted = _convert([argument] if isinstance(argument, str) else argument, tuple[str, ...])
        _known(wanted, names)
        return lambda stage: do(stage, wanted)

    return make


def _with(
    kind: type[_T], do: Callable[[Stage, str, _T], object]
) -> Callable[[object, set[str]], _Do]:
    """A verb that needs a word or number for each function."""

    def make(argument: object, names: set[str]) -> _Do:
        wanted: dict[str, _T] = _convert(argument, dict[str, kind])  # type: ignore[valid-type]
        _known(wanted, names)

        def act(stage: Stage) -> None:
            for name, value in wanted.items():
                do(stage, name, value)

        return act

    return make


def _plain(do: _Do) -> Callable[[object, set[str]], _Do]:
    """A verb that is done to the whole host."""

    def make(argument: object, names: set[str]) -> _Do:  # noqa: ARG001 - all verbs are made alike
        if argument is not None:
            raise ValueError("this is done to the whole host, not to a function")
        return do

    return make


def _renumber(stage: Stage, name: str) -> None:
    stage.hold(name, NodeRole.CARD)
    stage.unbind(name)
    stage.bind(name)
    stage.let_go()


def _swap(stage: Stage, names: tuple[str, ...]) -> None:
    for name in names:
        stage.unbind(name)
    for name in reversed(names):
        stage.bind(name)


def _set_udev(argument: object, names: set[str]) -> _Do:  # noqa: ARG001 - all verbs are made alike
    mode = _udev(argument)
    return lambda stage: stage.udev(mode)


_VERBS: Final[Mapping[str, Callable[[object, set[str]], _Do]]] = {
    "plug": _on_all(lambda stage, names: stage.plug(names)),
    "unplug": _on_all(lambda stage, names: stage.unplug(names)),
    "remove": _on_each(lambda stage, name: stage.remove(name)),
    "rescan": _plain(lambda stage: stage.rescan()),
    "move": _with(Driver, lambda stage, name, driver: stage.move(name, driver)),
    "unbind": _on_each(lambda stage, name: stage.unbind(name)),
    "bind": _on_each(lambda stage, name: stage.bind(name)),
    "unload": _on_each(lambda stage, name: stage.unload(name)),
    "load": _on_each(lambda stage, name: stage.load(name)),
    "hold": _with(NodeRole, lambda stage, name, role: stage.hold(name, role)),
    "let-go": _plain(lambda stage: stage.let_go()),
    "renumber": _on_each(_renumber),
    "swap": _on_all(_swap),
    "storm": _with(int, lambda stage, name, times: stage.storm(name, times)),
    "lose": _with(NodeRole, lambda stage, name, role: stage.lose(name, role)),
    "restore": _on_each(lambda stage, name: stage.restore(name)),
    "trigger": _on_each(lambda stage, name: stage.trigger(name)),
    "vfs": _with(int, lambda stage, name, count: stage.create_vfs(name, count)),
    "udev": _set_udev,
    "udev-catches-up": _plain(lambda stage: stage.udev_catches_up()),
}

_VF: Final = re.compile(r"'s VF [0-9]+$")
_UDEV: Final = {"usual": UdevMode.AUTO, "slow": UdevMode.MANUAL, "absent": UdevMode.OFF}


def _udev(word: object) -> UdevMode:
    if not isinstance(word, str) or word not in _UDEV:
        raise ValueError(f"udev is {', '.join(_UDEV)}, not {word}")
    return _UDEV[word]


def _known(wanted: Iterable[str], names: set[str]) -> None:
    if unknown := sorted({_VF.sub("", name) for name in wanted} - names):
        raise ValueError(f"no part is called {_names(unknown)}")


def _convert(data: object, kind: type[_T]) -> _T:
    # msgspec's errors are ValueErrors, and name the place below this one.
    return msgspec.convert(data, kind)


def _text(verb: str, argument: object) -> str:
    match argument:
        case None:
            return verb
        case dict():
            pairs = (f"{name} {value}" for name, value in argument.items())
            return f"{verb} {', '.join(pairs)}"
        case list():
            return f"{verb} {', '.join(map(str, argument))}"
        case _:
            return f"{verb} {argument}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
