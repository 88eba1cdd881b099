"""A worker in code, with a simulated device and a loader of its own: see master.py beside it.

What ``load`` does is the application's: here it takes the memory and loads nothing. For layers of a safetensors
checkpoint there is ``gpurt worker --weights``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

from gpurt import GPUBackend, MemoryHandle
from gpurt.cluster import Assignment, Worker, WorkerConfig, run_worker


class Loader:
    """Holds of each instance of a model what the newest plan says."""

    def __init__(self, backend: GPUBackend) -> None:
        self._backend = backend
        self._device_ids = {device.stable_id: device.device_id for device in backend.devices}
        self._held: dict[str, list[MemoryHandle]] = {}

    async def load(self, assignment: Assignment) -> None:
        """Called with everything that the node shall hold of an instance; without a stage: nothing any more."""
        for handle in self._held.pop(assignment.instance, []):
            await self._backend.deallocate(handle)
        held = self._held[assignment.instance] = []  # what a failure or a cancellation leaves is let go of next time
        for stage in assignment.stages:
            for part in stage.devices:
                device_id = self._device_ids[part.device]
                held.append(await self._backend.allocate(device_id, part.weight_bytes))
                print(f"layers {stage.start}-{stage.end - 1} of {assignment.model} on {device_id}", flush=True)


async def main(node: str, endpoint: str) -> None:
    async def ready(worker: Worker) -> None:
        assert worker.backend is not None, "that of simulated devices; for real ones open one with gpurt.create_backend"
        worker.assignments.use(Loader(worker.backend))
        print(f"{node} takes layers", flush=True)

    # Two nodes of one machine need two registries.
    registry = Path(tempfile.gettempdir()) / f"gpurt-example-{node}.json"
    config = WorkerConfig(node, endpoint=endpoint, registry_path=registry, simulate="h100")
    await run_worker(config, on_ready=ready)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "tcp/127.0.0.1:7447"))
