"""Whatever happens, in whatever order: in the end the specs are true, and were never broken.

Bursts of random acts, each on another function and none waiting for the one before, so that the
agent looks at hosts that are half changed. After every burst, when all is quiet, the specs must be
what the oracle expects; at the end the witness must not have seen one file that an engine refuses.

The seed is printed. From the environment: CDI_AGENT_GUEST_SEED repeats a run, and
CDI_AGENT_GUEST_ACTS is how many acts to make.
"""

import dataclasses
import os
import random
from collections.abc import Callable
from typing import Final

import pytest

from agent.host.model import NodeRole
from agent.simulate.stage import Driver
from tests.guest.observers import AGENT, DISPLAY, VIRTIO_GPU, Agreed, Observers
from tests.guest.rig import Guest
from tests.guest.stage import CARD, GPU, Cast, Function, GuestStage, find_node
from tests.guest.topology import slot

ACTS: Final = int(os.environ.get("CDI_AGENT_GUEST_ACTS", "200"))
SEED: Final = os.environ.get("CDI_AGENT_GUEST_SEED")
BURST: Final = 4

CAST: Final[Cast] = {
    "first": Function(GPU, f"{slot(0)}.0"),
    "second": Function(GPU, f"{slot(1)}.0"),
    "twin 0": Function(CARD, f"{slot(2)}.0"),
    "twin 1": Function(CARD, f"{slot(2)}.1"),
    "behind 1": Function(CARD, "0000:08:01.0"),
    "behind 2": Function(CARD, "0000:08:02.0"),
    "hot 3": Function(CARD, f"{slot(3)}.0"),
    "hot 4": Function(CARD, f"{slot(4)}.0"),
}
HOT: Final = ("hot 3", "hot 4")


@dataclasses.dataclass
class Player:
    """Chooses acts that the host, as it was last seen, allows."""

    stage: GuestStage
    chance: random.Random
    functions: dict[str, dict[str, object]]
    """By name; what is not on the bus is not in here."""
    touched: set[str] = dataclasses.field(default_factory=set)
    """In this burst: what is known of the others still holds."""
    removed: set[str] = dataclasses.field(default_factory=set)
    """Through sysfs: they come back with a rescan."""
    unplugged: set[str] = dataclasses.field(default_factory=lambda: set(HOT))
    log: list[str] = dataclasses.field(default_factory=list)

    def see(self, agreed: Agreed) -> None:
        """Take up what the host is like now."""
        names = {one.address: name for name, one in CAST.items()}
        self.functions = {names[a]: f for a, f in agreed.functions.items() if a in names}
        self.touched.clear()

    def burst(self, size: int) -> None:
        """Do some acts at once, on as many functions."""
        # Whoever pulls a device waits until it is out; then all others at once.
        if self._chance_of(0.25):
            self._plug_or_pull()
            size -= 1
        with self.stage.at_once():
            for _ in range(size):
                (act,) = self.chance.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))
                act(self)

    def _chance_of(self, probability: float) -> bool:
        return self.chance.random() < probability

    def _note(self, text: str, *names: str) -> None:
        self.log.append(text)
        self.touched.update(names)

    def _choose(self, allowed: Callable[[dict[str, object]], object]) -> str | None:
        """A function that nothing was done to in this burst."""
        names = [n for n, f in self.functions.items() if n not in self.touched and allowed(f)]
        return self.chance.choice(names) if names else None

    # --- acts -------------------------------------------------------------------------------------

    def _plug_or_pull(self) -> None:
        name = self.chance.choice(HOT)
        if name in self.unplugged:
            self._note(f"plug {name}", name)
            one = CAST[name]
            # Not waited for: it comes while the rest of the burst goes on.
            self.stage.guest.plug(one.model.plugged_as, name.replace(" ", ""), bus=f"rp{name[-1]}")
            self.unplugged.discard(name)
        elif name not in self.removed:
            self._note(f"pull {name}", name)
            self.stage.guest.unplug(name.replace(" ", ""))
            self.unplugged.add(name)
            self.functions.pop(name, None)

    def to_vfio(self) -> None:
        if name := self._choose(lambda found: not found["vfio"]):
            self._note(f"{name} to VFIO", name)
            self.stage.move(name, Driver.VFIO)

    def to_own(self) -> None:
        if name := self._choose(lambda found: found["vfio"] or not found["driver"]):
            self._note(f"{name} to its own driver", name)
            self.stage.move(name, Driver.OWN)

    def unbind(self) -> None:
        if name := self._choose(lambda found: found["driver"]):
            self._note(f"unbind {name}", name)
            self.stage.unbind(name)

    def renumber(self) -> None:
        if name := self._choose(lambda found: found["driver"] and not found["vfio"]):
            self._note(f"renumber {name}", name)
            # Its number is known only when its turn comes.
            card = find_node(CAST[name], NodeRole.CARD)
            self.stage.run(f"exec 3</dev/dri/$(find {card} -printf %f)")
            self.stage.unbind(name)
            self.stage.bind(name)
            self.stage.run("exec 3<&-")

    def swap(self) -> None:
        mine = ("first", "second")
        both = [self.functions.get(name) for name in mine]
        if not self.touched & set(mine) and all(f and not f["vfio"] and f["driver"] for f in both):
            self._note("swap the first and the second", *mine)
            for verb in (self.stage.unbind, self.stage.bind):
                for name in self.chance.sample(mine, 2):
                    verb(name)

    def remove(self) -> None:
        if name := self._choose(lambda _found: True):
            self._note(f"remove {name}", name)
            self.stage.remove(name)
            self.removed.add(name)

    def rescan(self) -> None:
        # What is removed in this burst may be gone or not.
        self._note("rescan", *self.removed)
        self.stage.rescan()
        self.removed.clear()

    def connectors(self) -> None:
        if name := self._choose(lambda found: found["driver"] and not found["vfio"]):
            self._note(f"connectors of {name}", name)
            uevents = f"{CAST[name].path}/*/drm/card*/uevent {CAST[name].path}/drm/card*/uevent"
            each = f"for e in {uevents}; do test ! -e $e || echo change >$e; done"
            self.stage.run(f"for i in 1 2 3 4 5 6 7 8 9; do {each}; done")

    def kill(self) -> None:
        self._note("kill the agent")
        self.stage.run(f"systemctl kill --kill-whom=main --signal=KILL {AGENT} || true")


