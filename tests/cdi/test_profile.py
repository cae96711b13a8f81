"""Which profiles a function has, and that those of the program keep to their own schema."""

from importlib import resources
from typing import Any

import pytest

from agent.cdi import profiles
from agent.cdi.merge import check_profiles, merge
from agent.cdi.profile import Match, Profile, RoleNodes, ordered, profiles_of, shared_paths
from agent.cdi.profiles import load_builtin
from agent.host.model import Function, NodeRole
from tests.cdi.worlds import BUILTIN, drm, function, node, vfio


def names(each: Function, chosen: tuple[Profile, ...] = BUILTIN) -> list[str]:
    return [profile.name for profile in profiles_of(each, chosen)]


def profile(name: str, role: NodeRole = NodeRole.CARD, **match: object) -> Profile:
    nodes = (RoleNodes(role=role),)
    return Profile(
        name=name,
        match=Match(**match),  # type: ignore[arg-type]
        kind="a.test/gpu",
        nodes=nodes,
        vfio=None,
    )


def test_the_profiles_of_the_program_have_no_fault() -> None:
    assert list(check_profiles([(each.name, each) for each in load_builtin()])) == []


def test_a_profile_has_the_name_of_its_file_and_a_title() -> None:
    files = resources.files(profiles).iterdir()
    names_of_files = sorted(file.name for file in files if file.name.endswith(".yaml"))
    assert names_of_files == sorted(f"{each.name}.yaml" for each in BUILTIN)
    assert all(each.title for each in BUILTIN)


ACCEL = (node(NodeRole.ACCEL, 0),)


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        pytest.param(function(), ["intel-gpu"], id="Intel GPU"),
        pytest.param(
            function(driver="i915", class_code=0x038000), ["intel-gpu"], id="Intel display"
        ),
        pytest.param(function(driver=None), ["intel-gpu"], id="Intel GPU without driver"),
        pytest.param(vfio(), ["intel-gpu"], id="Intel GPU on VFIO"),
        pytest.param(
            function(nodes=(*drm(0), node(NodeRole.MEI, 1))),
            ["intel-gpu-mei", "intel-gpu"],
            id="Intel GPU with its engine",
        ),
        pytest.param(
            function(class_code=0x078000, device=0x7AE8, nodes=(node(NodeRole.MEI, 0),)),
            [],
            id="the chipset's engine",
        ),
        pytest.param(
            function(class_code=0x120000, device=0x643E, driver="intel_vpu", nodes=ACCEL),
            ["intel-npu"],
            id="Intel NPU",
        ),
        pytest.param(
            function(vendor=0x1DA3, device=0x1020, class_code=0x120000, nodes=ACCEL),
            ["habana-gaudi"],
            id="Gaudi 2",
        ),
        pytest.param(
            function(vendor=0x17CB, device=0xA100, class_code=0xFF0000, nodes=ACCEL),
            ["qualcomm-qaic"],
            id="Cloud AI 100 with older firmware",
        ),
        pytest.param(
            function(vendor=0x1002, device=0x744C, driver="amdgpu"), ["amd-gpu"], id="Radeon"
        ),
        pytest.param(
            function(vendor=0x1002, device=0x74A1, class_code=0x120000, driver="amdgpu"),
            ["amd-gpu"],
            id="Instinct",
        ),
        pytest.param(
            function(vendor=0x10DE, device=0x2684, driver="nouveau"), ["nvidia-gpu"], id="GeForce"
        ),
        pytest.param(
            function(vendor=0x1AF4, device=0x1050, driver="virtio-pci"), ["virtio-gpu"], id="virtio"
        ),
        pytest.param(
            function(vendor=0x1A03, device=0x2000, driver="ast", nodes=drm(0)[:1]),
            [],
            id="a board's management controller",
        ),
        pytest.param(
            function(vendor=0x15AD, device=0x0405, driver="vmwgfx"),
            ["display"],
            id="another display",
        ),
        pytest.param(function(class_code=0x020000, nodes=()), [], id="a network card"),
        pytest.param(function(class_code=0x040300, nodes=()), [], id="a GPU's audio"),
    ],
)
def test_a_function_has_the_profile_that_knows_it(each: Function, expected: list[str]) -> None:
    assert names(each) == expected


