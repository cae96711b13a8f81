"""Who else moves devices on this host: two programs must not move one.

- **driverctl** keeps one file for each device with a driver of its choice, ``pci-<address>``, and
  binds it again after each boot.
- **libvirt** writes the state of each running virtual machine as XML. A device that it passes
  through stands in it as the ``<address>`` of a ``<source>``: of a PCI device, be it called so, a
  network card or an NVMe disk, or the UUID of a mediated device, which is a part of one. With
  ``managed='yes'`` libvirt gives it back to the host when the machine ends; without, it counts on
  it all the same. USB and SCSI devices have addresses of another kind there.

A state that cannot be read may name any device, so it counts for all: unknown refuses. Blocks for a
moment and belongs in a thread.
"""

import os
import re
import xml.parsers.expat
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from agent.host.files import read_regular
from agent.host.model import ADDRESS_PATTERN, Address

DRIVERCTL: Final = "driverctl.d"
LIBVIRT: Final = ("libvirt/qemu", "libvirt/libxl", "libvirt/ch")
"""Below /run: the folders of libvirt's drivers that pass PCI devices through."""

_MAX_SIZE: Final = 4 * 1024 * 1024
"""Bytes. The state of a large machine has some 100 KiB."""
_MAX_DEPTH: Final = 64

_PCI: Final = (("domain", 32), ("bus", 8), ("slot", 5), ("function", 3))
"""The parts of an address, and how many bits each has; libvirt takes one that is missing for 0."""
_NUMBER: Final = re.compile(r"0[xX](?P<hex>[0-9A-Fa-f]+)|(?P<octal>0[0-7]*)|(?P<decimal>[0-9]+)")
_UUID: Final = re.compile(r"[0-9A-Fa-f-]{32,36}")


def managers(
    addresses: Iterable[Address], *, etc: str = "/etc", run: str = "/run", sys: str = "/sys"
) -> tuple[tuple[Address, str], ...]:
    """Pairs of a function and who else manages it; none of a function that nobody does.

    Args:
        addresses: The functions that are asked about.
        etc: Where the host's /etc is.
        run: Where the host's /run is.
        sys: Where sysfs is.
    """
    wanted = tuple(addresses)
    by_driverctl = [
        (address, "driverctl")
        for address in wanted
        if os.path.lexists(f"{etc}/{DRIVERCTL}/pci-{address}")
    ]
    by_libvirt = [
        (address, who)
        for who, passed in _machines(run, sys)
        for address in wanted
        if passed is None or address in passed
    ]
    return (*by_driverctl, *by_libvirt)


def passed_through(state: bytes, sys: str = "/sys") -> frozenset[Address]:
    """The PCI functions that a virtual machine is given, by its state as libvirt writes it.

    Args:
        state: What libvirt has written.
        sys: Where sysfs is: it says which function a mediated device is a part of.

    Raises:
        ValueError: It is not XML, or XML of a kind that libvirt does not write.
    """
    found: set[Address] = set()
    path: list[tuple[str, dict[str, str]]] = []

    def start(name: str, attributes: dict[str, str]) -> None:
        # What the machine sees has its address beside <source>, what the host has, within it.
        if name == "address" and path and path[-1][0] == "source":
            match _type(attributes, path[-1][1], path[-2][1] if len(path) > 1 else {}):
                case "pci":
                    found.add(_address(attributes))
                case "mdev":
                    found.update(_parent(attributes.get("uuid", ""), sys))
                case _:
                    pass
        path.append((name, attributes))
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
    except (xml.parsers.expat.ExpatError, LookupError) as error:  # LookupError: its encoding
        raise ValueError(f"it is not XML: {error}") from error
    return frozenset(found)


def _machines(run: str, sys: str) -> Iterator[tuple[str, frozenset[Address] | None]]:
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
                passed = passed_through(read_regular(path, _MAX_SIZE), sys)
            except FileNotFoundError:
                continue  # the machine has ended
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                yield f"libvirt, perhaps: {path} cannot be read ({reason})", None
            else:
                yield f"libvirt for the virtual machine {name.removesuffix('.xml')}", passed


def _type(
    address: Mapping[str, str], source: Mapping[str, str], device: Mapping[str, str]
) -> str | None:
    """Of what kind an address is: the innermost that says so is right.

    ``<interface type='hostdev'>`` says nothing; libvirt has USB devices in none.
    """
    said = next((each["type"] for each in (address, source, device) if "type" in each), None)
    return "pci" if said == "hostdev" else said


def _address(attributes: Mapping[str, str]) -> Address:
    """``domain='0x0000' bus='0x03' slot='0x00' function='0x0'`` as we write it.

    Raises:
        ValueError: It is no address.
    """
    domain, bus, slot, function = (_number(attributes.get(key, "0"), bits) for key, bits in _PCI)
    if attributes.keys().isdisjoint(("domain", "bus", "slot")):
        raise _no_address()
    return Address(f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}")


def _number(text: str, bits: int) -> int:
    """A number of so many bits as C reads it, which libvirt does: 0x1f, 037 and 31 are one.

    Raises:
        ValueError: It is none.
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise _no_address()
    number = int(text, {"hex": 16, "octal": 8, "decimal": 10}[match.lastgroup or ""])
    if number >> bits:
        raise _no_address()
    return number


def _no_address() -> ValueError:
    return ValueError("it passes a device through that has no address")


def _parent(uuid: str, sys: str) -> Iterator[Address]:
    """The function that a mediated device is a part of, if there is such a device."""
    if _UUID.fullmatch(uuid) is not None:
        folder = os.path.realpath(f"{sys}/bus/mdev/devices/{uuid.lower()}")
        parent = os.path.basename(os.path.dirname(folder))
        if ADDRESS_PATTERN.fullmatch(parent) is not None:
            yield Address(parent)
