"""What a person does with the rig, from the project's folder.

python -m tests.guest build [TOPOLOGY...]      make image, installed disk and frozen guests
python -m tests.guest shell [TOPOLOGY]         a shell on a resumed guest (default: one-gpu)
python -m tests.guest record [SEQUENCE...]     record anew what the kernel says
python -m tests.guest clean                    remove the cache
"""

import signal
import sys
import time
from collections.abc import Collection
from typing import Final

from tests.guest import layers, record, sequences
from tests.guest.cache import Cache, default_root
from tests.guest.qmp import QmpError
from tests.guest.rig import Guest
from tests.guest.settings import CannotRunError
from tests.guest.topology import ONE_GPU, TOPOLOGIES, Topology

_TOPOLOGIES: Final = {topology.name: topology for topology in TOPOLOGIES}
_RECORDINGS: Final = ("boot", *(sequence.name for sequence in sequences.SEQUENCES))


def build(cache: Cache, topologies: tuple[Topology, ...]) -> None:
    began = time.monotonic()
    base = layers.installed(cache)
    print(f"{time.monotonic() - began:6.1f} s  image and installed disk")
    layers.all_frozen(cache, base, topologies)
    print(f"{time.monotonic() - began:6.1f} s  frozen guests")
    print(f"in {cache.root}")


def shell(cache: Cache, topology: Topology) -> None:
    """Read lines and run each; a folder or a variable does not last from one to the next."""
    base = layers.installed(cache)
    with Guest.resume(base.image, topology, layers.frozen(cache, base, topology)) as guest:
        print(f"console and QEMU's log: {guest.folder}")
        print("plug DRIVER NAME PORT, unplug NAME, or any shell command; Ctrl-D ends the guest")
        while line := _prompt():
            try:
                print(_done(guest, line))
            except (QmpError, TimeoutError) as error:
                print(error)


def _done(guest: Guest, line: str) -> str:
    """Do what a line says; what there is to tell of it."""
    match line.split():
        case ["plug", driver, device, port]:
            guest.plug(driver, device, bus=f"rp{port}")
            return f"plugged {device}"
        case ["unplug", device]:
            guest.unplug(device)
            return f"unplugged {device}"
        case _:
            result = guest.sh(line, check=False)
            return f"{result.out}{result.err}[{result.rc}, {result.seconds:.2f} s]"


def record_all(cache: Cache, names: list[str]) -> None:
    base = layers.installed(cache)
    frozen = layers.all_frozen(cache, base, TOPOLOGIES)
    for sequence in sequences.SEQUENCES:
        if not names or sequence.name in names:
            recording = record.record(base, frozen[sequence.topology.name], sequence)
            print(record.save(sequence.name, recording))
    if not names or "boot" in names:
        print(record.save("boot", record.record_boot(base)))


def _prompt() -> str:
    try:
        return input("guest# ") or ":"
    except EOFError:
        return ""


def _known(names: Collection[str], known: Collection[str]) -> None:
    """End with a sentence if one of the names is none."""
    for name in names:
        if name not in known:
            sys.exit(f"there is no {name}, only {', '.join(known)}")


def main() -> None:
    # What is killed ends its guests and leaves nothing half made, as after a Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        match sys.argv[1:]:
            case ["build", *names]:
                _known(names, _TOPOLOGIES)
                build(_cache(), tuple(_TOPOLOGIES[name] for name in names or _TOPOLOGIES))
            case ["shell", *names] if len(names) <= 1:
                _known(names, _TOPOLOGIES)
                shell(_cache(), _TOPOLOGIES[names[0]] if names else ONE_GPU)
            case ["record", *names]:
                _known(names, _RECORDINGS)
                record_all(_cache(), names)
            case ["clean"]:
                _cache().clear()
            case _:
                sys.exit(__doc__)
    except CannotRunError as error:
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        sys.exit("broken off")


def _cache() -> Cache:
    return Cache(default_root())


if __name__ == "__main__":
    main()
