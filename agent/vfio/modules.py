"""Which VFIO driver suits a function best, and how a driver that is not there yet is had.

**The best driver.** A VFIO driver for certain hardware can do more than ``vfio-pci`` (migrate a
virtual machine, say). Such drivers announce themselves in ``modules.alias`` with aliases of their
own kind, ``vfio_pci:v00008086d…``, matched as kmod matches the ones for native drivers; the one
with the fewest wildcards is meant. What an alias names is a module. A driver's own name differs
from its module's in dashes at most, or is a link in ``/sys/module/<module>/drivers``.

**Loading.** The agent has no right to load modules. systemd's ``modprobe@.service`` loads them for
it; without systemd, modprobe is run, which works where the agent may.

`Aliases` is a value; reading it blocks and belongs in a thread.
"""

import fnmatch
import os
import re
from typing import Final

import msgspec

from agent.host.files import read_regular
from agent.host.model import Address, Function, is_vfio_driver, normalise_driver

GENERIC: Final = "vfio-pci"

_MAX_SIZE: Final = 64 * 1024 * 1024
"""Bytes of modules.alias; a distribution's kernel has one to two MiB."""
_ALIAS: Final = re.compile(rb"^alias vfio_pci:(\S{1,200}) ([A-Za-z0-9_-]{1,64})$", re.MULTILINE)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def is_driver_name(name: str) -> bool:
    """Whether a driver could be called so; anything else must get neither into a path nor argv."""
    return _NAME.fullmatch(name) is not None


class Aliases(msgspec.Struct, frozen=True):
    """The VFIO drivers that announce what they are for, the most specific alias first."""

    patterns: tuple[tuple[str, str], ...] = ()
    """Pairs of a pattern as ``v00008086d0000E212sv*sd*bc*sc*i*`` and a module."""

    @classmethod
    def parse(cls, content: bytes) -> "Aliases":
        """Find them in what ``modules.alias`` holds."""
        found = {
            (match[1].decode("ascii", "replace"), match[2].decode("ascii"))
            for match in _ALIAS.finditer(content)
        }
        return cls(tuple(sorted(found, key=lambda pair: (pair[0].count("*"), pair))))

    @classmethod
    def read(cls, path: str) -> "Aliases":
        """Read them; none if there is no such file or it is none.

        Args:
            path: As ``/lib/modules/6.12.0/modules.alias``.
        """
        try:
            return cls.parse(read_regular(path, _MAX_SIZE))
        except OSError:
            return cls()

    def best(self, function: Function) -> str:
        """The driver that suits a function best; ``vfio-pci`` suits every one."""
        name = modalias(function)
        for pattern, module in self.patterns:
            if fnmatch.fnmatchcase(name, pattern):
                return normalise_driver(module)
        return GENERIC

    def against(self, function: Function, driver: str) -> str | None:
        """Why a driver cannot be the VFIO driver of a function: what it is; None if it may be.

        A driver that announces nothing, as all did before Linux 5.16, is known by its name alone.

        Args:
            driver: Its name, or that of its module.
        """
        name = normalise_driver(driver)
        patterns = [each for each, module in self.patterns if normalise_driver(module) == name]
        if not patterns:
            return None if is_vfio_driver(name) else "is not a VFIO driver"
        if any(fnmatch.fnmatchcase(modalias(function), pattern) for pattern in patterns):
            return None
        return f"is a VFIO driver for other devices than {function.pci_id}"


def modalias(function: Function) -> str:
    """What a function is, as the kernel writes it in ``modalias`` after ``pci:``."""
    code = function.class_code
    return (
        f"v{function.vendor:08X}d{function.device:08X}"
        f"sv{function.subsystem_vendor or 0:08X}sd{function.subsystem_device or 0:08X}"
        f"bc{code >> 16 & 0xFF:02X}sc{code >> 8 & 0xFF:02X}i{code & 0xFF:02X}"
    )


def is_for_others(driver: str, sys: str, address: Address, *, modules: str) -> bool:
    """Whether a driver of the host announces devices, and not this one: it must not be bound to it.

    By ``driver_override`` the kernel binds any driver to any device (``pci_match_device``). What a
    module does not announce at all cannot be told. Blocks.

    Args:
        driver: Its name, if it is that of its module.
        sys: Where sysfs is.
        address: Of the function.
        modules: Where the modules of all kernels are.
    """
    return _announces(driver, sys, address, modules) is False


