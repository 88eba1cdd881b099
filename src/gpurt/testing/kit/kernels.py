"""Kernels: compiled, launched in order, refused before they can do harm. For backends that run any."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import pytest
import pytest_asyncio

from gpurt.backend import GPUBackend
from gpurt.errors import (
    BackendClosed,
    BackendUnavailable,
    CompileFailed,
    DeviceNotFound,
    GPUError,
    InvalidHandle,
    OutOfRange,
    Unsupported,
)
from gpurt.testing.kit.base import ConformanceBase, assert_nothing_live, filled
from gpurt.testing.kit.probe import DriverProbe
from gpurt.types import Capabilities, Kernel, MemoryHandle

if TYPE_CHECKING:
    from gpurt.runtime.backend import DriverBackend

_CUDA: Final = """
extern "C" __global__ void field_add(const unsigned int *a, const unsigned int *b, unsigned int *out,
                                     unsigned int count, unsigned int modulus) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        unsigned long long sum = (unsigned long long)a[i] + b[i];
        out[i] = (unsigned int)(sum >= modulus ? sum - modulus : sum);
    }
}
"""

FIELD_ADD: Final = {
    "c": """
#include <stddef.h>
void field_add(size_t begin, size_t end, const unsigned *a, const unsigned *b, unsigned *out, unsigned count,
               unsigned modulus) {
    for (size_t i = begin; i < end && i < count; i++) {
        unsigned long long sum = (unsigned long long)a[i] + b[i];
        out[i] = (unsigned)(sum >= modulus ? sum - modulus : sum);
    }
}
""",
    "cuda": _CUDA,
    "hip": _CUDA,
    "opencl": """
