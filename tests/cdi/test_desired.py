"""What is published of a host and what is withheld, each with its reason."""

from typing import Any

import pytest
from msgspec import structs

from agent.cdi.desired import Policy, Reason
from agent.cdi.entry import address_in_name
from agent.cdi.merge import merge
from agent.cdi.profile import (
    Backend,
    HookEdit,
    Naming,
    Partitions,
    RoleNodes,
    SharedNode,
    SrIov,
    Vfio,
)
from agent.cdi.spec import DeviceNode, Hook, Mount
from agent.host.model import (
    Address,
    DeviceNumber,
    Environment,
    Function,
    Hold,
    HoldMode,
    Link,
    NodeRole,
    NodeState,
    Orphan,
)
from tests.cdi.worlds import (
    AUDIO,
    B50,
    B60,
    BUILTIN,
    VFIO_SHARED,
    changed,
    decide,
    drm,
    function,
    inventory,
    node,
    published,
    reasons,
    shared,
    vfio,
    with_inode,
)

NAME = "0000-03-00-0-0xe212"


# --- on its own driver ----------------------------------------------------------------------------


def test_a_gpu_is_offered_with_its_card_and_render_node() -> None:
    (offer,) = decide(function()).offers
    assert (offer.kind, offer.address, offer.device.name) == ("intel.com/gpu", B50, NAME)
    assert offer.device.edits.device_nodes == (
        DeviceNode("/dev/dri/card0", "/dev/dri/card0", "rw", 0o666),
        DeviceNode("/dev/dri/renderD128", "/dev/dri/renderD128", "rw", 0o666),
    )
    assert offer.in_all
    assert offer.unsettled == ()


def test_the_fingerprint_is_what_the_entry_depends_on() -> None:
    (offer,) = decide(function()).offers
    assert offer.fingerprint.driver == "xe"
    assert offer.fingerprint.nodes == (
        ("/dev/dri/card0", DeviceNumber(226, 0)),
        ("/dev/dri/renderD128", DeviceNumber(226, 128)),
    )
    (other,) = decide(with_inode(function(), 8)).offers
    assert other.device == offer.device
    assert other.fingerprint != offer.fingerprint


@pytest.mark.parametrize(
    ("each", "reason"),
    [
        pytest.param(function(driver=None), Reason.NO_DRIVER, id="no driver"),
        pytest.param(
            function(driver="other", nodes=drm(0)), Reason.FOREIGN_DRIVER, id="unknown driver"
        ),
        pytest.param(function(nodes=()), Reason.NODE_MISSING, id="no nodes yet"),
        pytest.param(function(nodes=drm(0)[:1]), Reason.NODE_MISSING, id="no render node yet"),
        pytest.param(function(nodes=drm(0)[1:]), Reason.NODE_MISSING, id="no card yet"),
        pytest.param(
            function(nodes=(drm(0)[0], node(NodeRole.RENDER, 128, state=NodeState.MISSING))),
            Reason.NODE_MISSING,
            id="going away: sysfs still lists it",
        ),
        pytest.param(
            function(nodes=(node(NodeRole.CARD, 0, state=NodeState.MISMATCH), drm(0)[1])),
            Reason.NODE_MISMATCH,
            id="something else at its path",
        ),
        pytest.param(
            function(nodes=(node(NodeRole.CARD, 0, state=NodeState.UNREADABLE), drm(0)[1])),
            Reason.UNREADABLE,
            id="a path that cannot be examined",
        ),
    ],
)
def test_half_a_device_is_never_offered(each: Function, reason: Reason) -> None:
    result = decide(each)
    assert result.offers == ()
    (withheld,) = result.withheld
    assert (withheld.address, withheld.kind, withheld.reason) == (B50, "intel.com/gpu", reason)
    assert withheld.detail


def test_nodes_that_udev_has_yet_to_deal_with_are_named() -> None:
    card, render = drm(0)
    late = structs.replace(render, settled=False)
    (offer,) = decide(function(nodes=(card, late))).offers
    assert offer.unsettled == (late,)


