"""What may be in a spec, and which version it needs."""

import pytest

from agent.cdi import rules
from agent.cdi.spec import ContainerEdits, Device, DeviceNode, Hook, Kind, Mount, Spec
from agent.errors import SpecError

CARD = DeviceNode("/dev/dri/card0", "/dev/dri/card0", "rw", 0o666)
GPU = Device("0000-03-00-0-0xe212", ContainerEdits((CARD,)))


def entry(name: str = "gpu0", **edits: object) -> Device:
    return Device(name, ContainerEdits(**{"device_nodes": (CARD,), **edits}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind",
    [
        "intel.com/gpu",
        "intel.com/gpu-vfio",
        "a1.b2-c3.example/x_y.z-1",
        "ab/cd",
        "V.tld/" + "c" * 63,
    ],
)
def test_a_kind_that_every_consumer_accepts_is_accepted(kind: str) -> None:
    assert rules.kind_problems(kind) == []


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "gpu",
        "/gpu",
        "intel.com/",
        "intel.com/gpu/x",
        "-intel.com/gpu",
        "intel.com-/gpu",
        "1ntel.com/gpu",
        "intel..com/gpu",
        "intel.com/-gpu",
        "intel.com/gpu-",
        "intel.com/2gpu",
        "intel com/gpu",
        "intel.com/gpu\n",
        "intél.com/gpu",
        "a/gpu",
        "intel.com/g",
        "intel.com/" + "c" * 64,
        "v" * 64 + ".com/gpu",
        ".".join(["v" * 50] * 6) + "/gpu",
    ],
)
def test_a_kind_that_some_consumer_refuses_is_refused(kind: str) -> None:
    assert rules.kind_problems(kind)


@pytest.mark.parametrize(
    "device",
    [
        GPU,
        entry("0"),
        entry("0000:03:00.0"),
        entry("a_b-c.d:e"),
        Device("env", ContainerEdits(env=("A=", "B==c"))),
        Device("gids", ContainerEdits(additional_gids=(1, 2**32 - 2))),
        Device(
            "hooks",
            ContainerEdits(hooks=(Hook("createRuntime", "/bin/x", ("x", ""), ("A=b",), 5),)),
        ),
        Device("mounts", ContainerEdits(mounts=(Mount("/a b", "/c", ("ro", "bind"), "bind"),))),
        Device("other-path", ContainerEdits((DeviceNode("/dev/x", "/dev/y"),))),
        Device("modes", ContainerEdits((DeviceNode("/dev/x", None, "rwm", 0, 0, 0),))),
        Device("notes", ContainerEdits((CARD,)), (("a", "b"), ("Example.com/C_d", ""))),
        entry("unicode", env=("A=ü😀",)),
    ],
    ids=lambda device: device.name,
)
def test_a_valid_entry_has_no_problem(device: Device) -> None:
    assert rules.device_problems(device) == ()


