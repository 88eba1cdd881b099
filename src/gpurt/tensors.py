"""Tensors to devices in one call, and managers of devices: for code that holds a tensor and wants it elsewhere."""

from __future__ import annotations

from gpurt.ambient import default_backend
from gpurt.backend import GPUBackend
from gpurt.errors import DeviceNotFound
from gpurt.memory.arrays import DeviceArray, array_extents
from gpurt.memory.hosttensor import understand
from gpurt.memory.manager import MemoryManager, manager_of
from gpurt.memory.scope import MemoryScope
from gpurt.memory.transfer import Place, transfer
from gpurt.memory.undo import undo_allocations
from gpurt.types import GPUDevice

Device = str | GPUDevice | MemoryManager
"""``"cuda:0"``, or ``"cuda"`` for the first device of that backend; a device record; a manager."""


async def to_device(
    tensor: object, device: Device | None = None, *, backend: GPUBackend | None = None, scope: MemoryScope | None = None
) -> DeviceArray:
    """``tensor`` as an array on ``device``: same shape, same dtype, same bytes.

    ::

        array = await gpurt.to_device(numpy_array, "cuda:0", backend=backend)
        same = await array.numpy()
        await array.free()

    Takes what :func:`gpurt.memory.hosttensor.understand` does: NumPy arrays and scalars, PyTorch tensors on the CPU
    (without their gradient's history), host buffers, and anything with DLPack, the buffer protocol (``bytes``,
    ``array.array``, ``memoryview``) or ``__array__``. Contiguous ones are copied straight to the device; do not change
    them meanwhile. Others are put in C order by one more copy in host memory.

    An array that is on that device already is returned as it is, without a copy. From another device it is copied,
    directly where both are of one backend, else through host buffers; the original stays.

    Args:
        device: None is where the tensor is, if it is on a device, else the backend's first usable device.
        backend: which instance ``device`` means; None is the loop's :func:`gpurt.ambient.default_backend`.
        scope: an open memory scope of that backend, which will free the array; None leaves it to the caller.

    Cancelled, it returns at once, and what was allocated is freed.

    Raises:
        OutOfRange: not a tensor, no element, or elements that a device cannot hold. Before the device is touched.
        Unsupported: the tensor lies in another library's device memory.
        DeviceNotFound, BackendUnavailable, OutOfMemory, TransferFailed, DeviceLost.
    """
    if isinstance(tensor, DeviceArray):
        if backend is None and device is None:
            return tensor
        target, device_id = await _resolve(device, backend)
        if (target, device_id) == (tensor.backend, tensor.device_id):
            return tensor
        array = await _allocate(target, device_id, tensor.shape, tensor.dtype, scope)
        copy = transfer(Place(tensor.backend, tensor.handle), Place(target, array.handle), array.nbytes)
    else:
        host = await understand(tensor)
        array_extents(host.shape, host.dtype, "to_device")  # refuses what cannot be, before anything is opened
        target, device_id = await _resolve(device, backend)
        memory = await host.packed()
        array = await _allocate(target, device_id, host.shape, host.dtype, scope)
        copy = target.copy_to_device(memory, array.handle)
    try:
        await copy
    except BaseException as failure:
        await undo_allocations(target, [array.handle], failure)
        raise
    return array


async def get_memory_manager(device: Device | None = None, *, backend: GPUBackend | None = None) -> MemoryManager:
    """The manager of a device: the same object for each backend instance, device and event loop, while it is held.

    Args:
        device: None is the backend's first usable device.
        backend: which instance ``device`` means; None is the loop's :func:`gpurt.ambient.default_backend`.

    Raises:
        DeviceNotFound, BackendUnavailable, BackendClosed, WrongLoop.
    """
    return await manager_of(*await _resolve(device, backend))


async def _allocate(
    backend: GPUBackend, device_id: str, shape: tuple[int, ...], dtype: str, scope: MemoryScope | None
) -> DeviceArray:
    if scope is None:
        return await (await manager_of(backend, device_id)).allocate(shape, dtype)
    array = await scope.allocate(shape, dtype, device_id=device_id)
    return DeviceArray(array.handle, array.shape, array.dtype, backend)


async def _resolve(device: Device | None, backend: GPUBackend | None) -> tuple[GPUBackend, str]:
    if isinstance(device, MemoryManager):
        if backend not in (None, device.backend):
            raise DeviceNotFound(
                "the manager is of another backend than the one given", backend=device.backend.name, hint="pass one"
            )
        return device.backend, device.device_id
    if device is not None and not isinstance(device, str | GPUDevice):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeviceNotFound(f"{type(device).__name__} is no device", hint="pass an id such as 'cuda:0', or a record")
    device_id = device.device_id if isinstance(device, GPUDevice) else device
    if backend is None:
        kind = device.backend if isinstance(device, GPUDevice) else device and device.partition(":")[0]
        backend = await default_backend(kind)
    if device_id is not None and device_id != backend.name:
        return backend, device_id
    for present in await backend.list_devices():
        if present.usable:
            return backend, present.device_id
    raise DeviceNotFound("no device of this backend is usable", backend=backend.name)
