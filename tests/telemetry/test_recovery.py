"""Memory that comes back late, or not at all."""

from __future__ import annotations

import asyncio

import pytest

from gpurt.telemetry import LeakDetector, wait_for_memory
from tests.telemetry.rig import GIB, Clock

MIB = 1 << 20


class Driver:
    """Free memory over time. Its clock goes on while somebody sleeps, the deadline's own sleep excepted."""

    def __init__(self, *samples: float | None) -> None:
        self.samples = list(samples)
        self.clock = Clock()

    async def free(self) -> int | None:
        sample = self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]
        return None if sample is None else int(sample * GIB)

    async def sleep(self, seconds: float) -> None:
        if seconds == 5.0:
            await asyncio.Event().wait()
        self.clock.now += seconds


async def test_nvf_10_memory_that_comes_back_late() -> None:
    """NVF-10 and M-32."""
    driver = Driver(2.9, 2.9, 15.4)
    found = await wait_for_memory(driver.free, 15 * GIB, interval_s=0.75, clock=driver.clock, sleep=driver.sleep)
    assert (found.recovered, found.free_bytes, found.waited_s) == (True, int(15.4 * GIB), 1.5)


async def test_nvf_10_waiting_is_bounded_and_says_so() -> None:
    driver = Driver(None, 2.9)
    found = await wait_for_memory(driver.free, 15 * GIB, clock=driver.clock, sleep=driver.sleep)
    assert (found.recovered, found.free_bytes, found.waited_s) == (False, int(2.9 * GIB), 5.0)


async def test_nvf_10_a_reading_that_hangs_is_bounded_too() -> None:
    async def hangs() -> int | None:
        await asyncio.Event().wait()
        return None

    found = await wait_for_memory(hangs, GIB, deadline_s=0.02)
    assert (found.recovered, found.free_bytes) == (False, None)


async def test_an_error_is_the_callers() -> None:
    async def fails() -> int | None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await wait_for_memory(fails, GIB)


def test_m27_each_load_and_unload_leaks() -> None:
    detector = LeakDetector(threshold_bytes=64 * MIB, cycles=3)
    found = [detector.after_unload(GIB + cycle * 300 * MIB) for cycle in range(7)]
    assert [index for index, leak in enumerate(found) if leak] == [3, 6]
    assert found[3] is not None
    assert (found[3].grown_bytes, found[3].cycles) == (900 * MIB, 3)


def test_m27_caches_that_settle_are_no_leak() -> None:
    detector = LeakDetector(threshold_bytes=64 * MIB, cycles=3)
    used = [1000, 1300, 1500, None, 1510, 1500, 1564, 1600, 1601]
    assert [detector.after_unload(None if each is None else each * MIB) for each in used] == [None] * len(used)
    with pytest.raises(ValueError, match="at least 1"):
        LeakDetector(cycles=0)
