"""The real journald, in namespaces of its own, understands what the log sends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOURNALD = "/lib/systemd/systemd-journald"

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(not os.path.exists(JOURNALD), reason="needs journald, of Debian's systemd"),
]

# A host with nothing but a journal: /etc and /run are empty but for it.
HOST = f"""
set -eu
mount -t tmpfs tmpfs /etc
mkdir -p /etc/systemd
echo 0123456789abcdef0123456789abcdef > /etc/machine-id
printf '[Journal]\\nStorage=volatile\\nReadKMsg=no\\nAudit=no\\n' > /etc/systemd/journald.conf
mount -t tmpfs tmpfs /run
mkdir -p /run/log/journal /run/systemd/journal
{JOURNALD} >/dev/null 2>&1 &
until [ -S /run/systemd/journal/socket ]; do sleep 0.02; done
systemd-cat -t stream "$@"
journalctl --sync
journalctl -o json --no-pager
"""

# Says everything twice: to the journal's socket, and as lines on its stream.
PROGRAM = """
import os, sys
from agent.observe import log
from agent.observe.settings import LogSettings
import structlog
status = os.fstat(2)
environ = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}  # as systemd sets it for a unit
for journal in ("/run/systemd/journal/socket", "/nowhere"):
    opened = log.configure(LogSettings(), environ=environ, journal=journal)
    structlog.get_logger().error(
        "spec-write-failed", sink=opened.sink, kind="intel.com/gpu", attempt=3,
        problem="no space left", evil="a\\nPRIORITY=0\\n<0>forged",
    )
    structlog.get_logger().error("crashed", exc_info=ValueError("one\\ntwo"))
    assert opened.dropped == 0
    opened.close()
"""


@pytest.fixture(scope="module")
def journal() -> list[dict[str, str]]:
    """Every entry that the program made, as the journal has it."""
    done = subprocess.run(
        [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("bash", "-c", HOST, "bash", sys.executable, "-c", PROGRAM),
        ],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "SYSTEMD_COLORS": "0",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    return [entry for entry in entries if entry["SYSLOG_IDENTIFIER"] in {"cdi-agent", "stream"}]


def sent_by(journal: list[dict[str, str]], transport: str) -> list[dict[str, str]]:
    """Those that came that way, in order; journald does not order the ways among each other."""
    return [entry for entry in journal if entry["_TRANSPORT"] == transport]


def test_an_entry_has_its_fields(journal: list[dict[str, str]]) -> None:
    entry = sent_by(journal, "journal")[0]
    assert entry["SYSLOG_IDENTIFIER"] == "cdi-agent"
    assert entry["PRIORITY"] == "3"
    assert entry["CDI_AGENT_EVENT"] == "spec-write-failed"
    assert entry["CDI_AGENT_KIND"] == "intel.com/gpu"
    assert entry["CDI_AGENT_ATTEMPT"] == "3"
    assert entry["CDI_AGENT_SINK"] == "journal"
    assert entry["MESSAGE"].startswith("spec-write-failed: no space left ")


def test_a_traceback_keeps_its_lines(journal: list[dict[str, str]]) -> None:
    assert sent_by(journal, "journal")[1]["CDI_AGENT_TRACEBACK"] == "ValueError: one\ntwo"


def test_lines_on_the_stream_have_their_priority(journal: list[dict[str, str]]) -> None:
    lines = sent_by(journal, "stdout")
    assert {line["PRIORITY"] for line in lines} == {"3"}
    assert lines[0]["MESSAGE"].startswith("spec-write-failed: no space left sink=prefixed ")
    assert [line["MESSAGE"] for line in lines[1:]] == [
        'crashed error="ValueError: one\\ntwo"',
        "    ValueError: one",
        "    two",
    ]


def test_nothing_was_forged(journal: list[dict[str, str]]) -> None:
    assert len(sent_by(journal, "journal")) == 2
    assert len(sent_by(journal, "stdout")) == 4
    assert {entry["PRIORITY"] for entry in journal} == {"3"}
