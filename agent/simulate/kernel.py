"""A pretend host in a folder, and its kernel: what is written to it changes it, and it tells.

`Kernel` is the one object that tests and the demo hold. It puts all changes in one order under one
lock, so that a reader in another process meets only states that a real kernel passes through, and
answers a write to sysfs with the errno that the real one gives (``simulate.store``).

Its methods may be called from any thread, but not in an event loop: they read and write files, and
a write to a device whose lock is held (`hang`), or one that takes VFIO away from a process that
holds its node, blocks until that ends, as on a real host.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agent.host.model import Address
from agent.simulate import surroundings
from agent.simulate.devices import Device, NodeOf, Sysfs
from agent.simulate.events import Emit, Uevent
from agent.simulate.hardware import Hardware, Makes, driver_named
from agent.simulate.machine import Features, Machine
from agent.simulate.nodes import MakeNode, make_plain
from agent.simulate.pci import Function
from agent.simulate.processes import Hold, Processes
from agent.simulate.store import Store
from agent.simulate.tree import Tree
from agent.simulate.udev import Udev, UdevMode

CARD_ONLY: Final = Makes(card=True)


class Kernel:
    """A simulated host and its kernel.

    Args:
        root: An empty or missing folder; gets ``sys``, ``dev``, ``run`` and ``proc``.
        emit: Takes every message of the kernel and of udevd; see `events.Emit`.
        make_node: Makes device nodes: `make_plain` without root, `make_real` with it.
        udev: When udevd deals with messages.
        features: What kind of host it is.

    Raises:
        FileExistsError: The folder is not empty.
    """

    def __init__(
        self,
        root: Path,
        emit: Emit,
        make_node: MakeNode = make_plain,
        *,
        udev: UdevMode = UdevMode.AUTO,
        features: Features = Features(),  # noqa: B008 - immutable
    ) -> None:
        self.root: Final = root
        self.tree: Final = Tree(root)
        self._changed = threading.Condition(threading.RLock())
        self._emit = emit
        sysfs = self._sysfs = Sysfs(self.tree, make_node, self._say)
        surroundings.lay_out(sysfs, features)
        self._udev = Udev(self.tree, self._pass_on, self._autoload, udev)
        self._machine = Machine(sysfs, features, self._wait_for)
        self._store = Store(self._machine)
        self._processes = Processes(sysfs)
        self._silent = False
        self._autoloads = True
        with self.boot() as machine:
            for name in features.drivers:
                machine.load(driver_named(name))

    # --- looking ----------------------------------------------------------------------------------

    def driver_of(self, address: str) -> str | None:
        """The driver that has a function; None if none.

        Raises:
            KeyError: There is no such function.
        """
        with self._changed:
            driver = self._function(address).driver
            return None if driver is None else driver.name

    def node_paths(self, address: str) -> tuple[str, ...]:
        """The nodes of a function that sysfs lists below it, and its VFIO group's."""
        with self._changed:
            return tuple(node.path for _, node in self._nodes_of(address))

    def trigger(self, address: str) -> None:
        """Repeat the messages about a function's nodes, as ``udevadm trigger`` does."""
        with self._changed:
            devpaths = [device.devpath for device, _ in self._nodes_of(address)]
        for devpath in devpaths:
            self.write(f"/sys{devpath}/uevent", "change")

    def _nodes_of(self, address: str) -> Iterator[tuple[Device, NodeOf]]:
        function = self._function(address)
        below = f"{function.device.devpath}/"
        group = f"/devices/virtual/vfio/{function.group}"
        on_vfio = function.driver is not None and function.driver.vfio
        for device in self._sysfs.devices.values():
            if device.node is not None and (
                device.devpath.startswith(below) or (on_vfio and device.devpath == group)
            ):
                yield device, device.node

    @property
    def functions(self) -> Mapping[Address, str | None]:
        """Every function with its driver."""
        with self._changed:
            return {
                address: None if function.driver is None else function.driver.name
                for address, function in self._machine.bus.functions.items()
            }

    # --- plugging ---------------------------------------------------------------------------------

    def plug(self, *hardware: Hardware) -> None:
        """Plug functions in, together; bridges that are missing come with them."""
        with self._step():
            self._machine.plug(hardware)

    def unplug(self, *addresses: str) -> None:
        """Pull functions out, the last first; what is below a bridge goes before it."""
        with self._step():
            for address in reversed(addresses):
                self._machine.unplug(self._function(address))

    def plug_platform(self, name: str, driver: str, makes: Makes = CARD_ONLY) -> None:
        """Add a card that is no PCI function, such as ``simple-framebuffer.0``."""
        with self._step():
            self._machine.plug_platform(f"/devices/platform/{name}", driver, makes)

    def unplug_platform(self, name: str) -> None:
        """Take it away."""
        with self._step():
            self._machine.unplug_platform(f"/devices/platform/{name}")

    # --- writing ----------------------------------------------------------------------------------

    def write(self, path: str, data: str) -> int:
        """Write to a file of the host in one call; 0, or the errno that the kernel gives.

        Args:
            path: On the host (``/sys/…``) or on this machine (below the root); links are followed.
            data: What is written. Zero bytes do nothing: the kernel never hears of them.
        """
        with self._step():
            return self._store.write(path, data)

    def bind(self, address: str, driver: str) -> int:
        """Write to a driver's ``bind``."""
        return self.write(f"/sys/bus/pci/drivers/{driver}/bind", address)

    def unbind(self, address: str) -> int:
        """Write to the ``unbind`` of the driver that a function has."""
        return self.write(f"/sys/bus/pci/devices/{address}/driver/unbind", address)

    def override(self, address: str, driver: str | None) -> int:
        """Write to ``driver_override``; None clears it."""
        return self.write(f"/sys/bus/pci/devices/{address}/driver_override", f"{driver or ''}\n")

    def probe(self, address: str) -> int:
        """Write to ``drivers_probe``."""
        return self.write("/sys/bus/pci/drivers_probe", address)

    def move(self, address: str, driver: str) -> int:
        """Give a function to another driver, as people do it by hand; 0 or the first errno.

        Override, unbind, probe; the override is left set for VFIO and cleared for its own driver.
        """
        own = driver in self._function(address).hardware.drivers
        if error := self.override(address, None if own else driver):
            return error
        if self.driver_of(address) is not None and (error := self.unbind(address)):
            return error
        return self.probe(address)

    def create_vfs(self, address: str, count: int) -> int:
        """Write to ``sriov_numvfs``."""
        return self.write(f"/sys/bus/pci/devices/{address}/sriov_numvfs", str(count))

    def remove_vfs(self, address: str) -> int:
        """Write 0 to ``sriov_numvfs``."""
        return self.create_vfs(address, 0)

    # --- modules ----------------------------------------------------------------------------------

    def modprobe(self, name: str) -> int:
        """Load a driver, by its own or its module's name."""
        with self._step():
            self._machine.load(driver_named(name))
            return 0

    def rmmod(self, name: str) -> int:
        """Unload a driver from all its devices; EAGAIN while a process holds a node of one."""
        with self._step():
            return self._machine.unload(driver_named(name))

    # --- processes that hold nodes ----------------------------------------------------------------

    def hold(self, path: str, *, command: str = "vm") -> Hold:
        """Let a process open a node: its numbers stay taken, and VFIO cannot be unbound.

        Args:
            path: Below /dev.
            command: The process's name in /proc.

        Raises:
            FileNotFoundError: There is no such node.
        """
        with self._step():
            return self._processes.start(path, command, self._release)

    def _release(self, hold: Hold) -> None:
        with self._step():
            self._processes.end(hold)

    # --- trouble ----------------------------------------------------------------------------------

    def storm(self, address: str, times: int) -> None:
        """Let a card's connectors come and go, with a ``change`` of the card each time."""
        with self._step():
            bound = self._function(address).bound
            if bound is None or bound.card is None:
                raise ValueError(f"{address} has no card")
            for _ in range(times):
                connector = self._machine.drivers.disconnect(bound)
                self._sysfs.say("change", bound.card, HOTPLUG="1")
                if connector is not None:
                    self._machine.drivers.connect(bound, connector)
                    self._sysfs.say("change", bound.card, HOTPLUG="1")

    def lose(self, path: str) -> None:
        """Take a node out of /dev without a word, as ``rm`` does.

        Raises:
            KeyError: No device has that node.
        """
        with self._step():
            self._sysfs.lose_node(self._node(path))

    def restore(self, path: str) -> None:
        """Make a lost node again without a word, as ``mknod`` does."""
        with self._step():
            self._sysfs.make_node(self._node(path))

    def fail(self, pattern: str, error: int, times: int | None = None) -> None:
        """Let writes to matching files fail.

        Args:
            pattern: Of the shell's kind, for the path as it was given or with its links followed.
            error: The errno.
            times: How often; None is until `heal`.
        """
        with self._changed:
            self._store.fail(pattern, error, times)

    def fail_probe(self, address: str, error: int) -> None:
        """Let every driver's probe of a function fail; 0 ends it."""
        with self._changed:
            self._function(address).probe_errno = error

    def bind_nothing(self, address: str) -> None:
        """Let ``bind`` and ``drivers_probe`` of a function succeed without binding anything."""
        with self._changed:
            self._store.bind_nothing.add(Address(address))

    def hang(self, address: str, *, now: bool = False) -> None:
        """Let a driver hang in its next removal or probe of a function, with the device's lock.

        From then on each write that needs the lock blocks, and each reader of ``driver_override``.

        Args:
            address: The function.
            now: Something holds the lock at once.
        """
        with self._step():
            function = self._function(address)
            function.hangs = True
            if now:
                self._machine.seize(function)

    def heal(self) -> None:
        """End all faults and hangs; who was blocked goes on."""
        with self._step():
            self._store.heal()
            for function in self._machine.bus.functions.values():
                function.probe_errno = 0
                function.hangs = False
                self._machine.let_go(function)

    # --- udevd ------------------------------------------------------------------------------------

    @property
    def udev(self) -> UdevMode:
        """When udevd deals with messages. Setting it starts, stops or slows it down."""
        return self._udev.mode

    @udev.setter
    def udev(self, mode: UdevMode) -> None:
        with self._step():
            self._udev.become(mode)

    @property
    def udev_waiting(self) -> int:
        """How many messages udevd has not yet dealt with."""
        with self._changed:
            return len(self._udev)

    def udev_step(self, messages: int = 1) -> int:
        """Let udevd deal with some messages; how many there were."""
        with self._changed:
            return sum(self._udev.step() for _ in range(messages))

    def udev_settle(self) -> None:
        """Let udevd deal with everything."""
        with self._changed:
            while self._udev.step():
                pass

    # --- before anybody listens -------------------------------------------------------------------

    @contextmanager
    def boot(self, *, autoload: bool = True) -> Iterator[Machine]:
        """Change the host before anybody listens: nothing is emitted, and udevd deals with all.

        Args:
            autoload: udevd loads the drivers of functions that have none.
        """
        with self._changed:
            self._silent, self._autoloads = True, autoload
            try:
                yield self._machine
                self.udev_settle()
            finally:
                self._silent, self._autoloads = False, True

    @contextmanager
    def changing(self) -> Iterator[threading.Condition]:
        """Hold the kernel's lock, or wait on it for another thread's next change."""
        with self._changed:
            yield self._changed

    # --- within -----------------------------------------------------------------------------------

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Do one thing under the lock; then udevd's work, then wake who waits."""
        with self._changed:
            try:
                yield
            finally:
                self._processes.mark_deleted()
                if self._udev.mode is UdevMode.AUTO:
                    self.udev_settle()
                self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        if not condition():
            self._changed.notify_all()  # who waits for another's change sees how far it has come
            self._changed.wait_for(condition)

    def _say(self, event: Uevent) -> None:
        self._pass_on(event)
        self._udev.hear(event)

    def _pass_on(self, event: Uevent) -> None:
        if not self._silent:
            self._emit(event)

    def _autoload(self, address: Address) -> None:
        """Load the driver of a new function, as udevd does by its modalias."""
        function = self._machine.bus.functions.get(address)
        if not self._autoloads or function is None or function.driver is not None:
            return
        for name in (*function.hardware.drivers, function.hardware.makes.via):
            if name is not None:
                self._machine.load(driver_named(name))

    def _function(self, address: str) -> Function:
        return self._machine.bus.functions[Address(address)]

    def _node(self, path: str) -> NodeOf:
        for device in self._sysfs.devices.values():
            if device.node is not None and device.node.path == path:
                return device.node
        raise KeyError(f"no device has the node {path}")
