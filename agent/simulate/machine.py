"""What happens to a simulated host as a whole: functions are plugged, modules loaded, VFs made.

Everything here runs under the kernel's lock (`Kernel`), and waits, where the real kernel would, by
handing that lock on. The lock of one device is a thing of its own: who holds it (a driver that
hangs in its removal, or waits for a virtual machine to close its node) blocks every other change
of that device, and every reader of ``driver_override``: as long as it is held, that file is a pipe.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec
from msgspec import structs

from agent.host.model import Address, DeviceNumber
from agent.simulate.devices import Device, NodeOf, Sysfs
from agent.simulate.drivers import Bound, Drivers, Majors, VfioKind
from agent.simulate.hardware import Driver, Hardware, Makes
from agent.simulate.pci import Function, PciBus

VFIO: Final = "/dev/vfio/vfio"
SHARED: Final[Mapping[str, DeviceNumber]] = {
    VFIO: DeviceNumber(10, 196),
    "/dev/iommu": DeviceNumber(10, 125),
    "/dev/kfd": DeviceNumber(508, 0),
}
_SHARED_MODES: Final = {VFIO: 0o666, "/dev/iommu": 0o660}

WaitFor = Callable[[Callable[[], bool]], object]
"""Waits until something is true, without keeping the kernel's lock meanwhile."""

BRIDGE: Final = Hardware(Address("0000:00:00.0"), 0x8086, 0x7ECC, 0x060400, drivers=("pcieport",))
"""What a bridge is like that nobody described."""


class Features(msgspec.Struct, frozen=True):
    """What kind of host it is."""

    iommu: bool = True
    vfio: VfioKind = VfioKind.BOTH
    devtmpfs: bool = True
    """/dev is the kernel's own, and not a container's copy."""
    drivers: tuple[str, ...] = ("pcieport", "xe", "i915", "vfio-pci")
    """What is loaded at the start; udevd loads others for what is plugged in."""
    majors: Majors = msgspec.field(default_factory=Majors)
    shared: Mapping[str, DeviceNumber] = msgspec.field(default_factory=lambda: SHARED)
    """The nodes that VFIO (``/dev/vfio/vfio``, ``/dev/iommu``) and amdgpu (``/dev/kfd``) make for
    all devices when they are loaded."""


