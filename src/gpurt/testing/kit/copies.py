"""Copies: host to device, device to host, device to device; views."""

from __future__ import annotations

import array
import asyncio
import mmap
from typing import Any

import numpy as np
import pytest

from gpurt.backend import GPUBackend
from gpurt.errors import HandleInUse, OutOfRange, Unsupported
from gpurt.testing.kit.base import ConformanceBase, filled, payload
from gpurt.testing.kit.probe import DriverProbe
from gpurt.types import Capabilities

MIB = 1 << 20
SIZES = [1, 2, 3, 255, 4096, 65_535, 65_537, MIB, MIB + 1, 8 * MIB]


def _buffers(content: bytes) -> dict[str, Any]:
    """``content`` (a multiple of 8 bytes) in every kind of buffer that people pass."""
    mapped = mmap.mmap(-1, len(content))
    mapped[:] = content
    return {
        "bytes": content,
        "bytearray": bytearray(content),
        "memoryview": memoryview(content),
        "memoryview_slice": memoryview(b"??" + content + b"??")[2:-2],
        "array_int": array.array("q", content),
        "numpy_float64": np.frombuffer(content, dtype=np.float64),
        "numpy_2d": np.frombuffer(content, dtype=np.uint8).reshape(2, -1),
        "numpy_read_only": np.frombuffer(content, dtype=np.uint16),
        "mmap": mapped,
    }


class CopyTests(ConformanceBase):
    @pytest.mark.parametrize("size", SIZES)
    async def test_round_trip(self, backend: GPUBackend, device_id: str, size: int) -> None:
        content = payload(size)
        async with filled(backend, device_id, content) as handle:
            # Not ==, whose failure report would print megabytes.
            same = await backend.copy_from_device(handle) == content
            assert same

    async def test_large_round_trip(self, backend: GPUBackend, device_id: str) -> None:
        content: Any = np.random.default_rng(7).integers(0, 256, min(self.large_bytes, 64 * MIB), dtype=np.uint8)
        target: Any = np.zeros_like(content)
        async with backend.allocation(device_id, content.nbytes) as handle:
            await backend.copy_to_device(content, handle)
            assert await backend.copy_into(handle, target) == content.nbytes
            assert np.array_equal(target, content)

    @pytest.mark.parametrize("offset", [0, 1, 3, 4096, 4097, 9900])
    async def test_write_leaves_the_neighbours_alone(
        self, backend: GPUBackend, device_id: str, capabilities: Capabilities, offset: int
    ) -> None:
        content = bytearray(payload(10_000))
        async with filled(backend, device_id, content) as handle:
            if (offset | 100) % capabilities.alignment_bytes:
                with pytest.raises(OutOfRange):
                    await backend.copy_to_device(b"N" * 100, handle, offset)
            else:
                await backend.copy_to_device(b"N" * 100, handle, offset)
                content[offset : offset + 100] = b"N" * 100
            assert await backend.copy_from_device(handle) == content

    @pytest.mark.parametrize(("offset", "size"), [(0, 1), (1, 1), (9_999, 1), (17, 1_001), (0, None), (5_000, None)])
    async def test_partial_read(
        self, backend: GPUBackend, device_id: str, capabilities: Capabilities, offset: int, size: int | None
    ) -> None:
        content = payload(10_000)
        end = 10_000 if size is None else offset + size
        async with filled(backend, device_id, content) as handle:
            if (offset | (end - offset)) % capabilities.alignment_bytes:
                with pytest.raises(OutOfRange):
                    await backend.copy_from_device(handle, offset, size)
                return
            assert await backend.copy_from_device(handle, offset, size) == content[offset:end]
            target = bytearray(end - offset)
            assert await backend.copy_into(handle, target, offset) == end - offset
            assert target == content[offset:end]

    @pytest.mark.parametrize("kind", list(_buffers(bytes(16))))
    async def test_any_contiguous_source(self, backend: GPUBackend, device_id: str, kind: str) -> None:
        content = payload(4096)
        source = _buffers(content)[kind]
        async with backend.allocation(device_id, 4096) as handle:
            await backend.copy_to_device(source, handle)
            assert await backend.copy_from_device(handle) == content

    @pytest.mark.parametrize("kind", ["bytearray", "array_int", "numpy_float64", "numpy_2d", "mmap"])
    async def test_any_writable_destination(self, backend: GPUBackend, device_id: str, kind: str) -> None:
        content = payload(4096)
        target = _buffers(bytes(4096))[kind]
        if kind.startswith("numpy"):
            target = target.copy()
        async with filled(backend, device_id, content) as handle:
            assert await backend.copy_into(handle, target) == 4096
            assert bytes(memoryview(target).cast("B")) == content

    async def test_source_and_destination_are_let_go(self, backend: GPUBackend, device_id: str) -> None:
        source, target = bytearray(4096), bytearray(4096)
        async with backend.allocation(device_id, 4096) as handle:
            await backend.copy_to_device(source, handle)
            await backend.copy_into(handle, target)
            # A buffer that is still exported cannot be resized.
            source.append(1)
            target.append(1)

    @pytest.mark.parametrize(
        "source",
        ["text", 5, None, [1, 2], np.arange(64, dtype=np.uint8)[::2], memoryview(bytes(64))[::2]],
        ids=["text", "int", "none", "list", "strided_array", "strided_view"],
    )
    async def test_source_that_cannot_be_copied(self, backend: GPUBackend, device_id: str, source: Any) -> None:
        async with filled(backend, device_id, b"k" * 64) as handle:
            with pytest.raises(OutOfRange):
                await backend.copy_to_device(source, handle)
            assert await backend.copy_from_device(handle) == b"k" * 64

    @pytest.mark.parametrize(
        "target",
        [bytes(16), memoryview(bytes(16)), np.zeros((8, 8), dtype=np.uint8)[:, ::2], "text", None],
        ids=["bytes", "read_only_view", "strided", "text", "none"],
    )
    async def test_destination_that_cannot_be_filled(self, backend: GPUBackend, device_id: str, target: Any) -> None:
        async with backend.allocation(device_id, 64) as handle:
            with pytest.raises(OutOfRange):
                await backend.copy_into(handle, target)

    async def test_empty_copies(self, backend: GPUBackend, device_id: str) -> None:
        content = payload(64)
        async with filled(backend, device_id, content) as handle:
            for offset in (0, 32, 64):
                await backend.copy_to_device(b"", handle, offset)
                assert await backend.copy_from_device(handle, offset, 0) == b""
                assert await backend.copy_into(handle, bytearray(), offset) == 0
            no_rows: Any = np.zeros((0, 4))
            await backend.copy_to_device(no_rows, handle)
            assert await backend.copy_from_device(handle, 64) == b""
            for outside in (-1, 65):
                with pytest.raises(OutOfRange):
                    await backend.copy_to_device(b"", handle, outside)
                with pytest.raises(OutOfRange):
                    await backend.copy_from_device(handle, outside, 0)
            assert await backend.copy_from_device(handle) == content

    @pytest.mark.parametrize(
        ("offset", "size"),
        [(-1, 1), (64, 1), (63, 2), (0, 65), (1 << 70, 1), (0, 1 << 70), (1.5, 1), ("0", 1), (None, 1), (0, -1)],
    )
    async def test_range_outside_the_allocation(
        self, backend: GPUBackend, device_id: str, offset: Any, size: Any
    ) -> None:
        content = payload(64)
        async with filled(backend, device_id, content) as handle:
            with pytest.raises(OutOfRange):
                await backend.copy_from_device(handle, offset, size)
            if 0 <= size <= 65:
                with pytest.raises(OutOfRange):
                    await backend.copy_to_device(b"!" * size, handle, offset)
                target = bytearray(size)
                with pytest.raises(OutOfRange):
                    await backend.copy_into(handle, target, offset)
                assert target == bytearray(size)
            assert await backend.copy_from_device(handle) == content

    async def test_range_errors_reach_no_driver(self, backend: GPUBackend, device_id: str, hold: DriverProbe) -> None:
        async with backend.allocation(device_id, 64) as handle:
            calls = dict(hold.counts)
            with pytest.raises(OutOfRange):
                await backend.copy_to_device(bytes(65), handle)
            with pytest.raises(OutOfRange):
                await backend.copy_from_device(handle, 1, 64)
            with pytest.raises(OutOfRange):
                await backend.copy_device_to_device(handle, handle, 64, dst_offset_bytes=1)
            assert dict(hold.counts) == calls


