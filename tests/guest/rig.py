"""One running guest: started or resumed, driven, and always ended.

A guest lives in a folder of its own under the temp folder: QEMU's sockets, its log, the guest's
console, and the overlay that takes the guest's writes. The folder is locked while the guest lives;
one that a killed test run left is swept by the next guest.

QEMU never outlives the thread that started it, whatever ends that: the kernel kills it then
(PR_SET_PDEATHSIG). So a guest belongs to the thread that made it, though any thread may use it.
"""

import contextlib
import fcntl
import os
import shlex
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from tests.guest import settings
from tests.guest.channel import Channel, Result
from tests.guest.image import Image
from tests.guest.lines import connect
from tests.guest.qmp import Qmp, QmpError
from tests.guest.topology import Topology

_KERNEL_ARGUMENTS: Final = (
    "root=/dev/vda ro console=ttyS0 quiet loglevel=4 systemd.show_status=false net.ifnames=0 "
    "intel_iommu=on "
    # what emulation makes slow and no test needs
    "mitigations=off nokaslr audit=0 nowatchdog no_timer_check tsc=reliable clocksource=tsc "
    "cryptomgr.notests random.trust_cpu=1"
)
_PREFIX: Final = "cdi-guest-"
_LOCK: Final = "lock"
_YOUNG_SECONDS: Final = 60.0
# Bounds for a machine that is busy with other things.
_BOOT_SECONDS: Final = 300.0
_STEP_SECONDS: Final = 150.0
_QEMU_SECONDS: Final = 120.0

# What systemd takes for `systemctl reboot` (systemd(1), SIGRTMIN+5), without a word of who asked.
_REBOOT_SIGNAL: Final = 34 + 5

# Run by sh: were the parent dead before the signal was asked for, it would never come.
_IF_PARENT_LIVES: Final = '[ "$PPID" = "$0" ] && exec "$@"'


