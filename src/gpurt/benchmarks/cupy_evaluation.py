"""CuPy itself on this machine: how long CUDA takes to start, and how fast its memory operations are.

Each measurement runs in a child process: a context can be made once a process only, and the caller keeps none.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from typing import TextIO

from gpurt.benchmarks.children import ChildFailed, figures_of

_log = logging.getLogger("gpurt.benchmarks")
_latest: dict[str, dict[str, float]] = {}


async def benchmark_cupy_cuda_init() -> float | None:
    """Seconds from nothing to a CUDA context: import of CuPy and first use of device 0. None without CuPy or GPU."""
    figures = await _measure("init")
    return sum(figures.values()) if figures else None


async def benchmark_cupy_memory_operations() -> dict[str, float]:
    """Allocation (``allocate_free_us``, 256 MiB) and copies (``h2d_pageable_gb_s`` …, 10^9 bytes per second) on
    device 0; empty without CuPy or GPU."""
    return await _measure("memory")


def print_evaluation_report(*, file: TextIO | None = None) -> None:
    """Print what the benchmarks of this module measured last in this process. ``file`` is stdout by default."""
    lines = ["CuPy evaluation"]
    init, memory = _latest.get("init"), _latest.get("memory")
    if init:
        lines.append(f"  CUDA start     import {init['import_s']:.3f} s, context {init['context_s']:.3f} s")
    if memory:
        lines.append(f"  allocate+free  {memory['allocate_free_us']:.1f} µs")
        for way, label in (("h2d", "host to device"), ("d2h", "device to host")):
            pageable, pinned = memory[f"{way}_pageable_gb_s"], memory[f"{way}_pinned_gb_s"]
            lines.append(f"  {label} pageable {pageable:.1f} GB/s, pinned {pinned:.1f} GB/s")
    if not init and not memory:
        lines.append(
            "  nothing measured: CuPy is not installed (pip install cupy-cuda12x, or cupy-cuda13x)"
            if importlib.util.find_spec("cupy") is None
            else "  nothing measured: run the benchmarks first, on a machine with a CUDA device"
        )
    (sys.stdout if file is None else file).write("\n".join(lines) + "\n")


async def _measure(what: str) -> dict[str, float]:
    _latest.pop(what, None)
    # find_spec reads directories, which a slow file system makes slow.
    if await asyncio.get_running_loop().run_in_executor(None, importlib.util.find_spec, "cupy") is None:
        return {}
    try:
        figures = await figures_of("-m", "gpurt.benchmarks.cuda_raw", what)
    except ChildFailed as exc:
        _log.warning("CuPy is installed, but the benchmark failed: %s", exc)
        return {}
    _latest[what] = figures
    return figures
