"""Where effects find the host, and how long they may take; plain values."""

import msgspec


class Roots(msgspec.Struct, frozen=True):
    """Where the parts of the host are that effects read or write."""

    sys: str = "/sys"
    dev: str = "/dev"
    proc: str = "/proc"
    run: str = "/run"
    etc: str = "/etc"
    modules: str = "/lib/modules"


class Timeouts(msgspec.Struct, frozen=True):
    """How long each child may take, in seconds."""

    write: float = 30.0
    """A driver that leaves waits for its hardware, and one that comes loads firmware."""
    read: float = 10.0
    """``driver_override`` comes at once, unless somebody holds its device's lock. But on a busy
    host the child alone needs seconds to start. It is asked for beside the holders: less time for
    it than for them would save none."""
    holders: float = 10.0
    """Asking every process of the host."""
    load: float = 30.0
    """Loading a module."""
