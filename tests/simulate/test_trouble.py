"""What goes wrong on a real host can be made to go wrong here, and ends again."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.simulate import Kernel, Source, stat_plain
from agent.simulate.host import arc_b50, network_card
from tests.simulate.conftest import Recorder

GPU = "0000:03:00.0"


@pytest.fixture(autouse=True)
def gpu(kernel: Kernel) -> None:
    kernel.plug(*arc_b50())


@contextmanager
def meanwhile(action: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run what blocks in a thread; the test must have ended it by the end of the block."""
    thread = threading.Thread(target=action)
    thread.start()
    yield thread
    thread.join(10)
    assert not thread.is_alive()


def entered(kernel: Kernel, condition: Callable[[], bool]) -> None:
    """Wait until the other thread has come so far; the kernel's lock says when to look."""
    with kernel.changing() as changed:
        assert changed.wait_for(condition, 10)


def test_a_hanging_unbind_blocks_that_function_and_no_other(kernel: Kernel) -> None:
    kernel.plug(*network_card())
    kernel.hang(GPU)
    driver = kernel.root / "sys/bus/pci/devices" / GPU / "driver"
    errors: list[int] = []
    with meanwhile(lambda: errors.append(kernel.unbind(GPU))):
        entered(kernel, lambda: not driver.is_symlink())
        assert (kernel.root / "dev/dri/card0").exists(), "the driver hangs before it removes this"
        assert kernel.unbind("0000:0a:00.0") == 0
        with meanwhile(lambda: errors.append(kernel.override(GPU, "vfio-pci"))):
            kernel.heal()
    assert errors == [0, 0]
    assert kernel.driver_of(GPU) is None
    assert not (kernel.root / "dev/dri").exists()


def test_a_reader_of_driver_override_hangs_with_the_device(kernel: Kernel) -> None:
    """And reads the right thing when the lock is free."""
    path = kernel.root / "sys/bus/pci/devices" / GPU / "driver_override"
    kernel.override(GPU, "xe")
    kernel.hang(GPU, now=True)
    with pytest.raises(BlockingIOError):
        os.read(fd := os.open(path, os.O_RDWR | os.O_NONBLOCK), 1)
    os.close(fd)
    read: list[str] = []
    with meanwhile(lambda: read.append(path.read_text())) as reader:
        assert reader.is_alive()
        kernel.heal()
    assert path.read_text() == "xe\n"


def test_vfio_does_not_leave_while_a_process_holds_its_node(kernel: Kernel) -> None:
    kernel.move(GPU, "vfio-pci")
    hold = kernel.hold("/dev/vfio/3")
    driver = kernel.root / "sys/bus/pci/devices" / GPU / "driver"
    with meanwhile(lambda: kernel.unbind(GPU)):
        entered(kernel, lambda: not driver.is_symlink())
        assert (kernel.root / "dev/vfio/3").exists()
        hold.release()
    assert not (kernel.root / "dev/vfio/3").exists()


def test_a_storm_changes_no_node(kernel: Kernel, heard: Recorder) -> None:
    before = sorted((kernel.root / "dev").rglob("*"))
    heard.events.clear()
    kernel.storm(GPU, 100)
    said = heard.of(Source.KERNEL)
    assert said.count("change drm card0") == 200
    assert said.count("remove drm card0-HDMI-A-1") == said.count("add drm card0-HDMI-A-1") == 100
    assert sorted((kernel.root / "dev").rglob("*")) == before


def test_a_storm_needs_a_card(kernel: Kernel) -> None:
    kernel.unbind(GPU)
    with pytest.raises(ValueError, match=GPU):
        kernel.storm(GPU, 1)


def test_a_lost_node_leaves_its_sysfs_entry_and_can_be_restored(
    kernel: Kernel, heard: Recorder
) -> None:
    heard.events.clear()
    node = kernel.root / "dev/dri/renderD128"
    kernel.lose("/dev/dri/renderD128")
    assert not node.exists()
    assert (kernel.root / "sys/class/drm/renderD128/dev").exists()
    kernel.restore("/dev/dri/renderD128")
    found = stat_plain(str(node))
    assert found is not None
    assert found.number == (226, 128)
    assert heard.events == []


def test_simpledrm_takes_card0_and_gives_it_back(kernel: Kernel) -> None:
    kernel.unplug(GPU)
    kernel.plug_platform("simple-framebuffer.0", "simple-framebuffer")
    assert (kernel.root / "sys/class/drm/card0").resolve().parts[-4:] == (
        "platform",
        "simple-framebuffer.0",
        "drm",
        "card0",
    )
    kernel.plug(*arc_b50())
    assert "/dev/dri/card1" in kernel.node_paths(GPU)
    kernel.unplug_platform("simple-framebuffer.0")
    assert not (kernel.root / "dev/dri/card0").exists()


@pytest.mark.parametrize(
    "put",
    [
        pytest.param(lambda path: path.write_text("not a number"), id="a file"),
        pytest.param(lambda path: path.symlink_to("card0"), id="a link to a node"),
        pytest.param(lambda path: path.mkdir(), id="a folder"),
        pytest.param(os.mkfifo, id="a pipe"),
    ],
)
def test_what_is_no_node_has_no_number(kernel: Kernel, put: Callable[[Path], None]) -> None:
    path = kernel.root / "dev/dri/other"
    assert stat_plain(str(path)) is None
    put(path)
    found = stat_plain(str(path))
    assert found is not None
    assert found.number is None


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(FileExistsError, match="own folder"):
        Kernel(tmp_path, lambda event: None)
