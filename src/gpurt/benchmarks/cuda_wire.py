"""Host copies of the CUDA backend over all sizes, beside ``cudaMemcpy`` and the pinned ceiling of the same run.

``python -m gpurt.benchmarks.cuda_wire [--quick]`` prints one JSON object. Needs a GPU with 5 GiB free, and as much
host memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from gpurt.backends.cuda_backend import CUDABackend
from gpurt.backends.cupy_driver import CHUNK_BYTES, CuPyDriver
from gpurt.benchmarks.cuda_raw import DEVICE_TO_HOST, HOST_TO_DEVICE, RawWire
from gpurt.benchmarks.measurement import Measurement, Skipped, seconds
from gpurt.errors import BackendUnavailable
from gpurt.memory.hostbytes import read_bytes

SIZES: Final = (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)
LARGEST: Final = SIZES[-1]
SMALL_BYTES: Final = 4096
KINDS: Final = {"to device": HOST_TO_DEVICE, "from device": DEVICE_TO_HOST}

Timed = Callable[[], Awaitable[float]]
"""Does one operation, returns its seconds."""


async def measure(*, quick: bool) -> list[Measurement]:
    backend = CUDABackend()
    try:
        await backend.initialize()
    except BackendUnavailable as exc:
        raise Skipped(str(exc)) from exc
    async with backend:
        with ThreadPoolExecutor(1) as executor, ThreadPoolExecutor(1) as second:
            bench = _Bench(backend, executor, second, rounds=3 if quick else 9)
            await bench.open()
            try:
                rows: list[Measurement] = []
                for nbytes in SIZES:
                    for way in KINDS:
                        rows += await bench.one_way(way, nbytes)
                rows += await bench.fresh(LARGEST // 4)
                rows += await bench.both_ways()
                rows += await bench.file((1 << 30) if quick else (4 << 30))
                rows += await bench.beside_bulk(1.0 if quick else 4.0)
                return rows
            finally:
                await bench.close()


class _Bench:
    def __init__(self, backend: CUDABackend, executor: Executor, second: Executor, rounds: int) -> None:
        self.backend = backend
        self.driver: Any = backend.driver
        assert isinstance(self.driver, CuPyDriver)
        self.device = backend.devices[0].device_id
        self.executor = executor
        self.second = second
        self.rounds = rounds

    async def open(self) -> None:
        self.raw = await self._inside(RawWire, LARGEST)
        self.handle = await self.backend.allocate(self.device, LARGEST)
        self.other = await self.backend.allocate(self.device, LARGEST)
        self.token = await self._inside(self.driver.alloc, 0, LARGEST)
        self.pinned = [await self._inside(self.driver.host_alloc, LARGEST) for _ in range(2)]
        self.views = [self.driver.host_memory(memory) for memory in self.pinned]
        await self.backend.copy_to_device(self.raw.pageable.data, self.handle)  # pins, calibrates

    async def close(self) -> None:
        self.views.clear()
        for memory in self.pinned:
            await self._inside(self.driver.host_free, memory)
        await self._inside(self.driver.free, 0, self.token)
        await self._inside(self.driver.detach, 0)
        await self._inside(self.raw.__exit__, None, None, None)

    async def one_way(self, way: str, nbytes: int) -> list[Measurement]:
        kind, backend, handle, driver = KINDS[way], self.backend, self.handle, self.driver
        host, pinned = self.raw.pageable.data[:nbytes], self.views[0][:nbytes]
        if way == "to device":
            ours = partial(backend.copy_to_device, host, handle)
            straight = partial(backend.copy_to_device, pinned, handle)
            inner, inner_pinned = (partial(driver.write, 0, self.token, 0, view) for view in (host, pinned))
        else:
            ours = partial(backend.copy_into, handle, host)
            straight = partial(backend.copy_into, handle, pinned)
            inner, inner_pinned = (partial(driver.read, 0, self.token, 0, view) for view in (host, pinned))
        name = f"{way}, {_size(nbytes)}"
        figures = await self._rates(
            nbytes,
            partial(seconds, ours),
            self._timed(inner),
            self._timed(self.raw.memcpy, kind, nbytes),
            self._timed(self.raw.memcpy_and_wait, kind, nbytes),
            partial(seconds, straight),
            self._timed(inner_pinned),
            self._timed(self.raw.straight, kind, nbytes),
        )
        rate, inner_rate, memcpy, complete, pinned_rate, inner_pinned_rate, ceiling = figures
        row = partial(_row, peer=memcpy, peer_name="cudaMemcpy", ceiling=ceiling, ceiling_name="pinned, raw")
        return [
            row(f"{name}, pageable", rate),
            row(f"{name}, pageable, driver alone", inner_rate),
            _row(f"{name}, pageable, driver alone", inner_rate, peer=complete, peer_name="cudaMemcpy, synchronised"),
            row(f"{name}, pinned", pinned_rate),
            row(f"{name}, pinned, driver alone", inner_pinned_rate),
        ]

    async def fresh(self, nbytes: int) -> list[Measurement]:
        """Into memory that did not exist before: page faults and all."""
        import numpy as np

        def memcpy() -> None:
            target = np.empty(nbytes, np.uint8)
            self.raw.read_into(target.data)

        def raw_bytes() -> None:
            read_bytes(nbytes, self.raw.read_into)

        ours, ours_bytes, peer, peer_bytes = await self._rates(
            nbytes,
            lambda: seconds(lambda: self.backend.copy_into(self.handle, np.empty(nbytes, np.uint8).data)),
            lambda: seconds(lambda: self.backend.copy_from_device(self.handle, 0, nbytes)),
            self._timed(memcpy),
            self._timed(raw_bytes),
        )
        return [
            _row(f"from device, {_size(nbytes)}, new np.empty", ours, peer=peer, peer_name="cudaMemcpy"),
            _row(f"from device, {_size(nbytes)}, new bytes", ours_bytes, peer=peer_bytes, peer_name="cudaMemcpy"),
        ]

    async def both_ways(self) -> list[Measurement]:
        import numpy as np

        backend, nbytes = self.backend, LARGEST
        hosts = [self.raw.pageable.data, np.ones(nbytes, np.uint8).data]

        async def together(views: list[Any]) -> None:
            await asyncio.gather(backend.copy_to_device(views[0], self.handle), backend.copy_into(self.other, views[1]))

        async def raw_together() -> None:
            loop = asyncio.get_running_loop()
            await asyncio.gather(
                *(
                    loop.run_in_executor(executor, self.raw.straight_on_own_stream, kind)
                    for executor, kind in zip((self.executor, self.second), KINDS.values(), strict=True)
                )
            )

        pageable, pinned, ceiling = await self._rates(
            2 * nbytes,
            partial(seconds, partial(together, hosts)),
            partial(seconds, partial(together, self.views)),
            partial(seconds, raw_together),
        )
        row = partial(_row, ceiling=ceiling, ceiling_name="pinned, raw")
        name = f"both directions at once, {_size(nbytes)} each"
        return [row(f"{name}, pageable", pageable), row(f"{name}, pinned", pinned)]

    async def file(self, nbytes: int) -> list[Measurement]:
        """A file in the page cache, loaded in the shell's chunks."""
        with tempfile.TemporaryFile() as file:
            for _ in range(nbytes // LARGEST):
                await self._inside(file.write, self.raw.pageable.data)
            await self._inside(file.flush)
            fd, step = file.fileno(), min(LARGEST, CHUNK_BYTES)

            def load() -> None:
                for start in range(0, nbytes, step):
                    self.driver.load(0, self.token, start % LARGEST, fd, start, step)

            def ordinary() -> None:
                target = memoryview(self.raw.pageable)[:step]
                for start in range(0, nbytes, step):
                    os.preadv(fd, [target], start)
                    self.raw.memcpy(HOST_TO_DEVICE, step)

            await self._inside(load)
            ours, peer, ceiling = await self._rates(
                nbytes, self._timed(load), self._timed(ordinary), self._timed(self.raw.straight_many, nbytes)
            )
        return [
            _row(
                f"file in page cache, {_size(nbytes)}",
                ours,
                peer=peer,
                peer_name="preadv, cudaMemcpy",
                ceiling=ceiling,
                ceiling_name="pinned, raw",
            )
        ]

    async def beside_bulk(self, duration: float) -> list[Measurement]:
        """4 KiB copies and a 1 ms ticker, first alone, then beside 1 GiB loads without pause; the bulk's loss."""
        source = bytes(SMALL_BYTES)
        handle = await self.backend.allocate(self.device, SMALL_BYTES)

        async def during(*tasks: Callable[[asyncio.Event], Awaitable[Any]]) -> list[Any]:
            stop = asyncio.Event()
            running = [asyncio.ensure_future(task(stop)) for task in tasks]
            await asyncio.sleep(duration)
            stop.set()
            return await asyncio.gather(*running)

        async def small(stop: asyncio.Event) -> list[float]:
            took: list[float] = []
            while not stop.is_set():
                took.append(await seconds(lambda: self.backend.copy_to_device(source, handle)))
                await asyncio.sleep(0.001)
            return took

        async def ticker(stop: asyncio.Event) -> list[float]:
            gaps: list[float] = []
            while not stop.is_set():
                gaps.append(await seconds(lambda: asyncio.sleep(0.001)) - 0.001)
            return gaps

        async def bulk(stop: asyncio.Event) -> float:
            done, started = 0, time.perf_counter()
            while not stop.is_set():
                await self.backend.copy_to_device(self.raw.pageable.data, self.handle)
                done += LARGEST
            return done / (time.perf_counter() - started) / 1e9

        small_alone, gaps_alone = await during(small, ticker)
        (bulk_alone,) = await during(bulk)
        small_beside, gaps_beside, bulk_beside = await during(small, ticker, bulk)
        (bulk_after,) = await during(bulk)
        rows = [
            Measurement(
                "wire",
                f"{what}, {name}",
                "ms",
                pick(beside) * 1e3,
                peer=pick(alone) * 1e3,
                peer_name="without the load",
            )
            for what, beside, alone in (
                ("4 KiB copy beside 1 GiB loads", small_beside, small_alone),
                ("loop gap beside 1 GiB loads", gaps_beside, gaps_alone),
            )
            for name, pick in (("p50", statistics.median), ("p99", _p99), ("max", max))
        ]
        alone = (bulk_alone + bulk_after) / 2
        return [*rows, _row("1 GiB loads beside 4 KiB copies", bulk_beside, peer=alone, peer_name="without them")]

    # Clocks

    async def _inside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)

    def _timed(self, function: Callable[..., Any], *arguments: Any) -> Timed:
        """Seconds of a blocking call alone, without the way to its thread and back."""

        def timed() -> float:
            started = time.perf_counter()
            function(*arguments)
            return time.perf_counter() - started

        return lambda: self._inside(timed)

    async def _rates(self, nbytes: int, *contenders: Timed) -> list[float]:
        """The median rate of each in GB/s, taking turns; many turns where one is short.

        The order changes: who comes after another one's copy finds the bytes in a nearer cache.
        """
        turns = max(self.rounds, min(200, (64 << 20) // nbytes))
        took: list[list[float]] = [[] for _ in contenders]
        order, dice = list(range(len(contenders))), random.Random(1)
        for _ in range(turns):
            dice.shuffle(order)
            for number in order:
                took[number].append(await contenders[number]())
        return [nbytes / statistics.median(results) / 1e9 for results in took]


def _row(name: str, ours: float, **other: Any) -> Measurement:
    return Measurement("wire", name, "GB/s", ours, **other)


def _p99(figures: list[float]) -> float:
    return statistics.quantiles(figures, n=100)[98]


def _size(nbytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes >> 10} KiB"


if __name__ == "__main__":
    found = asyncio.run(measure(quick="--quick" in sys.argv[1:]))
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps([row.as_json() for row in found], indent=1, ensure_ascii=False) + "\n")
