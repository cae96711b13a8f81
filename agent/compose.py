"""From a configuration to the objects that do the work: the one place that knows both.

The service and the commands that do the same once build from here, so that what ``generate``
shows is what ``run`` would write.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from agent.cdi.desired import desired
from agent.cdi.offers import Policy
from agent.cdi.profile import Profile, knows, profiles_of, shared_paths, switched_off
from agent.cdi.record import Ledger
from agent.cdi.store import Store
from agent.config import Config, profiles
from agent.errors import ConfigError
from agent.host.devnodes import StatNode, lstat_node
from agent.host.model import Function, HoldMode, normalise_driver
from agent.host.scan import Scanner
from agent.reconcile.rules import Layout, Rules, Timing
from agent.reconcile.state import State
from agent.vfio.claim import holds
from agent.vfio.modules import Aliases, aliases_path
from agent.vfio.state import Deadlines
from agent.vfio.state import Rules as ClaimRules


class Parts(msgspec.Struct, frozen=True):
    """What a pass works with."""

    rules: Rules
    scanner: Scanner
    store: Store


def parts(
    config: Config, *, stat_node: StatNode = lstat_node, ledger: Ledger | None = None
) -> Parts:
    """Build what a pass works with; reads nothing of the host.

    Args:
        config: A checked configuration.
        stat_node: Says what is at a path below /dev; a simulated host has its own.
        ledger: What this process knows of the files that it wrote, if it wrote any.
    """
    known = profiles(config)
    return Parts(
        rules=rules(config, known),
        scanner=Scanner(
            sys=Path(config.host.sys),
            dev=Path(config.host.dev),
            run=Path(config.host.run),
            proc=Path(config.host.proc),
            stat_node=stat_node,
            extra_nodes=tuple(sorted({*config.host.extra_nodes, *shared_paths(known)})),
        ),
        store=Store(
            config.cdi.directory,
            config.state_directory,
            config.cdi.other_directories,
            ledger=ledger,
        ),
    )


def rules(config: Config, known: tuple[Profile, ...]) -> Rules:
    """What the configuration decides about a pass."""
    settings = config.reconcile
    return Rules(
        profiles=known,
        policy=Policy(
            ignore=config.cdi.ignored,
            static_dev=config.host.static_dev,
            version=config.cdi.version,
        ),
        layout=Layout(
            directory=config.cdi.directory,
            format=config.cdi.format,
            adopt=config.cdi.adopt,
        ),
        timing=Timing(
            settle=settings.settle,
            settle_max=settings.settle_max,
            udev_timeout=settings.udev_timeout,
            retry_first=settings.retry_first,
            retry_max=settings.retry_max,
        ),
        resync=settings.resync,
        resync_blind=settings.resync_blind,
        ready_timeout=settings.ready_timeout,
    )


def claim_rules(config: Config, *, modules: str = "/lib/modules") -> ClaimRules:
    """What the configuration decides about claims; reads the kernel's aliases of modules."""
    settings = config.vfio
    known = profiles(config)
    aliases = Aliases.read(aliases_path(modules))
    drivers = {pci_id.lower(): driver for pci_id, driver in settings.drivers.items()}

    def configured(function: Function) -> str | None:
        of_profiles = (
            profile.vfio.driver for profile in profiles_of(function, known) if profile.vfio
        )
        return drivers.get(function.pci_id) or next(filter(None, of_profiles), None)

    def driver_for(function: Function) -> str:
        return configured(function) or aliases.best(function)

    def unsuitable(function: Function, driver: str) -> str | None:
        said = configured(function)  # somebody knows better than the kernel's aliases
        if said is not None and normalise_driver(said) == normalise_driver(driver):
            return None
        return aliases.against(function, driver)

    def hides_users(function: Function) -> bool:
        return any(
            knows(profile.foreign, function.driver) for profile in profiles_of(function, known)
        )

    def makes_nodes(function: Function) -> bool:
        return any(
            knows(profile.drivers, function.driver) for profile in profiles_of(function, known)
        )

    return ClaimRules(
        deadlines=Deadlines(
            move=settings.move_timeout,
            publish=settings.publish_timeout,
            tries=settings.tries,
            retry=settings.retry,
            cool_down=settings.cool_down,
        ),
        ignore=config.cdi.ignored,
        allow_no_iommu=settings.allow_no_iommu,
        directory=config.cdi.directory,
        vfio_driver=driver_for,
        unsuitable=unsuitable,
        hides_users=hides_users,
        makes_nodes=makes_nodes,
        unpublishable=lambda function, mode: _unpublishable(function, mode, known),
    )


def _unpublishable(function: Function, mode: HoldMode, known: Sequence[Profile]) -> str | None:
    found = profiles_of(function, known)
    if not found:
        return switched_off(function, known) or f"no profile recognises {function.pci_id}"
    if mode is HoldMode.VFIO and all(profile.vfio_kind is None for profile in found):
        return f"profile {found[0].name} publishes no devices on VFIO"
    if mode is HoldMode.DRM and not any(profile.nodes for profile in found):
        return f"profile {found[0].name} publishes devices on VFIO only"
    return None


def require_kept_names(state: State, new: Rules) -> None:
    """Refuse a configuration under which a claim would hold something else than it was answered.

    Args:
        state: A snapshot: what the host has, and what is claimed.
        new: What the configuration would decide.

    Raises:
        ConfigError: It would rename or move what a claim holds.
    """
    wanted = desired(state.inventory, new.profiles, holds(state.claims), new.policy)
    names, now = (
        {f"{offer.kind}={offer.device.name}" for offer in offers}
        for offers in (wanted.offers, state.desired.offers)
    )
    disk = state.disk
    for claim in state.claims.live.values():
        # What a claim has lost, or gives back, no configuration can take from it.
        held = now.intersection(claim.record.names)
        lost = sorted(held - names)
        where = claim.record.directory if disk is None else disk.directory
        moved = held and where != new.layout.directory
        if lost or moved:
            raise ConfigError(
                f"claim {claim.id} holds {', '.join(lost or claim.record.names)}, which this "
                "configuration would rename or move",
                hint=f"release the claim first: cdi-agent release {claim.id}",
            )
