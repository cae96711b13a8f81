"""The shapes that a claim can have: what is claimed, on which host, and what has to come of it."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from agent.simulate import Features, Hardware
from agent.simulate.host import apu, arc_b50, arc_b60, arc_with_audio, two_functions
from tests.claims.host import DRIVERS, ClaimHost, Settings

B50: Final = "0000:03:00.0"
B60: Final = "0000:07:00.0"
VF: Final = "0000:03:00.1"
A4000: Final = "0000:05:00.0"
A4000_AUDIO: Final = "0000:05:00.1"
A770_AUDIO: Final = "0000:04:00.0"
APU: Final = "0000:e5:00.0"

NAME: Final = "0000-03-00-0-0xe212"
VFIO_NAME: Final = f"intel.com/gpu-vfio={NAME}"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A claim."""

    name: str
    hardware: tuple[Hardware, ...]
    devices: tuple[str, ...]
    names: tuple[str, ...]
    """What it is answered with."""
    moves: Mapping[str, str]
    """The functions that it moves, and the driver that each is given."""
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else is asked for."""
    before: Callable[[ClaimHost], object] = lambda _host: None
    """What an administrator has done before the agent starts."""
    drivers: tuple[str, ...] = DRIVERS
    """Those that the kernel has loaded."""

    def make(
        self, make_host: Callable[..., ClaimHost], settings: Settings | None = None
    ) -> ClaimHost:
        """A host for it."""
        features = Features(drivers=self.drivers)
        return make_host(*self.hardware, features=features, settings=settings)

    def start(self, host: ClaimHost) -> None:
        """Let everything be as it is before the claim."""
        self.before(host)
        host.start()

    def prepare(self, host: ClaimHost) -> dict[str, Any]:
        """Claim it."""
        return host.prepare("vm", *self.devices, **self.more)


def _has_variant(host: ClaimHost) -> None:
    """Let the kernel's modules say that there is a better driver for the B50 than vfio-pci."""
    folder = host.folder / "modules" / os.uname().release
    folder.mkdir(parents=True)
    alias = "alias vfio_pci:v00008086d0000E212sv*sd*bc03sc*i* xe_vfio_pci\n"
    (folder / "modules.alias").write_text(alias)
    host.environ["CDI_AGENT_MODULES"] = str(host.folder / "modules")


ONE: Final = Shape("one GPU", arc_b50(), (B50,), (VFIO_NAME,), {B50: "vfio-pci"})
TWO: Final = Shape(
    "two GPUs",
    (*arc_b50(), *arc_b60()),
    (B50, B60),
    (VFIO_NAME, "intel.com/gpu-vfio=0000-07-00-0-0xe211"),
    {B50: "vfio-pci", B60: "vfio-pci"},
)
AUDIO: Final = Shape(
    "a GPU with its audio",
    two_functions(),
    (A4000,),
    ("nvidia.com/gpu-vfio=0000-05-00-0-0x24b0",),
    {A4000: "vfio-pci", A4000_AUDIO: "vfio-pci"},
)
NAMED: Final = Shape(
    "a GPU with audio in another slot, by name",
    arc_with_audio(),
    (B50,),
    ("intel.com/gpu-vfio=0000-03-00-0-0x56a0",),
    {B50: "vfio-pci", A770_AUDIO: "vfio-pci"},
    more={"named": [A770_AUDIO]},
)
VIRTUAL: Final = Shape(
    "a VF",
    arc_b50(),
    (VF,),
    ("intel.com/gpu-vfio=0000-03-00-1-0xe212",),
    {VF: "vfio-pci"},
    before=lambda host: host.kernel.create_vfs(B50, 2),
)
BOUND: Final = Shape(
    "bound to VFIO by an administrator",
    arc_b50(),
    (B50,),
    (VFIO_NAME,),
    {},
    before=lambda host: host.kernel.move(B50, "vfio-pci"),
)
VARIANT: Final = Shape(
    "a variant driver",
    arc_b50(),
    (B50,),
    (VFIO_NAME,),
    {B50: "xe-vfio-pci"},
    before=_has_variant,
    drivers=(*DRIVERS, "xe-vfio-pci"),
)
SHARED_SLOT: Final = Shape(
    "an APU with USB in its slot, and the console",
    apu(),
    (APU,),
    ("amd.com/gpu-vfio=0000-e5-00-0-0x1900",),
    {APU: "vfio-pci"},
    more={"force": True},
)
DRIVERLESS: Final = Shape(
    "a GPU without a driver",
    arc_b50(),
    (B50,),
    (VFIO_NAME,),
    {B50: "vfio-pci"},
    before=lambda host: host.kernel.unbind(B50),
)
OVERRIDDEN: Final = Shape(
    "a GPU with an override of somebody's",
    arc_b50(),
    (B50,),
    (VFIO_NAME,),
    {B50: "vfio-pci"},
    before=lambda host: host.kernel.override(B50, "xe"),
)
NATIVE: Final = Shape(
    "the driver itself, for a GPU that is on VFIO",
    arc_b50(),
    (B50,),
    (f"intel.com/gpu-mei={NAME}", f"intel.com/gpu={NAME}"),
    {B50: "xe"},
    more={"mode": "drm", "from_vfio": True},
    before=lambda host: host.kernel.move(B50, "vfio-pci"),
)

SHAPES: Final = (
    *(ONE, TWO, AUDIO, NAMED, VIRTUAL, BOUND, VARIANT, SHARED_SLOT, DRIVERLESS, OVERRIDDEN),
    NATIVE,
)
