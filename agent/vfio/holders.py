"""The child that finds out who has a node open, by asking /proc about every process.

A program of its own like ``writer``: ``PROC DEV SYS ADDRESSES USED PATH …``. Each line of its
output has fields with tabs between:

===================================  =============================================================
``held``  pid  path  command         a process that holds one of the nodes
``blind``  reason                    why not everything could be seen
``done``                             always the last; without it the output says nothing
===================================  =============================================================

It makes do with ``os``, ``stat`` and ``sys``: ``re`` and ``json`` would double its time.

**What is looked for.** The nodes whose paths are given, and every node that sysfs has below one of
the functions USED: the sound of its audio function, the buses of its displays, its frame buffer.
Their drivers wait in ``unbind`` for whoever has them open. Below an input device they do not; and
a function that is another's child has nodes of its own. ``/dev/kfd`` is one for all GPUs; but who
uses a GPU through it has that one's render node open, too (``AMDKFD_IOC_ACQUIRE_VM``).

**What counts.** A descriptor of one of the nodes, known by its device number: so a container's own
nodes, bind mounts and other names are found, and another card under the same name is not taken for
ours. A node that cannot be examined is known by its path. A device of VFIO can also be open without
its group: such a descriptor has no path, and only newer kernels say which function it is. If that
is not said, and its process has no group open that could explain it, it may be ours, so it counts.
What holds a device without a descriptor of its process (a mapping, a message under way, a thread
with a table of its own) is not looked for: DRM lets a card go all the same, and VFIO waits for it
in ``unbind``, which is then hung until that ends.

**What blocks.** Reading a link in ``/proc/<pid>/fd`` never does. Looking at the file behind it may,
if that is another machine's and that machine is down, so files below such a mount are left out:
they are no device nodes. Whatever needs a process's memory (``maps``, ``cmdline``) waits for its
locks and is not read.

**What cannot be seen.** Without CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH other processes hide their
descriptors, or themselves; in a container's own process namespace all others are missing.
"""

import os
import stat
import sys
from _collections_abc import Iterable, Iterator  # see writer

MAX_HOLDERS = 50
"""More are not listed: people read them, and the output has to fit into a pipe."""

MAX_HIDDEN = 3
"""More processes that cannot be examined are not listed: one is as bad as all."""

FIRST_KERNEL_THREAD = (2, "kthreadd")
"""Visible in the first process namespace, and in no other."""

CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2
CAP_SYS_PTRACE = 19

REMOTE = (
    *("9p", "afs", "autofs", "beegfs", "ceph", "cifs", "coda", "fuse", "gfs2", "glusterfs", "gpfs"),
    *("lustre", "ncp", "nfs", "ocfs2", "orangefs", "smb", "virtiofs", "wekafs"),
)
"""How the names of file systems begin that can keep one waiting for somebody else."""

ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\043", "#"), ("\\134", "\\"))
"""What the kernel writes in mountinfo for characters that would break its lines."""

VFIO_DEVICE = "anon_inode:[vfio-device]"
VFIO_GROUPS = "/dev/vfio/"
VFIO_FUNCTION = "vfio-device-syspath:"
"""In the fdinfo of such a descriptor, from Linux 6.17 on."""

REVOKED = ("input",)
"""Subsystems that take a device away from whoever has it open."""

Line = tuple[str, ...]


