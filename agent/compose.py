"""From a configuration to the objects that do the work: the one place that knows both.

The service and the commands that do the same once build from here, so that what ``generate``
shows is what ``run`` would write.
"""

import dataclasses
from pathlib import Path

from agent.cdi.offers import Policy
from agent.cdi.profile import Profile, shared_paths
from agent.cdi.store import Store
from agent.config import Config, profiles
from agent.host.devnodes import StatNode, lstat_node
from agent.host.scan import Scanner
from agent.reconcile.rules import Layout, Rules, Timing


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What a pass works with."""

    rules: Rules
    scanner: Scanner
    store: Store


def parts(config: Config, *, stat_node: StatNode = lstat_node) -> Parts:
    """Build what a pass works with; reads nothing of the host.

    Args:
        config: A checked configuration.
        stat_node: Says what is at a path below /dev; a simulated host has its own.
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
