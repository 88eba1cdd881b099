"""A model of a backend, a dict of byte arrays, and a Hypothesis machine that compares a real backend with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from gpurt.backend import GPUBackend
from gpurt.errors import OutOfRange
from gpurt.testing.kit.base import assert_nothing_live, usage
from gpurt.testing.loops import turns
from gpurt.types import MemoryHandle

T = TypeVar("T")
LARGEST = 5000

sizes = st.integers(1, LARGEST)
offsets = st.integers(0, LARGEST)


class BackendMachine(RuleBasedStateMachine):
    """Random programs over one backend. Subclasses set ``make_backend``; each run has a loop of its own."""

    @staticmethod
    def make_backend() -> GPUBackend:
        raise NotImplementedError

    handles: Bundle[MemoryHandle] = Bundle("handles")
    runner: asyncio.Runner
    backend: GPUBackend
    devices: list[str]
    model: dict[MemoryHandle, bytearray]
    unspecified: set[MemoryHandle]
    """Handles whose content a cancelled write left open; a whole new write settles it."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.model = {}
        self.unspecified = set()
        self.backend = self.make_backend()
        self.wait(self.backend.initialize())
        self.devices = [device.device_id for device in self.backend.devices if device.usable]

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def teardown(self) -> None:
        async def end() -> None:
            for handle in self.model:
                await self.backend.deallocate(handle)
            await assert_nothing_live(self.backend)
            await self.backend.shutdown()

        self.wait(end())
        self.runner.close()

    @rule(target=handles, size=sizes, which=st.integers(0, 7), fill=st.integers(0, 255))
    def allocate(self, size: int, which: int, fill: int) -> MemoryHandle:
        async def step() -> MemoryHandle:
            handle = await self.backend.allocate(self.devices[which % len(self.devices)], size)
            await self.backend.copy_to_device(bytes([fill]) * size, handle)
            return handle

        handle = self.wait(step())
        self.model[handle] = bytearray([fill]) * size
        return handle

    @rule(handle=consumes(handles), cancelled=st.booleans())
    def deallocate(self, handle: MemoryHandle, cancelled: bool) -> None:
        self.wait(self._perhaps_cancelled(self.backend.deallocate(handle), cancelled))
        self.unspecified.discard(handle)
        del self.model[handle]

    @rule(handle=handles, content=st.binary(max_size=300), offset=offsets, cancelled=st.booleans())
    def write(self, handle: MemoryHandle, content: bytes, offset: int, cancelled: bool) -> None:
        fits = offset + len(content) <= handle.size_bytes
        if not fits:
            self._refused(self.backend.copy_to_device(content, handle, offset))
            return
        completed = self.wait(self._perhaps_cancelled(self.backend.copy_to_device(content, handle, offset), cancelled))
        self.model[handle][offset : offset + len(content)] = content
        if not completed:
            self.unspecified.add(handle)

    @rule(handle=handles, fill=st.integers(0, 255))
    def overwrite(self, handle: MemoryHandle, fill: int) -> None:
        content = bytes([fill]) * handle.size_bytes
        self.wait(self.backend.copy_to_device(content, handle))
        self.model[handle][:] = content
        self.unspecified.discard(handle)

    @rule(handle=handles, offset=offsets, size=offsets, into=st.booleans())
    def read(self, handle: MemoryHandle, offset: int, size: int, into: bool) -> None:
        if offset + size > handle.size_bytes:
            self._refused(self.backend.copy_from_device(handle, offset, size))
            return
        if into:
            target = bytearray(size)
            self.wait(self.backend.copy_into(handle, target, offset))
            content = bytes(target)
        else:
            content = self.wait(self.backend.copy_from_device(handle, offset, size))
        if handle not in self.unspecified:
            assert content == self.model[handle][offset : offset + size]

    @rule(src=handles, dst=handles, size=offsets, src_offset=offsets, dst_offset=offsets)
    def copy(self, src: MemoryHandle, dst: MemoryHandle, size: int, src_offset: int, dst_offset: int) -> None:
        call = self.backend.copy_device_to_device(
            src, dst, size, src_offset_bytes=src_offset, dst_offset_bytes=dst_offset
        )
        outside = src_offset + size > src.size_bytes or dst_offset + size > dst.size_bytes
        overlap = src == dst and abs(src_offset - dst_offset) < size
        if outside or overlap:
            self._refused(call)
            return
        self.wait(call)
        self.model[dst][dst_offset : dst_offset + size] = self.model[src][src_offset : src_offset + size]
        if size and src in self.unspecified:
            self.unspecified.add(dst)

    @rule(size=sizes)
    def allocate_and_cancel(self, size: int) -> None:
        async def step() -> None:
            task = asyncio.create_task(self.backend.allocate(self.devices[0], size))
            await turns(size % 7)
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                await self.backend.deallocate(task.result())

        self.wait(step())

    @rule(which=st.integers(0, 7))
    def synchronize(self, which: int) -> None:
        self.wait(self.backend.synchronize(self.devices[which % len(self.devices)]))

    @invariant()
    def ledger_counts_what_the_model_holds(self) -> None:
        async def check() -> None:
            for device_id in self.devices:
                # A cancelled deallocation is still on its way.
                await self.backend.synchronize(device_id)
                held = [handle for handle in self.model if handle.device_id == device_id]
                entry = usage(self.backend, device_id)
                if entry is not None:
                    assert entry.current_count == len(held)
                    assert entry.current_bytes == sum(handle.size_bytes for handle in held)

        self.wait(check())

    def _refused(self, call: Coroutine[Any, Any, Any]) -> None:
        try:
            self.wait(call)
        except OutOfRange:
            return
        raise AssertionError("a range outside the allocation was accepted")

    async def _perhaps_cancelled(self, call: Coroutine[Any, Any, Any], cancelled: bool) -> bool:
        """Run the call, or submit and cancel it; True when it ended normally."""
        task: asyncio.Task[Any] = asyncio.ensure_future(call)
        if cancelled:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait({task})
        if task.cancelled():
            return False
        task.result()
        return True


def run_machine(make_backend: Callable[[], GPUBackend], *, examples: int = 12, steps: int = 25) -> None:
    """Compare new backends with the model over ``examples`` random programs of ``steps`` steps. Blocks."""
    machine = type("Machine", (BackendMachine,), {"make_backend": staticmethod(make_backend)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
        ),
    )
