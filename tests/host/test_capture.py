"""A host as a file: what is written is read again, and nothing else is taken for a host."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from agent.errors import CaptureError
from agent.host.capture import Capture, capture, contradictions, dump, load, parse
from agent.host.captured_text import MAX_BYTES
from agent.host.hints import EVERYTHING
from agent.host.model import (
    Address,
    DeviceNumber,
    Environment,
    Function,
    Inventory,
    Link,
    Node,
    NodeRole,
    NodeState,
    Orphan,
    pcie_root_of,
)
from tests.host.tree import Host

GPU = Function(
    address=Address("0000:03:00.0"),
    devpath="/devices/pci0000:00/0000:00:01.0/0000:03:00.0",
    vendor=0x8086,
    device=0xE212,
    class_code=0x030000,
    subsystem_vendor=0x8086,
    subsystem_device=0x1114,
    revision=4,
    driver="xe",
    boot_vga=True,
    numa_node=0,
    pcie_root="pci0000:00",
    iommu_group=17,
    virtfns=(Address("0000:03:00.1"),),
    nodes=(
        Node(
            NodeRole.CARD, "card0", "/dev/dri/card0", DeviceNumber(226, 0), NodeState.PRESENT, True
        ),
        Node(NodeRole.RENDER, "renderD128", "/dev/dri/renderD128", None, NodeState.MISSING, False),
    ),
    links=(Link("/dev/dri/by-path/pci-0000:03:00.0-card", "/dev/dri/card0"),),
    inode=7,
)
TEXT = dump(capture(Inventory({GPU.address: GPU}), description="One GPU.", kernel="6.12.48-name"))


# --- what is written is read again ----------------------------------------------------------------

addresses = st.builds(
    "{:04x}:{:02x}:{:02x}.{}".format,
    st.sampled_from([0, 1, 0x10000, 0xFFFFFFFF]),
    st.integers(0, 255),
    st.integers(0, 31),
    st.integers(0, 7),
).map(Address)
# Whatever YAML 1.1 or 1.2 could take for something else than text, and text from anywhere.
names = st.one_of(
    st.sampled_from(
        ["xe", "no", "on", "null", "~", "1e3", "0o17", "12:30:45", "-", "=", "<<", "'"]
    ),
    st.text(
        st.characters(exclude_characters="/\x00", exclude_categories=["Cs", "Cc"]),
        min_size=1,
        max_size=12,
    ).filter(lambda name: name not in {".", ".."}),
)
numbers = st.builds(DeviceNumber, st.integers(0, 4095), st.integers(0, 2**20 - 1))
nodes = st.builds(
    Node,
    role=st.sampled_from(NodeRole),
    name=names,
    path=names.map("/dev/{}".format),
    number=st.none() | numbers,
    state=st.sampled_from(NodeState),
    settled=st.booleans(),
)
u16 = st.integers(0, 0xFFFF)
devpaths = names.map("/devices/platform/{}".format)


@st.composite
def functions(draw: st.DrawFn) -> Function:
    address = draw(addresses)
    devpath = f"/devices/pci0000:00/{address}"
    subsystem = draw(st.none() | st.tuples(st.integers(1, 0xFFFF), u16))
    return Function(
        address=address,
        devpath=devpath,
        vendor=draw(u16),
        device=draw(u16),
        class_code=draw(st.integers(0, 0xFFFFFF)),
        subsystem_vendor=None if subsystem is None else subsystem[0],
        subsystem_device=None if subsystem is None else subsystem[1],
        revision=draw(st.none() | st.integers(0, 255)),
        driver=draw(st.none() | names),
        boot_vga=draw(st.none() | st.booleans()),
        numa_node=draw(st.none() | st.integers(0, 64)),
        pcie_root=pcie_root_of(devpath),
        iommu_group=draw(st.none() | st.integers(0, 4096)),
        nodes=tuple(draw(st.lists(nodes, max_size=3, unique_by=lambda node: node.path))),
        links=tuple(
            Link(f"/dev/dri/by-path/{name}", f"/dev/dri/{target}")
            for name, target in draw(st.lists(st.tuples(names, names), max_size=2))
        ),
        has_vfio_dev=draw(st.booleans()),
    )


inventories = st.builds(
    Inventory,
    functions=st.lists(functions(), max_size=4, unique_by=lambda f: f.address).map(
        lambda many: {f.address: f for f in many}
    ),
    shared=st.lists(nodes, max_size=2, unique_by=lambda node: node.path).map(
        lambda many: {node.path: node for node in many}
    ),
    orphans=st.lists(st.builds(Orphan, nodes, devpaths, st.none() | names), max_size=2).map(tuple),
    dropped=st.dictionaries(addresses, st.text(max_size=30), max_size=2),
    environment=st.builds(Environment),
)


@given(inventories)
def test_what_is_written_is_read_again(inventory: Inventory) -> None:
    captured = capture(inventory)
    assert parse(dump(captured)) == captured
    again = captured.inventory()
    inodes = [function.inode for function in again.functions.values()]
    assert len(set(inodes)) == len(inodes), "two devices are two devices"
    assert list(again.functions) == list(inventory.functions), "the order is kept"
    without_inodes = {
        address: structs.replace(function, inode=0) for address, function in again.functions.items()
    }
    assert dataclasses.replace(again, functions=without_inodes) == inventory


def mess_vf(tree: Host) -> None:
    """A VF, and a PF that lists another."""
    tree.link(f"sys/devices/pci0000:00/{A}/physfn", f"sys/devices/pci0000:00/{B}")
    tree.link(f"sys/devices/pci0000:00/{B}/virtfn0", f"sys/devices/pci0000:00/{B}")


def mess_twice(tree: Host) -> None:
    """Two cards of one function, and two of two, whose nodes have one path."""
    tree.bind(A, "xe", "card0", "card1")
    tree.bind(B, "xe", "card2")
    for place in (f"{A}/drm/card1", f"{B}/drm/card2"):
        tree.write(f"sys/devices/pci0000:00/{place}/uevent", "DEVNAME=dri/card0\n")


def mess_numbers(tree: Host) -> None:
    """Attributes with more digits than anything has."""
    for name in ("vendor", "device", "class", "subsystem_vendor", "subsystem_device", "revision"):
        tree.write(f"sys/devices/pci0000:00/{A}/{name}", "0xffffffff\n")


def mess_names(tree: Host) -> None:
    """Drivers whose names are no text, or none."""
    os.symlink(b"../" + b"\xff" * 250, tree.sys(A, "driver"))
    os.symlink("drivers/", tree.sys(B, "driver"))


def mess_places(tree: Host) -> None:
    """A function below a folder whose name is no text."""
    folder = os.fsencode(tree.root / "sys/devices/pci0000:01") + b"\xff\n"
    os.mkdir(folder)
    os.rename(tree.sys(A), os.path.join(folder, os.fsencode(A)))
    entry = tree.root / "sys/bus/pci/devices" / A
    entry.unlink()
    os.symlink(os.path.join(b"../../../devices", os.path.basename(folder), A.encode()), entry)


A, B = "0000:03:00.0", "0000:04:00.0"


@pytest.mark.parametrize(
    "mess",
    [mess_vf, mess_twice, mess_numbers, mess_names, mess_places],
    ids=["VFs", "one path", "numbers", "names", "places"],
)
def test_whatever_a_look_finds_on_a_broken_host_is_read_again(
    tmp_path: Path, mess: Callable[[Host], object]
) -> None:
    """A bug report is about just such a host."""
    tree = Host(tmp_path)
    tree.add(A)
    tree.add(B)
    mess(tree)
    inventory = tree.scanner().scan(EVERYTHING, Inventory())
    assert {*inventory.functions, *inventory.dropped} == {A, B}
    captured = capture(inventory)
    (tmp_path / "host.yaml").write_text(dump(captured), encoding="utf-8")
    assert load(tmp_path / "host.yaml") == captured
    assert capture(captured.inventory()) == captured


RENDER_MISSING = (
    "{role: render, name: renderD128, path: /dev/dri/renderD128, state: missing, settled: false}"
)


def test_the_file_is_short_and_what_is_usual_is_left_out() -> None:
    """A person reads it before it is mailed."""
    assert TEXT.splitlines() == [
        "# The facts of a host, written by `cdi-agent scan --capture`.",
        "version: 1",
        "description: One GPU.",
        "kernel: 6.12.48",
        "functions:",
        "- address: '0000:03:00.0'",
        "  devpath: /devices/pci0000:00/0000:00:01.0/0000:03:00.0",
        "  id: 8086:e212",
        "  class: '0x030000'",
        "  subsystem: 8086:1114",
        "  revision: 4",
        "  driver: xe",
        "  boot_vga: true",
        "  numa_node: 0",
        "  iommu_group: 17",
        "  virtfns: ['0000:03:00.1']",
        "  nodes:",
        "  - {role: card, name: card0, path: /dev/dri/card0, number: '226:0'}",
        f"  - {RENDER_MISSING}",
        "  links:",
        "  - {path: '/dev/dri/by-path/pci-0000:03:00.0-card', target: /dev/dri/card0}",
    ]


def test_no_inode_and_no_name_of_a_build_is_written() -> None:
    """An inode says nothing elsewhere, and a kernel built by hand may bear a host's name."""
    assert "inode" not in TEXT
    assert "name" not in TEXT.replace("name: card0", "").replace("name: renderD128", "")


