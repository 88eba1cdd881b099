"""Loading: the right bytes on the right device, in few large transfers."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import tracemalloc
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from gpurt.backend import GPUBackend
from gpurt.errors import HandleInUse, InvalidHandle, OutOfRange
from gpurt.runtime.backend import DriverBackend
from gpurt.testing import FaultyDriver, SimulatedDriver, create_simulated, parse_simulation
from gpurt.testing.sparse import SparseMemory
from gpurt.weights import LoadedTensor, LoadedWeights, load_safetensors
from tests.support.backends import cpu
from tests.weights.support import check, document, raw_file, tensor, write, write_sharded

CONTENT = {
    "embed": tensor("BF16", 300, 500, seed=1),
    "layers.0.w": tensor("F32", 500, 301, seed=2),
    "layers.0.scale": tensor("F32", seed=3),
    "layers.1.w": tensor("F8_E4M3", 77, 3001, seed=4),
    "layers.1.scale": tensor("F32", seed=5),
    "layers.1.none": tensor("F16", 4, 0),
    "layers.10.w": tensor("F4", 128, 4096, seed=6),
    "norm": tensor("F64", 1_000, seed=7),
}


@pytest.fixture(params=["cpu", "simulated"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[GPUBackend]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)  # a leak reported by shutdown
        async with cpu() if request.param == "cpu" else create_simulated("h100x2") as backend:
            yield backend


def first(backend: GPUBackend) -> str:
    return backend.devices[0].device_id


class TestContents:
    async def test_one_file(self, backend: GPUBackend, tmp_path: Path) -> None:
        path = write(tmp_path / "model.safetensors", CONTENT)
        async with await load_safetensors(path, backend, first(backend)) as weights:
            await check(backend, weights, CONTENT)
            assert list(weights) == list(CONTENT)
            assert weights.files == (path,)
            assert weights.size_bytes == sum(len(data) for _, _, data in CONTENT.values())
            assert len(weights.handles) == 1
            assert {tensor.device_id for tensor in weights.values()} == {first(backend)}

    async def test_as_numpy_reads_it(self, backend: GPUBackend, tmp_path: Path) -> None:
        library = pytest.importorskip("safetensors.numpy")
        generator = np.random.default_rng(0)
        arrays: dict[str, Any] = {
            f"l.{number}.{dtype}": (generator.standard_normal((number, 37)) * 100).astype(dtype)
            for number in (0, 1, 50, 900)
            for dtype in ("float32", "float16", "int8", "uint64", "bool")
        }
        library.save_file(arrays, tmp_path / "f.safetensors")
        async with await load_safetensors(str(tmp_path / "f.safetensors"), backend, first(backend)) as weights:
            assert set(weights) == set(arrays)
            for name, got in weights.items():
                data = await backend.copy_from_device(got.handle, got.offset_bytes, got.size_bytes)
                assert got.numpy_dtype is not None
                np.testing.assert_array_equal(np.frombuffer(data, got.numpy_dtype).reshape(got.shape), arrays[name])

    async def test_no_tensors(self, backend: GPUBackend, tmp_path: Path) -> None:
        seen: list[tuple[int, int]] = []
        async with await load_safetensors(
            write(tmp_path / "f", {}), backend, first(backend), on_progress=lambda *args: seen.append(args)
        ) as weights:
            assert len(weights) == len(weights.handles) == 0
        assert seen == [(0, 0)]

    async def test_thousands_of_small_tensors(self, tmp_path: Path) -> None:
        content = {f"t{n}": tensor("U8", 1 + n % 7, seed=n) for n in range(3000)}
        driver = FaultyDriver(SimulatedDriver(parse_simulation("h100")))
        async with DriverBackend(driver) as backend:
            async with await load_safetensors(write(tmp_path / "f", content), backend, first(backend)) as weights:
                await check(backend, weights, content)
            methods = [call.method for call in driver.calls]
            assert (methods.count("alloc"), methods.count("write")) == (1, 1)

    async def test_library_with_coarse_copies(self, tmp_path: Path) -> None:
        driver = SimulatedDriver(parse_simulation("h100"))
        driver.capabilities = driver.capabilities.model_copy(update={"alignment_bytes": 256})
        async with (
            DriverBackend(driver) as backend,
            await load_safetensors(write(tmp_path / "f", CONTENT), backend, first(backend)) as weights,
        ):
            for got in weights.values():
                # Only whole multiples can be read back; what lies behind a tensor is padding.
                size = min(-(-got.size_bytes // 256) * 256, got.handle.size_bytes - got.offset_bytes)
                data = await backend.copy_from_device(got.handle, got.offset_bytes, size)
                assert data[: got.size_bytes] == CONTENT[got.name][2]

    async def test_library_with_small_allocations(self, tmp_path: Path) -> None:
        driver = SimulatedDriver(parse_simulation("h100"))
        largest = max(len(data) for _, _, data in CONTENT.values())
        driver.capabilities = driver.capabilities.model_copy(update={"max_allocation_bytes": largest})
        path = write(tmp_path / "f", CONTENT)
        async with DriverBackend(driver) as backend:
            async with await load_safetensors(path, backend, first(backend)) as weights:
                await check(backend, weights, CONTENT)
                assert 2 <= len(weights.handles) < len(CONTENT)
            driver.capabilities = driver.capabilities.model_copy(update={"max_allocation_bytes": largest - 1})
            with pytest.raises(OutOfRange, match="largest single allocation"):
                await load_safetensors(path, backend, first(backend))
            assert driver.live_allocations == 0


class TestSelection:
    async def test_devices_by_layer(self, backend: GPUBackend, tmp_path: Path) -> None:
        zero, one = (device.device_id for device in backend.devices)
        path = write(tmp_path / "f", CONTENT)
        async with await load_safetensors(path, backend, {"": zero, "layers.1": one}) as weights:
            await check(backend, weights, CONTENT)
            on_one = {name for name, tensor in weights.items() if tensor.device_id == one}
            assert on_one == {"layers.1.w", "layers.1.scale", "layers.1.none"}
            assert len(weights.handles) == 2

    async def test_devices_by_function(self, backend: GPUBackend, tmp_path: Path) -> None:
        devices = [device.device_id for device in backend.devices]
        path = write(tmp_path / "f", CONTENT)
        async with await load_safetensors(path, backend, lambda name: devices[len(name) % 2]) as weights:
            await check(backend, weights, CONTENT)
            assert all(tensor.device_id == devices[len(name) % 2] for name, tensor in weights.items())

    async def test_only_a_layer(self, backend: GPUBackend, tmp_path: Path) -> None:
        path = write(tmp_path / "f", CONTENT)
        async with await load_safetensors(path, backend, first(backend), only=["layers.1.", "norm"]) as weights:
            wanted = {name: CONTENT[name] for name in CONTENT if name.startswith("layers.1.") or name == "norm"}
            await check(backend, weights, wanted)
            # What was not asked for takes no room: at most 255 bytes of padding a tensor.
            taken = sum(handle.size_bytes for handle in weights.handles)
            assert taken < weights.size_bytes + 256 * len(weights)

    async def test_shards(self, backend: GPUBackend, tmp_path: Path) -> None:
        names = list(CONTENT)
        shards = {f"model-{n}.safetensors": {name: CONTENT[name] for name in names[n::3]} for n in range(3)}
        index = write_sharded(tmp_path, shards)
        async with await load_safetensors(index, backend, first(backend)) as weights:
            await check(backend, weights, CONTENT)
            assert weights.files == tuple(tmp_path / name for name in shards)

    async def test_shards_that_are_not_needed_need_not_be_there(self, backend: GPUBackend, tmp_path: Path) -> None:
        shards = {"0.safetensors": {"a": CONTENT["embed"]}, "1.safetensors": {"b": CONTENT["norm"]}}
        index = write_sharded(tmp_path, shards)
        (tmp_path / "0.safetensors").unlink()
        async with await load_safetensors(index, backend, first(backend), only=["b"]) as weights:
            await check(backend, weights, shards["1.safetensors"])

    async def test_shards_behind_links(self, backend: GPUBackend, tmp_path: Path) -> None:
        (tmp_path / "blobs").mkdir()
        (tmp_path / "snapshot").mkdir()
        blob = write(tmp_path / "blobs" / "123", CONTENT)
        index = write_sharded(tmp_path / "snapshot", {"0.safetensors": CONTENT})
        (tmp_path / "snapshot" / "0.safetensors").unlink()
        try:
            (tmp_path / "snapshot" / "0.safetensors").symlink_to(blob)
        except OSError:
            pytest.skip("no symbolic links here")
        async with await load_safetensors(index, backend, first(backend)) as weights:
            await check(backend, weights, CONTENT)


class TestProgress:
    async def test_rises_to_the_total(self, backend: GPUBackend, tmp_path: Path) -> None:
        content = {**CONTENT, "big": tensor("U8", 5 << 20)}
        seen: list[tuple[int, int]] = []
        path = write(tmp_path / "f", content)
        async with await load_safetensors(
            path, backend, first(backend), only=["big", "norm"], on_progress=lambda *args: seen.append(args)
        ) as weights:
            total = weights.size_bytes
        assert seen[0] == (0, total)
        assert seen[-1] == (total, total)
        assert all(earlier < later for (earlier, _), (later, _) in itertools.pairwise(seen))
        assert {each for _, each in seen} == {total}

    async def test_devices_take_turns_and_the_limit_holds(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gpurt.weights.loader.plan_blocks", _blocks_of_one)
        content = {f"{device}.{n}": tensor("U8", 1 << 16, seed=n) for device in "ab" for n in range(6)}
        running = highest = 0
        order: list[str] = []
        original = DriverBackend.load_file

        async def counted(self: DriverBackend, path: Any, handle: Any, **options: Any) -> int:
            nonlocal running, highest
            running += 1
            highest = max(highest, running)
            order.append(handle.device_id)
            try:
                return await original(self, path, handle, **options)
            finally:
                running -= 1

        monkeypatch.setattr(DriverBackend, "load_file", counted)
        async with create_simulated("h100x2") as backend:
            zero, one = (device.device_id for device in backend.devices)
            for limit, expected in ((1, 1), (3, 3), (None, 4), (100, 12)):
                highest = 0
                order.clear()
                async with await load_safetensors(
                    write(tmp_path / "f", content), backend, {"a": zero, "b": one}, max_concurrent=limit
                ) as weights:
                    await check(backend, weights, content)
                # How many really meet depends on the machine; the limit does not.
                assert min(expected, 2) <= highest <= expected
                if limit == 1:
                    assert order == [zero, one] * 6

    @pytest.mark.parametrize("limit", [0, -1])
    async def test_limit_that_is_none(self, backend: GPUBackend, limit: int) -> None:
        with pytest.raises(OutOfRange, match="max_concurrent"):
            await load_safetensors("f", backend, first(backend), max_concurrent=limit)


class TestClosing:
    async def test_frees_everything_once(self, tmp_path: Path) -> None:
        backend = create_simulated("h100")
        async with backend:
            weights = await load_safetensors(write(tmp_path / "f", CONTENT), backend, first(backend))
            handle = weights["norm"].handle
            await weights.close()
            assert weights.handles == ()
            await weights.close()
            assert backend.ledger.usage(first(backend)).current_count == 0
            with pytest.raises(InvalidHandle):
                await backend.copy_from_device(handle)

    async def test_after_the_backend(self, tmp_path: Path) -> None:
        backend = create_simulated("h100")
        await backend.initialize()
        weights = await load_safetensors(write(tmp_path / "f", CONTENT), backend, first(backend))
        with pytest.warns(ResourceWarning):
            await backend.shutdown()
        await weights.close()

    async def test_open_view_keeps_its_block_alone(self, tmp_path: Path) -> None:
        backend = cpu()
        assert isinstance(backend, DriverBackend)
        async with backend:
            zero, one = (device.device_id for device in backend.devices)
            path = write(tmp_path / "f", CONTENT)
            weights = await load_safetensors(path, backend, {"": zero, "layers": one})
            viewed = weights["embed"]
            with await backend.view(viewed.handle) as view:
                at = viewed.offset_bytes
                assert bytes(view.memoryview()[at : at + viewed.size_bytes]) == CONTENT["embed"][2]
                with pytest.raises(HandleInUse):
                    await weights.close()
                assert weights.handles == (viewed.handle,)
                assert backend.ledger.usage(one).current_count == 0
            await weights.close()
            assert backend.ledger.usage(zero).current_count == 0

    async def test_cancelled_close_frees(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpurt.weights.loader.plan_blocks", _blocks_of_one)
        backend = create_simulated("h100")
        async with backend:
            weights = await load_safetensors(write(tmp_path / "f", CONTENT), backend, first(backend))
            assert len(weights.handles) == len(CONTENT)
            closing = asyncio.create_task(weights.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            await backend.synchronize(first(backend))
            assert backend.ledger.usage(first(backend)).current_count == 0

    def test_repr_and_value(self) -> None:
        weights = LoadedWeights(create_simulated("h100"), {}, [], [])
        assert "0 tensors" in repr(weights)
        assert "name" in LoadedTensor.__slots__


class TestHostMemory:
    async def test_does_not_grow_by_the_file(self, tmp_path: Path) -> None:
        size = 128 << 20
        path = _sparse_file(tmp_path / "f", size)
        async with DriverBackend(_Sink(parse_simulation("h100"))) as backend:
            tracemalloc.start()
            try:
                async with await load_safetensors(path, backend, first(backend)) as weights:
                    peak = tracemalloc.get_traced_memory()[1]
                    assert weights.size_bytes == size
            finally:
                tracemalloc.stop()
        assert peak < size // 2

    @pytest.mark.slow
    async def test_resident_memory_does_not_either(self, tmp_path: Path) -> None:
        size = 1 << 30
        path = _sparse_file(tmp_path / "f", size)
        process = psutil.Process()
        async with DriverBackend(_Sink(parse_simulation("h100"))) as backend:
            gc.collect()
            before = highest = process.memory_info().rss

            def sample(done: int, total: int) -> None:
                nonlocal highest
                highest = max(highest, process.memory_info().rss)

            async with await load_safetensors(path, backend, first(backend), on_progress=sample):
                pass
        assert highest - before <= 256 << 20


class _Sink(SimulatedDriver):
    """A device whose memory is nowhere, so that what is measured is what loading takes."""

    def write(self, index: int, mem: SparseMemory, offset: int, src: memoryview) -> None:
        pass


def _sparse_file(path: Path, size: int) -> Path:
    header = document({"x": ("U8", (size,), b"")})
    header["x"]["data_offsets"] = [0, size]
    raw = raw_file(header)
    path.write_bytes(raw)
    os.truncate(path, len(raw) + size)
    return path


def _blocks_of_one(tensors: Any) -> Any:
    from gpurt.weights.plan import plan_blocks

    return [block for each in tensors for block in plan_blocks([each])]
