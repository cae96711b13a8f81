"""What should be published, were every device ready: facts and profiles in, offers out.

Pure. ``desired`` makes one ``Offer`` for each device and kind that a profile publishes, and one
``Withheld`` with its reason for each device that it does not; ``assemble`` puts offers together to
specs. It knows nothing of time or of the disk: whether an offer is already published, must settle
first, or would double a foreign definition is decided by ``reconcile.plan``.

One function is judged by its own facts and by few of others: whether another function has the same
node path, whether its IOMMU group is viable, the shared nodes, and its place among the functions
of its kind. Those are gathered first; a function whose facts and circumstances are the same as in
the last pass costs no more than a look into a cache.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from agent.cdi import rules
from agent.cdi.entry import Refusal, case_of, offer_of
from agent.cdi.offers import (
    Desired,
    Fingerprint,
    Offer,
    Policy,
    Reason,
    Withheld,
    WithheldNode,
)
from agent.cdi.profile import Naming, Profile, SrIov, matcher
from agent.cdi.spec import ContainerEdits, Device, DeviceNode, Hook, Kind, Mount, Spec
from agent.errors import SpecError
from agent.host.model import (
    Address,
    Function,
    Hold,
    HoldMode,
    Inventory,
    NodeRole,
    Orphan,
    address_order,
    normalise_driver,
)

__all__ = [
    "Desired",
    "Fingerprint",
    "Offer",
    "Policy",
    "Reason",
    "Withheld",
    "WithheldNode",
    "assemble",
    "desired",
]

# Kernel, drivers/vfio and drivers/iommu: drivers that do not keep a group from being viable.
_HARMLESS_DRIVERS: Final = frozenset({"pci-stub", "pcieport"})
_DISPLAY: Final = 0x03
_ACCELERATOR: Final = 0x12
_OWN_ROLES: Final = (NodeRole.CARD, NodeRole.RENDER, NodeRole.ACCEL)


def desired(
    inventory: Inventory,
    profiles: Sequence[Profile],
    holds: Iterable[Hold],
    policy: Policy,
) -> Desired:
    """Tell what should be published of what a look has found.

    Args:
        profiles: In order of precedence, as ``load_builtin`` and ``merge`` give them.
        holds: What claims hold, at most one for a function.
    """
    situation = _Situation(inventory, tuple(profiles), holds, policy)
    offers: list[Offer] = []
    withheld = [
        Withheld(address, None, Reason.UNREADABLE, f"it could not be read: {why}")
        for address, why in inventory.dropped.items()
    ]
    for function, profiles_of_it in situation.functions:
        for profile in profiles_of_it:
            judged = situation.judge(function, profile)
            if isinstance(judged, Offer):
                offers.append(judged)
            else:
                kind = case_of(function, profile).kind
                withheld.append(Withheld(function.address, kind, judged.reason, judged.detail))
        if not profiles_of_it:
            withheld.append(situation.unmatched(function))
    unique, doubled = _without_doubles(offers)
    return Desired(
        offers=unique,
        withheld=tuple(
            sorted(
                (*withheld, *doubled),
                key=lambda each: (address_order(each.address), each.kind or ""),
            ),
        ),
        nodes=tuple(
            _orphan(orphan, situation.profiles)
            for orphan in sorted(inventory.orphans, key=lambda orphan: orphan.node.path)
            if orphan.node.role in _OWN_ROLES
        ),
    )


def _is_worth_a_word(function: Function) -> bool:
    """Whether people expect a word about a function that no profile recognises."""
    is_candidate = function.class_code >> 16 in {_DISPLAY, _ACCELERATOR}
    return is_candidate or any(node.role in _OWN_ROLES for node in function.nodes)


def _orphan(orphan: Orphan, profiles: Iterable[Profile]) -> WithheldNode:
    folder = orphan.devpath.split("/")
    for profile in profiles:
        parts = profile.partitions
        if parts is not None and any(name.startswith(parts.prefix) for name in folder):
            return WithheldNode(orphan.node.path, Reason.POLICY, parts.reason)
    driver = f" (driver {orphan.driver})" if orphan.driver else ""
    return WithheldNode(
        orphan.node.path,
        Reason.UNMATCHED,
        f"it belongs to no PCI function{driver}",
    )


def _place(function: Function) -> tuple[int, str]:
    return address_order(function.address)


def _without_doubles(offers: Sequence[Offer]) -> tuple[tuple[Offer, ...], list[Withheld]]:
    """Withhold every offer whose name another one of its kind has."""
    counts = Counter((offer.kind, offer.device.name) for offer in offers)
    unique: list[Offer] = []
    doubled: list[Withheld] = []
    for offer in offers:
        name = offer.device.name
        if counts[offer.kind, name] == 1:
            unique.append(offer)
        else:
            detail = f"another device of {offer.kind} is called {name} too"
            doubled.append(Withheld(offer.address, offer.kind, Reason.INVALID, detail))
    return tuple(unique), doubled


def _owners(functions: Iterable[Function]) -> dict[str, set[Address | int]]:
    """Whose a node path is: a function's, or that of all functions of an IOMMU group."""
    owners: dict[str, set[Address | int]] = {}
    for function in functions:
        for node in function.nodes:
            group = function.iommu_group if node.role is NodeRole.VFIO_GROUP else None
            owner = function.address if group is None else group
            owners.setdefault(node.path, set()).add(owner)
    return owners


