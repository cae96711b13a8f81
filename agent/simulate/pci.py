"""The PCI bus of a simulated host: functions come and go, drivers bind and unbind.

The steps follow the kernel's, in its order:

- ``really_probe``: the ``driver`` link first, then what the driver makes, then the message
  ``bind``. If the probe fails the link goes again, and no message says that it was there.
- ``__device_release_driver``: the ``driver`` link goes first, then what the driver made, then
  ``unbind``. So a function can have nodes and no ``driver`` link for a moment.
- A function that is removed loses its driver, then its place on the bus and in its IOMMU group;
  then comes ``remove``, then its folder goes.

A driver may take its time between the link and the rest: ``working`` waits for it. A VFIO driver
does not leave while a process holds its node.
"""

import dataclasses
import errno
from typing import Final, Protocol

from agent.host.model import Address
from agent.simulate.devices import Device, Numbers, Sysfs
from agent.simulate.drivers import Bound, Drivers
from agent.simulate.hardware import Driver, Hardware

BUS: Final = "/sys/bus/pci"
GROUPS: Final = "/sys/kernel/iommu_groups"


@dataclasses.dataclass(slots=True)
class Function:
    """A PCI function that is there."""

    hardware: Hardware
    device: Device
    driver: Driver | None = None
    override: str | None = None
    bound: Bound | None = None
    group: int | None = None
    physfn: Address | None = None
    virtfns: dict[int, Address] = dataclasses.field(default_factory=dict)
    child: Device | None = None
    """The device on another bus that its driver makes, and whose driver makes the nodes."""
    hangs: bool = False
    """Whatever its driver does next does not end."""
    probe_errno: int = 0
    """With what its drivers' probes fail, for tests."""

    @property
    def address(self) -> Address:
        """Its address."""
        return self.hardware.address

    @property
    def busy(self) -> bool:
        """A VFIO driver has it and a process holds its node: unbinding waits for that."""
        return (
            self.driver is not None
            and self.driver.vfio
            and self.bound is not None
            and self.bound.held
        )


@dataclasses.dataclass(slots=True)
class _Group:
    number: int
    key: int | str
    members: int = 0


class DriverWorks(Protocol):
    """Waits until a driver is done in its probe or removal."""

    def __call__(self, function: Function, *, leaving: bool) -> None:
        """Wait.

        Args:
            function: What the driver is about to drive, or was driving.
            leaving: It is a removal.
        """


