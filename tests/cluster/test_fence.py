"""What a node promises to masters is on the disk in the order in which it was promised, and stays small."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from gpurt.cluster.errors import StaleTerm
from gpurt.cluster.fence import REMEMBERED, Fence
from gpurt.cluster.promises import PromiseFile, Promises
from gpurt.cluster.shards import MAX_INSTANCES
from gpurt.placement import PlanVersion

pytestmark = pytest.mark.wide

PROC = Path("/proc/self/fd").is_dir()


def v(n: int, term: int = 1) -> PlanVersion:
    return PlanVersion(term=term, n=n)


class StalledFile(PromiseFile):
    """A disk on which the next write waits."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "test", "n1")
        self.stall, self.writing, self.go = False, threading.Event(), threading.Event()

    def keep(self, promises: Promises) -> None:
        if self.stall:
            self.stall = False
            self.writing.set()
            assert self.go.wait(20)
        super().keep(promises)


class Remembered(PromiseFile):
    """Without the flushing of each write."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "test", "n1")
        self.kept = Promises()

    def promises(self) -> Promises:
        return self.kept

    def keep(self, promises: Promises) -> None:
        self.kept = promises


def file_of(registry: Path, node: str = "n1", cluster: str = "test") -> PromiseFile:
    return PromiseFile(registry, cluster, node)


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


async def started(file: PromiseFile) -> Fence:
    fence = Fence(file)
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
    again = await started(file_of(registry))
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
    assert (await started(file_of(registry))).term == 7


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
    memory, file = Remembered(registry), file_of(registry)
    fence = await started(memory)
    await fence.admit(1)
    for n in range(20 * REMEMBERED):
        await fence.promise(f"instance-{n}", v(1), "x" * 64)
        await fence.promise(f"instance-{n}", v(1), "x" * 64, activated=True, empty=True)
    await asyncio.to_thread(file.keep, memory.kept)
    assert len(await asyncio.to_thread(file.path.read_bytes)) < 400 * REMEMBERED
    assert (await started(file)).promised(f"instance-{20 * REMEMBERED - 1}") is not None


async def test_what_one_node_was_told_is_nothing_to_another_with_the_same_registry(registry: Path) -> None:
    fence = await started(file_of(registry))
    await fence.admit(7)
    await fence.set_draining(True)
    await fence.promise("llama", v(3, 7), "a", activated=True)
    for other in (file_of(registry, "n2"), file_of(registry, cluster="lab")):
        new = await started(other)
        assert (new.term, new.draining, new.promised("llama")) == (0, False, None)
        assert await new.admit(2), "a term of its own"
    again = await started(file_of(registry))
    assert (again.term, again.draining) == (7, True)
    assert again.promised("llama") == fence.promised("llama")
    assert (await started(file_of(registry, "n2"))).term == 2


async def test_what_cannot_be_kept_is_said_and_tried_again(registry: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = file_of(registry)
    await asyncio.to_thread(file.path.mkdir)
    open_before = len(await asyncio.to_thread(os.listdir, "/proc/self/fd")) if PROC else 0
    fence = await started(file)
    assert "is not known any more, also whether it was draining: if it is to, run gpurt drain n1" in caplog.text
    await fence.set_draining(True)
    assert fence.draining, "it does so all the same"
    assert f"{file.path} cannot be written: " in (fence.unkept or "")
    assert f"{file.path}'" in (fence.unkept or ""), "the file, not the number of a descriptor"
    assert f"forgotten at the next start of this node: {file.path} cannot be written" in caplog.text
    if PROC:
        assert len(await asyncio.to_thread(os.listdir, "/proc/self/fd")) == open_before
    await asyncio.to_thread(file.path.rmdir)
    assert not (await started(file)).draining
    await fence.set_draining(True)
    assert fence.unkept is None
    assert (await started(file)).draining, "said again, it is kept"


async def test_a_damaged_file_says_what_is_forgotten(registry: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = file_of(registry)
    assert not (await started(file)).draining
    assert not caplog.text, "nothing was promised yet"
    await asyncio.to_thread(file.path.write_text, '{"schema": 1, "nodes": {"test/n1"', "utf-8")
    assert not (await started(file)).draining
    assert "what node n1 had promised to masters is not known any more" in caplog.text


async def test_two_nodes_that_promise_at_the_same_moment_keep_both(registry: Path) -> None:
    fences = [await started(file_of(registry, f"n{n}")) for n in range(8)]
    for term in (1, 2, 3):
        await asyncio.gather(*(fence.admit(10 * n + term) for n, fence in enumerate(fences)))
    assert [(await started(file_of(registry, f"n{n}"))).term for n in range(8)] == [10 * n + 3 for n in range(8)]
