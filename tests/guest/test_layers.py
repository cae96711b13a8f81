"""What is kept is made again when it must be, and leaves nothing when its making is broken off."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guest import layers, qemu
from tests.guest.bundle import PROJECT
from tests.guest.cache import Cache
from tests.guest.image import Image
from tests.guest.layers import Installed
from tests.guest.topology import ONE_GPU


class OnlyKeys(Cache):
    """Makes nothing, and says where it would be."""

    def get(self, name: str, key: str, make: Callable[[Path], None], *, keep: int = 1) -> Path:
        return self.root / f"{name}-{key}"


@pytest.fixture
def base(tmp_path: Path) -> Installed:
    disk = tmp_path / "root.ext4"
    disk.touch()
    return Installed(Image(tmp_path), disk)


def test_a_guest_is_frozen_anew_when_its_disk_was_made_again(
    base: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the same name there are other bytes then, and in its memory still those of before."""
    monkeypatch.setattr(qemu, "version", lambda: "7.2")
    before = layers.frozen(OnlyKeys(tmp_path), base, ONE_GPU)
    assert layers.frozen(OnlyKeys(tmp_path), base, ONE_GPU) == before
    os.utime(base.disk, ns=(0, 0))
    assert layers.frozen(OnlyKeys(tmp_path), base, ONE_GPU) != before


def test_a_guest_is_frozen_anew_for_another_qemu(
    base: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = set()
    for version in ("7.2", "10.0"):
        monkeypatch.setattr(qemu, "version", lambda version=version: version)
        keys.add(layers.frozen(OnlyKeys(tmp_path), base, ONE_GPU))
    assert len(keys) == 2


BUILD = """
import sys
from pathlib import Path
from tests.guest import __main__, layers, rig
from tests.guest.image import Image
from tests.guest.layers import Installed

image, disk = map(Path, sys.argv[1:])
base = Installed(Image(image), disk)
layers.installed = lambda cache: base
connect = rig.connect

def told(path, *more):
    print(path.parent, flush=True)
    return connect(path, *more)

rig.connect = told
sys.argv[1:] = ["build", "one-gpu"]
__main__.main()
"""


@pytest.mark.guest
@pytest.mark.timeout(900)
def test_a_build_that_is_broken_off_leaves_no_guest_and_nothing_half_made(
    installed: Installed, tmp_path: Path
) -> None:
    """While the guest boots: nobody waits until it has, and its QEMU and its folder are gone."""
    folders = (str(installed.image.folder), str(installed.disk))
    making = subprocess.Popen(
        [sys.executable, "-c", BUILD, *folders],
        cwd=PROJECT,
        env=os.environ | {"CDI_AGENT_GUEST_CACHE": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with making:
        assert making.stdout
        folder = next(Path(line.strip()) for line in making.stdout if line.startswith("/"))
        assert folder.is_dir()
        assert [path for path in tmp_path.iterdir() if path.is_dir()] != []
        os.killpg(making.pid, signal.SIGTERM)
        _, said = making.communicate()
    assert "broken off" in said
    assert not folder.exists()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    with pytest.raises(ProcessLookupError):
        os.killpg(making.pid, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("build", "one-gpu", "two-gpus"), id="build"),
        pytest.param(("shell", "two-gpus"), id="shell"),
        pytest.param(("record", "two-gpus"), id="record"),
    ],
)
def test_a_name_that_nothing_has_is_answered_in_one_sentence(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.guest", *arguments],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("there is no two-gpus, only ")
    assert len(done.stderr.splitlines()) == 1
