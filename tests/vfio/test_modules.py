"""Which VFIO driver suits a function, and how a driver that is not there is had, or why not."""

import os
from pathlib import Path
from typing import Final

import pytest

from agent.host.model import Address, Function
from agent.vfio.modules import (
    Aliases,
    aliases_path,
    is_driver_name,
    load_command,
    missing,
    modalias,
    registered,
)


def function(vendor: int = 0x8086, device: int = 0xE212, class_code: int = 0x030000) -> Function:
    return Function(
        Address("0000:03:00.0"),
        "/devices/pci0000:00/0000:03:00.0",
        vendor,
        device,
        class_code,
        subsystem_vendor=0x8086,
        subsystem_device=0x1114,
    )


# The form of lines is depmod's, for drivers of Linux 6.12 and later.
ALIASES: Final = b"""# Aliases extracted from modules themselves.
alias pci:v00008086d0000E212sv*sd*bc03sc*i* xe
alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci
alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci
alias vfio_pci:v00008086d0000E212sv*sd*bc03sc*i* xe_vfio_pci
alias vfio_pci:v00008086d0000E212sv00008086sd00001114bc03sc*i* special_vfio
alias vfio_pci:v00008086d*sv*sd*bc12sc00i* npu_vfio_pci
alias vfio_pci_core:v*d* wrong
alias vfio_pci:v*d*sv*sd*bc*sc*i* two words
alias vfio_pci:../../x ../evil
alias symbol:vfio_pci:v* not_this
"""


@pytest.mark.parametrize(
    ("of", "driver"),
    [
        pytest.param(function(), "special-vfio", id="the most specific"),
        pytest.param(function(0x10DE, 0x2342), "nvgrace-gpu-vfio-pci", id="one device"),
        pytest.param(function(device=0x7D1D, class_code=0x120000), "npu-vfio-pci", id="a class"),
        pytest.param(function(device=0x7D1D), "vfio-pci", id="any"),
    ],
)
def test_the_best_driver_has_the_fewest_wildcards(of: Function, driver: str) -> None:
    assert Aliases.parse(ALIASES).best(of) == driver


NOT_VFIO: Final = "is not a VFIO driver"
FOR_OTHERS: Final = "is a VFIO driver for other devices than 8086:e212"


@pytest.mark.parametrize(
    ("driver", "aliases", "reason"),
    [
        ("xe", ALIASES, NOT_VFIO),
        ("snd_hda_intel", ALIASES, NOT_VFIO),
        ("vfio-pci", ALIASES, None),
        ("xe_vfio_pci", ALIASES, None),
        ("special-vfio", ALIASES, None),
        ("nvgrace-gpu-vfio-pci", ALIASES, FOR_OTHERS),
        ("npu_vfio_pci", ALIASES, FOR_OTHERS),
        ("mlx5-vfio-pci", ALIASES, None),
        ("vfio-pci", b"", None),
        ("xe", b"", NOT_VFIO),
    ],
)
def test_a_driver_that_cannot_be_the_vfio_driver_of_a_function_is_known_before_it_is_bound(
    driver: str, aliases: bytes, reason: str | None
) -> None:
    assert Aliases.parse(aliases).against(function(), driver) == reason


def test_lines_in_another_order_name_the_same_driver() -> None:
    backwards = b"\n".join(reversed(ALIASES.split(b"\n"))) + b"\n"
    assert Aliases.parse(backwards) == Aliases.parse(ALIASES)


def test_a_function_is_written_as_the_kernel_writes_it() -> None:
    assert modalias(function()) == "v00008086d0000E212sv00008086sd00001114bc03sc00i00"


@pytest.mark.parametrize(
    "content",
    [None, b"", os.urandom(4096), b"alias vfio_pci:" + b"v" * 10**6 + b" x\n"],
    ids=["missing", "empty", "binary", "long"],
)
def test_without_aliases_there_is_the_driver_for_all(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "modules.alias"
    if content is not None:
        path.write_bytes(content)
    assert Aliases.read(str(path)).best(function()) == "vfio-pci"


def test_a_pipe_in_the_place_of_the_aliases_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "modules.alias")
    assert Aliases.read(str(tmp_path / "modules.alias")) == Aliases()


