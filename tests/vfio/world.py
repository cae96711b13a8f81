"""A host in a few dictionaries: a kernel that answers writes, a spec folder, a journal, a clock.

It is what the claims are driven against in the tests: pure, quick, and strict. Every write is held
to the rules that no claim may break, whatever failed before it: never to a function that hangs,
never before the journal on disk has its origin, never while a spec has its entry.

Whatever happens is a moment, and `World.crash_at` ends the agent before that moment: what is on
disk and in the kernel stays, all else is gone.
"""

import dataclasses
import errno
from collections.abc import Callable, Iterable, Mapping, Sequence

from agent.host.model import (
    Address,
    DeviceNumber,
    Environment,
    Function,
    Hold,
    HoldMode,
    Inventory,
    Node,
    NodeRole,
    NodeState,
)
from agent.vfio.claim import advance, holds
from agent.vfio.model import (
    Answer,
    Asked,
    Durable,
    Effect,
    Holder,
    Inspect,
    Inspection,
    Order,
    Prepare,
    Recover,
    Release,
    Result,
    Step,
    Watch,
    Write,
    Written,
)
from agent.vfio.start import start
from agent.vfio.state import Claims, Ended, Phase, Rules, Seen

GPU = Address("0000:03:00.0")
AUDIO = Address("0000:03:00.1")
OTHER_GPU = Address("0000:04:00.0")
VF = Address("0000:03:00.2")
USB = Address("0000:03:00.3")

VFIO_DRIVERS = frozenset({"vfio-pci", "xe-vfio-pci"})


class Crash(BaseException):
    """The agent was killed."""


@dataclasses.dataclass(slots=True)
class Chip:
    """A function as the kernel has it."""

    address: Address
    own: tuple[str, ...] = ("xe",)
    """The drivers that want it, the preferred one first."""
    driver: str | None = "xe"
    override: str | None = None
    class_code: int = 0x030000
    group: int | None = 1
    inode: int = 7
    boot_vga: bool = False
    physfn: Address | None = None
    virtfns: tuple[Address, ...] = ()

    @property
    def on_vfio(self) -> bool:
        return self.driver in VFIO_DRIVERS

    @property
    def nodes(self) -> tuple[Node, ...]:
        if self.on_vfio:
            group = str(self.group) if self.group is not None else "noiommu-0"
            return (_node(NodeRole.VFIO_GROUP, group, f"/dev/vfio/{group}"),)
        if self.driver is None or self.class_code >> 16 != 0x03:
            return ()
        bus = int(self.address[5:7], 16)
        return (_node(NodeRole.CARD, f"card{bus}", f"/dev/dri/card{bus}"),)

    def function(self) -> Function:
        """As a look sees it."""
        return Function(
            address=self.address,
            devpath=f"/devices/pci0000:00/{self.address}",
            vendor=0x8086,
            device=0xE212,
            class_code=self.class_code,
            driver=self.driver,
            boot_vga=self.boot_vga,
            iommu_group=self.group,
            physfn=self.physfn,
            virtfns=self.virtfns,
            nodes=self.nodes,
            has_vfio_dev=self.on_vfio,
            inode=self.inode,
        )


def _node(role: NodeRole, name: str, path: str) -> Node:
    return Node(role, name, path, DeviceNumber(226, 0), NodeState.PRESENT, settled=True)


def audio(address: Address = AUDIO) -> Chip:
    return Chip(address, ("snd_hda_intel",), "snd_hda_intel", class_code=0x040300)


Fault = Callable[["World", Write], Written | None]
"""What becomes of a write; None lets the kernel do as it is told."""


def answers(code: int) -> Fault:
    """The kernel refuses it."""
    return lambda _world, write: Written(write, errno=code)


def does_nothing(_world: "World", write: Write) -> Written:
    """The kernel takes it, and nothing comes of it."""
    return Written(write)


def is_not_begun(_world: "World", write: Write) -> Written:
    """There is no process to be had for it."""
    return Written(write, unmade="Too many open files")


def hangs(world: "World", write: Write) -> Written:
    """It does not return until `World.let_go`."""
    world.stuck[write.address] = write
    return Written(write, hung=True, pid=4711, started=99)


def is_slow(world: "World", write: Write) -> Written | None:
    """It is done when `World.finish` says so, and not before."""
    world.slow[write.address] = write
    return None


