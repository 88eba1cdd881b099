"""What the drivers of different vendors say of their devices: the vendor, and figures that match its data sheets."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.fake_cuda import FakeNvml, FakeRuntime, install, install_nvml, nvml_record
from tests.support.fake_hip import FakeHip, two_cards

from gpurt import get_peak_flops
from gpurt.backends.cpu_backend import CPUBackend, CPUDriver
from gpurt.backends.cuda_backend import CUDADriver
from gpurt.backends.rocm_backend import ROCmDriver
from gpurt.types import Telemetry

MIB = 1 << 20
A100 = {
    "name": b"NVIDIA A100-SXM4-80GB",
    "multiProcessorCount": 108,
    "major": 8,
    "minor": 0,
    "clockRate": 1_410_000,
}


def test_an_a100(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = install(monkeypatch, FakeRuntime(devices=1))
    runtime.properties[0] |= A100
    install_nvml(monkeypatch, FakeNvml([nvml_record(0)]))
    (device,) = CUDADriver(environ={}).open()
    assert (device.vendor, device.name) == ("nvidia", "NVIDIA A100-SXM4-80GB")
    assert get_peak_flops(device) == pytest.approx(19.5e12, rel=0.05)
    assert device.tensor_core_count == 432


def test_amd_s_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = two_cards(tmp_path, 64 * MIB)
    install(monkeypatch, FakeHip(root))
    for device in ROCmDriver(environ={}, root=root).open():
        assert device.vendor == "amd"
        assert device.compute_capability == "gfx90a"
        units, mhz = device.compute_units, device.clock_rate_mhz
        assert units
        assert mhz
        # An MI210's 104 units at 1.7 GHz give 45.3 TFLOP/s with packed float32, as its data sheet says.
        assert get_peak_flops(device) == pytest.approx(45.3e12 * units / 104 * mhz / 1700, rel=0.01)


def test_the_processor_tells_no_rate_that_it_does_not_know() -> None:
    (device,) = CPUDriver().open()
    assert device.vendor in ("intel", "amd", "arm", "apple", "unknown")
    assert get_peak_flops(device) is None


async def test_all_metrics_are_one_reading() -> None:
    async with CPUBackend() as backend:
        reading = await backend.get_telemetry("cpu:0")
    fields = set(Telemetry.model_fields) - {"unavailable"}
    assert {name for name in fields if getattr(reading, name) is None} == set(reading.unavailable)
    assert reading.memory_total_bytes
