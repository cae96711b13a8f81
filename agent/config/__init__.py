"""The configuration: the settings that each package defines, put together and read from a file.

A key is one row in its package's ``settings.py`` and one in ``config.example.yaml``; this module
knows only the sections, and what rules hold between them. It reads all of a file or refuses all of
it: ``ConfigError`` names every fault with its key, its line and what is allowed there.

``example.yaml`` is a link to ``config.example.yaml``, and so comes along with every installation.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec

from agent.cdi import rules
from agent.cdi.directory import printable
from agent.cdi.merge import merge
from agent.cdi.profile import Profile
from agent.cdi.profiles import load_builtin
from agent.cdi.settings import CdiSettings
from agent.cdi.spec import Device, DeviceNode
from agent.config.build import Builder, Fault, duration
from agent.control.settings import ControlSettings, MetricsSettings
from agent.errors import ConfigError
from agent.host import document
from agent.host.files import read_regular
from agent.host.model import Address, HoldMode, parse_address
from agent.host.settings import AbsolutePath, HostSettings, normalise
from agent.observe.settings import LogSettings
from agent.reconcile.settings import ReconcileSettings
from agent.vfio.checks import find_nonsense
from agent.vfio.model import Prepare
from agent.vfio.settings import VfioSettings

DEFAULT_PATH: Final = Path("/etc/cdi-agent/config.yaml")

MAX_SIZE: Final = 2**20
"""Bytes of a configuration; a profile for every device id there is takes a tenth of it."""

_BOUNDS: Final = document.Bounds(size=MAX_SIZE, values=100_000, depth=24)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration; without a file, all of it has defaults."""

    state_directory: AbsolutePath = "/var/lib/cdi-agent"
    """Where the agent remembers what it wrote, so that it can clean up after itself."""
    host: HostSettings = HostSettings()
    """What is looked at, and where."""
    cdi: CdiSettings = CdiSettings()
    """What is written, and where."""
    reconcile: ReconcileSettings = ReconcileSettings()
    """How long things are waited for."""
    log: LogSettings = LogSettings()
    """What is logged, and in which form."""
    metrics: MetricsSettings = MetricsSettings()
    """Where metrics and health can be asked for."""
    control: ControlSettings = ControlSettings()
    """Where the agent takes orders."""
    vfio: VfioSettings = VfioSettings()
    """How devices are claimed for virtual machines."""

    def __post_init__(self) -> None:
        """Give the path the one form in which paths are compared."""
        msgspec.structs.force_setattr(self, "state_directory", normalise(self.state_directory))


def load(path: Path | None = None) -> Config:
    """Read the configuration. Blocks: in a running loop call it in a thread.

    Args:
        path: The file; None means the default one, which need not exist.

    Raises:
        ConfigError: It cannot be read or used.
    """
    file = DEFAULT_PATH if path is None else path
    shown = printable(str(file))
    try:
        content = read_regular(str(file), _BOUNDS.size)
    except FileNotFoundError as error:
        if _leads_nowhere(file):
            raise ConfigError(f"{shown} is behind a symbolic link that leads nowhere") from error
        if path is None:
            return Config()
        raise ConfigError(f"{shown} does not exist") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{shown} cannot be read: {reason}") from error
    return parse(content, shown)


def _leads_nowhere(file: Path) -> bool:
    """Whether it is not there for a link to what is not there, itself or in a folder's place.

    That is no wish to have the defaults: what the link leads to may be mounted late.
    """
    return any(path.is_symlink() and not path.exists() for path in (file, *file.parents))


def parse(content: str | bytes, source: str = "the configuration") -> Config:
    """Read the text of a configuration.

    Args:
        content: YAML.
        source: What to call it in an error.

    Raises:
        ConfigError: It cannot be used; ``faults`` has everything that is wrong with it.
    """
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    builder = Builder()
    try:
        config = builder.build(document.read(raw, _BOUNDS), Config)
    except document.DocumentError as error:
        raise _refusal(source, [Fault("", error.line, str(error))]) from error
    if config is not None:
        for sentences in _contradictions(config):
            if all(map(builder.is_sound, sentences)):
                given = (key for key in sentences if key in builder.lines)
                key = next(given, next(iter(sentences)))
                builder.fault(key, sentences[key])
        if builder.is_sound("cdi.profiles"):
            for path, text in _profile_faults(config, with_pin=builder.is_sound("cdi.version")):
                builder.fault(path, text)
    if config is None or builder.faults:
        raise _refusal(source, builder.faults)
    return config


def require_agreement(config: Config) -> None:
    """Refuse settings that are right one by one and cannot hold together.

    Raises:
        ConfigError: There are some.
    """
    found = [list(sentences.items())[-1] for sentences in _contradictions(config)]
    if found:
        faults = [Fault(key, None, text) for key, text in found]
        raise _refusal("the configuration, with what only a restart changes as it was,", faults)


