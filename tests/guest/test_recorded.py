"""What the recordings of a real kernel hold: the facts that the agent and the simulator rest on."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.guest.conftest import Frozen
from tests.guest.layers import Installed
from tests.guest.record import RECORDED, record
from tests.guest.sequences import SEQUENCES, Sequence
from tests.guest.settings import ALL
from tests.guest.topology import MANY_GPUS, Topology

Json = dict[str, Any]

RECORDINGS: dict[str, Json] = {
    path.stem: json.loads(path.read_text()) for path in sorted(RECORDED.glob("*.json"))
}


def steps(recording: Json) -> Iterator[list[Json]]:
    """The events of each step."""
    for step in recording["steps"]:
        yield step["events"]


def events() -> Iterator[Json]:
    """All events of all recordings."""
    for recording in RECORDINGS.values():
        for step in steps(recording):
            yield from step


def brief(event: Json) -> str:
    """An event as `kernel add drm`."""
    return f"{event['from']} {event['action']} {event['properties']['SUBSYSTEM']}"


# Not with many GPUs: which driver numbers its cards first differs from boot to boot. One that the
# kernel says much in always, the others with CDI_AGENT_GUEST_ALL=1.
REPEATABLE: Final = [each for each in SEQUENCES if each.topology is not MANY_GPUS]
AGAIN: Final = REPEATABLE if ALL else REPEATABLE[:1]


@pytest.mark.guest
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sequence", "topology"), [pytest.param(s, s.topology, id=s.name) for s in AGAIN]
)
def test_the_kernel_still_says_what_is_recorded(
    installed: Installed, frozen: Frozen, sequence: Sequence, topology: Topology
) -> None:
    again = record(installed, frozen[topology.name], sequence)
    assert outcomes(again) == outcomes(RECORDINGS[sequence.name])


def outcomes(recording: Json) -> list[Json]:
    """What each step led to: the kernel's messages, the errno, the host afterwards."""
    return [
        {
            "said": [
                (event["action"], event["devpath"])
                for event in step["events"]
                if event["from"] == "kernel"
            ],
            "answered": step.get("errno", step.get("rc")),
            "after": step["after"],
        }
        for step in recording["steps"]
    ]


def test_every_sequence_is_recorded_as_it_is_written() -> None:
    assert RECORDINGS.keys() == {"boot", *(sequence.name for sequence in SEQUENCES)}
    for sequence in SEQUENCES:
        done = [next(iter(step)) for step in RECORDINGS[sequence.name]["steps"]]
        assert done == [type(step).__name__.lower() for step in sequence.steps]


@pytest.mark.parametrize("name", RECORDINGS)
def test_events_stand_in_the_order_in_which_they_came(name: str) -> None:
    for step in steps(RECORDINGS[name]):
        times = [event["ms"] for event in step]
        assert times == sorted(times)


@pytest.mark.parametrize("name", RECORDINGS)
def test_udev_repeats_what_the_kernel_said_and_only_later(name: str) -> None:
    for step in steps(RECORDINGS[name]):
        said = set()
        for event in step:
            what = (event["action"], event["devpath"])
            if event["from"] == "kernel":
                said.add(what)
            else:
                assert what in said


def test_the_kernel_binds_last_and_unbinds_after_the_nodes_are_gone() -> None:
    bind, unbind = 0, 0
    for name, recording in RECORDINGS.items():
        for step in steps(recording):
            kernel = [event for event in step if event["from"] == "kernel"]
            for at, event in enumerate(kernel):
                below = [
                    other["action"]
                    for other in kernel[at + 1 :]
                    if other["devpath"].startswith(event["devpath"] + "/")
                ]
                if brief(event) == "kernel bind pci":
                    bind += 1
                    assert "add" not in below, name
                if brief(event) == "kernel unbind pci":
                    unbind += 1
                    assert "remove" not in below, name
    assert bind > 20
    assert unbind > 20


def test_an_unbind_names_no_driver() -> None:
    unbinds = [event for event in events() if event["action"] == "unbind"]
    assert unbinds
    for event in unbinds:
        assert not {"DRIVER", "MODALIAS"} & event["properties"].keys()


def test_a_vfio_group_event_names_no_pci_function() -> None:
    groups = [event for event in events() if event["properties"]["SUBSYSTEM"] == "vfio"]
    assert groups
    for event in groups:
        assert event["devpath"].startswith("/devices/virtual/vfio/")


def test_a_drm_driver_below_virtio_comes_and_goes_without_a_pci_event() -> None:
    for step in steps(RECORDINGS["driver-unload-virtio-gpu"]):
        assert {event["properties"]["SUBSYSTEM"] for event in step} == {"drm", "virtio"}


def test_the_class_in_an_event_has_no_leading_zeros() -> None:
    classes = {event["properties"].get("PCI_CLASS") for event in events()} - {None}
    assert "38000" in classes
    assert not any(code.startswith("0") for code in classes)


def test_the_errnos_of_refused_writes() -> None:
    answers = [step["errno"] for step in RECORDINGS["refusals"]["steps"] if "write" in step]
    assert answers == [
        "EBUSY",  # bind while bound
        "ENODEV",  # bind of what does not exist
        "ENODEV",  # bind to a driver that does not match
        "ENODEV",  # unbind from a driver that has it not
        None,  # probe while bound
        None,  # unbind
        "ENODEV",  # unbind while unbound
        "ENODEV",  # bind without match or override
        None,  # override by a driver that does not exist
        None,  # probe: binds nothing, and is no error
        "ENODEV",  # bind against the override
        None,  # a write of no bytes
        None,  # clear the override
        None,  # probe
    ]


def test_without_a_write_of_a_newline_the_override_stays() -> None:
    address = "0000:01:00.0"
    overrides = [
        step["after"]["functions"][address]["driver_override"]
        for step in RECORDINGS["refusals"]["steps"]
        if step.get("write", {}).get("path", "").endswith("driver_override")
    ]
    assert overrides == ["no-such-driver", "no-such-driver", "(null)"]


def test_what_is_held_comes_back_under_another_number_until_it_is_let_go() -> None:
    nodes = [
        sorted(step["after"]["functions"]["0000:01:00.0"]["nodes"])
        for step in RECORDINGS["renumbered"]["steps"]
    ]
    old, new = ["card0", "fb0", "renderD128"], ["card1", "fb0", "renderD129"]
    assert nodes == [old, [], new, new, [], old]


def test_with_the_last_card_the_folder_goes_too() -> None:
    listings = [step["after"]["listing"] for step in RECORDINGS["only-gpu-to-vfio"]["steps"]]
    assert "cannot access '/dev/dri': No such file or directory" in listings[2]
