"""What is written and deleted, and when: every rule of ``reconcile.plan`` as a table."""

import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec import structs

from agent.cdi.desired import Desired, Offer, Reason, Withheld
from agent.cdi.files import DeleteSpec, Disk, ForeignFile, SetAside, WriteSpec
from agent.cdi.render import render
from agent.cdi.spec import Kind
from agent.host.model import Address, DeviceNumber
from agent.reconcile.plan import Plan, failed, plan, succeeded
from agent.reconcile.rules import Layout, Timing
from agent.reconcile.state import Memory
from agent.reconcile.verdict import judge, situation_of
from tests.cdi.worlds import sheets
from tests.reconcile.build import (
    GPU,
    GPU_FILE,
    LAYOUT,
    VFIO,
    VFIO_FILE,
    A,
    B,
    C,
    apply,
    desired,
    disk,
    names_on,
    offer,
    reasons,
)

TIMING = Timing(settle=0.05, settle_max=1.0, udev_timeout=5.0, retry_first=0.5, retry_max=60.0)
EMPTY = disk()


def decide(
    wanted: Desired,
    on_disk: Disk = EMPTY,
    memory: Memory | None = None,
    *,
    now: float = 100.0,
    udevd: bool = True,
    layout: Layout = LAYOUT,
) -> Plan:
    return plan(
        wanted,
        on_disk,
        memory or Memory(),
        layout=layout,
        timing=TIMING,
        now=now,
        udevd=udevd,
    )


class TestPublishing:
    def test_waits_for_settle_and_says_when(self) -> None:
        first = decide(desired(offer(A, 0)))
        assert first.actions == ()
        assert reasons(first) == {"a": Reason.SETTLING}
        assert first.wake_at == pytest.approx(100.05)

        second = decide(desired(offer(A, 0)), memory=first.memory, now=100.05)
        (action,) = second.publications
        assert isinstance(action, WriteSpec)
        assert (action.path, action.publishes) == (GPU_FILE, ("a", "all"))
        assert second.published == {(GPU, A): "a"}
        assert second.wake_at is None

    def test_settle_starts_again_when_facts_change(self) -> None:
        first = decide(desired(offer(A, 0)))
        changed = decide(desired(offer(A, 1)), memory=first.memory, now=100.04)
        assert changed.wake_at == pytest.approx(100.09)
        assert decide(desired(offer(A, 1)), memory=changed.memory, now=100.06).actions == ()

    def test_settle_does_not_start_again_for_a_mere_event(self) -> None:
        """A connector storm brings looks, but no new facts: the device is published in it."""
        result = decide(desired(offer(A, 0)), now=100.0)
        for count in range(1, 6):
            result = decide(desired(offer(A, 0)), memory=result.memory, now=100.0 + count / 100)
        assert result.publications

    def test_settle_max_bounds_facts_that_never_rest(self) -> None:
        memory, now, card = Memory(), 100.0, 0
        while not (result := decide(desired(offer(A, card)), memory=memory, now=now)).publications:
            memory, now, card = result.memory, now + 0.04, card + 1
            assert now < 101.1
        assert now >= 101.0

    def test_waits_for_udev_and_then_no_longer(self) -> None:
        wanted = desired(offer(A, 0, unsettled=True))
        first = decide(wanted)
        assert reasons(first) == {"a": Reason.UDEV}
        assert first.wake_at == pytest.approx(105.0)

        told = dataclasses.replace(
            first.memory, udev_done=frozenset({("/dev/dri/card0", DeviceNumber(226, 0))})
        )
        heard = decide(wanted, memory=told, now=100.2)
        assert heard.publications
        assert heard.unconfirmed == ()

        late = decide(wanted, memory=first.memory, now=105.0)
        assert late.publications
        assert late.unconfirmed == ((GPU, A),)

    def test_does_not_wait_for_an_absent_udev(self) -> None:
        wanted = desired(offer(A, 0, unsettled=True))
        first = decide(wanted, udevd=False)
        assert reasons(first) == {"a": Reason.SETTLING}
        second = decide(wanted, memory=first.memory, now=100.06, udevd=False)
        assert second.publications
        assert second.unconfirmed == ()

    def test_word_of_udev_about_an_earlier_node_does_not_count(self) -> None:
        told = Memory(udev_done=frozenset({("/dev/dri/card0", DeviceNumber(226, 7))}))
        assert reasons(decide(desired(offer(A, 0, unsettled=True)), memory=told)) == {
            "a": Reason.UDEV
        }

    def test_what_an_earlier_run_left_stays_if_it_is_true(self) -> None:
        result = decide(desired(offer(A, 0)), disk(offer(A, 0)))
        assert result.actions == ()
        assert result.published == {(GPU, A): "a"}
        assert result.wake_at is None

    def test_a_deleted_file_comes_back_at_once(self) -> None:
        before = decide(desired(offer(A, 0)), disk(offer(A, 0)))
        result = decide(desired(offer(A, 0)), EMPTY, before.memory, now=200.0)
        assert [type(action) for action in result.publications] == [WriteSpec]

    def test_same_bytes_are_not_written(self) -> None:
        both = (offer(A, 0), offer(B, 1))
        assert decide(desired(*both), disk(*both)).actions == ()

    def test_an_unreadable_file_of_ours_is_replaced(self) -> None:
        on_disk = disk(offer(A, 0))
        broken = dataclasses.replace(on_disk.ours[GPU_FILE], content=b"{", spec=None)
        on_disk = structs.replace(on_disk, ours={GPU_FILE: broken})
        first = decide(desired(offer(A, 0)), on_disk)
        second = decide(desired(offer(A, 0)), on_disk, first.memory, now=100.06)
        assert names_on(apply(on_disk, second)) == {GPU: ["a"]}


