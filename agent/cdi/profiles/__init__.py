"""The profiles that come with the program: one YAML file each, and what reads them.

A file is read once, at the start. The schema is ``cdi.profile``'s; a file that does not fit it is
a fault of the program, which a test finds and no user sees.
"""

from importlib import resources

import msgspec
import yaml

from agent.cdi.profile import Profile, ordered


def load_builtin() -> tuple[Profile, ...]:
    """Read the profiles that come with the program, in order of precedence."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return ordered(
        msgspec.convert(
            yaml.load(file.read_bytes(), Loader=loader),  # noqa: S506 - a safe one, in C if there
            Profile,
        )
        for file in resources.files(__name__).iterdir()
        if file.name.endswith(".yaml")
    )
