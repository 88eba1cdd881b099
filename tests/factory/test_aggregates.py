"""Totals and peak rates on synthetic devices (C30)."""

from __future__ import annotations

import pytest

from gpurt.aggregates import FLOPS_PER_LANE
from gpurt.factory import get_peak_flops, get_total_gpu_memory
from gpurt.types import DeviceIdentity, DeviceKind
from tests.factory.toy import device

GIB = 1 << 30


class TestTotalMemory:
    def test_sums(self) -> None:
        assert get_total_gpu_memory([]) == 0
        devices = [device("cuda:0", memory_bytes=80 * GIB), device("cuda:1", memory_bytes=24 * GIB)]
        assert get_total_gpu_memory(devices) == 104 * GIB

    def test_same_name_on_two_nodes_is_two_devices(self) -> None:
        assert get_total_gpu_memory([device("cuda:0"), device("cuda:0")]) == 2 * GIB

    def test_shared_memory_counts_once(self) -> None:
        pool = "host:1"
        devices = [device("metal:0", memory_pool_id=pool), device("cpu:0", memory_pool_id=pool), device("cuda:0")]
        assert get_total_gpu_memory(devices) == 2 * GIB

    def test_device_shown_by_two_backends_counts_once(self) -> None:
        same = DeviceIdentity(key="GPU-1")
        assert get_total_gpu_memory([device("cuda:0", identity=same), device("vulkan:0", identity=same)]) == GIB
        unstable = DeviceIdentity(key="name:Toy", stable=False)
        assert get_total_gpu_memory([device("a:0", identity=unstable), device("a:1", identity=unstable)]) == 2 * GIB

    def test_unknown_is_not_zero(self) -> None:
        assert get_total_gpu_memory([device(), device("cuda:0", memory_bytes=None)]) is None


class TestPeakFlops:
    def test_a_multiply_add_is_two_operations(self) -> None:
        assert FLOPS_PER_LANE == 2
        one_unit = device(vendor="nvidia", compute_capability="9.0", compute_units=1, clock_rate_mhz=1000)
        assert get_peak_flops(one_unit) == 1e9 * 128 * 2

    @pytest.mark.parametrize(
        ("vendor", "architecture", "units", "mhz", "dtype", "tflops"),
        [
            ("nvidia", "8.0", 108, 1410, "float32", 19.5),  # A100
            ("nvidia", "8.0", 108, 1410, "float64", 9.7),
            ("nvidia", "9.0", 132, 1980, "fp32", 66.9),  # H100 SXM
            ("nvidia", "9.0", 132, 1980, "float16", 133.8),
            ("nvidia", "8.9", 142, 2520, "float32", 91.6),  # L40S
            ("nvidia", "7.0", 80, 1530, "float32", 15.7),  # V100
            ("amd", "gfx942:sramecc+:xnack-", 304, 2100, "float32", 163.4),  # MI300X
            ("amd", "gfx90a", 110, 1700, "float64", 23.9),  # one die of an MI250X
            ("apple", "metal3", 76, 1398, "float32", 27.2),  # M2 Ultra
        ],
    )
    def test_data_sheets(self, vendor: str, architecture: str, units: int, mhz: int, dtype: str, tflops: float) -> None:
        gpu = device(vendor=vendor, compute_capability=architecture, compute_units=units, clock_rate_mhz=mhz)
        assert get_peak_flops(gpu, dtype) == pytest.approx(tflops * 1e12, rel=0.01)

    @pytest.mark.parametrize(
        "fields",
        [
            {"clock_rate_mhz": None},
            {"compute_units": None},
            {"compute_capability": None},
            {"compute_capability": "99.0"},
            {"vendor": "qualcomm"},
            {"vendor": "apple", "kind": DeviceKind.CPU},
        ],
    )
    def test_unknown_is_none(self, fields: dict) -> None:
        known = {"vendor": "nvidia", "compute_capability": "9.0", "compute_units": 132, "clock_rate_mhz": 1980}
        assert get_peak_flops(device(**known)) is not None
        assert get_peak_flops(device(**(known | fields))) is None

    def test_unknown_dtype(self) -> None:
        with pytest.raises(ValueError, match="float64, float32 or float16"):
            get_peak_flops(device(), "int3")
