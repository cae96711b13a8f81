#!/usr/bin/python3
"""An independent look at a host: its PCI functions, and what its CDI specs should therefore hold.

    oracle.py facts               every display, and whatever else is on VFIO
    oracle.py expect RULES        what should be published, by rules as JSON
    oracle.py usable GROUP        whether /dev/vfio/GROUP opens and the kernel calls it viable

Written from the kernel's documentation and without a look at the agent, and deliberately the other
way around: the agent goes from a function to its nodes, this goes from the nodes up to the function
they belong to. Standard library only.

RULES is a list of {"kind", "vendor", "class", "needs": ["card", "render"]}: hexadecimal without 0x,
`class` the first digits of the class (03: display), `needs` which nodes make a device ready.
"""

import fcntl
import json
import os
import re
import stat
import sys
from collections.abc import Callable
from typing import Any

ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
BRIDGES = "06"
DISPLAYS = "03"

# linux/vfio.h
VFIO_GROUP_GET_STATUS = 0x3B67  # _IO(';', 100 + 3)
VFIO_GROUP_FLAGS_VIABLE = 1

Facts = dict[str, dict[str, Any]]


def read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


def link_name(path: str) -> str | None:
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def is_node(path: str, number: str) -> bool:
    """Whether /dev has this character device under the number that sysfs gives it."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    device = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    return stat.S_ISCHR(found.st_mode) and device == number


def character_devices() -> list[tuple[str, str, str]]:
    """(owner's address, name, path) of every node in /dev that belongs to a PCI function."""
    found = []
    for number in os.listdir("/sys/dev/char"):
        try:
            where = os.readlink(f"/sys/dev/char/{number}")
            owners = [part for part in where.split("/") if ADDRESS.fullmatch(part)]
            if not owners:
                continue
            lines = read(f"/sys/dev/char/{where}/uevent").splitlines()
        except OSError:
            continue  # gone since
        path = f"/dev/{dict(line.split('=', 1) for line in lines).get('DEVNAME', '')}"
        if is_node(path, number):
            found.append((owners[-1], os.path.basename(where), path))
    return sorted(found)


def facts(*, overrides: bool = False) -> Facts:
    """Every function; with `overrides` also driver_override, which a hung unbind holds back."""
    functions: Facts = {}
    root = "/sys/bus/pci/devices"
    for address in sorted(os.listdir(root)):
        folder = f"{root}/{address}"
        try:
            functions[address] = {
                "vendor": read(f"{folder}/vendor").removeprefix("0x"),
                "device": read(f"{folder}/device").removeprefix("0x"),
                "class": read(f"{folder}/class").removeprefix("0x"),
                "driver": link_name(f"{folder}/driver"),
                "group": link_name(f"{folder}/iommu_group"),
                "vfio": os.path.isdir(f"{folder}/vfio-dev"),
                "nodes": {},
            }
            if overrides:
                functions[address]["driver_override"] = read(f"{folder}/driver_override")
        except OSError:
            functions.pop(address, None)  # unplugged while it was read
    for owner, name, path in character_devices():
        if owner in functions:
            functions[owner]["nodes"][name] = path
    return functions


def displays(functions: Facts) -> Facts:
    """The displays among the functions, and whatever else is on VFIO."""
    return {
        address: found
        for address, found in functions.items()
        if found["class"].startswith(DISPLAYS) or found["vfio"]
    }


def viable(group: str, functions: Facts) -> bool:
    """The kernel's rule: everything in the group but bridges is on VFIO or has no driver."""
    members = [found for found in functions.values() if found["group"] == group]
    return all(
        found["vfio"] or found["driver"] is None or found["class"].startswith(BRIDGES)
        for found in members
    )


def every(path: str) -> bool:
    """Take each node as soon as it is there."""
    return bool(path)


def drm_nodes(found: dict[str, Any], needs: list[str]) -> list[str] | None:
    """The nodes of a function that is ready, None if one that it needs is not there."""
    prefixes = {"card": "card", "render": "renderD"}
    nodes: list[str] = []
    for need in needs:
        there = [
            path
            for name, path in found["nodes"].items()
            if re.fullmatch(prefixes[need] + "[0-9]+", name)
        ]
        if not there:
            return None
        nodes += there
    return sorted(nodes)


def expect(
    rules: list[dict[str, Any]], functions: Facts, settled: Callable[[str], bool] = every
) -> dict[str, dict[str, list[str]]]:
    """{kind: {device name: [node, ...]}}; a kind without a device is absent.

    `settled` says which nodes count yet.
    """
    kinds: dict[str, dict[str, list[str]]] = {}
    for rule in rules:
        plain: dict[str, list[str]] = {}
        vfio: dict[str, list[str]] = {}
        for address, found in functions.items():
            if found["vendor"] != rule["vendor"] or not found["class"].startswith(rule["class"]):
                continue
            name = address.replace(":", "-").replace(".", "-") + f"-0x{found['device']}"
            group = found["group"]
            if found["vfio"]:
                nodes = ["/dev/vfio/vfio", f"/dev/vfio/{group}"]
                there = all(os.path.exists(node) and settled(node) for node in nodes)
                if there and viable(group, functions):
                    vfio[name] = sorted(nodes)
            elif (ready := drm_nodes(found, rule["needs"])) and all(map(settled, ready)):
                plain[name] = ready
        if plain:
            plain["all"] = sorted({node for nodes in plain.values() for node in nodes})
            kinds[rule["kind"]] = plain
        if vfio:
            kinds[f"{rule['kind']}-vfio"] = vfio
    return kinds


def usable(group: str) -> dict[str, Any]:
    """Open the group as a virtual machine's launcher does, and ask the kernel about it."""
    try:
        node = os.open(f"/dev/vfio/{group}", os.O_RDWR)
    except OSError as error:
        return {"opens": False, "error": os.strerror(error.errno or 0), "viable": False}
    try:
        # struct vfio_group_status: its own size, then the flags
        status = bytearray((8).to_bytes(4, sys.byteorder) + bytes(4))
        fcntl.ioctl(node, VFIO_GROUP_GET_STATUS, status)
    finally:
        os.close(node)
    flags = int.from_bytes(status[4:], sys.byteorder)
    return {"opens": True, "error": None, "viable": bool(flags & VFIO_GROUP_FLAGS_VIABLE)}


def main() -> None:
    match sys.argv[1:]:
        case ["facts"]:
            answer: object = displays(facts(overrides=True))
        case ["expect", rules]:
            answer = expect(json.loads(rules), facts())
        case ["usable", group]:
            answer = usable(group)
        case _:
            sys.exit(__doc__)
    json.dump(answer, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