class World:
    """The host, and the agent on it."""

    obstructed: Mapping[tuple[Address, HoldMode], str] = {}
    """Which file of somebody else's would keep a function from being published in a mode."""
    specs_problem: str = ""
    """Why the specs can be neither read nor written."""
    specs_unread: bool = True
    """The agent has not read them since it was started."""
    unloaded: frozenset[str] = frozenset()
    """Drivers whose modules are not loaded; who asks for one has it loaded if it can be."""
    for_others: frozenset[str] = frozenset()
    """Drivers that are for none of the functions here."""

    def __init__(self, *chips: Chip, rules: Rules = Rules()) -> None:  # noqa: B008 - immutable
        self.chips = {chip.address: chip for chip in chips}
        self.rules = rules
        self.vendor = "intel.com"
        """Of the names under which devices are published."""
        self.now = 1000.0
        # What survives the agent.
        self.boot_id = "this-boot"
        self.disk = Durable()
        self.specs: dict[Address, tuple[str, ...]] = {}
        self.stuck: dict[Address, Write] = {}
        self.slow: dict[Address, Write] = {}
        # What can go wrong.
        self.faults: list[tuple[Callable[[Write], bool], Fault]] = []
        self.journal_full = False
        self.specs_readonly = False
        self.known_specs: dict[Address, tuple[str, ...]] = {}
        """What was in them when they could be read last."""
        self.nodes_never_come: set[Address] = set()
        self.unavailable: dict[str, str] = {}
        self.holders: list[Holder] = []
        self.blind = False
        self.unasked = ""
        self.managed: dict[Address, str] = {}
        self.noiommu = False
        self.dead: set[Address] = set()
        self.unread: set[Address] = set()
        self.overrides_unread: set[Address] = set()
        self.owners_gone: frozenset[str] = frozenset()
        self.before_pass: Callable[[], None] = lambda: None
        self.goes_on = True
        """Claims go on in the pass in which the journal was saved; else in the next one."""
        # What happened.
        self.crash_at: int | None = None
        self.moments = 0
        self.writes: list[Write] = []
        self.written_at: list[float] = []
        self.ordered: dict[int, Order] = {}
        self.answers: dict[int, Answer] = {}
        self.specs_at: dict[int, dict[Address, tuple[str, ...]]] = {}
        """What was on disk when an order was answered."""
        self.ended: list[Ended] = []
        self.passed: list[tuple[Phase, Phase | None]] = []
        """From one phase to the next; None is the end."""
        # The agent.
        self.claims = Claims(boot_id=self.boot_id)
        self.pending: list[Effect] = []
        self.results: list[Result] = []
        self.orders: list[Asked] = []
        self.wake_at: float | None = None
        self._tickets = 0
        self._journal_problem = ""
        self._looked_at: tuple[object, ...] = ()
        self._look = Inventory()
        self.publish()

    # --- what a person does -----------------------------------------------------------------------

    def until(self, phase: Phase) -> None:
        """Go on, in the smallest steps there are, until a claim is in a phase."""
        self.goes_on = False
        for _ in range(60):
            self.step()
            if any(claim.phase is phase for claim in self.claims.live.values()):
                self.goes_on = True
                return
        message = f"never {phase}"
        raise AssertionError(message)

    def ask(self, order: Order) -> int:
        """Give an order, and go on until nothing happens any more."""
        ticket = self.post(order)
        self.run()
        return ticket

    def post(self, order: Order) -> int:
        """Give an order."""
        self._tickets += 1
        self.ordered[self._tickets] = order
        self.orders.append(Asked(self._tickets, order))
        return self._tickets

    def let_go(self, address: Address, *, done: bool = True) -> None:
        """The kernel comes back from the write that hangs."""
        write = self.stuck.pop(address)
        if done:
            self._apply(write)
        self.results.append(Written(write, gone=True))

    def finish(self) -> None:
        """Every slow write is done."""
        for write in tuple(self.slow.values()):
            del self.slow[write.address]
            self.results.append(Written(write, errno=self._apply(write)))

    def reboot(self) -> None:
        """Start anew: no binding, no override and no child of before is there any more."""
        self.boot_id = "next-boot"
        self.stuck.clear()
        for chip in self.chips.values():
            chip.override = None
            chip.inode += 100
            chip.driver = next(iter(chip.own), None)

    # --- the agent --------------------------------------------------------------------------------

    def start(self, *, damaged: bool = False) -> None:
        """Start an agent on what an earlier one has left."""
        self.crash_at = None
        self.finish()
        started = start(
            Durable() if damaged else self.disk,
            self.look(),
            boot_id=self.boot_id,
            now=self.now,
            damaged=damaged,
        )
        if damaged or self.disk.boot_id != self.boot_id:
            self.disk = Durable()
        self.claims = started.claims
        self.pending = list(started.effects)
        self.results, self.orders, self.wake_at = [], [], None
        self.known_specs, self.specs_unread = {}, True
        self._journal_problem = ""
        self.step()

    def run(self, *, patience: float = 600.0) -> None:
        """Let passes follow each other until none would do anything, not longer than that."""
        until = self.now + patience
        for _ in range(2000):
            before = self._surroundings()
            self.step()
            # The contract of `advance`: it is called again when what it is given has changed.
            if self.results or self.orders or before != self._surroundings():
                continue
            if self.wake_at is None or self.wake_at > until:
                return
            self.now = max(self.now, self.wake_at)
        message = f"no end: {[(c.id, c.phase) for c in self.claims.live.values()]}"
        raise AssertionError(message)

    def _surroundings(self) -> tuple[object, ...]:
        return dict(self.specs), self.specs_problem, self.disk, self._journal_problem, self._facts()

    def step(self) -> None:
        """One pass, in the order that the reconciler keeps."""
        self.before_pass()
        orders, self.orders = self.orders, []
        results, self.results = self.results, []
        if orders and self._journal_problem:
            self._save()
        self._advance(orders, results)
        if self._save() and self.goes_on:
            wake_at = self.wake_at
            self._advance()
            self.wake_at = min(
                (at for at in (wake_at, self.wake_at) if at is not None), default=None
            )
            if self._save():
                self.wake_at = self.now
        self.publish()
        effects, self.pending = self.pending, []
        for effect in effects:
            self._moment()
            self._perform(effect)

    def _advance(self, orders: Sequence[Asked] = (), results: Sequence[Result] = ()) -> None:
        if not self.specs_problem:
            self.known_specs, self.specs_unread = dict(self.specs), False
        seen = Seen(
            inventory=self.look(),
            published=self.known_specs,
            specs_problem=self.specs_problem,
            specs_unread=self.specs_unread,
            saved=self.disk,
            journal_problem=self._journal_problem,
            obstructed=lambda function, mode: self.obstructed.get((function.address, mode)),
            owners_gone=self.owners_gone,
        )
        advanced = advance(
            self.claims, seen, now=self.now, rules=self.rules, orders=orders, results=results
        )
        self.claims = advanced.claims
        self.wake_at = advanced.wake_at
        self.pending += advanced.effects
        self.ended += advanced.ended
        self.passed += [(each.phase, each.next) for each in advanced.passed]
        self.passed += [(each.claim.phase, None) for each in advanced.ended]
        for answer in advanced.answers:
            assert answer.ticket not in self.answers, "nobody is answered twice"
            self._check_answer(answer)
            self.answers[answer.ticket] = answer
            self.specs_at[answer.ticket] = dict(self.specs)

    def _check_answer(self, answer: Answer) -> None:
        """Who is told that a claim is in force can rely on it, whatever happens next."""
        order = self.ordered[answer.ticket]
        if answer.ok and isinstance(order, Prepare) and not order.dry_run:
            claim = self.claims.live[order.id]
            assert claim.phase is Phase.DONE
            assert claim.record in self.disk.claims, "an agent that starts now knows it"
            assert answer.names, "there is something to ask an engine for"
            published = {name for names in self.specs.values() for name in names}
            assert set(answer.names) <= published, "the specs say so"

    def _moment(self) -> None:
        if self.moments == self.crash_at:
            raise Crash
        self.moments += 1

    def _save(self) -> bool:
        """Whether the journal says something new."""
        self._journal_problem = ""
        durable = self.claims.durable
        if durable == self.disk:
            return False
        self._moment()
        if self.journal_full:
            self._journal_problem = "no space left on device"
            return False
        self._check_origins(durable)
        self.disk = durable
        return True

    def _check_origins(self, durable: Durable) -> None:
        """The first origin wins until it is forgotten."""
        after = origins(durable)
        for address, origin in origins(self.disk).items():
            if address in after and durable.boot_id == self.disk.boot_id:
                assert after[address] == origin, "an origin is never overwritten"

    def publish(self) -> None:
        """Write the specs: first what goes, then what comes."""
        if self.specs_problem:
            return
        wanted = dict(self._offers())
        for address in tuple(self.specs):
            if wanted.get(address) != self.specs[address] and not self.specs_readonly:
                self._moment()
                del self.specs[address]
        for address, names in wanted.items():
            if address not in self.specs and not self.specs_readonly:
                self._moment()
                self.specs[address] = names

    def _offers(self) -> Iterable[tuple[Address, tuple[str, ...]]]:
        held: dict[Address, Hold] = {}
        for hold in holds(self.claims):
            assert hold.address not in held, "at most one hold for a function"
            held[hold.address] = hold
        for address, chip in self.chips.items():
            if chip.class_code >> 16 != 0x03 or chip.driver is None:
                continue
            own = held.get(address)
            if own is not None and not (
                own.settled and (own.mode is HoldMode.VFIO) == chip.on_vfio
            ):
                continue
            if chip.on_vfio and (address in self.nodes_never_come or not self._viable(chip)):
                continue
            kind = "gpu-vfio" if chip.on_vfio else "gpu"
            yield address, (f"{self.vendor}/{kind}={address}",)

    def _viable(self, chip: Chip) -> bool:
        group = [other for other in self.chips.values() if other.group == chip.group]
        return all(other.on_vfio or other.driver is None for other in group)

    def look(self) -> Inventory:
        """What sysfs says; the same one as long as nothing has changed, to save time."""
        facts = self._facts()
        if facts != self._looked_at:
            self._looked_at = facts
            self._look = Inventory(
                functions={
                    address: chip.function()
                    for address, chip in self.chips.items()
                    if address not in self.unread
                },
                dropped=dict.fromkeys(self.unread, "it changes all the time"),
                environment=Environment(
                    iommu=any(c.group is not None for c in self.chips.values())
                ),
            )
        return self._look

    def _facts(self) -> tuple[object, ...]:
        """All that a look depends on and that can change."""
        return (
            frozenset(self.unread),
            *((c.address, c.driver, c.group, c.inode, c.virtfns) for c in self.chips.values()),
        )

    # --- effects ----------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Inspect():
                self.results.append(self._inspect(effect))
            case Write():
                written = self._write(effect)
                if written is not None:
                    self.results.append(written)
            case Watch():
                if effect.child.write.address not in self.stuck:
                    self.results.append(Written(effect.child.write, gone=True))

    def _inspect(self, effect: Inspect) -> Inspection:
        assert self.claims.children.keys().isdisjoint(effect.addresses), "to read it hangs too"
        if self.unasked:
            return Inspection(effect, unasked=self.unasked)
        if effect.loads:
            self.unloaded -= {*effect.drivers} - self.unavailable.keys()
        unread = self.overrides_unread | self.stuck.keys()
        return Inspection(
            effect,
            overrides=tuple(
                (address, self.chips[address].override)
                for address in effect.addresses
                if address in self.chips and address not in unread
            ),
            holders=tuple(h for h in self.holders if h.path in effect.node_paths),
            holders_known=not self.blind,
            managed=tuple((a, w) for a, w in self.managed.items() if a in effect.addresses),
            unavailable=tuple((d, w) for d, w in self.unavailable.items() if d in effect.drivers),
            unsuitable=tuple(each for each in effect.natives if each[1] in self.for_others),
            dead=tuple(a for a in effect.addresses if effect.alive and a in self.dead),
            noiommu=self.noiommu,
        )

    def _write(self, write: Write) -> Written | None:
        address = write.address
        assert address not in self.stuck, f"{write} to a function that hangs"
        is_known = not self.specs_problem or address in self.known_specs
        assert not (is_known and address in self.specs), f"{write} to a function that is published"
        assert address in origins(self.disk), f"{write} before the journal has its origin"
        assert not any(
            record.done and any(origin.address == address for origin in record.origins)
            for record in self.disk.claims
        ), f"{write} while the journal says that the claim is in force"
        assert address not in self.slow, f"{write} while another one is on its way"
        self.writes.append(write)
        self.written_at.append(self.now)
        for matches, fault in self.faults:
            if matches(write):
                written = fault(self, write)
                if written is not None or address in self.slow:
                    return written
        return Written(write, errno=self._apply(write))

    def _apply(self, write: Write) -> int:
        chip = self.chips.get(write.address)
        if chip is None:
            return errno.ENODEV
        match write.step:
            case Step.OVERRIDE:
                chip.override = None if write.value == "\n" else write.value
            case Step.UNBIND:
                if chip.driver is None:
                    return errno.ENODEV
                chip.driver = None
            case Step.PROBE:
                if chip.driver is None:
                    chip.driver = self._best(chip)
        self._moment()
        return 0

    def _best(self, chip: Chip) -> str | None:
        own = [driver for driver in chip.own if driver not in self.unloaded]
        if chip.override is not None:
            return chip.override if chip.override in {*VFIO_DRIVERS, *own} else None
        return next(iter(own), None)

    # --- what is expected -------------------------------------------------------------------------

    def state(self) -> Mapping[Address, tuple[str | None, str | None]]:
        """Driver and override of every function."""
        return {address: (chip.driver, chip.override) for address, chip in self.chips.items()}

    @property
    def stranded(self) -> set[Address]:
        return set(self.claims.strays)


