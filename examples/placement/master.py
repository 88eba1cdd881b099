"""A master in code: it listens, waits for two workers, plans a small model, has them load it, and shows where it lies.

In three terminals::

    python examples/placement/master.py
    python examples/placement/worker.py w1
    python examples/placement/worker.py w2

Stop a worker and start it again: it is sent its part again. Ctrl-C ends the master.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable

from gpurt.cluster import (
    ClusterSnapshot,
    Master,
    MasterConfig,
    MasterView,
    PlacementCommitter,
    latest_version,
    run_master,
    topology_from_view,
)
from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    ModelSpec,
    PlanVersion,
    ResidentRange,
    devices_from_view,
)

MODEL = ModelSpec.uniform("tiny", layers=24, size_bytes=96 << 20, activation_bytes_per_token=8192)


async def main(endpoint: str) -> None:
    view = MasterView()
    listening: asyncio.Future[Master] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_master(MasterConfig(endpoint=endpoint), view, on_ready=listening.set_result))
        master = await listening
        print(f"listening at {endpoint}, waiting for two workers", flush=True)
        committer = PlacementCommitter(master.engine, view)
        group.create_task(committer.run())  # sends a node its part again when it has lost it
        await until(view, lambda seen: len({node for node, _ in seen.available_devices}) == 2)

        seen = view.snapshot()
        devices = devices_from_view(seen.available_devices, resident=seen.resident)
        # It would fit one of them; two are asked for so that there is something to see.
        plan = await asyncio.to_thread(
            ConstraintSatisfactionPlacement().solve_placement,
            *(MODEL, devices, topology_from_view(seen, devices), Constraints(min_nodes=2)),
        )
        # A master that is the only one goes on in the term that the nodes have heard of. Where masters are elected,
        # each has a later one.
        term = max(seen.term, 1)
        version = (latest_version(seen, MODEL.name) or PlanVersion(term=term, n=0)).next(term=term)
        while True:
            result = await committer.commit(plan, version)
            print(result.message, flush=True)
            if result.committed:
                break
            await asyncio.sleep(1)  # a worker that joined just now may have no loader yet

        await until(view, lambda seen: sum(map(layers, seen.resident.values())) == len(MODEL.layers))
        for (node, device), ranges in sorted(view.snapshot().resident.items()):
            print(f"{node} {device}: layers {', '.join(f'{each.start}-{each.end - 1}' for each in ranges)}", flush=True)


def layers(ranges: tuple[ResidentRange, ...]) -> int:
    return sum(each.end - each.start for each in ranges)


async def until(view: MasterView, holds: Callable[[ClusterSnapshot], bool]) -> None:
    """Wait for changes until it holds."""
    with contextlib.closing(view.changes()) as changes:
        while not holds(view.snapshot()):
            await anext(changes)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "tcp/127.0.0.1:7447"))
