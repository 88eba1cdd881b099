"""Cancellation: operation by moment by dialect, each case generated.

Moments: ``queued`` (submitted, not in the driver), ``in_driver``, ``result_ready`` (the driver has returned, the task
has not resumed). Dialects: see :data:`gpurt.testing.loops.CANCELLERS`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from gpurt.backend import GPUBackend
from gpurt.errors import InvalidHandle
from gpurt.testing.kit.base import ConformanceBase, assert_nothing_live, keeps_freed
from gpurt.testing.kit.probe import DriverProbe, Gate
from gpurt.testing.loops import CANCELLERS, PATIENCE, Canceller, turns, until
from gpurt.types import MemoryHandle

if TYPE_CHECKING:
    from gpurt.runtime.backend import DriverBackend

SIZE = 4096
OLD, NEW, BLOCKER = b"o" * SIZE, b"n" * SIZE, b"b" * SIZE


@dataclass
class Scene:
    """What an operation works on: two allocations, and memory of the caller's."""

    backend: GPUBackend
    device_id: str
    src: MemoryHandle
    dst: MemoryHandle
    source: bytearray = field(default_factory=lambda: bytearray(NEW))
    target: bytearray = field(default_factory=lambda: bytearray(SIZE))


@dataclass(frozen=True)
class Operation:
    """One row of the table."""

    run: Callable[[Scene], Awaitable[Any]]
    driver_method: str
    blocked_by: str = "write"
    """The driver call that keeps it queued: a write on the same allocation, or one of its own kind."""
    dropped: bool = True
    """Cancelled while queued, it never reaches the driver."""
    waits: bool = False
    """Cancelled in the driver, it does not return before the driver does."""


OPERATIONS = {
    "allocate": Operation(lambda s: s.backend.allocate(s.device_id, SIZE), "alloc", blocked_by="alloc"),
    "deallocate": Operation(lambda s: s.backend.deallocate(s.src), "free", dropped=False),
    "copy_to_device": Operation(lambda s: s.backend.copy_to_device(s.source, s.src), "write"),
    "copy_from_device": Operation(lambda s: s.backend.copy_from_device(s.src), "read"),
    "copy_into": Operation(lambda s: s.backend.copy_into(s.src, s.target), "read", waits=True),
    "copy_device_to_device": Operation(lambda s: s.backend.copy_device_to_device(s.src, s.dst, SIZE), "copy"),
    "synchronize": Operation(lambda s: s.backend.synchronize(s.device_id), "sync"),
    "telemetry": Operation(lambda s: s.backend.get_device_temperature(s.device_id), "telemetry", "telemetry"),
}
operations = pytest.mark.parametrize("operation", list(OPERATIONS))
dialects = pytest.mark.parametrize("dialect", list(CANCELLERS))


def is_exported(buffer: bytearray) -> bool:
    """Somebody holds a memoryview of it."""
    try:
        buffer.append(0)
    except BufferError:
        return True
    buffer.pop()
    return False


async def result_ready(gate: Gate) -> None:
    """Release the gate and return with the result delivered or queued for delivery, but not yet resumed with.

    Blocks the loop on purpose: a task cannot resume while its loop stands still.
    """
    gate.release()
    gate.returned.wait(PATIENCE)
    # The lane needs some microseconds from the driver's return to its post to the loop.
    time.sleep(0.01)  # noqa: ASYNC251


