"""The units: systemd understands them, they order what they promise, and they are tight."""

import configparser
import os
import re
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.control.settings import ControlSettings, MetricsSettings

UNITS = Path(__file__).parents[2] / "systemd"
SERVICE = "cdi-agent.service"
SOCKETS_OF_OURS = {
    "cdi-agent-metrics.socket": ("metrics", MetricsSettings().listen),
    "cdi-agent-control.socket": ("control", ControlSettings().socket),
}

# How the units that come after ours are ordered themselves: what their packages say, without what
# has nothing to do with the order. Each is wanted by multi-user.target.
ENGINES: Mapping[str, str] = {
    "containerd.service": "After=network.target dbus.service",
    "docker.service": (
        "After=network-online.target docker.socket firewalld.service containerd.service "
        "time-set.target\nWants=network-online.target containerd.service\nRequires=docker.socket"
    ),
    "crio.service": "Before=kubelet.service\nWants=network-online.target\n"
    "After=network-online.target",
    "kubelet.service": "Wants=network-online.target\nAfter=network-online.target",
    "k3s.service": "Wants=network-online.target\nAfter=network-online.target",
    "podman.service": "Requires=podman.socket\nAfter=podman.socket",
    "podman-restart.service": "Wants=network-online.target\nAfter=network-online.target",
    "libvirtd.service": (
        "Requires=virtlogd.socket\nWants=systemd-machined.service\nBefore=libvirt-guests.service\n"
        "After=network.target dbus.service apparmor.service remote-fs.target systemd-logind.service"
    ),
    "virtqemud.service": "After=network.target dbus.service apparmor.service remote-fs.target "
    "systemd-logind.service\nBefore=libvirt-guests.service",
}
SOCKETS = ("docker.socket", "podman.socket", "virtlogd.socket")


class Unit(configparser.RawConfigParser):
    """A unit file; a key that is given several times keeps all its values, one a line."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, interpolation=None, delimiters=("=",))
        self.optionxform = str  # type: ignore[assignment, method-assign]
        seen: dict[str, dict[str, list[str]]] = {}
        section = ""
        for line in path.read_text().splitlines():
            if match := re.fullmatch(r"\[(\w+)\]", line):
                section = match[1]
                seen.setdefault(section, {})
            elif line and not line.startswith("#"):
                key, _, value = line.partition("=")
                seen[section].setdefault(key, []).append(value)
        self.read_dict(
            {name: {key: "\n".join(v) for key, v in keys.items()} for name, keys in seen.items()}
        )


def seconds(text: str) -> float:
    """A time span of one number, in seconds unless it has a unit of its own."""
    assert text.isdecimal(), f"{text}: this test reads plain seconds"
    return float(text)


@pytest.fixture(scope="module")
def service() -> Unit:
    return Unit(UNITS / SERVICE)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units as installed, with a program that exists, among the stubs of a host's others."""
    for name in (SERVICE, *SOCKETS_OF_OURS):
        text = (UNITS / name).read_text().replace("/opt/cdi-agent/bin/cdi-agent", "/bin/true")
        (tmp_path / name).write_text(text)
    for name, ordering in ENGINES.items():
        (tmp_path / name).write_text(f"[Unit]\n{ordering}\n[Service]\nExecStart=/bin/true\n")
    for name in SOCKETS:
        (tmp_path / name).write_text(
            f"[Socket]\nListenStream=/run/{name}\nService={name.replace('socket', 'service')}\n"
        )
    (tmp_path / "virtlogd.service").write_text("[Service]\nExecStart=/bin/true\n")
    wants = " ".join((*ENGINES, SERVICE, *SOCKETS_OF_OURS))
    (tmp_path / "multi-user.target").write_text(
        f"[Unit]\nRequires=basic.target\nAfter=basic.target\nWants={wants}\n"
    )
    return tmp_path


def verify(folder: Path, unit: str) -> tuple[int, str]:
    """What `systemd-analyze verify` says about a unit among those of a folder and the system."""
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    # What it says about units of the machine that the tests run on is not about ours.
    ours = [line for line in said.splitlines() if "cdi-agent" in line or "cycle" in line]
    return done.returncode, "\n".join(ours)


@pytest.mark.systemd
@pytest.mark.parametrize("unit", [SERVICE, *SOCKETS_OF_OURS])
def test_systemd_understands_the_units(installed: Path, unit: str) -> None:
    assert verify(installed, unit) == (0, "")


@pytest.mark.systemd
def test_a_mistake_in_a_unit_would_be_seen(installed: Path) -> None:
    path = installed / SERVICE
    path.write_text(path.read_text().replace("ProtectSystem=strict", "ProtectSytem=strict"))
    assert "ProtectSytem" in verify(installed, SERVICE)[1]


@pytest.mark.systemd
def test_the_boot_of_a_host_with_every_engine_has_no_ordering_cycle(installed: Path) -> None:
    assert verify(installed, "multi-user.target")[1] == ""