class TestWithdrawing:
    def test_the_last_device_takes_its_file_along(self) -> None:
        result = decide(desired(), disk(offer(A, 0)))
        assert result.actions == (
            DeleteSpec(GPU_FILE, GPU, withdraws=("a", "all"), loses=frozenset({"/dev/dri/card0"})),
        )

    def test_neighbours_stay(self) -> None:
        result = decide(desired(offer(B, 1)), disk(offer(A, 0), offer(B, 1)))
        (action,) = result.actions
        assert isinstance(action, WriteSpec)
        assert action.withdraws == ("a",)
        assert action.loses == {"/dev/dri/card0"}
        assert result.published == {(GPU, B): "b"}

    @pytest.mark.parametrize(
        "now_offered",
        [
            pytest.param(offer(A, 1), id="renumbered"),
            pytest.param(offer(A, 0, driver="i915"), id="another driver"),
            pytest.param(offer(A, 0, inode=2), id="another card in the slot"),
            pytest.param(offer(A, 0, 1), id="one node more"),
        ],
    )
    def test_changed_facts_withdraw_now_and_publish_when_settled(self, now_offered: Offer) -> None:
        on_disk = disk(offer(A, 0))
        before = decide(desired(offer(A, 0)), on_disk)
        changed = decide(desired(now_offered), on_disk, before.memory, now=101.0)
        assert [type(action) for action in changed.actions] == [DeleteSpec]
        assert reasons(changed) == {"a": Reason.SETTLING}
        after = decide(desired(now_offered), EMPTY, changed.memory, now=101.05)
        assert names_on(apply(EMPTY, after)) == {GPU: ["a"]}

    def test_facts_that_changed_while_the_agent_was_away(self) -> None:
        first = decide(desired(offer(A, 1)), disk(offer(A, 0)))
        assert [type(action) for action in first.actions] == [DeleteSpec]

    def test_swapped_numbers_never_meet(self) -> None:
        """Two cards that swap numbers are both withdrawn before either is published."""
        on_disk = disk(offer(A, 0), offer(B, 1))
        before = decide(desired(offer(A, 0), offer(B, 1)), on_disk)
        swapped = desired(offer(A, 1), offer(B, 0))
        first = decide(swapped, on_disk, before.memory, now=101.0)
        assert [type(action) for action in first.actions] == [DeleteSpec]
        second = decide(swapped, EMPTY, first.memory, now=101.05)
        assert names_on(apply(EMPTY, second)) == {GPU: ["a", "b"]}

    def test_leftovers_go(self) -> None:
        result = decide(desired(), disk(leftovers=("/old/cdi-agent_intel.com-gpu.yaml",)))
        assert result.withdrawals == (DeleteSpec("/old/cdi-agent_intel.com-gpu.yaml", None),)


