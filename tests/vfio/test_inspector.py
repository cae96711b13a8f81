"""Inspections: everything at once, and unknown where there is no answer in time."""

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import Final

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from agent.vfio.children import Child
from agent.vfio.model import Holder, Inspect, Inspection
from agent.vfio.roots import Timeouts
from tests.conftest import children
from tests.vfio.rig import AUDIO, GPU, HASTY, Host, rig

NODE: Final = "/dev/dri/card0"
IMPATIENT_READ: Final = Timeouts(write=60, read=0.05, holders=60, load=60)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def inspect(*addresses: str, nodes: tuple[str, ...] = (), drivers: tuple[str, ...] = ()) -> Inspect:
    return Inspect("vm", tuple(addresses), nodes, drivers)  # type: ignore[arg-type]


async def test_what_is_to_be_known_is_found_out_at_once(host: Host) -> None:
    host.override(AUDIO).write_text("vfio-pci\n")
    (host.root / "etc/driverctl.d").mkdir()
    (host.root / "etc/driverctl.d/pci-0000:03:00.1").touch()
    hold(host, 7, NODE)
    effect = inspect(GPU, AUDIO, nodes=(NODE,), drivers=("xe",))
    async with rig(host) as at:
        assert await at.inspected(effect) == Inspection(
            effect,
            overrides=((GPU, None), (AUDIO, "vfio-pci")),
            holders=(Holder(7, "vm", NODE),),
            holders_known=True,
            managed=((AUDIO, "driverctl"),),
        )


def hold(host: Host, pid: int, node: str) -> None:
    folder = host.root / f"proc/{pid}"
    (folder / "fd").mkdir(parents=True)
    (folder / "fd/3").symlink_to(node)
    (folder / "comm").write_text("vm\n")


async def test_who_holds_a_node_that_no_look_knows_is_found(host: Host) -> None:
    """The sound of a GPU's audio function, say, which moves along with it."""
    node = "/dev/snd/controlC1"
    folder = host.function(AUDIO) / "sound/card1/controlC1"
    folder.mkdir(parents=True)
    (folder / "dev").write_text("116:9\n")
    (folder / "uevent").write_text("DEVNAME=snd/controlC1\n")
    (host.root / "dev/snd").mkdir()
    (host.root / "dev/snd/controlC1").touch()
    hold(host, 7, node)
    async with rig(host) as at:
        used = await at.inspected(structs.replace(inspect(GPU, AUDIO), used=(GPU, AUDIO)))
        other = await at.inspected(structs.replace(inspect(GPU, AUDIO), used=(GPU,)))
    assert used.holders == (Holder(7, "vm", node),)
    assert (other.holders, other.holders_known) == ((), True)


# --- overrides ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "override"),
    [
        pytest.param("(null)\n", ((GPU, None),), id="unset"),
        pytest.param("\n", ((GPU, None),), id="empty"),
        pytest.param("vfio-pci\n", ((GPU, "vfio-pci"),), id="set"),
        pytest.param("my driver \n", ((GPU, "my driver "),), id="anything"),
        pytest.param("\xff\n", (), id="no text"),
        pytest.param(None, (), id="gone"),
    ],
)
async def test_an_override_is_what_the_file_says(
    host: Host, content: str | None, override: tuple[tuple[str, str | None], ...]
) -> None:
    host.override(GPU).unlink()
    if content is not None:
        host.override(GPU).write_text(content, encoding="latin-1")
    async with rig(host) as at:
        assert (await at.inspected(inspect(GPU))).overrides == override


async def test_an_override_that_does_not_come_is_unknown_and_the_others_are_not(host: Host) -> None:
    """Whoever holds the device's lock holds up its reader, and no other."""
    host.block(host.override(GPU))
    async with rig(host, IMPATIENT_READ) as at:
        inspection = await at.inspected(inspect(GPU))
        assert inspection.overrides == ()
    async with rig(host) as at:
        assert (await at.inspected(inspect(AUDIO))).overrides == ((AUDIO, None),)


