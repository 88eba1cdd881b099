"""The text that Prometheus scrapes, read back by parsers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurt.errors import DeviceLost
from gpurt.sources.condition import Throttle
from gpurt.telemetry.metrics import Family, metrics_text, render
from tests.telemetry.openmetrics import MetricFamily, parse
from tests.telemetry.rig import GIB, Device, Rig


async def scrape() -> str:
    devices = Device(temperature_c=63.5, utilization_percent=57), Device(power_w=None, clock_mhz=2**40)
    rig = Rig(*devices)
    devices[0].throttle = frozenset({Throttle.HARDWARE})
    devices[1].throttle = None
    await rig.poll()
    await rig.poll()
    rig.clock.now += 2.5
    return metrics_text(rig.collector)


async def test_x11_text_is_read_by_a_parser_of_openmetrics() -> None:
    families = parse(await scrape())
    assert families["gpurt_memory_used_bytes"].value(device="gpu:0") == 8 * GIB
    assert families["gpurt_temperature_celsius"].value(device="gpu:0") == 63.5
    assert families["gpurt_utilization_ratio"].value(device="gpu:0") == 0.57
    assert families["gpurt_utilization_ratio"].value(device="gpu:1") == 0
    assert families["gpurt_clock_hertz"].value(device="gpu:0") == 345e6
    assert families["gpurt_reading_age_seconds"].value(device="gpu:1") == 2.5
    assert families["gpurt_throttled"].samples == {frozenset({("device", "gpu:0")}): 1}
    assert (families["gpurt_temperature_celsius"].unit, families["gpurt_temperature_celsius"].kind) == (
        "celsius",
        "gauge",
    )
    contact = families["gpurt_contact"]
    assert contact.value(device="gpu:1", state="healthy") == 1
    assert contact.value(device="gpu:1", state="lost") == 0


async def test_x11_what_is_unknown_has_no_sample_and_its_reason() -> None:
    families = parse(await scrape())
    assert families["gpurt_power_watts"].value(device="gpu:1") is None
    unavailable, dropped = families["gpurt_unavailable"], families["gpurt_readings_dropped"]
    assert unavailable.value(device="gpu:1", metric="power_w", reason="unsupported") == 1
    assert unavailable.value(device="gpu:1", metric="clock_mhz", reason="invalid") == 1
    assert (dropped.kind, dropped.value(device="gpu:1", metric="clock_mhz")) == ("counter", 2)


async def test_x11_text_is_read_by_prometheus_own_parser() -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    values = {
        (sample.name, sample.labels["device"]): sample.value
        for family in parser.text_string_to_metric_families(await scrape())
        for sample in family.samples
    }
    assert values["gpurt_temperature_celsius", "gpu:0"] == 63.5
    assert values["gpurt_readings_dropped_total", "gpu:1"] == 2


async def test_m37_stale_and_lost_devices_show_no_old_values() -> None:
    rig = Rig(stale_after_s=30)
    await rig.poll()
    rig.clock.now += 31
    families = parse(metrics_text(rig.collector))
    assert "gpurt_memory_used_bytes" not in families
    assert families["gpurt_unavailable"].value(device="gpu:0", metric="power_w", reason="stale") == 1
    rig.devices[0].error = DeviceLost("gone")
    await rig.poll()
    families = parse(metrics_text(rig.collector))
    assert "gpurt_memory_used_bytes" not in families
    assert families["gpurt_contact"].value(device="gpu:0", state="lost") == 1


def test_without_devices_or_readings_the_text_is_empty() -> None:
    assert metrics_text(Rig().collector) == "# EOF\n"


def check_any_text(text: str, value: float) -> None:
    family = Family("gpurt_x", "gauge", text)
    family.add(value, device=text, other="")
    (read,) = parse(render([family])).values()
    sent = text.encode("utf-8", "replace").decode()
    assert read == MetricFamily("gauge", "", sent, {frozenset({("device", sent), ("other", "")}): float(value)})


@settings(max_examples=500, deadline=None)
@given(
    st.text(st.characters(exclude_categories=())) | st.text('\\"\n{},=n '),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_label_comes_back_as_it_was(text: str, value: float) -> None:
    check_any_text(text, value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Family("gpurt x", "gauge", ""),
        lambda: Family("gpurt_x", "gauge", "", "bytes"),
        lambda: Family("gpurt_x", "gauge", "").add(float("nan")),
        lambda: Family("gpurt_x", "gauge", "").add(float("inf")),
        lambda: Family("gpurt_x", "counter", "").add(-1),
        lambda: render([Family("gpurt_x", "gauge", ""), Family("gpurt_x", "gauge", "")]),
        lambda: render([Family("gpurt_x", "gauge", "", "", [({"__a": ""}, 1)])]),
        lambda: render([Family("gpurt_x", "gauge", "", "", [({}, 1), ({}, 2)])]),
    ],
)
def test_what_the_format_does_not_have_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"gpurt|label"):
        make()
