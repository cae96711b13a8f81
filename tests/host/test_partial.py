"""A look at what the messages name gives the same inventory as a look at everything.

Hypothesis changes a small host in every way that matters for it (renumbering, group changes, VFs,
drivers, orphans, links, functions that cannot be read for a while) and hands on only what the
kernel and udev would have said.
"""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from agent.host.hints import EVERYTHING, scope_of
from agent.host.model import Inventory
from tests.host.tree import Host

ADDRESSES = (
    "0000:03:00.0",
    "0000:03:00.1",
    "0000:03:00.2",
    "0000:04:00.0",
    "0000:04:00.1",
    "0000:05:00.0",
    "10000:e1:00.0",
)
NUMBERS = range(3)
GROUPS = (None, 1, 2, 3)


@dataclasses.dataclass(frozen=True)
class Step:
    """One change of a host, as far as the host allows it."""

    what: str
    address: str
    other: str
    number: int
    group: int | None

    def __str__(self) -> str:
        return f"{self.what} {self.address} {self.other} {self.number} {self.group}"


def taken(host: Host, name: str) -> bool:
    return any(path.name == name for path in host.root.glob("sys/class/*/*"))


def bind(host: Host, step: Step) -> None:
    if step.address in host.functions and host.functions[step.address].driver is None:
        nodes = (f"card{step.number}", f"renderD{128 + step.number}")
        if not any(taken(host, node) for node in nodes):
            host.bind(step.address, "xe", *nodes)


def bind_vfio(host: Host, step: Step) -> None:
    function = host.functions.get(step.address)
    if function is None or function.driver is not None or taken(host, f"vfio{step.number}"):
        return
    if function.group is not None and not taken(host, str(function.group)):
        host.add_group_node(function.group)
    host.bind(step.address, "vfio-pci", f"vfio{step.number}")


def unbind(host: Host, step: Step) -> None:
    if step.address in host.functions:
        host.unbind(step.address)


def lose_group_node(host: Host, step: Step) -> None:
    if step.group is not None and taken(host, str(step.group)):
        host.remove_group_node(step.group)


def swap(host: Host, step: Step) -> None:
    """Two cards bound again in the other order swap their numbers."""
    names = {}
    for address in {step.address, step.other} & set(host.functions):
        names[address] = tuple(host.functions[address].nodes)
        if host.functions[address].driver != "xe":
            return
    if len(names) == 2:
        for address in names:
            host.unbind(address)
        host.bind(step.address, "xe", *names[step.other])
        host.bind(step.other, "xe", *names[step.address])


def add(host: Host, step: Step) -> None:
    if step.address not in host.functions:
        host.add(step.address, group=step.group)


def add_vf(host: Host, step: Step) -> None:
    pf = host.functions.get(step.other)
    if step.address not in host.functions and pf is not None and pf.pf is None:
        host.add(step.address, group=step.group, pf=step.other)


def remove(host: Host, step: Step) -> None:
    if step.address in host.functions:
        host.remove(step.address)


def move(host: Host, step: Step) -> None:
    if step.address in host.functions:
        host.move_to_group(step.address, step.group)


def orphan(host: Host, step: Step) -> None:
    """A virtual card comes or goes, or a framebuffer below a function."""
    name = f"card{step.number}"
    device = "/devices/platform/vkms"
    if step.address in host.functions:
        device = f"{host.functions[step.address].devpath}/simple-framebuffer.0"
    if (host.root / f"sys{device}/drm/{name}").exists():
        host.remove_orphan(name, device)
    elif not taken(host, name):
        host.add_orphan(name, device)


def unsettle(host: Host, step: Step) -> None:
    """A node is forgotten by udev a node, or dealt with."""
    for name, devpath in host.functions.get(step.address, EMPTY).nodes.items():
        number = (host.root / f"sys{devpath}/dev").read_text().strip()
        entry = host.root / f"run/udev/data/c{number}"
        if entry.exists():
            entry.unlink()
        else:
            entry.touch()
        host.say("change", devpath, "drm", f"/dev/dri/{name}" if "card" in name else None)


