"""Views of CUDA memory in the hands of other libraries; needs a GPU."""

from __future__ import annotations

import gc

import pytest

from gpurt.backends.cuda_backend import CUDABackend
from gpurt.errors import BackendUnavailable, HandleInUse, Unsupported

pytestmark = pytest.mark.gpu


@pytest.fixture
async def backend():
    backend = CUDABackend()
    try:
        await backend.initialize()
    except BackendUnavailable as exc:
        pytest.skip(str(exc))
    yield backend
    await backend.shutdown()


async def test_cupy_and_torch_share_the_memory(backend: CUDABackend) -> None:
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")
    for index, device in enumerate(backend.devices):
        handle = await backend.allocate(device.device_id, 4096)
        await backend.copy_to_device(bytes(4096), handle)
        view = await backend.view(handle, (32, 32), "float32")
        with pytest.raises(Unsupported):
            view.numpy()
        by_dlpack = torch.from_dlpack(view)
        # CuPy copies to, and computes on, the device that is current.
        with cupy.cuda.Device(index):
            by_interface = cupy.asarray(view)
            assert by_interface.data.ptr == by_dlpack.data_ptr() == view.__cuda_array_interface__["data"][0]
            by_dlpack += 2.5
            torch.cuda.synchronize(by_dlpack.device)
            assert float(by_interface.sum()) == 2.5 * 1024
        with pytest.raises(HandleInUse):
            await backend.deallocate(handle)
        del by_interface, by_dlpack
        gc.collect()
        view.close()
        await backend.deallocate(handle)


async def test_work_queued_by_another_library_ends_before_the_block_is_reused(backend: CUDABackend) -> None:
    torch = pytest.importorskip("torch")
    device = backend.devices[0].device_id
    size = 64 << 20
    for _ in range(5):
        handle = await backend.allocate(device, size)
        view = await backend.view(handle, (size // 4,), "float32")
        tensor = torch.from_dlpack(view)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                tensor.fill_(1.0)
        del tensor
        gc.collect()
        view.close()
        await backend.deallocate(handle)
        again = await backend.allocate(device, size)
        await backend.copy_to_device(bytes(size), again)
        assert await backend.copy_from_device(again) == bytes(size)
        await backend.deallocate(again)
