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
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from tests.guest import qemu, settings
from tests.guest.channel import Channel, Result
from tests.guest.image import Image
from tests.guest.lines import connect
from tests.guest.qmp import Qmp, QmpError
from tests.guest.topology import Topology

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
        frozen: Path | None = None,
        to_freeze: Path | None = None,
        kernel_arguments: str = "",
    ) -> None:
        _sweep()
        self.topology = topology
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock: IO[bytes] = (self.folder / _LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._closing = contextlib.ExitStack()
        self._closing.callback(self._remove_folder)
        try:
            disk = (to_freeze or self.folder) / qemu.DISK
            qemu.make_overlay(base, disk)
            arguments = qemu.arguments(image, topology, disk, self.folder, kernel_arguments)
            kept = frozen or to_freeze
            memory = qemu.memory(topology, kept, private=frozen is not None) if kept else ()
            # A Ctrl-C is for pytest; but nobody wants to wait for a guest that is being made.
            self._qemu = self._start((*arguments, *memory), own_session=to_freeze is None)
            self._qmp = Qmp(self._connect("qmp.sock"))
            self._closing.callback(self._qmp.close)
            if frozen is not None:
                self._let_go_on(frozen)
            self._channel = Channel(self._connect("channel.sock"))
            self._closing.callback(self._channel.close)
            self._channel.wait_until_answered(_BOOT_SECONDS)
            if frozen is not None:
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
        to_freeze: Path | None = None,
        kernel_arguments: str = "",
    ) -> Self:
        """Start a guest and wait until its boot has ended (about twenty seconds).

        Args:
            image: Kernel and initrd.
            topology: The machine.
            base: The disk to start from; never written to.
            to_freeze: A folder for what `freeze` leaves; else nothing stays of the guest.
            kernel_arguments: More of them.
        """
        guest = cls(
            image,
            topology,
            base,
            to_freeze=to_freeze,
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
        return cls(image, topology, frozen / qemu.DISK, frozen=frozen)

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
        """End the guest, and leave in a folder what it takes to resume it.

        The guest must have been booted with `to_freeze=folder`.
        """
        self.sh("sync; udevadm settle")
        self._channel.close()
        self._qmp.execute("stop")
        self._leave_the_memory_where_it_is()
        self._qmp.execute("migrate", uri=f"exec:cat >{shlex.quote(str(folder / qemu.DEVICES))}")
        _wait(lambda: self._migration() == "completed", "the guest's devices on disk")
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

    def _start(self, arguments: Iterable[str], *, own_session: bool) -> subprocess.Popen[bytes]:
        bound = ("setpriv", "--pdeathsig=KILL", "sh", "-c", _IF_PARENT_LIVES, str(os.getpid()))
        argv = [*bound, settings.program(qemu.PROGRAM), *arguments]
        with (self.folder / "qemu.log").open("wb") as log:
            started = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=own_session,
            )
        self._closing.callback(_end, started)
        return started

    def _alive(self) -> bool:
        return self._qemu.poll() is None

    def _connect(self, name: str) -> socket.socket:
        return connect(self.folder / name, self._alive, _QEMU_SECONDS)

    def _let_go_on(self, frozen: Path) -> None:
        self._leave_the_memory_where_it_is()
        self._qmp.execute(
            "migrate-incoming", uri=f"exec:cat {shlex.quote(str(frozen / qemu.DEVICES))}"
        )
        _wait(lambda: self._qmp.execute("query-status")["status"] != "inmigrate", "its devices")
        self._qmp.execute("cont")

    def _leave_the_memory_where_it_is(self) -> None:
        shared = {"capability": "x-ignore-shared", "state": True}
        self._qmp.execute("migrate-set-capabilities", capabilities=[shared])

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


def _end(started: subprocess.Popen[bytes]) -> None:
    started.kill()
    started.wait()


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
