"""Under which names claims take functions to be on disk, and when they take them for withdrawn."""

from collections.abc import Mapping

import pytest

from agent.cdi.files import Disk
from agent.host.model import Address, Hold, HoldMode
from agent.reconcile.names import names_known_last, names_on_disk
from agent.reconcile.state import State
from tests.reconcile.build import GPU, GPU_FILE, LAYOUT, A, B, C, disk, offer

BOTH = disk(offer(A, 0), offer(B, 1))
ONE = disk(offer(B, 1))


def published(*addresses: Address) -> State:
    """What should be on disk after the latest pass."""
    names = {A: "a", B: "b"}
    return State(published={(GPU, address): names[address] for address in addresses})


def hold(address: Address, *, settled: bool = False) -> Hold:
    return Hold(address, "vm", HoldMode.VFIO, settled=settled)


@pytest.mark.parametrize(
    ("state", "found", "holds", "expected"),
    [
        pytest.param(
            published(A, B),
            BOTH,
            (hold(A),),
            {A: ("intel.com/gpu=a",), B: ("intel.com/gpu=b",)},
            id="what is to be withdrawn is not withdrawn yet",
        ),
        pytest.param(
            published(B),
            BOTH,
            (hold(A), hold(C)),
            {
                A: (f"{GPU_FILE}: a",),
                B: ("intel.com/gpu=b",),
                C: (f"{GPU_FILE}: a",),
            },
            id="an entry that should have gone may be of whatever is withdrawn",
        ),
        pytest.param(
            published(B),
            BOTH,
            (hold(A, settled=True),),
            {B: ("intel.com/gpu=b",)},
            id="but not of what is not",
        ),
        pytest.param(
            published(B),
            ONE,
            (hold(A),),
            {A: (), B: ("intel.com/gpu=b",)},
            id="the entry of all is of no function",
        ),
        pytest.param(
            published(A, B),
            ONE,
            (),
            {B: ("intel.com/gpu=b",)},
            id="somebody else has taken an entry out",
        ),
    ],
)
def test_what_is_published_is_what_the_disk_has(
    state: State,
    found: Disk,
    holds: tuple[Hold, ...],
    expected: Mapping[Address, tuple[str, ...]],
) -> None:
    assert names_on_disk(state, found, LAYOUT, holds) == expected


def test_what_was_published_last_is_told_where_the_disk_cannot_be_read() -> None:
    """And of nothing else it is said that it may be there."""
    assert names_known_last(published(A), (hold(B),)) == {A: ("intel.com/gpu=a",)}