class Nodes:
    """What is looked for.

    Args:
        dev: Where the nodes of the host are.
        addresses: The functions that they belong to.
        paths: Their paths, as ``/dev/…``.
        found: Paths and numbers of others.
    """

    def __init__(
        self,
        dev: str,
        addresses: list[str],
        paths: list[str],
        found: Iterable[tuple[str, int]] = (),
    ) -> None:
        self.addresses = addresses
        self.on_vfio = any(map(is_group, paths))
        self.by_number = {number: path for path, number in found}
        self.by_path = set(paths)
        for path in (*paths, *self.by_number.values()):
            try:
                node = os.stat(dev + path.removeprefix("/dev"), follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISCHR(node.st_mode):
                if path in self.by_path:
                    self.by_number[node.st_rdev] = path
                    self.by_path.discard(path)
            else:
                self.by_path.add(path)  # a simulated host's


def nodes_below(folder: str) -> Iterator[tuple[str, int]]:
    """Yield path and number of every character device that sysfs has below a folder."""
    try:
        with os.scandir(folder) as listing:
            entries = list(listing)
    except OSError:
        return  # it has gone meanwhile
    names = {entry.name for entry in entries}
    if "dev" in names and "uevent" in names:
        major, _, minor = read(f"{folder}/dev").strip().partition(":")
        name = value(read(f"{folder}/uevent"), "DEVNAME=").removeprefix("/dev/")
        if major.isdecimal() and minor.isdecimal() and name and subsystem(folder) != "block":
            yield f"/dev/{name}", os.makedev(int(major), int(minor))
    for entry in entries:
        is_part = entry.is_dir(follow_symlinks=False) and not is_function(entry.name)
        if is_part and subsystem(entry.path) not in REVOKED:
            yield from nodes_below(entry.path)


def subsystem(folder: str) -> str:
    """To which subsystem a device of sysfs belongs; nothing if it is none."""
    try:
        return os.path.basename(os.readlink(f"{folder}/subsystem"))
    except OSError:
        return ""


def is_function(name: str) -> bool:
    """Whether a folder of sysfs is a PCI function's, by its name: ``0000:03:00.0``."""
    parts = name.replace(".", ":").split(":")
    return len(parts) == len(("domain", "bus", "slot", "function")) and all(
        part and not part.strip("0123456789abcdef") for part in parts
    )


class Mounts:
    """Where processes see the files of other machines; read once for each mount namespace."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._remote: tuple[str, ...] = ()
        self._local: tuple[str, ...] = ()

    def enter(self, process: str) -> None:
        """See files as that process does from now on."""
        try:
            namespace = os.readlink(f"{process}/ns/mnt")
        except OSError:
            namespace = process
        if namespace not in self._known:
            self._known[namespace] = self._read(process)
        self._remote, self._local = self._known[namespace]

    def is_remote(self, path: str) -> bool:
        """Whether the file may be another machine's: the innermost mount decides."""
        if not path.startswith(self._remote):
            return False
        innermost = max(len(point) for point in self._remote if path.startswith(point))
        return not any(len(p) > innermost and path.startswith(p) for p in self._local)

    @staticmethod
    def _read(process: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        remote: list[str] = []
        local: list[str] = []
        for line in read(f"{process}/mountinfo").splitlines():
            before, _, kind = line.partition(" - ")
            for point in before.split(" ")[4:5]:
                (remote if kind.startswith(REMOTE) else local).append(unescaped(point))
        return tuple(f"{p.rstrip('/')}/" for p in remote), tuple(local)


def scan(proc: str, nodes: Nodes) -> Iterator[Line]:
    """Yield every process that holds one of the nodes, and what could not be seen."""
    for reason in blind_spots(proc):
        yield ("blind", reason)
    mounts = Mounts()
    held, hidden = 0, 0
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdecimal()):
        process = f"{proc}/{pid}"
        try:
            path = held_by(process, nodes, mounts)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except OSError as error:
            hidden += 1
            if hidden <= MAX_HIDDEN:
                yield ("blind", f"process {pid} cannot be examined: {error.strerror}")
            continue
        if path is not None:
            yield ("held", str(pid), path, read(f"{process}/comm").strip())
            held += 1
        if held == MAX_HOLDERS:
            return


def held_by(process: str, nodes: Nodes, mounts: Mounts) -> str | None:
    """One of the nodes that a process has open, if it has one open.

    Raises:
        OSError: It cannot be examined, or has ended.
    """
    mounts.enter(process)
    names = os.listdir(f"{process}/fd")
    if names:
        return held_in(f"{process}/fd", names, nodes, mounts)
    # A process whose first thread has ended shows nothing, though its other threads hold it all.
    # (A kernel thread shows nothing either, and is one task.)
    for task in os.listdir(f"{process}/task"):
        folder = f"{process}/task/{task}/fd"
        path = held_in(folder, os.listdir(folder), nodes, mounts)
        if path is not None:
            return path
    return None


def held_in(folder: str, names: list[str], nodes: Nodes, mounts: Mounts) -> str | None:
    """One of the nodes to which descriptors in a folder lead."""
    devices: list[str] = []
    groups = False
    for name in names:
        entry = f"{folder}/{name}"
        try:
            target = os.readlink(entry)
            if target in nodes.by_path:
                return target
            if target == VFIO_DEVICE:
                devices.append(name)
            elif target.startswith("/") and not mounts.is_remote(target):
                groups = groups or is_group(target)
                node = os.stat(entry)
                path = nodes.by_number.get(node.st_rdev)
                if path is not None and stat.S_ISCHR(node.st_mode):
                    return path
        except (PermissionError, ProcessLookupError):
            raise
        except OSError:
            continue  # closed meanwhile, or on a broken mount, which has no device nodes
    for name in devices if nodes.on_vfio else ():
        function = value(read(f"{folder}info/{name}"), VFIO_FUNCTION).rpartition("/")[2]
        if function in nodes.addresses if function else not groups:
            return VFIO_DEVICE
    return None


def blind_spots(proc: str) -> Iterator[str]:
    """Yield why processes may be missing, or hide what they have open."""
    if not os.path.lexists(f"{proc}/self"):
        yield f"there is no procfs at {proc}"
    capabilities = value(read(f"{proc}/self/status"), "CapEff:")
    if not capabilities:
        return  # a simulated host's, which hides nothing
    has = int(capabilities, 16)
    if not has & 1 << CAP_SYS_PTRACE:
        yield "the agent lacks CAP_SYS_PTRACE"
    if not has & (1 << CAP_DAC_READ_SEARCH | 1 << CAP_DAC_OVERRIDE):
        yield "the agent lacks CAP_DAC_READ_SEARCH"
    pid, name = FIRST_KERNEL_THREAD
    if read(f"{proc}/{pid}/comm").strip() != name:
        yield f"{proc} shows the processes of a container, not those of the host"


def is_group(path: str) -> bool:
    """Whether this is the node of a VFIO group: ``/dev/vfio/12``, ``/dev/vfio/noiommu-0``."""
    name = path.removeprefix(VFIO_GROUPS)
    return name != path and name.removeprefix("noiommu-").isdecimal()


def value(text: str, name: str) -> str:
    """What stands after a name at the beginning of a line; nothing if there is none."""
    return next(
        (line[len(name) :].strip() for line in text.splitlines() if line.startswith(name)), ""
    )


def unescaped(point: str) -> str:
    """A mount point as it is, from how mountinfo has it."""
    for code, character in ESCAPES:
        point = point.replace(code, character)
    return point


def read(path: str) -> str:
    """A file of /proc; nothing if it has gone."""
    try:
        with open(path, encoding="utf-8", errors="backslashreplace") as file:
            return file.read()
    except OSError:
        return ""


def main(arguments: list[str]) -> None:
    """Look for the nodes that the arguments name."""
    os.closerange(3, 1 << 20)
    proc, dev, sys_, addresses, used, *paths = arguments
    below = [
        node
        for address in used.split(",")
        if address
        for node in nodes_below(f"{sys_}/bus/pci/devices/{address}")
    ]
    nodes = Nodes(dev, addresses.split(","), paths, below)
    found = scan(proc, nodes) if paths or below else ()
    for line in (*found, ("done",)):
        sys.stdout.write("\t".join(map(printable, line)) + "\n")


def printable(field: str) -> str:
    """A field without what would break its line: a process may call itself anything."""
    return "".join(char if char.isprintable() else "?" for char in field)


if __name__ == "__main__":
    main(sys.argv[1:])
