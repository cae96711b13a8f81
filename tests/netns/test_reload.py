"""SIGHUP: a new configuration takes the files along, and a bad one changes nothing."""

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.netns.inside import MOVED_SPECS, OTHER_SPECS, SPECS
from tests.netns.outside import PrivateHost
from tests.netns.story import (
    ALL,
    GPU_FILE,
    MEI_FILE,
    SETTINGS,
    A,
    B,
    Published,
    becomes_true,
    files_written,
    log_entries,
    published,
    settings,
    start,
    truth,
)

pytestmark = pytest.mark.netns

OTHER_KIND = "example.com/gpu"
JSON_FILE = GPU_FILE.replace(".yaml", ".json")


def profile(**keys: Any) -> dict[str, Any]:  # noqa: ANN401 - a profile's keys have many types
    """Settings under which Intel's GPUs are published in another way."""
    return settings(cdi={"profiles": [{"name": "intel-gpu", **keys}]})


def renamed(names: Mapping[str, str], of: Published) -> Published:
    """The same under other names."""
    return {names.get(name, name): nodes for name, nodes in of.items()}


# --- the files move -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "directory", [MOVED_SPECS, OTHER_SPECS], ids=["one that is made", "the other of the two"]
)
def test_another_directory_takes_the_specs_and_the_old_one_is_left_empty(
    host: PrivateHost, directory: str
) -> None:
    """No device is defined in both, at no moment; and back again."""
    start(host, A, B)
    before = published(host)
    for old, new in ((SPECS, directory), (directory, SPECS)):
        host.inside.reload(settings(cdi={"directory": new}))
        assert published(host, new) == before
        assert published(host, old) == {}
    assert host.end_reader()["overlaps"] == []


def test_a_directory_that_is_left_is_left_empty_though_there_is_no_record_of_it(
    host: PrivateHost,
) -> None:
    """The state directory cannot be written, and no setting names the old directory any more."""
    host.inside.mount_read_only("/run/sealed")
    host.kernel.plug(A.hardware)
    state = {"state_directory": "/run/sealed/state"}
    host.inside.start_agent(settings(cdi={"directory": MOVED_SPECS}) | state)
    before = published(host, MOVED_SPECS)
    assert before == truth(host)
    host.inside.reload({**SETTINGS, **state})
    assert published(host) == before
    assert published(host, MOVED_SPECS) == {}
    assert host.end_reader()["overlaps"] == []


def test_another_format_replaces_the_file_of_the_old_one(host: PrivateHost) -> None:
    """Both in one directory would make every device unresolvable: the consumer would tell."""
    start(host, A, B)
    before = published(host)
    host.inside.reload(settings(cdi={"format": "json"}))
    assert published(host) == before
    assert JSON_FILE in host.inside.specs()
    assert GPU_FILE not in host.inside.specs()
    assert set(files_written(host)[:2]) == {("deleted", GPU_FILE), ("deleted", MEI_FILE)}


def test_another_kind_takes_the_devices_and_the_old_one_is_gone_before(host: PrivateHost) -> None:
    start(host, A, B)
    names = {name: name.replace("intel.com/gpu", OTHER_KIND) for name in (A.own, B.own, ALL)}
    host.inside.reload(profile(kind=OTHER_KIND))
    assert published(host) == renamed(names, truth(host))
    assert not any(
        {"intel.com/gpu", OTHER_KIND} <= set(kinds) for kinds in host.end_reader()["kinds"]
    )


def test_other_names_replace_the_old_ones_at_once(host: PrivateHost) -> None:
    start(host, A, B)
    names = {gpu.own: f"intel.com/gpu=card{number}" for number, gpu in enumerate((A, B))}
    host.inside.reload(profile(naming="card"))
    assert published(host) == renamed(names, truth(host))
    host.inside.reload(SETTINGS)
    assert published(host) == truth(host)


def test_what_is_ignored_goes_and_comes_back(host: PrivateHost) -> None:
    start(host, A, B)
    host.inside.reload(settings(cdi={"ignore": [A.address]}))
    assert {A.own, A.mei}.isdisjoint(published(host))
    assert published(host)[ALL] == published(host)[B.own]
    host.inside.reload(SETTINGS)
    assert published(host) == truth(host)