def relink(host: Host, step: Step) -> None:
    """The link of a function leads to some other card, or to nothing."""
    if step.address in host.functions:
        host.link(f"dev/dri/by-path/pci-{step.address}-card", f"dev/dri/card{step.number}")
        host.say("change", host.functions[step.address].devpath, "pci")


def spoil(host: Host, step: Step) -> None:
    """A function cannot be read for a while."""
    if step.address in host.functions:
        path = host.sys(step.address, "revision")
        path.write_text("0x00\n" if "odd" in path.read_text() else "odd")
        host.say("change", host.functions[step.address].devpath, "pci")


def fake_node(host: Host, step: Step) -> None:
    """Something else is at the path of a node, or the node is back."""
    for name, devpath in host.functions.get(step.address, EMPTY).nodes.items():
        if "card" in name:
            number = (host.root / f"sys{devpath}/dev").read_text().strip()
            node = host.root / f"dev/dri/{name}"
            node.write_text("9:9" if node.read_text() == number else number)
            host.say("change", devpath, "drm", f"/dev/dri/{name}")


class _Nothing:
    nodes: dict[str, str] = {}  # noqa: RUF012 - stands for a function that is not there


EMPTY = _Nothing()

CHANGES: dict[str, Callable[[Host, Step], None]] = {
    function.__name__: function
    for function in (
        add,
        add_vf,
        bind,
        bind_vfio,
        fake_node,
        lose_group_node,
        move,
        orphan,
        relink,
        remove,
        spoil,
        swap,
        unbind,
        unsettle,
    )
}

steps = st.builds(
    Step,
    what=st.sampled_from(sorted(CHANGES)),
    address=st.sampled_from(ADDRESSES),
    other=st.sampled_from(ADDRESSES),
    number=st.sampled_from(NUMBERS),
    group=st.sampled_from(GROUPS),
)


@settings(max_examples=60)
@given(
    start=st.lists(steps, max_size=12),
    batches=st.lists(st.lists(steps, min_size=1, max_size=3), min_size=1, max_size=8),
)
def test_a_partial_look_agrees_with_a_full_one(
    tmp_path_factory: pytest.TempPathFactory, start: list[Step], batches: list[list[Step]]
) -> None:
    host = Host(tmp_path_factory.mktemp("host"))
    for address, group in zip(ADDRESSES, (1, 1, None, 2, 3, 3, None), strict=True):
        host.add(address, group=group)
    for step in start:
        CHANGES[step.what](host, step)
    scanner = host.scanner()
    inventory = scanner.scan(EVERYTHING, Inventory())
    for batch in batches:
        host.hints.clear()
        for step in batch:
            CHANGES[step.what](host, step)
        scope = scope_of(host.hints, inventory)
        event("full" if scope.everything else f"partial, orphans: {scope.orphans}")
        before = inventory
        inventory = scanner.scan(scope, before)
        full = host.scanner().scan(EVERYTHING, Inventory())
        assert inventory == full
        assert list(inventory.functions) == list(full.functions)
        assert (inventory.by_node, inventory.by_group) == (full.by_node, full.by_group)
        assert_same_objects(inventory, before)
        addresses = before.functions.keys() | inventory.functions.keys()
        differ = {a for a in addresses if before.functions.get(a) is not inventory.functions.get(a)}
        assert inventory.changed_since(before.functions) == differ
        assert scanner.scan(EVERYTHING, inventory).functions is inventory.functions


def assert_same_objects(after: Inventory, before: Inventory) -> None:
    """What is as it was is the same object, whether it was read or not."""
    for address, function in after.functions.items():
        assert function is before.functions.get(address) or function != before.functions.get(
            address
        )
