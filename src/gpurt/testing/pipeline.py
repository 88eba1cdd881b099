"""Plans that run: stages as tasks on simulated devices that sleep by their model, activations as real copies.

For the proof that predictions hold. The devices do not know the planner's cost model, and the planner knows of them
only what was measured: devices by :func:`gpurt.calibration.calibrate` and launches, links by copies of two sizes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from itertools import permutations
from statistics import median
from types import TracebackType
from typing import Final, ParamSpec, Self

import numpy as np

from gpurt.calibration import calibrate
from gpurt.placement import LayerSpec, Link, ModelSpec, PlacementDevice, Plan, Topology, device_from_gpu
from gpurt.placement.costs import TOKEN_BYTES
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.modelled import LANGUAGE, ModelledDriver
from gpurt.testing.profiles import Profile
from gpurt.testing.wire import Wire
from gpurt.types import Kernel, MemoryHandle

P = ParamSpec("P")

CALIBRATION_BYTES: Final = 4 << 20
"""Little: the host's memory has to be faster than the devices that it stands for."""
LARGE_BYTES: Final = 1 << 20
PROBES: Final = 5
LAUNCHES: Final = 2
"""Of a layer: one reads its weights, one its cache."""
LONG: Final = 20
"""A launch of which arithmetic is so many times the fixed part tells the rate."""


@dataclass(frozen=True, slots=True)
class Network:
    """The way between two nodes; every pair has one of its own in each direction."""

    gbps: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class _Place:
    node: str
    device_id: str
    kernel: Kernel


