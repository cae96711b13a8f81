"""What a spec may contain, and the lowest ``cdiVersion`` that carries it.

Pure. Consumers ignore a whole file for one bad device, so the rules are checked per device, and
the bad one can be left out. Three sources: the CDI specification, the parsers of its consumers of
any age (which differ: what one of them refuses is refused here), and a few rules of our own that
are stricter, because what they forbid is accepted silently and means something else than it says.
A problem is one sentence without the name of the device: whoever reports it knows which it was.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from agent.cdi.spec import ContainerEdits, Device, DeviceNode, Hook, Kind, Mount, Spec
from agent.errors import SpecError

VERSIONS: Final = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
"""Released versions, oldest first. 0.8.0 and later bring nothing that a spec of ours contains."""

HOOK_NAMES: Final = frozenset(
    {
        "prestart",
        "createRuntime",
        "createContainer",
        "startContainer",
        "poststart",
        "poststop",
    },
)
"""The hooks of the OCI runtime specification."""

ALL: Final = "all"
"""The name of the entry that stands for every device of a kind."""

_LETTER_FIRST: Final = r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])"
# At least two characters: consumers' parsers before 2025 crash on a vendor or class of one.
_VENDOR: Final = re.compile(_LETTER_FIRST)
_CLASS: Final = re.compile(_LETTER_FIRST)
_DEVICE_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_MAX_VENDOR: Final = 253
_MAX_CLASS: Final = 63
_MAX_KIND: Final = 220  # the file is named after the kind, and a temporary one after the file
_MAX_PATH: Final = 4095
_MAX_QUOTED: Final = 80
_MAX_MODE: Final = 0o777  # above, Go's file modes and Unix's differ
_MAX_ID: Final = 2**32 - 2  # the last one means "no change"
_MAX_ANNOTATIONS: Final = 256 * 1024
_PERMISSIONS: Final = "rwm"
# What no name, path or value needs, and what YAML cannot carry as it is.
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_ENV: Final = re.compile(r"[^=]+=.*", re.DOTALL)
# Kubernetes' qualified names, as CDI demands them of annotations.
_ANNOTATION_PREFIX: Final = re.compile(
    r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*"
)
_ANNOTATION_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")


# --- rules ----------------------------------------------------------------------------------------


def kind_problems(kind: str) -> list[str]:
    """Say what is wrong with a kind; nothing if it may be published."""
    vendor, slash, class_ = kind.partition("/")
    if not slash or not vendor or not class_:
        return [f"kind {_quoted(kind)} is not of the form vendor.tld/class"]
    problems = []
    if not _VENDOR.fullmatch(vendor) or len(vendor) > _MAX_VENDOR or not _is_domain(vendor):
        problems.append(f"vendor {_quoted(vendor)} of the kind is not a domain name")
    if not _CLASS.fullmatch(class_) or len(class_) > _MAX_CLASS:
        problems.append(
            f"class {_quoted(class_)} of the kind is not 2 to {_MAX_CLASS} letters and"
            " digits, with -_. only between them",
        )
    if len(kind) > _MAX_KIND:
        problems.append(f"the kind has more than {_MAX_KIND} characters")
    return problems


def foreign_kind_problems(kind: str) -> list[str]:
    """Say why no consumer accepts a kind: the loosest of their rules, for files not ours."""
    vendor, _, class_ = kind.partition("/")
    if _VENDOR.fullmatch(vendor) and _CLASS.fullmatch(class_):
        return []
    return [f"kind {_quoted(kind)} is not of the form vendor.tld/class"]


def is_device_name(name: str) -> bool:
    """Whether consumers accept a name for a device."""
    return _DEVICE_NAME.fullmatch(name) is not None


def device_problems(device: Device) -> tuple[str, ...]:
    """Say what is wrong with one entry; nothing if a file with it is valid."""
    problems = []
    if not is_device_name(device.name):
        problems.append(
            f"device name {_quoted(device.name)} is not letters and digits,"
            " with -_.: only between them"
        )
    if not device.edits:
        problems.append("there is nothing that a container would get")
    problems.extend(_edits_problems(device.edits))
    problems.extend(annotation_problems(device.annotations))
    return tuple(problems)


def validate(spec: Spec) -> list[str]:
    """Say everything that is wrong with a spec; nothing if every consumer will accept it."""
    problems = kind_problems(spec.kind)
    problems.extend(annotation_problems(spec.annotations))
    if not spec.devices:
        problems.append("there is no device")
    for device in spec.devices:
        problems.extend(f"{device.name}: {problem}" for problem in device_problems(device))
    problems.extend(_repeated("device name", (device.name for device in spec.devices)))
    return problems


def check(spec: Spec) -> None:
    """Refuse a spec that a consumer would refuse.

    Raises:
        SpecError: Some rule is broken; the sentence says which.
    """
    if problems := validate(spec):
        raise SpecError(f"the spec of {spec.kind} is invalid: {'; '.join(problems)}")


def _quoted(text: str) -> str:
    """Quote what somebody else wrote: printable, and not at any length."""
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}...")


def _is_domain(vendor: str) -> bool:
    return all(0 < len(label) <= _MAX_CLASS for label in vendor.split("."))


def _edits_problems(edits: ContainerEdits) -> Iterator[str]:
    for node in edits.device_nodes:
        yield from _node_problems(node)
    for mount in edits.mounts:
        yield from _mount_problems(mount)
    for hook in edits.hooks:
        yield from _hook_problems(hook)
    yield from _env_problems(edits.env)
    for gid in edits.additional_gids:
        # Consumers skip 0 silently.
        if not 0 < gid <= _MAX_ID:
            yield f"additional group {gid} is not 1 to {_MAX_ID}"
    # Consumers let the last of two win, and say nothing.
    paths = [node.path for node in edits.device_nodes]
    paths.extend(mount.container_path for mount in edits.mounts)
    yield from _repeated("container path", paths)
    yield from _repeated("environment variable", (entry.partition("=")[0] for entry in edits.env))


def _node_problems(node: DeviceNode) -> Iterator[str]:
    yield from _path_problems("node", node.path)
    if node.host_path is not None and node.host_path != node.path:
        yield from _path_problems("node on the host", node.host_path)
    permissions = node.permissions
    if permissions is not None and (
        not permissions
        or len(set(permissions)) != len(permissions)
        or not set(permissions) <= set(_PERMISSIONS)
    ):
        yield (
            f"permissions {_quoted(permissions)} of {_quoted(node.path)} are not a selection of"
            f" {_PERMISSIONS}"
        )
    if node.file_mode is not None and not 0 <= node.file_mode <= _MAX_MODE:
        yield f"file mode {node.file_mode:#o} of {_quoted(node.path)} is not 0 to {_MAX_MODE:#o}"
    for what, number in (("owner", node.uid), ("group", node.gid)):
        if number is not None and not 0 <= number <= _MAX_ID:
            yield f"{what} {number} of {_quoted(node.path)} is not 0 to {_MAX_ID}"


def _mount_problems(mount: Mount) -> Iterator[str]:
    yield from _path_problems("mounted path", mount.host_path)
    yield from _path_problems("mount point", mount.container_path)
    for option in mount.options:
        if not option or "," in option or _UNPRINTABLE.search(option):
            yield f"mount option {_quoted(option)} is not one word"
    if mount.type is not None and (not mount.type or _UNPRINTABLE.search(mount.type)):
        yield f"mount type {_quoted(mount.type)} is not one word"


def _hook_problems(hook: Hook) -> Iterator[str]:
    if hook.hook_name not in HOOK_NAMES:
        yield f"hook {_quoted(hook.hook_name)} is none of {', '.join(sorted(HOOK_NAMES))}"
    yield from _path_problems("program of a hook", hook.path)
    yield from (
        f"argument {_quoted(argument)} of a hook has control characters"
        for argument in hook.args
        if _UNPRINTABLE.search(argument)
    )
    yield from _env_problems(hook.env)
    if hook.timeout is not None and not 0 < hook.timeout < 2**31:
        yield f"time-out {hook.timeout} of a hook is not a number of seconds above 0"


def _path_problems(what: str, path: str) -> Iterator[str]:
    parts = path.split("/")
    if (
        len(parts) < 2  # noqa: PLR2004 - "/x" has two: before and after the slash
        or parts[0]
        or not all(part and part not in {".", ".."} for part in parts[1:])
    ):
        yield f"{what} {_quoted(path)} is not an absolute path in its plain form"
    elif _UNPRINTABLE.search(path):
        yield f"{what} {_quoted(path)} has control characters"
    elif len(path.encode()) > _MAX_PATH:
        yield f"{what} {path[:40]}... has more than {_MAX_PATH} bytes"


def _env_problems(env: Iterable[str]) -> Iterator[str]:
    for entry in env:
        if not _ENV.fullmatch(entry) or _UNPRINTABLE.search(entry):
            yield f"environment variable {_quoted(entry)} is not of the form NAME=VALUE"


def annotation_problems(annotations: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Say what is wrong with the annotations of an entry or of a spec."""
    for key, value in annotations:
        prefix, slash, name = key.rpartition("/")
        # The check ignores the case of the key, as Kubernetes' does.
        if (
            (
                slash
                and (len(prefix) > _MAX_VENDOR or not _ANNOTATION_PREFIX.fullmatch(prefix.lower()))
            )
            or len(name) > _MAX_CLASS
            or not _ANNOTATION_NAME.fullmatch(name)
        ):
            yield f"annotation {_quoted(key)} is not of the form name or domain/name"
        if _UNPRINTABLE.search(value):
            yield f"annotation {_quoted(key)} has control characters"
    yield from _repeated("annotation", (key for key, _ in annotations))
    if (
        sum(
            len(key.encode("utf-8", "replace")) + len(value.encode("utf-8", "replace"))
            for key, value in annotations
        )
        > _MAX_ANNOTATIONS
    ):
        yield f"the annotations have more than {_MAX_ANNOTATIONS} bytes"


