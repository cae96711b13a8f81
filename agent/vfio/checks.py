"""What may be wrong with a claim before anything is touched: one function for each check. Pure.

There are two tables. `BY_LOOK` needs nothing but the facts of the latest look, and refuses an
order at once; `BY_INSPECTION` needs what can block or needs rights to be read, and is asked twice:
before the devices are withdrawn, and again after, when nobody new can have got hold of them. Each
check finds all that it has to say, so that a dry run can say everything at once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from msgspec import structs

from agent.host.model import (
    Address,
    Function,
    HoldMode,
    Inventory,
    NodeRole,
    is_vfio_driver,
    normalise_driver,
)
from agent.vfio.case import Case, is_ignored
from agent.vfio.group import in_the_way, members
from agent.vfio.model import RECOVERY, Inspection, Prepare
from agent.vfio.moves import has_driver
from agent.vfio.problems import Code, Problem, problem
from agent.vfio.state import THERE, Claims, Phase

_IDLE: Final = frozenset({"pci-stub", "pci-pf-stub"})
"""Drivers that do nothing with a device, so nobody uses it by them."""

_FOR_GUESTS: Final = frozenset({"pciback", "xen-pciback"})
"""Drivers that give a device to a virtual machine without any process that has it open."""


def find_nonsense(request: Prepare) -> tuple[Problem, ...]:
    """What is wrong with an order whatever the host is like."""
    found = []
    if not request.id or request.id.startswith(RECOVERY):
        found.append(f"a claim cannot be called {request.id!r}")
    if not request.devices:
        found.append("the claim names no device")
    if request.lease is not None and not 0 < request.lease < math.inf:
        found.append(f"{request.lease} seconds are no lease")
    if request.mode is HoldMode.DRM and request.named:
        found.append("a claim in mode drm moves no other function along")
    if request.mode is HoldMode.DRM and is_vfio_driver(request.driver):
        found.append(f"{request.driver} is a VFIO driver, and mode drm takes a device off VFIO")
    return tuple(problem(Code.INVALID, what) for what in found)


def find_by_look(case: Case) -> tuple[Problem, ...]:
    """Everything that the look alone has against a claim."""
    return tuple(found for check in BY_LOOK for found in check(case))


def find_by_inspection(case: Case) -> tuple[Problem, ...]:
    """Everything that an inspection has against it."""
    return tuple(found for check in BY_INSPECTION for found in check(case))


# --- what the look says ---------------------------------------------------------------------------


def _unknown(case: Case) -> Iterator[Problem]:
    inventory = case.seen.inventory
    for address in (*case.request.devices, *case.request.named):
        function = inventory.functions.get(address)
        if function is None:
            yield missing(address, inventory)
        elif function.is_bridge:
            yield problem(Code.UNKNOWN_DEVICE, f"{address} is a bridge")
        elif address in case.request.devices:
            mode = case.request.mode
            if reason := case.rules.unpublishable(function, mode):
                what = f"{address} cannot be published in mode {mode}: {reason}"
                yield problem(Code.UNKNOWN_DEVICE, what)


def missing(address: Address, inventory: Inventory) -> Problem:
    """Say of a function that the look does not have whether it is there at all."""
    reason = inventory.dropped.get(address)
    what = f"could not be read: {reason}" if reason else "does not exist"
    return problem(Code.UNKNOWN_DEVICE, f"{address} {what}")


def _ignored(case: Case) -> Iterator[Problem]:
    for each in case.chosen:
        if is_ignored(each.function, case.rules):
            yield problem(Code.IGNORED, f"the configuration ignores {each.address}")


def _claimed(case: Case) -> Iterator[Problem]:
    for each in case.chosen:
        claim = case.claims.claim_of(each.address)
        if claim is not None and not (case.own and claim.id == case.request.id):
            client = claim.record.request.client
            by = f"claim {claim.id}" + (f" of {client}" if client else "")
            yield problem(
                Code.CLAIMED, f"{each.address} is held by {by}, which is {claim.standing}"
            )


def _stranded(case: Case) -> Iterator[Problem]:
    for each in case.chosen:
        stray = case.claims.strays.get(each.address)
        if stray is None:
            continue
        # What may be somebody else's, and as he wants it, may be used as it is.
        as_it_is = (stray.lost or not stray.origin.known) and each.target is None
        if not as_it_is or stray.problem.code is Code.DEAD:
            what = f"{each.address} is stranded: {stray.problem.sentence}"
            yield problem(Code.STRANDED, what, address=each.address)


def _hung(case: Case) -> Iterator[Problem]:
    for each in case.chosen:
        child = case.claims.children.get(each.address)
        if child is not None:
            step = child.write.step
            what = f"process {child.pid} hangs in a write ({step}) to {each.address}"
            yield problem(Code.HUNG, what)


def _cooling_down(case: Case) -> Iterator[Problem]:
    for each in case.moving:
        cooling = case.claims.cooling.get(each.address)
        if cooling is not None and cooling.until > case.now:
            left = math.ceil(cooling.until - case.now)
            what = f"{each.address} is left alone for {left} s, because the last claim of it failed"
            yield problem(Code.COOLING_DOWN, f"{what}: {cooling.reason}")


def _specs_unknown(case: Case) -> Iterator[Problem]:
    """It could be neither withdrawn nor published."""
    if case.seen.specs_problem:
        what = f"it cannot be told what is published: {case.seen.specs_problem}"
        yield problem(Code.SPECS_UNKNOWN, what)


def _obstructed(case: Case) -> Iterator[Problem]:
    """It would be moved for nothing, and moved back again."""
    for each in case.chosen:
        if each.address in case.request.devices:
            mode = case.request.mode
            if reason := case.seen.obstructed(each.function, mode):
                what = f"{each.address} cannot be published in mode {mode}: {reason}"
                yield problem(Code.NOT_PUBLISHED, what, address=each.address)


def _paused(case: Case) -> Iterator[Problem]:
    if case.rules.paused and case.moving:
        yield problem(Code.PAUSED, "moving devices is paused")


def _not_viable(case: Case) -> Iterator[Problem]:
    for other in in_the_way(case.on_vfio, case.seen.inventory):
        what = f"{other.address} of IOMMU group {other.iommu_group} is on {other.driver}"
        yield problem(Code.GROUP_NOT_VIABLE, f"{what} and does not belong to the claimed devices")


def _needed(case: Case) -> Iterator[Problem]:
    """Once it is on a driver of the host, nobody can be given the others of its group."""
    if case.request.mode is HoldMode.DRM:
        moving = [each.function for each in case.moving]
        yield from find_dependents(moving, case.claims, case.request.id, case.seen.inventory)


def find_dependents(
    functions: Iterable[Function], claims: Claims, but: str, inventory: Inventory
) -> Iterator[Problem]:
    """Say which claims need the IOMMU groups of functions that are to get a driver of the host.

    Args:
        but: The claim that asks.
    """
    for function in functions:
        for other in members(function, inventory):
            claim = claims.claim_of(other.address)
            if claim is None or claim.id == but or other is function:
                continue
            needs_group = claim.record.request.mode is HoldMode.VFIO
            if needs_group and claim.phase in {*THERE, Phase.DONE}:
                what = f"{function.address} shares IOMMU group {function.iommu_group}"
                what += f" with {other.address}, which claim {claim.id} holds for VFIO"
                yield problem(Code.CLAIMED, what)


def _not_in_group(case: Case) -> Iterator[Problem]:
    inventory = case.seen.inventory
    asked = [each.function for each in case.chosen if each.address in case.request.devices]
    together = {other.address for each in asked for other in members(each, inventory)}
    for address in case.request.named:
        if address in inventory.functions and address not in together:
            what = f"{address} is in no IOMMU group of the claimed devices"
            yield problem(Code.NOT_IN_GROUP, what)


def _unsuitable(case: Case) -> Iterator[Problem]:
    """Once bound to it, the device would never be published: it is moved for nothing."""
    if case.request.mode is not HoldMode.VFIO:
        return
    for each in case.moving:
        target = each.target or ""
        reason = case.rules.unsuitable(each.function, target)
        if has_driver(each.function, target):  # whatever has been configured
            reason = "has it now and is not a VFIO driver"
        if reason is not None:
            what = f"{each.address} cannot be moved to {target}, which {reason}"
            yield problem(Code.DRIVER_UNSUITABLE, what)


def _another_driver(case: Case) -> Iterator[Problem]:
    wanted = case.request.driver
    if case.request.mode is not HoldMode.DRM or wanted is None:
        return
    for each in case.chosen:
        if each.target is None and not has_driver(each.function, wanted):
            what = f"{each.address} is on {each.function.driver}, and mode drm moves no device"
            found = problem(Code.DRIVER_UNSUITABLE, f"{what} from there to {wanted}")
            hint = "name no driver, and it is claimed on the one that it has"
            yield structs.replace(found, hint=hint)


def _active_vfs(case: Case) -> Iterator[Problem]:
    for each in case.moving:
        count = len(each.function.virtfns)
        if count:
            what = f"{each.address} has {count} VF{'s' * (count > 1)}, which would vanish"
            yield problem(Code.ACTIVE_VFS, what)


def _users_unseen(case: Case) -> Iterator[Problem]:
    """A process that uses a device is known by the device's nodes, if its driver makes such."""
    if case.request.force:
        return
    for each in case.moving:
        function = each.function
        if function.driver is None or function.on_vfio:
            continue
        driver = normalise_driver(function.driver)
        is_bare = not (
            each.companion or function.nodes or driver in _IDLE or case.rules.makes_nodes(function)
        )
        if driver in _FOR_GUESTS or is_bare or case.rules.hides_users(function):
            what = f"{each.address} is on {function.driver}, and who uses it there cannot be seen"
            yield problem(Code.USERS_UNSEEN, what)


