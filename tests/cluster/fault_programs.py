"""The processes that the tests of faults kill, freeze and start again. Each says READY, answers every line on standard
input with a line of JSON, and ends with its standard input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator

from gpurt.cluster.endpoints import engine_at
from gpurt.cluster.epoch import Epoch
from gpurt.cluster.observer import ClusterObserver
from gpurt.cluster.publisher import NodePublisher
from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.discovery.registry import RegistryFile
from gpurt.testing.judged_view import JudgedView, digest
from tests.cluster.support import HOST_A, device, result

DEVICES = 4


async def worker(endpoint: str, name: str, registry: str, rate: str, count: str) -> None:
    """Changes its devices ``count`` times, ``rate`` a second; then it stays. Answers with what is true of it."""
    engine = engine_at(endpoint, cluster="test")
    epoch = Epoch.new(RegistryFile(registry).next_epoch())
    host = HOST_A.model_copy(update={"hostname": name, "fingerprint": f"{name:0>16}"})
    publisher = NodePublisher(engine, name, host=host, epoch=epoch)
    await engine.start()
    await publisher.start(result(*(device(f"{name}-{index}", index) for index in range(DEVICES))))
    say("READY")
    answering = asyncio.create_task(_answer_truth(publisher))
    begin = time.monotonic()
    for number in range(int(count)):
        changed = device(f"{name}-{number % DEVICES}", number % DEVICES, memory_available=number)
        await publisher.publish_event(
            DeviceEvent(type=EventType.MEMORY, device=changed, observed_at="2026-01-01T00:00:00Z")
        )
        await asyncio.sleep(max(0.0, begin + (number + 1) / float(rate) - time.monotonic()))
    say("DONE")
    await answering
    await engine.close()


async def _answer_truth(publisher: NodePublisher) -> None:
    async for _ in lines():
        epoch, seq = publisher.position
        say(json.dumps(["healthy", str(epoch), seq, digest(publisher.devices.values())]))


async def master(endpoint: str) -> None:
    """Answers with its picture and with what it has to complain of."""
    engine = engine_at(endpoint, cluster="test")
    view = JudgedView()
    await engine.start()
    running = asyncio.create_task(ClusterObserver(engine, view).run(lambda: say("READY")))
    async for _ in lines():
        say(json.dumps([view.picture(), view.faults]))
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await engine.close()


async def lines() -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        yield line


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    program, *words = sys.argv[1:]
    asyncio.run({"worker": worker, "master": master}[program](*words))
