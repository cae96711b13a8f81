"""What a spec file would hold: the offers of a kind as one spec, and as bytes. Pure.

A sheet is made from an earlier one of its kind. The text of an entry is taken over as long as its
device is the same object, so of 512 devices only those are checked and put into text that have
changed. The entry ``all``, which changes with each of them, is put together from their texts.
"""

from collections.abc import Iterable, Mapping
from operator import attrgetter

import msgspec
from msgspec import structs

from agent.cdi import rules
from agent.cdi.offers import Offer
from agent.cdi.render import Entry, Suffix, content_of, entry_of, render, union_of
from agent.cdi.spec import Device, Kind, Spec
from agent.cdi.tree import MAX_SIZE
from agent.errors import SpecError
from agent.host.model import Address


class Sheet(msgspec.Struct, frozen=True):
    """The spec of a kind, as it would be written."""

    offers: tuple[Offer, ...]
    """In order of address."""
    how: tuple[Suffix, bool]
    """The format, and whether there is to be an entry ``all``."""
    own: tuple[Entry, ...]
    """The entry of each offer, in the same order."""
    in_all: tuple[Entry, ...]
    """Those that ``all`` gives."""
    spec: Spec
    """The same object as long as the content is the same."""
    content: bytes
    entries: Mapping[str, Entry]
    """By name, ``all`` included."""
    names: Mapping[tuple[Kind, Address], str]
    """What the device of each offer is called."""


def sheet_of(
    kind: Kind,
    offers: Iterable[Offer],
    before: Sheet | None = None,
    *,
    suffix: Suffix = "yaml",
    with_all: bool = True,
) -> Sheet:
    """Put the offers of a kind together.

    Args:
        kind: Of all of them.
        offers: At least one, and at most one of a name.
        before: An earlier sheet. It changes nothing but the time that this takes.
        suffix: The format.
        with_all: Whether there is an entry ``all``, if there is anything that it would give.

    Raises:
        SpecError: A device is itself called ``all``, a rule of CDI is broken, or it is larger than
            any file that is read.
    """
    offers = tuple(sorted(offers, key=attrgetter("order")))
    how = (suffix, with_all)
    if before is not None and (before.offers, before.how) == (offers, how):
        return before
    known = {} if before is None else before.entries
    own = tuple([_entry(known.get(offer.device.name), offer.device) for offer in offers])
    in_all = tuple([entry for entry, offer in zip(own, offers, strict=True) if offer.in_all])
    names = {offer.key: offer.device.name for offer in offers}
    if before is not None and (before.own, before.in_all, before.how) == (own, in_all, how):
        return structs.replace(before, offers=offers, names=names)
    if any(entry.device.name == rules.ALL for entry in own):
        raise SpecError(f"a device of {kind} is called {rules.ALL}")
    entries = (*own, union_of(rules.ALL, in_all)) if in_all and with_all else own
    spec = Spec(kind, tuple([entry.device for entry in entries]))
    # JSON has no form of its own for one entry: it is written whole, and few choose it.
    content = render(spec, suffix=suffix) if suffix == "json" else content_of(kind, entries)
    if len(content) > MAX_SIZE:
        raise SpecError(f"the spec of {kind} has more than {MAX_SIZE} bytes")
    return Sheet(
        offers=offers,
        how=how,
        own=own,
        in_all=in_all,
        spec=spec,
        content=content,
        entries={entry.device.name: entry for entry in entries},
        names=names,
    )


def _entry(known: Entry | None, device: Device) -> Entry:
    is_known = known is not None and (known.device is device or known.device == device)
    return known if known is not None and is_known else entry_of(device)
