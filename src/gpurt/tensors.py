"""Tensors to devices in one call, and managers of devices: for code that holds a tensor and wants it elsewhere."""

from __future__ import annotations

from gpurt.ambient import default_backend
from gpurt.backend import GPUBackend
from gpurt.errors import DeviceNotFound, GPUError, InvalidHandle, OutOfRange
from gpurt.memory.arrays import DeviceArray
from gpurt.memory.hosttensor import understand
from gpurt.memory.manager import MemoryManager, manager_of
from gpurt.memory.scope import MemoryScope
from gpurt.memory.transfer import Place, transfer
from gpurt.memory.undo import undo_allocations
from gpurt.runtime.elements import understand_array
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
        backend: which instance ``device`` means; None is the scope's, else the loop's
            :func:`gpurt.ambient.default_backend`.
        scope: an open memory scope of that backend, which will free the array; None leaves it to the caller.

    Cancelled, it returns at once, and what was allocated is freed.

    Raises:
        OutOfRange: not a tensor, no element, or elements that a device cannot hold; or an argument of a wrong type.
        Unsupported: the tensor lies in another library's device memory.
        InvalidHandle: the array that is passed was freed, or the scope is not open or of another backend.
        DeviceNotFound: also for a record of a device that the backend does not have.
        BackendUnavailable, BackendClosed, OutOfMemory, TransferFailed, DeviceLost.
        All of the first four before the device is touched.
    """
    _check_backend(backend, "to_device")
    _check_scope(scope)
    if isinstance(tensor, DeviceArray):
        await _check_live(tensor)
        if backend is None and device is None:
            return tensor
        target, device_id = await _resolve(device, backend, scope)
        if (target, device_id) == (tensor.backend, tensor.device_id):
            return tensor
        array = await _allocate(target, device_id, tensor.shape, tensor.dtype, scope)
        copy = transfer(Place(tensor.backend, tensor.handle), Place(target, array.handle), array.nbytes)
    else:
        host = await understand(tensor)
        # Refuses what cannot be, before anything is opened.
        await understand_array(host.shape, host.dtype, "to_device")
        target, device_id = await _resolve(device, backend, scope)
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
        DeviceNotFound, BackendUnavailable, BackendClosed, WrongLoop. OutOfRange: ``backend`` is none.
    """
    _check_backend(backend, "get_memory_manager")
    return await manager_of(*await _resolve(device, backend))


async def _allocate(
    backend: GPUBackend, device_id: str, shape: tuple[int, ...], dtype: str, scope: MemoryScope | None
) -> DeviceArray:
    if scope is None:
        return await (await manager_of(backend, device_id)).allocate(shape, dtype)
    array = await scope.allocate(shape, dtype, device_id=device_id)
    return DeviceArray(array.handle, array.shape, array.dtype, backend)


def _check_backend(backend: object, operation: str) -> None:
    if not (backend is None or isinstance(backend, GPUBackend)):
        raise OutOfRange(
            f"{type(backend).__name__} is no backend", operation=operation, hint="pass what create_backend() returned"
        )


def _check_scope(scope: object) -> None:
    if scope is None:
        return
    if not isinstance(scope, MemoryScope):
        raise OutOfRange(
            f"{type(scope).__name__} is no memory scope",
            operation="to_device",
            hint="pass what `async with backend.memory_scope() as scope` gives",
        )
    if not scope.open:
        raise InvalidHandle("the memory scope is not open", backend=scope.backend.name, operation="to_device")


async def _check_live(array: DeviceArray) -> None:
    try:
        # No bytes: the library is not called, and a handle that is dead is refused.
        await array.backend.copy_from_device(array.handle, 0, 0)
    except GPUError as exc:
        exc.operation = "to_device"
        raise


async def _resolve(
    device: Device | None, backend: GPUBackend | None, scope: MemoryScope | None = None
) -> tuple[GPUBackend, str]:
    if device is not None and not isinstance(device, str | GPUDevice | MemoryManager):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeviceNotFound(f"{type(device).__name__} is no device", hint="pass an id such as 'cuda:0', or a record")
    if isinstance(device, MemoryManager):
        if backend not in (None, device.backend):
            raise DeviceNotFound(
                "the manager is of another backend than the one given", backend=device.backend.name, hint="pass one"
            )
        backend = device.backend
    if scope is not None:
        if backend not in (None, scope.backend):
            raise InvalidHandle(
                "the memory scope is of another backend than the array would be",
                backend=scope.backend.name,
                operation="to_device",
                hint="pass a scope of the backend given, or leave the backend away",
            )
        backend = scope.backend
    if isinstance(device, MemoryManager):
        return device.backend, device.device_id
    if backend is None:
        kind = device.backend if isinstance(device, GPUDevice) else device and device.partition(":")[0]
        backend = await default_backend(kind)
    if isinstance(device, GPUDevice):
        return backend, await _id_of(device, backend)
    if device is not None and device != backend.name:
        return backend, device
    for present in await backend.list_devices():
        if present.usable:
            return backend, present.device_id
    raise DeviceNotFound("no device of this backend is usable", backend=backend.name)


async def _id_of(record: GPUDevice, backend: GPUBackend) -> str:
    """What ``backend`` calls the device of a record. Its index may be another's there, so the identity decides; where
    there is none, name and id must be the same."""
    for present in await backend.list_devices():
        if present.stable_id == record.stable_id and (
            record.identity is not None or (present.backend, present.name) == (record.backend, record.name)
        ):
            return present.device_id
    raise DeviceNotFound(
        f"the record is of a device that this backend does not have: {record.name}, {record.stable_id}",
        backend=backend.name,
        hint="pass one of backend.devices",
    )
