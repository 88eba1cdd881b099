"""What a node promises to masters is on the disk in the order in which it was promised, and stays small."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from gpurt.cluster.errors import StaleTerm
from gpurt.cluster.fence import REMEMBERED, Fence
from gpurt.cluster.promises import PromiseFile, Promises
from gpurt.cluster.shards import MAX_INSTANCES
from gpurt.placement import PlanVersion

pytestmark = pytest.mark.wide


def v(n: int, term: int = 1) -> PlanVersion:
    return PlanVersion(term=term, n=n)


class StalledFile(PromiseFile):
    """A disk on which the next write waits."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.stall, self.writing, self.go = False, threading.Event(), threading.Event()

    def keep(self, cluster: str, promises: Promises) -> None:
        if self.stall:
            self.stall = False
            self.writing.set()
            assert self.go.wait(20)
        super().keep(cluster, promises)


class Remembered(PromiseFile):
    """Without the flushing of each write."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.kept = Promises()

    def promises(self, cluster: str) -> Promises:
        return self.kept

    def keep(self, cluster: str, promises: Promises) -> None:
        self.kept = promises


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


async def started(file: PromiseFile) -> Fence:
    fence = Fence(file, "test")
    await fence.load()
    return fence


async def test_a_write_whose_caller_has_gone_does_not_land_over_a_later_promise(registry: Path) -> None:
    file = StalledFile(registry)
    fence = await started(file)
    await fence.admit(1)
    file.stall = True
    first = asyncio.create_task(fence.promise("llama", v(1), "a"))
    await asyncio.to_thread(file.writing.wait, 20)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    later = asyncio.create_task(fence.promise("llama", v(2), "b", activated=True))
    done, _ = await asyncio.wait({later}, timeout=0.3)
    assert not done, "the first write has not ended"
    file.go.set()
    await later
    again = await started(PromiseFile(registry))
    assert again.promised("llama") == fence.promised("llama")
    held = again.promised("llama")
    assert held is not None
    assert held.activated is not None
    assert held.offered.version == held.activated.version == v(2)


async def test_a_term_whose_caller_has_gone_is_admitted_all_the_same(registry: Path) -> None:
    file = StalledFile(registry)
    fence = await started(file)
    file.stall = True
    first = asyncio.create_task(fence.admit(5))
    await asyncio.to_thread(file.writing.wait, 20)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert fence.term == 5
    stale, later = asyncio.create_task(fence.admit(4)), asyncio.create_task(fence.admit(7))
    file.go.set()
    with pytest.raises(StaleTerm):
        await stale
    assert await later
    assert (await started(PromiseFile(registry))).term == 7


async def test_instances_of_which_nothing_is_held_are_forgotten_first(registry: Path) -> None:
    fence = await started(Remembered(registry))
    await fence.admit(1)
    for n in range(MAX_INSTANCES - 1):
        await fence.promise(f"held-{n}", v(1), "x" * 64, activated=True)
    for n in range(3 * REMEMBERED):
        await fence.promise(f"gone-{n}", v(1), "x" * 64, activated=True)
        await fence.promise(f"gone-{n}", v(2), "x" * 64, activated=True, empty=True)
    kept = [n for n in range(3 * REMEMBERED) if fence.promised(f"gone-{n}") is not None]
    assert kept == list(range(2 * REMEMBERED, 3 * REMEMBERED))
    assert all(fence.promised(f"held-{n}") is not None for n in range(MAX_INSTANCES - 1))


async def test_the_file_stays_small_whatever_comes_and_goes(registry: Path) -> None:
    memory, file = Remembered(registry), PromiseFile(registry)
    fence = await started(memory)
    await fence.admit(1)
    for n in range(20 * REMEMBERED):
        await fence.promise(f"instance-{n}", v(1), "x" * 64)
        await fence.promise(f"instance-{n}", v(1), "x" * 64, activated=True, empty=True)
    await asyncio.to_thread(file.keep, "test", memory.kept)
    assert len(await asyncio.to_thread(file.path.read_bytes)) < 400 * REMEMBERED
    assert (await started(file)).promised(f"instance-{20 * REMEMBERED - 1}") is not None
