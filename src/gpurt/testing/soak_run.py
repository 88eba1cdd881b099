"""A whole soak: many steps at once, twice everything freed, and what must be left then."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from gpurt.errors import GPUError
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.soak_steps import LARGEST, Steps, Wrong
from gpurt.types import DeviceKind

IN_FLIGHT: Final = 64
MAX_HANDLES: Final = 4096
RSS_GROWTH_BYTES: Final = 32 << 20
FREE_TOLERANCE_BYTES: Final = 32 << 20
"""A real driver may keep a little for itself."""
STALL_S: Final = 60.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


@dataclass(slots=True)
class SoakResult:
    """What came of one soak. Bytes, seconds."""

    backend: str
    devices: list[str]
    seed: int
    limit_bytes: int | None
    steps: int = 0
    seconds: float = 0.0
    """Of the steps alone, without opening and clean-up."""
    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    peak_bytes: dict[str, int] = field(default_factory=dict[str, int])
    rss_growth_bytes: int | None = None
    """Since the end of the warm-up, with everything freed both times."""
    free_bytes: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """By device: free before and after, where telemetry tells."""
    problem: str | None = None
    """The first thing that was wrong, with seed and step."""

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0

    def document(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self), "steps_per_second": self.steps_per_second, "ok": self.problem is None}

    def line(self) -> str:
        outcomes = ", ".join(f"{count:,} {name}" for name, count in sorted(self.outcomes.items()))
        growth = "not measured" if self.rss_growth_bytes is None else f"{self.rss_growth_bytes / 2**20:+.1f} MiB"
        text = (
            f"{self.backend} {' '.join(self.devices)}: {self.steps:,} steps in {self.seconds:.1f} s, "
            f"{self.steps_per_second:,.0f} steps/s ({outcomes}); process memory {growth}; seed {self.seed}"
        )
        return f"{text}: nothing wrong, nothing left" if self.problem is None else f"{text}\nWRONG: {self.problem}"


class Soak:
    """Random steps over an open backend that nobody else uses.

    Args:
        seed: decides what is done; when it is done depends on threads too, so a run is repeated but for its timing.
        in_flight: operations at once.
        largest: bytes of the largest allocation.
        expected: which errors are not the backend's fault, because a test injects them.
        stall_s: seconds without the end of any step after which the soak gives up.
    """

    def __init__(
        self,
        backend: DriverBackend,
        *,
        seed: int = 0,
        in_flight: int = IN_FLIGHT,
        max_handles: int = MAX_HANDLES,
        largest: int = LARGEST,
        expected: Callable[[GPUError], bool] = lambda error: False,
        stall_s: float = STALL_S,
    ) -> None:
        self._backend = backend
        self._in_flight = in_flight
        self._stall_s = stall_s
        self._devices = [device.device_id for device in backend.devices if device.usable]
        limits = [backend.ledger.usage(device_id).limit_bytes for device_id in self._devices]
        self._result = SoakResult(backend.name, self._devices, seed, limits[0])
        self._steps = Steps(
            backend,
            seed=seed,
            keep_buffers=in_flight,
            max_handles=max_handles,
            largest=min(largest, LARGEST, *(max(1, limit // 4) for limit in limits if limit is not None)),
            expected=expected,
        )
        self._left = 0
        self._held = _count_allocations(backend)

    async def run(self, steps: int) -> SoakResult:
        """``steps`` steps, the first tenth of them, at most 50,000, as a warm-up. Never raises for what it finds: see
        ``problem``. Once for each instance.

        Under glibc it makes ``malloc`` of this process give large freed blocks back at once. By default each thread
        keeps up to 16 MiB of them, which cannot be told from a leak.
        """
        result = self._result
        warm_up = min(50_000, -(-steps // 10))
        _let_malloc_give_back()
        try:
            await self._phase(warm_up)
            rss, free = resident_bytes(), await self._free_bytes()
            await self._phase(steps - warm_up)
            result.rss_growth_bytes = resident_bytes() - rss
            result.free_bytes = {name: (free[name], after) for name, after in (await self._free_bytes()).items()}
            self._judge()
        except Exception as exc:
            what = str(exc) if isinstance(exc, Wrong) else "".join(traceback.format_exception(exc))
            result.problem = f"after {result.steps:,} steps with seed {result.seed}: {what}"
            await self._abandon()
        outcomes = self._steps.outcomes
        # A task that is cancelled before its first turn does nothing at all.
        outcomes["never begun"] = result.steps - outcomes.total()
        result.outcomes = dict(outcomes)
        result.peak_bytes = {name: self._backend.ledger.usage(name).peak_bytes for name in self._devices}
        return result

    async def _phase(self, steps: int) -> None:
        """Steps, and then nothing is left of them."""
        self._left = steps
        began = time.perf_counter()
        try:
            await self._watch({asyncio.create_task(self._work(), name="gpurt:soak") for _ in range(self._in_flight)})
        finally:
            self._result.seconds += time.perf_counter() - began
        slots = self._steps.slots
        while slots:
            await asyncio.gather(*(self._steps.check_and_free(slots.pop()) for _ in slots[: self._in_flight]))
        self._steps.check_let_go()
        await self._check_nothing_left()

    async def _work(self) -> None:
        while self._left > 0:
            self._left -= 1
            await self._steps.one()
            self._result.steps += 1

    async def _watch(self, workers: set[asyncio.Task[None]]) -> None:
        """Wait for the workers. The first that fails ends them all."""
        try:
            running, ended = workers, -1
            while running:
                done, running = await asyncio.wait(running, timeout=self._stall_s, return_when=asyncio.FIRST_EXCEPTION)
                for worker in done:
                    worker.result()
                if running and ended == self._result.steps:
                    raise Wrong(f"no step has ended for {self._stall_s:g} s; {len(running)} are under way")
                ended = self._result.steps
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers, timeout=self._stall_s)

    async def _check_nothing_left(self) -> None:
        backend = self._backend
        for device_id in self._devices:
            await backend.synchronize(device_id)
        # What cancelled calls left behind is undone on lanes, each after its call.
        deadline = time.monotonic() + self._stall_s
        while left := self._what_is_left():
            if time.monotonic() > deadline:
                raise Wrong(f"after everything was freed: {left}")
            await asyncio.sleep(0.002)
            await backend.trim()

    def _what_is_left(self) -> str | None:
        for device_id in self._devices:
            usage = self._backend.ledger.usage(device_id)
            if usage.current_count or usage.current_bytes or usage.reserved_bytes:
                return f"the ledger says {usage}"
            if usage.limit_bytes is not None and usage.peak_bytes > usage.limit_bytes:
                return f"the limit was exceeded: {usage}"
        held = self._held()
        if held or self._backend.live_handles:
            return f"{held} allocations in the driver, {self._backend.live_handles} live handles"
        return None

    def _judge(self) -> None:
        result = self._result
        growth = result.rss_growth_bytes
        if growth is not None and growth > RSS_GROWTH_BYTES:
            raise Wrong(f"the process grew by {growth:,} bytes since the warm-up")
        for device in self._backend.devices:
            # A processor's free memory is everybody's.
            if device.device_id in result.free_bytes and device.kind is not DeviceKind.CPU:
                before, after = result.free_bytes[device.device_id]
                if before - after > (0 if device.simulated else FREE_TOLERANCE_BYTES):
                    raise Wrong(f"{device.device_id} has {after:,} bytes free, and had {before:,} before")
        self._steps.check_sources()

    async def _abandon(self) -> None:
        """One thing that was wrong is told; what follows from it is not."""
        frees = [asyncio.create_task(self._backend.deallocate(slot.handle)) for slot in self._steps.slots]
        if frees:
            ended, _ = await asyncio.wait(frees, timeout=self._stall_s)
            for task in ended:
                task.exception()

    async def _free_bytes(self) -> dict[str, int]:
        readings = {device_id: await self._backend.get_telemetry(device_id) for device_id in self._devices}
        return {
            device_id: reading.memory_free_bytes
            for device_id, reading in readings.items()
            if reading.memory_free_bytes is not None
        }


def _count_allocations(backend: DriverBackend) -> Callable[[], int]:
    """From now on, count what the driver has given out and not got back."""
    driver, lock, held = backend.driver, threading.Lock(), 0
    alloc, free = driver.alloc, driver.free

    def counted_alloc(index: int, nbytes: int) -> Any:
        nonlocal held
        memory = alloc(index, nbytes)
        with lock:
            held += 1
        return memory

    def counted_free(index: int, mem: Any) -> None:
        nonlocal held
        free(index, mem)
        with lock:
            held -= 1

    driver.alloc, driver.free = counted_alloc, counted_free
    return lambda: held


def _let_malloc_give_back() -> None:
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        mallopt(_M_TRIM_THRESHOLD, 1 << 17)


def resident_bytes() -> int:
    """What this process holds, without what ``malloc`` would give back."""
    import psutil

    gc.collect()
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)
    return psutil.Process().memory_info().rss


def _glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
