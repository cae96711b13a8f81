"""The profiles of a user and those that come with the program as one list, checked.

Pure. A user's profile has the same schema. With the name of one that comes with the program it
starts from that one's values and takes its place; each key that it gives replaces the whole value.
What could only be found wrong when a device is published is found here, before anything is: each
profile makes the entries that it would make, and CDI's rules are held against them.
"""

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from agent.cdi import rules
from agent.cdi.files import file_name
from agent.cdi.profile import Backend, Naming, Profile, SrIov, Vfio, knows, ordered
from agent.cdi.render import natural
from agent.cdi.spec import ContainerEdits, Device, DeviceNode, Kind
from agent.host.model import NodeRole, is_vfio_driver, normalise_driver

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_ROLES: Final = (NodeRole.CARD, NodeRole.RENDER, NodeRole.ACCEL, NodeRole.MEI)
_PLACE: Final = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?", re.DOTALL)
_ID: Final = 'four hex digits in lower case and in quotes, such as "8086"'
# What people most often get wrong, by the key: bare, 0300 is 192 for YAML and 660 is no mode.
_ALLOWED: Final = {
    "vendor": _ID,
    "devices": _ID,
    "classes": '2, 4 or 6 hex digits in lower case and in quotes, such as "0300"',
    "fileMode": 'a mode in octal and in quotes, such as "0660"',
    "path": "the path of a node below /dev, without '.' and '..'",
    "role": f"one of {', '.join(_ROLES)}",
    "roles": f"one of {', '.join(_ROLES)}",
    "naming": f"one of {', '.join(Naming)}",
    "sriov": f"one of {', '.join(SrIov)}",
    "backend": f"one of {', '.join(Backend)}",
    "driver": "the name of a driver",
}
_REQUIRED: Final = tuple(
    field.encode_name for field in msgspec.structs.fields(Profile) if field.required
)


class Problem(msgspec.Struct, frozen=True):
    """What is wrong with a profile."""

    path: str
    """Where, below the list of profiles: ``[2].match.vendor``."""
    sentence: str


_Placed = tuple[str, Profile]


def merge(
    users: Sequence[object],
    builtin: Sequence[Profile],
) -> tuple[tuple[Profile, ...], tuple[Problem, ...]]:
    """Put a user's profiles before those that come with the program.

    Args:
        users: The list as the configuration has it: mappings of plain values.
        builtin: As ``load_builtin`` gives them.

    Returns:
        The profiles in order of precedence, and everything that is wrong with them. Where there is
        a problem, the profiles are not to be used.
    """
    by_name = {profile.name: profile for profile in builtin}
    placed: list[_Placed] = []
    problems: list[Problem] = []
    for number, raw in enumerate(users):
        read = _read(f"[{number}]", raw, by_name)
        if isinstance(read, Problem):
            problems.append(read)
        else:
            placed.append((f"[{number}]", read))
    replaced = {profile.name for _, profile in placed}
    rest = [profile for profile in builtin if profile.name not in replaced]
    problems.extend(check_profiles(placed, rest))
    profiles = ordered(profile for _, profile in placed) + ordered(rest)
    return profiles, tuple(sorted(problems, key=lambda problem: natural(problem.path)))


def check_profiles(
    placed: Sequence[_Placed],
    others: Sequence[Profile] = (),
) -> Iterator[Problem]:
    """Find what is wrong with profiles of one rank, each with its place.

    Args:
        others: Profiles of a lower rank, not checked themselves.
    """
    names = Counter(profile.name for _, profile in placed)
    for place, profile in placed:
        yield from _check_one(place, profile)
        if names[profile.name] > 1:
            yield Problem(f"{place}.name", f"the name {profile.name!r} is given twice")
    enabled = [(place, profile) for place, profile in placed if profile.enabled]
    for (_, one), (place, two) in _pairs(enabled, _claims):
        yield from _check_claim(place, two, one)
    for (_, one), (place, two) in _pairs(enabled, _files):
        yield from _check_kinds(place, two, one)
    below = [other for other in others if other.enabled]
    for place, profile in enabled:
        for other in below:
            yield from _check_kinds(place, profile, other)
    yield from _check_unions(enabled, below)


# --- reading --------------------------------------------------------------------------------------


def _read(place: str, raw: object, by_name: Mapping[str, Profile]) -> Profile | Problem:
    if not isinstance(raw, Mapping):
        return Problem(place, "a profile is a mapping of keys to values")
    name = raw.get("name")
    base = by_name.get(name) if isinstance(name, str) else None
    if base is None and (missing := [key for key in _REQUIRED if key not in raw]):
        return Problem(place, _lacking(missing, str(name), by_name))
    try:
        values = raw if base is None else {**msgspec.to_builtins(base), **raw}
        return msgspec.convert(values, Profile)
    except msgspec.ValidationError as error:
        return _explain(place, str(error))