class PciBus:
    """The functions, by address, in the order in which they came.

    Args:
        sysfs: The devices of the host.
        drivers: What drivers make.
        iommu: There is an IOMMU, and so there are groups.
        working: Waits while a driver is at work in its probe or removal.
    """

    def __init__(
        self, sysfs: Sysfs, drivers: Drivers, *, iommu: bool, working: DriverWorks
    ) -> None:
        self._sysfs = sysfs
        self._tree = sysfs.tree
        self._drivers = drivers
        self._iommu = iommu
        self._working = working
        self._group_numbers = Numbers()
        self.children: Final = Numbers()
        """Numbers of the virtio bus."""
        self._groups: dict[int | str, _Group] = {}
        self.functions: Final[dict[Address, Function]] = {}
        self.loaded: Final[dict[str, Driver]] = {}
        """Drivers by name, in the order in which they were loaded."""
        self.dynamic_ids: Final[dict[str, set[tuple[int, int]]]] = {}
        """What ``new_id`` added to a driver's table."""
        for name in ("drivers_probe", "drivers_autoprobe", "rescan"):
            self._tree.file(f"{BUS}/{name}", "", 0o200)
        self._tree.folder(f"{BUS}/devices")
        self._tree.folder(f"{BUS}/drivers")
        self._tree.folder(GROUPS)

    # --- functions --------------------------------------------------------------------------------

    def add(self, hardware: Hardware, physfn: Address | None = None) -> Function:
        """Let a function appear, without a driver."""
        if hardware.address in self.functions:
            raise ValueError(f"there is a function at {hardware.address} already")
        device = Device(
            hardware.devpath,
            "pci",
            parent=hardware.devpath.rpartition("/")[0],
            on_bus=True,
            attributes=hardware.attributes,
            properties=hardware.properties,
        )
        function = Function(hardware, device, physfn=physfn)
        self._sysfs.appear(device)
        place = f"/sys{device.devpath}"
        # Reading this wakes a sleeping device; it is here so that a test can see that nobody does.
        # A VF says nothing of its ids there, which are those of its PF (SR-IOV 1.1, 3.4.1).
        ids = (0xFFFF, 0xFFFF) if physfn is not None else (hardware.vendor, hardware.device)
        header = b"".join(each.to_bytes(2, "little") for each in ids)
        self._tree.file(f"{place}/config", header.ljust(256, b"\0"))
        for name in ("remove", "rescan"):
            self._tree.file(f"{place}/{name}", "", 0o200)
        if self._iommu and hardware.group is not None:
            alone = hardware.group == ""
            self._join_group(function, hardware.address if alone else hardware.group)
        self.functions[hardware.address] = function
        self._sysfs.say("add", device)
        return function

    def remove(self, function: Function) -> None:
        """Take a function without a driver away."""
        del self.functions[function.address]
        self._tree.unlink(f"{BUS}/devices/{function.address}")
        self._leave_group(function)
        self._sysfs.remove(function.device)

    def below(self, function: Function) -> list[Function]:
        """The functions below a bridge, nearest first."""
        start = f"{function.device.devpath}/"
        return [f for f in self.functions.values() if f.device.devpath.startswith(start)]

    def _join_group(self, function: Function, key: int | str) -> None:
        group = self._groups.get(key)
        if group is None:
            self._group_numbers.want(*([key] if isinstance(key, int) else []))
            number = self._group_numbers.take()
            group = self._groups[key] = _Group(number, key)
            self._tree.folder(f"{GROUPS}/{number}/devices")
            self._tree.file(f"{GROUPS}/{number}/type", "DMA\n")
        group.members += 1
        function.group = group.number
        place = f"/sys{function.device.devpath}"
        self._tree.link(f"{place}/iommu_group", f"{GROUPS}/{group.number}")
        self._tree.link(f"{GROUPS}/{group.number}/devices/{function.address}", place)

    def _leave_group(self, function: Function) -> None:
        if function.group is None:
            return
        group = next(g for g in self._groups.values() if g.number == function.group)
        folder = f"{GROUPS}/{group.number}"
        self._tree.unlink(f"/sys{function.device.devpath}/iommu_group")
        self._tree.unlink(f"{folder}/devices/{function.address}")
        group.members -= 1
        if group.members == 0:
            del self._groups[group.key]
            self._group_numbers.free(group.number)
            self._tree.remove(folder)

    # --- drivers ----------------------------------------------------------------------------------

    def register(self, driver: Driver) -> None:
        """Add a driver, without looking for functions that it could drive."""
        bus = driver.child_bus or "pci"
        folder, module = f"/sys{driver.devpath}", f"/sys/module/{driver.module}"
        self._tree.folder(f"{module}/drivers")
        for name in ("bind", "unbind", "uevent", "new_id", "remove_id"):
            self._tree.file(f"{folder}/{name}", "", 0o200)
        self._tree.link(f"{folder}/module", module)
        self._tree.link(f"{module}/drivers/{bus}:{driver.name}", folder)
        self.loaded[driver.name] = driver

    def deregister(self, driver: Driver) -> None:
        """Take a driver that drives nothing away."""
        del self.loaded[driver.name]
        self.dynamic_ids.pop(driver.name, None)
        self._tree.remove(f"/sys{driver.devpath}")
        self._tree.remove(f"/sys/module/{driver.module}")

    def matches(self, driver: Driver, function: Function) -> bool:
        """``pci_match_device``: an override is the whole truth, else ids decide."""
        if driver.child_bus:
            return False
        if function.override is not None:
            return function.override == driver.name
        ids = (function.hardware.vendor, function.hardware.device)
        return driver.name in function.hardware.drivers or ids in self.dynamic_ids.get(
            driver.name, ()
        )

    def attach(self, function: Function) -> bool:
        """``device_attach``: give a function the first driver that matches and can drive it."""
        return any(
            self.matches(driver, function) and self.bind(function, driver) == 0
            for driver in tuple(self.loaded.values())
        )

    def bind(self, function: Function, driver: Driver) -> int:
        """Let a driver probe a function; 0, or the errno of the probe."""
        if function.driver is not None:
            return errno.EBUSY
        function.driver = driver
        self._sysfs.driver_links(function.device, driver.name)
        self._working(function, leaving=False)
        failure = function.probe_errno or self._probe(function, driver)
        if failure:
            self._sysfs.no_driver_links(function.device)
            self._sysfs.no_driver(function.device)
            function.driver = None
            return failure
        self._sysfs.say("bind", function.device)
        return 0

    def unbind(self, function: Function) -> None:
        """Take a function's driver away, if it has one."""
        if function.driver is None:
            return
        self._sysfs.no_driver_links(function.device)
        self._working(function, leaving=True)
        if function.bound is not None:
            function.bound.undo.close()
            function.bound = None
        if function.child is not None:
            self._sysfs.remove(function.child)
            self.children.free(int(function.child.name.removeprefix("virtio")))
            function.child = None
        function.driver = None
        self._sysfs.no_driver(function.device)
        self._sysfs.say("unbind", function.device)

    def _probe(self, function: Function, driver: Driver) -> int:
        hardware = function.hardware
        if driver.vfio:
            if function.group is None:
                return errno.EINVAL
            function.bound = self._drivers.vfio(hardware, function.group)
            return 0
        if driver.name not in hardware.drivers:
            # An override or a dynamic id led here: only a driver for anything copes with it.
            return 0 if driver.takes_anything else errno.ENODEV
        if hardware.makes.via is None:
            function.bound = self._drivers.native(hardware, driver.name, hardware.makes)
            return 0
        function.child = Device(
            f"{hardware.devpath}/virtio{self.children.take()}",
            "virtio",
            parent=hardware.devpath,
            on_bus=True,
            properties={"MODALIAS": "virtio:d00000010v00001AF4"},
        )
        self._sysfs.add(function.child)
        if hardware.makes.via in self.loaded:
            self.bind_child(function)
        return 0

    # --- drivers of what a function's driver makes ------------------------------------------------

    def bind_child(self, function: Function) -> None:
        """Let the child's driver probe it: no message of the PCI function tells."""
        child, via = function.child, function.hardware.makes.via
        if child is None or via is None or function.bound is not None:
            return
        self._sysfs.driver_links(child, via)
        bound = Bound()
        bound.undo.callback(self._child_unbound, child)
        self._drivers.display(bound, function.device.devpath, function.hardware.makes)
        bound.undo.callback(self._sysfs.no_driver_links, child)
        function.bound = bound
        self._sysfs.say("bind", child)

    def unbind_child(self, function: Function) -> None:
        """Take the child's driver away."""
        if function.child is not None and function.bound is not None:
            function.bound.undo.close()
            function.bound = None

    def _child_unbound(self, child: Device) -> None:
        self._sysfs.no_driver(child)
        self._sysfs.say("unbind", child)
