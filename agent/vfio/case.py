"""What a claim would hold, and all that is known when it is checked. Pure."""

import msgspec

from agent.host.model import Address, Function, HoldMode, normalise_driver
from agent.vfio.group import companions
from agent.vfio.model import ANY_DRIVER, Inspection, Prepare
from agent.vfio.state import Claims, Rules, Seen


class Chosen(msgspec.Struct, frozen=True):
    """A function that a claim would hold."""

    function: Function
    target: str | None
    """The driver that it would be given; None if it is where it should be."""
    companion: bool = False

    @property
    def address(self) -> Address:
        """Its address."""
        return self.function.address


class Case(msgspec.Struct, frozen=True):
    """What is checked, and against what."""

    request: Prepare
    chosen: tuple[Chosen, ...]
    claims: Claims
    seen: Seen
    rules: Rules
    now: float
    inspection: Inspection | None = None
    own: bool = False
    """The claim is a live one already: what it has itself is not in its way."""

    @property
    def moving(self) -> tuple[Chosen, ...]:
        """The functions that would be moved."""
        return tuple(each for each in self.chosen if each.target is not None)

    @property
    def on_vfio(self) -> tuple[Function, ...]:
        """The functions that would be on VFIO."""
        if self.request.mode is not HoldMode.VFIO:
            return ()
        return tuple(each.function for each in self.chosen)


def choose(request: Prepare, seen: Seen, rules: Rules) -> tuple[Chosen, ...]:
    """The functions that a claim would hold, of those that the host has.

    Those that are asked for come first. For VFIO their companions follow, and what was named: a
    device that goes to its own driver needs no company.
    """
    inventory = seen.inventory
    known = inventory.functions
    asked = [known[address] for address in dict.fromkeys(request.devices) if address in known]
    if request.mode is HoldMode.DRM:
        return tuple(Chosen(each, _drm_target(request, each)) for each in asked)
    named = [known[address] for address in request.named if address in known]
    theirs = [each for each in companions(asked, inventory) if not is_ignored(each, rules)]
    along = {each.address: each for each in (*theirs, *named)}
    return (
        *(Chosen(each, _vfio_target(request.driver, each, rules)) for each in asked),
        *(
            Chosen(each, _vfio_target(None, each, rules), companion=True)
            for address, each in along.items()
            if address not in request.devices
        ),
    )


def _vfio_target(driver: str | None, function: Function, rules: Rules) -> str | None:
    if function.on_vfio:
        return None
    return normalise_driver(driver or rules.vfio_driver(function))


def _drm_target(request: Prepare, function: Function) -> str | None:
    if function.driver is not None and not function.on_vfio:
        return None
    return request.driver or ANY_DRIVER


def is_ignored(function: Function, rules: Rules) -> bool:
    """Whether the configuration keeps a function out of everything."""
    return not rules.ignore.isdisjoint((function.address, function.pci_id))
