"""A few devices of several vendors, for questions about them."""

from __future__ import annotations

from typing import Any

from gpurt.placement import PlacementDevice
from gpurt.types import DeviceKind

GB = 10**9


def device(name: str, usable: int = 80 * GB, **fields: Any) -> PlacementDevice:
    values: dict[str, Any] = {"node": "n0", "memory_bandwidth": 1e12, "compute_flops": 1e13, **fields}
    return PlacementDevice(id=name, usable_bytes=usable, **values)


A100 = device("a100", 80 * GB, vendor="nvidia", backend="cuda", compute_flops=312e12, memory_bandwidth=2.0e12,
              dtypes=frozenset({"float32", "float16", "bfloat16"}))  # fmt: skip
MI250 = device("mi250", 64 * GB, vendor="amd", backend="rocm", compute_flops=181e12, memory_bandwidth=1.6e12,
               dtypes=frozenset({"float32", "float16", "bfloat16"}))  # fmt: skip
T4 = device("t4", 15 * GB, vendor="nvidia", backend="cuda", compute_flops=65e12, memory_bandwidth=3.2e11,
            dtypes=frozenset({"float32", "float16"}))  # fmt: skip
CPU = device("cpu", 256 * GB, vendor="intel", backend="cpu", kind=DeviceKind.CPU, compute_flops=2e12,
             memory_bandwidth=1e11, dtypes=frozenset({"float32", "bfloat16"}))  # fmt: skip
RACK = (A100, MI250, T4, CPU)