def test_only_amd_asks_for_a_shared_node() -> None:
    assert shared_paths(BUILTIN) == {"/dev/kfd"}


def test_the_more_specific_profile_goes_first_whatever_the_order_of_files() -> None:
    profiles = [
        profile("vendor", vendor="8086"),
        profile("class", vendor="8086", classes=("03",)),
        profile("subclass", vendor="8086", classes=("0300",)),
        profile("driver", vendor="8086", drivers=("xe",)),
        profile("device", vendor="8086", devices=("e212",)),
    ]
    expected = ["device", "driver", "subclass", "class", "vendor"]
    assert [each.name for each in ordered(profiles)] == expected
    assert [each.name for each in ordered(reversed(profiles))] == expected


def test_a_function_takes_one_profile_for_a_role_and_another_for_another() -> None:
    profiles = ordered(
        [
            profile("mine", vendor="8086", devices=("e212",)),
            profile("general", vendor="8086"),
            profile("engine", NodeRole.MEI, vendor="8086"),
        ]
    )
    assert names(function(), profiles) == ["mine", "engine"]
    assert names(function(device=0x56A0), profiles) == ["engine", "general"]


OFF = {"name": "intel-gpu", "enabled": False}


@pytest.mark.parametrize(
    ("given", "each", "expected"),
    [
        pytest.param(OFF, function(), [], id="one of the program's that is off"),
        pytest.param(OFF, vfio(), [], id="the same on VFIO"),
        pytest.param(
            OFF,
            function(nodes=(*drm(0), node(NodeRole.MEI, 1))),
            ["intel-gpu-mei"],
            id="one that is off, beside another",
        ),
        pytest.param(
            {"name": "intel-gpu", "nodes": []}, function(), ["intel-gpu"], id="one for VFIO alone"
        ),
        pytest.param(
            {
                "name": "mine",
                "enabled": False,
                "match": {"vendor": "8086", "devices": ["e212"]},
                "kind": "a.test/gpu",
                "nodes": [{"role": "card"}],
            },
            function(),
            ["intel-gpu"],
            id="one of the user's that is off",
        ),
        pytest.param(
            {
                "name": "mine",
                "match": {"vendor": "8086", "devices": ["e212"]},
                "kind": "a.test/gpu",
                "nodes": [],
            },
            function(),
            ["mine"],
            id="one of the user's for VFIO alone",
        ),
        pytest.param(
            {
                "name": "mine",
                "match": {"classes": ["03"]},
                "kind": "a.test/gpu",
                "nodes": [{"role": "card"}],
            },
            function(),
            ["mine"],
            id="a user's for every display goes first all the same",
        ),
        pytest.param(
            {
                "name": "mine",
                "fallback": True,
                "match": {"classes": ["03"]},
                "kind": "a.test/gpu",
                "nodes": [{"role": "card"}],
            },
            function(),
            ["intel-gpu"],
            id="a user's fallback",
        ),
    ],
)
def test_what_a_profile_recognises_falls_to_no_profile_for_the_rest(
    given: dict[str, Any], each: Function, expected: list[str]
) -> None:
    """Else who switches a GPU off, or keeps it for VFIO, gets it under another name."""
    profiles, problems = merge([given], BUILTIN)
    assert problems == ()
    assert names(each, profiles) == expected


def test_a_profile_that_is_switched_off_asks_for_no_shared_node() -> None:
    profiles, _ = merge([{"name": "amd-gpu", "enabled": False}], BUILTIN)
    assert shared_paths(profiles) == frozenset()


def test_a_driver_is_known_under_the_name_of_its_module_too() -> None:
    profiles = (profile("p", drivers=("intel-vpu",)),)
    assert names(function(driver="intel_vpu", nodes=ACCEL), profiles) == ["p"]
    assert names(function(driver=None), profiles) == []
