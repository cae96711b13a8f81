"""Who else moves devices on this host: two programs must not move one.

- **driverctl** keeps one file for each device with a driver of its choice, ``pci-<address>``, and
  binds it again after each boot.
- **libvirt** writes the state of each running virtual machine as XML. A PCI device that it passes
  through stands in it as the ``<address>`` of a ``<source>``. With ``managed='yes'`` libvirt gives
  it back to the host when the machine ends; without, it counts on it all the same.

A state that cannot be read may name any device, so it counts for all: unknown refuses. Blocks for a
moment and belongs in a thread.
"""

import os
import xml.parsers.expat
from collections.abc import Iterable, Iterator
from typing import Final

from agent.host.files import read_regular
from agent.host.model import Address

DRIVERCTL: Final = "driverctl.d"
LIBVIRT: Final = ("libvirt/qemu", "libvirt/libxl", "libvirt/ch")
"""Below /run: the folders of libvirt's drivers that pass PCI devices through."""

_MAX_SIZE: Final = 4 * 1024 * 1024
"""Bytes. The state of a large machine has some 100 KiB."""
_MAX_DEPTH: Final = 64


def managers(
    addresses: Iterable[Address], *, etc: str = "/etc", run: str = "/run"
) -> tuple[tuple[Address, str], ...]:
    """Pairs of a function and who else manages it; none of a function that nobody does.

    Args:
        addresses: The functions that are asked about.
        etc: Where the host's /etc is.
        run: Where the host's /run is.
    """
    wanted = tuple(addresses)
    by_driverctl = [
        (address, "driverctl")
        for address in wanted
        if os.path.lexists(f"{etc}/{DRIVERCTL}/pci-{address}")
    ]
    by_libvirt = [
        (address, who)
        for who, passed in _machines(run)
        for address in wanted
        if passed is None or address in passed
    ]
    return (*by_driverctl, *by_libvirt)


def passed_through(state: bytes) -> frozenset[Address]:
    """The PCI functions that a virtual machine is given, by its state as libvirt writes it.

    Raises:
        ValueError: It is not XML, or XML of a kind that libvirt does not write.
    """
    found: set[Address] = set()
    path: list[str] = []

    def start(name: str, attributes: dict[str, str]) -> None:
        # <hostdev> and <interface type='hostdev'> alike: what the machine sees has its address
        # beside <source>, what the host has, within it.
        if name == "address" and path and path[-1] == "source":
            address = _address(attributes)
            if address is not None:
                found.add(address)
        path.append(name)
        if len(path) > _MAX_DEPTH:
            raise ValueError("it nests too deep")

    def end(_name: str) -> None:
        path.pop()

    def doctype(*_: object) -> None:
        # Entities can make much of little, and libvirt needs none.
        raise ValueError("it has a document type")

    parser = xml.parsers.expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(state, True)
    except xml.parsers.expat.ExpatError as error:
        raise ValueError(f"it is not XML: {error}") from error
    return frozenset(found)


def _machines(run: str) -> Iterator[tuple[str, frozenset[Address] | None]]:
    """Each running machine and what it is given; None if that cannot be read."""
    for folder in (f"{run}/{driver}" for driver in LIBVIRT):
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".xml"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            yield f"libvirt, perhaps: {folder} cannot be read ({error.strerror})", None
            continue
        for name in names:
            path = f"{folder}/{name}"
            try:
                passed = passed_through(read_regular(path, _MAX_SIZE))
            except FileNotFoundError:
                continue  # the machine has ended
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                yield f"libvirt, perhaps: {path} cannot be read ({reason})", None
            else:
                yield f"libvirt for the virtual machine {name.removesuffix('.xml')}", passed


def _address(attributes: dict[str, str]) -> Address | None:
    """``domain='0x0000' bus='0x03' slot='0x00' function='0x0'`` as we write it."""
    try:
        domain, bus, slot, function = (
            int(attributes.get(key, "0"), 0) for key in ("domain", "bus", "slot", "function")
        )
    except ValueError:
        return None
    if not (domain >> 32 == bus >> 8 == slot >> 5 == function >> 3 == 0) or "bus" not in attributes:
        return None
    return Address(f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}")