def _boot_display(case: Case) -> Iterator[Problem]:
    if case.request.force or case.request.mode is not HoldMode.VFIO:
        return
    for each in case.moving:
        if each.function.boot_vga and each.function.driver is not None:
            yield problem(Code.BOOT_DISPLAY, f"{each.address} shows this host's console")


def _foreign_binding(case: Case) -> Iterator[Problem]:
    request = case.request
    for each in case.chosen:
        driver = each.function.driver
        if not each.function.on_vfio or each.companion:
            continue
        if request.mode is HoldMode.DRM and not request.from_vfio:
            what = f"{each.address} is on {driver}, and this agent did not put it there"
            yield problem(Code.FOREIGN_BINDING, what)
        elif request.mode is HoldMode.VFIO and not has_driver(
            each.function, request.driver or driver
        ):
            what = f"somebody else put {each.address} on {driver}, not on {request.driver}"
            yield problem(Code.FOREIGN_BINDING, f"{what}, and it is not moved from there")


# --- what an inspection says ----------------------------------------------------------------------


def _no_iommu(case: Case) -> Iterator[Problem]:
    if case.inspection is None:
        return
    for function in case.on_vfio:
        nodes = function.nodes_of(NodeRole.VFIO_GROUP)
        without = any(node.name.startswith("noiommu-") for node in nodes)
        if without or (function.iommu_group is None and case.inspection.noiommu):
            if not case.rules.allow_no_iommu:
                what = f"{function.address} has no IOMMU: who is given it can write to all memory"
                yield problem(Code.NO_IOMMU_MODE, what)
        elif function.iommu_group is None:
            where = "this host has no IOMMU group"
            if case.seen.inventory.environment.iommu:
                where = "it is in no IOMMU group"
            what = f"{function.address} cannot be given to VFIO: {where}"
            yield problem(Code.IOMMU_OFF, what)


