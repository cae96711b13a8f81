#!/usr/bin/python3
"""Says what a host's specs hold, what they should hold, and what the agent says of itself.

    python3 -m inside.judge FOLDER      answers until SIGTERM; FOLDER gets two FIFOs, `in` and `out`

A request is one JSON object written to `in`, its answer one JSON object read from `out`. It waits
in here, not outside, until the host is at rest and all that it can compare agrees:

- the specs are what the oracle expects, and a second look at both finds nothing changed
- `there`: these functions are on the PCI bus; `gone`: these are not
- `holds`: {kind: [name, ...]}, all of each kind; `without`: these kinds have no spec
- unless `udev` is false, udevd's queue is empty
- the agent answers, calls itself healthy, has nothing waiting, and counts what the specs hold
- with `quiet`, the agent has read no message and made no pass for a while

The answer is the last look: `agreed`, or `why` not; `specs`, `expected`, `functions`, `metrics`,
and `usable`: of each VFIO group in the specs, whether it opens and is viable; with `in_use`, of
those that nobody uses.
Only the oracle's and the witness's code is used, none of the agent's.
"""

import errno
import json
import os
import re
import socket
import stat
import sys
import time
from typing import Any

from . import oracle, witness

SPECS = "/run/cdi"
METRICS = ("127.0.0.1", 9478)
PAUSE = 0.1
QUIET = 0.3
IN_USE = os.strerror(errno.EBUSY)

Kinds = dict[str, dict[str, list[str]]]
Json = dict[str, Any]


class DisagreementError(Exception):
    """Something is not, or not yet, as it should be; the text says what."""


def refuse(*, when: object, why: str) -> None:
    if when:
        raise DisagreementError(why)


def read_specs() -> Kinds:
    """{kind: {device: [node, ...]}}; raises DisagreementError for a spec that is none."""
    found: Kinds = {}
    try:
        for name in sorted(os.listdir(SPECS)):
            if name.endswith((".yaml", ".json")):
                with open(f"{SPECS}/{name}", "rb") as file:
                    kind, devices = witness.parse(file.read())
                found[kind] = {device: sorted(nodes) for device, nodes in devices.items()}
    except (OSError, witness.FaultError) as error:
        raise DisagreementError(f"a spec cannot be read: {error}") from error
    return found


def dealt_with(path: str) -> bool:
    """Whether udevd knows the node; without a udevd there is nothing to wait for."""
    if not os.path.exists("/run/udev/control"):
        return True
    try:
        found = os.stat(path)
    except OSError:
        return False
    number = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    return stat.S_ISCHR(found.st_mode) and os.path.exists(f"/run/udev/data/c{number}")


def metrics() -> dict[str, float] | None:
    """The agent's own metrics, None if it does not answer, or not with metrics."""
    try:
        with socket.create_connection(METRICS, timeout=10) as sock:
            sock.sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
            pieces = iter(lambda: sock.recv(1 << 16), b"")
            text = b"".join(pieces).decode().partition("\r\n\r\n")[2]
    except OSError:
        return None
    lines = (line.rpartition(" ") for line in text.splitlines())
    try:
        found = {
            name.removeprefix("cdi_agent_"): float(value)
            for name, _, value in lines
            if name.startswith("cdi_agent_") and "_bucket{" not in name
        }
    except ValueError:
        return None  # cut off: its end came while it answered
    return found if {"healthy", "queue_length"} <= found.keys() else None


def total(found: dict[str, float], name: str) -> float:
    """The sum of a metric over all its labels."""
    return sum(value for key, value in found.items() if key.partition("{")[0] == name)


def names(devices: dict[str, list[str]]) -> set[str]:
    return devices.keys() - {"all"}


def look(request: Json, answer: Json) -> None:
    """Look once and fill the answer in; raises DisagreementError."""
    busy = request.get("udev", True) and os.path.exists("/run/udev/queue")
    refuse(when=busy, why="udevd is at work")
    # What costs least comes first: under emulation, whoever waits is felt by whom he waits for.
    specs = answer["specs"] = read_specs()
    for kind, wanted in request.get("holds", {}).items():
        held = kind in specs and names(specs[kind]) == set(wanted)
        refuse(when=not held, why=f"{kind} should hold {wanted}")
    for kind in request.get("without", ()):
        refuse(when=kind in specs, why=f"{kind} should have no spec")
    functions = oracle.facts()
    answer["functions"] = oracle.displays(functions)
    answer["expected"] = oracle.expect(request["rules"], functions, dealt_with)
    absent = sorted(set(request.get("there", ())) - functions.keys())
    refuse(when=absent, why=f"not on the bus: {absent}")
    present = sorted(set(request.get("gone", ())) & functions.keys())
    refuse(when=present, why=f"still on the bus: {present}")
    refuse(when=specs != answer["expected"], why="the specs are not what is expected")
    said = metrics()
    if said is None:
        raise DisagreementError("the agent does not answer")
    answer["metrics"] = said
    disbelieve(said, specs)
    moving = specs != read_specs() or functions != oracle.facts()
    refuse(when=moving, why="something changes")


def disbelieve(said: dict[str, float], specs: Kinds) -> None:
    """Compare what the agent says of itself with what is so; raises DisagreementError."""
    refuse(when=said["healthy"] != 1, why="the agent calls itself unhealthy")
    refuse(when=said["queue_length"], why="messages wait")
    published = {
        match[1]: count
        for key, count in said.items()
        if (match := re.fullmatch(r'devices\{kind="(.+)",state="published"\}', key)) and count
    }
    counted = {kind: len(names(devices)) for kind, devices in specs.items()}
    refuse(when=published != counted, why=f"the agent counts {published}")


def look_until_quiet(request: Json, answer: Json) -> None:
    """As `look`, and once more to see that the agent has done nothing in between."""
    look(request, answer)
    if request.get("quiet"):
        before = answer["metrics"]
        time.sleep(QUIET)
        look(request, answer)
        for name in ("events_total", "passes_total"):
            same = total(before, name) == total(answer["metrics"], name)
            refuse(when=not same, why="the agent is at work")


def usable_groups(specs: Kinds) -> dict[str, Json]:
    """Each VFIO group that is published, opened as a launcher does."""
    nodes = {
        node
        for kind, devices in specs.items()
        if kind.endswith("-vfio")
        for paths in devices.values()
        for node in paths
    }
    groups = sorted(os.path.basename(node) for node in nodes - {"/dev/vfio/vfio"})
    return {group: oracle.usable(group) for group in groups}


def answer_to(request: Json) -> Json:
    began = time.monotonic()
    while True:
        answer: Json = {"agreed": True, "why": ""}
        try:
            look_until_quiet(request, answer)
        except DisagreementError as error:
            answer |= {"agreed": False, "why": str(error)}
        elapsed = time.monotonic() - began
        if answer["agreed"] or elapsed > request["seconds"]:
            found = usable_groups(answer.get("specs", {}))
            if request.get("in_use"):
                found = {group: how for group, how in found.items() if how["error"] != IN_USE}
            answer["usable"] = found
            return answer
        time.sleep(PAUSE)


def main() -> None:
    (folder,) = sys.argv[1:]
    os.makedirs(folder, exist_ok=True)
    for name in ("out", "in"):  # whoever finds `in` finds both
        if not os.path.exists(f"{folder}/{name}"):
            os.mkfifo(f"{folder}/{name}")
    while True:
        with open(f"{folder}/in") as questions:
            request = json.load(questions)
        answer = answer_to(request)
        with open(f"{folder}/out", "w") as answers:
            json.dump(answer, answers)


if __name__ == "__main__":
    main()
