"""A user's profiles, put before those of the program and checked before anything is written."""

import itertools
import random
from typing import Any

import pytest

from agent.cdi.merge import Problem, merge
from agent.cdi.profile import Match, Naming, Profile, enabled, profiles_of
from agent.host.model import NodeRole
from tests.cdi.worlds import BUILTIN, drm, function, node, vfio

GOOD: dict[str, Any] = {
    "name": "mine",
    "match": {"vendor": "8086", "devices": ["e212"]},
    "kind": "mine.test/gpu",
    "nodes": [{"role": "render"}],
}


def merged(*users: object) -> tuple[Profile, ...]:
    profiles, problems = merge(users, BUILTIN)
    assert problems == ()
    return profiles


def test_a_users_profile_goes_before_the_programs() -> None:
    profiles = merged({**GOOD, "match": {"vendor": "8086"}})
    found = profiles_of(function(), profiles)
    assert [each.name for each in found] == ["mine"]


def test_a_users_profile_for_some_nodes_leaves_the_others_to_the_program() -> None:
    users = {**GOOD, "nodes": [{"role": "mei"}], "vfio": None}
    found = profiles_of(function(nodes=(*drm(0), node(NodeRole.MEI, 0))), merged(users))
    assert [each.name for each in found] == ["mine", "intel-gpu"]


@pytest.mark.parametrize("narrow", [{"roles": ["mei"]}, {"drivers": ["xe"]}], ids=["roles", "own"])
def test_a_profile_that_recognises_nothing_on_vfio_takes_that_from_no_other(
    narrow: dict[str, Any],
) -> None:
    """Its ``vfio`` has the default: nobody who writes such a profile thinks of that."""
    match = {"vendor": "8086", "classes": ["03"], **narrow}
    profiles = merged({**GOOD, "match": match, "nodes": [{"role": "mei"}]})
    found = profiles_of(function(nodes=(*drm(0), node(NodeRole.MEI, 0))), profiles)
    assert [each.name for each in found] == ["mine", "intel-gpu"]
    assert [each.name for each in profiles_of(vfio(), profiles)] == ["intel-gpu"]
    assert found[0].kinds == (found[0].own_kind,)


def test_the_name_of_a_profile_of_the_program_changes_that_one_and_keeps_the_rest_of_it() -> None:
    profiles = merged({"name": "intel-gpu", "naming": "card", "env": ["A=b"]})
    assert len(profiles) == len(BUILTIN)
    assert profiles[0].name == "intel-gpu"
    assert profiles[0].naming is Naming.CARD
    assert profiles[0].env == ("A=b",)
    original = next(each for each in BUILTIN if each.name == "intel-gpu")
    assert profiles[0].nodes == original.nodes
    assert profiles[0].kind == original.kind


def test_a_profile_of_the_program_can_be_switched_off() -> None:
    profiles = merged({"name": "intel-gpu", "enabled": False})
    assert "intel-gpu" not in {each.name for each in enabled(profiles)}


