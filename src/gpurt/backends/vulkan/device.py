"""One Vulkan device: its VkDevice, made when it is first needed, its queue, its allocations and its streams."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Final

from gpurt.backends.host_budget import HostBudget
from gpurt.backends.vulkan.instance import VulkanInstance
from gpurt.backends.vulkan.library import kind_of, telling
from gpurt.backends.vulkan.memory import (
    DEVICE_LOCAL,
    HOST_CACHED,
    HOST_COHERENT,
    HOST_VISIBLE,
    MAPPED,
    Memory,
    MemoryBudget,
    MemoryType,
    choose,
)
from gpurt.backends.vulkan.stream import Stream
from gpurt.errors import BackendClosed, OutOfMemory, OutOfRange
from gpurt.sources.vulkan_properties import VulkanDevice
from gpurt.types import DeviceKind

_OTHERS: Final = 64
"""Allocations that are left to streams and to the driver itself, out of 4,096 and more."""
# VkQueueFlagBits of vulkan_core.h; either implies that the queue can copy, and may leave that unsaid.
_GRAPHICS, _COMPUTE = 1, 2

_NO_FAMILY: Final = "unsupported_device: no queue of it can copy"
_NO_MEMORY: Final = "unsupported_device: it has no memory that a program may allocate"


class OpenVulkanDevice:
    """A device of an open instance. Any thread.

    Args:
        name: ``vulkan:0``, for messages.
        mapped: keep memory that the host shares with the device mapped, and copy without staging.
        pages: what is left of the host's memory for devices that are software.
    """

    def __init__(
        self, instance: VulkanInstance, record: VulkanDevice, name: str, *, mapped: bool, pages: HostBudget
    ) -> None:
        vk = self.vk = instance.vk
        self.name = name
        self.record = record
        self._instance = instance
        self._physical = instance.physical[record.index]
        properties = vk.vkGetPhysicalDeviceProperties(self._physical)
        limits = properties.limits  # a part of it, which does not keep the whole alive
        self.threads_per_block: int | None = limits.maxComputeWorkGroupInvocations or None
        self.family = _family(vk, self._physical)
        memory = vk.vkGetPhysicalDeviceMemoryProperties(self._physical)
        types = [memory.memoryTypes[n] for n in range(memory.memoryTypeCount)]
        self._types = [MemoryType(n, one.propertyFlags, one.heapIndex) for n, one in enumerate(types)]
        # A window into a card's memory is of no use here: reading through it is a hundred times as slow as a copy.
        self.mapped = mapped and record.unified_memory and bool(choose(self._types, needed=MAPPED))
        self.unfit = _NO_FAMILY if self.family < 0 else None if choose(self._types, needed=DEVICE_LOCAL) else _NO_MEMORY
        self._budget = MemoryBudget(
            name,
            [memory.memoryHeaps[n].size for n in range(memory.memoryHeapCount)],
            lambda: instance.read(record.index),
            most=limits.maxMemoryAllocationCount - _OTHERS,
            pages=pages if record.kind is DeviceKind.SOFTWARE else None,
            integrated=record.kind is DeviceKind.INTEGRATED_GPU,
        )
        self._lock = threading.Lock()
        self._queue_lock = threading.Lock()
        self._handle: Any = None
        self._queue: Any = None
        self._live: set[Memory] = set()
        self._streams: set[Stream] = set()
        self.closed = False

    @property
    def handle(self) -> Any:
        """The VkDevice. Made by the first call: a process that reads sensors alone should cost no device memory."""
        if self._handle is None or self.closed:
            with self._lock:
                if self.closed:
                    raise BackendClosed(f"{self.name} is closed")
                if self._handle is None:
                    self._make()
        return self._handle

    @property
    def used(self) -> bool:
        """Whether there is a VkDevice, on which something may be under way."""
        return self._handle is not None

    def allocate(self, nbytes: int) -> Memory:
        """Memory of the device, mapped where ``mapped`` says so.

        Raises:
            MemoryError, OutOfRange: more than there is, or than the driver gives in one piece.
        """
        _ = self.handle  # made by now, and only then it is known which types a buffer may have
        if self.mapped:
            types = choose(self._types, needed=MAPPED, wanted=HOST_CACHED)
        else:
            types = choose(self._types, needed=DEVICE_LOCAL, unwanted=HOST_VISIBLE)
        refusal: Exception | None = None
        for one in types:
            try:
                self._budget.take(one.heap, nbytes)
            except MemoryError as exc:
                refusal = refusal or exc
                continue
            try:
                memory = self._make_memory(nbytes, one, mapped=self.mapped)
            except BaseException as exc:
                self._budget.give_back(one.heap, nbytes)
                if kind_of(exc) is not OutOfMemory or not isinstance(exc, Exception):
                    raise
                refusal = exc
                continue
            with self._lock:
                self._live.add(memory)
            return memory
        assert refusal is not None
        raise refusal

    def free(self, memory: Memory) -> None:
        """Nothing submitted on it is outstanding. What a closed device had is gone already."""
        with self._lock:
            if self.closed or memory not in self._live:
                return
            self._live.remove(memory)
        self.destroy(memory)
        self._budget.give_back(memory.heap, memory.nbytes)

    def stage(self, nbytes: int) -> Memory:
        """Memory of the host that the device can copy to and from. Not of the budget: so little must always be had."""
        types = choose(self._types, needed=HOST_VISIBLE | HOST_COHERENT, wanted=HOST_CACHED, unwanted=DEVICE_LOCAL)
        return self._make_memory(nbytes, types[0], mapped=True)

    def destroy(self, memory: Memory) -> None:
        buffer, memory.buffer, memory.array = memory.buffer, None, None
        self.vk.vkDestroyBuffer(self._handle, buffer, None)
        self.vk.vkFreeMemory(self._handle, memory.block, None)

    def stream(self) -> Stream:
        """A new one, for the calling thread."""
        stream = Stream(self)
        with self._lock:
            self._streams.add(stream)
        return stream

    def end(self, stream: Stream) -> None:
        """Nothing of it is under way."""
        with self._lock:
            if self.closed or stream not in self._streams:
                return
            self._streams.remove(stream)
        stream.close()

    def submit(self, work: list[Any], fence: Any) -> None:
        with self._queue_lock:
            self.vk.vkQueueSubmit(self._queue, len(work), work, fence)

    def close(self) -> None:
        """Destroy what is left: of a device that was lost nobody frees the allocations. Nothing runs on it any more."""
        with self._lock:
            self.closed = True
        if self._handle is None:
            return
        with contextlib.suppress(Exception):  # a lost device has nothing to wait for
            self.vk.vkDeviceWaitIdle(self._handle)
        for stream in self._streams:
            stream.close()
        for memory in self._live:
            self.destroy(memory)
        self.vk.vkDestroyDevice(self._handle, None)
        self._handle = None
        self._streams.clear()
        self._live.clear()

    def _make(self) -> None:
        vk = self.vk
        queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=self.family, queueCount=1, pQueuePriorities=[1.0])
        with telling(f"opening {self.name}"):
            handle = vk.vkCreateDevice(self._physical, vk.VkDeviceCreateInfo(pQueueCreateInfos=[queue]), None)
            self._queue = vk.vkGetDeviceQueue(handle, self.family, 0)
            # Which types a buffer may have is the same for all buffers of one usage.
            probe = vk.vkCreateBuffer(handle, self._buffer_info(1), None)
            fitting: int = vk.vkGetBufferMemoryRequirements(handle, probe).memoryTypeBits
            vk.vkDestroyBuffer(handle, probe, None)
        self._types = [one for one in self._types if fitting >> one.number & 1]
        self._handle = handle

    def _buffer_info(self, nbytes: int) -> Any:
        vk = self.vk
        usage = vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        return vk.VkBufferCreateInfo(
            size=nbytes,
            usage=usage | vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT,
            sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE,
        )

    def _make_memory(self, nbytes: int, kind: MemoryType, *, mapped: bool) -> Memory:
        vk, handle = self.vk, self.handle
        largest = self.record.max_allocation_bytes
        if largest is not None and nbytes > largest:
            raise OutOfRange(f"the largest single allocation on {self.name} is {largest:,} bytes, {nbytes:,} asked for")
        buffer = block = None
        with telling(f"allocating {nbytes:,} bytes on {self.name}"):
            try:
                buffer = vk.vkCreateBuffer(handle, self._buffer_info(nbytes), None)
                size: int = vk.vkGetBufferMemoryRequirements(handle, buffer).size
                info = vk.VkMemoryAllocateInfo(allocationSize=size, memoryTypeIndex=kind.number)
                block = vk.vkAllocateMemory(handle, info, None)
                vk.vkBindBufferMemory(handle, buffer, block, 0)
                memory = Memory(buffer, block, nbytes, kind.heap)
                if mapped:
                    import numpy as np

                    memory.array = np.frombuffer(vk.vkMapMemory(handle, block, 0, size, 0), np.uint8)[:nbytes]
                    memory.cached = bool(kind.flags & HOST_CACHED)
                return memory
            except BaseException:
                if buffer is not None:
                    vk.vkDestroyBuffer(handle, buffer, None)
                if block is not None:
                    vk.vkFreeMemory(handle, block, None)
                raise


def _family(vk: Any, physical: Any) -> int:
    """The first family of queues that can copy anything, or -1."""
    families = vk.vkGetPhysicalDeviceQueueFamilyProperties(physical)
    fit = (n for n, one in enumerate(families) if one.queueFlags & (_GRAPHICS | _COMPUTE))
    return next(fit, -1)
