"""`make install` and `make uninstall`, on a copy of this host that only the test sees."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.vfio.journal import Journal
from agent.vfio.model import Durable
from tests.vfio.journals import STRAY

pytestmark = [pytest.mark.netns, pytest.mark.systemd, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]

# What is written to these folders goes to a tmpfs that ends with the namespace.
SCRIPT = """
set -euo pipefail
mount -t tmpfs tmpfs /mnt
for folder in etc opt var; do
  mkdir -p /mnt/$folder /mnt/$folder-work
  layers=lowerdir=/$folder,upperdir=/mnt/$folder,workdir=/mnt/$folder-work
  mount -t overlay overlay -o $layers /$folder
done
mkdir -p /mnt/run && mount --bind /mnt/run /run
cd "$1"
mkdir /opt/other && touch /opt/other/file
for verb in '' uninstall; do
  ! PREFIX=/opt/other/ systemd/install $verb || exit 3
done
test -e /opt/other/file && rm -r /opt/other
systemd/install
cat /opt/cdi-agent/bin/cdi-agent | head -n 1
systemd-analyze verify /etc/systemd/system/cdi-agent.service
systemctl enable cdi-agent.service cdi-agent-metrics.socket
systemd-tmpfiles --create cdi-agent.conf
test -d /run/cdi
echo '# mine' > /etc/cdi-agent/config.yaml
/opt/cdi-agent/bin/cdi-agent check-config
echo '# Written by cdi-agent, which rewrites it when devices come and go: do not edit.' \
  > /run/cdi/cdi-agent_intel.com-gpu.yaml
echo 'kind: vendor.com/gpu' > /run/cdi/vendor.yaml
mkdir -p /var/lib/cdi-agent && cp "$2/claims.json" /var/lib/cdi-agent/
! systemd/install uninstall || exit 4
test -x /opt/cdi-agent/bin/cdi-agent
rm /var/lib/cdi-agent/claims.json
systemd/install uninstall
ls /opt /etc/systemd/system /etc/systemd/system/*.wants /etc/tmpfiles.d /etc/cdi-agent /run/cdi
"""


def as_in_the_image(place: Path) -> Path:
    """The files that the container recipe copies before it installs: no more is needed for that."""
    recipe = (ROOT / "Containerfile").read_text()
    build, _, _ = recipe.partition("\nFROM ")[2].partition("\nFROM ")
    assert "&& systemd/install\n" in build
    for line in re.findall(r"^COPY (.+)$", build, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            path = ROOT / source
            if path.is_dir():
                shutil.copytree(path, place / target)
            else:
                shutil.copy(path, place / target)
    return place


def test_installs_a_working_service_and_takes_it_away_again(tmp_path: Path) -> None:
    """Unless somebody's device would be left on VFIO, and nobody would know where it belongs."""
    asyncio.run(Journal(str(tmp_path)).save(Durable(strays=(STRAY,))))
    process = subprocess.run(
        [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "bash",
            "-c",
            SCRIPT,
            "bash",
            as_in_the_image(tmp_path / "src"),
            tmp_path,
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    refusal = "PREFIX=/opt/other is there and holds something else than cdi-agent"
    assert process.stderr.count(refusal) == 2
    assert process.stderr.count("devices are claimed, or stranded") == 1
    installed, _, left = process.stdout.partition("cdi-agent is gone; /etc/cdi-agent stays.\n")
    assert "#!/opt/cdi-agent/bin/python" in installed
    assert "/etc/cdi-agent/config.yaml is good" in installed
    assert [line for line in left.splitlines() if "cdi" in line] == [
        "/etc/cdi-agent:",
        "/run/cdi:",
    ]
    assert "config.yaml" in left
    assert "vendor.yaml" in left


def test_without_root_it_says_so() -> None:
    # Handed over open, and begun in /: the clone may lie where only its owner may look.
    with (ROOT / "systemd/install").open() as script:
        process = subprocess.run(
            ["setpriv", "--reuid=65534", "--clear-groups", "bash", "-s"],
            cwd="/",
            stdin=script,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (process.returncode, process.stderr) == (1, "systemd/install: needs root\n")