def test_a_device_that_is_withheld_takes_no_neighbour_along() -> None:
    result = decide(inventory(function(nodes=()), function(B60, 1, device=0xE211)))
    assert published(result) == {"intel.com/gpu": ["0000-04-00-0-0xe211"]}
    assert reasons(result) == {B50: Reason.NODE_MISSING}


def test_two_functions_with_one_path_are_both_withheld() -> None:
    result = decide(inventory(function(B50, 0), function(B60, 0), function("0000:05:00.0", 1)))
    assert published(result) == {"intel.com/gpu": ["0000-05-00-0-0xe212"]}
    assert reasons(result) == {B50: Reason.PATH_CONFLICT, B60: Reason.PATH_CONFLICT}


def test_a_path_that_a_function_without_profile_has_too_is_not_given() -> None:
    bmc = function("0000:01:00.0", vendor=0x1A03, driver="ast", nodes=drm(0)[:1])
    assert reasons(decide(inventory(bmc, function())))[B50] is Reason.PATH_CONFLICT


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, True),
        ({"vfio": None}, False),
        ({"nodes": [{"role": "render"}]}, False),
        ({"nodes": []}, False),
        ({"enabled": False}, False),
    ],
    ids=["takes VFIO", "leaves VFIO", "takes a node", "is for VFIO alone", "is off"],
)
def test_it_is_told_which_nodes_go_with_vfio_to_a_profile_that_does_not_give_them(
    changes: dict[str, object], *, told: bool
) -> None:
    """Who adds a profile for MEI nodes and leaves its ``vfio`` at the default loses the GPU."""
    mine = {
        "name": "mine",
        "match": {"vendor": "8086", "classes": ["03"]},
        "kind": "mine.test/mei",
        "nodes": [{"role": "mei"}],
    }
    profiles, problems = merge([mine | changes], BUILTIN)
    assert problems == ()
    result = decide(function(nodes=(*drm(0), node(NodeRole.MEI, 1))), profiles=profiles)
    said = [each.detail for each in result.withheld if "takes VFIO from profile" in each.detail]
    sentence = (
        "profile mine takes VFIO from profile intel-gpu, and with it its card and render nodes:"
        " `vfio: null` there leaves it both"
    )
    assert said == [sentence] * told


def test_an_engine_has_an_entry_in_a_kind_of_its_own() -> None:
    result = decide(function(nodes=(*drm(0), node(NodeRole.MEI, 1))))
    assert published(result) == {"intel.com/gpu": [NAME], "intel.com/gpu-mei": [NAME]}
    paths: dict[str, list[str]] = {
        offer.kind: [each.path for each in offer.device.edits.device_nodes]
        for offer in result.offers
    }
    assert paths["intel.com/gpu-mei"] == ["/dev/mei1"]
    assert "/dev/mei1" not in paths["intel.com/gpu"]


KFD = shared("/dev/kfd", (234, 0))
RADEON = function(vendor=0x1002, device=0x744C, driver="amdgpu")


def test_a_shared_node_is_given_where_it_exists() -> None:
    (offer,) = decide(inventory(RADEON, nodes=[KFD])).offers
    assert "/dev/kfd" in [each.path for each in offer.device.edits.device_nodes]
    assert ("/dev/kfd", KFD.number) in offer.fingerprint.nodes


def test_an_optional_shared_node_that_does_not_exist_is_left_out() -> None:
    (offer,) = decide(inventory(RADEON, nodes=[])).offers
    assert len(offer.device.edits.device_nodes) == 2


def test_a_required_shared_node_that_does_not_exist_withholds() -> None:
    profiles = changed("amd-gpu", shared=(SharedNode(path="/dev/kfd", required=True),))
    gone = structs.replace(KFD, state=NodeState.MISSING)
    for nodes in ([], [gone]):
        result = decide(inventory(RADEON, nodes=nodes), profiles=profiles)
        assert reasons(result) == {B50: Reason.NODE_MISSING}