def test_the_aliases_are_those_of_the_running_kernel(tmp_path: Path) -> None:
    assert aliases_path("/lib/modules") == f"/lib/modules/{os.uname().release}/modules.alias"


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("vfio-pci", True),
        ("qat_vfio_pci", True),
        ("8250_pci", True),
        ("", False),
        ("-rf", False),
        ("..", False),
        ("a/b", False),
        ("vfio pci", False),
        ("vfio-pci\n", False),
        ("x" * 64, False),
    ],
)
def test_what_a_driver_can_be_called(name: str, *, good: bool) -> None:
    """Nothing else gets into a path or onto a command line."""
    assert is_driver_name(name) is good


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        pytest.param("xe", "xe", id="its name"),
        pytest.param("vfio_pci", "vfio-pci", id="its module"),
        pytest.param("qat-vfio-pci", "qat_vfio_pci", id="with dashes"),
        pytest.param("snd-hda-intel", "snd_hda_intel", id="a link"),
        pytest.param("i915", None, id="absent"),
        pytest.param("usb-thing", None, id="of another bus"),
    ],
)
def test_a_driver_has_the_name_that_the_kernel_gives_it(
    tmp_path: Path, driver: str, name: str | None
) -> None:
    for folder in (
        "bus/pci/drivers/xe",
        "bus/pci/drivers/vfio-pci",
        "bus/pci/drivers/qat_vfio_pci",
    ):
        (tmp_path / folder).mkdir(parents=True)
    for link in ("snd_hda_intel/drivers/pci:snd_hda_intel", "usb_thing/drivers/usb:thing"):
        (tmp_path / "module" / link).mkdir(parents=True)
    assert registered(str(tmp_path), driver) == name


def test_without_sysfs_there_is_no_driver(tmp_path: Path) -> None:
    assert registered(str(tmp_path), "xe") is None


def test_systemd_loads_modules_where_it_is_in_charge(tmp_path: Path) -> None:
    """A dash in a unit's name stands for a slash, so the module's spelling is used."""
    assert load_command("xe-vfio-pci", run=str(tmp_path)) == (
        *("modprobe", "--quiet", "--", "xe_vfio_pci"),
    )
    (tmp_path / "systemd/system").mkdir(parents=True)
    assert load_command("xe-vfio-pci", run=str(tmp_path)) == (
        *("systemctl", "restart", "--quiet", "modprobe@xe_vfio_pci.service"),
    )


@pytest.mark.parametrize(
    ("index", "content"),
    [
        ("modules.dep", "kernel/drivers/vfio/pci/vfio-pci.ko.zst: kernel/a.ko.zst\n"),
        ("modules.dep", "kernel/a.ko:\nupdates/dkms/vfio_pci.ko:\n"),
        ("modules.builtin", "kernel/drivers/vfio/pci/vfio-pci.ko\n"),
    ],
    ids=["compressed", "plain", "built in"],
)
def test_a_module_that_is_there_was_loaded_in_vain(
    tmp_path: Path, index: str, content: str
) -> None:
    folder = tmp_path / os.uname().release
    folder.mkdir()
    (folder / index).write_text(content)
    reason = "loading its module vfio_pci had no effect; `modprobe vfio_pci` may say why"
    assert missing("vfio-pci", "", modules=str(tmp_path)) == reason


def test_why_a_driver_is_missing_is_said(tmp_path: Path) -> None:
    folder = tmp_path / os.uname().release
    gone = f"the running kernel's modules are not at {folder}"
    assert missing("vfio-pci", "", modules=str(tmp_path)) == gone
    folder.mkdir()
    (folder / "modules.dep").write_text("kernel/vfio-pci-core.ko:\nkernel/xvfio-pci.ko:\n")
    assert missing("vfio-pci", "", modules=str(tmp_path)) == f"{folder} has no module vfio_pci"
    said = "its module vfio_pci cannot be loaded: Access denied"
    assert missing("vfio-pci", "Access denied", modules=str(tmp_path)) == said
