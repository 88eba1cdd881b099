"""A whole worker: it takes its part of a plan, is measured, drains, and remembers all that when it is started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from gpurt.cluster.commands import Step, request_drain, send_assignment
from gpurt.cluster.committer import PlacementCommitter
from gpurt.cluster.errors import InvalidName
from gpurt.cluster.inprocess import InProcessBus, InProcessEngine
from gpurt.cluster.link_survey import survey_links
from gpurt.cluster.master import MasterConfig, run_master
from gpurt.cluster.security.errors import InsecureEndpoint
from gpurt.cluster.shards import ShardState
from gpurt.cluster.topology import pairs_to_measure, topology_from_view
from gpurt.cluster.view import MasterView
from gpurt.cluster.worker import Worker, WorkerConfig, run_worker
from gpurt.placement import (
    Constraints,
    ConstraintSatisfactionPlacement,
    LayerSpec,
    ModelSpec,
    PlanVersion,
    Topology,
    devices_from_view,
)
from tests.cluster.plans import Loader
from tests.cluster.support import until

MODEL = ModelSpec(name="llama", layers=tuple(LayerSpec(weight_bytes=9 << 30) for _ in range(12)), hidden_size=4096)
"""108 GiB: more than one of the workers has."""


@asynccontextmanager
async def worker(bus: InProcessBus, name: str, registry: Path, loader: Loader) -> AsyncGenerator[Worker]:
    joined: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()

    async def ready(made: Worker) -> None:
        made.assignments.use(loader)
        joined.set_result(made)

    config = WorkerConfig(name, "test", registry_path=registry, simulate="h100", telemetry_s=None)
    task = asyncio.create_task(run_worker(config, on_ready=ready, engine=InProcessEngine(bus)))
    try:
        yield await joined
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_from_the_view_to_loaded_shards_and_over_a_restart(tmp_path: Path) -> None:
    bus, view = InProcessBus("test"), MasterView()
    listening = asyncio.Event()
    master = InProcessEngine(bus)
    config = MasterConfig("test")
    running = asyncio.create_task(run_master(config, view, on_ready=lambda _: listening.set(), engine=master))
    await listening.wait()
    committer = PlacementCommitter(master, view)
    keeping = asyncio.create_task(committer.run())
    one, two, again = Loader(), Loader(), Loader()
    try:
        async with worker(bus, "w1", tmp_path / "w1.json", one):
            async with worker(bus, "w2", tmp_path / "w2.json", two):
                await until(lambda: len(view.snapshot().available_devices) == 2, "both workers")
                picture = view.snapshot()
                found = await survey_links(master, picture, pairs_to_measure(picture), term=1)
                assert found.failed == {}
                await until(lambda: all(n.links.measured for n in view.snapshot().nodes.values()), "the links")
                devices = devices_from_view(view.snapshot().available_devices)
                topology = topology_from_view(view.snapshot(), devices)
                assert not any(link.estimated for link in topology.links)
                plan = ConstraintSatisfactionPlacement().solve_placement(MODEL, devices, topology)
                assert len(plan.stages) == 2
                outcome = await committer.commit(plan, PlanVersion(term=1, n=1))
                assert outcome.committed, outcome.message

                def loaded() -> bool:
                    shards = [node.placement.shard("llama") for node in view.snapshot().nodes.values()]
                    return [shard and shard.state for shard in shards] == [ShardState.LOADED] * 2

                await until(loaded, "the shards")
                held = {f"{node}/{key}": ranges for (node, key), ranges in view.snapshot().resident.items()}
                resident = {name: range(ranges[0].start, ranges[0].end) for name, ranges in held.items()}
                assert resident == plan.resident()
                # Layers that lie there already cost nothing to move.
                told = devices_from_view(view.snapshot().available_devices, resident=view.snapshot().resident)
                same = ConstraintSatisfactionPlacement().solve_placement(
                    MODEL, told, Topology(), Constraints(movement_seconds_per_byte=1e-9)
                )
                assert sum(each.moved for stage in same.stages for each in stage.held) == 0
                await request_drain(master, "w2", term=2)
                old = next(part for part in two.calls)
            # w2 is started again: it has lost the shards, but not the term, nor that it drains.
            async with worker(bus, "w2", tmp_path / "w2.json", again) as second:
                await until(lambda: view.snapshot().nodes["w2"].draining, "the draining")
                assert second.publisher.fence.term == 2
                assert [node for node, _ in view.snapshot().available_devices] == ["w1"]
                stale = await send_assignment(master, "w2", old, Step.ACTIVATE)
                assert not stale.accepted
                assert again.calls == []
    finally:
        for task in (keeping, running):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"link_address": "192.0.2.1"}, InsecureEndpoint),
        ({"link_address": "a b"}, InvalidName),
        ({"link_address": "localhost", "tls": "folder", "insecure": True}, InsecureEndpoint),
    ],
)
def test_where_a_worker_may_not_be_measured(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        WorkerConfig("w1", **options)  # type: ignore[arg-type]
    assert WorkerConfig("w1", link_address="192.0.2.1", insecure=True).links
