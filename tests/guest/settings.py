"""What the rig takes from this machine, and how it says what the machine lacks.

From the environment:

- CDI_AGENT_GUEST_CACHE: where image and frozen guests are kept (`cache.default_root`).
- CDI_AGENT_GUEST_MIRROR: the Debian mirror to install from, if not the one that apt uses.
- CDI_AGENT_GUEST_EVIDENCE: where a failed test's journal is put, if not in pytest's temp folder.
- CDI_AGENT_GUEST_ALL: run also what a usual run leaves out for its time.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

ALL: Final = bool(os.environ.get("CDI_AGENT_GUEST_ALL"))
"""Whether to leave nothing out."""

ALONE: Final = (
    *("setpriv", "--pdeathsig=KILL"),
    *("unshare", "--mount", "--mount-proc", "--pid", "--kill-child"),
)
"""Before a command of root's: what it mounts and starts ends with it, however it ends, and it with
the thread that started it. A mount that stayed below a folder that is then removed would take the
host's /sys along.
"""


class CannotRunError(Exception):
    """This machine cannot build or run a guest; the text says what it lacks.

    At home that is a skip, in CI a failure (conftest).
    """


def program(name: str) -> str:
    """The full path of a program, also of those in the folders that only root searches.

    Raises:
        CannotRunError: It is not installed.
    """
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    if found := shutil.which(name, path=path):
        return found
    raise CannotRunError(f"{name} is not installed")


def require_root() -> None:
    """Raise CannotRunError without root: the image's files belong to root and have device nodes."""
    if os.geteuid() != 0:
        raise CannotRunError("building the guest's image needs root")


def mirror(suite: str) -> str:
    """The Debian mirror to install from: the one this machine's apt uses for Debian.

    Raises:
        CannotRunError: apt knows none, and CDI_AGENT_GUEST_MIRROR is not set.
    """
    if chosen := os.environ.get("CDI_AGENT_GUEST_MIRROR"):
        return chosen
    listing = subprocess.run(
        [program("apt-get"), "indextargets", "--format", "$(ORIGIN) $(LABEL) $(SITE)"],
        check=False,
        capture_output=True,
        text=True,
    )
    for line in listing.stdout.splitlines():
        origin, label, site = line.split(" ", 2)
        if origin == label == "Debian":
            return site
    raise CannotRunError(
        f"apt uses no Debian mirror here: set CDI_AGENT_GUEST_MIRROR to one that has {suite}"
    )


def run_logged(argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run a long step quietly, and raise with the end of what it said if it fails.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        end = "\n".join(done.stdout.splitlines()[-30:])
        raise RuntimeError(f"{argv[0]} ended with {done.returncode}:\n{end}")
