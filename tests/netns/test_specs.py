"""What becomes of spec files, ours and those of others, whoever changes them."""

import signal

import pytest

from tests.netns.inside import MOVED_SPECS, OTHER_SPECS, SPECS
from tests.netns.outside import PrivateHost
from tests.netns.process import refusing
from tests.netns.story import (
    ALL,
    GPU_FILE,
    MEI_FILE,
    SETTINGS,
    A,
    B,
    becomes,
    becomes_true,
    files_written,
    log_entries,
    published,
    settings,
    start,
    truth,
)

pytestmark = pytest.mark.netns

OURS = f"{SPECS}/{GPU_FILE}"
THEIRS = "vendor.yaml"


# --- what somebody does to our files --------------------------------------------------------------


def test_a_file_that_somebody_changes_is_put_right_at_once(host: PrivateHost) -> None:
    """Deleted, moved away, edited, made unreadable to others: long before the next regular look."""
    start(host, A)
    whole = host.inside.read_file(OURS)

    def is_whole() -> bool:
        files = host.inside.files(SPECS)
        return files.get(GPU_FILE) == whole and host.inside.mode(OURS) == 0o644

    host.inside.remove(OURS)
    assert host.until(is_whole, bool)
    host.inside.rename(OURS, f"{SPECS}/away")
    assert host.until(is_whole, bool)
    host.inside.put_file(OURS, whole.replace("card0", "card9"))
    assert host.until(is_whole, bool)
    host.inside.chmod(OURS, 0o600)
    assert host.until(is_whole, bool)
    assert log_entries(host, "spec-file-changed")
    assert host.metrics()["cdi_agent_spec_watch_up"] == 1


def test_a_directory_that_somebody_removes_is_made_again_with_what_was_in_it(
    host: PrivateHost,
) -> None:
    start(host, A)
    for way in ("removed", "renamed"):
        if way == "removed":
            host.inside.remove_all(SPECS)
        else:
            host.inside.rename(SPECS, f"{SPECS}-away")
        becomes_true(host)
    host.inside.remove(OURS)  # and it is watched again
    becomes_true(host)


def test_our_own_writes_lead_to_no_look_of_their_own(host: PrivateHost) -> None:
    start(host, A)
    host.kernel.plug(B.hardware)
    becomes_true(host)
    host.quiet()
    assert not [entry for entry in log_entries(host, "pass") if "specs" in entry["reasons"]]


def test_without_a_watch_the_regular_look_puts_it_right(host: PrivateHost) -> None:
    """It is said once, with the setting of the kernel that it takes."""
    host.kernel.plug(A.hardware)
    host.inside.start_agent(settings(reconcile={"resync": "1s"}), through=refusing("inotify"))
    host.inside.remove(OURS)
    becomes_true(host)
    (said,) = log_entries(host, "spec-watch-unavailable")
    assert "fs.inotify.max_user_instances" in said["hint"]
    assert host.metrics()["cdi_agent_spec_watch_up"] == 0


# --- what we left -------------------------------------------------------------------------------


def test_what_an_earlier_run_left_in_another_directory_is_cleaned_up(host: PrivateHost) -> None:
    """Also when it was killed, and though nobody told the new one where the old one wrote."""
    host.kernel.plug(A.hardware)
    host.inside.start_agent(settings(cdi={"directory": MOVED_SPECS}))
    host.inside.put_spec(f"{MOVED_SPECS}/{THEIRS}", "example.com/other", ["one"])
    assert host.inside.end_agent(signal.SIGKILL) == -signal.SIGKILL
    temp = f"{MOVED_SPECS}/cdi-agent_.0123456789abcdef.tmp"
    host.inside.write_file(temp, "half a spec")
    host.inside.start_agent(SETTINGS)
    assert published(host) == truth(host)
    assert host.inside.listing(MOVED_SPECS) == [THEIRS]
    assert host.end_reader()["overlaps"] == []


