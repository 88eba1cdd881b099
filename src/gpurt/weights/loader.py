"""load_safetensors: check the files, check the room, allocate, stream, check again."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from gpurt.backend import GPUBackend
from gpurt.errors import DeviceNotFound, GPUError, OutOfMemory, OutOfRange, Unsupported
from gpurt.lane import Lane
from gpurt.memory.undo import free_all
from gpurt.types import MemoryHandle
from gpurt.weights.errors import shown
from gpurt.weights.header import TensorInfo
from gpurt.weights.loaded import LoadedTensor, LoadedWeights
from gpurt.weights.plan import Block, Gather, Run, halve, plan_blocks, plan_transfers
from gpurt.weights.selection import Only, Placement, place, select
from gpurt.weights.sources import Source, Sources

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
        WeightsError: a file is missing, malformed, inconsistent, or changed during the load.
        DeviceNotFound: the placement names a device that the backend has not.
        OutOfMemory: the weights do not fit a device.
        GPUError: whatever else the backend raises.
    """
    if max_concurrent is not None and max_concurrent < 1:
        raise OutOfRange(f"max_concurrent must be positive or None, not {max_concurrent!r}")
    path = Path(path_or_index)
    # A lane of its own: reading a slow disk holds up neither the event loop nor other loads.
    lane = Lane(f"gpurt:weights:{path.name}")
    load = _Load(backend, Sources(path), lane, on_progress)
    try:
        try:
            names = await load.off_loop(load.sources.names)
            names = await load.apply(partial(select, names, only, str(path)), on_loop=callable(only))
            devices = await load.apply(partial(place, names, placement, str(path)), on_loop=callable(placement))
            contents = await load.off_loop(partial(load.sources.tensors, names))
            await load.check_devices(devices)
            fills = await load.off_loop(partial(_plan, contents, devices))
            await load.check_room(fills)
            await load.allocate(fills)
            await load.fill(max_concurrent or PER_DEVICE * len(set(devices.values())))
            await load.off_loop(load.sources.check_unchanged)
            tensors = await load.off_loop(load.tensors)
        finally:
            closing = lane.submit(load.sources.close)
            lane.stop()
            # Shielded: a cancelled future would be dropped before it ran, and the files left open.
            await asyncio.shield(asyncio.wrap_future(closing))
    except BaseException as failure:
        # Who cancels must not wait for a driver that hangs.
        _, error = await free_all(backend, load.handles, detach=isinstance(failure, asyncio.CancelledError))
        if isinstance(error, GPUError):
            log.error("an allocation of weights was not freed: %s", error)
        elif error is not None:
            raise error from failure  # cancelled meanwhile: who cancels must see it
        raise
    return LoadedWeights(backend, tensors, load.handles, [source.path for source, _ in contents])


@dataclass(slots=True)
class _Fill:
    """A block on its way: where from, where to."""

    source: Source
    device_id: str
    block: Block
    handle: MemoryHandle | None = None

    @property
    def target(self) -> MemoryHandle:
        assert self.handle is not None, "filled before it was allocated"
        return self.handle


