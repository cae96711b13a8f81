"""Short ways to build the values that plans are made of."""

from agent.cdi.desired import Desired, Fingerprint, Offer, Reason, Withheld
from agent.cdi.files import DeleteSpec, Disk, ForeignFile, SetAside, SpecFile, WriteSpec
from agent.cdi.spec import ContainerEdits, Device, DeviceNode, Kind
from agent.host.model import Address, DeviceNumber, Node, NodeRole, NodeState
from agent.reconcile.plan import Plan
from agent.reconcile.rules import Layout
from tests.cdi.worlds import sheets

GPU = Kind("intel.com/gpu")
VFIO = Kind("intel.com/gpu-vfio")
LAYOUT = Layout(directory="/cdi")
GPU_FILE = LAYOUT.path(GPU)
VFIO_FILE = LAYOUT.path(VFIO)

A, B, C = (Address(f"0000:0{bus}:00.0") for bus in (3, 4, 5))
NAMES = {A: "a", B: "b", C: "c"}


def node(path: str, minor: int) -> Node:
    return Node(
        NodeRole.CARD,
        path.rpartition("/")[2],
        path,
        DeviceNumber(226, minor),
        NodeState.PRESENT,
        settled=False,
    )


def offer(
    address: Address,
    *cards: int,
    kind: Kind = GPU,
    driver: str = "xe",
    inode: int = 1,
    unsettled: bool = False,
    shared: tuple[str, ...] = (),
) -> Offer:
    """A device that gives /dev/dri/cardN for each of these numbers."""
    nodes = tuple(node(f"/dev/dri/card{card}", card) for card in cards)
    paths = (*(n.path for n in nodes), *shared)
    edits = ContainerEdits(tuple(DeviceNode(path, path, "rw") for path in sorted(paths)))
    return Offer(
        kind=kind,
        address=address,
        device=Device(NAMES[address], edits),
        fingerprint=Fingerprint(inode, driver, tuple((n.path, n.number) for n in nodes)),
        unsettled=nodes if unsettled else (),
        in_all=kind == GPU,
    )


def desired(*offers: Offer, withheld: tuple[Withheld, ...] = ()) -> Desired:
    return Desired(offers, withheld)


def disk(
    *offers: Offer, foreign: tuple[ForeignFile, ...] = (), leftovers: tuple[str, ...] = ()
) -> Disk:
    """The directory as it is when exactly these are published."""
    files = {}
    for kind, sheet in sheets(offers).items():
        path = LAYOUT.path(kind)
        files[path] = SpecFile(path, sheet.content, sheet.spec)
    return Disk("/cdi", files, leftovers, foreign)


def apply(before: Disk, plan: Plan) -> Disk:
    """The directory after every action of a plan."""
    from agent.cdi.parse import parse

    files = dict(before.ours)
    for action in plan.actions:
        match action:
            case WriteSpec(path=path, content=content, spec=spec):
                assert spec is not None
                assert parse(content).kind == spec.kind
                files[path] = SpecFile(path, content, spec)
            case DeleteSpec(path=path):
                files.pop(path, None)
            case SetAside():
                pass
    return Disk(before.directory, files, (), before.foreign)


def names_on(disk: Disk) -> dict[str, list[str]]:
    """Kinds and the names that they define, ``all`` left out."""
    return {
        file.spec.kind: sorted(name for name in file.devices if name != "all")
        for file in disk.ours.values()
        if file.spec is not None
    }


def reasons(plan: Plan) -> dict[str, Reason]:
    return {NAMES[w.address]: w.reason for w in plan.withheld}
