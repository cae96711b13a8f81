"""One netlink socket of libudev: messages in, nothing decided; the only importer of pyudev.

A message is read once and as a whole by libudev, and of pyudev's ``Device`` five values are taken
that the message itself holds: its properties and driver are a snapshot that may be long untrue.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
from collections.abc import Collection
from typing import Final, Protocol, cast

import pyudev
import structlog

from agent.errors import SourceUnavailableError
from agent.host.model import DeviceNumber
from agent.host.uevent import Message, Source

_NETLINK_KOBJECT_UEVENT: Final = 15
_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
"""Errors of ``socket()`` that trying again can cure; the others say that it is not allowed here."""

_log = structlog.get_logger(__name__)


class _Uevent(Protocol):
    """The part of ``pyudev.Device`` that may be used: what the message itself holds."""

    @property
    def action(self) -> str | None: ...
    @property
    def device_path(self) -> str: ...
    @property
    def subsystem(self) -> str | None: ...
    @property
    def device_node(self) -> str | None: ...
    @property
    def device_number(self) -> int: ...


def _read_message(uevent: _Uevent, subsystems: Collection[str]) -> Message:
    """Read what a hint needs; each value costs about a microsecond, so nothing else is read.

    Of a message of another subsystem only that is read, and its action.

    Raises:
        ValueError: A value is not text.
    """
    action, subsystem = uevent.action or "", uevent.subsystem or ""
    if subsystem not in subsystems:
        return Message(action, "", subsystem)
    number = uevent.device_number  # packed; 0 is none
    return Message(
        action=action,
        devpath=uevent.device_path,
        subsystem=subsystem,
        node=uevent.device_node,
        number=DeviceNumber(os.major(number), os.minor(number)) if number else None,
    )


@functools.cache
def _context() -> object:
    """Load libudev, once: finding the library runs ldconfig.

    Raises:
        SourceUnavailableError: There is no libudev.
    """
    try:
        return cast("object", pyudev.Context())
    except ImportError as error:
        raise SourceUnavailableError(
            "the library libudev.so.1 cannot be loaded", hint="install libudev1 (or systemd-libs)"
        ) from error


class Connection(Protocol):
    """One open socket of a source."""

    @property
    def deaf(self) -> bool:
        """Whether it belongs to no multicast group, so that nothing will ever come."""

    def fileno(self) -> int:
        """The descriptor to wait on."""

    def receive(self) -> Message | None:
        """The next message, of whatever subsystem, or None if none waits.

        Raises:
            ValueError: It was malformed.
            OSError: The socket has an error.
        """

    def pending_error(self) -> int:
        """Read and clear the socket's error: an errno, or 0."""

    def close(self) -> None:
        """Close it."""


class _Netlink(Protocol):
    """The part of ``pyudev.Monitor`` that is used. Dropping the last reference closes it."""

    def fileno(self) -> int: ...
    def filter_by(self, subsystem: str) -> None: ...
    def set_receive_buffer_size(self, size: int) -> None: ...
    def start(self) -> None: ...
    def poll(self, timeout: float) -> _Uevent | None: ...


class _UdevConnection:
    """libudev's handle to read by, and our own of the same socket, to ask the kernel about it.

    Raises:
        SourceUnavailableError: This process cannot have such a socket.
        OSError: It cannot have one now.
    """

    def __init__(
        self, source: Source, subsystems: Collection[str], receive_buffer: int | None
    ) -> None:
        context = _context()
        try:
            # libudev does not say why it fails; the same system call does.
            socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_KOBJECT_UEVENT).close()
        except OSError as error:
            if error.errno in _PASSING:
                raise
            raise SourceUnavailableError(
                f"no socket for device events ({source}): {error.strerror}",
                hint="the service must be allowed AF_NETLINK (RestrictAddressFamilies=)",
            ) from error
        netlink = cast("_Netlink", pyudev.Monitor.from_netlink(context, source))
        if source == "udev":
            for subsystem in sorted(subsystems):
                netlink.filter_by(subsystem)
        if receive_buffer is not None:
            try:
                netlink.set_receive_buffer_size(receive_buffer)
            except PermissionError:  # above net.core.rmem_max, without CAP_NET_ADMIN
                _log.info("receive-buffer-refused", source=source, wanted=receive_buffer)
        netlink.start()
        self._netlink: _Netlink | None = netlink
        self._subsystems = subsystems
        self._socket = socket.socket(fileno=os.dup(netlink.fileno()))

    @property
    def deaf(self) -> bool:
        groups: int = self._socket.getsockname()[1]
        return groups == 0

    def fileno(self) -> int:
        return self._socket.fileno()  # ours, so that its life is in our hands

    def receive(self) -> Message | None:
        if self._netlink is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        try:
            uevent = self._netlink.poll(timeout=0)
            # Never `if not uevent`: a Device is a Mapping, and its length is slow to find.
            return None if uevent is None else _read_message(uevent, self._subsystems)
        except (OverflowError, MemoryError) as error:  # pyudev's names for two errnos
            raise ValueError(str(error)) from error

    def pending_error(self) -> int:
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

    def close(self) -> None:
        self._socket.close()
        self._netlink = None


def connect(
    source: Source, subsystems: Collection[str], receive_buffer: int | None = None
) -> Connection:
    """Open the socket of a source, which collects messages from here on.

    Args:
        source: Whose messages come.
        subsystems: Whose are read; udev's others are kept out by a filter in the socket.
        receive_buffer: Bytes that the kernel may keep for this socket; None is libudev's choice.

    Raises:
        SourceUnavailableError: This process cannot have such a socket.
        OSError: It cannot have one now.
    """
    return _UdevConnection(source, subsystems, receive_buffer)
