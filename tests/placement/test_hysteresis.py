"""A gain has to last, and gains that keep coming are taken more and more seldom."""

from __future__ import annotations

import pytest

from gpurt.placement import RepairPolicy
from gpurt.placement.hysteresis import Hysteresis

pytestmark = pytest.mark.wide

POLICY = RepairPolicy(settle_seconds=10, quiet_seconds=60)


def test_a_gain_is_taken_once_it_has_lasted() -> None:
    hysteresis = Hysteresis(POLICY)
    assert hysteresis.wait(True, 100.0) == 10.0
    assert hysteresis.wait(True, 104.0) == 6.0
    assert hysteresis.wait(True, 110.0) == 0.0


def test_a_break_starts_it_anew() -> None:
    hysteresis = Hysteresis(POLICY)
    hysteresis.wait(True, 0.0)
    assert hysteresis.wait(False, 9.0) is None
    assert hysteresis.wait(True, 11.0) == 10.0


def test_a_loss_starts_it_anew() -> None:
    hysteresis = Hysteresis(POLICY)
    hysteresis.wait(True, 0.0)
    hysteresis.forced()
    assert hysteresis.wait(True, 9.0) == 10.0


def test_each_move_within_the_hour_doubles_the_time_to_the_next() -> None:
    hysteresis = Hysteresis(POLICY)
    now, gaps = 0.0, list[float]()
    for _ in range(5):
        wait = hysteresis.wait(True, now)
        assert wait is not None
        gaps.append(wait)
        now += wait
        hysteresis.moved(now)
    assert gaps == [10.0, 60.0, 120.0, 240.0, 480.0]
    # An hour later nothing of it is remembered.
    assert hysteresis.wait(True, now + 3600.0) == 10.0


@pytest.mark.parametrize("period", [1.0, 7.0, 19.0])
def test_a_gain_that_comes_and_goes_faster_than_it_settles_is_never_taken(period: float) -> None:
    hysteresis = Hysteresis(POLICY)
    for step in range(2000):
        assert hysteresis.wait(step % 2 == 0, step * period / 2) != 0.0


@pytest.mark.parametrize("period", [30.0, 150.0, 600.0])
def test_a_device_that_throttles_on_and_off_moves_little(period: float) -> None:
    """Each half period makes another plan the better one; looked at every second."""
    hysteresis = Hysteresis(POLICY)
    taken = list[float]()
    side = better = 0
    for now in range(4 * 3600):
        better = int(now / (period / 2)) % 2
        if hysteresis.wait(side != better, float(now)) == 0.0:
            hysteresis.moved(float(now))
            side = better
            taken.append(now)
    hours = [sum(hour * 3600 <= at < (hour + 1) * 3600 for at in taken) for hour in range(4)]
    assert max(hours) <= 6


def test_what_pays() -> None:
    policy = RepairPolicy(minimum_gain=0.05, horizon_tokens=1000)
    assert policy.pays(1.0, 0.9, load_seconds=99.0)
    assert not policy.pays(1.0, 0.9, load_seconds=101.0)
    assert not policy.pays(1.0, 0.96, load_seconds=0.0)
    assert not policy.pays(1.0, 1.0, load_seconds=0.0)
    assert not RepairPolicy(minimum_gain=0).pays(1.0, 1.0, load_seconds=0.0)
