"""What tells why a test failed: the guest's journal, specs and devices, and what QEMU knows."""

import shutil
from pathlib import Path
from typing import Final

from tests.guest.channel import GuestGoneError
from tests.guest.rig import Guest

_WANTED: Final = {
    "journal.txt": "journalctl --no-pager --output=short-monotonic --merge",
    "units.txt": "systemctl list-units --all --no-pager --full; systemctl list-jobs",
    "devices.txt": (
        "lspci -nnk; ls -lR /dev/dri /dev/vfio; "
        "grep -H . /sys/bus/pci/devices/*/driver_override; "
        "ls -l /sys/bus/pci/devices/*/driver /sys/kernel/iommu_groups/*/devices"
    ),
    "specs.txt": "ls -la /run/cdi; tail -n +1 /run/cdi/*",
    "claims.txt": "tail -n +1 /var/lib/cdi-agent/*.json",
}
"""What is asked of the guest, by the file that the answer goes to."""

_ASKED: Final = ("info status", "info registers -a", "info pci")
"""What is asked of QEMU: where the processors are if the guest is silent."""

_SECONDS: Final = 60.0


def collect(guest: Guest, folder: Path) -> list[Path]:
    """Save it all into a folder; of a guest that does not answer, that it does not."""
    folder.mkdir(parents=True, exist_ok=True)
    silent = ""
    for name, command in _WANTED.items():
        try:
            text = silent or guest.sh(command, seconds=_SECONDS, check=False).out
        except (GuestGoneError, TimeoutError) as error:
            text = silent = f"{str(error) or 'the guest does not answer'}\n"
        (folder / name).write_text(text)
    (folder / "monitor.txt").write_text("\n".join(map(guest.monitor, _ASKED)))
    for name in ("console.log", "qemu.log"):
        shutil.copy(guest.folder / name, folder / name)
    return sorted(folder.iterdir())