@pytest.mark.parametrize(
    ("state", "reason", "says"),
    [
        (NodeState.MISMATCH, Reason.NODE_MISMATCH, "is not the node that sysfs lists"),
        (NodeState.UNREADABLE, Reason.UNREADABLE, "cannot be examined"),
    ],
)
def test_of_a_shared_node_that_exists_nobody_says_that_it_does_not(
    state: NodeState, reason: Reason, says: str
) -> None:
    """It is told what is wrong, and looked at again: no event may tell that it is right."""
    spoilt = shared("/dev/vfio/vfio", state=state)
    (withheld,) = decide(inventory(vfio(nodes=vfio().nodes[:1]), nodes=(spoilt,))).withheld
    assert (withheld.reason, withheld.detail) == (reason, f"/dev/vfio/vfio {says}")
    profiles = changed("amd-gpu", shared=(SharedNode(path="/dev/kfd", required=True),))
    kfd = inventory(RADEON, nodes=(structs.replace(KFD, state=state),))
    (withheld,) = decide(kfd, profiles=profiles).withheld
    assert (withheld.reason, withheld.detail) == (reason, f"/dev/kfd {says}")


def test_an_optional_node_that_does_not_count_is_left_out() -> None:
    profiles = changed(
        "intel-gpu",
        nodes=(RoleNodes(role=NodeRole.CARD, required=False), RoleNodes(role=NodeRole.RENDER)),
    )
    card, render = drm(0)
    for nodes in ((render,), (structs.replace(card, state=NodeState.MISSING), render)):
        (offer,) = decide(function(nodes=nodes), profiles=profiles).offers
        assert [each.path for each in offer.device.edits.device_nodes] == [render.path]


def test_a_device_of_which_no_optional_node_exists_is_withheld() -> None:
    profiles = changed("intel-gpu", nodes=(RoleNodes(role=NodeRole.CARD, required=False),))
    assert reasons(decide(function(nodes=()), profiles=profiles)) == {B50: Reason.NODE_MISSING}


def test_the_driver_of_another_toolkit_is_named_with_where_to_go() -> None:
    nvidia = function(vendor=0x10DE, device=0x2684, driver="nvidia", nodes=())
    (withheld,) = decide(nvidia).withheld
    assert withheld.reason is Reason.FOREIGN_DRIVER
    assert "nvidia-ctk" in withheld.detail


BY_PATH = "/dev/dri/by-path/pci-0000:03:00.0-"
LINKS = (
    Link(f"{BY_PATH}card", "/dev/dri/card0"),
    Link(f"{BY_PATH}render", "/dev/dri/renderD129"),
    Link("/dev/dri/by-path/dangling", "/dev/dri/nothing"),
)


def test_links_that_lead_to_its_nodes_are_mounted_if_the_profile_says_so() -> None:
    gpu = function(links=LINKS)
    (offer,) = decide(gpu, profiles=changed("intel-gpu", links=True)).offers
    options = ("bind", "nosuid", "noexec")
    assert offer.device.edits.mounts == (Mount(f"{BY_PATH}card", f"{BY_PATH}card", options),)
    (offer,) = decide(gpu).offers
    assert offer.device.edits.mounts == ()


def test_everything_that_a_profile_says_is_in_the_entry() -> None:
    profiles = changed(
        "intel-gpu",
        nodes=(RoleNodes(role=NodeRole.RENDER, permissions="r", file_mode="0640", uid=1, gid=2),),
        env=("A=b",),
        hooks=(HookEdit(hook_name="prestart", path="/h", args=("h",), env=("C=d",), timeout=3),),
        additional_gids=(44,),
        annotations={"z": "1", "a": "2"},
    )
    (offer,) = decide(function(), profiles=profiles).offers
    edits = offer.device.edits
    path = "/dev/dri/renderD128"
    assert edits.device_nodes == (DeviceNode(path, path, "r", 0o640, 1, 2),)
    assert edits.env == ("A=b",)
    assert edits.hooks == (Hook("prestart", "/h", ("h",), ("C=d",), 3),)
    assert edits.additional_gids == (44,)
    assert offer.device.annotations == (("a", "2"), ("z", "1"))