@pytest.mark.systemd
@pytest.mark.parametrize("late", ["multi-user.target", "network-online.target docker.service"])
def test_a_cycle_would_be_seen(installed: Path, late: str) -> None:
    path = installed / SERVICE
    path.write_text(path.read_text().replace("\nAfter=", f"\nAfter={late} ", 1))
    assert "ordering cycle" in verify(installed, "multi-user.target")[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_it_starts_before(service: Unit, engine: str) -> None:
    assert engine in service["Unit"]["Before"].split()


def test_it_waits_for_udev_and_for_nothing_that_may_never_come(service: Unit) -> None:
    after = service["Unit"]["After"].split()
    sockets = ["cdi-agent-metrics.socket", "cdi-agent-control.socket"]
    assert after == ["systemd-udevd.service", "systemd-udev-trigger.service", *sockets]
    assert service["Unit"]["Wants"].split() == sockets
    for key in ("Requires", "Requisite", "BindsTo"):
        assert key not in service["Unit"], "it runs whatever else does"
    assert not [key for key in service["Unit"] if key.startswith(("Condition", "Assert"))], (
        "a host without a GPU is healthy"
    )


def test_it_is_never_given_up(service: Unit) -> None:
    assert service["Unit"]["StartLimitIntervalSec"] == "0"
    assert service["Service"]["Restart"] == "always"
    assert "RestartPreventExitStatus" not in service["Service"]
    assert seconds(service["Service"]["RestartSec"]) >= 1


def test_systemd_is_told_and_watches(service: Unit) -> None:
    assert service["Service"]["Type"] == "notify"
    assert seconds(service["Service"]["WatchdogSec"]) >= 10
    assert service["Service"]["KillMode"] == "mixed"
    assert "HUP" in service["Service"]["ExecReload"]


@pytest.mark.systemd
def test_its_exposure_is_at_most_2_0(installed: Path) -> None:
    """The bound that was agreed on is 2.1; what is reached is held."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=20", SERVICE],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{installed}:"},
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
    )
    level = re.search(r"exposure level for cdi-agent\.service: ([0-9.]+)", done.stdout)
    assert level is not None, done.stdout + done.stderr
    assert float(level[1]) <= 2.0
    assert done.returncode == 0


def test_it_hears_the_kernel_and_can_say_so(service: Unit) -> None:
    """What must stay allowed: own namespaces or no netlink would make it deaf, silently."""
    section = service["Service"]
    assert section["PrivateNetwork"] == "no"
    assert section["PrivateDevices"] == "no"
    assert {"AF_UNIX", "AF_NETLINK"} <= set(section["RestrictAddressFamilies"].split())
    assert "PrivateUsers" not in section


def test_specs_outlive_the_service_and_a_missing_folder_does_not_stop_it(service: Unit) -> None:
    section = service["Service"]
    kept = {"RuntimeDirectory", "StateDirectory", "CacheDirectory"}
    assert all(section[key] == "cdi-agent" for key in kept & section.keys())
    for path in section["ReadWritePaths"].split():
        assert path.startswith("-/"), f"{path}: if it is missing the unit fails with 226/NAMESPACE"
    assert "-/run/cdi" in section["ReadWritePaths"].split()
    assert "/run/cdi" in section["ExecStartPre"].split()


@pytest.mark.parametrize("unit", SOCKETS_OF_OURS)
def test_a_socket_is_the_one_that_the_agent_would_open(unit: str) -> None:
    name, address = SOCKETS_OF_OURS[unit]
    socket = Unit(UNITS / unit)["Socket"]
    assert socket["ListenStream"] == address
    assert socket["FileDescriptorName"] == name
    assert socket["Service"] == SERVICE


def test_only_root_gives_orders_unless_somebody_says_otherwise() -> None:
    socket = Unit(UNITS / "cdi-agent-control.socket")["Socket"]
    assert socket["SocketMode"] == "0660"
    assert "SocketGroup" not in socket


def test_the_control_socket_is_there_while_the_service_is_not(service: Unit) -> None:
    """It lies in the service's runtime directory, which systemd would empty."""
    assert service["Service"]["RuntimeDirectoryPreserve"] == "yes"


def test_claims_have_what_they_need_and_no_more(service: Unit) -> None:
    section = service["Service"]
    needed = {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"}
    assert set(section["CapabilityBoundingSet"].split()) == needed
    assert section["ProtectKernelTunables"] == "no", "it writes to /sys"
    assert "CDI_AGENT_BOOT_ID=%b" in section["Environment"].splitlines()


@pytest.mark.systemd
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the folder belongs to root")
def test_the_spec_folder_is_made_at_boot_and_again_if_it_is_gone(tmp_path: Path) -> None:
    conf = UNITS / "cdi-agent.tmpfiles.conf"
    for _ in range(2):
        subprocess.run(
            ["systemd-tmpfiles", "--create", f"--root={tmp_path}", "-"],
            input=conf.read_text(),
            text=True,
            check=True,
        )
        folder = tmp_path / "run" / "cdi"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
        (folder / "somebody-elses.yaml").touch()
        subprocess.run(
            ["systemd-tmpfiles", "--clean", f"--root={tmp_path}", "-"],
            input=conf.read_text(),
            text=True,
            check=True,
        )
        assert (folder / "somebody-elses.yaml").exists()
        (folder / "somebody-elses.yaml").unlink()
        folder.rmdir()
