"""Running topics: the device opened once, a topic that fails no end for the others, and the record of it all."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from gpurt.benchmarks import DEVICE_TOPICS, TOPICS
from gpurt.benchmarks.bench import Bench, opened_bench
from gpurt.benchmarks.measurement import Measurement, Skipped
from gpurt.benchmarks.plan import FULL, QUICK, Plan
from gpurt.errors import GPUError
from gpurt.types import GPUDevice

SCHEMA = 1


@dataclass(slots=True)
class Results:
    """What a run has found so far."""

    quick: bool
    names: list[str]
    machine: dict[str, Any]
    device: GPUDevice | None = None
    measurements: list[Measurement] = field(default_factory=list[Measurement])
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """Topics, and parts of them, that cannot be measured here, and why."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Topics that ended with an error, and which."""

    def as_json(self) -> dict[str, Any]:
        device = self.device
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "device": None
            if device is None
            else {
                "device_id": device.device_id,
                "name": device.name,
                "backend": device.backend,
                "driver_version": device.driver_version,
                "simulated": device.simulated,
            },
            "quick": self.quick,
            "measurements": [measurement.as_json() for measurement in self.measurements],
            "skipped": self.skipped,
            "failed": self.failed,
        }


async def measure(
    names: Sequence[str],
    *,
    quick: bool = False,
    device_id: str | None = None,
    plan: Plan | None = None,
    start_program: Sequence[str] | None = None,
    on_topic: Callable[[str], None] = lambda _: None,
) -> Results:
    """Measure the topics of these names, in order.

    Args:
        quick: fewer rounds and smaller sizes.
        device_id: for the topics of a device: its name, or a backend's for its first usable device; None is the best
            backend's.
        plan: sizes and turns; None is that of ``quick``.
        start_program: see :attr:`gpurt.benchmarks.bench.Bench.start_program`.
        on_topic: told each name before it starts.

    Everything taken is given back, also on cancellation, which what has begun in a thread delays until it ends.

    Raises:
        BackendUnavailable, DeviceNotFound: there is no such device; nothing was measured.
    """
    results = Results(quick, list(names), await asyncio.to_thread(_machine))
    if any(name in DEVICE_TOPICS for name in names):
        async with opened_bench(device_id, plan or (QUICK if quick else FULL)) as bench:
            results.device = bench.device
            if start_program is not None:
                bench.start_program = start_program
            await _run(results, bench, on_topic)
            results.skipped |= bench.skipped
    else:
        await _run(results, None, on_topic)
    return results


async def _run(results: Results, bench: Bench | None, on_topic: Callable[[str], None]) -> None:
    for name in results.names:
        on_topic(name)
        module = await asyncio.to_thread(import_module, TOPICS[name])
        try:
            if name in DEVICE_TOPICS:
                results.measurements += await module.measure(bench)
            else:
                results.measurements += await module.measure(quick=results.quick)
        except* Skipped as group:
            results.skipped[name] = _texts(group)
        except* GPUError as group:
            results.failed[name] = _texts(group)


def _texts(group: BaseExceptionGroup[Any]) -> str:
    """What each error says, also of groups within: copies at once fail as one."""
    return "; ".join(_texts(exc) if isinstance(exc, BaseExceptionGroup) else str(exc) for exc in group.exceptions)  # pyright: ignore[reportUnknownArgumentType]


def _machine() -> dict[str, Any]:
    from gpurt import __version__
    from gpurt.sources.host import cpu_count, cpu_info

    return {
        "gpurt": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_info().name,
        "cpus": cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "date": datetime.now(UTC).date().isoformat(),
    }
