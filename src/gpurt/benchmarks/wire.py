"""Host copies over all sizes: from and to bytes, NumPy arrays and pinned memory, warm and new."""

from __future__ import annotations

import asyncio
import statistics
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpurt.benchmarks import targets
from gpurt.benchmarks.bench import Bench
from gpurt.benchmarks.clocks import Timed, in_turns, rates, seconds
from gpurt.benchmarks.measurement import Measurement, size_name
from gpurt.benchmarks.plan import MIB
from gpurt.benchmarks.raw import DIRECTIONS, Direction, Raw, Threads, opened
from gpurt.benchmarks.torch_raw import torch_copies
from gpurt.errors import Unsupported

if TYPE_CHECKING:
    from gpurt.runtime.host_memory import HostBuffer

_ORDINARY: Final = ("NumPy", "warm NumPy")
_TORCH_FROM: Final = MIB
"""Below this, what PyTorch adds per call is all that one would see."""


async def measure(bench: Bench) -> list[Measurement]:
    rows: list[Measurement] = []
    for nbytes in bench.plan.sizes:
        # An array, bytes or a new array, a host buffer; PyTorch has a tensor of its own on the device.
        lack = await bench.lack(nbytes, host=3, device=2)
        if lack is not None:
            bench.skipped[f"wire, {size_name(nbytes)}"] = lack
            continue
        for direction in DIRECTIONS:
            rows += await _one_way(bench, direction, nbytes)
    rows += await _both_ways(bench)
    return rows