@pytest.mark.parametrize(
    ("writer", "why"),
    [
        pytest.param(("/no/such/python",), "cannot be started: No such file", id="is not there"),
        pytest.param(("sh", "-c", "exit 3"), "it said nothing", id="fails"),
    ],
)
async def test_what_no_child_was_there_to_ask_is_told_from_what_has_no_answer(
    host: Host, writer: tuple[str, ...], why: str
) -> None:
    async with rig(host, writer=writer) as at:
        inspection = await at.inspected(inspect(GPU))
    assert inspection.overrides == ()
    assert why in inspection.unasked
    host.override(GPU).unlink()
    async with rig(host) as at:
        assert (await at.inspected(inspect(GPU))).unasked == ""


async def test_a_question_that_is_still_stuck_is_not_asked_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each try would leave one more process behind."""
    host.block(host.override(GPU))
    before = await asyncio.to_thread(children)
    async with rig(host, HASTY) as at:
        with monkeypatch.context() as patch, capture_logs() as logs:
            patch.setattr(Child, "kill", lambda _: None)  # as in an uninterruptible call
            await at.inspected(inspect(GPU))
            await at.inspected(inspect(GPU))
        assert len((await asyncio.to_thread(children)).keys() - before) == 1
    said = [entry["problem"] for entry in logs if entry["event"] == "override-unknown"]
    assert said[0] == "it did not end in 0.05 s"
    assert said[1].endswith("is still stuck in it")


async def test_a_question_is_asked_again_once_its_child_is_gone(host: Host) -> None:
    host.block(host.override(GPU))
    async with rig(host, IMPATIENT_READ) as at:
        assert (await at.inspected(inspect(GPU))).overrides == ()
        host.override(GPU).unlink()
        host.override(GPU).write_text("xe\n")
        while not (inspection := await at.inspected(inspect(GPU))).overrides:
            pass  # a slow machine takes longer than that to start a process
        assert inspection.overrides == ((GPU, "xe"),)


# --- dead or alive --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "dead"),
    [
        pytest.param(b"\x86\x80\x12\xe2" + bytes(60), (), id="answers"),
        pytest.param(b"\xff" * 4096, (GPU,), id="answers nothing"),
        pytest.param(b"\x86\x80" + b"\xff" * 62, (), id="has a vendor"),
        pytest.param(b"\xff" * 4 + b"\x06\x04\x10" + bytes(57), (), id="a VF, which has no ids"),
        pytest.param(b"\xff" * 4, (), id="says too little"),
        pytest.param(b"", (), id="says nothing"),
        pytest.param(None, (), id="cannot be asked"),
    ],
)
async def test_a_function_that_reads_ones_is_dead(
    host: Host, config: bytes | None, dead: tuple[str, ...]
) -> None:
    if config is not None:
        (host.function(GPU) / "config").write_bytes(config)
    async with rig(host) as at:
        assert (await at.inspected(inspect(GPU))).dead == (), "it was not asked"
        effect = structs.replace(inspect(GPU), alive=True)
        assert (await at.inspected(effect)).dead == dead


async def test_a_configuration_space_that_hangs_says_nothing(host: Host) -> None:
    os.mkfifo(host.function(GPU) / "config")
    async with rig(host, IMPATIENT_READ) as at:
        with capture_logs() as logs:
            inspection = await at.inspected(structs.replace(inspect(GPU), alive=True))
    assert inspection.dead == ()
    assert "config-unknown" in [entry["event"] for entry in logs]


# --- holders --------------------------------------------------------------------------------------


async def test_without_nodes_no_process_is_asked(host: Host) -> None:
    (host.root / "proc/self").rmdir()
    async with rig(host) as at:
        inspection = await at.inspected(inspect(GPU))
    assert (inspection.holders, inspection.holders_known) == ((), True)


async def test_what_cannot_be_seen_is_unknown_with_its_reason(host: Host) -> None:
    (host.root / "proc/self/status").write_text("CapEff:\t0000000000000000\n")
    hold(host, 7, NODE)
    async with rig(host) as at:
        inspection = await at.inspected(inspect(GPU, nodes=(NODE,)))
    assert inspection.holders == (Holder(7, "vm", NODE),)
    assert not inspection.holders_known
    assert inspection.blind[0] == "the agent lacks CAP_SYS_PTRACE"


async def test_what_is_asked_again_and_again_is_said_once(host: Host) -> None:
    """A claim that waits until a device is free asks every two seconds."""
    procfs, gone = host.root / "proc/self", host.root / "proc/self.away"
    with capture_logs() as logs:
        async with rig(host) as at:
            for away in (True, True, False, True):
                if procfs.exists() is away:
                    (procfs if away else gone).rename(gone if away else procfs)
                assert (await at.inspected(inspect(GPU, nodes=(NODE,)))).holders_known is not away
    assert [entry["event"] for entry in logs] == ["holders-unknown"] * 2
    assert logs[0]["function"] == GPU


async def test_without_procfs_nothing_is_known(host: Host) -> None:
    (host.root / "proc/self").rmdir()
    async with rig(host) as at:
        inspection = await at.inspected(inspect(GPU, nodes=(NODE,)))
    assert inspection.blind == (f"there is no procfs at {host.roots.proc}",)


async def test_a_search_that_does_not_end_says_nothing(host: Host) -> None:
    (host.root / "proc/7").mkdir()
    (host.root / "proc/7/fd").mkdir()
    (host.root / "proc/7/fd/3").symlink_to(NODE)
    os.mkfifo(host.root / "proc/7/comm")
    async with rig(host, Timeouts(write=60, read=60, holders=0.05, load=60)) as at:
        inspection = await at.inspected(inspect(GPU, nodes=(NODE,)))
    assert not inspection.holders_known
    assert inspection.blind == ("it did not end in 0.05 s",)


# --- drivers --------------------------------------------------------------------------------------


LOADS: Final = "import os, sys; os.mkdir(sys.argv[1] + '/' + sys.argv[2])"


async def test_a_driver_that_is_missing_is_loaded_once(host: Host) -> None:
    drivers = f"{host.roots.sys}/bus/pci/drivers"
    load = (sys.executable, "-I", "-S", "-c", LOADS, drivers)
    effect = inspect(drivers=("vfio-pci",))
    async with rig(host, load=load) as at:
        at.start(effect, effect)
        for _ in range(2):
            result = await at.result()
            assert isinstance(result, Inspection)
            assert result.unavailable == ()


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        pytest.param("vfio-pci", "", id="has a module"),
        pytest.param("xe-vfio-pci", "has no module xe_vfio_pci", id="has none"),
    ],
)
async def test_nothing_is_loaded_for_who_only_wants_to_know(
    host: Host, driver: str, reason: str
) -> None:
    """It is only looked whether there is a module."""
    host.announce(ALIASES)
    folder = Path(host.roots.modules, os.uname().release)
    (folder / "modules.dep").write_text("kernel/drivers/vfio/pci/vfio-pci.ko.zst:\n")
    effect = structs.replace(inspect(drivers=(driver,)), loads=False)
    drivers = host.root / "sys/bus/pci/drivers"
    async with rig(host, load=(sys.executable, "-I", "-S", "-c", LOADS, str(drivers))) as at:
        found = dict((await at.inspected(effect)).unavailable)
    assert reason in found.get(driver, "")
    assert bool(reason) == bool(found)
    assert not (drivers / driver).exists()


@pytest.mark.parametrize(
    ("driver", "is_loaded"),
    [
        pytest.param("xe", True, id="its own"),
        pytest.param("snd_hda_intel", False, id="of its audio function"),
        pytest.param("dccp", False, id="no driver of any device"),
    ],
)
async def test_of_the_hosts_modules_only_those_for_the_device_are_loaded(
    host: Host, driver: str, *, is_loaded: bool
) -> None:
    """Who may claim devices may not load every module."""
    drivers = host.root / "sys/bus/pci/drivers"
    (host.function(GPU) / "driver").unlink()
    shutil.rmtree(drivers / "xe")
    (host.function(GPU) / "modalias").write_text("pci:v00008086d0000E212sv0sd0bc03sc00i00\n")
    host.announce(ALIASES)
    effect = structs.replace(inspect(GPU, drivers=(driver,)), natives=((GPU, driver),))
    async with rig(host, load=(sys.executable, "-I", "-S", "-c", LOADS, str(drivers))) as at:
        found = dict((await at.inspected(effect)).unavailable)
    assert (drivers / driver).exists() == is_loaded
    assert bool(found) != is_loaded


async def test_that_it_has_no_iommu_is_known_once_the_driver_is_loaded(host: Host) -> None:
    """The parameter comes with the module."""
    folder = f"{host.roots.sys}/module/vfio/parameters"
    script = (
        f"import os; os.makedirs({folder!r})\n"
        f"open({folder + '/enable_unsafe_noiommu_mode'!r}, 'w').write('Y\\n')\n"
        f"os.mkdir({host.roots.sys + '/bus/pci/drivers/vfio-pci'!r})\n"
    )
    async with rig(host, load=(sys.executable, "-I", "-S", "-c", script)) as at:
        assert (await at.inspected(inspect(drivers=("vfio-pci",)))).noiommu
    (host.root / "sys/module/vfio/parameters/enable_unsafe_noiommu_mode").write_text("N\n")
    async with rig(host) as at:
        assert not (await at.inspected(inspect(drivers=("vfio-pci",)))).noiommu


ALIASES: Final = """\
alias pci:v00008086d0000E212sv*sd*bc03sc*i* xe
alias pci:v00008086d*sv*sd*bc04sc03i00* snd_hda_intel
alias pci:v00001234d*sv*sd*bc*sc*i* two_words
alias usb:v* usb_only
"""


@pytest.mark.parametrize(
    ("driver", "modalias", "is_for_others"),
    [
        pytest.param("xe", True, False, id="its own"),
        pytest.param("snd_hda_intel", True, True, id="of its audio function"),
        pytest.param("two-words", True, True, id="spelled in another way"),
        pytest.param("usb_only", True, False, id="announces nothing for PCI"),
        pytest.param("of_nobody", True, False, id="announces nothing"),
        pytest.param("snd_hda_intel", False, False, id="nobody knows the device"),
    ],
)
async def test_a_driver_of_the_host_that_is_for_other_devices_is_told(
    host: Host, driver: str, *, modalias: bool, is_for_others: bool
) -> None:
    if modalias:
        text = "pci:v00008086d0000E212sv00008086sd00001114bc03sc00i00\n"
        (host.function(GPU) / "modalias").write_text(text)
    host.announce(ALIASES)
    effect = structs.replace(inspect(GPU), natives=((GPU, driver),))
    async with rig(host) as at:
        found = await at.inspected(effect)
    assert found.unsuitable == (((GPU, driver),) if is_for_others else ())


@pytest.mark.parametrize(
    ("driver", "load", "reason"),
    [
        pytest.param(
            "vfio-pci",
            ("sh", "-c", "echo Access\tdenied >&2; exit 1"),
            "its module vfio_pci cannot be loaded: Access denied",
            id="refused",
        ),
        pytest.param("vfio-pci", ("true",), "the running kernel's modules are not at", id="none"),
        pytest.param(
            "vfio-pci",
            ("/no/such/modprobe",),
            "its module could not be loaded: /no/such/modprobe cannot be started: No such file",
            id="no modprobe",
        ),
        pytest.param("../vfio", ("true",), "no driver can be called so", id="no name"),
    ],
)
async def test_why_a_driver_is_not_to_be_had_is_said(
    host: Host, driver: str, load: tuple[str, ...], reason: str
) -> None:
    async with rig(host, load=load) as at:
        inspection = await at.inspected(inspect(drivers=(driver,)))
    ((name, said),) = inspection.unavailable
    assert inspection.unasked == "", "it will not be there later either"
    assert name == driver
    assert said.startswith(reason)


async def test_a_module_that_does_not_load_in_time_is_unavailable(
    host: Host, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    load = ("cat", str(tmp_path / "pipe"))
    async with rig(host, Timeouts(write=60, read=60, holders=60, load=0.05), load=load) as at:
        ((_, said),) = (await at.inspected(inspect(drivers=("vfio-pci",)))).unavailable
    assert said == "its module could not be loaded: it did not end in 0.05 s"