def profiles(config: Config) -> tuple[Profile, ...]:
    """The profiles that hold, in order of precedence: the configuration's, then our own."""
    return merge(config.cdi.profiles, _builtin())[0]


def example() -> str:
    """Every key with its default and what it is for, as a file that can be used."""
    return resources.files(__name__).joinpath("example.yaml").read_text()


@functools.cache
def _builtin() -> tuple[Profile, ...]:
    return load_builtin()


def _refusal(source: str, faults: list[Fault]) -> ConfigError:
    ordered = sorted(faults, key=lambda fault: fault.line or 0)
    return ConfigError(
        f"{source} cannot be used",
        hint="every key with its default: cdi-agent check-config --example",
        faults=tuple(map(str, ordered)),
    )


# --- settings that are right one by one and cannot hold together ----------------------------------

_Sentences = Mapping[str, str]
"""What is wrong, said of each key that is involved: whichever was given is to blame."""


def _contradictions(config: Config) -> Iterator[_Sentences]:
    yield from _times(config.reconcile)
    yield from _same_paths(config)
    yield from _assignments(config.vfio, config.cdi.ignored)


def _times(times: ReconcileSettings) -> Iterator[_Sentences]:
    for short, least, long, most in (
        ("reconcile.settle", times.settle, "reconcile.settle_max", times.settle_max),
        ("reconcile.retry_first", times.retry_first, "reconcile.retry_max", times.retry_max),
    ):
        if least > most:
            yield {
                short: f"it must not be longer than {long}, which is {duration(most)}",
                long: f"it must not be shorter than {short}, which is {duration(least)}",
            }


def _same_paths(config: Config) -> Iterator[_Sentences]:
    apart = [
        ("state_directory", config.state_directory, "cdi.directory", config.cdi.directory),
        ("metrics.listen", config.metrics.listen, "control.socket", config.control.socket),
        *(
            ("state_directory", config.state_directory, "cdi.other_directories", directory)
            for directory in config.cdi.other_directories
            if _place(directory) != _place(config.cdi.directory)
        ),
    ]
    for one, path, other, other_path in apart:
        if path and other_path and _place(path) == _place(other_path):
            yield {
                one: f"it must be another path than {other}, which has {other_path}",
                other: f"it must be another path than {one}, which has {path}",
            }


def _place(path: str) -> str:
    """What a path is compared by: /var/run leads to /run on every host of today."""
    return re.sub(r"\A/var/run(?=/)", "/run", normalise(path)) if path.startswith("/") else path


def _assignments(vfio: VfioSettings, ignored: frozenset[str]) -> Iterator[_Sentences]:
    ids: dict[str, str] = {}
    devices: dict[Address, str] = {}
    for number, claim in enumerate(vfio.assign):
        place = f"vfio.assign[{number}]"
        order = Prepare(
            claim.id,
            HoldMode(claim.mode),
            tuple(map(parse_address, claim.devices)),
            named=tuple(map(parse_address, claim.named)),
            driver=claim.driver,
        )
        for problem in find_nonsense(order):
            yield {place: problem.sentence}
        if (first := ids.setdefault(claim.id, place)) != place:
            yield {f"{place}.id": f"{first} has the id {claim.id!r} too"}
        for key in ("devices", "named"):
            for index, text in enumerate(getattr(claim, key)):
                inner, address = f"{place}.{key}[{index}]", parse_address(text)
                if address in ignored:
                    yield {inner: f"{address} is in cdi.ignore too, and so is never moved"}
                first = devices.setdefault(address, inner) if key == "devices" else inner
                if first != inner:
                    yield {inner: f"{address} is given twice, first as {first}"}


def _profile_faults(config: Config, *, with_pin: bool) -> Iterator[tuple[str, str]]:
    merged, problems = merge(config.cdi.profiles, _builtin())
    for problem in problems:
        yield f"cdi.profiles{problem.path}", problem.sentence
    pin = config.cdi.version
    if problems or pin is None or not with_pin:
        return
    given = {profile.get("name"): number for number, profile in enumerate(config.cdi.profiles)}
    for profile in merged:
        edits = profile.edits((DeviceNode("/dev/null", host_path="/dev/null"),))
        device = Device("0", edits, profile.sorted_annotations)
        versions = (rules.device_version(device), *map(rules.kind_version, profile.kinds))
        needed = max(versions, key=rules.VERSIONS.index)
        if profile.name in given and not rules.fits(needed, pin):
            yield (
                f"cdi.profiles[{given[profile.name]}]",
                f"its entries need cdiVersion {needed}, and cdi.version allows {pin} at most",
            )
