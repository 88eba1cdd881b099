"""OpenCL devices through pyopencl: any vendor's GPUs and accelerators, and the host's processor on request.

One context a device, made by the first call that needs it, and one queue in order a thread and device: calls of
different threads overlap. Every call waits for its command. Memory is there when ``alloc`` returns, also with drivers
that put it off until it is first used.

There is no view of device memory: OpenCL forbids commands on a buffer while the host has it mapped.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from gpurt.backend import GPUBackend
from gpurt.backends.opencl import kernels as opencl_kernels
from gpurt.backends.opencl import refusals as opencl_refusals
from gpurt.backends.opencl.calls import OpenCLCalls
from gpurt.backends.opencl.memory import OpenCLBudget, OpenCLMemory
from gpurt.driver import Driver
from gpurt.errors import DeviceLost, GPUError, InvalidHandle, OutOfMemory, OutOfRange, ReasonCode
from gpurt.runtime.backend import DriverBackend
from gpurt.sources.host_identity import host_fingerprint, pci_numa_node
from gpurt.sources.opencl_identity import backend_name_of, identity_of, usable_devices, vendor_of
from gpurt.sources.opencl_properties import OpenClDevice, read_opencl
from gpurt.sources.opencl_query import query_opencl
from gpurt.sources.table import Absence, load_package
from gpurt.types import Capabilities, DeviceKind, GPUDevice, Telemetry

# Error codes of cl.h. -5, OUT_OF_RESOURCES, is not among them: drivers give it for anything.
_MEANINGS: Final[Mapping[int, type[GPUError]]] = {
    -2: DeviceLost,  # DEVICE_NOT_AVAILABLE
    -4: OutOfMemory,  # MEM_OBJECT_ALLOCATION_FAILURE
    -6: OutOfMemory,  # OUT_OF_HOST_MEMORY
    -30: OutOfRange,  # INVALID_VALUE: of a copy, a range outside the buffer
    -38: InvalidHandle,  # INVALID_MEM_OBJECT
    -61: OutOfMemory,  # INVALID_BUFFER_SIZE: more than CL_DEVICE_MAX_MEM_ALLOC_SIZE
}

_STAGE_BYTES: Final = 16 << 20
"""Host memory of a copy between two devices."""

_MEMORY_FIELDS: Final = frozenset({"memory_total_bytes", "memory_used_bytes", "memory_free_bytes"})


class OpenCLDriver(Driver):
    """Every device of every platform: GPUs, accelerators, then processors, which are software devices.

    Args:
        cl: the package; default: ``pyopencl``.
        environ: looked at to explain an empty list; selects nothing. Default: the process's own.
        platform: as ``sys.platform`` has it, for advice.
        root: where ``/dev``, ``/proc`` and ``/sys`` are found.
    """

    name: ClassVar[str] = "opencl"
    capabilities = Capabilities(
        threading="queue",
        kernels=frozenset({opencl_kernels.LANGUAGE}),
        # Fresh memory costs a round trip to the device, on the host's own also page faults.
        pool_bytes=256 << 20,
        # Copies in OpenCL may begin and end at any byte; CL_DEVICE_MEM_BASE_ADDR_ALIGN is about parts of buffers.
        alignment_bytes=1,
        # 10 to 25 ms over PCIe. With pocl one memcpy: in shorter ones the C library does not write past the caches.
        chunk_bytes=256 << 20,
        telemetry=_MEMORY_FIELDS,
    )

    def __init__(
        self,
        *,
        cl: Any = None,
        environ: Mapping[str, str] | None = None,
        platform: str = sys.platform,
        root: Path = Path("/"),
    ) -> None:
        self._package, self._platform, self._root = cl, platform, root
        self._environ = os.environ if environ is None else environ
        self._lock = threading.Lock()
        self._budget = OpenCLBudget(root)
        self._cl: Any = None
        self._calls: Any = None
        self._devices: list[Any] = []
        self._contexts: dict[int, Any] = {}
        # By thread, not in threading.local(): close() must let go of them all.
        self._queues: dict[tuple[int, int], Any] = {}

    def open(self) -> Sequence[GPUDevice]:
        cl = self._package or load_package("pyopencl")
        if isinstance(cl, Absence):
            raise opencl_refusals.absent(cl, self._platform)
        try:
            calls = OpenCLCalls(cl)
        except OSError as exc:  # the loader of Windows comes with a driver
            raise opencl_refusals.absent(Absence(ReasonCode.NO_DRIVER, str(exc)), self._platform) from exc
        calls.load_drivers()
        table = query_opencl(cl)
        inventory = read_opencl(table)
        if inventory.absence is not None:
            raise opencl_refusals.absent(inventory.absence, self._platform)
        found = usable_devices(inventory)
        if not found:
            raise opencl_refusals.nothing_usable(inventory, table["platforms"], environ=self._environ, root=self._root)
        platforms = cl.get_platforms()
        self._cl, self._calls = cl, calls
        self._devices = [platforms[device.platform_index].get_devices()[device.index] for device in found]
        self._budget.open(found)
        largest = [device.max_allocation_bytes for device in found]
        self.capabilities = type(self).capabilities.model_copy(
            # Of the device that takes most; the others refuse by themselves.
            update={"max_allocation_bytes": None if None in largest else max(filter(None, largest))}
        )
        return tuple(self._describe(index, device) for index, device in enumerate(found))

    def attach(self, index: int) -> None:
        """Does nothing: a thread that only reads sensors must not cost a context."""

    def detach(self, index: int) -> None:
        self._queues.pop((threading.get_ident(), index), None)

    def alloc(self, index: int, nbytes: int) -> OpenCLMemory:
        cl = self._cl
        self._budget.take(index, nbytes)
        try:
            flags = cl.mem_flags.READ_WRITE
            if self._budget.on_host(index):
                # Makes the library allocate, and refuse, at once: pocl ends the process when it finds out later.
                flags |= cl.mem_flags.ALLOC_HOST_PTR
            buffer = cl.Buffer(self._context(index), flags, nbytes)
            try:
                undefined = cl.mem_migration_flags.CONTENT_UNDEFINED
                cl.enqueue_migrate_mem_objects(self._queue(index), [buffer], flags=undefined).wait()
            except BaseException:
                self._calls.release(buffer)
                raise
        except BaseException:
            self._budget.give_back(index, nbytes)
            raise
        return OpenCLMemory(buffer, nbytes)

    def free(self, index: int, mem: OpenCLMemory) -> None:
        with self._lock:
            buffer = mem.surrender()
        self._budget.give_back(index, mem.nbytes)
        self._calls.release(buffer)

    def write(self, index: int, mem: OpenCLMemory, offset: int, src: memoryview) -> None:
        self._cl.enqueue_copy(self._queue(index), mem.buffer, src, dst_offset=offset, is_blocking=True)

    def read(self, index: int, mem: OpenCLMemory, offset: int, dst: memoryview) -> None:
        self._cl.enqueue_copy(self._queue(index), dst, mem.buffer, src_offset=offset, is_blocking=True)

    def copy(
        self,
        src_index: int,
        src: OpenCLMemory,
        src_offset: int,
        dst_index: int,
        dst: OpenCLMemory,
        dst_offset: int,
        nbytes: int,
    ) -> None:
        """Within one device directly; between two through the host, since each has a context of its own."""
        copy, queue = self._cl.enqueue_copy, self._queue(src_index)
        source, target = src.buffer, dst.buffer
        if src_index == dst_index:
            offsets = {"src_offset": src_offset, "dst_offset": dst_offset}
            copy(queue, target, source, **offsets, byte_count=nbytes).wait()
            return
        import numpy as np

        stage, other = np.empty(min(nbytes, _STAGE_BYTES), np.uint8), self._queue(dst_index)
        for done in range(0, nbytes, _STAGE_BYTES):
            part = stage[: nbytes - done]
            copy(queue, part, source, src_offset=src_offset + done, is_blocking=True)
            copy(other, target, part, dst_offset=dst_offset + done, is_blocking=True)

    def sync(self, index: int) -> None:
        for (_, device), queue in list(self._queues.items()):
            if device == index:
                queue.finish()

    def compile(self, index: int, source: str, name: str) -> opencl_kernels.OpenCLKernel:
        return opencl_kernels.build(self._context(index), self._devices[index], source, name)

    def launch(
        self,
        index: int,
        kernel: opencl_kernels.OpenCLKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Any],
    ) -> None:
        values = [argument.buffer if isinstance(argument, OpenCLMemory) else argument for argument in args]
        opencl_kernels.launch(self._queue(index), kernel, grid, block, values)

    def telemetry(self, index: int) -> Telemetry:
        total, free = self._budget.reading(index)
        if free is None:
            free = self._free_of_amd(index, total)
        known = {"memory_total_bytes": total, "memory_free_bytes": free}
        if total is not None and free is not None:
            known["memory_used_bytes"] = total - free
        missing = Telemetry.model_fields.keys() - {"unavailable"} - {key for key, it in known.items() if it is not None}
        return Telemetry(**known, unavailable=dict.fromkeys(sorted(missing), "unsupported"))

    def close(self) -> None:
        self._queues.clear()
        with self._lock:
            addresses = [context.int_ptr for context in self._contexts.values()]
            self._contexts.clear()
        for address in addresses:
            self._calls.release_context(address)
        self._devices = []

    def classify(self, exc: Exception) -> type[GPUError] | None:
        # pyopencl's errors share a base with nobody, and its MemoryError is not Python's.
        if type(exc).__module__.startswith("pyopencl"):
            return _MEANINGS.get(getattr(exc, "code", 0))
        return super().classify(exc)

    def _context(self, index: int) -> Any:
        context = self._contexts.get(index)
        if context is None:
            with self._lock:
                context = self._contexts.get(index)
                if context is None:
                    context = self._contexts[index] = self._calls.create_context(self._devices[index])
        return context

    def _queue(self, index: int) -> Any:
        key = threading.get_ident(), index
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = self._cl.CommandQueue(self._context(index))
        return queue

    def _free_of_amd(self, index: int, total: int | None) -> int | None:
        """By AMD's extension, which tells KiB, and in a second number the largest block."""
        with contextlib.suppress(AttributeError, self._cl.Error):
            free = int(self._devices[index].global_free_memory_amd[0]) << 10
            return free if total is None or free <= total else None
        return None

    def _describe(self, index: int, device: OpenClDevice) -> GPUDevice:
        vendor = vendor_of(device) or "unknown"
        total, free = self._budget.reading(index)
        shared = f"host:{host_fingerprint(self._root)}" if self._budget.on_host(index) else None
        return GPUDevice(
            device_id=f"{self.name}:{index}",
            name=device.name or f"{vendor} device",
            vendor=vendor,
            backend=self.name,
            compute_capability=None,
            memory_bytes=total,
            memory_available=device.memory_free_bytes if free is None else free,
            compute_units=device.compute_units,
            tensor_core_count=None,
            max_threads_per_block=self._devices[index].max_work_group_size,
            clock_rate_mhz=device.max_clock_mhz,
            bandwidth_gbps=None,
            support_level="experimental",
            driver_version=device.driver_version,
            backend_name=backend_name_of(device),
            identity=identity_of(device),
            kind=device.kind,
            memory_pool_id=shared,
            unified_memory=device.kind is DeviceKind.INTEGRATED_GPU,
            backends=(self.name,),
            numa_node=pci_numa_node(device.pci_address, self._root) if device.pci_address else None,
        )


class OpenCLBackend(DriverBackend):
    """Every OpenCL device; ``options`` are those of :class:`gpurt.runtime.backend.DriverBackend`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(OpenCLDriver(), **options)


def create() -> GPUBackend:
    """Entry point: the OpenCL devices of this host."""
    return OpenCLBackend()
