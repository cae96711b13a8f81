"""The metrics of claims: complete from the start, and right afterwards."""

from collections import Counter

from prometheus_client import CollectorRegistry, generate_latest

from agent.observe.claim_metrics import ClaimMetrics
from agent.reconcile.state import State
from agent.vfio.state import Outcome, Phase


class Desk:
    """What a desk has counted."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, ...]] = Counter()
        self.durations: list[tuple[str, float]] = []
        self.hung = 0


def series(metrics: ClaimMetrics) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_every_series_is_there_from_the_start_with_0() -> None:
    found = series(ClaimMetrics(Desk(), State))
    assert set(found.values()) == {0.0}
    for phase in Phase:
        assert f'cdi_agent_claims{{mode="vfio",phase="{phase}"}}' in found
    for outcome in Outcome:
        assert f'cdi_agent_claims_ended_total{{mode="drm",outcome="{outcome}"}}' in found
    for step in ("inspect", "override", "unbind", "probe"):
        assert f'cdi_agent_claim_step_duration_seconds_count{{step="{step}"}}' in found


def test_what_was_counted_is_exported_and_a_duration_only_once() -> None:
    desk = Desk()
    metrics = ClaimMetrics(desk, lambda: State(paused=True))
    desk.ended["vfio", "undone"] += 1
    desk.hung = 2
    desk.durations.append(("unbind", 0.02))
    metrics.observe()
    metrics.observe()
    found = series(metrics)
    assert found['cdi_agent_claims_ended_total{mode="vfio",outcome="undone"}'] == 1
    assert found["cdi_agent_claim_writes_hung_total"] == 2
    assert found["cdi_agent_claims_paused"] == 1
    assert found['cdi_agent_claim_step_duration_seconds_count{step="unbind"}'] == 1
    assert found['cdi_agent_claim_step_duration_seconds_bucket{le="0.01",step="unbind"}'] == 0
    assert found['cdi_agent_claim_step_duration_seconds_bucket{le="0.025",step="unbind"}'] == 1