def test_an_entry_that_a_consumer_would_refuse_is_withheld() -> None:
    result = decide(function(), profiles=changed("intel-gpu", env=("A",)))
    assert reasons(result) == {B50: Reason.INVALID}


@pytest.mark.parametrize(
    ("version", "fields", "reason"),
    [
        ("0.5.0", {}, None),
        ("0.4.0", {}, Reason.VERSION_PIN),
        ("0.6.0", {"additional_gids": (44,)}, Reason.VERSION_PIN),
        ("0.7.0", {"additional_gids": (44,)}, None),
        ("0.5.0", {"kind": "intel.com/g.pu"}, Reason.VERSION_PIN),
    ],
)
def test_an_entry_that_needs_more_than_the_pin_is_withheld(
    version: str, fields: dict[str, Any], reason: Reason | None
) -> None:
    result = decide(
        function(), profiles=changed("intel-gpu", **fields), policy=Policy(version=version)
    )
    assert reasons(result).get(B50) is reason
    assert len(result.offers) == (reason is None)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("naming", "names"),
    [
        (Naming.MACHINE, ["0000-03-00-0-0xe212", "0000-04-00-0-0xe211"]),
        (Naming.ADDRESS, ["0000:03:00.0", "0000:04:00.0"]),
        (Naming.INDEX, ["0", "1"]),
        (Naming.CARD, ["card5", "card1"]),
    ],
)
def test_a_device_is_called_as_its_profile_says(naming: Naming, names: list[str]) -> None:
    host = inventory(function(B60, 1, device=0xE211), function(B50, 5))
    result = decide(host, profiles=changed("intel-gpu", naming=naming))
    assert published(result) == {"intel.com/gpu": names}


@pytest.mark.parametrize("naming", [Naming.MACHINE, Naming.ADDRESS])
@pytest.mark.parametrize("address", ["0000:03:00.0", "10000:e1:1f.7", "ffffffff:00:00.0"])
def test_a_name_by_address_tells_the_address(naming: Naming, address: str) -> None:
    host = function(address, 0)
    (offer, *_) = decide(host, profiles=changed("intel-gpu", naming=naming)).offers
    assert address_in_name(offer.device.name) == address


@pytest.mark.parametrize("name", ["all", "card0", "0", "0000-03-00-0", "x0000-03-00-0-0xe212", ""])
def test_no_other_name_does(name: str) -> None:
    assert address_in_name(name) is None


def test_two_devices_of_one_name_are_both_withheld() -> None:
    """The profiles of a configuration cannot bring this about; a file with it would be void."""
    card, render = drm(1)
    twin = structs.replace(card, name="card0")
    host = inventory(function(B50, 0), function(B60, nodes=(twin, render)))
    result = decide(host, profiles=changed("intel-gpu", naming=Naming.CARD))
    assert result.offers == ()
    assert reasons(result) == {B50: Reason.INVALID, B60: Reason.INVALID}


def test_an_index_counts_functions_and_so_outlives_a_neighbour_that_is_withheld() -> None:
    profiles = changed("intel-gpu", naming=Naming.INDEX)
    host = inventory(vfio(B50), function(B60, 1), function("0000:05:00.0", nodes=()))
    result = decide(host, profiles=profiles)
    assert published(result) == {"intel.com/gpu-vfio": ["0"], "intel.com/gpu": ["1"]}


def test_an_index_goes_by_the_value_of_the_domain() -> None:
    host = inventory(function("10000:01:00.0", 1), function("ffff:01:00.0", 0))
    result = decide(host, profiles=changed("intel-gpu", naming=Naming.INDEX))
    names = {offer.address: offer.device.name for offer in result.offers}
    assert names == {"ffff:01:00.0": "0", "10000:01:00.0": "1"}


