"""The gate that every write goes through, and the nodes by which a device may be used."""

import pytest
from msgspec import structs

from agent.host.model import Address, DeviceNumber, Function, Inventory, Node, NodeRole, NodeState
from agent.vfio.model import Child, Durable, Step, Stray, Write
from agent.vfio.problems import Code, Problem
from agent.vfio.state import Claim, Claims, Rules, Seen
from agent.vfio.turn import Turn
from tests.vfio.world import AUDIO, GPU, OTHER_GPU, SHAPES, Chip, World, audio


def moving() -> tuple[Claim, Durable]:
    """A claim in force, and the journal before it was."""
    world = World(Chip(GPU))
    world.ask(SHAPES[0].prepare)
    claim = world.claims.live["vm"]
    record = structs.replace(claim.record, done=False)
    return structs.replace(claim, record=record), Durable(claims=(record,))


CLAIM, SAVED = moving()
RECORD = SAVED.claims[0]
ORIGIN = RECORD.origins[0]
CHILD = Child(Write("vm", GPU, Step.PROBE, GPU), 4711)
STRAY = Stray(ORIGIN, Problem(Code.STRANDED, "it was stranded"))


@pytest.mark.parametrize(
    ("saved", "children", "published", "may"),
    [
        pytest.param(SAVED, {}, {}, True, id="journalled-and-withdrawn"),
        pytest.param(Durable(), {}, {}, False, id="not-in-the-journal"),
        pytest.param(
            Durable(claims=(structs.replace(RECORD, done=True),)),
            {},
            {},
            False,
            id="in-force-in-the-journal",
        ),
        pytest.param(
            Durable(claims=(structs.replace(RECORD, origins=()),)),
            {},
            {},
            False,
            id="without-its-origin-in-the-journal",
        ),
        pytest.param(Durable(strays=(STRAY,)), {}, {}, True, id="stranded-in-the-journal"),
        pytest.param(SAVED, {GPU: CHILD}, {}, False, id="hung"),
        pytest.param(SAVED, {OTHER_GPU: CHILD}, {}, True, id="another-one-is-hung"),
        pytest.param(SAVED, {}, {GPU: ("intel.com/gpu=x",)}, False, id="published"),
        pytest.param(SAVED, {}, {GPU: ()}, True, id="published-under-no-name"),
    ],
)
def test_when_a_function_may_be_written_to(
    saved: Durable,
    children: dict[Address, Child],
    published: dict[Address, tuple[str, ...]],
    *,
    may: bool,
) -> None:
    claims = Claims(live={"vm": CLAIM}, children=children)
    seen = Seen(World(Chip(GPU)).look(), published=published, saved=saved)
    assert Turn(claims, seen, Rules(), now=0.0).may_write(CLAIM, GPU) is may


def on_vfio(address: Address, number: int, *, group: int = 1) -> Function:
    """A function with the nodes of both back ends."""
    function = Chip(address, driver="vfio-pci", group=group).function()
    name, path = f"vfio{number}", f"/dev/vfio/devices/vfio{number}"
    node = Node(
        NodeRole.VFIO_CDEV, name, path, DeviceNumber(510, number), NodeState.PRESENT, settled=True
    )
    return structs.replace(function, nodes=(*function.nodes, node))


def test_the_nodes_of_a_device_on_vfio_are_those_of_its_whole_group() -> None:
    """Whoever uses one function of a group owns all of it."""
    third = Address("0000:05:00.0")
    functions = [on_vfio(GPU, 0), on_vfio(OTHER_GPU, 1), on_vfio(third, 2, group=2)]
    inventory = Inventory(functions={each.address: each for each in functions})
    turn = Turn(Claims(), Seen(inventory), Rules(), now=0.0)
    assert set(turn.node_paths([GPU])) == {
        "/dev/vfio/1",
        "/dev/vfio/devices/vfio0",
        "/dev/vfio/devices/vfio1",
    }


def test_the_nodes_of_a_device_on_its_own_driver_are_its_own() -> None:
    turn = Turn(Claims(), Seen(World(Chip(GPU), Chip(OTHER_GPU)).look()), Rules(), now=0.0)
    assert turn.node_paths([GPU, Address("0000:99:00.0")]) == ("/dev/dri/card3",)


def test_of_every_function_with_a_driver_all_nodes_are_asked_for() -> None:
    """Those that no look knows too, of companions as of what was asked for."""
    world = World(Chip(GPU), audio(), Chip(OTHER_GPU, driver=None, group=2))
    turn = Turn(Claims(), Seen(world.look()), Rules(), now=0.0)
    everything = (GPU, AUDIO, OTHER_GPU, Address("0000:99:00.0"))
    inspecting = turn.inspect(CLAIM, everything, used=everything, drivers=()).inspecting
    assert inspecting is not None
    assert inspecting.used == (GPU, AUDIO)
