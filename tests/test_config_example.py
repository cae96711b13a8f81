"""``config.example.yaml`` documents every key with its default, and the code agrees."""

import ast
import importlib
import inspect
import itertools
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from agent.cdi.desired import Policy, desired
from agent.cdi.profile import Profile
from agent.cdi.profiles import load_builtin
from agent.config import Config, parse, profiles
from agent.host import capture
from agent.vfio.settings import AssignSettings

EXAMPLE = Path(__file__).parents[1] / "config.example.yaml"


def structs_in(annotation: Any) -> Iterator[type[msgspec.Struct]]:  # noqa: ANN401 - any type
    """The Structs that a type consists of; what a list is made of is shown as a comment."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    if typing.get_origin(annotation) is not tuple:
        for part in typing.get_args(annotation):
            yield from structs_in(part)


def items_in(annotation: Any) -> Iterator[type[msgspec.Struct]]:  # noqa: ANN401 - any type
    """The Struct that a list is made of."""
    for part in typing.get_args(annotation):
        yield from structs_in(part)


def keys_of(cls: type[msgspec.Struct]) -> Iterator[str]:
    """Every key below a Struct, with its path: ``cdi.directory``; lists add nothing to it."""
    for field in msgspec.structs.fields(cls):
        yield field.encode_name
        for inner in structs_in(field.type):
            yield from (f"{field.encode_name}.{key}" for key in keys_of(inner))


def keys_in(value: object) -> Iterator[str]:
    """Every key in a document, in the same form."""
    if isinstance(value, list):
        for item in value:
            yield from keys_in(item)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from (f"{key}.{path}" for path in keys_in(inner))


def settings(cls: type[msgspec.Struct] = Config) -> Iterator[type[msgspec.Struct]]:
    """The Structs of all sections."""
    yield cls
    for field in msgspec.structs.fields(cls):
        for inner in structs_in(field.type):
            yield from settings(inner)


def profile_example() -> str:
    """The profiles that the example shows as comments, as a configuration."""
    text = EXAMPLE.read_text()
    shown = text[text.index("  # profiles:\n") : text.index("\n# How long things are waited for.")]
    lines = [line.removeprefix("  # ") for line in shown.splitlines()]
    return "cdi:\n" + "".join(f"  {line}\n" for line in lines)


def test_the_example_says_the_defaults() -> None:
    assert parse(EXAMPLE.read_text()) == Config()


def test_every_key_is_in_the_example() -> None:
    shown = list(keys_in(yaml.safe_load(EXAMPLE.read_text())))
    assert sorted(shown) == sorted(keys_of(Config))


def test_every_key_in_the_example_has_a_comment_above_it() -> None:
    lines = EXAMPLE.read_text().splitlines()
    keys = re.compile(r" *[a-z_]+:")
    naked = [
        line for above, line in itertools.pairwise(lines) if keys.match(line) and "#" not in above
    ]
    assert naked == []


@pytest.mark.parametrize("cls", dict.fromkeys(settings()), ids=lambda cls: cls.__name__)
def test_every_key_is_described_where_it_is_defined(cls: type[msgspec.Struct]) -> None:
    """A row is a name, a type, a default, and a string that says what it is for."""
    source = inspect.getsource(importlib.import_module(cls.__module__))
    (body,) = (
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    )
    for row, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(row, ast.AnnAssign):
            assert row.value is not None
            assert isinstance(below, ast.Expr), ast.unparse(row)
            assert isinstance(below.value, ast.Constant)


@pytest.mark.parametrize("cls", dict.fromkeys(settings()), ids=lambda cls: cls.__name__)
def test_no_section_lets_anything_unknown_pass_or_can_be_changed(
    cls: type[msgspec.Struct],
) -> None:
    assert cls.__struct_config__.forbid_unknown_fields
    assert cls.__struct_config__.frozen


def test_the_profiles_that_the_example_shows_can_be_used() -> None:
    shown = parse(profile_example())
    merged = {profile.name: profile for profile in profiles(shown)}
    assert merged["intel-gpu"].vfio is None
    assert merged["flex-170"].kind == "example.com/flex"


def test_the_profiles_that_the_example_shows_do_what_they_say() -> None:
    """On a host with what they are about: a PF, a VF for containers, and one for a machine."""
    host = capture.load(EXAMPLE.parent / "tests/hosts/intel-flex-sriov.yaml")
    wanted = desired(host.inventory(), profiles(parse(profile_example())), (), Policy())
    given = {
        f"{offer.kind}={offer.device.name}": [
            (node.path, node.file_mode, node.gid) for node in offer.device.edits.device_nodes
        ]
        for offer in wanted.offers
    }
    assert given == {
        "example.com/flex=0000-4d-00-0-0x56c0": [
            ("/dev/dri/card1", 0o660, 44),
            ("/dev/dri/renderD128", 0o666, None),
        ],
        "example.com/flex=0000-4d-00-1-0x56c0": [
            ("/dev/dri/card2", 0o660, 44),
            ("/dev/dri/renderD129", 0o666, None),
        ],
        "example.com/flex-vm=0000-4d-00-2-0x56c0": [
            ("/dev/vfio/vfio", 0o666, None),
            ("/dev/vfio/72", 0o666, None),
        ],
    }
    edits = wanted.offers[0].device.edits
    assert len(edits.mounts) == 2
    assert edits.env == ("VENDOR_VISIBLE=1",)
    assert [hook.path for hook in edits.hooks] == ["/usr/bin/vendor-hook"]


def shown_defaults(
    value: yaml.Node, cls: type[msgspec.Struct], lines: list[str]
) -> Iterator[tuple[str, object, object]]:
    """Each key of a Struct that is shown: its name, its default, and what is said of that.

    That is what the comment beside it says, or else the value itself.
    """
    if isinstance(value, yaml.SequenceNode):
        for item in value.value:
            yield from shown_defaults(item, cls, lines)
        return
    fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
    for key, inner in value.value:
        field = fields[key.value]
        part = next(itertools.chain(structs_in(field.type), items_in(field.type)), None)
        if part is not None:
            yield from shown_defaults(inner, part, lines)
        if field.required:
            continue
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        said = re.search(r"default: (\S+?)(?=[;,]|\s|$)", lines[key.start_mark.line])
        if said or part is None:
            text = said[1] if said else yaml.serialize(inner)
            yield key.value, json.loads(json.dumps(default)), yaml.safe_load(text)
        else:  # of what it consists each part has said its own
            yield key.value, type(default), part


def test_the_profiles_that_the_example_shows_say_every_default() -> None:
    text = profile_example()
    root = yaml.compose(text)
    assert root is not None
    shown = root.value[0][1].value[0][1].value[1]
    said = list(shown_defaults(shown, Profile, text.splitlines()))
    assert len(said) > 30
    assert [each for each in said if each[1] != each[2]] == []


def test_the_profiles_that_the_example_shows_have_every_key_of_a_profile() -> None:
    shown = yaml.safe_load(profile_example())["cdi"]["profiles"]
    # Each kind of node has the same keys for how it may be used: they are shown once.
    access = {"permissions", "fileMode", "uid", "gid"}
    missing = {
        key
        for key in set(keys_of(Profile)) - set(keys_in(shown))
        if key.rpartition(".")[2] not in access or key.startswith("nodes.")
    }
    assert missing == set()


def test_the_claims_that_the_example_shows_have_every_key_of_one() -> None:
    text = EXAMPLE.read_text()
    shown = text[text.index("  #   - id: desktop") : text.index("  assign: []")]
    lines = [line.removeprefix("  # ") for line in shown.splitlines()]
    config = parse("vfio:\n  assign:\n" + "".join(f"  {line}\n" for line in lines))
    (claim,) = config.vfio.assign
    assert (claim.id, claim.devices) == ("desktop", ("0000:03:00.0",))
    given = yaml.safe_load("".join(f"{line}\n" for line in lines))[0]
    assert tuple(given) == AssignSettings.__struct_fields__


def test_the_example_names_the_profiles_that_come_with_the_program() -> None:
    text = " ".join(EXAMPLE.read_text().replace("#", " ").split())
    named = text.partition("One with the name of such a one (")[2].partition(")")[0]
    assert set(named.split(", ")) == {profile.name for profile in load_builtin()}
