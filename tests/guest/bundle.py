"""What a host without a network is given to install the agent, and the README's commands for it.

    dist/cdi_agent-*.whl   built from this tree
    wheels/                what it depends on, as locked
    systemd/               the project's units and their companions
    install.sh             what the README tells to do with them, word for word
    config.yaml            for /etc/cdi-agent: profiles of the guest's devices

The wheels are those for the guest's Python and C library, whatever Python runs the tests.
"""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Final

from tests.guest import settings
from tests.guest.cache import Cache, key_of

PROJECT: Final = Path(__file__).parents[2]

# Debian 12: Python 3.11, glibc 2.36.
_GUEST_PYTHON: Final = (
    *("--python-version=3.11", "--implementation=cp", "--only-binary=:all:"),
    *("--platform=manylinux_2_28_x86_64", "--platform=manylinux_2_17_x86_64"),
)


def make(cache: Cache, folder: Path) -> str:
    """Fill a folder with the bundle; return the key of what is in it.

    Raises:
        CannotRunError: The wheels are not cached, and cannot be fetched.
    """
    key = key_of(PROJECT / "requirements.lock", *_GUEST_PYTHON)
    shutil.copytree(cache.get("wheels", key, _download), folder / "wheels")
    _build_wheel(folder / "dist")
    shutil.copytree(PROJECT / "systemd", folder / "systemd")
    (folder / "install.sh").write_text(install_script((PROJECT / "README.md").read_text()))
    shutil.copy(Path(__file__).parent / "config.yaml", folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return key_of(*(part for path in files for part in (str(path.relative_to(folder)), path)))


def install_script(readme: str) -> str:
    """The README's commands for an installation without make, as a script that stops at a failure.

    Raises:
        ValueError: The README has no such commands, or they are spread over several blocks.
    """
    blocks = re.findall(r"^```\w*\n(.*?)^```$", readme, flags=re.MULTILINE | re.DOTALL)
    ours = [block for block in blocks if "python3 -m venv /opt/cdi-agent" in block]
    if len(ours) != 1:
        raise ValueError(f"the README has {len(ours)} blocks that install the agent, not one")
    return f"set -eux\n{ours[0]}"


def _download(folder: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet")
    lock = ("--require-hashes", "--no-deps", "-r", str(PROJECT / "requirements.lock"))
    try:
        settings.run_logged([*pip, *_GUEST_PYTHON, *lock, "--dest", str(folder)])
    except RuntimeError as error:
        raise settings.CannotRunError(f"the agent's dependencies cannot be had: {error}") from error


def _build_wheel(folder: Path) -> None:
    build = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder))
    # The same sources give the same bytes, so that a layer is made again only when they change.
    settings.run_logged(
        [*build, str(PROJECT)], env=os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    )