def test_scalars_need_no_quotes() -> None:
    """YAML 1.1 takes 226:0 and 0000:03:00.0 for numbers to the base 60."""
    assert parse(TEXT.replace("'", "")) == parse(TEXT)


# --- nothing else is taken for a host -------------------------------------------------------------


def edited(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param(
            "", "host: a captured host begins with `version: 1`, this has none", id="empty"
        ),
        pytest.param("[]", "begins with `version: 1`, this has none", id="a list"),
        pytest.param("just text", "begins with `version: 1`, this has none", id="text"),
        pytest.param("version: 2", "begins with `version: 1`, this has '2'", id="newer"),
        pytest.param("version: {a: b}", "this has \"{'a': 'b'}\"", id="no version"),
        pytest.param(
            "version: 1\nfunctions: [",
            "host:3: it is not YAML: ",
            id="torn",
        ),
        pytest.param("version: 1\n\tkernel: x", "host:2: ", id="tab"),
        pytest.param("version: 1\nversion: 1", "host:2: 'version' is given twice", id="twice"),
        pytest.param("version: 1\n--- \nversion: 1", "host:3: it has a second", id="two documents"),
        pytest.param(
            "version: 1\na: &a [x]\nb: *a", "host:2: anchors (&name) are not", id="an anchor"
        ),
        pytest.param("version: 1\n? [a]\n: b", "host:2: a key is a word", id="a list for a key"),
        pytest.param("version: 1\na: " + "[" * 20, "host:2: it nests more than 12 deep", id="deep"),
        # libyaml has a bound of its own from 0.2.6 on, and then speaks first.
        pytest.param("version: 1\na: " + "[" * 50000, "host:2: it ", id="deeper"),
        pytest.param(
            "version: 1\n\x00", "host:2: it is not YAML: the character U+0000", id="control"
        ),
        pytest.param("version: 1\n\ud800", "host:2: it is not text", id="half a character"),
        pytest.param("version: 1\nhost: x", "Object contains unknown field `host`", id="unknown"),
        pytest.param(
            edited("  driver: xe", "  drivr: xe"),
            "host:12: functions[0]: Object contains unknown field `drivr`",
            id="misspelt",
        ),
        pytest.param(
            edited("226:0", "226-0"),
            "host:18: functions[0].nodes[0].number: Expected `str` matching regex",
            id="number",
        ),
        pytest.param(
            edited("role: card", "role: screen"),
            "host:18: functions[0].nodes[0].role: Invalid enum value 'screen'",
            id="role",
        ),
        pytest.param(
            edited("boot_vga: true", "boot_vga: perhaps"),
            "host:13: functions[0].boot_vga: ",
            id="bool",
        ),
        pytest.param(
            edited("iommu_group: 17", "iommu_group: -1"), "functions[0].iommu_group: ", id="group"
        ),
        pytest.param(edited("id: 8086:e212", "id: 8086"), "functions[0].id: ", id="id"),
        pytest.param(
            edited("path: /dev/dri/card0", "path: /etc/passwd"), "nodes[0].path: ", id="path"
        ),
        pytest.param(
            edited("path: /dev/dri/card0", "path: /dev/../etc/passwd"), "nodes[0].path: ", id="dots"
        ),
    ],
)
def test_what_is_no_captured_host_is_refused_by_line_and_key(text: str, sentence: str) -> None:
    with pytest.raises(CaptureError) as caught:
        parse(text, origin="host")
    assert sentence in caught.value.sentence
    assert "\n" not in caught.value.sentence
    assert len(caught.value.sentence) < 300