async def _one_way(bench: Bench, direction: Direction, nbytes: int) -> list[Measurement]:
    """Half of the turns with memory of the peer's that is older than gpurt's, half the other way round: where the
    pages come from that an allocation gets, older or younger ones, makes 10 % of a rate."""
    turns = -(-bench.plan.turns(nbytes) // 2)
    first = await _arranged(bench, direction, nbytes, turns, peer_first=True)
    second = await _arranged(bench, direction, nbytes, turns, peer_first=False)
    took = {name: first.took[name] + second.took[name] for name in first.took}
    figures = {name: nbytes / statistics.median(each) / 1e9 for name, each in took.items()}
    raw, fresh = first.raw, first.fresh

    def row(memory: str) -> Measurement:
        new = memory.startswith("new")
        peer = fresh if new else raw.copy_name
        ceiling = raw.ceiling(figures, raw.ceiling_name, raw.copy_name)
        # Said once: the other rows are of the same copies.
        told = [name for name in first.peers if name not in (peer, fresh, ceiling)] if memory in _ORDINARY else []
        return Measurement(
            "wire",
            f"{direction}, {size_name(nbytes)}, {memory}",
            "GB/s",
            figures[memory],
            peer=figures[peer],
            peer_name=peer,
            ceiling=figures[ceiling],
            ceiling_name=ceiling,
            others={name: figures[name] for name in told},
            **targets.host_copy(bench.backend.name, direction, memory, nbytes),
        )

    return [row(memory) for memory in took if memory not in first.peers]


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """What one made of memories has told."""

    raw: Raw
    peers: list[str]
    fresh: str
    """The peer that reads into new memory."""
    took: dict[str, list[float]]
    """Seconds of each copy, of ours and of the peers."""


async def _arranged(bench: Bench, direction: Direction, nbytes: int, turns: int, *, peer_first: bool) -> _Arrangement:
    import numpy as np

    backend, raw = bench.backend, bench.raw(nbytes)
    await backend.trim(bench.device_id)  # or its memory would be that of the arrangement before
    async with AsyncExitStack() as stack:
        host = await asyncio.to_thread(np.ones, nbytes, np.uint8)
        prepare = partial(raw.writer if direction == "to device" else raw.reader, host.data)
        if peer_first:
            threads = await stack.enter_async_context(opened(raw))
            ordinary = await threads(prepare)
            handle = await stack.enter_async_context(backend.allocation(bench.device_id, nbytes))
            await backend.copy_to_device(host.data, handle)
        else:
            handle = await stack.enter_async_context(backend.allocation(bench.device_id, nbytes))
            await backend.copy_to_device(host.data, handle)
            threads = await stack.enter_async_context(opened(raw))
            ordinary = await threads(prepare)
        buffer = await _host_buffer(bench, stack, threads, nbytes)
        ours: dict[str, Timed]
        if direction == "to device":
            ours = {
                "bytes": partial(seconds, partial(backend.copy_to_device, await threads(host.tobytes), handle)),
                "NumPy": partial(seconds, partial(backend.copy_to_device, host.data, handle)),
            }
            if buffer is not None:
                ours[_kind(buffer)] = partial(seconds, partial(backend.copy_to_device, buffer.memory, handle))
        else:
            ours = {
                "warm NumPy": partial(seconds, partial(backend.copy_into, handle, host.data)),
                "new NumPy": partial(seconds, lambda: backend.copy_into(handle, np.empty(nbytes, np.uint8).data)),
                "new bytes": partial(seconds, partial(backend.copy_from_device, handle)),
            }
            if buffer is not None:
                ours[_kind(buffer)] = partial(seconds, partial(backend.copy_into, handle, buffer.memory))
        fresh = f"new np.empty, {raw.copy_name}"
        peers = {
            raw.copy_name: threads.timed(ordinary),
            f"{raw.copy_name} in an executor": partial(seconds, partial(threads, ordinary)),
        }
        if direction == "from device":
            peers[fresh] = threads.timed(partial(_read_new, raw, nbytes))
        if nbytes >= _TORCH_FROM:
            torch = await threads(torch_copies, backend.name, bench.device_id, host)
            if torch is not None:
                stack.push_async_callback(threads, torch.close)
                peers["torch"] = threads.timed(torch.writer() if direction == "to device" else torch.reader())
        peers[raw.ceiling_name] = threads.timed(raw.fastest(direction, host.data))
        await in_turns(1, ours | peers)  # not counted: it pins, calibrates, and touches memory
        return _Arrangement(raw, list(peers), fresh, await in_turns(turns, ours | peers))


async def _both_ways(bench: Bench) -> list[Measurement]:
    import numpy as np

    nbytes = 2 * await bench.fitting(bench.plan.bulk_bytes, host=4, device=2, raw=2)
    half, backend, raw = nbytes // 2, bench.backend, bench.raw(nbytes)
    async with AsyncExitStack() as stack:
        threads = await stack.enter_async_context(opened(raw))
        there = await stack.enter_async_context(backend.allocation(bench.device_id, half))
        back = await stack.enter_async_context(backend.allocation(bench.device_id, half))
        host = await threads(partial(np.ones, nbytes, np.uint8))
        buffer = await _host_buffer(bench, stack, threads, nbytes)
        await backend.copy_to_device(host.data[half:], back)

        async def together(memory: memoryview) -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(backend.copy_to_device(memory[:half], there))
                group.create_task(_read(memory[half:]))

        async def _read(memory: memoryview) -> None:
            await backend.copy_into(back, memory)

        memories = {"NumPy": host.data}
        if buffer is not None:
            memories[_kind(buffer)] = buffer.memory
        ours = {name: partial(seconds, partial(together, memory)) for name, memory in memories.items()}
        ceiling = {raw.ceiling_name: threads.timed(raw.both_ways(host.data))}
        figures = await rates(nbytes, bench.plan.rounds, ours | ceiling)
    return [
        Measurement(
            "wire",
            f"both ways at once, {size_name(half)} each, {memory}",
            "GB/s",
            figures[memory],
            ceiling=figures[raw.ceiling_name],
            ceiling_name=f"{raw.ceiling_name}, both ways",
            **targets.both_ways(backend.name, memory),
        )
        for memory in ours
    ]


async def _host_buffer(bench: Bench, stack: AsyncExitStack, threads: Threads, nbytes: int) -> HostBuffer | None:
    """A host buffer whose pages have been touched, closed by ``stack``; None where the backend has none."""
    try:
        buffer = stack.enter_context(await bench.backend.host_buffer(bench.device_id, nbytes))
    except Unsupported:
        return None
    # Page-locked memory cannot be given back while a view of it is somewhere, such as in the traceback of a failure.
    stack.callback(buffer.memory.release)
    await threads(_touch, buffer)
    return buffer


def _touch(buffer: HostBuffer) -> None:
    buffer.numpy().fill(1)


def _kind(buffer: HostBuffer) -> str:
    return "pinned" if buffer.pinned else "host buffer"


def _read_new(raw: Raw, nbytes: int) -> Any:
    import numpy as np

    raw.reader(np.empty(nbytes, np.uint8).data)()
