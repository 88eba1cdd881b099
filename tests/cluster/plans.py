"""Plans as a solver would make them, and a loader that does what a test says."""

from __future__ import annotations

import asyncio

from gpurt.cluster.assignment import Assignment
from gpurt.placement.constraints import ObjectiveKind, Workload
from gpurt.placement.plan import DeviceBytes, Plan, PlanStatus, Prediction, Stage

LAYER_BYTES = 1 << 30


def plan(*stages: tuple[str, int, int], model: str = "llama", layer_bytes: int = LAYER_BYTES) -> Plan:
    """Of stages (devices ``node/key``, several separated by ``+``; first layer, layer behind the last)."""
    made: list[Stage] = []
    for names, start, end in stages:
        devices = tuple(names.split("+"))
        share = (end - start) * layer_bytes // len(devices)
        held = tuple(
            DeviceBytes(device=each, weights=share, kv=0, activations=0, reserve=0, usable=80 << 30) for each in devices
        )
        stage = Stage(
            devices=devices,
            node=devices[0].partition("/")[0],
            backend="cuda",
            start=start,
            end=end,
            memory_seconds=0.0,
            compute_seconds=0.0,
            overhead_seconds=0.0,
            link_seconds=0.0,
            held=held,
        )
        made.append(stage)
    nothing = dict.fromkeys(
        ("latency", "memory", "compute", "link", "overhead", "bottleneck"),
        0.0,
    )
    return Plan(
        model=model,
        layer_count=max(end for _, _, end in stages),
        workload=Workload(),
        stages=tuple(made),
        hops=(),
        predicted=Prediction(**{f"{name}_seconds": 0.0 for name in nothing}, estimated=True),
        objective=ObjectiveKind.LATENCY,
        value=0.0,
        status=PlanStatus.FEASIBLE,
        solver="test",
        solve_seconds=0.0,
        seed=0,
    )


class Loader:
    """Remembers what it was asked for; waits while ``gate`` is closed, and fails when it is told to."""

    def __init__(self) -> None:
        self.calls: list[Assignment] = []
        self.cancelled: list[Assignment] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.running = 0

    async def load(self, assignment: Assignment) -> None:
        self.calls.append(assignment)
        self.running += 1
        assert self.running == 1, "two calls at once"
        try:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
        except asyncio.CancelledError:
            self.cancelled.append(assignment)
            raise
        finally:
            self.running -= 1
