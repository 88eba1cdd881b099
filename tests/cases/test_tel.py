"""Readings: what cannot be true, what is no JSON, and units. Names carry the case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpurt.runtime.backend import DriverBackend
from gpurt.sources.amd import read_amd
from gpurt.sources.amd_telemetry import read_amd_telemetry
from gpurt.sources.nvml import open_session
from gpurt.telemetry import TelemetryCollector
from gpurt.telemetry.readers import backend_reader
from gpurt.testing.faults import Fault, FaultyDriver
from gpurt.testing.profiles import parse_simulation
from gpurt.testing.simulated import SimulatedDriver
from gpurt.types import Telemetry
from tests.cases.rig import Binding, installed, memory, rates, row
from tests.sources import trees

GPU = "simulated:0"


async def polled(**lie: Any) -> tuple[TelemetryCollector, DriverBackend]:
    driver = FaultyDriver(SimulatedDriver(parse_simulation("h100")))
    backend = DriverBackend(driver)
    async with backend:
        driver.inject(Fault("telemetry", lie=lie))
        collector = TelemetryCollector({GPU: backend_reader(backend, GPU)})
        await collector.poll()
    return collector, backend


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("utilization_percent", 2147483632), ("utilization_percent", 4294967295), ("utilization_percent", 101),
        ("utilization_percent", -1), ("temperature_c", -273.15), ("temperature_c", -273), ("temperature_c", 65535),
        ("power_w", 4294967.295),
    ],
)  # fmt: skip
async def test_tel_1_what_cannot_be_is_dropped_and_counted(metric: str, value: float) -> None:
    collector, _ = await polled(**{metric: value})
    reading = collector.readings(GPU)[metric]
    assert (reading.value, reading.reason) == (None, "invalid")
    assert collector.dropped(GPU) == {metric: 1}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_tel_2_no_number_is_no_json(value: float) -> None:
    collector, _ = await polled(temperature_c=value)
    sample = collector.latest(GPU)
    assert sample is not None
    text = json.dumps(sample.record(0.0, 30.0), allow_nan=False)
    assert json.loads(text)["temperature_c"] is None
    assert Telemetry(temperature_c=value).temperature_c is None


def test_tel_3_units(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = row(
        "NVIDIA H100", "00000000:00:09.0", (9, 0), MemoryInfo=memory(81559, 479, 0), PowerUsage=69850, Temperature=41,
        UtilizationRates=rates(0), ClockInfo=345,
    )  # fmt: skip
    installed(monkeypatch, Binding(answers))
    with open_session() as session:
        reading = session.telemetry("00000000:00:09.0")
    assert (reading.power_w, reading.temperature_c, reading.memory_total_bytes) == (69.85, 41, 85520809984)
    trees.mi210_host(tmp_path)  # hwmon: 46000 millidegrees, 67000000 microwatts, pp_dpm_sclk 800Mhz
    (device,) = read_amd(tmp_path).devices
    hwmon = read_amd_telemetry(tmp_path, device)
    assert (hwmon.temperature_c, hwmon.power_w, hwmon.clock_mhz) == (46, 67, 800)
