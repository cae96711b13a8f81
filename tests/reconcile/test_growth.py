"""What lives as long as the agent does not grow, however often the host changes meanwhile."""

import asyncio
import enum
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import structlog

from agent.cdi.render import HEADER
from agent.host.hints import Hint
from agent.host.model import Address, HoldMode
from agent.observe.claim_metrics import ClaimMetrics
from agent.observe.health import Verdict
from agent.observe.metrics import Metrics
from agent.reconcile.messages import SPECS
from agent.simulate.host import arc_b50, arc_b60
from agent.vfio.model import Prepare, Recover, Release
from tests.reconcile.claims_rig import ClaimsRig
from tests.reconcile.rig import Rig

B50, B60 = Address("0000:03:00.0"), Address("0000:07:00.0")
TURNS = (10, 60)
OLDER = "Ledger._saved"
"""The record on disk, which may be the one in memory, or one of before a file was deleted."""
FOREIGN = """
cdiVersion: "0.5.0"
kind: example.com/gpu
devices: [{name: theirs, containerEdits: {deviceNodes: [{path: /dev/dri/card9}]}}]
"""


def sizes(*roots: object) -> Mapping[str, int]:
    """How much everything holds that these hold: entries by whose attribute has them.

    Looks into collections, and into objects of the agent's own classes. Each counts where it is
    found first; numbers and other words of a few parts, which may be one object or several, do not.
    """
    found: Counter[str] = Counter()
    seen: dict[int, object] = {}
    todo = [("", root) for root in roots]
    while todo:
        name, value = todo.pop()
        if id(value) in seen or is_word(value):
            continue
        seen[id(value)] = value  # kept, lest another take its place
        if isinstance(value, Mapping):
            found[name] += len(value)
            todo += [(f"{name}[]", each) for pair in value.items() for each in pair]
        elif isinstance(value, (tuple, list, set, frozenset, deque)):
            found[name] += len(value)
            todo += [(f"{name}[]", each) for each in value]
        elif isinstance(value, asyncio.Queue):
            found[name] += value.qsize()
        elif is_ours(value) and not isinstance(value, enum.Enum):
            owner = type(value).__name__
            held = ((f"{owner}.{key}", each) for key, each in attributes(value))
            todo += [each for each in held if each[0] != OLDER]
    return found


def leaks(before: Mapping[str, int], after: Mapping[str, int], turns: int) -> Mapping[str, int]:
    """What has grown by an entry in every second turn or more.

    An entry more or less depends on the moment: what was read just now is read once more.
    """
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in grown.items() if count >= turns / 2}


def is_ours(value: object) -> bool:
    """Whether its class, or one that it is derived from, is the agent's."""
    return any(cls.__module__.startswith("agent.") for cls in type(value).__mro__)


def is_word(value: object) -> bool:
    """A small tuple of scalars, as a device's number is."""
    return (
        isinstance(value, tuple)
        and len(value) < 4
        and all(isinstance(each, (str, int, float, type(None))) for each in value)
    )


def attributes(value: object) -> Iterator[tuple[str, object]]:
    """All attributes of an object."""
    if isinstance(value, msgspec.Struct):
        yield from ((name, getattr(value, name)) for name in value.__struct_fields__)
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots: Collection[str] = getattr(cls, "__slots__", ())
        yield from ((name, getattr(value, name)) for name in slots if hasattr(value, name))