WEIGHTS: Final[dict[Callable[[Player], None], float]] = {
    Player.to_vfio: 5,
    Player.to_own: 6,
    Player.unbind: 4,
    Player.renumber: 3,
    Player.swap: 1,
    Player.remove: 2,
    Player.rescan: 2,
    Player.connectors: 1,
    Player.kill: 0.7,
}
"""How often each act is tried; one that the host does not allow is none."""


@pytest.mark.guest
@pytest.mark.timeout(900 + 10 * ACTS)
def test_after_random_acts_the_specs_are_true(many_gpus: Guest) -> None:
    seed = SEED or str(random.SystemRandom().randrange(10**6))
    print(f"CDI_AGENT_GUEST_SEED={seed}")
    observers = Observers(many_gpus)
    player = Player(GuestStage(many_gpus, CAST), random.Random(seed), {})
    try:
        player.see(observers.agree())
        while len(player.log) < ACTS:
            player.burst(player.chance.randint(1, BURST))
            gone = [CAST[name].address for name in player.removed | player.unplugged]
            there = [one.address for one in CAST.values() if one.address not in gone]
            player.see(observers.agree(there=there, gone=gone))
        notes = observers.saw()
        assert [note for note in notes if "fault" in note] == []
        for note in notes:
            for device, nodes in note.get("spec", {}).items():
                assert_whole(note["kind"], device, nodes)
    except BaseException as error:
        error.add_note(f"CDI_AGENT_GUEST_SEED={seed}, after: {', '.join(player.log)}")
        raise


def assert_whole(kind: str, device: str, nodes: list[str]) -> None:
    """Never half a device, whatever was going on when it was published."""
    cards = [node for node in nodes if node.startswith("/dev/dri/card")]
    renders = [node for node in nodes if node.startswith("/dev/dri/renderD")]
    assert len(cards) + len(renders) == len(nodes) or kind.endswith("-vfio")
    if kind == VIRTIO_GPU:
        assert len(cards) == len(renders) > 0
    elif kind == DISPLAY:
        assert (len(cards) > 0, renders) == (True, [])
    else:
        assert len(nodes) == 2
        assert "/dev/vfio/vfio" in nodes
    assert device == "all" or len(cards) <= 1