class Machine:
    """The host's devices and drivers, and what can be done to them.

    Args:
        sysfs: Its devices in sysfs.
        features: What kind of host it is.
        wait_for: Waits until something is true.
    """

    def __init__(self, sysfs: Sysfs, features: Features, wait_for: WaitFor) -> None:
        self.sysfs: Final = sysfs
        self.features: Final = features
        self.drivers: Final = Drivers(sysfs, features.majors, features.vfio)
        self.bus: Final = PciBus(
            sysfs, self.drivers, iommu=features.iommu, working=self._driver_works
        )
        self.autoprobe = True
        self._wait_for = wait_for
        self._locked: set[Address] = set()
        self._removed: dict[Address, Hardware] = {}
        self._platform: dict[str, Bound] = {}
        self._shared: dict[str, Device] = {}

    # --- functions --------------------------------------------------------------------------------

    def plug(self, hardware: Iterable[Hardware]) -> None:
        """Let functions appear together: all are there before the first driver is tried.

        Raises:
            ValueError: Two functions would have one address; nothing has happened.
        """
        hardware = tuple(hardware)
        addresses = [one.address for one in hardware]
        if taken := self.bus.functions.keys() & set(addresses):
            raise ValueError(f"there is a function at {min(taken)} already")
        if len(set(addresses)) < len(addresses):
            raise ValueError("two functions have one address")
        added: list[Function] = []
        for one in hardware:
            for depth, bridge in enumerate(one.bridges):
                if bridge not in self.bus.functions:
                    above = structs.replace(
                        BRIDGE, address=bridge, bridges=one.bridges[:depth], root=one.root
                    )
                    added.append(self.bus.add(above))
            added.append(self.bus.add(one))
        for function in added:
            self._removed.pop(function.address, None)
            if self.autoprobe:
                self._attach(function)

    def unplug(self, function: Function, *, keep: bool = False) -> None:
        """Let a function go, and before it all below it.

        Args:
            function: The function.
            keep: It stays in its slot, and `rescan` finds it again.
        """
        for below in reversed(self.bus.below(function)):
            # A VF may have gone with its PF.
            if below.address in self.bus.functions:
                self._unplug_one(below, keep=keep)
        self._unplug_one(function, keep=keep)

    def _unplug_one(self, function: Function, *, keep: bool) -> None:
        is_vf = function.physfn is not None
        if function.physfn is not None:
            self._unlink_vf(function, function.physfn)
        with self.lock(function):
            self.bus.unbind(function)
            self.bus.remove(function)
        if keep and not is_vf:
            self._removed[function.address] = function.hardware

    def rescan(self) -> None:
        """Find the functions again that were removed and not unplugged."""
        self.plug(sorted(self._removed.values(), key=lambda hardware: hardware.devpath))

    def _driver_works(self, function: Function, *, leaving: bool) -> None:
        """What takes a driver its time in a probe or a removal, between the links and the rest."""
        self._wait_for(lambda: not function.hangs)
        if leaving:
            self._wait_for(lambda: not function.busy)
            self.remove_vfs(function)

    # --- the lock of a device ---------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self, function: Function) -> Iterator[None]:
        """Hold a device's lock; waits for it."""
        address = function.address
        self._wait_for(lambda: address not in self._locked)
        if not function.busy and not function.hangs:
            # It will be free again before anybody else has the kernel's lock: none can notice.
            yield
            return
        self.seize(function)
        try:
            yield
        finally:
            self.let_go(function)

    def seize(self, function: Function) -> None:
        """Take a device's lock for an unknown time: who reads ``driver_override`` now waits."""
        self._locked.add(function.address)
        for path in self._locked_files(function):
            self.sysfs.tree.fifo(path)

    def let_go(self, function: Function) -> None:
        """Release a device's lock: those who wait for its files read them now."""
        self._locked.discard(function.address)
        if function.address not in self.bus.functions:
            return
        for path in self._locked_files(function):
            # Open for both, which never waits, a pipe lets its waiting readers in; they keep it
            # when the file takes its place, and read what was written and then the end.
            pipe = os.open(self.sysfs.tree.real(path), os.O_RDWR | os.O_NONBLOCK)
            try:
                content = self._content(function, os.path.basename(path))
                os.write(pipe, content.encode())
                self.sysfs.tree.file(path, content)
            finally:
                os.close(pipe)

    def _locked_files(self, function: Function) -> tuple[str, ...]:
        folder = f"/sys{function.device.devpath}"
        names = (
            ("driver_override", "sriov_numvfs")
            if function.hardware.total_vfs
            else ("driver_override",)
        )
        return tuple(f"{folder}/{name}" for name in names)

    def _content(self, function: Function, name: str) -> str:
        if name == "sriov_numvfs":
            return f"{len(function.virtfns)}\n"
        return f"{'(null)' if function.override is None else function.override}\n"

    def override(self, function: Function, driver: str | None) -> None:
        """Say which driver alone may have a function; no message tells."""
        function.override = driver
        path = f"/sys{function.device.devpath}/driver_override"
        self.sysfs.tree.file(path, self._content(function, "driver_override"))

    # --- virtual functions ------------------------------------------------------------------------

    def create_vfs(self, function: Function, count: int) -> int:
        """Let VFs appear; 0 or an errno, as ``sriov_numvfs`` answers."""
        hardware = function.hardware
        if count > hardware.total_vfs:
            return errno.ERANGE
        if count == len(function.virtfns):
            return 0
        if function.driver is None or function.driver.name not in hardware.drivers:
            return errno.ENOENT
        if count == 0:
            self.remove_vfs(function)
            return 0
        if function.virtfns:
            return errno.EBUSY
        autoprobe = f"/sys{function.device.devpath}/sriov_drivers_autoprobe"
        attaches = self.autoprobe and self.sysfs.tree.read(autoprobe).strip() != "0"
        self.add_vfs(function, count, self._attach if attaches else lambda _: None)
        return 0

    def _attach(self, function: Function) -> None:
        with self.lock(function):
            self.bus.attach(function)

    def add_vfs(self, function: Function, count: int, attach: Callable[[Function], None]) -> None:
        """Let VFs appear, whatever their PF is.

        Args:
            function: The PF.
            count: How many.
            attach: Gives each its driver.
        """
        for index in range(count):
            attach(self._add_vf(function, index))
        self._count_vfs(function)

    def _add_vf(self, pf: Function, index: int) -> Function:
        vf = self.bus.add(pf.hardware.virtual_function(index), physfn=pf.address)
        tree = self.sysfs.tree
        pf.virtfns[index] = vf.address
        # On the bus first, then linked: for a moment it is a function like any other.
        tree.link(f"/sys{pf.device.devpath}/virtfn{index}", f"/sys{vf.device.devpath}")
        tree.link(f"/sys{vf.device.devpath}/physfn", f"/sys{pf.device.devpath}")
        self.sysfs.say("change", vf.device)
        return vf

    def remove_vfs(self, function: Function) -> None:
        """Let all VFs of a function go."""
        if not function.virtfns:
            return
        for address in reversed(tuple(function.virtfns.values())):
            vf = self.bus.functions[address]
            self._unplug_one(vf, keep=False)
        self._count_vfs(function)

    def _unlink_vf(self, vf: Function, physfn: Address) -> None:
        """Take the links between a VF and its PF away: before it goes it is, again, like any."""
        pf = self.bus.functions[physfn]
        index = next(index for index, address in pf.virtfns.items() if address == vf.address)
        del pf.virtfns[index]
        vf.physfn = None
        self.sysfs.tree.unlink(f"/sys{pf.device.devpath}/virtfn{index}")
        self.sysfs.tree.unlink(f"/sys{vf.device.devpath}/physfn")

    def _count_vfs(self, function: Function) -> None:
        path = f"/sys{function.device.devpath}/sriov_numvfs"
        self.sysfs.tree.file(path, self._content(function, "sriov_numvfs"))
        self.sysfs.say("change", function.device)

    # --- modules ----------------------------------------------------------------------------------

    def load(self, driver: Driver) -> None:
        """Load a driver's module: it takes what it matches and nobody has."""
        if driver.name in self.bus.loaded:
            return
        self.sysfs.tell("add", f"/module/{driver.module}", "module")
        self.bus.register(driver)
        if driver.vfio and self.features.vfio.group:
            self.share(VFIO)
        if driver.vfio and self.features.vfio.cdev:
            self.share("/dev/iommu")
        if driver.kfd:
            self.share("/dev/kfd")
        for function in tuple(self.bus.functions.values()):
            if driver.child_bus and function.hardware.makes.via == driver.name:
                self.bus.bind_child(function)
            elif self.autoprobe and function.driver is None and self.bus.matches(driver, function):
                with self.lock(function):
                    self.bus.bind(function, driver)
        self.sysfs.tell("add", driver.devpath, "drivers")

    def unload(self, driver: Driver) -> int:
        """Unload a driver's module, from its devices too; 0 or an errno."""
        if driver.name not in self.bus.loaded:
            return errno.ENOENT
        users = [f for f in self.bus.functions.values() if self._drives(driver, f)]
        if any(function.bound is not None and function.bound.held for function in users):
            return errno.EAGAIN  # what delete_module gives for a module in use
        for function in reversed(users):  # as driver_detach does
            if driver.child_bus:
                self.bus.unbind_child(function)
                continue
            with self.lock(function):
                self.bus.unbind(function)
        self.bus.deregister(driver)
        self.sysfs.tell("remove", driver.devpath, "drivers")
        if driver.kfd and (kfd := self._shared.pop("/dev/kfd", None)) is not None:
            self.sysfs.remove(kfd)
        self.sysfs.tell("remove", f"/module/{driver.module}", "module")
        return 0

    def _drives(self, driver: Driver, function: Function) -> bool:
        if driver.child_bus:
            return function.child is not None and function.hardware.makes.via == driver.name
        return function.driver is not None and function.driver.name == driver.name

    def share(self, path: str) -> None:
        """Add a device that is there once and belongs to a module, if this host has it."""
        number = self.features.shared.get(path)
        if number is None or path in self._shared:
            return
        name = path.removeprefix("/dev/")
        kind = "kfd" if name == "kfd" else "misc"
        device = self._shared[path] = Device(
            f"/devices/virtual/{kind}/{os.path.basename(name)}",
            kind,
            node=NodeOf(name, number, _SHARED_MODES.get(path, 0o600)),
        )
        self.sysfs.add(device)

    # --- displays that are no PCI function --------------------------------------------------------

    def plug_platform(self, devpath: str, driver: str | None, makes: Makes) -> None:
        """Let a device with a card and without a PCI function appear: simpledrm, vgem."""
        bound = self._platform[devpath] = Bound()
        if devpath == "/devices/virtual":  # what is there hangs from nothing
            self.drivers.display(bound, devpath, makes)
            return
        _, _, subsystem, *_ = devpath.split("/")
        device = Device(devpath, subsystem, parent=os.path.dirname(devpath), on_bus=True)
        self.sysfs.add(device)
        bound.undo.callback(self.sysfs.remove, device)
        if driver is not None:
            self.sysfs.tree.folder(f"/sys/bus/{subsystem}/drivers/{driver}")
            self.sysfs.driver_links(device, driver)
            bound.undo.callback(self._platform_unbound, device)
        self.drivers.display(bound, devpath, makes)
        if driver is not None:
            bound.undo.callback(self.sysfs.no_driver_links, device)
            self.sysfs.say("bind", device)

    def _platform_unbound(self, device: Device) -> None:
        self.sysfs.no_driver(device)
        self.sysfs.say("unbind", device)

    def unplug_platform(self, devpath: str) -> None:
        """Let it go, as simpledrm goes when the real driver comes."""
        self._platform.pop(devpath).undo.close()