def test_on_vfio_a_card_has_no_name_and_the_address_stands_in() -> None:
    result = decide(vfio(), profiles=changed("intel-gpu", naming=Naming.CARD))
    assert published(result) == {"intel.com/gpu-vfio": [NAME]}


# --- on VFIO --------------------------------------------------------------------------------------

GROUP = ["/dev/vfio/vfio", "/dev/vfio/12"]
CDEV = ["/dev/iommu", "/dev/vfio/devices/vfio0"]


@pytest.mark.parametrize(
    ("backend", "nodes", "host_nodes", "paths"),
    [
        pytest.param(Backend.AUTO, "both", "both", GROUP, id="auto, both: legacy"),
        pytest.param(Backend.AUTO, "group", "both", GROUP, id="auto, kernel without cdevs"),
        pytest.param(Backend.AUTO, "cdev", "both", CDEV, id="auto, kernel without groups"),
        pytest.param(Backend.AUTO, "both", "iommu", CDEV, id="auto, no container node"),
        pytest.param(Backend.AUTO, "both", "vfio", GROUP, id="auto, no iommufd"),
        pytest.param(Backend.AUTO, "both", "none", None, id="auto, neither"),
        pytest.param(Backend.AUTO, "both", "gone", None, id="auto, both going away"),
        pytest.param(Backend.AUTO, "none", "both", None, id="auto, not yet"),
        pytest.param(Backend.LEGACY, "both", "both", GROUP, id="legacy"),
        pytest.param(Backend.LEGACY, "cdev", "both", None, id="legacy, no group node"),
        pytest.param(Backend.IOMMUFD, "both", "both", CDEV, id="iommufd"),
        pytest.param(Backend.IOMMUFD, "group", "both", None, id="iommufd, no cdev"),
    ],
)
def test_a_vm_gets_exactly_one_back_end(
    backend: Backend, nodes: str, host_nodes: str, paths: list[str] | None
) -> None:
    group, cdev = vfio().nodes
    container, iommu = VFIO_SHARED
    gone = tuple(structs.replace(each, state=NodeState.MISSING) for each in VFIO_SHARED)
    own = {"both": (group, cdev), "group": (group,), "cdev": (cdev,), "none": ()}[nodes]
    host = {"both": VFIO_SHARED, "vfio": (container,), "iommu": (iommu,), "none": (), "gone": gone}[
        host_nodes
    ]
    result = decide(
        inventory(vfio(nodes=own), nodes=host),
        profiles=changed("intel-gpu", vfio=Vfio(backend=backend)),
    )
    if paths is None:
        assert reasons(result) == {B50: Reason.NODE_MISSING}
        return
    (offer,) = result.offers
    assert offer.kind == "intel.com/gpu-vfio"
    assert [each.path for each in offer.device.edits.device_nodes] == paths
    assert {each.file_mode for each in offer.device.edits.device_nodes} == {0o666}
    assert not offer.in_all


@pytest.mark.parametrize("driver", ["vfio-pci", "vfio_pci", "xe-vfio-pci", "somebodys-variant"])
def test_a_device_is_on_vfio_whatever_the_driver_is_called(driver: str) -> None:
    assert published(decide(vfio(driver=driver))) == {"intel.com/gpu-vfio": [NAME]}


def test_both_kinds_may_be_one_and_the_entry_follows_the_driver() -> None:
    profiles = changed("intel-gpu", vfio=Vfio(kind="intel.com/gpu"))
    (before,) = decide(function(), profiles=profiles).offers
    (after,) = decide(vfio(), profiles=profiles).offers
    assert before.kind == after.kind == "intel.com/gpu"
    assert before.device.name == after.device.name
    assert (before.in_all, after.in_all) == (True, False)
    assert after.device.edits.env == ()