def _index(
    functions: Iterable[tuple[Function, tuple[Profile, ...]]],
) -> dict[tuple[Kind, Address], int]:
    """The place of each function in its kind, whether it is published or not."""
    counts: Counter[Kind] = Counter()
    places = {}
    for function, profiles in functions:
        for profile in profiles:
            if profile.naming is Naming.INDEX:
                for kind in profile.kinds:
                    places[kind, function.address] = counts[kind]
                    counts[kind] += 1
    return places


class _Situation:
    """What a look has found, with what is needed of other functions to judge one."""

    def __init__(
        self,
        inventory: Inventory,
        profiles: tuple[Profile, ...],
        holds: Iterable[Hold],
        policy: Policy,
    ) -> None:
        self.profiles = profiles
        self._inventory = inventory
        self._policy = policy
        self._holds = {hold.address: hold for hold in holds}
        # A server has hundreds of functions that nobody asks about: they go no further.
        profiles_of = matcher(profiles)
        functions = [
            (function, found)
            for function in inventory.functions.values()
            if (found := profiles_of(function)) or _is_worth_a_word(function)
        ]
        self.functions = sorted(functions, key=lambda each: address_order(each[0].address))
        """Each with its profiles, by address."""
        self._owners = _owners(inventory.functions.values())
        self._index = _index(self.functions)

    @functools.cached_property
    def _groups(self) -> dict[int, list[Function]]:
        groups: dict[int, list[Function]] = {}
        for function in self._inventory.functions.values():
            if function.iommu_group is not None:
                groups.setdefault(function.iommu_group, []).append(function)
        return groups

    def judge(self, function: Function, profile: Profile) -> Offer | Refusal:
        """Offer what a profile gives of a function, or say why not."""
        case = case_of(function, profile)
        refusal = self._refusal(function, profile, on_vfio=case.on_vfio)
        if refusal is not None:
            return refusal
        shared = tuple(self._inventory.shared.get(path) for path in case.shared)
        name = case.name or str(self._index[case.kind, function.address])
        offer = offer_of(function, profile, name, shared)
        if isinstance(offer, Refusal):
            return offer
        for path, _ in offer.fingerprint.nodes:
            if len(self._owners.get(path, ())) > 1 and path not in case.shared:
                others = sorted(map(str, self._owners[path] - {function.address}))
                detail = f"{path} belongs to {', '.join(others)} too"
                return Refusal(Reason.PATH_CONFLICT, detail)
        if self._policy.version is not None and (refusal := self._too_new(offer)):
            return refusal
        if function.address in self._holds:
            return dataclasses.replace(offer, in_all=False)
        return offer

    def unmatched(self, function: Function) -> Withheld:
        """Say that no profile recognises a function."""
        if self._is_ignored(function):
            reason, detail = Reason.IGNORED, "the configuration says so"
        else:
            driver = f"driver {function.driver}" if function.driver else "no driver"
            kind_of = "" if function.nodes_of(NodeRole.RENDER) else ", no render node"
            reason = Reason.UNMATCHED
            detail = f"no profile recognises {function.pci_id} ({driver}{kind_of})"
        return Withheld(function.address, None, reason, detail)

    def _too_new(self, offer: Offer) -> Refusal | None:
        needed = max(
            (rules.device_version(offer.device), rules.kind_version(offer.kind)),
            key=rules.VERSIONS.index,
        )
        if rules.fits(needed, self._policy.version):
            return None
        detail = f"its entry needs cdiVersion {needed}; the configuration allows no later than"
        return Refusal(Reason.VERSION_PIN, f"{detail} {self._policy.version}")

    def _refusal(self, function: Function, profile: Profile, *, on_vfio: bool) -> Refusal | None:
        """Why a function is withheld whatever its nodes are."""
        if self._is_ignored(function):
            return Refusal(Reason.IGNORED, "the configuration says so")
        if held := self._held(function):
            return held
        if not self._inventory.environment.devtmpfs and not self._policy.static_dev:
            detail = "/dev is not the kernel's own, so its nodes may be those of another time"
            return Refusal(Reason.STATIC_DEV, detail)
        if profile.sriov is SrIov.PF and function.is_vf:
            return Refusal(Reason.POLICY, f"it is a VF, and profile {profile.name} takes none")
        if profile.sriov is SrIov.VF and function.virtfns:
            return Refusal(
                Reason.POLICY, f"it is a PF with VFs: profile {profile.name} takes those"
            )
        return self._unviable(function) if on_vfio else None

    def _held(self, function: Function) -> Refusal | None:
        """What a claim has against it: done, it is published again in the claim's mode."""
        hold = self._holds.get(function.address)
        if hold is None:
            return None
        if not hold.settled:
            return Refusal(Reason.HELD, f"claim {hold.claim} is moving it")
        if (hold.mode is HoldMode.VFIO) is not function.on_vfio:
            detail = f"claim {hold.claim} holds it for {hold.mode}, but it is on"
            return Refusal(Reason.HELD, f"{detail} {function.driver or 'no driver'}")
        return None

    def _is_ignored(self, function: Function) -> bool:
        ignore = self._policy.ignore
        return bool(ignore) and not ignore.isdisjoint((function.address, function.pci_id))

    def _unviable(self, function: Function) -> Refusal | None:
        """Who keeps the IOMMU group of a function from being used."""
        if function.iommu_group is None:
            return None
        in_the_way = [
            f"{member.address} ({member.driver})"
            for member in sorted(self._groups[function.iommu_group], key=_place)
            if not member.is_bridge
            and not member.on_vfio
            and member.driver is not None
            and normalise_driver(member.driver) not in _HARMLESS_DRIVERS
        ]
        if not in_the_way:
            return None
        detail = f"in its IOMMU group {function.iommu_group} a driver of the host has"
        return Refusal(Reason.GROUP_NOT_VIABLE, f"{detail} {', '.join(in_the_way)}")


