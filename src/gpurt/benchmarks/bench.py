"""The device under test: its backend, the plan, and how much memory may be taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from gpurt.backend import GPUBackend
from gpurt.benchmarks.cuda_raw import RawCUDA
from gpurt.benchmarks.library_raw import LibraryRaw, shares_host_memory
from gpurt.benchmarks.litert_raw import RawLiteRT
from gpurt.benchmarks.measurement import Skipped
from gpurt.benchmarks.mlx_raw import RawMLX
from gpurt.benchmarks.onnxruntime_raw import RawONNXRuntime
from gpurt.benchmarks.opencl_raw import RawOpenCL
from gpurt.benchmarks.plan import SMALL_BYTES, Plan
from gpurt.benchmarks.raw import HostRaw, Raw
from gpurt.benchmarks.vulkan_raw import RawVulkan
from gpurt.errors import DeviceNotFound, Unsupported
from gpurt.factory import create_backend
from gpurt.sources.host import memory_budget
from gpurt.types import GPUDevice

LIBRARIES: Final[Mapping[str, type[LibraryRaw]]] = {
    "vulkan": RawVulkan,
    "opencl": RawOpenCL,
    "metal": RawMLX,
    "directml": RawONNXRuntime,
    "tflite": RawLiteRT,
}
"""What the devices of a backend are compared with; CUDA and ROCm have :class:`RawCUDA`, others :class:`HostRaw`."""

_SHARE: Final = 0.5
"""Of the free memory: the rest is for whoever else needs some meanwhile, page tables and page cache included."""


@dataclass(slots=True)
class Bench:
    """What a topic of a device is given."""

    backend: GPUBackend
    device: GPUDevice
    plan: Plan
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """Parts of topics that were left out, and why."""
    start_program: Sequence[str] = ("-m", "gpurt.benchmarks.start")
    """What Python runs as :mod:`gpurt.benchmarks.start`, in a process that may have to be told of the backend first."""

    @property
    def device_id(self) -> str:
        return self.device.device_id

    @property
    def second(self) -> GPUDevice | None:
        """Another device for copies across."""
        others = (each for each in self.backend.devices if each.usable and each.device_id != self.device_id)
        return next(others, None)

    @property
    def shares_host_memory(self) -> bool:
        return shares_host_memory(self.device)

    def raw(self, nbytes: int, second: GPUDevice | None = None) -> Raw:
        """The same copies without gpurt, not yet opened. Where no way to this kind of device is known, those of the
        host's memory."""
        kind = self._raw_kind
        if issubclass(kind, LibraryRaw):
            return kind(nbytes, self.device, second)
        if issubclass(kind, RawCUDA):
            return kind(nbytes, _index(self.device), None if second is None else _index(second))
        return HostRaw(nbytes)

    @property
    def _raw_kind(self) -> type[Raw]:
        return RawCUDA if self.device.backend in ("cuda", "rocm") else LIBRARIES.get(self.device.backend, HostRaw)

    async def lack(
        self, nbytes: int, *, host: int, device: int, raw: int = 1, second: GPUDevice | None = None
    ) -> str | None:
        """Why there is no room for so many times ``nbytes``, or None: on the host, in allocations of gpurt (on
        ``second`` too if there is one), and in memory for copies without it. At most half of what is free is taken."""
        await self.backend.trim()  # what earlier measurements have left in the pool is free again
        largest = self._largest_allocation
        if largest is not None and max(device and 1, raw) * nbytes > largest:
            return f"the largest allocation of {self.backend.name} is {largest:,} bytes"
        kind = self._raw_kind
        on_device = (device + raw * kind.device_share) * nbytes
        devices = [self.device] if second is None else [self.device, second]
        wanted = {each.device_id: on_device for each in devices}
        wanted["the host"] = (host + raw * kind.host_share) * nbytes
        if self.shares_host_memory:
            wanted["the host"] += on_device * len(devices)
        free = {"the host": (await asyncio.to_thread(memory_budget)).usable_bytes}
        for each in devices:
            try:
                free[each.device_id] = (await self.backend.get_device_memory_info(each.device_id)).available_bytes
            except Unsupported:  # nobody knows: it is tried
                continue
        for name, need in wanted.items():
            if name in free and need > free[name] * _SHARE:
                return f"needs {need:,} bytes; half of what {name} has free is {int(free[name] * _SHARE):,}"
        return None

    async def fitting(
        self, nbytes: int, *, host: int, device: int, raw: int = 1, second: GPUDevice | None = None
    ) -> int:
        """``nbytes``, halved until :meth:`lack` finds room.

        Raises:
            Skipped: there is no room even for a small copy.
        """
        while (reason := await self.lack(nbytes, host=host, device=device, raw=raw, second=second)) is not None:
            nbytes //= 2
            if nbytes < SMALL_BYTES:
                raise Skipped(reason)
        return nbytes

    @property
    def _largest_allocation(self) -> int | None:
        return self.backend.capabilities.max_allocation_bytes


def _index(device: GPUDevice) -> int:
    return int(device.device_id.rpartition(":")[2])


@asynccontextmanager
async def opened_bench(device_id: str | None, plan: Plan) -> AsyncGenerator[Bench]:
    """The device of that name through the backend that drives it. A backend's name alone is its first usable device,
    which may be one in software; None is the best backend's.

    Raises:
        BackendUnavailable: nothing drives such a device here.
        DeviceNotFound: the backend works, and has no such device.
    """
    name, colon, _ = (device_id or "").partition(":")
    backend = await create_backend(name or None)
    async with backend:
        for device in backend.devices:
            if device.device_id == device_id or (not colon and device.usable):
                yield Bench(backend, device, plan)
                return
        known = ", ".join(device.device_id for device in backend.devices)
        raise DeviceNotFound("no such device", backend=backend.name, device_id=device_id, hint=f"devices: {known}")