def test_another_profile_changes_what_a_container_gets(host: PrivateHost) -> None:
    start(host, A)
    host.inside.reload(profile(nodes=[{"role": "render"}]))
    assert published(host)[A.own] == ("/dev/dri/renderD128",)
    host.inside.reload(profile(enabled=False))
    assert {A.own, ALL}.isdisjoint(published(host))
    assert A.mei in published(host)


def test_the_agent_follows_the_host_by_the_new_configuration(host: PrivateHost) -> None:
    start(host, A)
    host.inside.reload(settings(cdi={"directory": MOVED_SPECS}))
    host.kernel.plug(B.hardware)
    assert host.kernel.move(A.address, "vfio-pci") == 0
    seen = host.until(lambda: published(host, MOVED_SPECS), lambda now: now == truth(host))
    assert seen == truth(host)


# --- what is refused, and what is told ------------------------------------------------------------


def test_a_bad_configuration_is_refused_and_the_old_one_stays(host: PrivateHost) -> None:
    start(host, A)
    problems = {"cdi: {directroy: /tmp}": "directroy", "cdi: [": "not YAML", "\0": "", "- a": ""}
    for number, (text, problem) in enumerate(problems.items()):
        host.inside.reload_text(text)
        refused = log_entries(host, "reload-refused")
        assert len(refused) == number + 1
        assert problem in refused[number]["problem"]
    assert files_written(host) == []
    assert len(log_entries(host, "ready")) == 1, "that of the start"
    host.inside.reload(profile(kind=OTHER_KIND))
    assert len(log_entries(host, "ready")) == 2
    host.inside.reload(profile())
    host.kernel.plug(B.hardware)
    becomes_true(host)


@pytest.mark.parametrize(
    ("directory", "problem"),
    [
        pytest.param("/proc/cdi", "cannot make /proc/cdi", id="cannot be made"),
        pytest.param("/run/sealed", "cannot write to /run/sealed", id="read-only"),
        pytest.param("/run/theirs", "another cdi-agent holds /run/theirs", id="another agent's"),
    ],
)
def test_a_directory_that_cannot_be_had_takes_nothing_out_of_the_old_one(
    host: PrivateHost, directory: str, problem: str
) -> None:
    host.inside.mount_read_only("/run/sealed")
    host.inside.occupy("/run/theirs")
    start(host, A)
    host.inside.reload(settings(cdi={"directory": directory}))
    (refused,) = log_entries(host, "reload-refused")
    assert refused["problem"].startswith(problem)
    assert files_written(host) == []
    host.kernel.plug(B.hardware)
    becomes_true(host)


def test_systemd_is_told_of_each_reload_and_of_its_end(host: PrivateHost) -> None:
    """RELOADING with the time, which systemd compares; READY only once the files are as wanted."""
    start(host, A)
    for text in (yaml.safe_dump(profile(kind=OTHER_KIND)), "{"):
        before = len(host.inside.told())
        host.inside.reload_text(text)
        assert f"{OTHER_KIND}=all" in published(host)
        first, *middle, last = host.inside.told()[before:]
        assert first.keys() == {"RELOADING", "MONOTONIC_USEC"}
        assert int(first["MONOTONIC_USEC"]) > 0
        assert not any("READY" in fields for fields in middle)
        assert last["READY"] == "1"
        assert "MONOTONIC_USEC" not in last


def test_keys_that_need_a_restart_are_named_and_the_rest_is_taken(host: PrivateHost) -> None:
    start(host, A)
    host.inside.reload(
        settings(
            metrics={"listen": "127.0.0.1:9999"},
            log={"level": "error"},
            reconcile={"queue_size": 99, "settle": "60ms"},
            host={"receive_buffer": 65536},
            cdi={"ignore": [A.address]},
        )
        | {"state_directory": "/run/elsewhere"}
    )
    (told,) = log_entries(host, "restart-needed")
    assert told["keys"] == [
        "host.receive_buffer",
        "log.level",
        "metrics.listen",
        "reconcile.queue_size",
        "state_directory",
    ]
    assert published(host) == {}
    assert host.metrics()
