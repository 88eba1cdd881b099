"""Vulkan devices through the ``vulkan`` package: memory and copies.

Memory that a device shares with the host stays mapped, and a copy is one ``memcpy``; any other goes through staging
memory and the device's queue (:mod:`gpurt.backends.vulkan.stream`). Several threads may copy at once: each has a
command pool of its own, and only the submission itself is locked.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from gpurt.backend import GPUBackend
from gpurt.backends.host_budget import HostBudget
from gpurt.backends.host_copy import copy_host
from gpurt.backends.vulkan.device import OpenVulkanDevice
from gpurt.backends.vulkan.instance import VulkanInstance
from gpurt.backends.vulkan.library import closed_nodes, hidden, kind_of, load_library, refusal
from gpurt.backends.vulkan.memory import Memory
from gpurt.backends.vulkan.record import NAME, in_order, masked, record_of
from gpurt.backends.vulkan.stream import Stream
from gpurt.driver import Driver
from gpurt.errors import BackendClosed, GPUError, Unsupported
from gpurt.platforms import current_platform
from gpurt.runtime.backend import DriverBackend
from gpurt.sources.table import Absence
from gpurt.types import Capabilities, DeviceKind, GPUDevice, Telemetry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger("gpurt.vulkan")

_MEMORY: Final = frozenset({"memory_total_bytes", "memory_used_bytes", "memory_free_bytes"})


class VulkanDriver(Driver):
    """Every Vulkan device, discrete before integrated, software last.

    Args:
        vk: what to use in place of the package ``vulkan``, for tests.
        mapped: False copies through staging memory where mapping would do, too, for tests.
        environ: where visibility variables are read; None is the process's own.
        platform: whose install lines a refusal names; None is this one.
        root: where ``/dev`` is found.
    """

    name: ClassVar[str] = NAME
    capabilities = Capabilities(
        threading="queue",
        # One memcpy where memory is mapped; in shorter ones the C library does not write past the caches.
        chunk_bytes=256 << 20,
        # An allocation takes 0.05 to 2 ms, and many drivers bear 4,096 of them.
        pool_bytes=256 << 20,
        telemetry=_MEMORY,
    )

    def __init__(
        self,
        *,
        vk: Any = None,
        mapped: bool = True,
        environ: Mapping[str, str] | None = None,
        platform: str | None = None,
        root: Path = Path("/"),
    ) -> None:
        self._vk = vk
        self._mapped = mapped
        self._environ = environ
        self._platform = platform
        self._root = root
        self._pages = HostBudget(self.name)
        self._instance: VulkanInstance | None = None
        self._devices: list[OpenVulkanDevice] = []
        self._lane = _Lane()

    def open(self) -> Sequence[GPUDevice]:
        platform = self._platform or current_platform()
        vk = load_library(self._vk, platform)
        instance = VulkanInstance.open(vk)
        if isinstance(instance, Absence):
            raise refusal(instance, platform=platform, root=self._root)
        try:
            records = self._describe(instance)
        except BaseException:
            instance.close()
            raise
        self._instance = instance
        return records

    def attach(self, index: int) -> None:
        """Does nothing: the thread's stream, and with the first of all the device, are made by the first copy."""

    def detach(self, index: int) -> None:
        stream = self._lane.streams.pop(index, None)
        if stream is not None:
            stream[0].end(stream[1])

    def alloc(self, index: int, nbytes: int) -> Memory:
        return self._device(index).allocate(nbytes)

    def free(self, index: int, mem: Memory) -> None:
        self._device(index).free(mem)

    def write(self, index: int, mem: Memory, offset: int, src: memoryview) -> None:
        import numpy as np

        self._put(index, mem, offset, np.frombuffer(src, np.uint8))

    def read(self, index: int, mem: Memory, offset: int, dst: memoryview) -> None:
        import numpy as np

        target = np.frombuffer(dst, np.uint8)
        if mem.array is not None and mem.cached:
            copy_host(target, mem.array[offset : offset + len(target)])
            return
        stream = self._stream(index)
        try:
            for start, piece in stream.incoming(mem, offset, len(target)):
                np.copyto(target[start : start + len(piece)], piece)
        finally:
            stream.finish()

    def copy(
        self, src_index: int, src: Memory, src_offset: int, dst_index: int, dst: Memory, dst_offset: int, nbytes: int
    ) -> None:
        """Within a device by its queue; between two through the host, both halves of the way at once."""
        if src_index == dst_index:
            self._stream(src_index).copy(src, src_offset, dst, dst_offset, nbytes)
        elif src.array is not None and src.cached:
            self._put(dst_index, dst, dst_offset, src.array[src_offset : src_offset + nbytes])
        elif dst.array is not None:
            self.read(src_index, src, src_offset, dst.array[dst_offset : dst_offset + nbytes].data)
        else:
            incoming, outgoing = self._stream(src_index), self._stream(dst_index)
            try:
                for start, piece in incoming.incoming(src, src_offset, nbytes):
                    outgoing.put(dst, dst_offset + start, piece)
            finally:
                try:
                    incoming.finish()
                finally:
                    outgoing.finish()

    def sync(self, index: int) -> None:
        if self._device(index).used:
            self._stream(index).sync()

    def host_view(self, index: int, mem: Memory) -> memoryview:
        if mem.array is None:
            raise Unsupported(f"the memory of {self.name}:{index} is not mapped", hint="use copy_into")
        return mem.array.data

    def telemetry(self, index: int) -> Telemetry:
        device = self._device(index)
        assert self._instance is not None
        reading = self._instance.read(device.record.index)
        if reading is None:
            return Telemetry(unavailable=dict.fromkeys(sorted(_MEMORY), "error"))
        total, free = reading.memory_total_bytes, reading.memory_free_bytes
        used = None if total is None or free is None else max(0, total - free)
        values = {"memory_total_bytes": total, "memory_used_bytes": used, "memory_free_bytes": free}
        why = {name: reading.unavailable.get(name, "unsupported") for name, value in values.items() if value is None}
        if used is None:
            why["memory_used_bytes"] = why.get("memory_free_bytes", "unsupported")
        others = sorted(Telemetry.model_fields.keys() - values.keys() - {"unavailable"})
        return Telemetry(**values, unavailable={**why, **dict.fromkeys(others, "unsupported")})

    def classify(self, exc: Exception) -> type[GPUError] | None:
        return kind_of(exc) or super().classify(exc)

    def close(self) -> None:
        devices, self._devices = self._devices, []
        instance, self._instance = self._instance, None
        for device in devices:
            device.close()
        if instance is not None:
            instance.close()

    # Inside

    def _describe(self, instance: VulkanInstance) -> tuple[GPUDevice, ...]:
        self._pages.reset()
        order = in_order(instance.inventory)
        devices = [
            OpenVulkanDevice(instance, record, f"{self.name}:{index}", mapped=self._mapped, pages=self._pages)
            for index, record in enumerate(order)
        ]
        records = [
            record_of(device.record, index, threads_per_block=device.threads_per_block, unfit=device.unfit)
            for index, device in enumerate(devices)
        ]
        environ = os.environ if self._environ is None else self._environ
        shown = masked(records, order, instance.inventory, environ)
        if not any(record.usable for record in shown) and any(record.usable for record in records):
            raise hidden(next(filter(None, (record.state_reason for record in shown))).partition(": ")[2])
        if all(record.kind is DeviceKind.SOFTWARE for record in shown):
            for node in closed_nodes(self._root):
                log.warning("Vulkan shows software devices alone: %s", node)
        self.capabilities = self.capabilities.model_copy(update=_claims(devices))
        self._devices = devices
        return shown

    def _device(self, index: int) -> OpenVulkanDevice:
        if index >= len(self._devices):
            raise BackendClosed(f"{self.name}:{index} is closed")
        return self._devices[index]

    def _stream(self, index: int) -> Stream:
        """The calling thread's."""
        device = self._device(index)
        known = self._lane.streams.get(index)
        if known is None or known[0] is not device:
            known = self._lane.streams[index] = (device, device.stream())
        return known[1]

    def _put(self, index: int, mem: Memory, offset: int, source: NDArray[np.uint8]) -> None:
        if mem.array is not None:
            copy_host(mem.array[offset : offset + len(source)], source)
            return
        stream = self._stream(index)
        try:
            stream.put(mem, offset, source)
        finally:
            stream.finish()


class _Lane(threading.local):
    """What the calling thread has made, by device index, each with the device that it is of."""

    def __init__(self) -> None:
        self.streams: dict[int, tuple[OpenVulkanDevice, Stream]] = {}


def _claims(devices: Sequence[OpenVulkanDevice]) -> dict[str, Any]:
    """What holds for every device; of the largest allocations the largest: each device refuses beyond its own."""
    largest = [device.record.max_allocation_bytes for device in devices]
    told = all(device.record.memory_free_bytes is not None for device in devices)
    return {
        "host_visible": all(device.mapped for device in devices),
        "unified_memory": all(device.record.unified_memory for device in devices),
        "max_allocation_bytes": None if None in largest else max(filter(None, largest)),
        "telemetry": _MEMORY if told else frozenset({"memory_total_bytes"}),
    }


class VulkanBackend(DriverBackend):
    """Vulkan devices as a backend; ``options`` are those of :class:`DriverBackend`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(VulkanDriver(), **options)


def create() -> GPUBackend:
    """What the factory calls."""
    return VulkanBackend()