def test_every_key_of_the_schema_is_taken() -> None:
    (mine, *_) = merged(
        {
            "name": "mine",
            "title": "Mine",
            "enabled": True,
            "fallback": True,
            "match": {
                "vendor": "8086",
                "devices": ["e212"],
                "classes": ["0300"],
                "drivers": ["xe", "xe-vfio-pci"],
                "roles": [],
            },
            "kind": "mine.test/gpu",
            "naming": "index",
            "drivers": ["xe"],
            "foreign": {"other": "use the other"},
            "nodes": [
                {
                    "role": "card",
                    "required": False,
                    "permissions": "rwm",
                    "fileMode": "0660",
                    "uid": 0,
                    "gid": 44,
                }
            ],
            "shared": [{"path": "/dev/kfd", "required": True, "fileMode": "600"}],
            "links": True,
            "vfio": {"kind": "mine.test/vm", "backend": "iommufd", "fileMode": "0660", "gid": 36},
            "sriov": "pf",
            "partitions": {"prefix": "x", "reason": "y"},
            "env": ["A=b"],
            "hooks": [{"hookName": "prestart", "path": "/h", "args": ["h"], "timeout": 1}],
            "additionalGids": [44],
            "annotations": {"a": "b"},
        }
    )
    assert mine.kinds == ("mine.test/gpu", "mine.test/vm")
    assert mine.nodes[0].to_node("/dev/x").file_mode == 0o660
    assert mine.shared[0].to_node("/dev/x").file_mode == 0o600


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"match": {"vendor": 8086}}, "[0].match.vendor", "in quotes"),
        ({"match": {"vendor": "80866"}}, "[0].match.vendor", "four hex digits"),
        ({"match": {"vendor": "8086", "devices": ["E212"]}}, "[0].match.devices[0]", "lower case"),
        ({"match": {"classes": [192]}}, "[0].match.classes[0]", '"0300"'),
        ({"match": {"classes": ["030"]}}, "[0].match.classes[0]", "2, 4 or 6"),
        ({"match": {"roles": ["gpu"]}}, "[0].match.roles[0]", "card, render, accel, mei"),
        (
            {"match": {"vendor": "8086", "roles": ["vfio-group"]}},
            "[0].match.roles[0]",
            "card, render, accel, mei",
        ),
        ({"match": {}}, "[0].match", "vendor"),
        ({"match": {"devices": ["e212"]}}, "[0].match.devices", "without a vendor"),
        ({"nodes": [{"role": "rendr"}]}, "[0].nodes[0].role", "card, render, accel, mei"),
        ({"nodes": [{"role": "vfio-group"}]}, "[0].nodes[0].role", "card, render, accel, mei"),
        ({"nodes": [{"role": "card"}, {"role": "card"}]}, "[0].nodes[1].role", "twice"),
        ({"nodes": [{"role": "card", "fileMode": 660}]}, "[0].nodes[0].fileMode", '"0660"'),
        ({"nodes": [{"role": "card", "fileMode": "888"}]}, "[0].nodes[0].fileMode", "octal"),
        ({"nodes": [{"role": "card", "uid": -1}]}, "[0].nodes[0].uid", ">= 0"),
        ({"nodes": [{"role": "card", "permissions": "rx"}]}, "[0]", "permissions 'rx'"),
        ({"nodes": [], "vfio": None}, "[0].nodes", "no nodes"),
        ({"nodes": [], "match": {"drivers": ["xe"]}}, "[0].nodes", "nothing on VFIO either"),
        ({"match": {"drivers": ["vfio-pci"]}}, "[0].nodes", "match.drivers"),
        ({"match": {"drivers": ["xe"]}, "drivers": ["i915"]}, "[0].drivers", "match.drivers"),
        (
            {"match": {"drivers": ["xe"]}, "vfio": {"kind": "mine.test/vm"}},
            "[0].vfio",
            "match.drivers recognises no device that is on a VFIO driver",
        ),
        (
            {"match": {"vendor": "8086", "roles": ["card"]}, "vfio": {"kind": "mine.test/vm"}},
            "[0].vfio",
            "match.roles recognises no device that is on a VFIO driver",
        ),
        ({"shared": [{"path": "kfd"}]}, "[0].shared[0].path", "below /dev"),
        ({"shared": [{"path": "/dev/kfd"}, {"path": "/dev/kfd"}]}, "[0]", "2 times"),
        ({"naming": "serial"}, "[0].naming", "machine, address, index, card"),
        ({"sriov": True}, "[0].sriov", "pf, vf, both"),
        ({"vfio": {"backend": "cdev"}}, "[0].vfio.backend", "legacy, iommufd, auto"),
        ({"vfio": {"kind": "gpu"}}, "[0].vfio.kind", "vendor.tld/class"),
        ({"kind": "gpu"}, "[0].kind", "vendor.tld/class"),
        ({"kind": "mine.test/" + "g" * 60}, "[0].vfio.kind", "class"),
        ({"name": "Mine!"}, "[0].name", "lower-case"),
        ({"name": None}, "[0].name", "str"),
        ({"env": ["A"]}, "[0]", "NAME=VALUE"),
        ({"env": ["A"], "nodes": []}, "[0]", "NAME=VALUE"),
        (
            {"hooks": [{"hookName": "prestart", "path": "rel"}], "nodes": []},
            "[0]",
            "absolute path",
        ),
        ({"hooks": [{"hookName": "prestop", "path": "/x"}]}, "[0]", "prestop"),
        ({"additionalGids": [0]}, "[0]", "group 0"),
        ({"annotations": {"a b": "c"}}, "[0]", "annotation"),
        ({"partitions": {"prefix": "", "reason": "x"}}, "[0].partitions.prefix", "empty"),
        ({"knid": "x"}, "[0]", "knid"),
        ({1: "x"}, "[0]", "str"),
    ],
)
def test_what_cannot_be_used_is_found_with_its_place_and_what_is_allowed(
    changes: dict[Any, Any], path: str, words: str
) -> None:
    _, problems = merge([{**GOOD, **changes}], BUILTIN)
    assert [(each.path, words in each.sentence) for each in problems] == [(path, True)]


