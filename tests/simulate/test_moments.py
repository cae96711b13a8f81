"""Whatever moment a reader looks at, it sees what a kernel can show, and a look copes with it.

The look comes after every single change of a file, so no order of steps escapes it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

import pytest
from msgspec import structs

from agent.host.hints import EVERYTHING
from agent.host.model import Address, Inventory, NodeState
from agent.host.scan import Scanner
from agent.simulate import Hardware, Kernel, UdevMode, stat_plain
from agent.simulate import host as shapes

GPU: Final = "0000:03:00.0"
OTHER: Final = "0000:05:00.0"


def small(hardware: Hardware) -> Hardware:
    """Without what brings many moments and nothing new."""
    return structs.replace(hardware, makes=shapes.HEADLESS, bridges=())


ONE: Final = small(*shapes.arc_b50())
TWO: Final = small(shapes.two_functions()[0])


class Looker:
    """Looks at the host after each change, and keeps what it saw of one function."""

    def __init__(self, kernel: Kernel) -> None:
        root = kernel.root
        self._kernel = kernel
        self._scanner = Scanner(
            sys=root / "sys",
            dev=root / "dev",
            run=root / "run",
            proc=root / "proc",
            stat_node=stat_plain,
        )
        self.seen: list[tuple[str | None, tuple[tuple[str, NodeState], ...]]] = []
        self.looks = 0

    def __call__(self) -> None:
        self.looks += 1
        inventory = self.look()
        assert inventory.dropped == {}
        paths = Counter(
            node.path
            for function in inventory.functions.values()
            for node in function.nodes
            if node.counts and not node.path.startswith("/dev/vfio/")
        )
        assert not [path for path, count in paths.items() if count > 1], "one path, two functions"
        function = inventory.functions.get(Address(GPU))
        if function is None:
            return
        state = (
            function.driver,
            tuple((node.name, node.state) for node in function.nodes),
        )
        if not self.seen or self.seen[-1] != state:
            self.seen.append(state)

    def look(self) -> Inventory:
        return self._scanner.scan(EVERYTHING, Inventory())


def there_and_back(kernel: Kernel) -> None:
    kernel.move(GPU, "vfio-pci")
    kernel.move(GPU, "xe")


def replug(kernel: Kernel) -> None:
    kernel.unplug(GPU)
    kernel.plug(ONE)


def vfs(kernel: Kernel) -> None:
    kernel.create_vfs(GPU, 2)
    kernel.remove_vfs(GPU)


def reload(kernel: Kernel) -> None:
    kernel.rmmod("xe")
    kernel.modprobe("xe")


def swap(kernel: Kernel) -> None:
    kernel.unbind(GPU)
    kernel.unbind(OTHER)
    kernel.bind(OTHER, "nouveau")
    kernel.bind(GPU, "xe")


def swap_with_slow_udevd(kernel: Kernel) -> None:
    kernel.udev = UdevMode.MANUAL
    swap(kernel)
    kernel.udev_settle()


@pytest.mark.parametrize("story", [there_and_back, replug, vfs, reload, swap, swap_with_slow_udevd])
def test_a_look_copes_with_every_moment(kernel: Kernel, story: Callable[[Kernel], None]) -> None:
    kernel.plug(ONE, TWO)
    looker = Looker(kernel)
    kernel.tree.changed = looker
    story(kernel)
    kernel.tree.changed = None
    assert looker.looks > 20
    function = looker.look().functions[Address(GPU)]
    assert function.driver == "xe"
    assert {node.state for node in function.nodes} == {NodeState.PRESENT}


def test_half_a_device_is_what_a_reader_sees_of_an_unbind(kernel: Kernel) -> None:
    """The driver's link goes first, then card and render node one after the other."""
    kernel.plug(ONE)
    looker = Looker(kernel)
    looker()
    kernel.tree.changed = looker
    kernel.unbind(GPU)
    card, render = ("card0", NodeState.PRESENT), ("renderD128", NodeState.PRESENT)
    no_card, no_render = ("card0", NodeState.MISSING), ("renderD128", NodeState.MISSING)
    assert looker.seen == [
        ("xe", (card, render)),
        (None, (card, render)),
        (None, (no_card, render)),
        (None, (render,)),
        (None, (no_render,)),
        (None, ()),
    ]
