"""What the processes of ``benchmarks/cluster.py`` run. Each says READY, and ends when its standard input does.

Nodes are the bus and the publisher with simulated devices, without discovery: what a
cluster costs, not what drivers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import sys
import time

import psutil

from gpurt.cluster.envelope import EventKind, encode, make_event
from gpurt.cluster.epoch import Epoch, Position
from gpurt.cluster.master import Master, MasterConfig, run_master
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.records import NodeState
from gpurt.cluster.state import HostInfo, summarize_devices
from gpurt.cluster.view import MasterView
from gpurt.cluster.zenoh_engine import ZenohEngine
from gpurt.cluster.zenoh_settings import calm_runtime
from gpurt.discovery.result import DiscoveryResult
from gpurt.testing.simulated_nodes import simulated_result

CLUSTER = "bench"
AT_ONCE = 4096

logging.getLogger("gpurt").setLevel(logging.ERROR)  # a thousand nodes that say that their hub went away


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def event_of(
    node: str, epoch: Epoch, seq: int, found: DiscoveryResult, *, size_bytes: int = 0, **more: object
) -> bytes:
    """What a node says when the free memory of one of its devices changes, filled up to ``size_bytes``."""
    device = found.devices[seq % len(found.devices)]
    device = device.model_copy(update={"memory_available": (device.memory_bytes or 0) - seq})
    fields = summarize_devices(found.devices, timestamp=found.timestamp, status="complete")
    data = {
        "device": device.model_dump(mode="json"),
        "event": "updated",
        "previous_state": None,
        "reason": None,
        "node": fields.model_dump(mode="json"),
        **more,
    }

    def encoded() -> bytes:
        event = make_event(
            EventKind.DEVICE_UPDATED,
            cluster=CLUSTER,
            node=node,
            position=Position(epoch, seq),
            subject=device.stable_id,
            data=data,
        )
        return encode(event)

    payload = encoded()
    if len(payload) < size_bytes:
        data["filling"] = "x" * (size_bytes - len(payload) - len(',"filling":""'))
        payload = encoded()
    return payload


async def publish(endpoint: str, node: str, rate: str, count: str) -> None:
    """``count`` events of 1 KB with the moment of their sending; ``rate`` a second, or 0: as fast as they go."""
    found = simulated_result(node, 8)
    engine = ZenohEngine(cluster=CLUSTER, endpoint=endpoint)
    await engine.start()
    epoch = Epoch.new(1)
    publisher = NodePublisher(engine, node, host=host(0), epoch=epoch)
    await publisher.start(found)
    first = publisher.position.seq + 1
    numbers = range(first, first + int(count))
    made = [] if float(rate) else [event_of(node, epoch, seq, found, size_bytes=1024) for seq in numbers]
    gc.freeze()
    say(ready=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    if made:
        # Straight to the bus: this is about who receives, and half of what a subscriber may be behind at a time.
        put = engine._node.put  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]
        for at in range(0, len(made), AT_ONCE):
            await asyncio.to_thread(list, map(put, made[at : at + AT_ONCE]))
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    else:
        begin = time.monotonic()
        for sent, seq in enumerate(numbers):
            payload = event_of(node, epoch, seq, found, size_bytes=1024, sent=time.monotonic())
            await engine.publish(payload)
            await asyncio.sleep(max(0.0, begin + (sent + 1) / float(rate) - time.monotonic()))
    await asyncio.Event().wait()


async def nodes(endpoint: str, first: str, count: str, devices: str) -> None:
    """Nodes ``first`` … in this one process, each with a session of its own."""
    engines = [ZenohEngine(cluster=CLUSTER, endpoint=endpoint) for _ in range(int(count))]
    at_once = asyncio.Semaphore(16)

    async def start(number: int, engine: ZenohEngine) -> None:
        name = f"n{number}"
        found = await asyncio.to_thread(simulated_result, name, int(devices))
        async with at_once:
            await engine.start()
            await NodePublisher(engine, name, host=host(number), epoch=Epoch.new(1)).start(found)

    await asyncio.gather(*(start(int(first) + at, engine) for at, engine in enumerate(engines)))
    say(ready=True)
    await asyncio.Event().wait()


def forked(endpoint: str, count: str, devices: str) -> None:
    """``count`` nodes in a process each, forked from this one before it has a thread: says their process ids, and what
    the bus and the node added to the memory of each."""
    made = [(f"p{number}", simulated_result(f"p{number}", int(devices))) for number in range(int(count))]
    gc.collect()
    gc.freeze()
    pids: list[int] = []
    reader, writer = os.pipe()
    for number, (name, found) in enumerate(made):
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.close(0)
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(_one(endpoint, name, number, found, writer))
            os._exit(0)
        pids.append(pid)
    os.close(writer)
    with os.fdopen(reader) as said:
        added = [json.loads(said.readline()) for _ in pids]
    say(ready=True, pids=pids, added=added)
    sys.stdin.read()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


async def _one(endpoint: str, name: str, number: int, found: DiscoveryResult, told: int) -> None:
    before = psutil.Process().memory_full_info().uss
    engine = ZenohEngine(cluster=CLUSTER, endpoint=endpoint)
    await engine.start()
    await NodePublisher(engine, name, host=host(number), epoch=Epoch.new(1)).start(found)
    await asyncio.sleep(1.0)
    after = psutil.Process().memory_full_info().uss
    os.write(told, (json.dumps([after - before, after]) + "\n").encode())
    await asyncio.Event().wait()


async def single(endpoint: str, devices: str) -> None:
    """One node: says what it takes, and what of that the bus and the node added."""
    found = simulated_result("single", int(devices))
    before = psutil.Process().memory_full_info().uss
    engine = ZenohEngine(cluster=CLUSTER, endpoint=endpoint)
    await engine.start()
    await NodePublisher(engine, "single", host=host(0), epoch=Epoch.new(1)).start(found)
    await asyncio.sleep(1.0)
    after = psutil.Process().memory_full_info().uss
    say(ready=True, added=after - before, whole=after)
    await asyncio.Event().wait()


async def master(endpoint: str) -> None:
    """For every line on standard input, one line of what the master has and costs."""
    calm_runtime()  # as ``gpurt master`` does
    view = MasterView()
    listening: asyncio.Future[Master] = asyncio.get_running_loop().create_future()
    begin = time.monotonic()

    async def answer() -> None:
        observer = (await listening).observer
        say(ready=True)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            records = view.snapshot().nodes.values()
            healthy = [record for record in records if record.state is NodeState.HEALTHY]
            say(
                seconds=time.monotonic() - begin,
                healthy=len(healthy),
                devices=sum(len(record.devices) for record in healthy),
                events=sum(record.seq for record in records),
                resyncs=sum(observer.resyncs.values()),
                cpu=time.process_time(),
                rss=psutil.Process().memory_info().rss,
            )

    async with asyncio.TaskGroup() as group:
        group.create_task(run_master(MasterConfig(CLUSTER, endpoint), view, on_ready=listening.set_result))
        group.create_task(answer())


def host(number: int) -> HostInfo:
    return HostInfo(hostname=f"host{number}", fingerprint=f"{number:016x}", boot_id="bench", pid=os.getpid())


async def main(program: str, *args: str) -> None:
    programs = {"publish": publish, "nodes": nodes, "single": single, "master": master}
    await programs[program](*args)


if __name__ == "__main__":
    if sys.argv[1] == "forked":
        forked(*sys.argv[2:])
    else:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(main(*sys.argv[1:]))