class DeviceToDeviceTests(ConformanceBase):
    @pytest.mark.parametrize("size", [1, 4097, MIB + 1])
    async def test_same_device(self, backend: GPUBackend, device_id: str, size: int) -> None:
        content = payload(size)
        async with filled(backend, device_id, content) as src, backend.allocation(device_id, size) as dst:
            await backend.copy_device_to_device(src, dst, size)
            assert (await backend.copy_from_device(dst) == content) is True
            assert (await backend.copy_from_device(src) == content) is True

    @pytest.mark.parametrize("size", [1, 4097, 4 * MIB + 1])
    async def test_two_devices(self, backend: GPUBackend, device_id: str, second_device_id: str, size: int) -> None:
        content = payload(size)
        async with filled(backend, device_id, content) as src, backend.allocation(second_device_id, size) as dst:
            await backend.copy_device_to_device(src, dst, size)
            assert (await backend.copy_from_device(dst) == content) is True
            await backend.copy_to_device(content[::-1], dst)
            await backend.copy_device_to_device(dst, src, size)
            assert (await backend.copy_from_device(src) == content[::-1]) is True

    async def test_offsets_leave_the_neighbours_alone(self, backend: GPUBackend, device_id: str) -> None:
        content, expected = payload(4096, 1), bytearray(payload(4096, 2))
        async with filled(backend, device_id, content) as src, filled(backend, device_id, expected) as dst:
            await backend.copy_device_to_device(src, dst, 1024, src_offset_bytes=256, dst_offset_bytes=2048)
            expected[2048:3072] = content[256:1280]
            assert await backend.copy_from_device(dst) == expected
            assert await backend.copy_from_device(src) == content

    async def test_within_one_allocation(self, backend: GPUBackend, device_id: str) -> None:
        content = bytearray(payload(4096))
        async with filled(backend, device_id, content) as handle:
            await backend.copy_device_to_device(handle, handle, 1024, src_offset_bytes=0, dst_offset_bytes=1024)
            content[1024:2048] = content[:1024]
            assert await backend.copy_from_device(handle) == content

    @pytest.mark.parametrize(("src_offset", "dst_offset"), [(0, 0), (0, 1023), (1023, 0), (5, 5)])
    async def test_overlap_is_refused(
        self, backend: GPUBackend, device_id: str, src_offset: int, dst_offset: int
    ) -> None:
        content = payload(4096)
        async with filled(backend, device_id, content) as handle:
            with pytest.raises(OutOfRange):
                await backend.copy_device_to_device(
                    handle, handle, 1024, src_offset_bytes=src_offset, dst_offset_bytes=dst_offset
                )
            assert await backend.copy_from_device(handle) == content

    async def test_empty(self, backend: GPUBackend, device_id: str) -> None:
        async with filled(backend, device_id, b"a" * 64) as src, filled(backend, device_id, b"b" * 64) as dst:
            await backend.copy_device_to_device(src, dst, 0)
            assert await backend.copy_from_device(dst) == b"b" * 64

    @pytest.mark.parametrize(
        ("size", "src_offset", "dst_offset"),
        [(-1, 0, 0), (65, 0, 0), (64, 1, 0), (64, 0, 1), (1, -1, 0), (1, 0, -1), (True, 0, 0), ("1", 0, 0)],
    )
    async def test_range_outside(
        self, backend: GPUBackend, device_id: str, size: Any, src_offset: int, dst_offset: int
    ) -> None:
        async with filled(backend, device_id, b"a" * 64) as src, filled(backend, device_id, b"b" * 64) as dst:
            with pytest.raises(OutOfRange):
                await backend.copy_device_to_device(
                    src, dst, size, src_offset_bytes=src_offset, dst_offset_bytes=dst_offset
                )
            assert await backend.copy_from_device(dst) == b"b" * 64


