"""A real container engine decides whether what is published for each captured host can be used."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from agent.cdi.desired import Policy, desired
from agent.cdi.files import file_name
from agent.cdi.parse import parse
from agent.cdi.profile import HookEdit, Profile
from agent.cdi.profiles import load_builtin
from agent.cdi.render import Suffix
from agent.cdi.spec import Spec
from agent.host import capture
from tests.cdi.worlds import sheets
from tests.conftest import IN_CI
from tests.netns.consumers import Ended
from tests.netns.outside import PrivateHost, UnusableError

pytestmark = pytest.mark.podman

HERE = Path(__file__).parent
HOSTS = sorted(HERE.glob("*.yaml"))
LIST: Final = ("find", "/dev", "-type", "c", "-exec", "stat", "-c", "%n %t:%T %a", "{}", ";")
ENGINES_OWN: Final = re.compile(r"/dev/(null|zero|full|random|urandom|tty|console|ptmx|pts/.*)")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateHost]:
    """A host on which no agent runs, for one captured host after another."""
    try:
        host = PrivateHost(tmp_path_factory.mktemp("consumer"))
    except UnusableError as error:
        reason = f"no private host can be made here: {error}"
        if IN_CI:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with host:
        yield host


def golden_specs(path: Path) -> dict[str, str]:
    """The spec files in a golden file."""
    text = path.with_suffix(".golden").read_text()
    parts = re.split(r"^==> (.+) <==\n", text, flags=re.MULTILINE)[1:]
    return {
        name: body for name, body in zip(parts[::2], parts[1::2], strict=True) if ".yaml" in name
    }


def numbers(host: capture.Capture) -> dict[str, tuple[int, int]]:
    """Every node of a captured host."""
    inventory = host.inventory()
    nodes = [node for function in inventory.functions.values() for node in function.nodes]
    return {
        node.path: (node.number[0], node.number[1])
        for node in (*nodes, *inventory.shared.values())
        if node.number is not None
    }


def expected(
    specs: Mapping[str, Spec], known: Mapping[str, tuple[int, int]], *, of_all: bool
) -> tuple[list[str], dict[str, str]]:
    """What to ask for, and what a container should see of it: path to number and mode."""
    devices = [
        (f"{spec.kind}={device.name}", device)
        for spec in specs.values()
        for device in spec.devices
        if (device.name == "all") is of_all
    ]
    nodes = {
        node.path: "{:x}:{:x} {:o}".format(*known[node.path], node.file_mode or 0)
        for _, device in devices
        for node in device.edits.device_nodes
    }
    return [name for name, _ in devices], nodes


def seen(ended: Ended) -> dict[str, str]:
    """The nodes that a container found, without those that the engine always makes."""
    assert ended.status == 0, ended.errors
    lines = (line.split(" ", 1) for line in ended.output.splitlines())
    return {path: rest for path, rest in lines if not ENGINES_OWN.fullmatch(path)}


@pytest.mark.parametrize("path", HOSTS, ids=lambda path: path.stem)
def test_a_container_gets_what_the_specs_of_a_captured_host_give(
    place: PrivateHost, path: Path
) -> None:
    texts = golden_specs(path)
    known = numbers(capture.load(path))
    place.inside.put(texts, known)
    specs = {name: parse(text.encode()) for name, text in texts.items()}
    for of_all in (False, True):
        devices, nodes = expected(specs, known, of_all=of_all)
        if devices:
            assert seen(place.inside.podman(devices, *LIST)) == nodes


def everything(status: int) -> tuple[Profile, ...]:
    """A profile for Intel's GPUs with all that this engine takes, and a hook that ends so."""
    (own,) = (each for each in load_builtin() if each.name == "intel-gpu")
    # A hook is given the container's state, and has to read it.
    script = f"cat > /dev/null; exit {status}"
    hook = HookEdit(hook_name="createRuntime", path="/bin/sh", args=("sh", "-c", script), timeout=5)
    return (
        Profile(
            name=own.name,
            match=own.match,
            kind=own.kind,
            nodes=own.nodes,
            links=True,
            env=("WHO=cdi agent: yes",),
            hooks=(hook,),
        ),
    )


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_container_gets_links_environment_and_hooks(place: PrivateHost, suffix: Suffix) -> None:
    """By-path links are mounts: a link to a node is refused as a node, but can be mounted."""
    host = capture.load(HERE / "intel-arc-b50.yaml")
    known = numbers(host)
    links = {
        link.path: link.target
        for function in host.inventory().functions.values()
        for link in function.links
    }
    assert len(links) == 2

    def run(status: int, *command: str) -> Ended:
        """Run a command with the GPU, after a hook that ends with this status."""
        wanted = desired(host.inventory(), everything(status), (), Policy())
        (sheet,) = sheets(wanted.offers, suffix=suffix).values()
        spec = sheet.spec
        place.inside.put({file_name(spec.kind, suffix): sheet.content.decode()}, known)
        place.inside.link(links)
        return place.inside.podman([f"{spec.kind}={spec.devices[0].name}"], *command)

    found = seen(run(0, *LIST))
    for path, target in links.items():
        assert found[path].split(" ")[0] == "{:x}:{:x}".format(*known[target])
    assert run(0, "sh", "-c", "echo $WHO").output == "cdi agent: yes\n"
    assert run(3, "true").status != 0