def _lacking(missing: Sequence[str], name: str, known: Iterable[str]) -> str:
    *others, last = missing
    keys = f"the keys {', '.join(others)} and {last} are" if others else f"the key {last} is"
    close = difflib.get_close_matches(name, known, n=1)
    question = f"; did you mean {close[0]}?" if close else ""
    return (
        f"{keys} missing, which only a profile with the name of one that comes with the program may"
        f" leave out{question}"
    )


def _explain(place: str, text: str) -> Problem:
    """Take msgspec's sentence apart, which ends with the place, and say what is allowed there."""
    found = _PLACE.fullmatch(text)
    sentence, path = (text, None) if found is None else found.groups()
    if path:
        place += path if path.startswith("[") else f".{path}"
    key = re.sub(r"\[[^\]]*\]\Z", "", place).rpartition(".")[2]
    if key in _ALLOWED and "unknown field" not in sentence:
        sentence = f"it must be {_ALLOWED[key]}"
    return Problem(place, sentence)


# --- rules ----------------------------------------------------------------------------------------


def _check_one(place: str, profile: Profile) -> Iterator[Problem]:
    if not _NAME.fullmatch(profile.name):
        yield Problem(
            f"{place}.name", "a name is lower-case letters and digits, with dashes between them"
        )
    match = profile.match
    if not (match.vendor or match.devices or match.classes or match.drivers):
        yield Problem(f"{place}.match", "it must name a vendor, classes or drivers")
    if match.devices and match.vendor is None:
        yield Problem(f"{place}.match.devices", "ids of devices mean nothing without a vendor")
    if profile.partitions is not None and not profile.partitions.prefix:
        yield Problem(f"{place}.partitions.prefix", "it is empty")
    yield from _check_roles(place, profile)
    yield from _check_reach(place, profile)
    yield from _check_entries(place, profile)


def _check_roles(place: str, profile: Profile) -> Iterator[Problem]:
    roles = [nodes.role for nodes in profile.nodes]
    for number, role in enumerate(roles):
        if role not in _ROLES:
            yield Problem(f"{place}.nodes[{number}].role", f"it must be {_ALLOWED['role']}")
        elif role in roles[:number]:
            yield Problem(f"{place}.nodes[{number}].role", f"{role} is given twice")
    for number, role in enumerate(profile.match.roles):
        if role not in _ROLES:
            yield Problem(f"{place}.match.roles[{number}]", f"it must be {_ALLOWED['role']}")


def _check_reach(place: str, profile: Profile) -> Iterator[Problem]:
    """What a profile gives must be within reach of what it recognises."""
    match = profile.match
    on_vfio = [driver for driver in match.drivers if is_vfio_driver(driver)]
    on_own = [driver for driver in match.drivers if driver not in on_vfio]
    narrow = "roles" if match.roles else "drivers" if match.drivers and not on_vfio else None
    if not profile.nodes and (profile.vfio is None or narrow):
        yield Problem(f"{place}.nodes", "it gives no nodes, and nothing on VFIO either")
    elif profile.vfio not in {None, Vfio()} and narrow:
        yield Problem(
            f"{place}.vfio",
            f"match.{narrow} recognises no device that is on a VFIO driver: leave that out (whose"
            " nodes are published is said by `drivers` and `nodes`), or set vfio to null",
        )
    if profile.nodes and match.drivers and not on_own:
        yield Problem(
            f"{place}.nodes",
            "match.drivers recognises only devices that are on a VFIO driver, which have no such"
            " nodes: leave that out, or set nodes to []",
        )
    elif profile.nodes and on_own and profile.drivers:
        named = [driver for driver in on_own if knows(profile.drivers, driver)]
        if not named:
            yield Problem(
                f"{place}.drivers",
                "match.drivers has none of these, so the nodes would never be published",
            )