def test_a_profile_without_vfio_withholds_what_is_on_it() -> None:
    result = decide(vfio(), profiles=changed("intel-gpu", vfio=None))
    assert reasons(result) == {B50: Reason.FOREIGN_DRIVER}


def test_a_profile_for_vfio_only_withholds_what_is_not_on_it() -> None:
    profiles = changed("intel-gpu", nodes=())
    assert reasons(decide(function(), profiles=profiles)) == {B50: Reason.POLICY}
    assert published(decide(vfio(), profiles=profiles)) == {"intel.com/gpu-vfio": [NAME]}


def audio(driver: str | None) -> Function:
    return function(
        AUDIO, device=0xE2F7, class_code=0x040300, iommu_group=12, nodes=(), driver=driver
    )


@pytest.mark.parametrize(
    ("member", "viable"),
    [
        pytest.param(audio("snd_hda_intel"), False, id="audio on the host's driver"),
        pytest.param(audio(None), True, id="audio without driver"),
        pytest.param(audio("vfio-pci"), True, id="audio on VFIO"),
        pytest.param(audio("pci-stub"), True, id="audio on pci-stub"),
        pytest.param(
            function(
                "0000:02:00.0", class_code=0x060400, driver="switchtec", nodes=(), iommu_group=12
            ),
            True,
            id="a bridge",
        ),
        pytest.param(
            function("0000:09:00.0", class_code=0x020000, driver="igc", nodes=(), iommu_group=13),
            True,
            id="a network card of another group",
        ),
    ],
)
def test_a_group_that_a_driver_of_the_host_shares_is_not_given(
    member: Function, *, viable: bool
) -> None:
    result = decide(inventory(vfio(), member))
    if viable:
        assert published(result) == {"intel.com/gpu-vfio": [NAME]}
    else:
        (withheld,) = result.withheld
        assert withheld.reason is Reason.GROUP_NOT_VIABLE
        assert f"{AUDIO} (snd_hda_intel)" in withheld.detail


def test_the_node_of_a_group_belongs_to_all_its_functions() -> None:
    group = node(NodeRole.VFIO_GROUP, 12)
    host = inventory(vfio(B50, nodes=(group,)), vfio(B60, nodes=(group,)))
    assert published(decide(host)) == {"intel.com/gpu-vfio": [NAME, "0000-04-00-0-0xe212"]}


# --- policy ---------------------------------------------------------------------------------------

VF = Address("0000:03:00.1")


@pytest.mark.parametrize(
    ("sriov", "names"),
    [
        (SrIov.BOTH, [NAME, "0000-03-00-1-0xe212"]),
        (SrIov.PF, [NAME]),
        (SrIov.VF, ["0000-03-00-1-0xe212"]),
    ],
)
def test_pf_and_vfs_are_published_as_the_profile_says(sriov: SrIov, names: list[str]) -> None:
    host = inventory(function(virtfns=(VF,)), function(VF, 1, physfn=B50))
    result = decide(host, profiles=changed("intel-gpu", sriov=sriov))
    assert published(result) == {"intel.com/gpu": names}
    assert set(reasons(result).values()) <= {Reason.POLICY}


def test_a_pf_without_vfs_is_a_device_like_any_other() -> None:
    result = decide(function(), profiles=changed("intel-gpu", sriov=SrIov.VF))
    assert len(result.offers) == 1


def test_a_vf_is_not_in_all() -> None:
    host = inventory(function(virtfns=(VF,)), function(VF, 1, physfn=B50))
    assert {offer.address: offer.in_all for offer in decide(host).offers} == {B50: True, VF: False}


@pytest.mark.parametrize("ignore", [B50, "8086:e212"])
def test_what_the_configuration_ignores_is_withheld(ignore: str) -> None:
    host = inventory(function(), function(B60, 1, device=0xE211))
    result = decide(host, policy=Policy(ignore=frozenset({ignore})))
    assert reasons(result) == {B50: Reason.IGNORED}
    assert len(result.offers) == 1