def two(first: str = "", address: str = "0000:03:00.1", second: str = "") -> str:
    """Two functions, each with something more."""
    lines = ["version: 1", "functions:"]
    for where, more in (("0000:03:00.0", first), (address, second)):
        place = f"address: {where}, devpath: /devices/pci0000:00/{where}"
        lines.append(f"- {{{place}, id: '8086:0000', class: '0x030000'{more}}}")
    return "\n".join(lines)


def test_a_function_that_is_there_twice_is_refused() -> None:
    with pytest.raises(CaptureError) as caught:
        parse(two(address="0000:03:00.0"))
    assert caught.value.sentence == "capture: functions[1].address: 0000:03:00.0 is there twice"


@pytest.mark.parametrize(
    ("text", "contradiction"),
    [
        (
            two(second=", physfn: 0000:03:00.0"),
            ("functions[1].physfn", "0000:03:00.0 has no such VF"),
        ),
        (
            two(", virtfns: [0000:03:00.1]"),
            ("functions[0].virtfns[0]", "0000:03:00.1 is no VF of 0000:03:00.0"),
        ),
        (
            edited("0000:03:00.0\n  id", "0000:04:00.0\n  id"),
            ("functions[0].devpath", "does not end in 0000:03:00.0"),
        ),
        (
            edited(
                "name: renderD128, path: /dev/dri/renderD128", "name: card0, path: /dev/dri/card0"
            ),
            ("functions[0].nodes[1].path", "/dev/dri/card0 is there twice"),
        ),
    ],
    ids=["VF without PF", "PF without VF", "another place", "one node twice"],
)
def test_a_host_that_contradicts_itself_is_read_and_can_be_told(
    text: str, contradiction: tuple[str, str]
) -> None:
    captured = parse(text)
    assert list(contradictions(captured)) == [contradiction]
    again = capture(captured.inventory(), description=captured.description, kernel=captured.kernel)
    assert parse(dump(again)) == captured


