"""load_safetensors: check the files, check the room, allocate, stream, check again."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

from gpurt.backend import GPUBackend
from gpurt.errors import DeviceNotFound, OutOfMemory, OutOfRange, Unsupported
from gpurt.memory.undo import undo_allocations
from gpurt.types import MemoryHandle
from gpurt.weights.arguments import check_load
from gpurt.weights.errors import shown
from gpurt.weights.filling import Fill, Filling
from gpurt.weights.header import TensorInfo
from gpurt.weights.loaded import LoadedTensor, LoadedWeights
from gpurt.weights.plan import halve, plan_blocks
from gpurt.weights.quiet import SLICE, drop
from gpurt.weights.selection import Only, Placement, place, select
from gpurt.weights.sources import Source, Sources
from gpurt.weights.work import Work

T = TypeVar("T")

PER_DEVICE: Final = 2
"""Blocks that are filled at a time for each device: while one waits for the disk, the other keeps the link busy."""

log = logging.getLogger("gpurt.weights")


async def load_safetensors(
    path_or_index: str | os.PathLike[str],
    backend: GPUBackend,
    placement: Placement,
    *,
    only: Only | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    max_concurrent: int | None = None,
) -> LoadedWeights:
    """Load a safetensors file, or a sharded checkpoint by its index (``….json``), without holding it in host memory.

    Files, names and devices are checked whole, and the room on every device, before anything is allocated.
    Everything is allocated before anything is copied. What was allocated is freed on any error and on cancellation.

    Args:
        placement: a device id; or device ids by name, prefix or layer (``{"model.layers.3": "cuda:1", "": "cuda:0"}``,
            the longest match decides); or a function from tensor name to device id.
        only: load these names, prefixes or layers (``["model.layers.3."]``), or those for which a function says
            so. Of a sharded checkpoint only the files that hold them are needed.
        on_progress: called on the event loop with the bytes loaded so far and the bytes in all, at first with 0.
            What it raises ends the load.
        max_concurrent: allocations that are filled at a time; None: two for each device.

    Raises:
        OutOfRange: an argument is not what it has to be.
        WeightsError: a file is missing, malformed, inconsistent, or changed during the load.
        DeviceNotFound: the placement names a device that the backend has not.
        OutOfMemory: the weights do not fit a device.
        GPUError: whatever else the backend raises.
    """
    path, limit = check_load(path_or_index, backend, placement, only, on_progress, max_concurrent)
    load = _Load(backend, path, on_progress)
    try:
        try:
            weights = await load.run(placement, only, limit)
        finally:
            await load.end()
    except BaseException as failure:
        await undo_allocations(backend, load.handles, failure)
        raise
    return weights


class _Load:
    """One load, in its steps. Passes over all tensors, of which there may be 100,000, run on the lane like the reading
    of files, and what they leave is freed there."""

    def __init__(self, backend: GPUBackend, path: Path, on_progress: Callable[[int, int], None] | None) -> None:
        self.handles: list[MemoryHandle] = []
        self._path = str(path)
        self._sources = Sources(path)
        self._backend = backend
        self._work = Work(path.name)
        self._on_progress = on_progress
        self._names: list[str] = []
        self._contents: list[tuple[Source, list[TensorInfo]]] = []
        self._devices: dict[str, str] = {}
        self._fills: list[Fill] = []
        self._allocated: list[Fill] = []

    async def run(self, placement: Placement, only: Only | None, max_concurrent: int | None) -> LoadedWeights:
        self._names = await self._work.do(self._sources.names)
        await self._select(only)
        await self._place(placement)
        await self._work.do(self._find)
        used = await self._work.do(self._used)
        await self._check_devices(used)
        await self._pass(self._plan)
        await self._check_room(self._fills)
        await self._allocate(self._fills)
        filling = Filling(self._backend, self._work, self._allocated, self._on_progress)
        await filling.run(max_concurrent or PER_DEVICE * len(used))
        await self._work.do(self._sources.check_unchanged)
        return await self._pass(self._loaded)

    async def end(self) -> None:
        """Close the files and forget everything, whatever became of the load."""
        await self._work.end(self._release)

    async def _pass(self, call: Callable[[], T]) -> T:
        """One that makes objects for all tensors."""
        return await self._work.make(len(self._names), call)

    # The user's functions run where the user is, some at a time; only gpurt's own passes leave the loop.

    async def _select(self, only: Only | None) -> None:
        if callable(only):
            chosen: list[str] = []
            for start in range(0, len(self._names), SLICE):
                chosen += select(self._names[start : start + SLICE], only, self._path)
                await asyncio.sleep(0)
            self._names = chosen
        else:
            self._names = await self._pass(lambda: select(self._names, only, self._path))

    async def _place(self, placement: Placement) -> None:
        if callable(placement):
            for start in range(0, len(self._names), SLICE):
                self._devices |= place(self._names[start : start + SLICE], placement, self._path)
                await asyncio.sleep(0)
        else:
            self._devices = await self._pass(lambda: place(self._names, placement, self._path))

    def _used(self) -> list[str]:
        used: dict[str, None] = {}
        for device_id in self._devices.values():
            used[device_id] = None
        return list(used)

    def _find(self) -> None:
        self._contents = self._sources.tensors(self._names)

    async def _check_devices(self, used: Iterable[str]) -> None:
        for device_id in used:
            if await self._backend.get_device(device_id) is None:
                name = next(name for name, asked in self._devices.items() if asked == device_id)
                known = ", ".join(device.device_id for device in self._backend.devices)
                raise DeviceNotFound(
                    f"no such device, asked for by the placement of tensor {shown(name)}",
                    backend=self._backend.name,
                    device_id=device_id,
                    operation="load_safetensors",
                    hint=f"devices: {known}",
                )

    def _plan(self) -> None:
        for source, tensors in self._contents:
            by_device: dict[str, list[TensorInfo]] = {}
            for tensor in tensors:
                by_device.setdefault(self._devices[tensor.name], []).append(tensor)
            for device_id, its_own in by_device.items():
                self._fills += [Fill(source, device_id, block) for block in plan_blocks(its_own)]

    def _release(self) -> None:
        """Free slice by slice what there may be 100,000 of: at the end of the coroutine it would be the loop's turn."""
        for fills in (self._fills, self._allocated):
            while fills:
                fills.pop()
        for each in (self._devices, self._names, *(tensors for _, tensors in self._contents)):
            drop(each)
        self._contents.clear()
        self._sources.close()

    async def _check_room(self, fills: Iterable[Fill]) -> None:
        needed: dict[str, int] = {}
        for fill in fills:
            needed[fill.device_id] = needed.get(fill.device_id, 0) + fill.block.size_bytes
        for device_id, nbytes in needed.items():
            try:
                memory = await self._backend.get_device_memory_info(device_id)
                if nbytes > memory.available_bytes and await self._backend.trim(device_id):
                    memory = await self._backend.get_device_memory_info(device_id)
            except Unsupported:
                continue  # the library does not tell; its allocations will
            if nbytes > memory.available_bytes:
                raise OutOfMemory(
                    f"the weights need {nbytes:,} bytes; {memory.available_bytes:,} of {memory.total_bytes:,} "
                    "are available",
                    backend=self._backend.name,
                    device_id=device_id,
                    operation="load_safetensors",
                    requested_bytes=nbytes,
                    free_bytes=memory.available_bytes,
                    total_bytes=memory.total_bytes,
                    hint="free handles, place tensors on more devices, or load fewer with only=",
                )

    async def _allocate(self, fills: Iterable[Fill]) -> None:
        waiting = deque(fills)
        while waiting:
            fill = waiting.popleft()
            try:
                fill.handle = await self._backend.allocate(fill.device_id, fill.block.size_bytes)
            except OutOfRange:
                # Over the library's largest allocation, which only it knows.
                if len(fill.block.placed) == 1 or fill.block.size_bytes == 1:
                    raise
                halves = [Fill(fill.source, fill.device_id, block) for block in halve(fill.block)]
                waiting.extendleft(reversed(halves))
                continue
            self.handles.append(fill.handle)
            self._allocated.append(fill)

    def _loaded(self) -> LoadedWeights:
        tensors = {
            each.tensor.name: LoadedTensor(
                each.tensor.name,
                fill.target,
                each.offset_bytes,
                each.tensor.size_bytes,
                each.tensor.dtype,
                each.tensor.shape,
            )
            for fill in self._allocated
            for each in fill.block.placed
        }
        return LoadedWeights(self._backend, tensors, self.handles, [source.path for source, _ in self._contents])
