"""The guest's image: what Debian 12 installs, and the few changes that let it boot in ten seconds.

    tree/        / as a folder
    vmlinux      the kernel, uncompressed               } see bootfiles
    initrd       busybox and the modules that / needs   }
    kernel       the kernel's release, as text

Needs root, mmdebstrap, and the Debian mirror that this machine's apt already uses (or
CDI_AGENT_GUEST_MIRROR).
"""

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.guest import bootfiles, settings
from tests.guest.cache import Cache, key_of

INSIDE: Final = Path(__file__).parent / "inside"

SUITE: Final = "bookworm"

PACKAGES: Final = (
    # what the agent and its installation need of a Debian host
    *("linux-image-amd64", "systemd", "systemd-sysv", "udev", "libudev1", "kmod", "dbus"),
    *("python3", "python3-venv"),
    # who reads the specs: podman, and an independent reader of YAML for the witness in `inside/`
    *("podman", "crun", "netavark", "python3-yaml"),
    # what the scenarios look and ask with
    *("pciutils", "procps", "curl"),
    # the initrd's only program, and the only program of the scenarios' container
    "busybox-static",
)

_NOT_UNPACKED: Final = (
    *("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*"),
    # drivers of hardware that QEMU is not asked to have: half of the image and of depmod's time
    *(
        f"/lib/modules/*/kernel/{folder}/*"
        for folder in (
            *("sound", "drivers/media", "drivers/infiniband", "drivers/scsi", "drivers/staging"),
            *("drivers/net/ethernet", "drivers/net/wireless", "drivers/usb", "drivers/hwmon"),
            *("drivers/iio", "drivers/input", "drivers/mtd", "drivers/hid", "drivers/isdn"),
            *("drivers/gpu/drm/amd", "drivers/gpu/drm/radeon", "drivers/gpu/drm/nouveau"),
            *("drivers/gpu/drm/i915", "drivers/gpu/drm/gma500", "drivers/ata"),
        )
    ),
)

_SKIP: Final = (
    'mkdir -p "$1/etc/dpkg/dpkg.cfg.d" && printf "path-exclude=%s\\n" '
    f'{shlex.join(_NOT_UNPACKED)} >"$1/etc/dpkg/dpkg.cfg.d/rig"'
)

# Not needed by any test, and slow or noisy under emulation.
_NOT_LOADED: Final = (*("pcspkr", "iTCO_wdt", "i2c_i801", "lpc_ich", "qemu_fw_cfg", "powernow_k8"),)

_MASKED: Final = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "fstrim.timer"),
    *("e2scrub_all.timer", "e2scrub_reap.service", "podman-auto-update.timer"),
    *("podman-auto-update.service", "podman.service", "podman.socket"),
    *("systemd-pstore.service", "systemd-random-seed.service", "systemd-binfmt.service"),
    *("systemd-update-utmp.service", "systemd-update-utmp-runlevel.service"),
    *("systemd-machine-id-commit.service", "systemd-firstboot.service"),
    *("systemd-sysusers.service", "systemd-hwdb-update.service", "systemd-repart.service"),
    *("systemd-pcrphase.service", "systemd-pcrphase-sysinit.service"),
    *("systemd-ask-password-wall.path", "systemd-ask-password-console.path"),
    *("getty@tty1.service", "getty-static.service", "console-getty.service"),
    *("serial-getty@ttyS0.service", "systemd-remount-fs.service", "dev-hugepages.mount"),
    *("dev-mqueue.mount", "proc-sys-fs-binfmt_misc.automount", "sys-kernel-tracing.mount"),
    *("sys-fs-fuse-connections.mount", "sys-kernel-config.mount", "modprobe@configfs.service"),
    *(
        "modprobe@dm_mod.service",
        "modprobe@drm.service",
        "modprobe@fuse.service",
        "modprobe@loop.service",
    ),
    *("modprobe@efi_pstore.service", "remote-fs.target"),
    *("systemd-logind.service", "systemd-user-sessions.service"),
)

# There for a scenario to start; alone it would take half of the boot.
_DISABLED: Final = ("podman-restart.service",)