# --- specs ----------------------------------------------------------------------------------------


def assemble(offers: Iterable[Offer]) -> dict[Kind, Spec]:
    """Put offers together to one spec for each kind, with the entry ``all`` where there is one.

    Raises:
        SpecError: A device is itself called ``all``.
    """
    by_kind: dict[Kind, list[Offer]] = {}
    for offer in offers:
        if offer.device.name == rules.ALL:
            raise SpecError(f"a device of {offer.kind} is called {rules.ALL}")
        by_kind.setdefault(offer.kind, []).append(offer)
    specs = {}
    for kind, members in sorted(by_kind.items()):
        members.sort(key=lambda offer: address_order(offer.address))
        devices = [offer.device for offer in members]
        union = _union([offer.device for offer in members if offer.in_all])
        specs[kind] = Spec(kind, (*devices, union) if union else tuple(devices))
    return specs


def _union(devices: Sequence[Device]) -> Device | None:
    """One entry that gives what all of these give; what several give, once."""
    if not devices:
        return None
    nodes: dict[str, DeviceNode] = {}
    mounts: dict[str, Mount] = {}
    env: dict[str, str] = {}
    hooks: dict[Hook, None] = {}
    gids: set[int] = set()
    annotations: dict[str, str] = {}
    for device in devices:
        edits = device.edits
        nodes.update((node.path, node) for node in edits.device_nodes)
        mounts.update((mount.container_path, mount) for mount in edits.mounts)
        env.update((entry.partition("=")[0], entry) for entry in edits.env)
        hooks.update(dict.fromkeys(edits.hooks))
        gids.update(edits.additional_gids)
        annotations.update(device.annotations)
    edits = ContainerEdits(
        device_nodes=tuple(nodes.values()),
        mounts=tuple(mount for path, mount in mounts.items() if path not in nodes),
        env=tuple(env.values()),
        hooks=tuple(hooks),
        additional_gids=tuple(sorted(gids)),
    )
    return Device(rules.ALL, edits, tuple(sorted(annotations.items())))
