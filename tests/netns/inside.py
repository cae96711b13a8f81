"""What runs inside a private host: its simulated kernel, the agent, a container engine, a reader.

The first process of a PID namespace: when it ends, or when the test does, which closes the other
end of its socket, the kernel ends all that it started. It answers one call after another, in a
thread of its own so that a call that hangs cannot keep it alive.

The simulated tree lies on one tmpfs and is bound over /sys, /dev and /run, so the agent finds it in
the usual places and is started as anybody would start it. Two things differ from a real host, and
only two: libudev must not ask whether /sys is a sysfs (SYSTEMD_DEVICE_VERIFY_SYSFS), and the
configuration allows a /dev that is no devtmpfs, of which a machine has but one.
"""

import contextlib
import ctypes
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import threading
import traceback
import urllib.request
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import yaml

from agent.host import capture as host_capture
from agent.simulate import Hold
from agent.simulate.captured import load as load_captured
from agent.simulate.events import Source, Uevent
from agent.simulate.kernel import Kernel
from agent.simulate.nodes import make_real
from agent.simulate.scenario import Act, Scenario, load
from agent.simulate.stage import SimulatedStage
from tests.netns.consumers import Consumers
from tests.netns.netlink import KernelSender, Properties, UdevSender, body
from tests.netns.process import NOTIFY, START

SPECS: Final = "/run/cdi"
OTHER_SPECS: Final = "/etc/cdi"
MOVED_SPECS: Final = "/run/cdi-elsewhere"
"""What the consumer watches beside it: it need not exist."""
METRICS: Final = "http://127.0.0.1:9478/metrics"
HEALTH: Final = "http://127.0.0.1:9478/healthz"
_NODES: Final = (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9))

Request = tuple[str, str, tuple[Any, ...], dict[str, Any]]
"""Which object, which of its methods or properties, and the arguments."""


class Write(NamedTuple):
    """One change of the spec directory that a consumer can see."""

    what: str
    """``written`` (renamed into place), ``deleted``, or ``written in place``, which none may be."""
    name: str


class Watch:
    """Counts what happens to the specs of a directory, with inotify, so that nothing escapes it."""

    _MODIFY: Final = 0x2
    _MOVED_FROM: Final = 0x40
    _MOVED_TO: Final = 0x80
    _CREATE: Final = 0x100
    _DELETE: Final = 0x200
    _OVERFLOW: Final = 0x4000

    def __init__(self, directory: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        gone = self._MOVED_FROM | self._DELETE
        mask = self._MOVED_TO | gone | self._CREATE | self._MODIFY
        if self._fd < 0 or libc.inotify_add_watch(self._fd, directory.encode(), mask) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def fileno(self) -> int:
        """What becomes readable when something happens."""
        return self._fd

    def since(self) -> list[Write]:
        """What happened since the last time, in order."""
        writes: list[Write] = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 65536):
                writes += self._decode(data)
        return writes

    def _decode(self, data: bytes) -> list[Write]:
        writes = []
        while data:
            _, mask, _, length = struct.unpack_from("iIII", data)
            name = data[16 : 16 + length].rstrip(b"\0").decode()
            data = data[16 + length :]
            if mask & self._OVERFLOW:
                raise RuntimeError("the watch lost events")
            if not name.endswith((".yaml", ".json")):
                continue  # a temporary file, which no consumer loads
            if mask & self._MOVED_TO:
                writes.append(Write("written", name))
            elif mask & (self._CREATE | self._MODIFY):
                writes.append(Write("written in place", name))
            else:
                writes.append(Write("deleted", name))
        return writes


