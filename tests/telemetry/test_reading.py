"""Values that can be true are kept, others are dropped, counted and never written."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurt.telemetry.reading import METRICS, RawReading, Sample, checked
from gpurt.types import DeviceState


def check(**values: Any) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    return checked(RawReading(values))


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("utilization_percent", 2147483632), ("utilization_percent", 4294967295), ("utilization_percent", 101),
        ("utilization_percent", -1), ("temperature_c", -273), ("temperature_c", -273.15), ("temperature_c", 65535),
        ("power_w", 4294967.295), ("power_w", -0.001), ("memory_used_bytes", 2**64 - 1), ("memory_total_bytes", 0),
        ("clock_mhz", 2**32 - 1), ("temperature_c", float("nan")), ("temperature_c", float("inf")),
        ("power_w", float("-inf")), ("clock_mhz", 10**400), ("clock_mhz", Fraction(10**400)), ("temperature_c", "41"),
        ("temperature_c", b"41"), ("temperature_c", True), ("temperature_c", [41]), ("temperature_c", 41 + 0j),
    ],
)  # fmt: skip
def test_tel_1_what_cannot_be_true_is_dropped_and_not_clamped(metric: str, value: Any) -> None:
    values, reasons, impossible = check(**{metric: value})
    assert metric not in values
    assert reasons[metric] == "invalid"
    assert impossible == (metric,)


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("utilization_percent", 0), ("utilization_percent", 100), ("temperature_c", -40), ("temperature_c", 0),
        ("power_w", 0), ("memory_used_bytes", 0), ("clock_mhz", 0), ("temperature_c", np.float32(41.5)),
        ("memory_used_bytes", np.int64(7)), ("power_w", Fraction(1, 2)),
    ],
)  # fmt: skip
def test_0_is_a_value(metric: str, value: Any) -> None:
    values, reasons, impossible = check(**{metric: value})
    assert values == {metric: value}
    assert type(values[metric]) in (int, float)
    assert metric not in reasons
    assert impossible == ()


def test_parts_are_not_larger_than_the_whole() -> None:
    values, reasons, impossible = check(memory_total_bytes=1000, memory_used_bytes=1001, memory_free_bytes=1000)
    assert values == {"memory_total_bytes": 1000, "memory_free_bytes": 1000}
    assert (reasons["memory_used_bytes"], impossible) == ("invalid", ("memory_used_bytes",))


def test_nvf_8_reasons_of_the_source_stay() -> None:
    raw = RawReading({"temperature_c": None}, {"temperature_c": "no_permission", "power_w": "invalid"})
    _, reasons, impossible = checked(raw)
    assert reasons["temperature_c"] == "no_permission"
    assert (reasons["power_w"], impossible) == ("invalid", ("power_w",))
    assert reasons["clock_mhz"] == "unsupported"


def test_a_reading_has_its_age_and_ends_as_a_value() -> None:
    sample = Sample("gpu:0", 100.0, {"temperature_c": 41}, {"power_w": "unsupported"})
    fresh = sample.reading("temperature_c", 103.5, 30)
    assert (fresh.value, fresh.unit, fresh.age_s, fresh.reason) == (41, "°C", 3.5, None)
    stale = sample.reading("temperature_c", 131, 30)
    assert (stale.value, stale.reason, stale.last, stale.age_s) == (None, "stale", 41, 31)
    assert sample.reading("power_w", 100, 30).reason == "unsupported"
    with pytest.raises(KeyError):
        sample.reading("weight", 100, 30)


def test_nvf_11_free_memory_does_not_mean_idle() -> None:
    values, reasons, impossible = check(memory_total_bytes=46068 << 20, memory_used_bytes=0, utilization_percent=100)
    sample = Sample("gpu:0", 0.0, values, reasons)
    assert (sample.memory_percent, values["utilization_percent"], impossible) == (0.0, 100, ())


ODDITIES = (
    True, False, "", "41", b"41", 10**400, -(10**400), Fraction(10**400), Fraction(83, 2), Decimal("NaN"), Decimal(41),
    41 + 0j, (41,), np.float64("nan"), np.float32(41.5), np.int32(-1), np.uint64(2**64 - 1), np.bool_(True), object(),
)  # fmt: skip
numbers = st.none() | st.integers(-10, 2**64) | st.floats() | st.sampled_from(ODDITIES)
readings = st.builds(
    RawReading,
    st.dictionaries(st.sampled_from([*METRICS, "weight"]), numbers),
    st.dictionaries(st.sampled_from(tuple(METRICS)), st.sampled_from(["unsupported", "error", "invalid"])),
)


def check_any_reading(raw: RawReading, age: float) -> None:
    values, reasons, impossible = checked(raw)
    assert values.keys() | reasons.keys() == METRICS.keys()
    assert not values.keys() & reasons.keys()
    assert set(impossible) <= reasons.keys()
    for name, value in values.items():
        assert type(value) in (int, float)
        assert METRICS[name].low <= value <= METRICS[name].high
        assert value == float(raw.values[name])
    sample = Sample("gpu:0", 0.0, values, reasons, contact=DeviceState.HEALTHY)
    record = json.loads(json.dumps(sample.record(age, 30), allow_nan=False))
    for name in METRICS:
        assert (record[name] is None) == (name in record["unavailable"])
        assert record[name] is None or math.isfinite(record[name])


@settings(max_examples=1000, deadline=None)
@given(readings, st.floats(0, 100))
def test_tel_2_any_reading_is_json(raw: RawReading, age: float) -> None:
    check_any_reading(raw, age)


@pytest.mark.slow
@settings(max_examples=100_000, deadline=None)
@given(readings, st.floats(0, 100))
def test_tel_2_any_reading_is_json_at_length(raw: RawReading, age: float) -> None:
    check_any_reading(raw, age)