__kernel void field_add(__global const uint *a, __global const uint *b, __global uint *out, uint count,
                        uint modulus) {
    size_t i = get_global_id(0);
    if (i < count) {
        ulong sum = (ulong)a[i] + b[i];
        out[i] = (uint)(sum >= modulus ? sum - modulus : sum);
    }
}
""",
}
"""Language → ``out = (a + b) mod modulus`` over 32-bit elements: the kernel ``field_add`` of the tests."""

MODULUS: Final = 4_294_967_291  # the largest prime below 2^32: sums do not fit 32 bits

BLOCK: Final = 64


def operands(count: int) -> tuple[Any, Any, Any]:
    """Two arrays of elements, the ends of the field among them, and their sums."""
    draw = np.random.default_rng(count)
    a = draw.integers(0, MODULUS, count, dtype=np.uint32)
    b = draw.integers(0, MODULUS, count, dtype=np.uint32)
    a[:2], b[:2] = MODULUS - 1, (MODULUS - 1, 1)
    total = (a.astype(np.uint64) + b) % MODULUS
    return a, b, total.astype(np.uint32)


def scalars(count: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(count), np.uint32(MODULUS)


class KernelTests(ConformanceBase):
    kernel_sources: ClassVar[dict[str, str]] = FIELD_ADD
    """Add the text of ``field_add`` in a language that the kit does not know."""

    @pytest.fixture
    def source(self, capabilities: Capabilities) -> str:
        for language in sorted(capabilities.kernels):
            if language in self.kernel_sources:
                return self.kernel_sources[language]
        pytest.fail(
            f"the kit has no kernel in {', '.join(sorted(capabilities.kernels))}: see kernel_sources"
            if capabilities.kernels
            else "this library runs no kernels: say so with `runs_kernels = False`"
        )

    @pytest_asyncio.fixture
    async def kernel(self, backend: GPUBackend, device_id: str, source: str) -> Kernel:
        try:
            return await backend.compile(device_id, source, "field_add")
        except Unsupported as exc:
            pytest.skip(str(exc))

    async def test_claim_kernels(self, backend: GPUBackend, device_id: str, capabilities: Capabilities) -> None:
        assert bool(capabilities.kernels) == self.runs_kernels
        if capabilities.kernels:
            with pytest.raises((CompileFailed, Unsupported)):
                await backend.compile(device_id, "this is no program", "missing")
            return
        with pytest.raises(Unsupported):
            await backend.compile(device_id, FIELD_ADD["c"], "field_add")
        assert await backend.execute_kernel("field_add", 1, 64, ()) is False

    @pytest.mark.parametrize("count", [1 << 16, 1000, 65])
    async def test_kernel_writes_what_it_should(
        self, backend: GPUBackend, device_id: str, kernel: Kernel, count: int
    ) -> None:
        a, b, total = operands(count)
        rest = b"untouched"
        async with (
            filled(backend, device_id, a.tobytes()) as first,
            filled(backend, device_id, b.tobytes()) as second,
            filled(backend, device_id, bytes(4 * count) + rest) as out,
        ):
            args = [first, second, out, *scalars(count)]
            await backend.launch(kernel, -(-count // BLOCK), BLOCK, args)
            assert await backend.copy_from_device(out) == total.tobytes() + rest
            await backend.copy_to_device(bytes(4 * count), out)
            assert await backend.execute_kernel("field_add", (-(-count // BLOCK), 1, 1), (BLOCK,), args) is True
            assert await backend.copy_from_device(out) == total.tobytes() + rest
            assert await backend.copy_from_device(first) == a.tobytes()
            assert await backend.execute_kernel("nobody_compiled_it", 1, 1, args) is False
        await assert_nothing_live(backend)

    async def test_launches_keep_the_order(self, backend: GPUBackend, device_id: str, kernel: Kernel) -> None:
        """Copies and launches on the same memory happen as they were submitted, none of them awaited between."""
        count, steps = 512, 20
        one = np.ones(count, np.uint32).tobytes()
        async with filled(backend, device_id, one) as ones, filled(backend, device_id, bytes(4 * count)) as total:
            reads: list[asyncio.Future[bytes]] = []
            work: list[asyncio.Future[Any]] = []
            for _ in range(steps):
                launch = backend.launch(kernel, count // BLOCK, BLOCK, (ones, total, total, *scalars(count)))
                work.append(asyncio.ensure_future(launch))
                reads.append(asyncio.ensure_future(backend.copy_from_device(total)))
            await asyncio.gather(*work, *reads)
            values = [np.frombuffer(read.result(), np.uint32) for read in reads]
            assert [(int(value.min()), int(value.max())) for value in values] == [(n, n) for n in range(1, steps + 1)]

    async def test_same_source_is_compiled_once(
        self, backend: GPUBackend, device_id: str, source: str, kernel: Kernel, hold: DriverProbe
    ) -> None:
        before = hold.counts["compile"]
        assert await backend.compile(device_id, source, "field_add") == kernel
        assert hold.counts["compile"] == before
        other = source + "\n"
        both = await asyncio.gather(*(backend.compile(device_id, other, "field_add") for _ in range(2)))
        assert both[0] == both[1] != kernel
        assert hold.counts["compile"] == before + 1

    async def test_bad_source(self, backend: GPUBackend, device_id: str, source: str, kernel: Kernel) -> None:
        with pytest.raises(CompileFailed) as caught:
            await backend.compile(device_id, source.replace("modulus", "undeclared_name", 1), "field_add")
        assert "modulus" in caught.value.log
        assert caught.value.log in str(caught.value)
        assert caught.value.device_id == device_id
        with pytest.raises(CompileFailed):
            await backend.compile(device_id, source, "no_such_kernel")
        for text, name in ((7, "field_add"), (source, ""), (source, "a b"), (source, None)):
            with pytest.raises(OutOfRange):
                await backend.compile(device_id, text, name)  # pyright: ignore[reportArgumentType]
        with pytest.raises(DeviceNotFound):
            await backend.compile("nowhere:0", source, "field_add")

    async def test_bad_launches_reach_nobody(
        self, backend: GPUBackend, device_id: str, kernel: Kernel, hold: DriverProbe
    ) -> None:
        freed = await backend.allocate(device_id, 256)
        await backend.deallocate(freed)
        device = await backend.get_device(device_id)
        assert device is not None
        most = device.max_threads_per_block
        async with filled(backend, device_id, bytes(256)) as mem:
            good = (mem, mem, mem, *scalars(64))
            foreign = MemoryHandle(mem.handle_id, mem.device_id, mem.size_bytes, mem.generation ^ 1)
            shapes: list[Any] = [0, -1, True, 1.5, "1", None, (), (1, 0), (1, 1, 1, 1), 1 << 40, (1 << 31, 1), [None]]
            calls: list[tuple[type[GPUError], Any, Any, Any, Any]] = [
                *((OutOfRange, kernel, shape, BLOCK, good) for shape in shapes),
                *((OutOfRange, kernel, 1, shape, good) for shape in shapes),
                (OutOfRange, kernel, ((1 << 31) - 1,) * 3, BLOCK, good),
                *([] if most is None else [(OutOfRange, kernel, 1, most + 1, good)]),
                *((OutOfRange, kernel, 1, 64, (*good[:4], wrong)) for wrong in (5, 0.5, True, None, "x", b"x")),
                *((OutOfRange, kernel, 1, 64, (*good[:4], wrong)) for wrong in (np.complex64(1), np.str_("x"))),
                *((OutOfRange, kernel, 1, 64, args) for args in (None, 5, "abc", {1})),
                (InvalidHandle, kernel, 1, 64, (freed, *good[1:])),
                (InvalidHandle, kernel, 1, 64, (foreign, *good[1:])),
                (InvalidHandle, "kernel", 1, 64, good),
                (InvalidHandle, Kernel(999, device_id, "field_add", kernel.generation), 1, 64, good),
                (InvalidHandle, Kernel(kernel.kernel_id, device_id, "field_add", 1), 1, 64, good),
                (InvalidHandle, Kernel(kernel.kernel_id, device_id, "field_mul", kernel.generation), 1, 64, good),
            ]
            others = [each.device_id for each in backend.devices if each.usable and each.device_id != device_id]
            elsewhere = [await backend.allocate(other, 256) for other in others[:1]]
            calls += [(InvalidHandle, kernel, 1, 64, (mem, mem, strange, *scalars(64))) for strange in elsewhere]
            for error, which, grid, block, args in calls:
                with pytest.raises(error):
                    await backend.launch(which, grid, block, args)
            for strange in elsewhere:
                await backend.deallocate(strange)
            assert hold.counts["launch"] == 0
            await backend.launch(kernel, 1, 64, good)
            assert hold.counts["launch"] == 1

    async def test_failed_launch_is_typed_and_passes(
        self, backend: GPUBackend, device_id: str, kernel: Kernel, hold: DriverProbe
    ) -> None:
        async with filled(backend, device_id, bytes(256)) as mem:
            boom = LookupError("no such function")
            hold.fail("launch", boom)
            with pytest.raises(GPUError) as caught:
                await backend.launch(kernel, 1, 64, (mem, mem, mem, *scalars(64)))
            assert caught.value.__cause__ is boom
            assert caught.value.device_id == device_id
            await backend.launch(kernel, 1, 64, (mem, mem, mem, *scalars(64)))
        await assert_nothing_live(backend, hold)

    async def test_cancelled_launch(
        self, backend: GPUBackend, device_id: str, kernel: Kernel, hold: DriverProbe
    ) -> None:
        """In the driver it goes on to its end, and what comes after it waits; queued, it never happens."""
        one = np.ones(64, np.uint32).tobytes()
        async with filled(backend, device_id, one) as ones, filled(backend, device_id, bytes(256)) as total:
            args = (ones, total, total, *scalars(64))
            gate = hold.hold("launch")
            running = asyncio.ensure_future(backend.launch(kernel, 1, 64, args))
            await gate.entered()
            queued = asyncio.ensure_future(backend.launch(kernel, 1, 64, args))
            read = asyncio.ensure_future(backend.copy_from_device(total))
            await asyncio.sleep(0)
            for task in (running, queued):
                task.cancel()
            outcomes = await asyncio.gather(running, queued, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2
            assert not read.done()
            hold.release()
            assert await read == one
            assert hold.counts["launch"] == 1
        await assert_nothing_live(backend, hold)

    async def test_freed_only_after_the_launch(
        self, backend: GPUBackend, device_id: str, kernel: Kernel, hold: DriverProbe
    ) -> None:
        handle = await backend.allocate(device_id, 256)
        gate = hold.hold("launch")
        launch = asyncio.ensure_future(backend.launch(kernel, 1, 64, (handle, handle, handle, *scalars(64))))
        await gate.entered()
        free = asyncio.ensure_future(backend.deallocate(handle))
        await asyncio.sleep(0.02)
        assert not free.done()
        assert hold.counts["free"] == 0
        hold.release()
        await asyncio.gather(launch, free)

    async def test_kernel_dies_with_its_backend(
        self, backend: GPUBackend, shell: DriverBackend, device_id: str, source: str, kernel: Kernel
    ) -> None:
        await backend.shutdown()
        with pytest.raises(BackendClosed):
            await backend.launch(kernel, 1, 1, ())
        try:
            await backend.initialize()
        except BackendUnavailable as exc:
            pytest.fail(f"cannot be opened again: {exc}")
        async with filled(backend, device_id, bytes(256)) as mem:
            args = (mem, mem, mem, *scalars(64))
            assert await backend.execute_kernel("field_add", 1, 64, args) is False
            with pytest.raises(InvalidHandle, match="another backend instance"):
                await backend.launch(kernel, 1, 64, args)
            again = await backend.compile(device_id, source, "field_add")
            await backend.launch(again, 1, 64, args)
