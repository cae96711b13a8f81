"""The numbers that the project promises, measured; `make bench` prints them as a table."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.bench, pytest.mark.netns]

ROOT = Path(__file__).parents[2]


def rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What, target, measured."""
    one, many = result["one_of_1"], result["one_of_512"]
    cpu = f"{many['cpu_ms'] / one['cpu_ms']:.1f} x ({many['cpu_ms']:.1f} ms)"

    def both(spread: dict[str, float]) -> str:
        return f"p50 {spread['p50']:.1f} ms, p99 {spread['p99']:.1f} ms"

    def ratio(key: str) -> str:
        return f"{many[key]['p50'] / one[key]['p50']:.1f} x ({both(many[key])})"

    burst = result["burst"]
    survived = (
        f"right {burst['over_after_seconds'] * 1000:.0f} ms after its end; "
        f"{burst['overflows']:.0f} overflows, {burst['passes']:.0f} passes, "
        f"{burst['grown_mib']:.1f} MiB more"
    )
    return [
        (
            "message of a removal to entry off the disk, 1 GPU",
            "p50 3, p99 10 ms",
            both(one["removal"]),
        ),
        (
            "last message of an arrival to entry, beyond settle",
            "p50 5, p99 15 ms",
            both(one["arrival"]),
        ),
        ("removal of one device of 512, against one of 1", "3 x", ratio("removal")),
        ("arrival of one device of 512, against one of 1", "3 x", ratio("arrival")),
        ("CPU of both for one of 512, against one of 1", "3 x", cpu),
        ("burst of 100,000 messages", "final state right", survived),
        ("start to READY, 8 GPUs", "0.4 s CPU", f"{result['ready_cpu_seconds']:.2f} s CPU"),
        ("idle after the first scrape", "RSS 45 MiB", f"{result['rss_mib']:.1f} MiB"),
        (
            "wakeups in 10 s of idleness",
            "watchdog and resync only",
            f"{result['idle_wakeups_in_10s']}",
        ),
    ]


@pytest.mark.timeout(600)
def test_numbers(tmp_path: Path) -> None:
    process = subprocess.run(
        [
            *("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("--propagation", "private", sys.executable, "-m", "tests.bench.private"),
            str(tmp_path),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    table = [("what", "target", "measured"), *rows(json.loads(process.stdout))]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    print()
    for row in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
