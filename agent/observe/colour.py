"""Whether a terminal may be sent colours. Imports nothing: every command asks, `--help` too."""

from collections.abc import Mapping


def allows_colour(environ: Mapping[str, str]) -> bool:
    """Whether the user and the terminal want them: ``NO_COLOR`` is empty, and it is no dumb one."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
