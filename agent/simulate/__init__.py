"""A pretend host in a folder, with a kernel that answers writes and a udevd that can be slow.

    kernel = Kernel(folder, emit)               # folder/{sys,dev,run,proc}; emit(Uevent) is called
    kernel.plug(arc_b50())                      # its messages come in the recorded order
    kernel.move("0000:03:00.0", "vfio-pci")     # override, unbind, probe, as people do it by hand
    kernel.write("/sys/bus/pci/drivers/xe/bind", "0000:03:00.0")        # 0 or an errno

Who wants what:

==========================  ===================================================================
look at it                  the four folders as roots, and `stat_plain` for ``stat_node``
                            (`lstat_node` if nodes are real: `make_real`, root)
send its messages           `Uevent.payload` over real netlink, or `hint_of` in process
plug and unplug             `Kernel.plug`, ``unplug``, ``plug_platform``; hardware from `host`
move it by hand             ``move``, or ``override``, ``bind``, ``unbind``, ``probe``, ``write``
modules, VFs                ``modprobe``, ``rmmod``, ``create_vfs``, ``remove_vfs``
hold a node open            ``hold(path)`` → `Hold` (a context manager)
a slow udevd, or none       ``Kernel(udev=…)``, ``kernel.udev = UdevMode.MANUAL``, ``udev_step``
trouble                     ``storm``, ``lose``, ``restore``, ``fail``, ``fail_probe``,
                            ``bind_nothing``, ``hang``, ``heal``
every moment in between     ``kernel.tree.changed = callback``: called after each single change
a captured host             `captured.load`
writes from other processes ``serve.Server``, and ``serve.WRITER`` in place of ``vfio/writer.py``
scenarios as files          ``scenario.load``, ``scenario.play``, ``stage.SimulatedStage``
==========================  ===================================================================

Nothing of it may be called in an event loop (it reads and writes files): use a thread.
"""

from agent.simulate.drivers import VfioKind
from agent.simulate.events import Emit, Source, Uevent, hint_of
from agent.simulate.hardware import Hardware, Makes
from agent.simulate.kernel import Kernel
from agent.simulate.machine import Features
from agent.simulate.nodes import MakeNode, make_plain, make_real, stat_plain
from agent.simulate.processes import Hold
from agent.simulate.udev import UdevMode

__all__ = [
    "Emit",
    "Features",
    "Hardware",
    "Hold",
    "Kernel",
    "MakeNode",
    "Makes",
    "Source",
    "UdevMode",
    "Uevent",
    "VfioKind",
    "hint_of",
    "make_plain",
    "make_real",
    "stat_plain",
]
