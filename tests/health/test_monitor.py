"""States of devices over time, by a clock that the test turns."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurt.health import Evidence, HealthMonitor, HealthPolicy, Transition, findings
from gpurt.sources.condition import DeviceCondition, RecoveryAction, Throttle
from gpurt.types import DeviceState

HEALTHY, SUSPECT, DEGRADED = DeviceState.HEALTHY, DeviceState.SUSPECT, DeviceState.DEGRADED
UNRESPONSIVE, LOST = DeviceState.UNRESPONSIVE, DeviceState.LOST
GOOD = DeviceCondition(
    ecc_uncorrected=0, remapped_uncorrected=0, remap_pending=False, remap_failed=False,
    recovery_action=RecoveryAction.NONE, throttle=frozenset(), slowdown_temperature_c=87,
)  # fmt: skip
FINE = Evidence(temperature_c=41, condition=GOOD)
GPU = "GPU-1a1a"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    def __init__(self, **policy: Any) -> None:
        self.clock = Clock()
        self.monitor = HealthMonitor(HealthPolicy(**policy), clock=self.clock)

    def see(self, evidence: Evidence = FINE, *, times: int = 1, after_s: float = 1.0) -> list[Transition]:
        found: list[Transition] = []
        for _ in range(times):
            self.clock.now += after_s
            transition = self.monitor.observe(GPU, evidence)
            if transition is not None:
                found.append(transition)
        return found

    @property
    def state(self) -> DeviceState:
        return self.monitor.verdict(GPU).state

    @property
    def reason(self) -> str:
        return self.monitor.verdict(GPU).reason or ""


def condition(**changes: Any) -> Evidence:
    known = {name: getattr(GOOD, name) for name in DeviceCondition.__dataclass_fields__}
    return Evidence(temperature_c=41, condition=DeviceCondition(**{**known, **changes}))


class TestXids:
    def test_nvi_10_application_xid_then_clean_samples(self) -> None:
        rig = Rig()
        rig.see()
        assert rig.monitor.xid(GPU, 31) is None
        assert (rig.state, rig.monitor.verdict(GPU).usable) == (HEALTHY, True)
        assert rig.see(times=5) == []
        assert rig.monitor.get_health_report().devices[GPU].xids == {31: 1}

    def test_nvi_10_fatal_xid_condemns_at_once_and_is_evaluated_again(self) -> None:
        rig = Rig()
        rig.see()
        transition = rig.monitor.xid(GPU, 79)
        assert transition is not None
        assert (transition.previous, transition.state) == (HEALTHY, LOST)
        assert "xid_79" in rig.reason
        assert rig.see(times=50, after_s=10) == []  # clean, and too early
        assert rig.state is LOST
        (back,) = rig.see(times=20, after_s=60)
        assert (back.state, rig.reason) == (HEALTHY, "")

    def test_time_alone_clears_nothing(self) -> None:
        rig = Rig()
        rig.monitor.xid(GPU, 95)
        rig.clock.now += 86400
        assert rig.see() == []
        assert rig.state is DEGRADED
        rig.see(Evidence(contact=LOST))
        assert rig.state is LOST
        rig.see(times=2)
        assert rig.state is LOST
        rig.see()
        assert rig.state is HEALTHY

    def test_nvi_10_health_survives_a_restart_and_is_not_permanent(self) -> None:
        first = Rig()
        first.see()
        first.monitor.xid(GPU, 79)
        first.monitor.observe("GPU-well", FINE)
        document = json.loads(json.dumps(first.monitor.export("boot-1"), allow_nan=False))
        again = Rig()
        again.monitor.restore(document, "boot-1")
        assert (again.state, "xid_79" in again.reason) == (LOST, True)
        assert again.monitor.verdict("GPU-well").usable
        again.see(times=4)
        assert again.state is LOST
        again.see(times=4, after_s=600)
        assert again.state is HEALTHY
        rebooted = Rig()
        rebooted.monitor.restore(document, "boot-2")
        assert rebooted.state is HEALTHY

    @pytest.mark.parametrize(
        "document",
        [
            {}, {"devices": None}, {"devices": []}, {"devices": {GPU: None}}, {"devices": {GPU: {"state": "lost"}}},
            {"devices": {GPU: {"state": "lost", "reason": "r", "xids": ["x"]}}},
            {"devices": {GPU: {"state": "of a newer version", "reason": "r", "xids": []}}},
            {"devices": {GPU: {"state": "healthy", "reason": None, "xids": []}}},
        ],
    )  # fmt: skip
    def test_a_malformed_document_costs_its_entry(self, document: dict[str, Any]) -> None:
        rig = Rig()
        rig.monitor.restore(document)
        assert rig.state is HEALTHY

    def test_a_milder_xid_makes_nothing_better(self) -> None:
        rig = Rig()
        rig.see(Evidence(contact=UNRESPONSIVE))
        for _ in range(10):
            assert rig.monitor.xid(GPU, 48) is None
        assert rig.state is UNRESPONSIVE

    def test_a_storm_is_bounded(self) -> None:
        rig = Rig()
        for _ in range(5000):
            rig.monitor.xid(GPU, 31)
        assert rig.monitor.get_health_report().devices[GPU].xids == {31: 1000}


class TestMemoryErrors:
    def test_nvi_11_remapped_and_not_pending_is_healthy_with_a_note(self) -> None:
        rig = Rig()
        assert rig.see(condition(ecc_uncorrected=1, remapped_uncorrected=1)) == []
        verdict = rig.monitor.verdict(GPU)
        assert (verdict.state, verdict.usable) == (HEALTHY, True)
        assert "1 memory rows were replaced" in verdict.notes[0]

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"ecc_uncorrected": 1, "remapped_uncorrected": 1, "remap_pending": True}, "remap_pending"),
            ({"remap_failed": True}, "remap_failed"),
            ({"recovery_action": RecoveryAction.RESET}, "recovery_reset"),
            ({"recovery_action": RecoveryAction.DRAIN}, "recovery_drain"),
            ({"ecc_uncorrected": 1}, "ecc_uncorrected"),
            ({"ecc_uncorrected": 1, "remapped_uncorrected": None, "remap_pending": None}, "ecc_uncorrected"),
        ],
    )
    def test_nvi_11_pending_or_reset_required_or_uncorrectable_degrades(
        self, changes: dict[str, Any], code: str
    ) -> None:
        rig = Rig()
        (transition,) = rig.see(condition(**changes))
        assert transition.state is DEGRADED
        assert rig.reason.startswith(f"{code}: ")
        assert not rig.monitor.verdict(GPU).usable
        rig.see(times=2)
        assert rig.state is DEGRADED
        rig.see()
        assert rig.state is HEALTHY

    def test_nvi_11_corrected_errors_and_history_are_no_defects(self) -> None:
        rig = Rig()
        assert rig.see(condition(ecc_corrected=10**6, remapped_corrected=7, ecc_uncorrected_lifetime=9)) == []

    def test_a_question_that_fails_clears_nobody(self) -> None:
        rig = Rig()
        rig.see(condition(remap_pending=True))
        rig.see(Evidence(temperature_c=41), times=10)
        rig.see(condition(remap_pending=None), times=10)
        assert rig.state is DEGRADED


class TestHeat:
    def test_d20_hot_device_is_excluded_until_it_is_cool(self) -> None:
        rig = Rig(thermal_threshold_c=85)
        assert rig.see(Evidence(temperature_c=84.9)) == []
        (transition,) = rig.see(Evidence(temperature_c=85))
        assert (transition.state, rig.monitor.verdict(GPU).usable) == (DEGRADED, False)
        assert "85 °C" in rig.reason
        assert rig.see(Evidence(temperature_c=81), times=20) == []  # at the limit it must not flap
        rig.see(Evidence(temperature_c=None), times=20)
        assert rig.state is DEGRADED  # a sensor that stops telling cools nothing
        rig.see(Evidence(temperature_c=79), times=3)
        assert rig.state is HEALTHY

    def test_d20_without_a_limit_the_hardwares_own_counts(self) -> None:
        rig = Rig()
        rig.see(Evidence(temperature_c=87, condition=GOOD))
        assert rig.state is DEGRADED
        assert Rig().see(Evidence(temperature_c=200)) == []

    def test_throttling_must_last_to_be_a_defect(self) -> None:
        rig = Rig()
        slowed = condition(throttle=frozenset({Throttle.HARDWARE_THERMAL}))
        assert rig.see(slowed, times=59) == []
        rig.see()
        assert rig.see(slowed, times=59) == []
        (transition,) = rig.see(slowed, times=5)
        assert (transition.state, "hardware_thermal" in rig.reason) == (DEGRADED, True)
        capped = condition(throttle=frozenset({Throttle.POWER_CAP}))
        (back,) = rig.see(capped, times=500)
        assert back.state is HEALTHY


class TestContact:
    def test_l43_lost_within_two_polls_and_recovered(self) -> None:
        """L-42 and L-43: one fatal answer is enough; after a resume the device comes back by itself."""
        rig = Rig()
        rig.see()
        (gone,) = rig.see(Evidence(contact=LOST, contact_reason="fallen off the bus"), times=5)
        assert (gone.state, rig.reason) == (LOST, "contact_lost: fallen off the bus")
        (back,) = rig.see(times=10)
        assert (back.previous, back.state) == (LOST, HEALTHY)

    def test_one_failed_reading_says_nothing(self) -> None:
        rig = Rig()
        failed = Evidence(contact=SUSPECT, contact_reason="unknown error [999]")
        for _ in range(20):
            assert rig.see(failed) == []
            assert rig.see() == []
        (transition,) = rig.see(failed, times=3)
        assert (transition.state, "999" in rig.reason) == (SUSPECT, True)

    def test_a_failed_reading_does_not_count_towards_recovery(self) -> None:
        rig = Rig()
        rig.see(Evidence(contact=LOST))
        for _ in range(20):
            assert rig.see(times=2) == []
            assert rig.see(Evidence(contact=SUSPECT)) == []
        assert rig.see(Evidence(contact=SUSPECT), times=20) == []
        assert rig.state is LOST

    def test_l44_one_of_eight_is_lost(self) -> None:
        monitor = HealthMonitor(clock=Clock())
        for index in range(8):
            monitor.observe(f"GPU-{index}", Evidence(contact=LOST) if index == 3 else FINE)
        assert [monitor.verdict(f"GPU-{index}").usable for index in range(8)] == [i != 3 for i in range(8)]

    def test_nvi_2_every_call_fails_for_ever_is_one_event(self) -> None:
        rig = Rig()
        rig.see()
        assert len(rig.see(Evidence(contact=SUSPECT, contact_reason="999"), times=1000)) == 1
        assert rig.state is SUSPECT  # never lost or removed: nobody has said that

    def test_thousand_polls_give_one_event_per_change_in_order(self) -> None:
        rig = Rig()
        seen: list[Transition] = []
        for _ in range(100):
            seen += rig.see(times=4)
            seen += rig.see(Evidence(contact=UNRESPONSIVE), times=2)
            seen += rig.see(Evidence(contact=LOST), times=2)
            seen += rig.see(times=4)
        states = [(step.previous, step.state) for step in seen]
        assert states == [(HEALTHY, UNRESPONSIVE), (UNRESPONSIVE, LOST), (LOST, HEALTHY)] * 100


class TestReport:
    def test_d20_report_hours_are_honoured(self) -> None:
        rig = Rig(thermal_threshold_c=85)
        rig.see(Evidence(temperature_c=99))
        rig.see(times=3)
        rig.monitor.xid(GPU, 31)
        rig.clock.now += 3 * 3600
        rig.monitor.xid(GPU, 13)
        rig.see(Evidence(temperature_c=52))
        long, short = (rig.monitor.get_health_report(hours).devices[GPU] for hours in (24, 1))
        assert (long.xids, short.xids) == ({31: 1, 13: 1}, {13: 1})
        assert (long.hottest_c, short.hottest_c) == (99, 52)
        assert [state for _, state, _ in long.changes] == [DEGRADED, HEALTHY]
        assert short.changes == ()
        assert long.changes[1][0] == 3 * 3600 + 1
        assert short.seconds == {HEALTHY: 3600}
        assert long.seconds == {HEALTHY: 3 * 3600 + 1, DEGRADED: 3}
        with pytest.raises(ValueError, match="positive"):
            rig.monitor.get_health_report(0)

    def test_clk_1_a_clock_that_is_set_changes_nothing(self) -> None:
        """CLK-1: only the monotonic clock is asked."""
        rig = Rig()
        rig.monitor.xid(GPU, 48)
        document = rig.monitor.export()
        assert "at" not in json.dumps(document["devices"][GPU]["xids"])

    def test_a_device_that_is_replaced_is_forgotten(self) -> None:
        rig = Rig()
        rig.monitor.xid(GPU, 79)
        rig.monitor.forget(GPU)
        assert rig.state is HEALTHY


counts = st.none() | st.integers(0, 2**64)
conditions = st.builds(
    DeviceCondition,
    ecc_uncorrected=counts,
    remapped_uncorrected=counts,
    remap_pending=st.none() | st.booleans(),
    remap_failed=st.none() | st.booleans(),
    recovery_action=st.none() | st.sampled_from(RecoveryAction),
    throttle=st.none() | st.frozensets(st.sampled_from(Throttle)),
    slowdown_temperature_c=st.none() | st.integers(1, 250),
)
evidences = st.builds(
    Evidence,
    contact=st.sampled_from([HEALTHY, SUSPECT, UNRESPONSIVE, LOST]),
    temperature_c=st.none() | st.floats(-50, 250),
    condition=st.none() | conditions,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(evidences | st.integers(0, 200), max_size=30))
def test_whatever_is_observed_a_clean_device_is_healthy_in_the_end(steps: list[Evidence | int]) -> None:
    rig = Rig()
    for step in steps:
        if isinstance(step, int):
            rig.monitor.xid(GPU, step)
        else:
            rig.see(step)
        verdict = rig.monitor.verdict(GPU)
        assert verdict.usable is (verdict.reason is None)
    rig.see(times=10, after_s=600)
    assert rig.state is HEALTHY
    assert not findings(rig.monitor.policy, FINE)


@pytest.mark.parametrize("number", [float("nan"), 79.0, "79", True, -1, None])
def test_what_is_no_xid_is_refused_and_changes_nothing(number: object) -> None:
    monitor = HealthMonitor()
    with pytest.raises(ValueError, match="an Xid is a whole number"):
        monitor.xid("a", number)  # type: ignore[arg-type]
    assert monitor.verdict("a").usable
