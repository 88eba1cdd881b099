"""Figures over device records: total memory, peak arithmetic rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from gpurt.types import GPUDevice

FLOPS_PER_LANE: Final = 2
"""A fused multiply-add counts as two operations, as in every vendor's data sheet."""

_DTYPE_ALIASES: Final = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16"}

# Fused multiply-adds per clock and streaming multiprocessor, without tensor cores. CUDA C++ Programming Guide,
# "Throughput of Native Arithmetic Instructions", by compute capability; 16 bit as half2. Times multiprocessors and
# boost clock they give NVIDIA's figures: A100 19.5, H100 SXM 66.9, L40S 91.6 TFLOP/s in float32.
_NVIDIA: Final[Mapping[str, Mapping[str, int]]] = {
    "5.0": {"float32": 128, "float64": 4},
    "5.2": {"float32": 128, "float64": 4},
    "6.0": {"float16": 128, "float32": 64, "float64": 32},
    "6.1": {"float16": 2, "float32": 128, "float64": 4},
    "7.0": {"float16": 128, "float32": 64, "float64": 32},
    "7.5": {"float16": 128, "float32": 64, "float64": 2},
    "8.0": {"float16": 256, "float32": 64, "float64": 32},
    "8.6": {"float16": 128, "float32": 128, "float64": 2},
    "8.9": {"float16": 128, "float32": 128, "float64": 2},
    "9.0": {"float16": 256, "float32": 128, "float64": 64},
    "10.0": {"float32": 128, "float64": 64},
    "12.0": {"float32": 128, "float64": 2},
}

# The same per compute unit, vector units only, from AMD's Instinct and Radeon data sheets: MI50 13.3, MI100 23.1,
# MI250X 23.9 a die and 47.9 with packed float32 (which counts here, as in the sheet), MI300X 163.4, RX 7900 XTX
# 61.4 (dual issue) TFLOP/s.
_AMD: Final[Mapping[str, Mapping[str, int]]] = {
    "gfx906": {"float32": 64, "float64": 32},
    "gfx908": {"float32": 64, "float64": 32},
    "gfx90a": {"float32": 128, "float64": 64},
    "gfx942": {"float32": 128, "float64": 64},
    "gfx1030": {"float32": 64, "float64": 4},
    "gfx1100": {"float32": 128, "float64": 4},
}

# A core of an Apple GPU has 128 float32 units: M2 Ultra, 76 cores at 1.398 GHz, 27.2 TFLOP/s.
_APPLE: Final[Mapping[str, int]] = {"float32": 128}


def get_total_gpu_memory(devices: Iterable[GPUDevice]) -> int | None:
    """Total memory of these devices in bytes; 0 for no devices, None when one of them does not know its own.

    Memory that several devices share (equal ``memory_pool_id``) and a device that appears twice (equal stable
    identity, as when two backends show it) count once.
    """
    sizes: dict[str | int, int] = {}
    for position, device in enumerate(devices):
        if device.memory_bytes is None:
            return None
        stable = device.identity.key if device.identity is not None and device.identity.stable else None
        # Not by device_id: every node of a cluster has a cuda:0.
        key = device.memory_pool_id or stable or position
        sizes[key] = max(sizes.get(key, 0), device.memory_bytes)
    return sum(sizes.values())


def get_peak_flops(device: GPUDevice, dtype: str = "float32") -> float | None:
    """Peak rate of the vector units in FLOP/s: clock * units * lanes per unit * 2.

    The 2 is the fused multiply-add, which counts as two operations (:data:`FLOPS_PER_LANE`). Matrix units (tensor
    cores) are not counted. None when clock, units or the lanes of that architecture and dtype
    are not known; always for CPUs, which do not tell how many vector pipes a core has.

    Raises:
        ValueError: dtype is none of float64, float32, float16 (or fp64, fp32, fp16, half).
    """
    dtype = _DTYPE_ALIASES.get(dtype, dtype)
    if dtype not in ("float64", "float32", "float16"):
        raise ValueError(f"no peak rate for dtype {dtype!r}; choose float64, float32 or float16")
    lanes = _lanes(device).get(dtype)
    if lanes is None or not device.clock_rate_mhz or not device.compute_units:
        return None
    return device.clock_rate_mhz * 1e6 * device.compute_units * lanes * FLOPS_PER_LANE


def _lanes(device: GPUDevice) -> Mapping[str, int]:
    architecture = device.compute_capability or ""
    match device.vendor:
        case "nvidia":
            return _NVIDIA.get(architecture, {})
        case "amd":
            # "gfx942:sramecc+:xnack-" names features after the architecture.
            return _AMD.get(architecture.partition(":")[0], {})
        case "apple" if device.kind in ("gpu", "igpu"):
            return _APPLE
        case _:
            return {}