def _repeated(what: str, names: Iterable[str]) -> Iterator[str]:
    names = tuple(names)
    if len(set(names)) != len(names):
        for name, count in Counter(names).items():
            if count > 1:
                yield f"{what} {_quoted(name)} is given {count} times"


# --- versions -------------------------------------------------------------------------------------


def kind_version(kind: Kind) -> str:
    """Tell the lowest version whose rules allow this kind."""
    return "0.6.0" if "." in kind.partition("/")[2] else VERSIONS[0]


def device_version(device: Device) -> str:
    """Tell the lowest version that carries this entry."""
    edits = device.edits
    if edits.additional_gids:
        return "0.7.0"
    if device.annotations:
        return "0.6.0"
    if device.name[:1].isdecimal() or any(node.host_path for node in edits.device_nodes):
        return "0.5.0"
    if any(mount.type for mount in edits.mounts):
        return "0.4.0"
    return VERSIONS[0]


def minimum_version(spec: Spec) -> str:
    """Tell the lowest version that carries the whole spec: old engines read it, new ones too."""
    needed = {kind_version(spec.kind), *map(device_version, spec.devices)}
    if spec.annotations:
        needed.add("0.6.0")
    return max(needed, key=VERSIONS.index)


def fits(needed: str, pin: str | None) -> bool:
    """Whether content that needs this version may be written under a pin (None: no pin)."""
    return pin is None or VERSIONS.index(needed) <= VERSIONS.index(pin)