def test_a_profile_that_is_no_mapping_is_a_problem() -> None:
    _, problems = merge(["intel-gpu"], BUILTIN)
    assert problems == (Problem("[0]", "a profile is a mapping of keys to values"),)


def test_all_problems_are_found_at_once() -> None:
    _, problems = merge([{**GOOD, "kind": "x"}, {**GOOD, "name": "two", "naming": "x"}], BUILTIN)
    assert [each.path for each in problems] == ["[0].kind", "[1].naming"]


def test_a_name_given_to_two_profiles_is_a_problem() -> None:
    _, problems = merge([GOOD, {**GOOD, "match": {"vendor": "1002"}}], BUILTIN)
    assert {each.path for each in problems} == {"[0].name", "[1].name"}


@pytest.mark.parametrize(
    ("match", "clash"),
    [
        ({"vendor": "8086", "devices": ["e212"]}, True),
        ({"vendor": "8086", "devices": ["e211"]}, False),
        ({"vendor": "8086"}, False),
        ({"vendor": "8086", "devices": ["e212"], "drivers": ["xe"]}, False),
        ({"vendor": "1002", "devices": ["e212"]}, False),
    ],
    ids=["as specific", "other devices", "less specific", "more specific", "other vendor"],
)
def test_two_profiles_that_claim_one_function_equally_are_a_problem(
    match: dict[str, Any], *, clash: bool
) -> None:
    _, problems = merge([GOOD, {**GOOD, "name": "other", "match": match}], BUILTIN)
    assert [each.path for each in problems] == ["[1].match"] * clash


def test_two_profiles_for_different_nodes_of_one_function_are_none() -> None:
    other = {**GOOD, "name": "other", "kind": "mine.test/mei", "vfio": None}
    assert merged(GOOD, {**other, "nodes": [{"role": "mei"}]})


MEI: dict[str, Any] = {**GOOD, "name": "mei", "nodes": [{"role": "mei"}], "vfio": None}


@pytest.mark.parametrize("naming", ["machine", "card", "index", "address"])
def test_two_profiles_that_publish_one_function_in_one_kind_are_a_problem(naming: str) -> None:
    """It would have two entries of one name, or two names, and neither is an entry of its own."""
    users = [{**GOOD, "naming": naming}, {**MEI, "naming": naming}]
    _, problems = merge(users, BUILTIN)
    assert [each.path for each in problems] == ["[1].kind"]
    assert "profile mine publishes the same functions in mine.test/gpu" in problems[0].sentence


def test_a_profile_that_publishes_a_function_in_the_kind_of_the_programs_is_a_problem() -> None:
    _, problems = merge([{"name": "intel-gpu-mei", "kind": "intel.com/gpu"}], BUILTIN)
    assert [each.path for each in problems] == ["[0].kind"]
    assert "profile intel-gpu publishes" in problems[0].sentence


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({}, {"match": {"vendor": "8086", "devices": ["e211"]}}),
        ({"drivers": ["xe"]}, {"drivers": ["i915"]}),
        ({"drivers": ["xe"]}, {"match": {"vendor": "8086", "drivers": ["i915"]}}),
        ({}, {"nodes": [], "vfio": {}, "match": {"vendor": "8086"}}),
        ({"fallback": True}, {}),
        ({}, {"enabled": False}),
    ],
    ids=["other devices", "other drivers", "others match", "on VFIO", "fallback", "switched off"],
)
def test_two_profiles_of_one_kind_that_never_publish_one_function_both_are_none(
    one: dict[str, Any], two: dict[str, Any]
) -> None:
    assert merged({**GOOD, **one}, {**MEI, **two})