class Inside(Consumers):
    """The host; `outside.PrivateHost` calls its methods.

    Args:
        work: An empty folder.
        captured: The file of a captured host that it is to be; else it is one without devices.
    """

    def __init__(self, work: str, captured: str | None = None) -> None:
        self._work = work
        run("mount", "-t", "tmpfs", "-o", "dev,mode=755", "tmpfs", work)
        self.muted: Source | None = None
        """Whose messages get lost on the way."""
        self._senders: Mapping[Source, KernelSender | UdevSender] = {
            Source.KERNEL: KernelSender(),
            Source.UDEV: UdevSender(),
        }
        self._kernel_root = Path(work, "host")
        self.kernel = self._make_kernel(captured)
        self._mount()
        super().__init__(work)
        self._watch = Watch(SPECS)
        self._reader: subprocess.Popen[str] | None = None
        self._holds: dict[str, Hold] = {}
        self._scene: tuple[Scenario, SimulatedStage] | None = None
        self._storm_ends: threading.Event | None = None

    def _make_kernel(self, captured: str | None) -> Kernel:
        if captured is None:
            return Kernel(self._kernel_root, self._emit, make_real)
        capture = host_capture.load(Path(captured))
        return load_captured(capture, self._kernel_root, self._emit, make_real)

    def _emit(self, event: Uevent) -> None:
        if event.source is not self.muted:
            self._senders[event.source].send(event.payload)

    # --- the place --------------------------------------------------------------------------------

    def _mount(self) -> None:
        host, work = str(self._kernel_root), self._work
        # crun refuses cgroup v1 with the unified hierarchy mounted beside it.
        with contextlib.suppress(subprocess.CalledProcessError):
            run("umount", "/sys/fs/cgroup/unified")
        os.makedirs(f"{host}/sys/fs/cgroup")
        run("mount", "--rbind", "/sys/fs/cgroup", f"{host}/sys/fs/cgroup")
        run("mount", "--rbind", f"{host}/sys", "/sys")
        for name, minor in _NODES:
            make_node(f"{host}/dev/{name}", 1, minor)
        make_node(f"{host}/dev/tty", 5, 0)
        os.symlink("/proc/self/fd", f"{host}/dev/fd")
        os.symlink("pts/ptmx", f"{host}/dev/ptmx")
        for name in ("pts", "shm", "mqueue"):
            os.mkdir(f"{host}/dev/{name}")
        run("mount", "--bind", "/dev/pts", f"{host}/dev/pts")
        run("mount", "--rbind", f"{host}/dev", "/dev")
        # /etc can be read as it is; what is written there stays here.
        os.mkdir(f"{work}/etc")
        os.mkdir(f"{work}/etc-work")
        layers = f"lowerdir=/etc,upperdir={work}/etc,workdir={work}/etc-work"
        run("mount", "-t", "overlay", "overlay", "-o", layers, "/etc")
        shutil.rmtree(OTHER_SPECS, ignore_errors=True)
        os.mkdir(OTHER_SPECS)
        run("mount", "--bind", f"{host}/run", "/run")
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/var/lib")
        os.mkdir(SPECS)
        run("ip", "link", "set", "lo", "up")

    @property
    def elsewhere(self) -> str:
        """A folder in which the host's /sys, /dev and /run are to be found too."""
        return str(self._kernel_root)

    @property
    def with_own_folders(self) -> tuple[str, ...]:
        """What to start the agent through so that its own /sys, /dev and /run are not the host's.

        But for what libudev has to find: that udevd runs.
        """
        script = (
            "for folder in /sys /dev /run; do mount -t tmpfs tmpfs $folder || exit 1; done && "
            f"mknod -m 666 /dev/null c 1 3 && mkdir /run/udev && touch {NOTIFY} && "
            f"mount --bind {self._kernel_root}/run/udev /run/udev && "
            f'mount --bind {self._kernel_root}{NOTIFY} {NOTIFY} && exec "$@"'
        )
        return "unshare", "--mount", "sh", "-c", script, "sh"

    # --- what others see of it --------------------------------------------------------------------

    def get(self, url: str) -> str:
        """What its HTTP server answers."""
        with urllib.request.urlopen(url, timeout=START) as answer:  # noqa: S310 - ours
            text: str = answer.read().decode()
            return text

    def specs(self, directory: str = SPECS) -> dict[str, Any]:
        """Every spec file, loaded."""
        specs = {}
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(directory)):
                if name.endswith((".yaml", ".json")):
                    with contextlib.suppress(FileNotFoundError):
                        specs[name] = yaml.safe_load(Path(directory, name).read_text())
        return specs

    def put(self, specs: Mapping[str, str], nodes: Mapping[str, tuple[int, int]]) -> None:
        """Put spec files and device nodes here by hand, instead of those of an earlier call."""
        for name in os.listdir(SPECS):
            os.unlink(f"{SPECS}/{name}")
        for path, (major, minor) in nodes.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(major, minor))
        for name, text in specs.items():
            Path(SPECS, name).write_text(text)

    def link(self, links: Mapping[str, str]) -> None:
        """Make links as udev does."""
        for path, target in links.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.symlink(os.path.relpath(target, os.path.dirname(path)), path)

    def writes(self) -> list[Write]:
        """What happened to the spec files since this was called last."""
        return self._watch.since()

    def start_reader(self) -> None:
        """Start the consumer that looks all the while."""
        self._reader = subprocess.Popen(
            [sys.executable, "-m", "tests.netns.reader", SPECS, OTHER_SPECS, MOVED_SPECS],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._reader.stdout is not None
        self._reader.stdout.readline()

    def end_reader(self) -> dict[str, Any]:
        """End it; what it found (`reader.Findings`)."""
        assert self._reader is not None
        output, _ = self._reader.communicate(timeout=START)
        findings: dict[str, Any] = json.loads(output)
        return findings

    # --- what goes on while the test does something else ------------------------------------------

    def hold(self, path: str) -> None:
        """Let a process keep a node open: its number stays taken."""
        self._holds[path] = self.kernel.hold(path)

    def release(self, path: str) -> None:
        """Let it close the node."""
        self._holds.pop(path).release()

    def begin_storm(self, address: str) -> None:
        """Let a card's connectors come and go without a pause."""
        ends = self._storm_ends = threading.Event()

        def storm() -> None:
            while not ends.wait(0.001):
                self.kernel.storm(address, 5)

        threading.Thread(target=storm, daemon=True).start()

    def end_storm(self) -> None:
        """End it."""
        assert self._storm_ends is not None
        self._storm_ends.set()

    # --- scenario files ---------------------------------------------------------------------------

    def set_scene(self, path: str) -> dict[str, str]:
        """Let the host be as it is when a scenario begins; its functions' names, by address."""
        scenario = load(path)
        stage = SimulatedStage(self.kernel, scenario.parts)
        stage.udev(scenario.udev)
        stage.start(scenario.start)
        self._scene = scenario, stage
        return {str(address): name for address, name in stage.names.items()}

    def act(self, number: int) -> None:
        """Do what one step of the scenario says."""
        assert self._scene is not None
        scenario, stage = self._scene
        step = scenario.steps[number]
        assert isinstance(step, Act)
        step.do(stage)

    # --- messages that no device sends ------------------------------------------------------------

    def send(self, source: Source, properties: Properties, times: int = 1) -> None:
        """Send a message, as often as is wanted, as fast as it goes."""
        sender = self._senders[source]
        if isinstance(sender, KernelSender):
            for _ in range(times):
                sender.send(properties)
            return
        message = body({**properties, "SEQNUM": "1"})
        for _ in range(times):
            sender.send_raw(message, properties["SUBSYSTEM"], properties.get("DEVTYPE"))

    def send_raw(self, source: Source, payload: bytes) -> None:
        """Send bytes that are no message."""
        sender = self._senders[source]
        if isinstance(sender, KernelSender):
            sender.send_raw(payload)
        else:
            sender.send_raw(payload, "drm")

    def udev_knows(self, node: str) -> bool:
        """Whether udev's database has the node."""
        number = os.stat(node).st_rdev
        return os.path.exists(f"/run/udev/data/c{os.major(number)}:{os.minor(number)}")

    def mute(self, source: Source | None) -> None:
        """Lose a source's messages from now on; None ends it."""
        self.muted = source


def run(*argv: str) -> None:
    """Run a program; what it says is shown if it fails."""
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise subprocess.CalledProcessError(result.returncode, argv, None, result.stderr.strip())


def make_node(path: str, major: int, minor: int) -> None:
    """Make a character device that everybody may use."""
    os.mknod(path, stat.S_IFCHR, os.makedev(major, minor))
    os.chmod(path, 0o666)  # noqa: S103 - as everywhere


def answer(targets: Mapping[str, object], request: Request) -> tuple[bool, object]:
    """Do what is asked: (True, the result) or (False, what went wrong)."""
    target, name, args, kwargs = request
    try:
        owner = targets[target]
        if name.startswith("="):
            setattr(owner, name[1:], args[0])
            return True, None
        value = getattr(owner, name)
        return True, value(*args, **kwargs) if callable(value) else value
    except Exception:  # noqa: BLE001 - raised again in the test
        return False, traceback.format_exc()


def serve(connection: Connection, requests: "SimpleQueue[Request]") -> None:
    """Build the host, then answer."""
    built: tuple[bool, object]
    try:
        inside = Inside(*sys.argv[2:])
        targets: dict[str, object] = {"inside": inside, "kernel": inside.kernel}
        built = True, None
    except (PermissionError, subprocess.CalledProcessError) as error:
        targets = {}
        built = False, f"{error} {getattr(error, 'stderr', '')}"
    except Exception:  # noqa: BLE001 - a bug of ours; the test finds it on standard error
        traceback.print_exc()
        os._exit(1)
    connection.send(built)
    while True:
        connection.send(answer(targets, requests.get()))


def main() -> None:
    """Answer until the test closes its end. Arguments: that end's descriptor, those of `Inside`."""
    os.umask(0o022)
    connection = Connection(int(sys.argv[1]))
    requests: SimpleQueue[Request] = SimpleQueue()
    threading.Thread(target=serve, args=(connection, requests), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            requests.put(connection.recv())
    os._exit(0)  # whatever still hangs