class TestOrder:
    def test_a_device_leaves_its_kind_before_it_enters_another(self) -> None:
        ready = decide(desired(offer(A, 0, kind=VFIO)), disk(offer(A, 0)))
        assert [type(action) for action in ready.actions] == [DeleteSpec]
        both = decide(desired(offer(A, 0, kind=VFIO)), disk(offer(A, 0)), ready.memory, now=100.05)
        assert [(type(a), a.path) for a in both.actions] == [
            (DeleteSpec, GPU_FILE),
            (WriteSpec, VFIO_FILE),
        ]

    def test_a_file_that_loses_and_gains_is_written_twice(self) -> None:
        on_disk = disk(offer(A, 0), offer(B, 1))
        memory = decide(desired(offer(B, 1), offer(C, 2)), EMPTY).memory
        result = decide(desired(offer(B, 1), offer(C, 2)), on_disk, memory, now=100.05)
        assert [len(result.withdrawals), len(result.publications)] == [1, 1]
        halfway = apply(on_disk, structs.replace(result, publications=()))
        assert names_on(halfway) == {GPU: ["b"]}
        assert names_on(apply(on_disk, result)) == {GPU: ["b", "c"]}


class TestForeign:
    @pytest.mark.parametrize(
        ("names", "same_directory", "expected"),
        [
            pytest.param({"a"}, True, {"a": Reason.FOREIGN_DUPLICATE}, id="same directory"),
            pytest.param({"a"}, False, {}, id="the other directory only hides"),
            pytest.param({"b"}, True, {}, id="another device"),
        ],
    )
    def test_a_device_that_a_foreign_file_defines(
        self, names: set[str], *, same_directory: bool, expected: dict[str, Reason]
    ) -> None:
        foreign = ForeignFile("/cdi/vendor.yaml", GPU, frozenset(names), same_directory)
        on_disk = disk(offer(A, 0), foreign=(foreign,))
        result = decide(desired(offer(A, 0)), on_disk)
        assert reasons(result) == expected
        assert bool(result.withdrawals) == bool(expected)

    def test_all_is_left_to_a_foreign_file_that_defines_it(self) -> None:
        foreign = ForeignFile("/cdi/vendor.yaml", GPU, frozenset({"all"}))
        on_disk = disk(offer(A, 0), foreign=(foreign,))
        result = apply(on_disk, decide(desired(offer(A, 0)), on_disk))
        assert set(result.ours[GPU_FILE].devices) == {"a"}

    def test_a_foreign_file_under_our_name_is_not_touched(self) -> None:
        foreign = ForeignFile(GPU_FILE, None, problem="not YAML")
        memory = decide(desired(offer(A, 0))).memory
        result = decide(desired(offer(A, 0)), disk(foreign=(foreign,)), memory, now=101.0)
        assert result.actions == ()
        assert reasons(result) == {"a": Reason.FOREIGN_FILE}

    @pytest.mark.parametrize(
        "foreign",
        [
            ForeignFile(GPU_FILE, None, problem="not YAML"),
            ForeignFile("/cdi/cdi-agent_x.yaml", GPU, frozenset({"a"})),
        ],
        ids=["at our place", "with our prefix"],
    )
    def test_a_foreign_file_named_as_ours_is_never_adopted(self, foreign: ForeignFile) -> None:
        """The store would not rename it, and the service be unwell for as long as it is there."""
        layout = structs.replace(LAYOUT, adopt=True)
        memory = decide(desired(offer(A, 0)), layout=layout).memory
        result = decide(
            desired(offer(A, 0)), disk(foreign=(foreign,)), memory, now=101.0, layout=layout
        )
        assert result.actions == ()
        assert "a" in reasons(result)

    def test_our_definition_returns_when_the_foreign_one_goes(self) -> None:
        foreign = ForeignFile("/cdi/vendor.yaml", GPU, frozenset({"a"}))
        memory = decide(desired(offer(A, 0)), disk(foreign=(foreign,))).memory
        assert decide(desired(offer(A, 0)), disk(), memory, now=101.0).publications

    def test_adopting_sets_the_foreign_file_aside_before_ours_is_written(self) -> None:
        foreign = ForeignFile("/cdi/vendor.yaml", GPU, frozenset({"a"}))
        layout = structs.replace(LAYOUT, adopt=True)
        wanted = desired(offer(A, 0))
        first = decide(wanted, disk(foreign=(foreign,)), layout=layout)
        assert first.actions == ()
        second = decide(wanted, disk(foreign=(foreign,)), first.memory, now=100.05, layout=layout)
        assert second.actions == (SetAside("/cdi/vendor.yaml", GPU),)
        assert second.wake_at == pytest.approx(100.05)
        assert decide(wanted, disk(), second.memory, now=100.06, layout=layout).publications