@pytest.mark.parametrize(
    ("device", "word"),
    [
        (Device("nothing", ContainerEdits()), "nothing that a container"),
        (entry(""), "name"),
        (entry("-a"), "name"),
        (entry("a-"), "name"),
        (entry("a/b"), "name"),
        (entry("a b"), "name"),
        (entry("a\n"), "name"),
        (entry("ä"), "name"),
        (entry(device_nodes=(DeviceNode("dev/x"),)), "absolute"),
        (entry(device_nodes=(DeviceNode(""),)), "absolute"),
        (entry(device_nodes=(DeviceNode("/"),)), "absolute"),
        (entry(device_nodes=(DeviceNode("/dev/"),)), "absolute"),
        (entry(device_nodes=(DeviceNode("/dev//x"),)), "absolute"),
        (entry(device_nodes=(DeviceNode("/dev/../x"),)), "absolute"),
        (entry(device_nodes=(DeviceNode("/dev/./x"),)), "absolute"),
        (entry(device_nodes=(DeviceNode("/dev/x\0"),)), "control"),
        (entry(device_nodes=(DeviceNode("/dev/x\u2028"),)), "control"),
        (entry(device_nodes=(DeviceNode("/dev/\udc80"),)), "control"),
        (entry(device_nodes=(DeviceNode("/" + "x" * 5000),)), "bytes"),
        (entry(device_nodes=(DeviceNode("/dev/x", "y"),)), "on the host"),
        (entry(device_nodes=(DeviceNode("/dev/x", None, ""),)), "permissions"),
        (entry(device_nodes=(DeviceNode("/dev/x", None, "rx"),)), "permissions"),
        (entry(device_nodes=(DeviceNode("/dev/x", None, "rr"),)), "permissions"),
        (entry(device_nodes=(DeviceNode("/dev/x", None, "none"),)), "permissions"),
        (entry(device_nodes=(DeviceNode("/dev/x", file_mode=0o1000),)), "mode"),
        (entry(device_nodes=(DeviceNode("/dev/x", file_mode=-1),)), "mode"),
        (entry(device_nodes=(DeviceNode("/dev/x", uid=2**32 - 1),)), "owner"),
        (entry(device_nodes=(DeviceNode("/dev/x", gid=-1),)), "group"),
        (entry(device_nodes=(CARD, DeviceNode(CARD.path, "/dev/dri/card1"))), "2 times"),
        (entry(mounts=(Mount("/a", CARD.path),)), "2 times"),
        (entry(mounts=(Mount("/a", "/c"), Mount("/b", "/c"))), "2 times"),
        (entry(mounts=(Mount("a", "/c"),)), "mounted path"),
        (entry(mounts=(Mount("/a", "c"),)), "mount point"),
        (entry(mounts=(Mount("/a", "/c", ("ro,bind",)),)), "option"),
        (entry(mounts=(Mount("/a", "/c", ("",)),)), "option"),
        (entry(mounts=(Mount("/a", "/c", (), ""),)), "type"),
        (entry(hooks=(Hook("prestop", "/x"),)), "hook"),
        (entry(hooks=(Hook("prestart", "x"),)), "hook"),
        (entry(hooks=(Hook("prestart", "/x", ("\0",)),)), "argument"),
        (entry(hooks=(Hook("prestart", "/x", (), ("A",)),)), "NAME=VALUE"),
        (entry(hooks=(Hook("prestart", "/x", (), (), 0),)), "time-out"),
        (entry(env=("A",)), "NAME=VALUE"),
        (entry(env=("=b",)), "NAME=VALUE"),
        (entry(env=("A=\x1b[0m",)), "NAME=VALUE"),
        (entry(env=("A=1", "A=2")), "2 times"),
        (entry(additional_gids=(0,)), "group"),
        (entry(additional_gids=(2**32,)), "group"),
        (Device("x", ContainerEdits((CARD,)), (("a b", ""),)), "annotation"),
        (Device("x", ContainerEdits((CARD,)), (("-/b", ""),)), "annotation"),
        (Device("x", ContainerEdits((CARD,)), (("a", ""), ("a", ""))), "2 times"),
        (Device("x", ContainerEdits((CARD,)), (("a", "\n"),)), "control"),
        (Device("x", ContainerEdits((CARD,)), (("a", "x" * 2**18),)), "bytes"),
    ],
)
def test_what_a_consumer_would_refuse_or_misread_is_a_problem(device: Device, word: str) -> None:
    assert any(word in problem for problem in rules.device_problems(device))


def test_a_problem_is_one_line_whatever_stands_in_the_entry() -> None:
    device = entry("a\nb", env=("A\n" * 9999,), device_nodes=(DeviceNode("/dev/x\n\x1b"),))
    problems = rules.device_problems(device)
    assert len(problems) == 3
    assert all(problem.isprintable() and len(problem) < 400 for problem in problems)


def test_a_spec_names_the_device_that_has_the_problem() -> None:
    spec = Spec(Kind("intel.com/gpu"), (GPU, Device("bad", ContainerEdits())))
    assert rules.validate(spec) == ["bad: there is nothing that a container would get"]


def test_a_spec_without_devices_is_refused() -> None:
    with pytest.raises(SpecError, match="no device"):
        rules.check(Spec(Kind("intel.com/gpu"), ()))


def test_a_name_given_twice_is_refused_since_consumers_drop_the_whole_file() -> None:
    with pytest.raises(SpecError, match="given 2 times"):
        rules.check(Spec(Kind("intel.com/gpu"), (GPU, GPU)))


PLAIN = Device("gpu0", ContainerEdits((DeviceNode("/dev/x"),)))


@pytest.mark.parametrize(
    ("version", "spec"),
    [
        ("0.3.0", Spec(Kind("a.b/cc"), (PLAIN,))),
        (
            "0.4.0",
            Spec(
                Kind("a.b/cc"),
                (entry("m", device_nodes=(), mounts=(Mount("/a", "/b", (), "bind"),)),),
            ),
        ),
        ("0.5.0", Spec(Kind("a.b/cc"), (GPU,))),
        ("0.5.0", Spec(Kind("a.b/cc"), (Device("0", PLAIN.edits),))),
        ("0.6.0", Spec(Kind("a.b/c.c"), (PLAIN,))),
        ("0.6.0", Spec(Kind("a.b/cc"), (PLAIN,), (("a", "b"),))),
        ("0.6.0", Spec(Kind("a.b/cc"), (Device("x", PLAIN.edits, (("a", "b"),)),))),
        ("0.7.0", Spec(Kind("a.b/cc"), (PLAIN, Device("x", ContainerEdits(additional_gids=(1,)))))),
    ],
)
def test_the_version_is_the_lowest_that_carries_the_content(version: str, spec: Spec) -> None:
    assert rules.minimum_version(spec) == version


@pytest.mark.parametrize(
    ("needed", "pin", "fits"),
    [
        ("0.5.0", None, True),
        ("0.5.0", "0.5.0", True),
        ("0.5.0", "1.1.0", True),
        ("0.6.0", "0.5.0", False),
    ],
)
def test_a_pin_refuses_what_it_cannot_carry(needed: str, pin: str | None, *, fits: bool) -> None:
    assert rules.fits(needed, pin) is fits