def test_a_static_dev_publishes_nothing_unless_allowed() -> None:
    host = inventory(function(), environment=Environment(devtmpfs=False))
    assert reasons(decide(host)) == {B50: Reason.STATIC_DEV}
    assert len(decide(host, policy=Policy(static_dev=True)).offers) == 1


def hold(mode: HoldMode, *, settled: bool) -> Hold:
    return Hold(B50, "vm1", mode, settled)


@pytest.mark.parametrize(
    ("each", "mode", "settled", "kinds"),
    [
        pytest.param(function(), HoldMode.VFIO, False, set(), id="being moved to VFIO"),
        pytest.param(vfio(), HoldMode.VFIO, False, set(), id="moved, not yet done"),
        pytest.param(vfio(), HoldMode.VFIO, True, {"intel.com/gpu-vfio"}, id="done"),
        pytest.param(function(), HoldMode.VFIO, True, set(), id="taken away again by somebody"),
        pytest.param(function(), HoldMode.DRM, True, {"intel.com/gpu"}, id="held for containers"),
        pytest.param(vfio(), HoldMode.DRM, True, set(), id="put on VFIO by somebody"),
    ],
)
def test_what_a_claim_holds_is_published_in_its_mode_once_done(
    each: Function, mode: HoldMode, *, settled: bool, kinds: set[str]
) -> None:
    result = decide(each, holds=[hold(mode, settled=settled)])
    assert set(published(result)) == kinds
    assert not any(offer.in_all for offer in result.offers)
    if not kinds:
        (withheld,) = result.withheld
        assert withheld.reason is Reason.HELD
        assert "vm1" in withheld.detail


@pytest.mark.parametrize("each", [function(), vfio()], ids=["on its driver", "on VFIO"])
def test_what_came_back_dead_from_a_claim_is_withheld(each: Function) -> None:
    dead = Hold(B50, "", HoldMode.DRM, settled=False, dead=True)
    assert reasons(decide(each, holds=[dead])) == {B50: Reason.DEAD}


# --- what no profile recognises -------------------------------------------------------------------


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(
            function(vendor=0x1A03, device=0x2000, driver="ast", nodes=drm(0)[:1]), id="BMC"
        ),
        pytest.param(
            function(
                vendor=0x1022, device=0x17F0, class_code=0x118000, nodes=(node(NodeRole.ACCEL, 0),)
            ),
            id="an accelerator unknown to us",
        ),
        pytest.param(
            function(vendor=0x1234, device=0x1111, driver=None), id="a display without driver"
        ),
    ],
)
def test_a_display_or_accelerator_without_profile_is_shown(each: Function) -> None:
    (withheld,) = decide(each).withheld
    assert (withheld.kind, withheld.reason) == (None, Reason.UNMATCHED)
    assert each.pci_id in withheld.detail
    (withheld,) = decide(each, policy=Policy(ignore=frozenset({each.pci_id}))).withheld
    assert withheld.reason is Reason.IGNORED


def test_what_a_profile_that_is_switched_off_recognises_is_withheld_with_its_name() -> None:
    (withheld,) = decide(function(), profiles=changed("intel-gpu", enabled=False)).withheld
    assert (withheld.kind, withheld.reason) == (None, Reason.POLICY)
    assert withheld.detail == "profile intel-gpu, which recognises it, is switched off"


def test_what_is_given_beside_what_a_profile_that_is_switched_off_would_give() -> None:
    both = function(nodes=(*drm(0), node(NodeRole.MEI, 1)))
    result = decide(both, profiles=changed("intel-gpu", enabled=False))
    assert [offer.kind for offer in result.offers] == ["intel.com/gpu-mei"]
    (withheld,) = result.withheld
    assert withheld.detail == "profile intel-gpu, which recognises it, is switched off"
    ignored = Policy(ignore=frozenset({B50}))
    (withheld,) = decide(
        both, profiles=changed("intel-gpu", enabled=False), policy=ignored
    ).withheld
    assert withheld.reason is Reason.IGNORED