class TestFailures:
    def test_a_failed_write_is_tried_again_with_growing_delay(self) -> None:
        wanted = desired(offer(A, 0))
        memory = decide(wanted).memory
        now = 101.0
        waits = []
        for _ in range(9):
            result = decide(wanted, memory=memory, now=now)
            (action,) = result.publications
            memory = failed(result.memory, action, "no space", now=now, timing=TIMING)
            waiting = decide(wanted, memory=memory, now=now + 0.1)
            assert waiting.actions == ()
            assert reasons(waiting) == {"a": Reason.STORE}
            assert waiting.wake_at is not None
            waits.append(waiting.wake_at - now)
            now = waiting.wake_at
        assert waits == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 60, 60])

    def test_success_forgets_the_failure(self) -> None:
        memory = decide(desired(offer(A, 0))).memory
        result = decide(desired(offer(A, 0)), memory=memory, now=101.0)
        (action,) = result.publications
        broken = failed(result.memory, action, "no space", now=101.0, timing=TIMING)
        assert succeeded(broken, action).retries == {}

    def test_other_content_is_tried_at_once(self) -> None:
        memory = decide(desired(offer(A, 0), offer(B, 1))).memory
        result = decide(desired(offer(A, 0), offer(B, 1)), memory=memory, now=101.0)
        (action,) = result.publications
        memory = failed(result.memory, action, "no space", now=101.0, timing=TIMING)
        assert decide(desired(offer(A, 0)), memory=memory, now=101.1).publications

    def test_a_withdrawal_that_failed_blocks_its_paths(self) -> None:
        wanted = desired(offer(B, 0), offer(C, 2))
        on_disk = disk(offer(A, 0))
        memory = decide(wanted, on_disk).memory
        result = decide(wanted, on_disk, memory, now=101.0)
        (withdrawal,) = result.withdrawals
        memory = failed(result.memory, withdrawal, "read-only", now=101.0, timing=TIMING)

        for now in (101.0, 101.2):
            result = decide(wanted, on_disk, memory, now=now)
            assert reasons(result) == {"b": Reason.BLOCKED, "c": Reason.STORE}
        again = decide(wanted, on_disk, memory, now=101.5)
        assert names_on(apply(on_disk, again)) == {GPU: ["b", "c"]}

    def test_a_failed_withdrawal_does_not_block_a_shared_node(self) -> None:
        wanted = desired(offer(B, 1, shared=("/dev/kfd",)), offer(C, 2, shared=("/dev/kfd",)))
        on_disk = disk(offer(A, 0, kind=VFIO, shared=("/dev/kfd",)))
        memory = decide(wanted, on_disk).memory
        (withdrawal,) = decide(wanted, on_disk, memory, now=100.01).withdrawals
        memory = failed(memory, withdrawal, "read-only", now=100.01, timing=TIMING)
        result = decide(wanted, on_disk, memory, now=100.1)
        assert not result.withdrawals
        assert result.published.keys() == {(GPU, B), (GPU, C)}

    @pytest.mark.parametrize(
        ("others", "rather_none"),
        [
            pytest.param([offer(B, 1)], False, id="its node is only gone"),
            pytest.param([offer(B, 1), offer(C, 0)], True, id="its node belongs to another now"),
        ],
    )
    def test_rather_no_file_than_one_that_gives_the_wrong_device(
        self, others: list[Offer], *, rather_none: bool
    ) -> None:
        result = decide(desired(*others), disk(offer(A, 0), offer(B, 1)))
        (action,) = result.withdrawals
        assert isinstance(action, WriteSpec)
        assert action.delete_if_unwritable is rather_none