async def refuses_views(backend: GPUBackend, device_id: str, capabilities: Capabilities) -> bool:
    """Whether nobody can look into this memory; then the refusal is checked, and that it keeps nothing."""
    if capabilities.host_visible or capabilities.cuda_pointers:
        return False
    async with backend.allocation(device_id, 64) as handle:
        with pytest.raises(Unsupported):
            await backend.view(handle)
    return True


class ViewTests(ConformanceBase):
    async def test_view_shares_memory(self, backend: GPUBackend, device_id: str, capabilities: Capabilities) -> None:
        async with backend.allocation(device_id, 64) as handle:
            numbers: Any = np.arange(16, dtype=np.float32)
            await backend.copy_to_device(numbers, handle)
            if await refuses_views(backend, device_id, capabilities):
                return
            if not capabilities.host_visible:
                with await backend.view(handle, (4, 4), "float32") as view:
                    assert view.__cuda_array_interface__["shape"] == (4, 4)
                    with pytest.raises(Unsupported):
                        view.numpy()
                return
            with await backend.view(handle, (4, 4), "float32") as view:
                array = view.numpy()
                assert array.shape == (4, 4)
                assert array[3, 3] == 15
                array[0, 0] = 99
                del array
            assert np.frombuffer(await backend.copy_from_device(handle), np.float32)[0] == 99

    async def test_view_keeps_its_handle(self, backend: GPUBackend, device_id: str, capabilities: Capabilities) -> None:
        if await refuses_views(backend, device_id, capabilities):
            return
        handle = await backend.allocate(device_id, 64)
        first, second = await backend.view(handle), await backend.view(handle)
        for view in (first, second):
            with pytest.raises(HandleInUse):
                await backend.deallocate(handle)
            view.close()
            view.close()
        await backend.deallocate(handle)

    async def test_view_that_does_not_fit(
        self, backend: GPUBackend, device_id: str, capabilities: Capabilities
    ) -> None:
        if await refuses_views(backend, device_id, capabilities):
            return
        bad: list[tuple[tuple[int, ...], str]] = [((65,), "uint8"), ((17,), "float32"), ((-1,), "uint8"), ((4,), "no")]
        async with backend.allocation(device_id, 64) as handle:
            for shape, dtype in bad:
                with pytest.raises(OutOfRange):
                    await backend.view(handle, shape, dtype)

    async def test_view_sees_what_was_submitted_before(
        self, backend: GPUBackend, device_id: str, capabilities: Capabilities
    ) -> None:
        if await refuses_views(backend, device_id, capabilities):
            return
        async with backend.allocation(device_id, MIB) as handle:
            write = asyncio.create_task(backend.copy_to_device(b"v" * MIB, handle))
            await asyncio.sleep(0)
            with await backend.view(handle) as view:
                if capabilities.host_visible:
                    assert view.memoryview()[-1] == ord("v")
                else:
                    assert await backend.copy_from_device(handle, MIB - 1, 1) == b"v"
            await write