def _check_entries(place: str, profile: Profile) -> Iterator[Problem]:
    """Hold CDI's rules against the entries of a device that has everything, in both states."""
    problems = rules.kind_problems(profile.own_kind)
    yield from (Problem(f"{place}.kind", problem) for problem in problems)
    if profile.vfio_kind is not None and not problems:
        problems = rules.kind_problems(profile.vfio_kind)
        yield from (Problem(f"{place}.vfio.kind", problem) for problem in problems)
    own = {nodes.role: nodes.to_node(f"/dev/{nodes.role}") for nodes in profile.nodes}
    nodes = [*own.values(), *(node.to_node(node.path) for node in profile.shared)]
    # Without a node the rest is never given, and has to be right all the same.
    entries = [profile.edits(tuple(nodes) or (DeviceNode("/dev/null", host_path="/dev/null"),))]
    if profile.vfio is not None:
        entries.append(ContainerEdits((profile.vfio.to_node("/dev/vfio/1"),)))
    found = dict.fromkeys(
        problem
        for edits in entries
        for problem in rules.device_problems(Device("0", edits, profile.sorted_annotations))
    )
    yield from (Problem(place, problem) for problem in found)


def _pairs(
    profiles: Sequence[_Placed], keys: Callable[[Profile], Iterable[Hashable]]
) -> Iterator[tuple[_Placed, _Placed]]:
    """Each two with a key in common, in order; all pairs of a thousand would take seconds."""
    having: dict[Hashable, list[int]] = {}
    pairs: set[tuple[int, int]] = set()
    for number, (_, profile) in enumerate(profiles):
        for key in dict.fromkeys(keys(profile)):
            earlier = having.setdefault(key, [])
            pairs.update((other, number) for other in earlier)
            earlier.append(number)
    return ((profiles[one], profiles[two]) for one, two in sorted(pairs))


def _claims(profile: Profile) -> Iterator[Hashable]:
    """What two profiles that want the same functions have in common."""
    rank = profile.match.rank
    return ((rank, device) for device in profile.match.devices or (None,))


def _files(profile: Profile) -> Iterator[Hashable]:
    """What two profiles with the same kind, or the same file, have in common."""
    return map(file_name, profile.kinds)


def _check_claim(place: str, profile: Profile, other: Profile) -> Iterator[Problem]:
    """Two of one rank that are as specific as each other must not want the same nodes."""
    if (
        profile.match.rank == other.match.rank
        and profile.fallback is other.fallback
        and profile.match.overlaps(other.match)
        and not profile.roles.isdisjoint(other.roles)
    ):
        yield Problem(
            f"{place}.match",
            f"profile {other.name} is as specific and claims nodes of the same functions",
        )


def _check_kinds(place: str, profile: Profile, other: Profile) -> Iterator[Problem]:
    """Two in one kind share names, but no function; two kinds must not share a file."""
    if profile.own_kind == other.own_kind and _share_functions(profile, other):
        yield Problem(
            f"{place}.kind",
            f"profile {other.name} publishes the same functions in {profile.own_kind} too, where a"
            " device has one entry: let one profile give all the nodes, or choose another kind",
        )
    for kind, other_kind in itertools.product(profile.kinds, other.kinds):
        if kind == other_kind:
            if profile.naming is not other.naming:
                yield Problem(
                    f"{place}.naming",
                    f"profile {other.name} publishes in {kind} too, under names by {other.naming}:"
                    " a name could be taken twice",
                )
        elif file_name(kind) == file_name(other_kind):
            yield Problem(
                f"{place}.kind",
                f"the files of {kind} and {other_kind} have the same name, {file_name(kind)}",
            )


def _share_functions(one: Profile, two: Profile) -> bool:
    """Whether both could publish one function at once: each gives nodes that the other does not."""
    named = (one.match.drivers, one.drivers, two.match.drivers, two.drivers)
    drivers = [set(map(normalise_driver, each)) for each in named if each]
    return (
        bool(one.nodes and two.nodes)
        and one.fallback is two.fallback
        and one.roles.isdisjoint(two.roles)
        and one.match.overlaps(two.match)
        and (not drivers or bool(set.intersection(*drivers)))
    )


def _check_unions(placed: Iterable[_Placed], others: Iterable[Profile]) -> Iterator[Problem]:
    """``all`` has the annotations of every profile in its kind: they must fit together."""
    kinds: dict[Kind, list[_Placed]] = {}
    for each in (*(("", other) for other in others), *placed):
        kinds.setdefault(each[1].own_kind, []).append(each)
    for kind, members in kinds.items():
        union = dict(pair for _, profile in members for pair in profile.annotations.items())
        place, last = members[-1]
        own = set(rules.annotation_problems(last.sorted_annotations))
        for problem in rules.annotation_problems(tuple(sorted(union.items()))):
            if place and problem not in own:
                sentence = f"with those of the other profiles of {kind}, which `all` has too"
                yield Problem(f"{place}.annotations", f"{sentence}: {problem}")
