"""Record what a real kernel and udev say and answer, as test data for the simulated host.

    recorded/<sequence>.json    {about, kernel, systemd, topology, before, steps: [...]}

Each step has what was done, its errno or exit code, how long it took, the events in the order in
which they came (`ms` since the step began, `from` kernel or udev), and the host afterwards: as
`inside/oracle.py facts` says it, with the listings of /dev/dri and /dev/vfio. SEQNUM and what
udev's hardware database adds are left out: they differ from run to run, or say nothing of order.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

from tests.guest.image import INSIDE
from tests.guest.layers import Installed
from tests.guest.rig import Guest
from tests.guest.sequences import Plug, Sequence, Shell, Step, Unplug, Write
from tests.guest.topology import MANY_GPUS

RECORDED: Final = Path(__file__).parent / "recorded"

_TOOLS: Final = "/root/tools"
_LOG: Final = "/run/uevents.jsonl"
_SUBSYSTEMS: Final = ("drm", "pci", "vfio", "vfio-dev", "virtio", "accel")
_FROM_UDEV: Final = ("DEVLINKS", "ID_PATH", "TAGS")
_NOISE: Final = ("SEQNUM", "SYNTH_UUID")

Json = dict[str, Any]


class Recorder:
    """One guest that is acted on, and what has been read of its events."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._read = 0
        for tool in ("oracle.py", "write_sysfs.py"):
            guest.push(INSIDE / tool, f"{_TOOLS}/{tool}")
        # They would be seen in how long things take.
        guest.sh("systemctl stop cdi-agent agent-judge agent-witness", check=False)
        guest.start("uevents", "/usr/local/sbin/rig-uevents", _LOG, *_SUBSYSTEMS)
        guest.wait_until(f"grep -q ready {_LOG}")
        self.events()

    def state(self) -> Json:
        """What the host is like now."""
        facts: Json = json.loads(self._guest.sh(f"python3 {_TOOLS}/oracle.py facts").out)
        listing = "ls -A /dev/dri /dev/dri/by-path /dev/vfio 2>&1 | sed 's/^ls: //'"
        return {"functions": facts, "listing": self._guest.sh(listing).out.splitlines()}

    def step(self, step: Step) -> Json:
        """Act, wait until all is quiet, and return the record of it."""
        began, outcome = self._act(step)
        name = type(step).__name__.lower()
        self._wait_for_quiet()
        events = [_event(raw, began) for raw in self.events()]
        return {name: dataclasses.asdict(step), **outcome, "events": events, "after": self.state()}

    def events(self) -> list[Json]:
        """The events since the last call."""
        lines = self._guest.read(_LOG).splitlines()
        new = [json.loads(line) for line in lines[self._read :]]
        self._read = len(lines)
        return [event for event in new if "action" in event]

    def _act(self, step: Step) -> tuple[float, Json]:
        if isinstance(step, Write):
            done = self._guest.run("python3", f"{_TOOLS}/write_sysfs.py", step.path, step.text)
            answer = json.loads(done.out)
            return answer.pop("began"), answer
        began = self._now()
        match step:
            case Shell(text):
                result = self._guest.sh(text, check=False)
                outcome = {"rc": result.rc, "said": result.err.strip(), "seconds": result.seconds}
                return began, outcome
            case Plug(driver, name, properties):
                self._guest.plug(driver, name, **properties)
            case Unplug(name):
                self._guest.unplug(name)
        return began, {}

    def _now(self) -> float:
        uptime = self._guest.run("python3", "-c", "import time; print(time.monotonic())").out
        return float(uptime)

    def _wait_for_quiet(self) -> None:
        size = f"$(stat -c %s {_LOG})"
        loop = f'was=; while [ "$was" != "{size}" ]; do was={size}; sleep 0.7; done'
        self._guest.sh(f"{loop}; udevadm settle; {loop}")


def record(base: Installed, frozen: Path, sequence: Sequence) -> Json:
    """Act a sequence out on a resumed guest."""
    with Guest.resume(base.image, sequence.topology, frozen) as guest:
        recorder = Recorder(guest)
        before = recorder.state()
        steps = [recorder.step(step) for step in sequence.steps]
        head = {"about": sequence.about, "topology": sequence.topology.name}
        return {**head, **_versions(guest), "before": before, "steps": steps}


def record_boot(base: Installed) -> Json:
    """Boot with every kind of GPU, and record from before the cold plug on."""
    with Guest.boot(base.image, MANY_GPUS, base.disk, kernel_arguments="rig.record=1") as guest:
        lines = guest.read("/run/boot-uevents.jsonl").splitlines()
        raw = [json.loads(line) for line in lines]
        events = [
            _event(event, 0.0)
            for event in raw
            if event.get("properties", {}).get("SUBSYSTEM") in _SUBSYSTEMS
        ]
        about = "A boot with six GPUs: the cold plug. Times are since the kernel's start."
        step = {"shell": {"text": "boot"}, "events": events}
        return {"about": about, "topology": MANY_GPUS.name, **_versions(guest), "steps": [step]}


def save(name: str, recording: Json) -> Path:
    """Write a recording with one event a line, so that two of them can be compared."""
    path = RECORDED / f"{name}.json"
    path.write_text(_dump(recording, 0) + "\n")
    return path


def _versions(guest: Guest) -> Json:
    version = guest.sh("systemctl --version | head -n 1").out.strip()
    return {"kernel": guest.sh("uname -r").out.strip(), "systemd": version}


def _event(raw: Json, began: float) -> Json:
    properties = {
        key: value
        for key, value in raw["properties"].items()
        if key not in _NOISE
        and (raw["from"] == "kernel" or key in _KERNEL_KEYS or key in _FROM_UDEV)
    }
    head = {"ms": round((raw["t"] - began) * 1000, 1), "from": raw["from"]}
    return {**head, "action": raw["action"], "devpath": raw["devpath"], "properties": properties}


_KERNEL_KEYS: Final = frozenset(
    {
        *("SUBSYSTEM", "DRIVER", "MODALIAS", "MAJOR", "MINOR", "DEVNAME", "DEVTYPE", "HOTPLUG"),
        *("PCI_CLASS", "PCI_ID", "PCI_SUBSYS_ID", "PCI_SLOT_NAME", "CONNECTOR"),
    }
)


def _dump(value: object, depth: int) -> str:
    """JSON with every event and every function on one line."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list) or depth > 4 or len(flat) < 90:
        return flat
    if isinstance(value, dict) and ("ms" in value or "vendor" in value):
        return flat
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        inner = [f"{pad}{json.dumps(key)}: {_dump(item, depth + 1)}" for key, item in value.items()]
    else:
        inner = [f"{pad}{_dump(item, depth + 1)}" for item in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return "\n".join((first, ",\n".join(inner), " " * depth + last))