# Baked in rather than copied later: they run before the rig can say anything.
_PROGRAMS: Final = {"rig_channel.py": "rig-channel", "rig_uevents.py": "rig-uevents"}
_UNITS: Final = ("rig-channel.service", "rig-uevents.service", "containerd.service")

_FILES: Final = {
    "etc/hostname": "guest\n",
    "etc/hosts": "127.0.0.1 localhost guest\n",
    "etc/fstab": "",  # the initrd mounts /
    "etc/machine-id": "0123456789abcdef0123456789abcdef\n",  # set: no first-boot work
    "etc/modprobe.d/rig.conf": "".join(f"blacklist {module}\n" for module in _NOT_LOADED),
    "etc/systemd/journald.conf.d/rig.conf": (
        # All of it is evidence: nothing dropped, and nothing on the disk that a kill could tear.
        "[Journal]\nStorage=volatile\nRateLimitBurst=0\nRuntimeMaxUse=200M\n"
    ),
}


@dataclass(frozen=True, slots=True)
class Image:
    """A finished image; its files are only ever read."""

    folder: Path

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinux"

    @property
    def initrd(self) -> Path:
        return self.folder / "initrd"

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def release(self) -> str:
        """The kernel's release, as `uname -r` says it in the guest."""
        return (self.folder / "kernel").read_text().strip()


def recipe_key() -> str:
    """Hash everything that decides what is in the image, apart from the mirror's state."""
    own = (Path(__file__), Path(bootfiles.__file__))
    return key_of(*own, *(INSIDE / name for name in (*_PROGRAMS, *_UNITS)))


def get(cache: Cache) -> Image:
    """The image, built if the recipe has changed since it last was (about a minute)."""
    return Image(cache.get("image", recipe_key(), build))


def build(folder: Path) -> None:
    """Build the image into an empty folder.

    Raises:
        CannotRunError: This machine lacks a program, root, or a mirror.
    """
    settings.require_root()
    mmdebstrap = settings.program("mmdebstrap")
    tree = folder / "tree"
    options = ("--mode=root", "--variant=minbase", "--format=directory", "--quiet")
    settings.run_logged(
        [
            *(*settings.ALONE, mmdebstrap, *options, f"--include={','.join(PACKAGES)}"),
            *('--aptopt=APT::Install-Recommends "false"', "--dpkgopt=force-unsafe-io"),
            # Not by --dpkgopt: then mmdebstrap filters the first packages itself, which takes 9 s.
            f"--setup-hook={_SKIP}",
            *(SUITE, str(tree), settings.mirror(SUITE)),
        ],
        # The guest boots its own initrd: the package's hook is told not to make Debian's.
        env=os.environ | {"INITRD": "No", "LC_ALL": "C.UTF-8"},
    )
    _configure(tree)
    (vmlinuz,) = (tree / "boot").glob("vmlinuz-*")
    (folder / "kernel").write_text(vmlinuz.name.removeprefix("vmlinuz-") + "\n")
    (folder / "vmlinux").write_bytes(bootfiles.uncompressed_kernel(vmlinuz.read_bytes()))
    (folder / "initrd").write_bytes(bootfiles.initrd(tree))


def _configure(tree: Path) -> None:
    for path, text in _FILES.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    units = tree / "etc/systemd/system"
    for source, name in _PROGRAMS.items():
        shutil.copy(INSIDE / source, tree / "usr/local/sbin" / name)
        (tree / "usr/local/sbin" / name).chmod(0o755)
    for name in _UNITS:
        shutil.copy(INSIDE / name, units / name)
        (units / name).chmod(0o644)
    for name in _MASKED:
        unit = units / name
        unit.unlink(missing_ok=True)
        unit.symlink_to("/dev/null")
    for arguments in (
        ("set-default", "multi-user.target"),
        ("enable", *_UNITS),
        ("disable", *_DISABLED),
    ):
        settings.run_logged(["chroot", str(tree), "systemctl", "--quiet", *arguments])
    # Passwordless on purpose: this guest has no network, and a person may want a shell.
    shadow = tree / "etc/shadow"
    shadow.write_text(shadow.read_text().replace("root:*:", "root::", 1))
