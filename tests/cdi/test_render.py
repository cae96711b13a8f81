"""The one form of a spec as bytes."""

import json
import random

import pytest
import yaml

from agent.cdi.parse import parse
from agent.cdi.render import HEADER, render
from agent.cdi.spec import ContainerEdits, Device, DeviceNode, Hook, Kind, Mount, Spec
from agent.errors import SpecError

KIND = Kind("intel.com/gpu")


def device(number: int) -> Device:
    nodes = (
        DeviceNode(
            f"/dev/dri/renderD{128 + number}", f"/dev/dri/renderD{128 + number}", "rw", 0o666
        ),
        DeviceNode(f"/dev/dri/card{number}", f"/dev/dri/card{number}", "rw", 0o660, 0, 44),
    )
    return Device(f"gpu{number}", ContainerEdits(nodes))


FULL = Device(
    "full",
    ContainerEdits(
        device_nodes=(DeviceNode("/dev/x", "/dev/y", "r", 0, 0, 0),),
        mounts=(Mount("/a", "/b", ("ro", "bind"), "bind"), Mount("/c", "/a")),
        env=("B=no", "A=1e3"),
        hooks=(Hook("prestart", "/bin/h", ("h", "0o17"), ("A=~",), 5), Hook("poststop", "/bin/a")),
        additional_gids=(44, 7),
    ),
    (("b", "yes"), ("a", "on")),
)
FULL_SPEC = Spec(KIND, (device(0), FULL), (("null", "1.0"),))

EXPECTED = f"""{HEADER}cdiVersion: "0.7.0"
kind: "intel.com/gpu"
annotations:
  "null": "1.0"
devices:
  - name: "full"
    annotations:
      "a": "on"
      "b": "yes"
    containerEdits:
      deviceNodes:
        - path: "/dev/x"
          hostPath: "/dev/y"
          permissions: "r"
          fileMode: 0
          uid: 0
          gid: 0
      mounts:
        - hostPath: "/c"
          containerPath: "/a"
        - hostPath: "/a"
          containerPath: "/b"
          options:
            - "ro"
            - "bind"
          type: "bind"
      env:
        - "A=1e3"
        - "B=no"
      hooks:
        - hookName: "prestart"
          path: "/bin/h"
          args:
            - "h"
            - "0o17"
          env:
            - "A=~"
          timeout: 5
        - hookName: "poststop"
          path: "/bin/a"
      additionalGids:
        - 7
        - 44
  - name: "gpu0"
    containerEdits:
      deviceNodes:
        - path: "/dev/dri/card0"
          hostPath: "/dev/dri/card0"
          permissions: "rw"
          fileMode: 432
          uid: 0
          gid: 44
        - path: "/dev/dri/renderD128"
          hostPath: "/dev/dri/renderD128"
          permissions: "rw"
          fileMode: 438
"""


def test_everything_that_a_spec_can_have_has_its_form() -> None:
    assert render(FULL_SPEC).decode() == EXPECTED


def test_json_says_the_same_as_yaml() -> None:
    assert json.loads(render(FULL_SPEC, suffix="json")) == yaml.safe_load(render(FULL_SPEC))


def test_what_is_read_back_is_what_was_written() -> None:
    assert render(parse(render(FULL_SPEC))) == render(FULL_SPEC)
    assert render(parse(render(FULL_SPEC, suffix="json"))) == render(FULL_SPEC)


def test_the_order_of_the_facts_changes_no_byte() -> None:
    shuffle = random.Random(7).sample
    devices = [device(number) for number in range(30)]
    again = [
        Device(each.name, ContainerEdits(tuple(reversed(each.edits.device_nodes))))
        for each in shuffle(devices, len(devices))
    ]
    assert render(Spec(KIND, tuple(again))) == render(Spec(KIND, tuple(devices)))


def test_devices_are_ordered_as_people_count() -> None:
    spec = parse(render(Spec(KIND, tuple(device(number) for number in (10, 9, 0)))))
    assert [each.name for each in spec.devices] == ["gpu0", "gpu9", "gpu10"]


@pytest.mark.parametrize(
    "value",
    [
        "yes",
        "1e3",
        "0o17",
        "012",
        "1_000",
        "null",
        "~",
        "",
        "a: b",
        "- a",
        "'",
        '"',
        "\\n",
        "#",
        "😀",
        "%",
        "60:30",
    ],
)
def test_a_value_stays_text_for_every_reader_of_yaml(value: str) -> None:
    """YAML 1.1 and 1.2 differ in bare words only: none is ever bare, and Go reads JSON's quotes."""
    spec = Spec(KIND, (Device("x", ContainerEdits(env=(f"A={value}",)), (("k", value),)),))
    content = render(spec)
    loaded = yaml.safe_load(content)["devices"][0]
    assert loaded["containerEdits"]["env"] == [f"A={value}"]
    assert loaded["annotations"] == {"k": value}
    assert f": {json.dumps(value, ensure_ascii=False)}\n".encode() in content


def test_the_version_is_the_pin_if_there_is_one() -> None:
    spec = Spec(KIND, (device(0),))
    assert b'cdiVersion: "0.5.0"' in render(spec)
    assert b'cdiVersion: "0.6.0"' in render(spec, version="0.6.0")


def test_content_that_the_pin_cannot_carry_is_refused() -> None:
    with pytest.raises(SpecError, match=r"needs cdiVersion 0\.7\.0, not 0\.5\.0"):
        render(FULL_SPEC, version="0.5.0")


def test_an_invalid_spec_is_never_rendered() -> None:
    with pytest.raises(SpecError, match="given 2 times"):
        render(Spec(KIND, (device(0), device(0))))


def test_an_entry_that_changes_is_rendered_anew() -> None:
    """Entries are kept by name: the same name with other edits is another entry."""
    before = Spec(KIND, (Device("gpu0", device(0).edits),))
    after = Spec(KIND, (Device("gpu0", device(1).edits),))
    assert b"card0" in render(before)
    assert b"card1" in render(after)
    assert b"card1" not in render(before)