class TestInvalid:
    """Devices that make no valid spec together, each valid by itself: here it is too large."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        size = len(sheets([offer(A, 0)])[GPU].content)
        monkeypatch.setattr("agent.cdi.sheet.MAX_SIZE", size)

    def test_a_kind_that_cannot_be_written_is_withheld_and_no_other(self) -> None:
        wanted = desired(offer(A, 0), offer(B, 1), offer(C, 2, kind=VFIO))
        memory = decide(wanted).memory
        result = decide(wanted, memory=memory, now=101.0)
        assert reasons(result) == {"a": Reason.INVALID, "b": Reason.INVALID}
        assert {w.detail for w in result.withheld} == {
            f"the spec of {GPU} has more than {len(sheets([offer(A, 0)])[GPU].content)} bytes"
        }
        assert names_on(apply(EMPTY, result)) == {VFIO: ["c"]}
        assert result.published == {(VFIO, C): "c"}
        assert result.wake_at is None

    def test_what_is_on_disk_stays_when_another_would_be_too_many(self) -> None:
        on_disk, wanted = disk(offer(A, 0)), desired(offer(A, 0), offer(B, 1))
        memory = decide(wanted, on_disk).memory
        result = decide(wanted, on_disk, memory, now=101.0)
        assert reasons(result) == {"b": Reason.INVALID}
        assert (result.actions, result.published) == ((), {(GPU, A): "a"})

    def test_what_is_on_disk_goes_if_it_has_to_be_written_anew_and_cannot(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        on_disk, wanted = disk(offer(A, 0)), desired(offer(A, 0))
        memory = decide(wanted, on_disk).memory
        monkeypatch.setattr("agent.cdi.sheet.MAX_SIZE", 0)
        no_all = (ForeignFile("/cdi/other.yaml", GPU, frozenset({"all"})),)
        result = decide(wanted, structs.replace(on_disk, foreign=no_all), memory, now=101.0)
        assert reasons(result) == {"a": Reason.INVALID}
        assert names_on(apply(on_disk, result)) == {}


class TestRest:
    """What is on disk as it was last wanted stays without being looked at."""

    WORLD = desired(offer(A, 0), offer(B, 1))

    def settled(self) -> tuple[Disk, Memory]:
        first = decide(self.WORLD)
        second = decide(self.WORLD, memory=first.memory, now=101.0)
        on_disk = apply(EMPTY, second)
        return on_disk, decide(self.WORLD, on_disk, second.memory, now=102.0).memory

    def test_nothing_is_at_rest_that_was_wanted_and_not_written(self) -> None:
        """Else the withdrawal of one device would publish another, before any other withdrawal."""
        on_disk, memory = self.settled()
        more = (*self.WORLD.offers, offer(C, 2))
        memory = decide(desired(*more), on_disk, memory, now=103.0).memory
        wanted = decide(desired(*more), on_disk, memory, now=104.0)
        assert names_on(apply(on_disk, wanted)) == {GPU: ["a", "b", "c"]}
        result = decide(desired(*more[1:]), on_disk, wanted.memory, now=105.0)
        (withdrawal,) = result.withdrawals
        assert isinstance(withdrawal, WriteSpec)
        assert b"card2" not in withdrawal.content
        assert names_on(apply(on_disk, result)) == {GPU: ["b", "c"]}

    def test_what_another_program_did_to_the_file_is_put_right(self) -> None:
        on_disk, memory = self.settled()
        (file,) = disk(offer(A, 0)).ours.values()
        result = decide(self.WORLD, Disk("/cdi", {GPU_FILE: file}), memory, now=103.0)
        assert names_on(apply(on_disk, result)) == {GPU: ["a", "b"]}

    @pytest.mark.parametrize(
        ("file", "expected"),
        [
            pytest.param(
                ForeignFile("/cdi/other.yaml", GPU, frozenset({"a"})),
                {"a": Reason.FOREIGN_DUPLICATE},
                id="doubles one device",
            ),
            pytest.param(
                ForeignFile(GPU_FILE, None),
                {"a": Reason.FOREIGN_FILE, "b": Reason.FOREIGN_FILE},
                id="lies where ours lay",
            ),
        ],
    )
    def test_a_foreign_file_ends_it(self, file: ForeignFile, expected: dict[str, Reason]) -> None:
        on_disk, memory = self.settled()
        with_foreign = structs.replace(on_disk, foreign=(file,))
        assert reasons(decide(self.WORLD, with_foreign, memory, now=103.0)) == expected

    def test_files_that_an_earlier_agent_left_are_at_rest_after_the_first_plan(self) -> None:
        on_disk = disk(*self.WORLD.offers)
        memory = decide(self.WORLD, on_disk).memory
        situation = situation_of(
            self.WORLD,
            on_disk,
            memory,
            layout=LAYOUT,
            timing=TIMING,
            now=103.0,
            heard=103.0,
            udevd=True,
        )
        assert judge(situation) == []


class TestRecheck:
    def test_contradictions_are_looked_at_again_with_growing_delay(self) -> None:
        wanted = desired(withheld=(Withheld(A, GPU, Reason.PATH_CONFLICT, "two cards"),))
        memory, now, waits = Memory(), 100.0, []
        for _ in range(4):
            result = decide(wanted, memory=memory, now=now)
            assert result.wake_at is not None
            waits.append(result.wake_at - now)
            memory, now = result.memory, result.wake_at
        assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4])
        assert (
            decide(desired(offer(A, 0)), memory=memory, now=now).memory.recheck.addresses == set()
        )


# --- properties -----------------------------------------------------------------------------------

OFFERS = st.builds(
    offer,
    st.sampled_from([A, B, C]),
    st.integers(0, 3),
    kind=st.sampled_from([GPU, VFIO]),
    driver=st.sampled_from(["xe", "i915"]),
)


def one_world(offers: list[Offer]) -> tuple[Offer, ...]:
    """Keep what can be true at once: a device in one kind, a node with one device."""
    kept: dict[object, Offer] = {}
    paths: set[str] = set()
    for candidate in offers:
        node_paths = {n.path for n in candidate.device.edits.device_nodes}
        if candidate.address not in kept and not node_paths & paths:
            kept[candidate.address] = candidate
            paths |= node_paths
    return tuple(kept[address] for address in sorted(kept, key=str))


WORLDS = st.lists(OFFERS, max_size=4).map(one_world)


@given(st.lists(st.tuples(WORLDS, st.floats(0.001, 2.0)), max_size=8))
def test_no_step_of_any_plan_shows_a_node_twice_or_an_untrue_entry(
    history: list[tuple[tuple[Offer, ...], float]],
) -> None:
    """After each single action: no path in two files or under two names, nothing that is gone."""
    on_disk, memory, now = EMPTY, Memory(), 100.0
    for world, pause in history:
        now += pause
        result = decide(desired(*world), on_disk, memory, now=now)
        memory = result.memory
        true_now = {
            (o.kind, o.device.name, n.path) for o in world for n in o.device.edits.device_nodes
        }
        for count in range(len(result.actions) + 1):
            step = structs.replace(result, withdrawals=result.actions[:count], publications=())
            shown = [
                (file.spec.kind, device.name, n.path)
                for file in apply(on_disk, step).ours.values()
                if file.spec is not None
                for device in file.spec.devices
                if device.name != "all"
                for n in device.edits.device_nodes
            ]
            paths = [path for _, _, path in shown]
            if count >= len(result.withdrawals):
                assert set(shown) <= true_now
                assert len(paths) == len(set(paths))
        on_disk = apply(on_disk, result)


POOL = (
    offer(A, 0),
    offer(A, 1),
    offer(A, 0, driver="i915"),
    offer(A, 0, unsettled=True),
    dataclasses.replace(offer(A, 0), in_all=False),
    offer(B, 1),
    offer(B, 1, shared=("/dev/kfd",)),
    offer(B, 1, kind=VFIO),
    offer(C, 2, shared=("/dev/kfd",)),
)
"""Few objects, so that what is offered is often the very same as before."""

FOREIGN = (
    (),
    (ForeignFile("/cdi/other.yaml", GPU, frozenset({"all"})),),
    (ForeignFile("/cdi/other.yaml", GPU, frozenset({"a"})),),
)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from((None, A, B, *POOL)),
            st.sampled_from((0.01, 0.1, 0.1, 10.0)),
            st.sampled_from((*FOREIGN[:1] * 3, *FOREIGN)),
            st.sampled_from((*(LAYOUT,) * 7, structs.replace(LAYOUT, format="json"))),
            st.sampled_from((0, 1, 5, 5, 5)),
        ),
        min_size=3,
        max_size=16,
    )
)
def test_what_is_taken_over_from_the_last_plan_changes_none(
    history: list[tuple[Offer | Address | None, float, tuple[ForeignFile, ...], Layout, int]],
) -> None:
    """Whatever comes or goes, whatever others do, and however much of a plan is done."""
    on_disk, memory, now = EMPTY, Memory(), 100.0
    offered: dict[Address, Offer] = {}
    for change, pause, foreign, layout, count in history:
        if isinstance(change, Offer):
            offered[change.address] = change
        elif change is not None:
            offered.pop(change, None)
        world = one_world([offered[address] for address in sorted(offered)])
        now += pause
        on_disk = structs.replace(on_disk, foreign=foreign)
        wanted = desired(*world)
        result = decide(wanted, on_disk, memory, now=now, layout=layout)
        forgetful = dataclasses.replace(memory, sheets={})
        assert result == decide(wanted, on_disk, forgetful, now=now, layout=layout)
        for kind, sheet in result.memory.sheets.items():
            with_all = kind not in taken(foreign)
            again = sheets(sheet.offers, suffix=layout.format, with_all=with_all)
            assert again == {kind: sheet}
            assert sheet.content == render(sheet.spec, suffix=layout.format)
        done = structs.replace(result, withdrawals=result.actions[:count], publications=())
        event(f"{result.actions == done.actions}: all of the plan is done")
        memory, on_disk = result.memory, apply(on_disk, done)


def taken(foreign: Iterable[ForeignFile]) -> set[Kind]:
    return {file.kind for file in foreign if file.kind and "all" in file.names}


@given(WORLDS)
def test_quiet_is_reached_and_stays(world: tuple[Offer, ...]) -> None:
    """Once settled, everything offered is on disk, and the next plan has nothing to do."""
    first = decide(desired(*world))
    second = decide(desired(*world), memory=first.memory, now=101.0)
    on_disk = apply(EMPTY, second)
    assert second.published.keys() == {(o.kind, o.address) for o in world}
    third = decide(desired(*world), on_disk, second.memory, now=102.0)
    assert (third.actions, third.wake_at, third.withheld) == ((), None, ())