def test_files_are_known_as_ours_though_the_record_was_lost(host: PrivateHost) -> None:
    start(host, A, B)
    host.inside.end_agent()
    host.kernel.unplug(A.address)
    host.kernel.unplug(B.address)
    host.inside.remove("/var/lib/cdi-agent/specs.json")
    host.inside.start_agent(SETTINGS)
    assert published(host) == {}
    assert {entry["path"] for entry in log_entries(host, "spec-file-recognised")} == {
        OURS,
        f"{SPECS}/{MEI_FILE}",
    }


# --- what others define ---------------------------------------------------------------------------


def test_a_definition_in_the_other_directory_is_told_once_and_again_when_it_is_uncovered(
    host: PrivateHost,
) -> None:
    theirs = f"{OTHER_SPECS}/{THEIRS}"
    start(host, A, B)
    host.inside.put_spec(theirs, "intel.com/gpu", [A.name])
    (told,) = host.until(lambda: log_entries(host, "foreign-definition"), bool)
    assert (told["path"], told["device"]) == (theirs, A.own)
    assert published(host) == truth(host)

    assert host.kernel.move(A.address, "vfio-pci") == 0
    becomes_true(host)
    (told,) = host.until(lambda: log_entries(host, "foreign-uncovered"), bool)
    assert (told["path"], told["device"]) == (theirs, A.own)

    assert host.kernel.move(A.address, "xe") == 0
    becomes_true(host)
    host.quiet()
    assert len(log_entries(host, "foreign-definition")) == 2
    assert host.inside.listing(OTHER_SPECS) == [THEIRS]


def test_a_definition_in_the_same_directory_withholds_ours_until_it_is_gone(
    host: PrivateHost,
) -> None:
    """Two of them make both useless; theirs stays, and is named."""
    host.expected_faults.add(f"{A.own} defined twice")
    start(host, A, B)
    host.inside.put_spec(f"{SPECS}/{THEIRS}", "intel.com/gpu", [A.name])
    without = {name: nodes for name, nodes in truth(host).items() if name != A.own}
    without[ALL] = without[B.own]
    expected = {**without, A.own: ()}
    becomes(host, expected)
    (told,) = [w for w in log_entries(host, "withheld") if w["reason"] == "foreign-duplicate"]
    assert f"{SPECS}/{THEIRS} defines {A.own} too" in told["problem"]
    host.inside.remove(f"{SPECS}/{THEIRS}")
    becomes_true(host)


def test_a_foreign_file_is_set_aside_if_that_is_wanted(host: PrivateHost) -> None:
    """Renamed, not deleted: no consumer loads it, and a person finds it."""
    host.expected_faults.add(f"{A.own} defined twice")
    start(host, A)
    host.inside.put_spec(f"{SPECS}/{THEIRS}", "intel.com/gpu", [A.name])
    host.until(lambda: log_entries(host, "withheld"), bool)
    host.inside.put_spec(f"{SPECS}/other.yaml", "example.com/other", ["one"])
    host.inside.reload(settings(cdi={"adopt": True}))
    becomes(host, {**truth(host), "example.com/other=one": ()})
    assert f"{THEIRS}.set-aside-by-cdi-agent" in host.inside.listing(SPECS)
    assert ("written", GPU_FILE) in files_written(host)


def test_a_file_of_others_with_the_name_of_ours_is_never_touched(host: PrivateHost) -> None:
    host.inside.put_spec(OURS, "intel.com/gpu", ["theirs"])
    host.kernel.plug(A.hardware)
    host.inside.start_agent(SETTINGS)
    before = host.inside.read_file(OURS)
    assert A.mei in published(host)
    assert A.own not in published(host)
    (told,) = [w for w in log_entries(host, "withheld") if w["kind"] == "intel.com/gpu"]
    assert (told["reason"], OURS in told["problem"]) == ("foreign-file", True)
    host.inside.end_agent()
    assert host.inside.read_file(OURS) == before
