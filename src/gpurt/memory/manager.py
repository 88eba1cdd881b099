"""MemoryManager: arrays and cached memory of one device of one backend."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import asdict, dataclass

from gpurt.backend import GPUBackend
from gpurt.errors import DeviceNotFound, Unsupported
from gpurt.memory.arrays import DeviceArray
from gpurt.runtime.elements import DType, Shape, understand_array
from gpurt.runtime.protocols import PoolStatistics, ReportsMemory
from gpurt.types import MemoryInfo


@dataclass(frozen=True, slots=True)
class PoolUsage(PoolStatistics):
    """A device's pool, and what was allocated beside it, since ``initialize``. Bytes, as users asked for them where
    they are live, as blocks where they are cached."""

    live_bytes: int
    live_count: int
    peak_live_bytes: int

    @property
    def fragmentation(self) -> float:
        """Share, 0 to 1, of the memory that gpurt holds on the device in which no live allocation lies: what
        ``clear_cache`` could give back. What live blocks are larger than asked for, an eighth at most, is not counted.
        """
        held = self.cached_bytes + self.live_bytes
        return self.cached_bytes / held if held else 0.0


class MemoryManager:
    """Memory of one device: ``manager = await gpurt.get_memory_manager("cuda:0", backend=backend)``.

    It keeps no memory of its own: what it allocates, and what anybody else allocates on that device of that backend,
    shares one pool, one limit and one account. There is one manager for each backend instance, device and event loop,
    as long as somebody holds it; it holds its backend, and no backend holds it.
    """

    def __init__(self, backend: GPUBackend, device_id: str) -> None:
        self.backend = backend
        self.device_id = device_id

    def __repr__(self) -> str:
        return f"<MemoryManager: {self.device_id} of {self.backend.name}>"

    @property
    def pool(self) -> PoolUsage:
        """The pool at this moment. A snapshot; does not wait.

        Raises:
            Unsupported: the backend has no pool of gpurt's. BackendClosed, DeviceLost.
        """
        if not isinstance(self.backend, ReportsMemory):
            raise Unsupported(
                "this backend has no pool of gpurt's",
                backend=self.backend.name,
                device_id=self.device_id,
                operation="MemoryManager.pool",
                hint="memory_info() tells what the device has",
            )
        pool = self.backend.pool_statistics(self.device_id)
        usage = self.backend.memory_usage(self.device_id)
        return PoolUsage(
            **asdict(pool),
            live_bytes=usage.current_bytes,
            live_count=usage.current_count,
            peak_live_bytes=usage.peak_bytes,
        )

    async def allocate(self, shape: Shape, dtype: DType = "uint8") -> DeviceArray:
        """Allocate an array; contents are unspecified. ``shape``: extents, or one number of elements; ``dtype``:
        ``float32``, ``bfloat16``, …, or NumPy's names, short codes, dtypes and scalar types for them. Two live arrays
        never share memory. A block that was freed serves the next array of its size without a call of the library, and
        without leaving the event loop.

        Raises:
            OutOfRange: unknown dtype, no shape, no element, or a negative extent. OutOfMemory.
        """
        extents, name, nbytes = await understand_array(shape, dtype, "MemoryManager.allocate")
        handle = await self.backend.allocate(self.device_id, nbytes)
        return DeviceArray(handle, extents, name, self.backend)

    async def clear_cache(self) -> int:
        """Give the device back all memory that is kept for later: the pool's, the library's and, for the whole backend,
        host buffers'. Returns bytes freed. Live arrays stay."""
        return await self.backend.trim(self.device_id)

    async def memory_info(self) -> MemoryInfo:
        """Total, used, available and reserved bytes of the device at this moment."""
        return await self.backend.get_device_memory_info(self.device_id)


_Key = tuple[str, asyncio.AbstractEventLoop]
# A manager refers to its backend, so a table that kept managers alive would keep their backends.
_managers: weakref.WeakKeyDictionary[GPUBackend, weakref.WeakValueDictionary[_Key, MemoryManager]] = (
    weakref.WeakKeyDictionary()
)


async def manager_of(backend: GPUBackend, device_id: str) -> MemoryManager:
    """The manager of one device on the running loop: always the same one while somebody holds it.

    Raises:
        DeviceNotFound: the backend has no such device. BackendClosed, WrongLoop.
    """
    if await backend.get_device(device_id) is None:
        known = ", ".join(device.device_id for device in backend.devices)
        raise DeviceNotFound(
            f"no device {device_id!r}; there are: {known}", backend=backend.name, operation="get_memory_manager"
        )
    managers = _managers.setdefault(backend, weakref.WeakValueDictionary())
    key = (device_id, asyncio.get_running_loop())
    manager = managers.get(key)
    if manager is None:
        manager = managers[key] = MemoryManager(backend, device_id)
    return manager
