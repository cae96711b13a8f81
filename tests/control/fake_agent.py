"""An agent that has something of everything, and remembers what it is asked."""

import asyncio
from typing import Any

from msgspec import structs

from agent.cdi.offers import Reason, Withheld
from agent.cdi.spec import Kind
from agent.host.model import Address, Function, HoldMode, Inventory
from agent.reconcile.state import State
from agent.vfio.model import (
    Answer,
    Child,
    Identity,
    Order,
    Origin,
    Prepare,
    Record,
    Step,
    Stray,
    Write,
)
from agent.vfio.problems import Code, Problem
from agent.vfio.state import Claim, Claims, Cooling, FunctionState, Phase

A, B = Address("0000:03:00.0"), Address("0000:04:00.0")
GPU = Kind("intel.com/gpu")
GONE, REUSED = "intel.com/gpu=card1", "intel.com/gpu=0000-03-00-0-0xe212"
"""Names by which the claim was made; the second is another device's by now."""
NAME = "intel.com/gpu-vfio=0000-03-00-0-0xe212"


def function(address: Address, driver: str | None) -> Function:
    return Function(
        address, f"/devices/pci0000:00/{address}", 0x8086, 0xE212, 0x030000, driver=driver
    )


def state(*, dry_run: bool = False) -> State:
    """One device published, one claimed and in force, one stranded, one hung."""
    identity = Identity.of(function(B, "vfio-pci"))
    origin = Origin(B, identity, "xe", None, "vfio-pci")
    request = Prepare(
        "vm",
        HoldMode.VFIO,
        (B,),
        client="pid 7, uid 0",
        lease=60,
        owner_pid=5,
        called=((GONE, B), (REUSED, B)),
    )
    record = Record(request, (origin,), done=True, names=(NAME,), since=100.0, expires_at=160.0)
    stray = Stray(origin, Problem(Code.STRANDED, "it did not come back", "look"), "vfio-pci")
    write = Write("vm", A, Step.UNBIND, A)
    return State(
        inventory=Inventory(functions={A: function(A, "xe"), B: function(B, "vfio-pci")}),
        published={(GPU, A): "0000-03-00-0-0xe212"},
        withheld=(Withheld(B, GPU, Reason.HELD, "claim vm holds it"),),
        claims=Claims(
            live={"vm": Claim(record, (FunctionState(origin),), phase=Phase.DONE, dry_run=dry_run)},
            strays={B: stray},
            children={A: Child(write, 99)},
            cooling={A: Cooling(140.0, "it did not move"), B: Cooling(120.0, "nor did it")},
        ),
        passes=3,
    )


class FakeAgent:
    """An agent that remembers what it was asked, and answers what the test wants."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.paused: bool | None = None
        self.withheld = True
        """Something is not published."""
        self.dry_run = False
        """What it has is a dry run, and no claim."""
        self.reply = Answer(1, "vm", names=(NAME,))
        self.asked = asyncio.Event()
        self.has_time: asyncio.Event | None = None
        """Until this is set it answers nobody, if there is one."""
        self.left: list[Order] = []
        """What nobody waits for any more."""

    @property
    def prepared(self) -> list[Prepare]:
        return [order for order in self.orders if isinstance(order, Prepare)]

    def snapshot(self) -> State:
        found = state(dry_run=self.dry_run)
        return found if self.withheld else structs.replace(found, withheld=())

    async def submit(self, order: Order) -> Answer:
        self.orders.append(order)
        self.asked.set()
        if self.has_time is not None:
            try:
                await self.has_time.wait()
            except asyncio.CancelledError:
                self.left.append(order)
                raise
        return self.reply

    async def pause(self, *, paused: bool) -> None:
        self.paused = paused

    def overview(self) -> dict[str, Any]:
        return {"version": "1", "healthy": True, "problems": [], "ready": True, "sources": {}}
