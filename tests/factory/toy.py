"""A backend of nothing but a life cycle, scripted per test, written as the classic recipe says: all 14 methods."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from gpurt.backend import GPUBackend
from gpurt.errors import GPUError
from gpurt.types import GPUDevice, MemoryHandle, MemoryInfo


def device(device_id: str = "toy:0", **fields: Any) -> GPUDevice:
    values: dict[str, Any] = {
        "device_id": device_id,
        "name": "Toy",
        "vendor": "unknown",
        "backend": device_id.partition(":")[0],
        "compute_capability": None,
        "memory_bytes": 1 << 30,
        "memory_available": 1 << 30,
        "compute_units": None,
        "tensor_core_count": None,
        "max_threads_per_block": None,
        "clock_rate_mhz": None,
        "bandwidth_gbps": None,
        "support_level": "full",
        "driver_version": None,
        "backend_name": "toy",
    }
    return GPUDevice(**(values | fields))


class ToyBackend(GPUBackend):
    name = "toy"

    def __init__(
        self,
        devices: tuple[GPUDevice, ...] = (device(),),
        *,
        on_initialize: Callable[[], Awaitable[None]] | None = None,
        on_shutdown: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._devices = devices
        self._on_initialize = on_initialize
        self._on_shutdown = on_shutdown
        self.initializations = 0
        self.shutdowns = 0

    async def initialize(self) -> None:
        self.initializations += 1
        if self._on_initialize is not None:
            await self._on_initialize()

    async def shutdown(self, *, timeout: float | None = 10) -> None:
        self.shutdowns += 1
        if self._on_shutdown is not None:
            await self._on_shutdown()

    async def list_devices(self) -> tuple[GPUDevice, ...]:
        return self._devices

    async def get_device(self, device_id: str) -> GPUDevice | None:
        return next((device for device in self._devices if device.device_id == device_id), None)

    async def allocate(self, device_id: str, size_bytes: int) -> MemoryHandle:
        raise GPUError("no memory in a toy")

    async def deallocate(self, handle: MemoryHandle) -> None:
        raise GPUError("no memory in a toy")

    async def copy_to_device(self, src: Any, dst_handle: MemoryHandle, offset_bytes: int = 0) -> None:
        raise GPUError("no memory in a toy")

    async def copy_from_device(
        self, src_handle: MemoryHandle, offset_bytes: int = 0, size_bytes: int | None = None
    ) -> bytes:
        raise GPUError("no memory in a toy")

    async def copy_device_to_device(
        self,
        src_handle: MemoryHandle,
        dst_handle: MemoryHandle,
        size_bytes: int,
        *,
        src_offset_bytes: int = 0,
        dst_offset_bytes: int = 0,
    ) -> None:
        raise GPUError("no memory in a toy")

    async def synchronize(self, device_id: str) -> None:
        raise GPUError("no memory in a toy")

    async def get_device_memory_info(self, device_id: str) -> MemoryInfo:
        raise GPUError("no memory in a toy")

    async def get_device_temperature(self, device_id: str) -> float | None:
        return None

    async def get_device_power_usage(self, device_id: str) -> float | None:
        return None

    async def get_device_clock_rate(self, device_id: str) -> int | None:
        return None


class Shelf:
    """Registers scripted backends under built-in names and remembers, in order, which were made."""

    def __init__(self) -> None:
        self.made: list[tuple[str, ToyBackend]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.made]

    def __getitem__(self, name: str) -> ToyBackend:
        return next(backend for made, backend in self.made if made == name)

    def put(self, name: str, make: Callable[[], ToyBackend] | None = None, **attributes: Any) -> None:
        """``make`` may raise: that is a module that cannot be imported, or a constructor that fails."""
        from gpurt import plugins

        def create() -> ToyBackend:
            backend = make() if make is not None else ToyBackend((device(f"{name}:0"),))
            self.made.append((name, backend))
            return backend

        vars(create).update(attributes)
        plugins.register(name, create, replace=True)
