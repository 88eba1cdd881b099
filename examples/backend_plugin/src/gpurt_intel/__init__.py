"""Intel GPUs through OpenCL, as a backend of gpurt."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyopencl as cl

from gpurt import BackendUnavailable, Capabilities, DeviceKind, Driver, GPUDevice, OutOfMemory, ReasonCode, Telemetry
from gpurt.identity import device_identity

ANY_VENDOR = "GPURT_INTEL_TEST_ANY_VENDOR"  # for tests: takes every OpenCL device, the host's processor too
NO_DRIVER = -1001  # CL_PLATFORM_NOT_FOUND_KHR
NO_MEMORY = (-4, -6, -61)  # MEM_OBJECT_ALLOCATION_FAILURE, OUT_OF_HOST_MEMORY, INVALID_BUFFER_SIZE


class IntelDriver(Driver):
    name = "intel"
    # "device": each device has one thread, which is what one queue of commands is made for.
    capabilities = Capabilities(threading="device", telemetry=frozenset({"memory_total_bytes"}))

    def open(self) -> Sequence[GPUDevice]:
        try:
            found = [device for platform in cl.get_platforms() for device in platform.get_devices()]
        except cl.LogicError as exc:
            if exc.code != NO_DRIVER:
                raise
            hint = "apt install intel-opencl-icd"
            raise BackendUnavailable("no OpenCL driver", reason=ReasonCode.NO_DRIVER, hint=hint) from exc
        if not os.environ.get(ANY_VENDOR):
            found = [each for each in found if each.type & cl.device_type.GPU and each.vendor.startswith("Intel")]
        if not found:
            raise BackendUnavailable("OpenCL shows no Intel GPU", reason=ReasonCode.NO_DEVICE)
        self._queues = [cl.CommandQueue(cl.Context([device])) for device in found]
        self._lock, self._live = threading.Lock(), [0] * len(found)
        largest = max(device.max_mem_alloc_size for device in found)
        self.capabilities = type(self).capabilities.model_copy(update={"max_allocation_bytes": largest})
        return [self._describe(index, device) for index, device in enumerate(found)]

    def attach(self, index: int) -> None: ...

    def alloc(self, index: int, nbytes: int) -> Any:
        self._count(index, nbytes)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR  # allocate now, not at the first copy
        try:
            return cl.Buffer(self._queues[index].context, flags, nbytes)
        except cl.Error:
            self._count(index, -nbytes)
            raise

    def free(self, index: int, mem: Any) -> None:
        self._count(index, -mem.size)
        mem.release()

    def write(self, index: int, mem: Any, offset: int, src: memoryview) -> None:
        cl.enqueue_copy(self._queues[index], mem, src, dst_offset=offset, is_blocking=True)

    def read(self, index: int, mem: Any, offset: int, dst: memoryview) -> None:
        cl.enqueue_copy(self._queues[index], dst, mem, src_offset=offset, is_blocking=True)

    def copy(
        self, src_index: int, src: Any, src_offset: int, dst_index: int, dst: Any, dst_offset: int, nbytes: int
    ) -> None:
        if src_index != dst_index:  # two contexts have nothing in common but the host
            stage = np.empty(nbytes, np.uint8)
            cl.enqueue_copy(self._queues[src_index], stage, src, src_offset=src_offset, is_blocking=True)
            cl.enqueue_copy(self._queues[dst_index], dst, stage, dst_offset=dst_offset, is_blocking=True)
            return
        part = {"src_offset": src_offset, "dst_offset": dst_offset, "byte_count": nbytes}
        cl.enqueue_copy(self._queues[src_index], dst, src, **part).wait()

    def sync(self, index: int) -> None:
        self._queues[index].finish()

    def telemetry(self, index: int) -> Telemetry:
        missing = dict.fromkeys(Telemetry.model_fields.keys() - {"memory_total_bytes", "unavailable"}, "unsupported")
        return Telemetry(memory_total_bytes=self._queues[index].device.global_mem_size, unavailable=missing)

    def close(self) -> None:
        self._queues = []

    def classify(self, exc: Exception) -> type[OutOfMemory] | None:
        return OutOfMemory if isinstance(exc, MemoryError) or getattr(exc, "code", None) in NO_MEMORY else None

    def _count(self, index: int, nbytes: int) -> None:
        """OpenCL grants more than there is, so somebody has to count."""
        total = self._queues[index].device.global_mem_size
        with self._lock:
            if self._live[index] + nbytes > total:
                raise MemoryError(f"{nbytes:,} bytes asked for, and {self._live[index]:,} of {total:,} are in use")
            self._live[index] += nbytes

    def _describe(self, index: int, device: Any) -> GPUDevice:
        place = getattr(device, "pci_bus_info_khr", None)  # an extension that not every driver has
        address = place and f"{place.domain:08x}:{place.bus:02x}:{place.device:02x}.{place.function:x}"
        is_gpu = bool(device.type & cl.device_type.GPU)
        return GPUDevice(
            device_id=f"intel:{index}",
            name=device.name,
            vendor="intel" if is_gpu else "unknown",
            backend="intel",
            compute_capability=None,
            memory_bytes=device.global_mem_size,
            memory_available=None,
            compute_units=device.max_compute_units,
            tensor_core_count=None,
            max_threads_per_block=device.max_work_group_size,
            clock_rate_mhz=device.max_clock_frequency or None,
            bandwidth_gbps=None,
            support_level="experimental",
            driver_version=device.driver_version,
            backend_name="pyopencl",
            kind=DeviceKind.GPU if is_gpu else DeviceKind.SOFTWARE,
            identity=device_identity(pci_address=address, fallback=f"intel:{device.name}:{index}"),
        )


def create() -> Driver:
    """What the entry point names. gpurt makes a backend of the driver."""
    return IntelDriver()


create.api_version = 1  # type: ignore[attr-defined]
create.platforms = ("linux", "win32")  # type: ignore[attr-defined]
create.priority = 10  # type: ignore[attr-defined]
create.install_hint = "pip install gpurt-intel"  # type: ignore[attr-defined]