def test_a_small_file_that_would_be_huge_is_refused_before_it_is() -> None:
    lines = ["version: 1", "a: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"b{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(CaptureError, match="anchors"):
        parse("\n".join(lines))


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "host.yaml").write_text(TEXT)
    assert load(tmp_path / "host.yaml") == parse(TEXT)


def test_an_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "host.yaml").write_text("version: 1\nx: y")
    with pytest.raises(CaptureError, match=r"host\.yaml:2: Object contains unknown field `x`"):
        load(tmp_path / "host.yaml")


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_loop(path: Path) -> None:
    path.symlink_to(path.name)


def put_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)


@pytest.mark.parametrize(
    ("put", "sentence"),
    [
        (lambda _path: None, "cannot be read: No such file or directory"),
        (Path.mkdir, "cannot be read: it is not a regular file"),
        (put_fifo, "cannot be read: it is not a regular file"),
        (put_loop, "cannot be read: Too many levels of symbolic links"),
        (put_huge, "cannot be read: it is larger than 8 MiB"),
        (
            lambda path: path.write_bytes(b"version: 1\n\xff"),
            "yaml:2: it is not text in UTF-8",
        ),
    ],
    ids=["missing", "folder", "fifo", "loop", "huge", "binary"],
)
def test_what_is_no_text_file_is_refused(
    tmp_path: Path, put: Callable[[Path], object], sentence: str
) -> None:
    put(tmp_path / "host.yaml")
    with pytest.raises(CaptureError) as caught:
        load(tmp_path / "host.yaml")
    assert sentence in caught.value.sentence


def test_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(CaptureError, match="cannot be read"):
        load("a\x00b")


def test_the_empty_host_is_a_host() -> None:
    assert parse(dump(Capture(version=1))) == Capture(version=1)
    assert parse("version: 1") == Capture(version=1)
    assert parse("version: 1").inventory() == Inventory()
