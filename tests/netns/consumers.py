"""What uses what the agent makes, on a private host: container engines and Prometheus."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.netns.mischief import Mischief


class Ended(NamedTuple):
    """How a program ended."""

    status: int
    output: str
    errors: str


def ended(*argv: str, text: str | None = None) -> Ended:
    """Run a program to its end."""
    result = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    return Ended(result.returncode, result.stdout, result.stderr)


class Consumers(Mischief):
    """Runs them."""

    # --- containers -------------------------------------------------------------------------------

    def podman(self, devices: Sequence[str], *command: str) -> Ended:
        """Run a command in a container that is given CDI devices."""
        return ended(
            *self.podman_run(),
            "--network=none",
            *(f"--device={device}" for device in devices),
            *("--rootfs", f"{self._root_of_containers()}:O"),
            *command,
        )

    def podman_run(self) -> tuple[str, ...]:
        """The command that runs a container here, up to its own options."""
        place = "/run/podman"  # podman wants a short one
        return (
            "podman",
            *(f"--root={place}/root", f"--runroot={place}/run", f"--tmpdir={place}/tmp"),
            *("--storage-driver=vfs", "--cgroup-manager=cgroupfs", "--events-backend=file"),
            *("--log-level=error", "--runtime=crun"),
            *("run", "--rm", "--cgroups=disabled"),
            # The default ones are above what may be set here.
            *("--ulimit=nofile=20000:20000", "--ulimit=nproc=1000:1000"),
        )

    def _root_of_containers(self) -> str:
        root = self._folder / "rootfs"
        if not root.exists():
            busybox = shutil.which("busybox")
            assert busybox is not None
            for name in ("bin", "dev", "proc", "sys", "etc", "tmp", "run"):
                (root / name).mkdir(parents=True)
            shutil.copy(busybox, root / "bin/busybox")
            for name in ("sh", "ls", "stat", "find"):
                (root / "bin" / name).symlink_to("busybox")
        return str(root)

    def root_of_an_image(self) -> str:
        """A tree that needs nothing but this machine's /usr to run its programs."""
        root = self._folder / "image"
        if not root.exists():
            for name in ("dev", "etc", "proc", "run", "sys", "tmp", "usr", "var/lib/cdi-agent"):
                (root / name).mkdir(parents=True)
            (root / "var/run").symlink_to("/run")
            for name in ("bin", "lib", "lib32", "lib64", "libx32", "sbin"):
                if Path("/", name).is_symlink():
                    (root / name).symlink_to(Path("/", name).readlink())
            for name in ("ld.so.cache", "passwd"):
                shutil.copy(f"/etc/{name}", root / "etc" / name)
        return str(root)

    # --- Prometheus -------------------------------------------------------------------------------

    def promtool(self, metrics: str) -> Ended:
        """What promtool says about metrics."""
        return ended("promtool", "check", "metrics", text=metrics)

    def start_prometheus(self, target: str) -> None:
        """Let it scrape a target every second, until this host ends."""
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "agent", "static_configs": [{"targets": [target]}]}],
        }
        file = Path(self._folder, "prometheus.yaml")
        file.write_text(yaml.safe_dump(config))
        with open(self._folder / "prometheus.log", "wb") as log:
            subprocess.Popen(
                [
                    "prometheus",
                    *(f"--config.file={file}", f"--storage.tsdb.path={self._folder}/tsdb"),
                    "--web.listen-address=127.0.0.1:9090",
                ],
                env={"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
