"""Nodes of a simulated cluster, many in one process: the bus and the publisher of a worker, with simulated devices and
without discovery.

``python -m gpurt.testing.simulated_nodes ENDPOINT PROCESS CONFIG`` is one process of
:mod:`gpurt.testing.cluster_simulation`. It says a line of JSON when its nodes are there, does its part of the plan
after a line on standard input, says a line with what is true of its nodes then, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from gpurt.cluster.envelope import EventKind, decode, encode, make_event
from gpurt.cluster.epoch import Epoch, Position
from gpurt.cluster.publisher import NodePublisher
from gpurt.cluster.state import HostInfo, NodeSnapshot, encode_snapshot
from gpurt.cluster.zenoh_engine import ZenohEngine
from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.discovery.result import DiscoveryResult, summarize
from gpurt.testing.judged_view import digest
from gpurt.testing.profiles import parse_simulation
from gpurt.testing.simulated import SimulatedDriver
from gpurt.testing.simulation_plan import PlannedStep, SimulatedFault, SimulationConfig, plan_steps
from gpurt.types import BackendReport, DeviceState, GPUDevice

CLUSTER: Final = "simulation"
STARTING: Final = 16
"""Nodes that join at once."""


def simulated_result(node: str, count: int) -> DiscoveryResult:
    """``count`` simulated devices with identities of their own, as a discovery finds them."""
    driver = SimulatedDriver(parse_simulation(f"h100x{count}"), seed=node)
    try:
        found = driver.open()
    finally:
        driver.close()
    return summarized(found)


def summarized(devices: Iterable[GPUDevice]) -> DiscoveryResult:
    return summarize(devices, [BackendReport(name="simulated", status="ok")])


class FaultyEngine(ZenohEngine):
    """Loses events before they reach the bus, and steps the wall clock in the others."""

    losing = 0
    """Events still to be lost."""
    skew = timedelta()

    async def publish(self, payload: bytes) -> None:
        if self.losing:
            self.losing -= 1
            return
        if self.skew:
            event = decode(payload)
            payload = encode(event.model_copy(update={"time": datetime.now(UTC) + self.skew}))
        await super().publish(payload)


class SimulatedNode:
    """One node: joins, does its steps one after the other, and knows what is true of itself."""

    def __init__(self, endpoint: str, name: str, config: SimulationConfig, done: Counter[str]) -> None:
        self.name = name
        self._endpoint, self._config, self._done = endpoint, config, done
        self._run = 0
        self._engine = FaultyEngine(cluster=CLUSTER, endpoint=endpoint)
        self._skew = timedelta()
        self._devices = {device.stable_id: device for device in simulated_result(name, config.devices).devices}
        self._plugged = tuple(self._devices.values())

    async def start(self) -> None:
        self._run += 1
        self._engine = FaultyEngine(cluster=CLUSTER, endpoint=self._endpoint)
        self._engine.skew = self._skew
        await self._engine.start()
        self._publisher = NodePublisher(self._engine, self.name, host=_host(self.name), epoch=self._epoch(self._run))
        await self._publisher.start(summarized(self._devices.values()))

    async def play(self, steps: Iterable[PlannedStep], begin: float) -> None:
        """``begin``: the moment 0 of the plan, on the monotonic clock."""
        async with asyncio.TaskGroup() as clones:
            for step in steps:
                await asyncio.sleep(max(0.0, begin + step.at_s - time.monotonic()))
                self._done[step.fault or "change"] += 1
                match step.fault:
                    case SimulatedFault.LOSS:
                        # The change behind them shows that something is missing.
                        self._engine.losing = int(step.value)
                        for number in range(int(step.value) + 1):
                            await self._change(number)
                    case SimulatedFault.RESTART:
                        await self._engine.close()
                        await self.start()
                    case SimulatedFault.CLONE:
                        clones.create_task(self._clone(step.value))
                    case SimulatedFault.CLOCK:
                        self._skew = self._engine.skew = timedelta(seconds=step.value)
                        await self._change(0)
                    case _:
                        await self._change(int(step.value))

    def truth(self) -> list[Any]:
        """As :meth:`gpurt.testing.judged_view.JudgedView.picture` should have it."""
        epoch, seq = self._publisher.position
        return ["healthy", str(epoch), seq, digest(self._publisher.devices.values())]

    async def close(self) -> None:
        await self._engine.close()

    async def _change(self, value: int) -> None:
        """Its memory, mostly; now and then its health, or that it is pulled out or plugged in again."""
        rng = random.Random(value)
        device = rng.choice(self._plugged)
        kind = EventType.MEMORY
        present = self._devices.get(device.stable_id)
        if present is None:
            kind = EventType.ADDED
        elif (chance := rng.random()) < 0.05:
            kind = EventType.REMOVED
        elif chance < 0.15:
            kind = EventType.HEALTH
            good = present.state is DeviceState.DEGRADED
            state = DeviceState.HEALTHY if good else DeviceState.DEGRADED
            device = present.model_copy(update={"state": state, "usable": good})
        else:
            device = present.model_copy(update={"memory_available": rng.randrange(1 << 36)})
        if kind is EventType.REMOVED:
            del self._devices[device.stable_id]
        else:
            self._devices[device.stable_id] = device
        await self._publisher.publish_event(DeviceEvent(type=kind, stable_id=device.stable_id, device=device))

    async def _clone(self, seconds: float) -> None:
        """A copy of the machine that has not looked whether its name is in use."""
        epoch = self._epoch(1, "clone")
        other = NodeSnapshot(
            node=self.name, epoch=str(epoch), seq=1, host=_host(f"{self.name}-clone"), gpu_devices=self._plugged
        )
        engine = ZenohEngine(cluster=CLUSTER, endpoint=self._endpoint)
        try:
            await engine.start()
            await engine.join(self.name, encode_snapshot(other))
            event = make_event(EventKind.NODE_SNAPSHOT, cluster=CLUSTER, node=self.name, position=Position(epoch, 1))
            await engine.publish(encode(event))
            await asyncio.sleep(seconds)
        finally:
            await engine.close()

    def _epoch(self, run: int, who: str = "") -> Epoch:
        """The same with every start of the simulation."""
        return Epoch(run, hashlib.sha256(f"{self._config.seed}:{self.name}:{run}:{who}".encode()).hexdigest()[:32])


def _host(name: str) -> HostInfo:
    fingerprint = hashlib.sha256(name.encode()).hexdigest()[:16]
    return HostInfo(hostname=name, fingerprint=fingerprint, boot_id="simulated", pid=os.getpid())


async def run(endpoint: str, process: int, config: SimulationConfig) -> None:
    logging.getLogger("gpurt").setLevel(logging.ERROR)  # hundreds of nodes that say that their hub went away
    done: Counter[str] = Counter()
    nodes = [SimulatedNode(endpoint, name, config, done) for name in config.names_in(process)]
    told, ended = asyncio.Event(), asyncio.Event()
    # A thread that nobody waits for: one of the loop's own would keep a process that has failed from ending.
    threading.Thread(target=_listen, args=(asyncio.get_running_loop(), told, ended), daemon=True).start()
    working = asyncio.create_task(_work(nodes, config, done, told))
    ending = asyncio.create_task(ended.wait())
    await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        working.result()
        await ending
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    await asyncio.gather(*(node.close() for node in nodes))


async def _work(nodes: list[SimulatedNode], config: SimulationConfig, done: Counter[str], told: asyncio.Event) -> None:
    at_once = asyncio.Semaphore(STARTING)

    async def start(node: SimulatedNode) -> None:
        async with at_once:
            await node.start()

    await asyncio.gather(*map(start, nodes))
    _say(ready=True)
    await told.wait()
    steps, begin = plan_steps(config), time.monotonic()
    await asyncio.gather(*(node.play(steps[node.name], begin) for node in nodes))
    _say(truth={node.name: node.truth() for node in nodes}, done=done)


def _listen(loop: asyncio.AbstractEventLoop, told: asyncio.Event, ended: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending by itself
        while os.read(sys.stdin.fileno(), 64):
            loop.call_soon_threadsafe(told.set)
        loop.call_soon_threadsafe(ended.set)


def _say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    document = json.loads(sys.argv[3])
    faults = tuple(map(SimulatedFault, document.pop("faults")))
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), SimulationConfig(**document, faults=faults)))
