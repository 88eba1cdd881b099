"""One cluster of different kinds of devices, each kind in a process of its own."""

from __future__ import annotations

import asyncio
import base64
import random
from contextlib import suppress

import pytest

from gpurt.cluster.master import MasterConfig, run_master
from gpurt.cluster.view import MasterView
from gpurt.placement import ConstraintSatisfactionPlacement, Topology, devices_from_view, validate_plan
from gpurt.placement.synthetic import synthetic_model
from tests.cluster.support import Child, free_port, until

pytestmark = pytest.mark.wide

KINDS = ("cuda", "rocm", "cpu")


async def test_a_model_is_placed_over_cuda_rocm_and_cpu_and_bytes_go_through_all_of_them() -> None:
    endpoint = f"tcp/127.0.0.1:{free_port()}"
    view = MasterView()
    master = asyncio.create_task(run_master(MasterConfig("test", endpoint), view))
    children = {kind: Child(endpoint, kind, module="tests.cluster.mixed_programs") for kind in KINDS}
    try:
        await asyncio.gather(*(child.ready() for child in children.values()))
        await until(lambda: len(view.snapshot().nodes) == len(KINDS), "all nodes")
        picture = view.snapshot()
        assert {(name, node.gpu_backend) for name, node in picture.nodes.items()} == {(kind, kind) for kind in KINDS}

        devices = devices_from_view(picture.available_devices)
        room = {kind: sum(d.usable_bytes - d.reserve_bytes for d in devices if d.node == kind) for kind in KINDS}
        size = sum(room.values()) * 8 // 10
        assert size > sum(room.values()) - min(room.values()), "two of the nodes would be enough"
        model = synthetic_model(40, size)
        plan = ConstraintSatisfactionPlacement().solve_placement(model, devices, Topology())
        validate_plan(model, devices, Topology(), None, plan)
        assert {stage.node for stage in plan.stages} == set(KINDS)

        sent = random.Random(1).randbytes(100_000)
        carried = sent
        for kind in KINDS:
            stdin = children[kind].process.stdin
            assert stdin is not None
            stdin.write(base64.b64encode(carried).decode() + "\n")
            stdin.flush()
            carried = base64.b64decode(await children[kind].line())
        assert carried == sent
    finally:
        master.cancel()
        with suppress(asyncio.CancelledError):
            await master
        for child in children.values():
            child.kill()
