"""What a hint brings into a look, and what belongs to a function."""

import pytest

from agent.host.hints import EVERYTHING, NOTHING, Hint, Scope, scope_of, widen
from agent.host.model import (
    Address,
    DeviceNumber,
    Function,
    Inventory,
    Node,
    NodeRole,
    NodeState,
    Orphan,
)


def function(
    address: str,
    *,
    group: int | None = None,
    physfn: str | None = None,
    virtfns: tuple[str, ...] = (),
    card: int | None = None,
) -> Function:
    nodes: tuple[Node, ...] = ()
    if card is not None:
        path = f"/dev/dri/card{card}"
        number = DeviceNumber(226, card)
        nodes = (Node(NodeRole.CARD, f"card{card}", path, number, NodeState.PRESENT, True),)
    return Function(
        address=Address(address),
        devpath=f"/devices/pci0000:00/{address}",
        vendor=0x8086,
        device=0xE212,
        class_code=0x030000,
        iommu_group=group,
        physfn=None if physfn is None else Address(physfn),
        virtfns=tuple(map(Address, virtfns)),
        nodes=nodes,
    )


def inventory(*functions: Function, orphans: tuple[Orphan, ...] = ()) -> Inventory:
    return Inventory(functions={f.address: f for f in functions}, orphans=orphans)


VKMS = Orphan(
    Node(NodeRole.CARD, "card7", "/dev/dri/card7", DeviceNumber(226, 7), NodeState.PRESENT, True),
    "/devices/platform/vkms/drm/card7",
    None,
)

HOST = inventory(
    function("0000:03:00.0", group=1, card=0),
    function("0000:03:00.1", group=2),
    function("0000:04:00.0", group=2),
    function("0000:05:00.0", virtfns=("0000:06:00.0", "0000:06:01.0"), card=1),
    function("0000:06:00.0", physfn="0000:05:00.0"),
    function("0000:06:01.0", physfn="0000:05:00.0", group=9),
    function("0000:08:00.0", card=2),
    orphans=(VKMS,),
)


def scope(*addresses: str, orphans: bool = False) -> Scope:
    return Scope(addresses=frozenset(map(Address, addresses)), orphans=orphans)


LEFT = ("0000:03:00.0", "0000:03:00.1", "0000:04:00.0")
RIGHT = ("0000:05:00.0", "0000:06:00.0", "0000:06:01.0")


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        pytest.param([], NOTHING, id="no news"),
        pytest.param([Hint("timer", everything=True)], EVERYTHING, id="everything"),
        pytest.param(
            [Hint("kernel", address=Address("0000:08:00.0")), Hint("timer", everything=True)],
            EVERYTHING,
            id="everything swallows the rest",
        ),
        pytest.param(
            [Hint("kernel", address=Address("0000:08:00.0"))], scope("0000:08:00.0"), id="alone"
        ),
        pytest.param(
            [Hint("kernel", address=Address("0000:04:00.0"))], scope(*LEFT), id="group, then slot"
        ),
        pytest.param(
            [Hint("kernel", address=Address("0000:06:01.0"))], scope(*RIGHT), id="VF, PF, VFs"
        ),
        pytest.param(
            [Hint("kernel", address=Address("0000:03:00.7"))],
            scope("0000:03:00.7", *LEFT),
            id="a new function of a known slot",
        ),
        pytest.param(
            [Hint("kernel", address=Address("0000:0a:00.0"))], scope("0000:0a:00.0"), id="unknown"
        ),
        pytest.param([Hint("kernel", group=9)], scope(*RIGHT), id="a group"),
        pytest.param([Hint("kernel", group=77)], EVERYTHING, id="an unknown group"),
        pytest.param(
            [Hint("kernel", node_path="/dev/dri/card2")], scope("0000:08:00.0"), id="path"
        ),
        pytest.param(
            [Hint("kernel", node_number=DeviceNumber(226, 2))], scope("0000:08:00.0"), id="number"
        ),
        pytest.param(
            [
                Hint(
                    "kernel",
                    address=Address("0000:08:00.0"),
                    node_path="/dev/dri/card0",
                    node_number=DeviceNumber(226, 1),
                )
            ],
            scope("0000:08:00.0", *LEFT, *RIGHT),
            id="whoever had the path or the number before",
        ),
        pytest.param([Hint("kernel", node_path="/dev/kfd")], EVERYTHING, id="an unknown path"),
        pytest.param([Hint("kernel")], EVERYTHING, id="a message that says nothing"),
        pytest.param([Hint("kernel", orphan=True)], scope(orphans=True), id="an orphan"),
        pytest.param(
            [Hint("kernel", node_path="/dev/dri/card7")], scope(orphans=True), id="an orphan's path"
        ),
        pytest.param(
            [Hint("kernel", orphan=True, node_path="/dev/dri/card2")],
            scope("0000:08:00.0", orphans=True),
            id="an orphan takes a path over",
        ),
        pytest.param(
            [
                Hint("kernel", address=Address("0000:08:00.0")),
                Hint("kernel", orphan=True),
                Hint("kernel", group=1),
            ],
            scope("0000:08:00.0", *LEFT, orphans=True),
            id="all together",
        ),
    ],
)
def test_hints_are_joined_into_one_scope(hints: list[Hint], expected: Scope) -> None:
    assert scope_of(hints, HOST) == expected
    assert widen(expected, HOST) == expected, "a scope is closed"


def test_a_burst_is_a_few_questions() -> None:
    """What differs only in its time or source is one question; any iterable will do."""
    burst = (
        Hint("udev" if n % 2 else "kernel", address=Address("0000:08:00.0"), received=float(n))
        for n in range(1000)
    )
    assert scope_of(burst, HOST) == scope("0000:08:00.0")


@pytest.mark.parametrize("start", [LEFT[0], LEFT[1], LEFT[2]])
def test_widening_is_the_same_from_wherever_it_starts(start: str) -> None:
    assert widen(scope(start), HOST) == scope(*LEFT)


def test_scopes_add_up() -> None:
    assert scope("0000:08:00.0") | scope(orphans=True) == scope("0000:08:00.0", orphans=True)
    assert (scope("0000:08:00.0") | EVERYTHING).everything
    assert widen(scope(orphans=True), HOST) == scope(orphans=True)
