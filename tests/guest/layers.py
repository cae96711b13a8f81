"""What is made from the image, and when: a disk with the agent installed, frozen guests of it.

    image ── copy, install ──▶ installed ── boot with a topology ──▶ frozen (one for each topology)

The agent is installed by the commands that the README gives, run as root in the image's tree: on
this machine's processor they take seconds, under emulation minutes. What they cannot do there, to
start the unit, the next boot does: a frozen guest has booted with the unit enabled, and its journal
tells how that went. Judge and witness run in it, as they would take seconds to start each time.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.guest import bundle, observers, qemu, rig, settings
from tests.guest import image as images
from tests.guest import topology as topologies
from tests.guest.cache import Cache, key_of
from tests.guest.image import INSIDE, Image
from tests.guest.rig import Guest
from tests.guest.topology import Topology

BUNDLE: Final = "root/cdi-agent"
"""Where a user would have unpacked what `bundle` holds, and runs the README's commands."""

_INSTALL: Final = f"""
set -eu
cd /{BUNDLE}
# No systemd runs in here: systemctl leaves to the boot what only a running one can do.
export SYSTEMD_OFFLINE=1
# A host without a network: pip looks into a folder instead.
export PIP_NO_INDEX=1 PIP_FIND_LINKS=/{BUNDLE}/wheels PIP_DISABLE_PIP_VERSION_CHECK=1
sh install.sh
install -D -m 0644 config.yaml /etc/cdi-agent/config.yaml
systemctl enable cdi-agent
"""

_SIZE: Final = "2500M"  # of the file system; the file is sparse


@dataclass(frozen=True, slots=True)
class Installed:
    """A disk to boot from, with the agent installed; nothing ever writes to it."""

    image: Image
    disk: Path


def installed(cache: Cache) -> Installed:
    """The disk, made if the image, the agent or its installation changed (twenty seconds)."""
    with (
        TemporaryDirectory(prefix="cdi-agent-bundle-") as name,
        ThreadPoolExecutor(1) as beside,
    ):
        contents = Path(name) / "cdi-agent"
        contents.mkdir()
        # Beside is what is soon over: whoever breaks this off has to wait for it.
        made = beside.submit(bundle.make, cache, contents)
        image = images.get(cache)
        content = made.result()
        key = key_of(_this(image.kernel), content, Path(__file__))
        folder = cache.get("installed", key, lambda target: _install(image, contents, target))
    return Installed(image, folder / "root.ext4")


def frozen(cache: Cache, base: Installed, topology: Topology) -> Path:
    """The folder of a guest that has booted with this topology; `Guest.resume` takes it."""

    def freeze(target: Path) -> None:
        with Guest.boot(base.image, topology, base.disk, to_freeze=target) as guest:
            observers.start(guest)
            guest.freeze(target)

    machine = (qemu.version(), Path(qemu.__file__), Path(topologies.__file__), Path(rig.__file__))
    programs = (Path(__file__), Path(observers.__file__), *sorted(INSIDE.glob("*.py")))
    key = key_of(_this(base.disk), topology.name, *machine, *programs)
    return cache.get(f"frozen-{topology.name}", key, freeze)


def all_frozen(cache: Cache, base: Installed, topologies: tuple[Topology, ...]) -> dict[str, Path]:
    """Freeze several topologies at once: a boot alone does not fill two processors."""
    with ThreadPoolExecutor(len(topologies)) as pool:
        folders = pool.map(lambda topology: frozen(cache, base, topology), topologies)
        return {topology.name: folder for topology, folder in zip(topologies, folders, strict=True)}


def _this(file: Path) -> str:
    """A file of the cache as part of a key: this one, and not one made again in its place.

    The bytes of a file system are others each time, and a frozen guest remembers where they were.
    """
    return f"{file.absolute()} {file.stat().st_mtime_ns}"


def _install(image: Image, contents: Path, target: Path) -> None:
    mkfs = settings.program("mkfs.ext4")
    tree = target / "tree"
    # Not linked: what an installation changes in place would change the image too.
    settings.run_logged(["cp", "--archive", "--reflink=auto", str(image.tree), str(tree)])
    shutil.copytree(contents, tree / BUNDLE)
    # systemd-tmpfiles wants a /proc
    proc = 'mount -t proc proc "$0"/proc; exec chroot "$0" sh -c "$1"'
    settings.run_logged([*settings.ALONE, "sh", "-ec", proc, str(tree), _INSTALL])
    # A small journal: after a reset there has to be what was synced, without an fsck.
    flags = ("-q", "-F", "-L", "root", "-J", "size=8", "-E", "lazy_itable_init=0")
    settings.run_logged([mkfs, *flags, "-d", str(tree), str(target / "root.ext4"), _SIZE])
    shutil.rmtree(tree)
