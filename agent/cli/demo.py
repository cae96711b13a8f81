"""``cdi-agent demo``: the fault that started it, and how it ends, on a simulated host.

Everything but the kernel is real: the reconciler, the profiles, the store and its files. The
kernel is `agent.simulate`'s, which answers writes and sends its messages in the recorded order.
"""

import asyncio
import contextlib
import logging
import shutil
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final

import click
import msgspec
import structlog

from agent import compose, config
from agent.cli.generate import diff_lines
from agent.reconcile.messages import Inbox, Stop
from agent.reconcile.reconciler import Reconciler
from agent.reconcile.state import PassReport, State
from agent.simulate import Kernel, Uevent, hint_of, stat_plain
from agent.simulate.host import arc_b50, arc_b60

B50: Final = "0000:03:00.0"
B60: Final = "0000:07:00.0"
PATIENCE: Final = 10.0
"""Seconds after which a scene that has not come to its end is a failure."""

WIDTH: Final = 80
"""Columns of text at most; where the terminal has fewer, as many as it has."""


class Scene(msgspec.Struct, frozen=True):
    """Something that happens to the host, and what is published when the agent has followed."""

    text: str
    happens: Callable[[Kernel], object]
    published: frozenset[tuple[str, str]]
    """Kinds and addresses."""


SCENES: Final = (
    Scene(
        "The GPU comes up with its own driver, xe. Its nodes exist, udev has dealt with them, and "
        "nothing has changed for 50 ms: it is published.",
        lambda kernel: kernel.plug(*arc_b50(B50)),
        frozenset({("intel.com/gpu", B50)}),
    ),
    Scene(
        "An administrator gives the only GPU to a virtual machine:\n"
        f"   # echo vfio-pci > /sys/bus/pci/devices/{B50}/driver_override\n"
        f"   # echo {B50} > /sys/bus/pci/devices/{B50}/driver/unbind\n"
        f"   # echo {B50} > /sys/bus/pci/drivers_probe\n"
        "Its DRM nodes vanish, and a spec without devices is invalid: so the file is deleted, at "
        "once. When the VFIO node is ready, the device is published in the VFIO kind.",
        lambda kernel: kernel.move(B50, "vfio-pci"),
        frozenset({("intel.com/gpu-vfio", B50)}),
    ),
    Scene(
        "And back: the VFIO kind's file goes, the GPU's file returns.",
        lambda kernel: kernel.move(B50, "xe"),
        frozenset({("intel.com/gpu", B50)}),
    ),
    Scene(
        "A second GPU is plugged in, an Arc Pro B60.",
        lambda kernel: kernel.plug(*arc_b60(B60)),
        frozenset({("intel.com/gpu", B50), ("intel.com/gpu", B60)}),
    ),
    Scene(
        "And pulled out again. Its entry goes; the first GPU's stays as it was.",
        lambda kernel: kernel.unplug(B60),
        frozenset({("intel.com/gpu", B50)}),
    ),
)