class Host:
    """A host with one card, on which everything changes at every turn, and an agent."""

    def __init__(self, folder: Path) -> None:
        self.rig = Rig(folder)
        self.metrics = Metrics(
            version="1",
            sources=(),
            inbox=self.rig.inbox,
            snapshot=self.rig.reconciler.snapshot,
            health=lambda: Verdict(ok=True),
        )
        self._foreign: list[Path] = []
        self._link = ""

    def change(self, number: int) -> None:
        """A card comes in a slot that was never used, and takes the first one's numbers.

        Other tools write files under new names, and what an earlier agent has left is found.
        """
        kernel, other = self.rig.kernel, f"{number:04x}:07:00.0"
        kernel.plug(*arc_b60(other))
        for address in (B50, other):
            kernel.unbind(address)
        for address in (other, B50):
            kernel.bind(address, "xe")
        # A link that nobody follows, to a node that never was.
        self._link = f"/dev/dri/by-path/pci-{number}-card"
        kernel.tree.link(self._link, f"/dev/dri/card{1000 + number}")
        self._foreign = [
            self.rig.specs / f"{name}-{number}.yaml" for name in ("vendor", "cdi-agent_vendor")
        ]
        for path in self._foreign:
            path.write_text(FOREIGN)
        (self.rig.specs / f"cdi-agent_old-{number}.yaml").write_text(f"{HEADER}nonsense")

    def change_back(self, number: int) -> None:
        """As before, with new numbers and inodes."""
        kernel = self.rig.kernel
        kernel.unplug(f"{number:04x}:00:07.0")  # the bridge, and all below it
        hold = kernel.hold(kernel.node_paths(B50)[0])
        kernel.unbind(B50)
        kernel.bind(B50, "xe")
        hold.release()
        kernel.tree.unlink(self._link)
        for path in self._foreign:
            path.unlink()

    async def turn(self, number: int) -> None:
        """Change everything, and change it back."""
        for change, devices in ((self.change, 4), (self.change_back, 2)):
            await self.rig.do(change, number)
            await self.rig.step(0, Hint(SPECS))
            await self.rig.step(0.06)
            assert len(self.rig.reconciler.snapshot().published) == devices
        while not self.rig.reports.empty():
            self.metrics.observe(self.rig.reports.get_nowait())
        await self.metrics.render()
        self.rig.log.entries.clear()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    yield Host(tmp_path)
    structlog.reset_defaults()


@pytest.mark.timeout(300)
async def test_nothing_grows_with_what_comes_and_goes(host: Host) -> None:
    """A leak of one entry in a turn shows after some turns as well as after thousands."""
    await host.rig.do(host.rig.kernel.plug, *arc_b50())
    await host.rig.quiet()
    after: list[Mapping[str, int]] = []
    for number in range(1, TURNS[-1] + 1):
        await host.turn(number)
        if number in TURNS:
            after.append(sizes(host.rig.reconciler, host.metrics))
    assert leaks(after[0], after[1], TURNS[1] - TURNS[0]) == {}


async def at_rest(rig: ClaimsRig, *others: object) -> Mapping[str, int]:
    """How much everything holds once nothing changes any more from one full look to the next."""
    before: Mapping[str, int] = {}
    while True:
        rig.inbox.hint(Hint("timer", everything=True))
        while (await rig.passes.get())[0].looked_at is not None:
            pass
        if (found := sizes(rig.reconciler, *others)) == before:
            return found
        before = found


@pytest.mark.timeout(300)
async def test_nothing_grows_with_claims_that_come_and_go(tmp_path: Path) -> None:
    """Each has a new name; some are refused, some only tried."""
    rig = ClaimsRig(tmp_path)
    await rig.do(rig.make_host)
    await rig.do(rig.kernel.plug, *arc_b50(), *arc_b60())
    after: list[Mapping[str, int]] = []
    async with rig.agent():
        metrics = ClaimMetrics(rig.desk, rig.reconciler.snapshot)
        for number in range(1, 7):
            for order in (
                Prepare(f"dry-{number}", HoldMode.VFIO, (B50,), dry_run=True),
                Prepare(f"vm-{number}", HoldMode.VFIO, (B50,)),
                Prepare(f"other-{number}", HoldMode.VFIO, (B60, B50)),
                Prepare(f"none-{number}", HoldMode.VFIO, (Address(f"{number:04x}:09:00.0"),)),
                Release(f"vm-{number}"),
                Release(f"unknown-{number}"),
                Recover(B50),
            ):
                await rig.submit(order)
            metrics.observe()
            if number in {2, 6}:
                after.append(await at_rest(rig, metrics))
    await rig.close()
    assert leaks(after[0], after[1], 6 - 2) == {}
