"""What gpurt promises, as bounds of :class:`~gpurt.benchmarks.measurement.Measurement`, by backend.

The bounds are for one H100 and a host of its class, and for the CPU backend; of other libraries gpurt promises to keep
the rate of a 64 MiB copy, and nowhere to stop the loop for long.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypedDict

from gpurt.benchmarks.plan import GIB, MIB


class Bounds(TypedDict, total=False):
    target: float
    least_of_peer: float
    least_of_ceiling: float


PROMISED: Final = ("cuda", "cpu")
LIBRARIES: Final = ("vulkan", "opencl", "metal", "directml", "tflite")
LONGEST_GAP_MS: Final = 50.0
"""For every backend, over its whole life."""

_BULK: Final[dict[tuple[str, str], Bounds]] = {
    ("to device", "NumPy"): {"least_of_peer": 4, "least_of_ceiling": 0.70},
    ("from device", "warm NumPy"): {"least_of_peer": 3, "least_of_ceiling": 0.60},
    ("to device", "pinned"): {"least_of_ceiling": 0.97},
    ("from device", "pinned"): {"least_of_ceiling": 0.97},
}


def host_copy(backend: str, direction: str, memory: str, nbytes: int) -> Bounds:
    if backend == "cuda" and nbytes == GIB:
        return _BULK.get((direction, memory), {})
    if memory not in ("NumPy", "warm NumPy"):
        return {}
    if (backend == "cuda" and nbytes in (MIB, 16 * MIB)) or (backend == "cpu" and nbytes >= MIB):
        return {"least_of_peer": 0.9}
    if backend in LIBRARIES and nbytes == 64 * MIB:
        return {"least_of_peer": 0.9}
    return {}


def both_ways(backend: str, memory: str) -> Bounds:
    return {"least_of_ceiling": 0.95} if backend == "cuda" and memory == "pinned" else {}


def device_copy(backend: str, *, across: bool) -> Bounds:
    if backend == "cpu":
        return {"least_of_peer": 0.9}
    return {"least_of_ceiling": 0.98} if backend == "cuda" and across else {}


def pool_hit(backend: str) -> Bounds:
    return {"target": 6.0} if backend in PROMISED else {}


def added_to_a_small_copy(backend: str) -> Bounds:
    """µs over the raw synchronous copy."""
    uvloop = type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    return {"target": 30.0 if uvloop else 45.0} if backend == "cuda" else {}


def many_small_copies(backend: str) -> Bounds:
    """CPU time beside ``asyncio.to_thread``."""
    return {"least_of_peer": 4} if backend == "cuda" else {}


def loop_gap(backend: str, which: str) -> Bounds:
    """ms."""
    bounds = {"p99": 2.0, "max": 15.0} if backend in PROMISED else {"max": LONGEST_GAP_MS}
    return {"target": bounds[which]} if which in bounds else {}


def small_copy_beside_bulk(backend: str, which: str) -> Bounds:
    """ms."""
    return {"target": 2.0} if backend == "cuda" and which == "p99" else {}


def bulk_beside_small_copies(backend: str) -> Bounds:
    return {"least_of_peer": 0.95} if backend == "cuda" else {}


def weights(backend: str, nbytes: int) -> Bounds:
    """GB/s from the page cache."""
    return {"target": 25.0, "least_of_peer": 3} if backend == "cuda" and nbytes >= GIB else {}


def weights_host_memory(backend: str) -> Bounds:
    """MiB."""
    return {"target": 256.0} if backend == "cuda" else {}


def start(backend: str) -> Bounds:
    """Seconds."""
    return {"target": 1.5} if backend == "cuda" else {}
