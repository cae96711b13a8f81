"""Listening sockets: parsed from an address, bound by ourselves, or handed over by systemd.

Nothing here resolves a name: that can block, and a name that means another address tomorrow is no
way to say where a port is open to.
"""

import contextlib
import errno
import ipaddress
import os
import shutil
import socket
import stat
from collections.abc import Mapping, MutableMapping
from typing import Final

import msgspec

BACKLOG: Final = 32
"""Connections that the kernel keeps until they are accepted."""
UNIX_MODE: Final = 0o660
_FIRST_PASSED: Final = 3
"""SD_LISTEN_FDS_START of sd_listen_fds(3)."""
_MAX_PORT: Final = 65_535
_MAX_PATH: Final = 107
"""Bytes of ``sun_path`` without its end, unix(7)."""


class TcpAddress(msgspec.Struct, frozen=True):
    """A port of this host."""

    host: str
    port: int

    def __str__(self) -> str:
        """As it is written in the configuration."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class UnixAddress(msgspec.Struct, frozen=True):
    """A socket in the file system."""

    path: str
    group: str | None = None
    """Whose members may connect, beside the owner."""

    def __str__(self) -> str:
        """As it is written in the configuration."""
        return self.path


Address = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """Read an address: ``127.0.0.1:9478``, ``[::1]:9478`` or ``/run/cdi-agent/metrics.sock``.

    Raises:
        ValueError: It is none of these.
    """
    if text.startswith("/"):
        if len(os.fsencode(text)) > _MAX_PATH or "\0" in text:
            msg = f"a socket's path has at most {_MAX_PATH} bytes, and no NUL"
            raise ValueError(msg)
        return UnixAddress(text)
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""  # an IPv6 address without brackets: where it ends is anybody's guess
    valid = colon and port.isascii() and port.isdecimal() and int(port[:6]) <= _MAX_PORT
    with contextlib.suppress(ValueError):
        if valid:
            return TcpAddress(str(ipaddress.ip_address(host)), int(port))
    msg = (
        f"{text!r} is not a numeric address with a port, such as 127.0.0.1:9478 or "
        "[::1]:9478, nor the absolute path of a socket"
    )
    raise ValueError(msg)


def bind(address: Address) -> socket.socket:
    """Open a listening socket, non-blocking. May touch the file system: call it in a thread.

    The path of a Unix socket that nobody listens to any more is taken over; one that somebody
    listens to is as taken as a port.

    Raises:
        OSError: It is taken, or not allowed here, or its folder or group does not exist.
    """
    family = socket.AF_UNIX
    if isinstance(address, TcpAddress):
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setblocking(False)
        match address:
            case TcpAddress():
                # Connections of an earlier run that are still in TIME_WAIT do not hold the port.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if listener.family is socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                listener.bind((address.host, address.port))
            case UnixAddress():
                _take_over(address.path)
                try:
                    listener.bind(address.path)
                except FileNotFoundError as error:
                    raise OSError(errno.ENOENT, "its folder does not exist") from error
                # Before listen: until then nobody can connect, whatever the mode is.
                if address.group is not None:
                    _give_to(address.group, address.path)
                os.chmod(address.path, UNIX_MODE)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def unlink(listener: socket.socket) -> None:
    """Remove the path of a Unix socket of ours that is about to be closed; a port has none."""
    if listener.family is not socket.AF_UNIX:
        return
    path = listener.getsockname()
    with contextlib.suppress(OSError):
        if path and stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)


def passed_sockets(
    environ: MutableMapping[str, str], pid: int | None = None
) -> Mapping[str, tuple[socket.socket, ...]]:
    """The listening sockets that systemd handed over, by ``FileDescriptorName=``.

    The variables are removed, so that no child takes them for its own (sd_listen_fds(3)).

    Args:
        environ: ``LISTEN_PID``, ``LISTEN_FDS`` and ``LISTEN_FDNAMES`` are removed.
        pid: Our process id.
    """
    whose = environ.pop("LISTEN_PID", "")
    count = environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if whose != str(os.getpid() if pid is None else pid) or not count.isdecimal():
        return {}
    found: dict[str, tuple[socket.socket, ...]] = {}
    for number in range(int(count[:4])):
        try:
            listener = socket.socket(fileno=_FIRST_PASSED + number)
        except OSError:
            continue  # not open, or a FIFO or a file: not ours to know
        listener.set_inheritable(False)
        listener.setblocking(False)
        name = names[number] if number < len(names) else "unknown"
        found[name] = (*found.get(name, ()), listener)
    return found


def describe(listener: socket.socket) -> str:
    """Where a socket listens, as `parse_address` reads it."""
    name = listener.getsockname()
    return str(TcpAddress(name[0], name[1]) if isinstance(name, tuple) else UnixAddress(name))


def _give_to(group: str, path: str) -> None:
    """Let the members of a group connect.

    Raises:
        OSError: There is no such group, or it is not allowed.
    """
    try:
        shutil.chown(path, group=group)
    except LookupError as error:
        raise OSError(errno.ENOENT, f"there is no group {group}") from error


def _take_over(path: str) -> None:
    """Remove a socket that nobody listens to.

    Raises:
        OSError: Somebody does, or it is something else (then `bind` says so).
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
