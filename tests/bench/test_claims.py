"""What a claim costs beyond what the kernel itself takes; `make bench` prints it as a table.

A real agent process, on a simulated kernel that runs in this one, is asked over its control socket.
What the kernel was busy with writes is taken off the time until the answer, and so is ``settle``,
which is waited for on purpose.
"""

import time
from pathlib import Path
from statistics import median

import pytest

from agent.reconcile.rules import Timing
from agent.simulate import Features
from tests.claims.host import ClaimHost, Document, Settings
from tests.claims.nursery import Nursery
from tests.claims.shapes import AUDIO, ONE, TWO, Shape

pytestmark = pytest.mark.bench

ROUNDS = 40
SETTLE = Timing().settle


def beyond(host: ClaimHost, took: float) -> float:
    """Milliseconds of an order that neither the kernel took nor ``settle``."""
    busy, until = 0.0, 0.0
    for began, ended in sorted(host.kernel.busy):
        busy += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return 1000 * (took - busy - SETTLE)


def measure(host: ClaimHost, shape: Shape) -> dict[str, list[float]]:
    """Claim and release again and again."""
    found: dict[str, list[float]] = {"prepare": [], "release": []}
    for _ in range(ROUNDS):
        for order, ask in (("prepare", shape.prepare), ("release", release)):
            host.kernel.busy.clear()
            began = time.monotonic()
            answer = ask(host)
            found[order].append(beyond(host, time.monotonic() - began))
            assert answer["ok"], answer
    return found


def release(host: ClaimHost) -> Document:
    return host.release("vm")


@pytest.mark.timeout(300)
def test_numbers(tmp_path: Path) -> None:
    nursery = Nursery()
    print(f"\n{'beyond the kernel and settle':34}  {'target':9}  measured")
    for number, shape in enumerate((ONE, AUDIO, TWO)):
        folder = tmp_path / str(number)
        folder.mkdir()
        settings: Settings = {"reconcile": {"settle": SETTLE}, "log": {"level": "warning"}}
        features = Features(drivers=shape.drivers)
        with ClaimHost(
            folder, nursery, *shape.hardware, features=features, settings=settings
        ) as host:
            host.reader.close()  # it would compete for the processors
            host.asks_twice = False
            shape.start(host)
            for order, values in measure(host, shape).items():
                last = sorted(values)[int(len(values) * 0.95)]
                target = "p50 80 ms" if order == "prepare" else ""
                what = f"{order}: {shape.name}"
                print(f"{what:34}  {target:9}  p50 {median(values):.0f} ms, p95 {last:.0f} ms")
    nursery.close()