class SimulatedCluster:
    """Nodes of simulated devices, and the network between them. Use it as ``async with``.

    Args:
        nodes: the devices of each node.
        clock, sleep, pause: seconds, of threads and of tasks; for a clock that only sleeping moves.
    """

    def __init__(
        self,
        nodes: Mapping[str, Sequence[Profile]],
        network: Network,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._clock, self._pause = clock, pause
        self._backends = {
            node: DriverBackend(ModelledDriver(profiles, seed=node, clock=clock, sleep=sleep))
            for node, profiles in nodes.items()
        }
        self._wires = {pair: Wire(network.gbps, network.latency_s) for pair in permutations(nodes, 2)}
        self._places: dict[str, _Place] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for backend in self._backends.values():
            await self._stack.enter_async_context(backend)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    # What a planner may know

    async def measure_devices(self) -> tuple[PlacementDevice, ...]:
        """The devices as measured, nothing of their memory kept back."""
        found: list[PlacementDevice] = []
        for node, backend in self._backends.items():
            for result in await calibrate(backend, max_bytes=CALIBRATION_BYTES, keep=False, clock=self._clock):
                device_id = result.device.device_id
                kernel = await backend.compile(device_id, LANGUAGE, "layer")
                fixed = await self._median(self._launch, backend, kernel, 0, 0.0)
                flops = 1e6
                while (seconds := await self._median(self._launch, backend, kernel, 0, flops)) < LONG * fixed:
                    flops *= 4
                device = device_from_gpu(
                    result.device,
                    node=node,
                    reserve=0.0,
                    measured=result.speeds,
                    compute_flops=flops / (seconds - fixed),
                )
                self._places[device.id] = _Place(node, device_id, kernel)
                found.append(device.model_copy(update={"launch_seconds": LAUNCHES * fixed}))
        return tuple(found)

    async def measure_links(self, devices: Sequence[PlacementDevice]) -> Topology:
        """Every ordered pair of ``devices``, which :meth:`measure_devices` has returned."""
        links: list[Link] = []
        for source, target in permutations(devices, 2):
            async with AsyncExitStack() as stack:
                ends = [
                    await stack.enter_async_context(self.allocation(each.id, LARGE_BYTES)) for each in (source, target)
                ]
                small, large = [
                    await self._median(self.send, source.id, ends[0], target.id, ends[1], nbytes)
                    for nbytes in (TOKEN_BYTES, LARGE_BYTES)
                ]
            bandwidth = (LARGE_BYTES - TOKEN_BYTES) / (large - small)
            links.append(Link(source=source.id, target=target.id, latency_seconds=small, bandwidth=bandwidth))
        return Topology(links=tuple(links))

    async def _median(self, call: Callable[P, Awaitable[object]], *args: P.args, **kwargs: P.kwargs) -> float:
        figures: list[float] = []
        for _ in range(PROBES):
            began = self._clock()
            await call(*args, **kwargs)
            figures.append(self._clock() - began)
        return median(figures)

    # What happens

    async def run(self, plan: Plan, model: ModelSpec, *, steps: int, in_flight: int = 1) -> float:
        """Seconds from one step to the next, over ``steps`` steps after a first round.

        With one batch in flight that is the time per token of each of its sequences; with more, the stages work on
        different batches at once.

        Args:
            plan: without tensor parallelism, of devices that :meth:`measure_devices` has returned.

        Raises:
            OutOfMemory: a device does not hold what the plan puts on it.
        """
        async with AsyncExitStack() as stack:
            for stage in plan.stages:
                for held in stage.held:
                    nbytes = held.weights + held.kv + held.activations
                    await stack.enter_async_context(self.allocation(held.device, nbytes))
            run = _Run(self, plan, model, in_flight)
            await run.prepare(stack)
            return await run.seconds(steps)

    def clock(self) -> float:
        return self._clock()

    async def layer(self, device: str, layer: LayerSpec, batch: int, context: int) -> None:
        """One layer, one step: its weights with its arithmetic, then its cache."""
        place = self._places[device]
        backend = self._backends[place.node]
        await self._launch(backend, place.kernel, layer.weight_bytes, layer.flops_per_token * batch)
        await self._launch(backend, place.kernel, layer.kv_bytes(context) * batch, 0.0)

    async def head(self, device: str, model: ModelSpec, batch: int) -> None:
        place = self._places[device]
        flops = model.head_flops_per_token * batch
        await self._launch(self._backends[place.node], place.kernel, model.head_bytes, flops)

    async def send(self, source: str, src: MemoryHandle, target: str, dst: MemoryHandle, nbytes: int) -> None:
        """Bytes of one device to another, over the network where they are of two nodes."""
        here, there = self._places[source], self._places[target]
        if here.node == there.node:
            await self._backends[here.node].copy_device_to_device(src, dst, nbytes)
            return
        content = await self._backends[here.node].copy_from_device(src, 0, nbytes)
        arrives_at = self._wires[here.node, there.node].reserve(nbytes, self._clock())
        await self._pause(max(0.0, arrives_at - self._clock()))
        await self._backends[there.node].copy_to_device(content, dst)

    def allocation(self, device: str, nbytes: int) -> AbstractAsyncContextManager[MemoryHandle]:
        place = self._places[device]
        return self._backends[place.node].allocation(place.device_id, max(1, nbytes))

    async def _launch(self, backend: DriverBackend, kernel: Kernel, nbytes: int, flops: float) -> None:
        await backend.launch(kernel, 1, 1, [np.uint64(nbytes), np.float64(flops)])


class _Run:
    """One run of a plan: for each stage a task that computes and one that sends, so that a stage takes up the next
    batch while its last one is on the way."""

    def __init__(self, cluster: SimulatedCluster, plan: Plan, model: ModelSpec, in_flight: int) -> None:
        if any(stage.tensor_parallel > 1 for stage in plan.stages):
            raise ValueError("the simulation has no tensor parallelism")
        self._cluster, self._plan, self._model, self._in_flight = cluster, plan, model, in_flight
        self._devices = [stage.devices[0] for stage in plan.stages]
        self._inboxes = [asyncio.Queue[int]() for _ in plan.stages]
        self._outboxes = [asyncio.Queue[int]() for _ in plan.stages]
        self._back = asyncio.Queue[int]()
        self._payloads = [hop.payload_bytes for hop in plan.hops]
        self._buffers: list[list[MemoryHandle]] = []
        """Of each stage, one for each batch in flight."""

    async def prepare(self, stack: AsyncExitStack) -> None:
        largest = max(self._payloads, default=1)
        for device in self._devices:
            opened = [self._cluster.allocation(device, largest) for _ in range(self._in_flight)]
            self._buffers.append([await stack.enter_async_context(each) for each in opened])

    async def seconds(self, steps: int) -> float:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(work(k)) for k in range(len(self._devices)) for work in (self._stage, self._sender)
            ]
            for batch in range(self._in_flight):
                self._inboxes[0].put_nowait(batch)
            began = 0.0
            for step in range(self._in_flight + steps):
                batch = await self._back.get()
                if step == self._in_flight - 1:
                    began = self._cluster.clock()
                self._inboxes[0].put_nowait(batch)
            elapsed = self._cluster.clock() - began
            for task in tasks:
                task.cancel()
        return elapsed / steps

    async def _stage(self, k: int) -> None:
        stage, work = self._plan.stages[k], self._plan.workload
        layers = self._model.layers[stage.start : stage.end]
        while True:
            batch = await self._inboxes[k].get()
            for layer in layers:
                await self._cluster.layer(self._devices[k], layer, work.batch, work.context_tokens)
            if stage.end == self._plan.layer_count:
                await self._cluster.head(self._devices[k], self._model, work.batch)
            self._outboxes[k].put_nowait(batch)

    async def _sender(self, k: int) -> None:
        following = (k + 1) % len(self._devices)
        while True:
            batch = await self._outboxes[k].get()
            if len(self._devices) > 1:
                source, target = self._buffers[k][batch], self._buffers[following][batch]
                await self._cluster.send(self._devices[k], source, self._devices[following], target, self._payloads[k])
            (self._inboxes[following] if following else self._back).put_nowait(batch)