class CancellationTests(ConformanceBase):
    @pytest_asyncio.fixture
    async def scene(self, backend: GPUBackend, device_id: str, hold: DriverProbe) -> Scene:
        src, dst = await backend.allocate(device_id, SIZE), await backend.allocate(device_id, SIZE)
        await backend.copy_to_device(OLD, src)
        await backend.copy_to_device(OLD, dst)
        return Scene(backend, device_id, src, dst)

    async def _settle(self, scene: Scene, hold: DriverProbe, canceller: Canceller, operation: str) -> None:
        """Give back what the scene still owns; nothing may be left."""
        hold.release()
        await canceller.end()
        backend = scene.backend
        if operation == "allocate" and canceller.completed:
            await backend.deallocate(canceller.value)
        if operation == "deallocate":
            with pytest.raises(InvalidHandle):
                await backend.deallocate(scene.src)
        else:
            await backend.deallocate(scene.src)
        await backend.deallocate(scene.dst)
        await assert_nothing_live(backend, hold)
        async with backend.allocation(scene.device_id, 16) as handle:
            await backend.copy_to_device(b"works afterwards", handle)
            assert await backend.copy_from_device(handle) == b"works afterwards"
        assert not is_exported(scene.source)
        assert not is_exported(scene.target)

    async def _freed_without_the_driver(self, scene: Scene, hold: DriverProbe, canceller: Canceller) -> None:
        """Kept for the next allocation: ``deallocate`` ends on its first step, so that cancelling it comes too late."""
        gate = hold.hold("free", calls=None)
        canceller.start(lambda: OPERATIONS["deallocate"].run(scene))
        await turns(1)
        canceller.cancel()
        await canceller.end()
        assert hold.counts["free"] == 0
        gate.release()
        await self._settle(scene, hold, canceller, "deallocate")

    @dialects
    @operations
    async def test_cancelled_while_queued(
        self, backend: GPUBackend, scene: Scene, hold: DriverProbe, operation: str, dialect: str
    ) -> None:
        row, canceller = OPERATIONS[operation], CANCELLERS[dialect]()
        # Every call of the blocking kind is held, so that none of several lanes can take the operation.
        gate = hold.hold(row.blocked_by, calls=None)
        if row.blocked_by == "write":
            blocker: asyncio.Task[Any] = asyncio.create_task(backend.copy_to_device(BLOCKER, scene.src))
        else:
            blocker = asyncio.ensure_future(row.run(scene))
        await gate.entered()
        before = hold.counts[row.driver_method]
        canceller.start(lambda: row.run(scene))
        await turns(5)
        canceller.cancel()
        # Nothing has been released: a cancelled call does not wait for the driver.
        assert await canceller.ended_within(PATIENCE)
        assert canceller.cancelled
        hold.release()
        made = await blocker
        if row.blocked_by == "alloc":
            await backend.deallocate(made)
        await backend.synchronize(scene.device_id)
        if row.dropped and row.driver_method != "sync":
            assert hold.counts[row.driver_method] == before
        if operation != "deallocate":
            expected = BLOCKER if row.blocked_by == "write" else OLD
            assert await backend.copy_from_device(scene.src) == expected
        assert await backend.copy_from_device(scene.dst) == OLD
        assert scene.target == bytes(SIZE)
        await self._settle(scene, hold, canceller, operation)

    @dialects
    @operations
    async def test_cancelled_in_the_driver(self, scene: Scene, hold: DriverProbe, operation: str, dialect: str) -> None:
        row, canceller = OPERATIONS[operation], CANCELLERS[dialect]()
        if operation == "deallocate" and keeps_freed(scene.backend, scene.device_id):
            await self._freed_without_the_driver(scene, hold, canceller)
            return
        gate = hold.hold(row.driver_method)
        canceller.start(lambda: row.run(scene))
        await gate.entered()
        canceller.cancel()
        if row.waits:
            assert not await canceller.ended_within(0.03)
            assert is_exported(scene.target)
        else:
            assert await canceller.ended_within(PATIENCE)
        if operation == "copy_to_device":
            # The driver still reads it: it must stay where it is.
            assert is_exported(scene.source)
        gate.release()
        assert await canceller.ended_within(PATIENCE)
        assert canceller.cancelled
        if row.waits:
            # As of its return the driver is done with the caller's memory.
            assert not is_exported(scene.target)
        if operation == "copy_to_device":
            await until(lambda: not is_exported(scene.source), "the source is still exported")
        await self._settle(scene, hold, canceller, operation)

    @dialects
    @operations
    async def test_cancelled_when_the_result_is_there(
        self, scene: Scene, hold: DriverProbe, operation: str, dialect: str
    ) -> None:
        row, canceller = OPERATIONS[operation], CANCELLERS[dialect]()
        if operation == "deallocate" and keeps_freed(scene.backend, scene.device_id):
            await self._freed_without_the_driver(scene, hold, canceller)
            return
        gate = hold.hold(row.driver_method)
        canceller.start(lambda: row.run(scene))
        await gate.entered()
        await result_ready(gate)
        canceller.cancel()
        # A task group and an anyio scope may come too late here; then the operation simply succeeds.
        await canceller.end()
        if dialect == "task_cancel":
            assert canceller.cancelled
        await self._settle(scene, hold, canceller, operation)

    @dialects
    async def test_cancelled_twice(self, scene: Scene, hold: DriverProbe, dialect: str) -> None:
        """``copy_into`` keeps waiting for the driver however often it is cancelled."""
        canceller = CANCELLERS[dialect]()
        gate = hold.hold("read")
        canceller.start(lambda: scene.backend.copy_into(scene.src, scene.target))
        await gate.entered()
        canceller.cancel()
        for _ in range(3):
            assert not await canceller.ended_within(0.01)
            assert canceller.task is not None
            canceller.task.cancel()
        assert not await canceller.ended_within(0.01)
        assert is_exported(scene.target)
        gate.release()
        assert await canceller.ended_within(PATIENCE)
        assert canceller.cancelled
        await self._settle(scene, hold, canceller, "copy_into")

    @pytest.mark.parametrize("operation", ["copy_to_device", "copy_from_device", "copy_into"])
    async def test_failure_after_the_cancellation(
        self, backend: GPUBackend, scene: Scene, hold: DriverProbe, operation: str
    ) -> None:
        """A failing call whose caller has gone reaches nobody, breaks nothing, and copy_into still waits."""
        row, canceller = OPERATIONS[operation], CANCELLERS["task_cancel"]()
        gate = hold.hold(row.driver_method)
        hold.fail(row.driver_method, OSError("after the cancellation"))
        canceller.start(lambda: row.run(scene))
        await gate.entered()
        canceller.cancel()
        assert await canceller.ended_within(0.03) != row.waits
        gate.release()
        assert await canceller.ended_within(PATIENCE)
        assert canceller.cancelled
        await self._settle(scene, hold, canceller, operation)

    async def test_cancelled_allocation_that_fails_releases_its_reservation(
        self, backend: GPUBackend, scene: Scene, hold: DriverProbe
    ) -> None:
        canceller = CANCELLERS["task_cancel"]()
        gate = hold.hold("alloc")
        hold.fail("alloc", *(MemoryError("no") for _ in range(8)))
        canceller.start(lambda: backend.allocate(scene.device_id, SIZE))
        await gate.entered()
        canceller.cancel()
        assert await canceller.ended_within(PATIENCE)
        gate.release()
        await backend.synchronize(scene.device_id)
        ledger = getattr(backend, "ledger", None)
        assert ledger is not None
        await until(lambda: ledger.usage(scene.device_id).reserved_bytes == 0, "the reservation was not released")
        hold.forgive()
        await self._settle(scene, hold, canceller, "copy_from_device")

    async def test_dropped_reservation_is_released(
        self, backend: GPUBackend, shell: DriverBackend, scene: Scene, hold: DriverProbe
    ) -> None:
        gate = hold.hold("alloc", calls=None)
        blocker = asyncio.create_task(backend.allocate(scene.device_id, SIZE))
        await gate.entered()
        queued = [asyncio.create_task(backend.allocate(scene.device_id, SIZE)) for _ in range(5)]
        await turns(3)
        for task in queued:
            task.cancel()
        await asyncio.wait(queued)
        assert shell.ledger.usage(scene.device_id).reserved_bytes == SIZE
        gate.release()
        hold.release()
        await backend.deallocate(await blocker)
        assert shell.ledger.usage(scene.device_id).reserved_bytes == 0

    async def test_cancelled_copy_stops_at_the_next_chunk(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, hold: DriverProbe
    ) -> None:
        chunks = 32
        capabilities = shell.driver.capabilities
        # Chunks as large as some libraries take would make a slow test of a quick one.
        chunk_bytes = min(capabilities.chunk_bytes, 2 << 20)
        shell.driver.capabilities = capabilities.model_copy(update={"chunk_bytes": chunk_bytes})
        size = chunks * chunk_bytes
        async with backend.allocation(device_id, size) as handle:
            for method, run in (
                ("write", lambda: backend.copy_to_device(bytes(size), handle)),
                ("read", lambda: backend.copy_from_device(handle)),
                ("read", lambda: backend.copy_into(handle, bytearray(size))),
            ):
                before = hold.counts[method]
                canceller = CANCELLERS["task_cancel"]()
                gate = hold.hold(method, calls=None)
                canceller.start(run)
                await gate.entered()
                canceller.cancel()
                await turns(3)
                hold.release()
                await canceller.end()
                assert canceller.cancelled
                await backend.synchronize(device_id)
                # Every staging thread may finish the chunk that it holds; the rest is not begun.
                assert hold.counts[method] - before < chunks // 2

    @dialects
    async def test_cancelled_initialize_is_undone(self, backend: GPUBackend, hold: DriverProbe, dialect: str) -> None:
        await backend.shutdown()
        for moment in ("in_driver", "result_ready"):
            canceller = CANCELLERS[dialect]()
            closed = hold.counts["close"]
            gate = hold.hold("open")
            canceller.start(backend.initialize)
            await gate.entered()
            if moment == "result_ready":
                await result_ready(gate)
            canceller.cancel()
            assert await canceller.ended_within(PATIENCE)
            gate.release()
            if canceller.completed:
                await backend.shutdown()
            await until(lambda closed=closed: hold.counts["close"] > closed, "the driver was not closed again")
            assert backend.devices == ()
        await backend.initialize()
        assert backend.devices

    async def test_queued_work_behind_a_dropped_call_keeps_its_order(
        self, backend: GPUBackend, scene: Scene, hold: DriverProbe
    ) -> None:
        gate = hold.hold("write")
        first = asyncio.create_task(backend.copy_to_device(BLOCKER, scene.src))
        await gate.entered()
        dropped = asyncio.create_task(backend.copy_to_device(NEW, scene.src))
        read = asyncio.create_task(backend.copy_from_device(scene.src))
        await turns(3)
        dropped.cancel()
        await asyncio.wait({dropped})
        await turns(3)
        # The read was submitted after the first write: the dropped one between them must not let it overtake.
        assert hold.counts["read"] == 0
        gate.release()
        assert await read == BLOCKER
        await first
        await backend.deallocate(scene.src)
        await backend.deallocate(scene.dst)
        await assert_nothing_live(backend, hold)