class Guest:
    """A guest that answers commands. Use it as a context manager: leaving it ends QEMU.

    Made by `boot` or `resume`.
    """

    def __init__(
        self,
        image: Image,
        topology: Topology,
        base: Path,
        *,
        ram: Path | None = None,
        kernel_arguments: str = "",
        overlay: Path | None = None,
    ) -> None:
        _sweep()
        self.topology = topology
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock: IO[bytes] = (self.folder / _LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._closing = contextlib.ExitStack()
        self._closing.callback(self._remove_folder)
        try:
            disk = overlay or self.folder / "disk.qcow2"
            _make_overlay(base, disk)
            self._qemu = self._start(self._arguments(image, disk, ram, kernel_arguments))
            self._qmp = Qmp(self._connect("qmp.sock"))
            self._closing.callback(self._qmp.close)
            if ram is not None:
                self._let_go_on()
            self._channel = Channel(self._connect("channel.sock"))
            self._closing.callback(self._channel.close)
            self._channel.wait_until_answered(_BOOT_SECONDS)
            if ram is not None:
                # its wall clock stood still while it lay on disk
                self.sh(f"date --set=@{time.time():.3f}")
        except BaseException as error:
            error.add_note(self._last_words())
            self._closing.close()
            raise

    @classmethod
    def boot(
        cls,
        image: Image,
        topology: Topology,
        base: Path,
        *,
        overlay: Path | None = None,
        kernel_arguments: str = "",
    ) -> Self:
        """Start a guest and wait until its boot has ended (about ten seconds).

        Args:
            image: Kernel and initrd.
            topology: The machine.
            base: The disk to start from; never written to.
            overlay: Where the guest's writes go and stay; else they go with the guest.
            kernel_arguments: More of them.
        """
        guest = cls(
            image,
            topology,
            base,
            overlay=overlay,
            kernel_arguments=kernel_arguments,
        )
        try:
            guest._wait_until_booted()
        except BaseException:
            guest.close()
            raise
        return guest

    @classmethod
    def resume(cls, image: Image, topology: Topology, frozen: Path) -> Self:
        """Resume what `freeze` left in a folder, as often as wanted and several at once."""
        return cls(image, topology, frozen / "disk.qcow2", ram=frozen / "ram")

    # --- commands -------------------------------------------------------------------------------

    def run(
        self,
        *argv: str,
        stdin: bytes = b"",
        seconds: float = _STEP_SECONDS,
        cwd: str = "/root",
        check: bool = True,
    ) -> Result:
        """Run a program in the guest to its end.

        Raises:
            CommandFailedError: Its exit code is not 0, unless `check` is off.
        """
        result = self._channel.run(argv, seconds=seconds, stdin=stdin, cwd=cwd)
        return result.check() if check else result

    def sh(self, text: str, *, seconds: float = _STEP_SECONDS, check: bool = True) -> Result:
        """Run shell text in the guest; as `run` otherwise."""
        return self.run("/bin/sh", "-c", text, seconds=seconds, check=check)

    def exchange(self, path: str, message: str, *, seconds: float = _STEP_SECONDS) -> str:
        """Send a message to a unix socket in the guest; what is answered until it hangs up."""
        return self._channel.exchange(path, message.encode(), seconds=seconds).check().out

    def wait_until(self, condition: str, *, seconds: float = _STEP_SECONDS) -> float:
        """Wait in the guest until a shell condition holds; return after how many seconds.

        Raises:
            CommandFailedError: It did not, in this time.
        """
        loop = f"until {condition}; do sleep 0.02; done"
        return self.sh(loop, seconds=seconds).seconds

    def start(self, unit: str, *argv: str) -> None:
        """Start a program in the guest as a transient service of that name; see `stop`."""
        self.run("systemd-run", "--quiet", "--collect", f"--unit={unit}", *argv)

    def stop(self, unit: str) -> None:
        """Stop a service, transient or not, and wait until it has ended."""
        self.run("systemctl", "stop", unit)

    # --- files ----------------------------------------------------------------------------------

    def read(self, path: str) -> str:
        return self.run("cat", path).out

    def write(self, path: str, content: str | bytes, *, mode: int = 0o644) -> None:
        """Write a file in the guest, its folders included."""
        data = content.encode() if isinstance(content, str) else content
        script = 'mkdir -p "${0%/*}" && cat >"$0" && chmod "$1" "$0"'
        self.run("/bin/sh", "-c", script, path, f"{mode:o}", stdin=data)

    def push(self, source: Path, path: str) -> None:
        """Copy a file or a whole folder of the host to that path in the guest."""
        packed = BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(source, arcname=Path(path).name, filter=_owned_by_root)
        folder = str(Path(path).parent)
        script = 'mkdir -p "$0" && tar -x -C "$0"'
        self.run("/bin/sh", "-c", script, folder, stdin=packed.getvalue())

    # --- devices --------------------------------------------------------------------------------

    def plug(self, driver: str, name: str, **properties: str) -> None:
        """Plug a device in, as QEMU's device_add takes it: `bus="rp1"`, `addr="0.1"`, ...

        Raises:
            QmpError: QEMU refuses.
        """
        self._qmp.execute("device_add", driver=driver, id=name, **properties)

    def unplug(self, name: str, *, seconds: float = _STEP_SECONDS) -> None:
        """Ask the guest to let a device go, and wait until it is out.

        Raises:
            TimeoutError: The guest did not let it go.
        """
        since = self._qmp.seen()
        self._qmp.execute("device_del", id=name)
        self._qmp.wait_for(
            "DEVICE_DELETED",
            lambda data: data.get("device") == name,
            since=since,
            seconds=seconds,
        )

    # --- reboots --------------------------------------------------------------------------------

    def reboot(self) -> None:
        """Reboot in order, as `systemctl reboot` does, and wait until that boot has ended."""
        since = self._qmp.seen()
        # The service that answers is stopped with the others, perhaps before it has answered.
        with contextlib.suppress(TimeoutError):
            self.sh(f"kill -{_REBOOT_SIGNAL} 1", seconds=1)
        self._wait_for_reboot(since)

    def reset(self) -> None:
        """Press the reset button, and wait until the boot after it has ended.

        Of the file system there is what was written to the disk, and no more.
        """
        since = self._qmp.seen()
        self._qmp.execute("system_reset")
        self._wait_for_reboot(since)

    def _wait_for_reboot(self, since: int) -> None:
        self._qmp.wait_for("RESET", lambda _: True, since=since, seconds=_BOOT_SECONDS)
        self._channel.wait_until_answered(_BOOT_SECONDS)
        self._wait_until_booted()

    def _wait_until_booted(self) -> None:
        # Not checked: a failed unit is for a test to find, with its journal.
        self.sh("systemctl is-system-running --wait", seconds=_BOOT_SECONDS, check=False)
        self.sh("udevadm settle")

    # --- ends -----------------------------------------------------------------------------------

    def freeze(self, folder: Path) -> None:
        """Save the guest's memory into a folder beside its overlay, and end it.

        The guest must have been booted with `overlay=folder / "disk.qcow2"`.
        """
        self.sh("sync; udevadm settle")
        self._channel.close()
        self._qmp.execute("stop")
        self._qmp.execute("migrate-set-parameters", max_bandwidth=0)
        self._qmp.execute("migrate", uri=f"exec:cat >{shlex.quote(str(folder / 'ram'))}")
        _wait(lambda: self._migration() == "completed", "the guest's memory on disk")
        self._quit()

    def close(self) -> None:
        """End the guest as pulling its plug would, and remove its folder."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """QEMU's process."""
        return self._qemu.pid

    def monitor(self, command: str) -> str:
        """What QEMU's own monitor says to a command, or why it says nothing."""
        try:
            said: str = self._qmp.execute("human-monitor-command", command_line=command)
        except QmpError as error:
            return f"{error}"
        return said

    # --- QEMU -----------------------------------------------------------------------------------

    def _arguments(
        self, image: Image, disk: Path, ram: Path | None, kernel_arguments: str
    ) -> Iterator[str]:
        yield from ("-nodefaults", "-no-user-config", "-display", "none")
        yield from self.topology.arguments()
        yield from ("-kernel", str(image.kernel), "-initrd", str(image.initrd))
        yield from ("-append", f"{_KERNEL_ARGUMENTS} {kernel_arguments}".strip())
        yield from ("-serial", f"file:{self.folder}/console.log")
        yield from ("-qmp", f"unix:{self.folder}/qmp.sock,server=on,wait=off")
        # Nobody needs the overlay after a crash of the host: its flushes are not waited for.
        yield from ("-drive", f"file={disk},format=qcow2,if=none,id=root,cache=unsafe")
        yield from ("-device", "virtio-blk-pci,drive=root,addr=02.0")
        yield from ("-device", "virtio-serial-pci,id=serial,addr=03.0")
        yield from ("-chardev", f"socket,id=rig,path={self.folder}/channel.sock,server=on,wait=off")
        yield from ("-device", "virtserialport,bus=serial.0,chardev=rig,name=cdi.rig")
        yield from ("-device", "virtio-rng-pci,addr=04.0")
        if ram is not None:
            yield from ("-incoming", f"exec:cat {shlex.quote(str(ram))}")

    def _start(self, arguments: Iterator[str]) -> subprocess.Popen[bytes]:
        bound = ("setpriv", "--pdeathsig=KILL", "sh", "-c", _IF_PARENT_LIVES, str(os.getpid()))
        argv = [*bound, settings.program("qemu-system-x86_64"), *arguments]
        with (self.folder / "qemu.log").open("wb") as log:
            qemu = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,  # a Ctrl-C is for pytest
            )
        self._closing.callback(_end, qemu)
        return qemu

    def _alive(self) -> bool:
        return self._qemu.poll() is None

    def _connect(self, name: str) -> socket.socket:
        return connect(self.folder / name, self._alive, _QEMU_SECONDS)

    def _let_go_on(self) -> None:
        _wait(lambda: self._qmp.execute("query-status")["status"] != "inmigrate", "its memory back")
        self._qmp.execute("cont")

    def _migration(self) -> str:
        status: str = self._qmp.execute("query-migrate").get("status", "none")
        if status in {"failed", "cancelled"}:
            raise QmpError(f"saving the guest's memory: {status}")
        return status

    def _quit(self) -> None:
        self._qmp.execute("quit")
        self._qemu.wait(_QEMU_SECONDS)

    def _last_words(self) -> str:
        words = []
        for name in ("qemu.log", "console.log"):
            with contextlib.suppress(OSError):
                text = (self.folder / name).read_text(errors="replace")
                words.append(f"{name} ends with:\n{text[-2000:]}")
        return "\n".join(words)

    def _remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def _wait(reached: Callable[[], bool], what: str) -> None:
    """Poll QEMU, which has no event for it, until something is reached."""
    end = time.monotonic() + _QEMU_SECONDS
    while not reached():
        if time.monotonic() > end:
            raise TimeoutError(f"QEMU needs more than {_QEMU_SECONDS:g} s for {what}")
        time.sleep(0.02)


def _end(qemu: subprocess.Popen[bytes]) -> None:
    qemu.kill()
    qemu.wait()


def _make_overlay(base: Path, disk: Path) -> None:
    kind = "raw" if base.suffix == ".ext4" else "qcow2"
    program = settings.program("qemu-img")
    names = ["-b", str(base.absolute()), "-F", kind, str(disk)]
    settings.run_logged([program, "create", "-q", "-f", "qcow2", *names])


def _sweep() -> None:
    """Remove the folders of guests whose makers are dead."""
    for lock_file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock_file.open("rb") as lock:
            if time.time() - os.fstat(lock.fileno()).st_mtime < _YOUNG_SECONDS:
                continue  # its maker may not have locked it yet
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_file.parent, ignore_errors=True)


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member