def test_a_profile_that_is_off_and_whose_nodes_another_one_gives_is_not_mentioned() -> None:
    gpu = next(profile for profile in BUILTIN if profile.name == "intel-gpu")
    mine = structs.replace(gpu, name="mine", kind="a.test/gpu", enabled=False)
    result = decide(function(), profiles=(mine, *BUILTIN))
    assert [offer.kind for offer in result.offers] == ["intel.com/gpu"]
    assert result.withheld == ()


def test_a_partition_of_what_a_profile_that_is_switched_off_recognises_is_no_ones() -> None:
    orphan = Orphan(
        node(NodeRole.RENDER, 130), "/devices/platform/amdgpu_xcp_1/drm/renderD130", None
    )
    off = changed("amd-gpu", enabled=False)
    (found,) = decide(inventory(orphans=(orphan,)), profiles=off).nodes
    assert found.reason is Reason.UNMATCHED


def test_nothing_is_published_if_nothing_is_to_be_and_that_is_the_reason_given() -> None:
    unknown = function("0000:05:00.0", 1, vendor=0x1A03, nodes=drm(1)[:1])
    result = decide(inventory(function(), unknown), policy=Policy(publish=False))
    assert result.offers == ()
    assert [(each.kind, each.reason, each.detail) for each in result.withheld] == [
        ("intel.com/gpu", Reason.POLICY, "all that was published is taken back"),
        (None, Reason.POLICY, "all that was published is taken back"),
    ]


def test_other_functions_are_not_mentioned() -> None:
    network = function("0000:09:00.0", class_code=0x020000, driver="igc", nodes=())
    engine = function("0000:00:16.0", class_code=0x078000, nodes=(node(NodeRole.MEI, 0),))
    on_vfio = vfio("0000:0a:00.0", 30, class_code=0x020000, device=0x1000)
    result = decide(inventory(network, engine, on_vfio))
    assert (result.offers, result.withheld) == ((), ())


def test_a_function_that_could_not_be_read_is_shown_with_the_reason() -> None:
    (withheld,) = decide(inventory(dropped={B50: "it changed while it was read"})).withheld
    assert (withheld.address, withheld.reason) == (B50, Reason.UNREADABLE)
    assert "it changed while it was read" in withheld.detail


def test_a_partition_is_withheld_with_its_profiles_reason() -> None:
    partition = Orphan(
        node(NodeRole.RENDER, 130), "/devices/platform/amdgpu_xcp_1/drm/renderD130", None
    )
    (found,) = decide(inventory(orphans=(partition,))).nodes
    assert (found.path, found.reason) == ("/dev/dri/renderD130", Reason.POLICY)
    assert "partition" in found.detail


def test_a_card_without_pci_function_is_shown_as_such() -> None:
    simple = Orphan(
        node(NodeRole.CARD, 0), "/devices/platform/simple-framebuffer.0/drm/card0", "simpledrm"
    )
    (found,) = decide(inventory(orphans=(simple,))).nodes
    assert found.reason is Reason.UNMATCHED
    assert "simpledrm" in found.detail


def test_a_partition_is_known_by_the_beginning_of_a_folder_only() -> None:
    profiles = changed("amd-gpu", partitions=Partitions(prefix="xcp", reason="partition"))
    other = Orphan(node(NodeRole.RENDER, 130), "/devices/platform/amdgpu_xcp_1/drm/x", None)
    (found,) = decide(inventory(orphans=(other,)), profiles=profiles).nodes
    assert found.reason is Reason.UNMATCHED


def test_a_second_look_at_the_same_facts_gives_the_same() -> None:
    """Judgements are kept between passes: what is kept must not outlive a change of facts."""
    gpu = function()
    first = decide(gpu)
    gone = decide(structs.replace(gpu, driver=None, nodes=()))
    assert decide(gpu) == first
    assert gone.offers == ()