@click.command("demo")
@click.option(
    "--pause",
    type=click.FloatRange(0, 60),
    default=1.0,
    show_default=True,
    help="Seconds before each scene, for reading.",
)
def command(pause: float) -> None:
    """Watch the agent at work on a simulated host; needs no GPU and no root."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory(prefix="cdi-agent-demo-") as folder:
        asyncio.run(_play(Path(folder), pause))


async def _play(folder: Path, pause: float) -> None:
    async with _stage(folder) as stage:
        stage.say(
            "A simulated host with one Intel Arc Pro B50, and the real agent. The files are those "
            "that podman, docker, containerd and CRI-O read. In brackets: how long after the "
            "kernel's message a file was written or deleted."
        )
        for number, scene in enumerate(SCENES, 1):
            await asyncio.sleep(pause if number > 1 else 0)
            await stage.play(number, scene)
        stage.say("That is all; the simulated host is gone again.")


class _Stage:
    """The simulated host, the agent on it, and the audience."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.specs = folder / "var/run/cdi"
        self.inbox = Inbox()
        self.reports: asyncio.Queue[tuple[PassReport, State]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def heard(event: Uevent) -> None:
            loop.call_soon_threadsafe(self.inbox.hint, hint_of(event, time.monotonic()))

        self.kernel = Kernel(folder / "host", heard)
        default = config.Config()
        settings = msgspec.structs.replace(
            default,
            state_directory=str(folder / "state"),
            host=msgspec.structs.replace(
                default.host, **{name: str(folder / "host" / name) for name in _ROOTS}
            ),
            cdi=msgspec.structs.replace(
                default.cdi,
                directory=str(self.specs),
                other_directories=(),
                # The GPU's management interface is a kind of its own; here it would double
                # every file.
                profiles=({"name": "intel-gpu-mei", "enabled": False},),
            ),
        )
        parts = compose.parts(settings, stat_node=stat_plain)
        self.reconciler = Reconciler(
            inbox=self.inbox,
            scanner=parts.scanner,
            store=parts.store,
            rules=parts.rules,
            on_pass=lambda report, state: self.reports.put_nowait((report, state)),
        )

    def say(self, text: str) -> None:
        """Tell the audience something; what is indented is a command, and stays in one line."""
        width = min(WIDTH, shutil.get_terminal_size().columns)
        click.echo()
        for paragraph in text.splitlines():
            is_command = paragraph.startswith(" ")
            click.secho(paragraph if is_command else textwrap.fill(paragraph, width), bold=True)

    async def play(self, number: int, scene: Scene) -> None:
        """Let something happen, wait until the agent has dealt with it, and show what it did."""
        self.say(f"{number}. {scene.text}")
        before = await asyncio.to_thread(self._files)
        await asyncio.to_thread(scene.happens, self.kernel)
        try:
            async with asyncio.timeout(PATIENCE):
                await self._follow(scene.published)
        except TimeoutError:
            raise click.ClickException(f"scene {number} did not come to its end") from None
        self._show(before, await asyncio.to_thread(self._files))

    async def _follow(self, expected: frozenset[tuple[str, str]]) -> None:
        """Report each pass that did something, until the expected devices are published."""
        while True:
            report, state = await self.reports.get()
            for _, path in report.deleted:
                self._timing(f"deleted {self._shown(path)}", report.withdraw_latency)
            published_in = max(report.publish_latencies, default=report.withdraw_latency)
            for _, path in report.wrote:
                self._timing(f"wrote   {self._shown(path)}", published_in)
            published = {(str(kind), str(address)) for kind, address in state.published}
            if published == expected:
                return

    def _timing(self, what: str, latency: float | None) -> None:
        after = "" if latency is None else f" ({latency * 1000:.1f} ms)"
        click.echo(f"   {what}{click.style(after, fg='cyan')}")

    def _shown(self, path: str) -> str:
        return "/" + str(Path(path).relative_to(self.folder))

    def _files(self) -> Mapping[str, bytes]:
        found = {}
        for path in sorted(self.specs.glob("*.yaml")):
            with contextlib.suppress(FileNotFoundError):
                found[self._shown(str(path))] = path.read_bytes()
        return found

    def _show(self, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
        colours = {"+": "green", "-": "red", "@": "cyan"}
        for path in sorted({*before, *after}):
            for line in diff_lines(path, before.get(path), after.get(path)):
                click.secho(f"   {line}", fg=colours.get(line[:1]))


_ROOTS = ("sys", "dev", "run", "proc")


@contextlib.asynccontextmanager
async def _stage(folder: Path) -> AsyncIterator[_Stage]:
    """Set the stage, and clear it whatever happens."""
    stage = _Stage(folder)
    running = asyncio.create_task(stage.reconciler.run())
    try:
        yield stage
    finally:
        stage.inbox.order(Stop())
        await running
