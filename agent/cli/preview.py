"""What a pass would do now, without doing it: the same look, the same decision, no waiting."""

from collections.abc import Mapping

import msgspec
from msgspec import structs

from agent.cdi.desired import Desired, desired
from agent.cdi.files import DeleteSpec, Disk, SetAside, WriteSpec
from agent.compose import Parts
from agent.host.hints import EVERYTHING
from agent.host.model import Inventory
from agent.reconcile.plan import Plan, plan
from agent.reconcile.state import Memory

_AT_ONCE = {"settle": 0.0, "settle_max": 0.0, "udev_timeout": 0.0}


class Preview(msgspec.Struct, frozen=True):
    """A look, and what follows from it."""

    inventory: Inventory
    desired: Desired
    disk: Disk
    plan: Plan

    @property
    def after(self) -> Mapping[str, bytes]:
        """The content of every file of ours once the plan is done."""
        files = {path: file.content for path, file in self.disk.ours.items()}
        for action in self.plan.actions:
            match action:
                case WriteSpec():
                    files[action.path] = action.content
                case DeleteSpec():
                    files.pop(action.path, None)
                case SetAside():
                    pass
        return files


def preview(parts: Parts, inventory: Inventory | None = None) -> Preview:
    """Look at the host and decide; blocks for milliseconds.

    Args:
        parts: What a pass works with.
        inventory: Facts from elsewhere, instead of a look at this host.

    Raises:
        LookError: The host cannot be read.
        StoreError: The spec directory cannot be read.
    """
    if inventory is None:
        inventory = parts.scanner.scan(EVERYTHING, Inventory())
    rules = parts.rules
    wanted = desired(inventory, rules.profiles, (), rules.policy)
    disk = parts.store.read()
    decision = plan(
        wanted,
        disk,
        Memory(),
        layout=rules.layout,
        timing=structs.replace(rules.timing, **_AT_ONCE),
        now=0.0,
        udevd=False,
    )
    return Preview(inventory, wanted, disk, decision)