def is_meant(driver: str, sys: str, address: Address, *, modules: str) -> bool:
    """Whether a module of that name announces a device: no other is loaded for it.

    Who may claim devices must not thereby load any module there is. Blocks. See `is_for_others`.
    """
    return _announces(driver, sys, address, modules) is True


def _announces(driver: str, sys: str, address: Address, modules: str) -> bool | None:
    """Whether a module announces a device; None if it announces none at all, or nobody knows."""
    module = re.escape(driver.replace("-", "_")).replace("_", "[-_]").encode()
    try:
        name = read_regular(f"{sys}/bus/pci/devices/{address}/modalias", 4096).decode().strip()
        content = read_regular(aliases_path(modules), _MAX_SIZE)
    except (OSError, UnicodeDecodeError):
        return None
    found = re.findall(rb"^alias (pci:\S{1,200}) %s$" % module, content, re.MULTILINE)
    patterns = [each.decode("ascii", "replace") for each in found]
    return any(fnmatch.fnmatchcase(name, each) for each in patterns) if patterns else None


def aliases_path(modules: str = "/lib/modules") -> str:
    """Where the aliases of the running kernel's modules are."""
    return f"{modules}/{os.uname().release}/modules.alias"


def registered(sys: str, driver: str) -> str | None:
    """The kernel's name of a PCI driver that is there; None if it is not.

    Args:
        sys: Where sysfs is.
        driver: Its name, or that of its module, with dashes or underscores.
    """
    try:
        names = os.listdir(f"{sys}/bus/pci/drivers")
    except OSError:
        return None
    if driver in names:
        return driver
    wanted = normalise_driver(driver)
    for name in names:
        if normalise_driver(name) == wanted:
            return name
    try:
        links = os.listdir(f"{sys}/module/{wanted.replace('-', '_')}/drivers")
    except OSError:
        return None
    return next((name.removeprefix("pci:") for name in sorted(links) if name[:4] == "pci:"), None)


def load_command(driver: str, *, run: str = "/run") -> tuple[str, ...]:
    """The command that loads a driver's module.

    Args:
        driver: A driver's or module's name, checked by `is_driver_name`.
        run: Where the host's /run is; ``systemd/system`` in it says that systemd is in charge.
    """
    # In the name of a unit a dash would stand for a slash.
    module = driver.replace("-", "_")
    if os.path.isdir(f"{run}/systemd/system"):
        # Not `start`: some versions keep the unit active, and the module may be gone again.
        return ("systemctl", "restart", "--quiet", f"modprobe@{module}.service")
    return ("modprobe", "--quiet", "--", module)


def missing(driver: str, said: str, *, modules: str = "/lib/modules") -> str:
    """Why a driver is not there although loading its module was tried.

    Args:
        driver: Its name.
        said: What the command that loads modules had to say.
        modules: Where the modules of all kernels are.
    """
    folder = f"{modules}/{os.uname().release}"
    module = driver.replace("-", "_")
    if said:
        return f"its module {module} cannot be loaded: {said}"
    if not os.path.isdir(folder):
        return f"the running kernel's modules are not at {folder}"
    if not _has_module(folder, module):
        return f"{folder} has no module {module}"
    return f"loading its module {module} had no effect; `modprobe {module}` may say why"


def is_missing(driver: str, *, modules: str = "/lib/modules") -> bool:
    """Whether a driver that is not there has no module either, as far as that can be told.

    Args:
        driver: Its name.
        modules: Where the modules of all kernels are.
    """
    folder = f"{modules}/{os.uname().release}"
    return os.path.isdir(folder) and not _has_module(folder, driver.replace("-", "_"))


def _has_module(folder: str, module: str) -> bool:
    """Whether the running kernel has a module, built in or as a file."""
    name = re.escape(module).replace("_", "[-_]").encode()
    pattern = re.compile(rb"(?:^|/)%s\.ko(?:\.\w+)?(?::|$)" % name, re.MULTILINE)
    for index in ("modules.builtin", "modules.dep"):
        try:
            if pattern.search(read_regular(f"{folder}/{index}", _MAX_SIZE)):
                return True
        except OSError:
            continue
    return False