def test_two_namings_in_one_kind_are_a_problem() -> None:
    other = {**GOOD, "name": "other", "match": {"vendor": "1002"}, "naming": "index"}
    _, problems = merge([GOOD, other], BUILTIN)
    assert [each.path for each in problems] == ["[1].naming"] * 2
    assert "mine.test/gpu" in problems[0].sentence


def test_a_naming_that_differs_from_the_programs_in_its_kind_is_a_problem() -> None:
    mine = {**GOOD, "kind": "intel.com/gpu", "naming": "index"}
    _, problems = merge([mine], BUILTIN)
    assert {each.path for each in problems} == {"[0].naming"}


def test_annotations_that_are_too_many_only_in_the_entry_of_all_are_a_problem() -> None:
    """Else no spec could be made of the kind once a device of each profile is there."""
    ids = ("e212", "e211")
    one, two = (
        {
            **GOOD,
            "name": f"mine-{pci_id}",
            "match": {"vendor": "8086", "devices": [pci_id]},
            "annotations": {f"of-{pci_id}": "x" * 150_000},
        }
        for pci_id in ids
    )
    merged(one)
    _, problems = merge([one, two], BUILTIN)
    (problem,) = problems
    assert problem.path == "[1].annotations"
    assert problem.sentence.startswith("with those of the other profiles of mine.test/gpu")


def test_two_kinds_whose_files_had_one_name_are_a_problem() -> None:
    one = {**GOOD, "kind": "mine.test/aa-bb", "vfio": None}
    two = {**one, "name": "two", "match": {"vendor": "1002"}, "kind": "mine.test-aa/bb"}
    _, problems = merge([one, two], BUILTIN)
    assert [each.path for each in problems] == ["[1].kind"]
    assert merged(one, {**two, "kind": "mine.test-aa/cc"})


def profile_of(number: int, choose: random.Random) -> dict[str, Any]:
    """One of few that get in each other's way."""
    match: dict[str, Any] = {"vendor": choose.choice(["8086", "1002"])}
    if ids := choose.choices(["56a0", "56a1", "56a2"], k=choose.randrange(3)):
        match["devices"] = ids
    return {
        "name": f"mine-{number}",
        "match": match,
        "kind": choose.choice(["x.test/a-b", "x.test-a/b", "x.test/c", f"x.test/d{number}"]),
        "naming": choose.choice(["machine", "index"]),
        "nodes": [{"role": choose.choice(["card", "mei"])}],
    }


@pytest.mark.parametrize("seed", range(20))
def test_among_many_the_same_is_wrong_as_between_each_two(seed: int) -> None:
    choose = random.Random(seed)
    users = [profile_of(number, choose) for number in range(8)]

    def problems(*numbers: int) -> set[tuple[str, str]]:
        _, found = merge([users[number] for number in numbers], BUILTIN)
        places = {f"[{place}]": f"[{number}]" for place, number in enumerate(numbers)}
        return {(places[p.path[:3]] + p.path[3:], p.sentence) for p in found}

    pairs = itertools.combinations(range(8), 2)
    assert problems(*range(8)) == set().union(*(problems(*pair) for pair in pairs))


def test_profiles_that_have_nothing_in_common_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A configuration with a profile for each device id takes a moment, not minutes."""
    compared: list[object] = []
    monkeypatch.setattr(Match, "overlaps", lambda *matches: compared.append(matches))
    merged(
        *(
            {
                **GOOD,
                "name": f"p{n}",
                "kind": f"x.test/k{n}",
                "match": {"vendor": "8086", "devices": [f"{n:04x}"]},
            }
            for n in range(200)
        )
    )
    assert compared == []
