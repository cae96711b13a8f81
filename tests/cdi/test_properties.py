"""What holds of every host, however odd."""

import json
import random
from collections import Counter
from collections.abc import Sequence

import yaml
from hypothesis import event, given, settings
from hypothesis import strategies as st

from agent.cdi import rules
from agent.cdi.desired import Desired, Policy, desired
from agent.cdi.parse import parse, peek
from agent.cdi.profile import Naming, Profile, Vfio
from agent.cdi.render import render
from agent.cdi.sheet import Sheet
from agent.cdi.spec import ContainerEdits, Device, DeviceNode, Hook, Kind, Mount, Spec
from agent.host.model import Address, Hold, HoldMode, Inventory, NodeRole
from tests.cdi.strategies import histories, holds, inventories
from tests.cdi.worlds import BUILTIN, changed, sheets

PROFILES: Sequence[tuple[Profile, ...]] = (
    BUILTIN,
    changed("intel-gpu", vfio=Vfio(kind="intel.com/gpu"), naming=Naming.INDEX, links=True),
    changed("amd-gpu", naming=Naming.CARD),
)
HELD: Sequence[tuple[Hold, ...]] = (
    (),
    *(
        (Hold(Address("0000:03:00.0"), "claim", mode, settled),)
        for mode in HoldMode
        for settled in (True, False)
    ),
)
WORLDS = {"host": inventories(), "profiles": st.sampled_from(PROFILES), "held": holds()}


def decide(host: Inventory, profiles: tuple[Profile, ...], held: tuple[Hold, ...]) -> Desired:
    return desired(host, profiles, held, Policy())


@given(**WORLDS)
def test_everything_that_is_assembled_is_valid_and_comes_back_as_it_was(
    host: Inventory, profiles: tuple[Profile, ...], held: tuple[Hold, ...]
) -> None:
    for kind, sheet in sheets(decide(host, profiles, held).offers).items():
        spec = sheet.spec
        assert sheet.content == render(spec)
        assert spec.kind == kind
        assert spec.devices
        assert rules.validate(spec) == []
        assert render(parse(render(spec))) == render(spec)


@given(**WORLDS)
def test_no_two_devices_give_one_node_unless_it_is_shared(
    host: Inventory, profiles: tuple[Profile, ...], held: tuple[Hold, ...]
) -> None:
    owners: dict[str, set[str]] = {}
    for offer in decide(host, profiles, held).offers:
        function = host.functions[offer.address]
        for path, _ in offer.fingerprint.nodes:
            if path not in host.shared:
                groups = {each.path for each in function.nodes_of(NodeRole.VFIO_GROUP)}
                owner = f"group {function.iommu_group}" if path in groups else offer.address
                owners.setdefault(path, set()).add(owner)
    assert all(len(who) == 1 for who in owners.values())


@given(**WORLDS)
def test_every_node_that_is_given_exists_and_is_what_sysfs_lists(
    host: Inventory, profiles: tuple[Profile, ...], held: tuple[Hold, ...]
) -> None:
    for offer in decide(host, profiles, held).offers:
        own = {each.path: each for each in host.functions[offer.address].nodes}
        for given_node in offer.device.edits.device_nodes:
            found = own.get(given_node.path) or host.shared[given_node.path]
            assert found.counts
            assert given_node.host_path == given_node.path


@given(**WORLDS)
def test_a_device_is_offered_once_in_a_kind_and_never_on_both_sides_of_vfio(
    host: Inventory, profiles: tuple[Profile, ...], held: tuple[Hold, ...]
) -> None:
    result = decide(host, profiles, held)
    assert max(Counter((o.kind, o.device.name) for o in result.offers).values(), default=1) == 1
    assert max(Counter((o.kind, o.address) for o in result.offers).values(), default=1) == 1
    for offer in result.offers:
        roles = {
            each.role
            for each in host.functions[offer.address].nodes
            if each.path in {path for path, _ in offer.fingerprint.nodes}
        }
        on_vfio = host.functions[offer.address].on_vfio
        assert roles <= {NodeRole.VFIO_GROUP, NodeRole.VFIO_CDEV} if on_vfio else roles
        assert not {NodeRole.VFIO_GROUP, NodeRole.VFIO_CDEV} <= roles
        assert on_vfio or roles.isdisjoint({NodeRole.VFIO_GROUP, NodeRole.VFIO_CDEV})


