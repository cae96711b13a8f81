"""What a reload cannot change keeps its value and is named; everything else is taken."""

import msgspec
import pytest

from agent.config import Config, parse
from agent.config.finals import FINAL_KEYS, keep_finals
from agent.errors import ConfigError


def test_every_such_key_exists() -> None:
    for section, keys in FINAL_KEYS.items():
        owner = getattr(Config(), section) if section else Config()
        assert set(keys) <= set(owner.__struct_fields__)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", []),
        ("cdi: {directory: /run/other}\nreconcile: {resync: 1m}", []),
        ("state_directory: /run/other", ["state_directory"]),
        ("log: {level: debug, format: json}", ["log.format", "log.level"]),
        (
            "host: {sys: /h/sys, dev: /h/dev, run: /h/run, proc: /h/proc, extra_nodes: [/dev/x]}",
            ["host.dev", "host.proc", "host.run", "host.sys"],  # claims have them from the start
        ),
        ("host: {receive_buffer: 65536, static_dev: true}", ["host.receive_buffer"]),
        (
            "metrics: {listen: null}\nreconcile: {queue_size: 99}",
            ["metrics.listen", "reconcile.queue_size"],
        ),
    ],
)
def test_what_changed_in_vain_is_named(text: str, named: list[str]) -> None:
    old, new = Config(), parse(text)
    kept, changed = keep_finals(old, new)
    assert changed == named
    assert keep_finals(old, kept) == (kept, [])
    finals = {name.partition(".")[0] for name in named}
    untouched = {name for name in Config.__struct_fields__ if name not in finals}
    assert {n: getattr(kept, n) for n in untouched} == {n: getattr(new, n) for n in untouched}


def test_the_rest_of_a_section_is_taken() -> None:
    kept, _ = keep_finals(Config(), parse("host: {receive_buffer: 65536, static_dev: true}"))
    assert kept == msgspec.structs.replace(
        Config(), host=msgspec.structs.replace(Config().host, static_dev=True)
    )


def test_what_contradicts_a_value_that_stays_is_refused() -> None:
    """Else the record of what is ours would lie among the specs."""
    new = parse("state_directory: /run/other\ncdi: {directory: /var/lib/cdi-agent}")
    with pytest.raises(ConfigError, match="must be another path than state_directory"):
        keep_finals(Config(), new)
