"""What a person does with the rig, from the project's folder.

python -m tests.guest build                    make image, installed disk and frozen guests
python -m tests.guest shell [TOPOLOGY]         a shell on a resumed guest (default: one-gpu)
python -m tests.guest record [SEQUENCE...]     record anew what the kernel says
python -m tests.guest clean                    remove the cache
"""

import sys
import time

from tests.guest import layers, record, sequences
from tests.guest.cache import Cache, default_root
from tests.guest.rig import Guest
from tests.guest.topology import TOPOLOGIES


def build(cache: Cache) -> None:
    began = time.monotonic()
    base = layers.installed(cache)
    print(f"{time.monotonic() - began:6.1f} s  image and installed disk")
    layers.all_frozen(cache, base, TOPOLOGIES)
    print(f"{time.monotonic() - began:6.1f} s  frozen guests")
    print(f"in {cache.root}")


def shell(cache: Cache, name: str) -> None:
    """Read lines and run each; a folder or a variable does not last from one to the next."""
    (topology,) = (topology for topology in TOPOLOGIES if topology.name == name)
    base = layers.installed(cache)
    with Guest.resume(base.image, topology, layers.frozen(cache, base, topology)) as guest:
        print(f"console and QEMU's log: {guest.folder}")
        print("plug DRIVER NAME PORT, unplug NAME, or any shell command; Ctrl-D ends the guest")
        while line := _prompt():
            match line.split():
                case ["plug", driver, device, port]:
                    guest.plug(driver, device, bus=f"rp{port}")
                case ["unplug", device]:
                    guest.unplug(device)
                case _:
                    result = guest.sh(line, check=False)
                    print(f"{result.out}{result.err}[{result.rc}, {result.seconds:.2f} s]")


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


def main() -> None:
    cache = Cache(default_root())
    match sys.argv[1:]:
        case ["build"]:
            build(cache)
        case ["shell"]:
            shell(cache, "one-gpu")
        case ["shell", name]:
            shell(cache, name)
        case ["record", *names]:
            record_all(cache, names)
        case ["clean"]:
            cache.clear()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