def origins(durable: Durable) -> dict[Address, object]:
    """What the journal has of functions that are moved."""
    found: dict[Address, object] = {}
    for record in durable.claims:
        found.update((o.address, o) for o in record.origins if o.target is not None)
    for stray in durable.strays:
        found[stray.origin.address] = stray.origin
    return found


# --- the shapes that a claim can have -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """A host, and what is claimed on it."""

    id: str
    chips: Callable[[], Sequence[Chip]]
    prepare: Prepare
    moved: Mapping[Address, str]
    """The functions that are moved, and the driver that each is given."""


def _vfio(*devices: Address, **fields: object) -> Prepare:
    return Prepare("vm", HoldMode.VFIO, devices, **fields)  # type: ignore[arg-type]


SHAPES = (
    Shape("one-gpu", lambda: [Chip(GPU)], _vfio(GPU), {GPU: "vfio-pci"}),
    Shape(
        "with-audio",
        lambda: [Chip(GPU), audio()],
        _vfio(GPU),
        {GPU: "vfio-pci", AUDIO: "vfio-pci"},
    ),
    Shape(
        "two-gpus",
        lambda: [Chip(GPU), Chip(OTHER_GPU, group=2)],
        _vfio(GPU, OTHER_GPU),
        {GPU: "vfio-pci", OTHER_GPU: "vfio-pci"},
    ),
    Shape("pf-without-vfs", lambda: [Chip(GPU, virtfns=())], _vfio(GPU), {GPU: "vfio-pci"}),
    Shape(
        "vf",
        lambda: [Chip(GPU, virtfns=(VF,)), Chip(VF, physfn=GPU, group=2)],
        _vfio(VF),
        {VF: "vfio-pci"},
    ),
    Shape("pre-bound", lambda: [Chip(GPU, driver="vfio-pci", override="vfio-pci")], _vfio(GPU), {}),
    Shape(
        "one-of-two-pre-bound",
        lambda: [Chip(GPU), Chip(OTHER_GPU, driver="vfio-pci", group=2)],
        _vfio(GPU, OTHER_GPU),
        {GPU: "vfio-pci"},
    ),
    Shape(
        "variant-driver",
        lambda: [Chip(GPU)],
        _vfio(GPU, driver="xe_vfio_pci"),
        {GPU: "xe-vfio-pci"},
    ),
    Shape(
        "apu-with-usb-in-its-slot",
        lambda: [
            Chip(GPU, ("amdgpu",), "amdgpu"),
            audio(),
            Chip(USB, ("xhci_hcd",), "xhci_hcd", class_code=0x0C0330, group=2),
        ],
        _vfio(GPU),
        {GPU: "vfio-pci", AUDIO: "vfio-pci"},
    ),
    Shape(
        "named-usb-in-its-group",
        lambda: [Chip(GPU), Chip(USB, ("xhci_hcd",), "xhci_hcd", class_code=0x0C0330)],
        _vfio(GPU, named=(USB,)),
        {GPU: "vfio-pci", USB: "vfio-pci"},
    ),
    Shape("no-driver-before", lambda: [Chip(GPU, (), None)], _vfio(GPU), {GPU: "vfio-pci"}),
    Shape(
        "override-before",
        lambda: [Chip(GPU, ("i915", "xe"), "xe", override="xe")],
        _vfio(GPU),
        {GPU: "vfio-pci"},
    ),
    Shape(
        "second-choice-of-the-kernel",
        lambda: [Chip(GPU, ("i915", "xe"), "xe")],
        _vfio(GPU),
        {GPU: "vfio-pci"},
    ),
    Shape(
        "drm-off-foreign-vfio",
        lambda: [Chip(GPU, driver="vfio-pci", override="vfio-pci")],
        Prepare("vm", HoldMode.DRM, (GPU,), from_vfio=True),
        {GPU: "xe"},
    ),
    Shape("drm-already-there", lambda: [Chip(GPU)], Prepare("vm", HoldMode.DRM, (GPU,)), {}),
)

RELEASE = Release("vm")
RECOVER = Recover(GPU)
