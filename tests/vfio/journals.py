"""Content for a journal."""

from typing import Final

from agent.host.model import Address, HoldMode
from agent.vfio.model import (
    Child,
    Durable,
    Identity,
    Origin,
    Prepare,
    Record,
    Step,
    Stray,
    Write,
)
from agent.vfio.problems import Code, Problem

GPU: Final = Address("0000:03:00.0")
AUDIO: Final = Address("10000:03:00.1")
BOOT: Final = "6f2b7f3c0d4e4a579d0c5a1e6c1d2e3f"

ORIGINS: Final = tuple(
    Origin(address, Identity(0x8086, 0xE212, None, 0x1234, 0x30000, 4711), "xe", None, "vfio-pci")
    for address in (GPU, AUDIO)
)
REQUEST: Final = Prepare(
    "vm-1",
    HoldMode.VFIO,
    (GPU,),
    client='uid 0, „Ärger" \\ 🖥',
    named=(AUDIO,),
    lease=0.1 + 0.2,
    owner_pid=12,
)
RECORD: Final = Record(REQUEST, ORIGINS, done=True, names=("intel.com/gpu-vfio=a",), since=12.5)
STRAY: Final = Stray(ORIGINS[1], Problem(Code.MOVE_FAILED, "it did not move", "look", True), "xe")
CHILD: Final = Child(Write("vm-1", GPU, Step.OVERRIDE, "\n"), 4711, 99)
FULL: Final = Durable(BOOT, (RECORD,), (STRAY,), (CHILD,))
