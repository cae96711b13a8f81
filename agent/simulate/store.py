"""What the kernel does when somebody writes to a file in sysfs, and with which errno it refuses.

A table from the file to what it does, after drivers/base/bus.c, drivers/pci/pci-sysfs.c and iov.c:

- ``bind``: EBUSY if the function has a driver; ENODEV if there is no such function, or the driver
  neither knows it nor is its override; else what the driver's probe says.
- ``unbind``: ENODEV unless that driver has it.
- ``drivers_probe``: ENODEV without such a function; else success, driver found or not.
- ``driver_override``: a newline alone clears it. (Zero bytes never reach the kernel's code.)
- What is not there is ENOENT; what cannot be written, EACCES, for root too.
"""

import dataclasses
import errno
import fnmatch
import os
import re
from collections.abc import Callable, Mapping
from typing import Final

from agent.host.model import Address
from agent.simulate.machine import Machine
from agent.simulate.pci import BUS, Function

_PAGE: Final = 4096
_ACTIONS: Final = frozenset(
    {"add", "remove", "change", "move", "online", "offline", "bind", "unbind"}
)


@dataclasses.dataclass(slots=True)
class _Fault:
    pattern: str
    error: int
    times: int | None


class Store:
    """Answers writes.

    Args:
        machine: What they change.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._faults: list[_Fault] = []
        self.bind_nothing: Final[set[Address]] = set()
        """Functions for which ``bind`` and ``drivers_probe`` succeed and do nothing."""
        self._on_bus: Mapping[str, Callable[[str], int]] = {
            "drivers_probe": self._probe,
            "drivers_autoprobe": self._autoprobe,
            "rescan": self._rescan,
        }
        self._on_driver: Mapping[str, Callable[[str, str], int]] = {
            "bind": self._bind,
            "unbind": self._unbind,
            "new_id": self._new_id,
            "remove_id": self._remove_id,
        }
        self._on_function: Mapping[str, Callable[[Function, str], int]] = {
            "driver_override": self._override,
            "remove": self._remove,
            "rescan": lambda _, text: self._rescan(text),
            "sriov_numvfs": self._numvfs,
            "sriov_drivers_autoprobe": self._sriov_autoprobe,
        }

    def fail(self, pattern: str, error: int, times: int | None) -> None:
        """Let writes to files that match a pattern fail, so many times or until `heal`."""
        self._faults.append(_Fault(pattern, error, times))

    def heal(self) -> None:
        """End all faults."""
        self._faults.clear()
        self.bind_nothing.clear()

    def write(self, given: str, text: str) -> int:
        """Do what writing this does; 0 or an errno.

        Args:
            given: A file of the host; links are followed.
            text: What is written in one call.
        """
        path = self._machine.sysfs.tree.resolve(given)
        if error := self._fault(given, path):
            return error
        if not self._machine.sysfs.tree.exists(path):
            return errno.ENOENT
        if not text and path.startswith("/sys/"):
            return 0
        if len(text) >= _PAGE:
            return errno.EINVAL
        return self._dispatch(path, text)

    def _fault(self, *paths: str) -> int:
        for fault in self._faults:
            if any(fnmatch.fnmatchcase(path, fault.pattern) for path in paths):
                if fault.times is not None:
                    fault.times -= 1
                    if fault.times == 0:
                        self._faults.remove(fault)
                return fault.error
        return 0

    def _dispatch(self, path: str, text: str) -> int:
        folder, name = os.path.split(path)
        if folder == BUS and name in self._on_bus:
            return self._on_bus[name](text)
        if os.path.dirname(folder) == f"{BUS}/drivers" and name in self._on_driver:
            return self._on_driver[name](os.path.basename(folder), text)
        devpath = folder.removeprefix("/sys")
        if name == "uevent" and devpath in self._machine.sysfs.devices:
            return self._synthetic(devpath, text)
        function = self._function(os.path.basename(folder))
        store = self._on_function.get(name)
        if function is None or store is None or function.device.devpath != devpath:
            return errno.EACCES
        return store(function, text)

    def _function(self, text: str) -> Function | None:
        return self._machine.bus.functions.get(Address(text.strip()))

    def _bind(self, driver: str, text: str) -> int:
        function = self._function(text)
        if function is None or not self._machine.bus.matches(
            self._machine.bus.loaded[driver], function
        ):
            return errno.ENODEV
        with self._machine.lock(function):
            if function.address in self.bind_nothing and function.driver is None:
                return 0
            return self._machine.bus.bind(function, self._machine.bus.loaded[driver])

    def _unbind(self, driver: str, text: str) -> int:
        function = self._function(text)
        if function is None or function.driver is None or function.driver.name != driver:
            return errno.ENODEV
        with self._machine.lock(function):
            self._machine.bus.unbind(function)
        return 0

    def _probe(self, text: str) -> int:
        function = self._function(text)
        if function is None:
            return errno.ENODEV
        with self._machine.lock(function):
            if function.driver is None and function.address not in self.bind_nothing:
                self._machine.bus.attach(function)
        return 0

    def _autoprobe(self, text: str) -> int:
        self._machine.autoprobe = text.strip() != "0"
        return 0

    def _rescan(self, text: str) -> int:
        if (wanted := _truth(text)) is None:
            return errno.EINVAL
        if wanted:
            self._machine.rescan()
        return 0

    def _override(self, function: Function, text: str) -> int:
        with self._machine.lock(function):
            self._machine.override(function, text.partition("\n")[0] or None)
        return 0

    def _remove(self, function: Function, text: str) -> int:
        if (wanted := _truth(text)) is None:
            return errno.EINVAL
        if wanted:
            self._machine.unplug(function, keep=True)
        return 0

    def _numvfs(self, function: Function, text: str) -> int:
        try:
            count = int(text, 0)
        except ValueError:
            return errno.EINVAL
        if count < 0:
            return errno.EINVAL
        with self._machine.lock(function):
            return self._machine.create_vfs(function, count)

    def _sriov_autoprobe(self, function: Function, text: str) -> int:
        if (wanted := _truth(text)) is None:
            return errno.EINVAL
        path = f"/sys{function.device.devpath}/sriov_drivers_autoprobe"
        self._machine.sysfs.tree.file(path, f"{int(wanted)}\n")
        return 0

    def _new_id(self, driver: str, text: str) -> int:
        """Add an id to a driver's table: it then takes *every* free function of that id."""
        if (ids := _ids(text)) is None:
            return errno.EINVAL
        bus = self._machine.bus
        known = bus.dynamic_ids.setdefault(driver, set())
        if ids in known:
            return errno.EEXIST
        known.add(ids)
        for function in tuple(bus.functions.values()):
            if function.driver is None and bus.matches(bus.loaded[driver], function):
                with self._machine.lock(function):
                    bus.bind(function, bus.loaded[driver])
        return 0

    def _remove_id(self, driver: str, text: str) -> int:
        if (ids := _ids(text)) is None:
            return errno.EINVAL
        known = self._machine.bus.dynamic_ids.get(driver, set())
        if ids not in known:
            return errno.ENODEV
        known.discard(ids)
        return 0

    def _synthetic(self, devpath: str, text: str) -> int:
        """A message about a device because somebody asked for it: ``udevadm trigger``."""
        action = text.strip().partition(" ")[0]
        if action not in _ACTIONS:
            return errno.EINVAL
        sysfs = self._machine.sysfs
        sysfs.say(action, sysfs.devices[devpath], SYNTH_UUID="0")
        return 0


def _truth(text: str) -> bool | None:
    """A number as the kernel reads it from a file that wants none but 0 and others."""
    try:
        return int(text, 0) != 0
    except ValueError:
        return None


def _ids(text: str) -> tuple[int, int] | None:
    """Vendor and device as ``new_id`` wants them: hexadecimal, blank between."""
    match = re.match(r"\s*([0-9a-fA-F]{1,4})\s+([0-9a-fA-F]{1,4})(?:\s|$)", text)
    return None if match is None else (int(match[1], 16), int(match[2], 16))