def _no_means(case: Case) -> Iterator[Problem]:
    if case.inspection is not None:
        yield from find_no_means(case.inspection)


def find_no_means(inspection: Inspection) -> tuple[Problem, ...]:
    """Say that not everything could be asked."""
    if not inspection.unasked:
        return ()
    what = f"not everything could be found out about the devices: {inspection.unasked}"
    return (problem(Code.NO_MEANS, what),)


def _unavailable(case: Case) -> Iterator[Problem]:
    if case.inspection is not None:
        for driver, reason in case.inspection.unavailable:
            yield unavailable(driver, reason)


def unavailable(driver: str, reason: str) -> Problem:
    """Say why a driver is not to be had."""
    return problem(Code.DRIVER_UNAVAILABLE, f"the driver {driver} is not available: {reason}")


def _for_others(case: Case) -> Iterator[Problem]:
    if case.inspection is not None:
        for address, driver in case.inspection.unsuitable:
            what = f"{address} cannot be moved to {driver}, which is for other devices"
            yield problem(Code.DRIVER_UNSUITABLE, what)


def _managed(case: Case) -> Iterator[Problem]:
    if case.inspection is not None:
        for address, manager in case.inspection.managed:
            yield managed(address, manager)


def managed(address: Address, manager: str) -> Problem:
    """Say who else moves a function."""
    return problem(Code.MANAGED, f"{address} is managed by {manager}")


def _override_unknown(case: Case) -> Iterator[Problem]:
    if case.inspection is not None:
        known = dict(case.inspection.overrides)
        for each in case.moving:
            if each.address not in known:
                what = f"the driver_override of {each.address} could not be read in time"
                yield problem(Code.OVERRIDE_UNKNOWN, what)


def _in_use(case: Case) -> Iterator[Problem]:
    if case.inspection is not None and case.moving:
        yield from find_holders(case.inspection)


def find_holders(inspection: Inspection) -> tuple[Problem, ...]:
    """Say who uses the nodes that were inspected."""
    found = [
        problem(
            Code.IN_USE,
            f"process {holder.pid} ({holder.command}) holds {holder.path} open",
        )
        for holder in inspection.holders
    ]
    effect = inspection.effect
    if not inspection.holders_known and (effect.node_paths or effect.used):
        nodes = ", ".join(effect.node_paths) or f"a node of {', '.join(effect.used)}"
        why = "; ".join(inspection.blind) or "not every process could be asked in time"
        what = f"it cannot be told whether a process holds {nodes} open: {why}"
        found.append(problem(Code.HOLDERS_UNKNOWN, what))
    return tuple(found)


_Check = Callable[[Case], Iterator[Problem]]

BY_LOOK: Final[Sequence[_Check]] = (
    _unknown,
    _ignored,
    _claimed,
    _stranded,
    _hung,
    _cooling_down,
    _paused,
    _specs_unknown,
    _obstructed,
    _foreign_binding,
    _not_in_group,
    _not_viable,
    _needed,
    _unsuitable,
    _another_driver,
    _active_vfs,
    _users_unseen,
    _boot_display,
)
"""In the order in which a person would want to hear of them."""

BY_INSPECTION: Final[Sequence[_Check]] = (
    _no_means,
    _no_iommu,
    _unavailable,
    _for_others,
    _managed,
    _override_unknown,
    _in_use,
)