@given(**WORLDS)
def test_what_is_not_offered_is_withheld_with_a_sentence(
    host: Inventory, profiles: tuple[Profile, ...], held: tuple[Hold, ...]
) -> None:
    result = decide(host, profiles, held)
    offered = {(offer.address, offer.kind) for offer in result.offers}
    withheld = {(each.address, each.kind) for each in result.withheld}
    assert not offered & withheld
    assert len(withheld) == len(result.withheld)
    assert all(each.detail.isprintable() and each.detail for each in result.withheld)
    seen = {address for address, _ in offered | withheld}
    displays = {f.address for f in host.functions.values() if f.base_class == 0x0300}
    assert displays | set(host.dropped) <= seen


@given(**WORLDS, seed=st.integers(0, 99))
def test_the_order_in_which_a_host_was_read_changes_nothing(
    host: Inventory, profiles: tuple[Profile, ...], held: tuple[Hold, ...], seed: int
) -> None:
    shuffle = random.Random(seed)
    functions = list(host.functions.items())
    shuffle.shuffle(functions)
    other = Inventory(
        functions=dict(functions),
        shared=dict(reversed([*host.shared.items()])),
        orphans=host.orphans,
        dropped=host.dropped,
        environment=host.environment,
    )
    assert decide(other, profiles, held[::-1]) == decide(host, profiles, held)


@settings(max_examples=300)
@given(histories(), st.data())
def test_what_is_taken_over_from_the_last_pass_changes_nothing(
    hosts: list[Inventory], data: st.DataObject
) -> None:
    """Whatever of a host changes, and whatever changes around it: the memo shows in no result."""
    before = None
    made: dict[Kind, Sheet] = {}
    profiles, held, policy = data.draw(st.sampled_from(PROFILES)), HELD[0], Policy()
    for host in hosts:
        changing = data.draw(st.sampled_from((*[""] * 6, "profiles", "held", "held", "policy")))
        if changing == "profiles":
            profiles = data.draw(st.sampled_from(PROFILES))
        elif changing == "held":
            held = data.draw(st.sampled_from(HELD))
        elif changing == "policy":
            policy = data.draw(st.sampled_from((Policy(), Policy(version="0.4.0"))))
        result = desired(host, profiles, held, policy, before)
        assert result == desired(host, profiles, held, policy)
        made = sheets(result.offers, made)
        assert made == sheets(result.offers)
        # Nothing is kept of what is gone, however long the agent runs.
        assert result.basis is not None
        assert result.basis.subjects.keys() == host.functions.keys()
        assert result.basis.judgements.keys() <= host.functions.keys()
        if before is not None:
            taken_over = {id(offer) for offer in before.offers} & {id(o) for o in result.offers}
            event(f"{bool(taken_over)}: something was taken over")
        before = result


@given(**WORLDS)
def test_all_is_the_union_of_what_it_stands_for(
    host: Inventory, profiles: tuple[Profile, ...], held: tuple[Hold, ...]
) -> None:
    result = decide(host, profiles, held)
    for kind, sheet in sheets(result.offers).items():
        expected = {
            each.path
            for offer in result.offers
            if offer.kind == kind and offer.in_all
            for each in offer.device.edits.device_nodes
        }
        given_nodes = [
            each.path
            for device in sheet.spec.devices
            if device.name == rules.ALL
            for each in device.edits.device_nodes
        ]
        assert sorted(given_nodes) == sorted(expected)


def device_with(place: str, text: str) -> Device:
    """A device that is valid but for this text at that place."""
    node = DeviceNode(f"/dev/{text}" if place == "path" else "/dev/x", permissions="rw")
    mount = Mount("/a", f"/{text}/b" if place == "mount" else "/b", ("ro",), "bind")
    argument = text if place == "argument" else "1e3"
    return Device(
        text if place == "name" else "gpu0",
        ContainerEdits(
            device_nodes=(node,),
            mounts=(mount,),
            env=tuple(sorted((f"{text}=x" if place == "variable" else "A=b", f"B={text}"))),
            hooks=(Hook("prestart", "/h", ("h", argument)),),
        ),
        ((text if place == "annotation" else "a", text),),
    )


@given(
    st.sampled_from(("path", "mount", "argument", "name", "variable", "annotation", "value")),
    st.text(max_size=8) | st.sampled_from(("on", "0o7", "1_0", "~", "<<", "- ", "\U0010fffd")),
)
def test_whatever_text_the_rules_let_pass_every_reader_takes_as_it_was_meant(
    place: str, text: str
) -> None:
    device = device_with(place, text)
    event(f"{place}: {'refused' if rules.device_problems(device) else 'written'}")
    if rules.device_problems(device):
        return
    spec = Spec(Kind("vendor.test/gpu"), (device,))
    content = render(spec)
    assert yaml.safe_load(content) == json.loads(render(spec, suffix="json"))
    assert parse(content) == spec
    assert peek(content).names == {device.name}
