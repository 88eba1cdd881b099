"""What the child processes of the cluster tests run. Each prints READY, and ends when its standard input does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

from gpurt.cluster.endpoints import engine_at
from gpurt.cluster.master import MasterConfig, run_master
from gpurt.cluster.state import encode_snapshot
from gpurt.cluster.view import MasterView
from gpurt.cluster.worker import Worker, WorkerConfig, run_worker
from gpurt.cluster.zenoh_engine import ZenohEngine
from tests.cluster.support import event_bytes, snapshot


def say(text: str) -> None:
    print(text, flush=True)


async def hub(endpoint: str) -> None:
    engine = ZenohEngine(cluster="test", endpoint=endpoint, listen=True)
    await engine.start()
    say("READY")
    await asyncio.Event().wait()
    await engine.close()


async def node(endpoint: str, name: str) -> None:
    """Joins, publishes one event, stays."""
    engine = engine_at(endpoint, cluster="test")
    await engine.start()
    await engine.join(name, encode_snapshot(snapshot(node=name, seq=1)))
    await engine.publish(event_bytes(1, node=name))
    say("READY")
    await asyncio.Event().wait()


async def worker(endpoint: str, name: str, registry: str, simulate: str) -> None:
    async def ready(worker: Worker) -> None:
        say("READY")

    config = WorkerConfig(name, "test", endpoint, registry_path=registry, simulate=simulate)
    await run_worker(config, on_ready=ready)


async def master(endpoint: str) -> None:
    """After READY: one line of JSON for every change."""
    view = MasterView()
    changes = view.changes()
    config = MasterConfig("test", endpoint)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_master(config, view, on_ready=lambda _: say("READY")))
        async for change in changes:
            picture = view.snapshot()
            say(
                json.dumps(
                    {
                        "change": change.kind,
                        "node": change.node,
                        "nodes": {name: record.state for name, record in picture.nodes.items()},
                        "devices": [list(key) for key in picture.available_devices],
                    }
                )
            )


async def main(program: str, *args: str) -> None:
    programs = {"hub": hub, "node": node, "worker": worker, "master": master}
    work = asyncio.ensure_future(programs[program](*args))
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.wait((work, ended), return_when=asyncio.FIRST_COMPLETED)
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