class _Load:
    """One load, in its steps."""

    def __init__(
        self, backend: GPUBackend, sources: Sources, lane: Lane, on_progress: Callable[[int, int], None] | None
    ) -> None:
        self.sources = sources
        self.handles: list[MemoryHandle] = []
        self._backend = backend
        self._lane = lane
        self._on_progress = on_progress
        self._allocated: list[_Fill] = []
        self._done_bytes = 0
        self._total_bytes = 0

    async def off_loop(self, call: Callable[[], T]) -> T:
        """Passes over all tensors go through here like files: one over 100,000 would stall the loop for 50 ms."""
        return await asyncio.get_running_loop().run_in_executor(self._lane, call)

    async def apply(self, call: Callable[[], T], *, on_loop: bool) -> T:
        """The user's functions run where the user is; only gpurt's own passes leave the loop."""
        return call() if on_loop else await self.off_loop(call)

    async def check_devices(self, devices: dict[str, str]) -> None:
        for device_id in dict.fromkeys(devices.values()):
            if await self._backend.get_device(device_id) is None:
                name = next(name for name, asked in devices.items() if asked == device_id)
                known = ", ".join(device.device_id for device in self._backend.devices)
                raise DeviceNotFound(
                    f"no such device, asked for by the placement of tensor {shown(name)}",
                    backend=self._backend.name,
                    device_id=device_id,
                    operation="load_safetensors",
                    hint=f"devices: {known}",
                )

    async def check_room(self, fills: Iterable[_Fill]) -> None:
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

    async def allocate(self, fills: Iterable[_Fill]) -> None:
        waiting = deque(fills)
        while waiting:
            fill = waiting.popleft()
            try:
                fill.handle = await self._backend.allocate(fill.device_id, fill.block.size_bytes)
            except OutOfRange:
                # Over the library's largest allocation, which only it knows.
                if len(fill.block.placed) == 1 or fill.block.size_bytes == 1:
                    raise
                halves = [_Fill(fill.source, fill.device_id, block) for block in halve(fill.block)]
                waiting.extendleft(reversed(halves))
                continue
            self.handles.append(fill.handle)
            self._allocated.append(fill)

    async def fill(self, max_concurrent: int) -> None:
        self._total_bytes = await self.off_loop(self._count_bytes)
        self._advance(0)
        waiting = iter(_in_turns(self._allocated))
        error: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(max_concurrent, len(self._allocated))):
                    group.create_task(self._fill_blocks(waiting), name=self._lane.name)
        except BaseExceptionGroup as failures:
            # The first is the cause; what follows it in other tasks is the same trouble seen again.
            error = failures.exceptions[0]
            for other in failures.exceptions[1:]:
                log.warning("also, while weights were loaded: %s", other)
        if error is not None:
            raise error

    async def _fill_blocks(self, waiting: Iterator[_Fill]) -> None:
        for fill in waiting:
            for transfer in await self.off_loop(partial(plan_transfers, fill.block)):
                if isinstance(transfer, Gather):
                    await self._gather(fill, transfer)
                else:
                    await self._stream(fill, transfer)

    async def _gather(self, fill: _Fill, gather: Gather) -> None:
        packed = await self.off_loop(partial(fill.source.gather, gather))
        await self._backend.copy_to_device(packed, fill.target, gather.block_offset)
        self._advance(sum(run.size_bytes for run in gather.runs))

    async def _stream(self, fill: _Fill, run: Run) -> None:
        reported = 0

        def report(done: int) -> None:
            nonlocal reported
            if done > reported:
                self._advance(done - reported)
                reported = done

        try:
            await self._backend.load_file(
                fill.source.path,
                fill.target,
                file_offset=run.file_offset,
                size_bytes=run.size_bytes,
                handle_offset=run.block_offset,
                on_progress=report,
            )
        except GPUError:
            # A range that was inside the file and is not any more: say so, rather than what came of it.
            await self.off_loop(fill.source.check_unchanged)
            raise
        else:
            report(run.size_bytes)
        finally:
            reported = run.size_bytes  # reports that are still on their way come too late

    def _advance(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._on_progress is not None:
            self._on_progress(self._done_bytes, self._total_bytes)

    def _count_bytes(self) -> int:
        return sum(each.tensor.size_bytes for fill in self._allocated for each in fill.block.placed)

    def tensors(self) -> dict[str, LoadedTensor]:
        return {
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


def _plan(contents: list[tuple[Source, list[TensorInfo]]], devices: dict[str, str]) -> list[_Fill]:
    fills: list[_Fill] = []
    for source, tensors in contents:
        by_device: dict[str, list[TensorInfo]] = {}
        for tensor in tensors:
            by_device.setdefault(devices[tensor.name], []).append(tensor)
        for device_id, its_own in by_device.items():
            fills += [_Fill(source, device_id, block) for block in plan_blocks(its_own)]
    return fills


def _in_turns(fills: Iterable[_Fill]) -> list[_Fill]:
    """One block of each device after the other, so that every device's link is busy from the start."""
    turn: dict[str, int] = {}
    numbered: list[tuple[int, _Fill]] = []
    for fill in fills:
        turn[fill.device_id] = turn.get(fill.device_id, -1) + 1
        numbered.append((turn[fill.device_id], fill))
    return [fill for _, fill in sorted(numbered, key=lambda item: item[0])]
