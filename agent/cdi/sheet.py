"""What a spec file would hold: the offers of a kind as one spec, and as bytes. Pure.

A sheet is made from an earlier one of its kind. The text of an entry is taken over as long as its
device is the same object, so of 512 devices only those are checked and put into text that have
changed. The entry ``all``, which changes with each of them, is put together from their texts.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter

from agent.cdi import rules
from agent.cdi.offers import Offer
from agent.cdi.render import Entry, Suffix, content_of, entry_of, render, union_of
from agent.cdi.spec import Device, Kind, Spec
from agent.errors import SpecError


@dataclasses.dataclass(frozen=True, slots=True)
class Sheet:
    """The spec of a kind, as it would be written."""

    offers: tuple[Offer, ...]
    """In order of address."""
    suffix: Suffix
    with_all: bool
    """Whether ``all`` is among the entries if there is anything that it would give."""
    spec: Spec
    content: bytes
    entries: Mapping[str, Entry]
    """By name, ``all`` included."""

    @property
    def devices(self) -> Mapping[str, Device]:
        """By name, ``all`` included."""
        return {name: entry.device for name, entry in self.entries.items()}


def sheets(
    offers: Iterable[Offer],
    before: Mapping[Kind, Sheet] | None = None,
    *,
    suffix: Suffix = "yaml",
    without_all: Collection[Kind] = (),
) -> dict[Kind, Sheet]:
    """Put offers together to one sheet for each kind.

    Args:
        offers: At most one of a name in a kind.
        before: Earlier sheets. They change nothing but the time that this takes.
        suffix: The format.
        without_all: The kinds that get no entry ``all``.

    Raises:
        SpecError: A device is itself called ``all``, or a rule of CDI is broken.
    """
    by_kind: dict[Kind, list[Offer]] = {}
    for offer in offers:
        by_kind.setdefault(offer.kind, []).append(offer)
    return {
        kind: _sheet(
            kind,
            tuple(sorted(members, key=attrgetter("order"))),
            None if before is None else before.get(kind),
            suffix=suffix,
            with_all=kind not in without_all,
        )
        for kind, members in sorted(by_kind.items())
    }


def _sheet(
    kind: Kind,
    offers: tuple[Offer, ...],
    before: Sheet | None,
    *,
    suffix: Suffix,
    with_all: bool,
) -> Sheet:
    if before is not None and (before.offers, before.suffix, before.with_all) == (
        offers,
        suffix,
        with_all,
    ):
        return before
    known = {} if before is None else before.entries
    entries = [
        entry
        if (entry := known.get(offer.device.name)) is not None and entry.device is offer.device
        else entry_of(offer.device)
        for offer in offers
    ]
    if any(entry.device.name == rules.ALL for entry in entries):
        raise SpecError(f"a device of {kind} is called {rules.ALL}")
    in_all = [entry for entry, offer in zip(entries, offers, strict=True) if offer.in_all]
    if in_all and with_all:
        entries.append(union_of(rules.ALL, in_all))
    spec = Spec(kind, tuple([entry.device for entry in entries]))
    return Sheet(
        offers=offers,
        suffix=suffix,
        with_all=with_all,
        spec=spec,
        # JSON has no form of its own for one entry: it is written whole, and few choose it.
        content=render(spec, suffix=suffix) if suffix == "json" else content_of(kind, entries),
        entries={entry.device.name: entry for entry in entries},
    )
