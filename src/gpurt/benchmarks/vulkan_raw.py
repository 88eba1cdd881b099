"""Bare Vulkan: ``memcpy`` into mapped memory where the host shares it, and elsewhere through staging memory."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpurt.backends.host_budget import HostBudget
from gpurt.backends.vulkan.device import OpenVulkanDevice
from gpurt.backends.vulkan.instance import VulkanInstance
from gpurt.backends.vulkan.library import load_library
from gpurt.backends.vulkan.memory import Memory
from gpurt.backends.vulkan.record import in_order
from gpurt.benchmarks.library_raw import LibraryRaw
from gpurt.benchmarks.raw import Blocking, Direction, Way, bytes_of
from gpurt.errors import GPUError
from gpurt.platforms import current_platform
from gpurt.sources.table import Absence

if TYPE_CHECKING:
    from gpurt.benchmarks.raw import Bytes

_FOREVER: Final = 2**64 - 1


class RawVulkan(LibraryRaw):
    mapped = True
    """False goes through staging memory where mapping would do, too, for tests."""
    _instance: VulkanInstance | None = None
    _opened: OpenVulkanDevice | None = None

    def writer(self, src: memoryview) -> Blocking:
        if self._mapping is not None:
            return super().writer(src)
        return partial(self._lane("to device").write, bytes_of(src))

    def reader(self, dst: memoryview) -> Blocking:
        if self._mapping is not None:
            return super().reader(dst)
        return partial(self._lane("from device").read, bytes_of(dst))

    def allocations(self, nbytes: int) -> list[Way]:
        device = self._device
        return [Way("vkAllocateMemory, vkFreeMemory", lambda: device.free(device.allocate(nbytes)))]

    def synchronize(self) -> None:
        self._lane("to device").synchronize()

    def _open(self) -> None:
        self._lanes: dict[Direction, _Lane] = {}
        instance = VulkanInstance.open(load_library(None, current_platform()))
        if isinstance(instance, Absence):
            raise GPUError(instance.message, backend="vulkan")
        self._instance = instance
        record, name = in_order(instance.inventory)[self.index], self.device.device_id
        self._device = OpenVulkanDevice(instance, record, name, mapped=self.mapped, pages=HostBudget("vulkan"))
        self._opened = self._device
        self._block = self._device.allocate(self.nbytes)
        self._mapping = self._block.array
        self.copy_name = "staging, vkCmdCopyBuffer" if self._mapping is None else "np.copyto, mapped memory"

    def _close(self) -> None:
        if self._opened is not None:
            for lane in self._lanes.values():
                lane.close()
            self._opened.close()
        if self._instance is not None:
            self._instance.close()

    def _made_memory(self) -> Bytes:
        if self._mapping is None:
            return super()._made_memory()
        self._mapping.fill(1)
        return self._mapping

    def _within(self, nbytes: int) -> Way:
        return Way("vkCmdCopyBuffer", partial(self._lane("to device").within, nbytes))

    @property
    def _best_name(self) -> str:
        return "staged already, vkCmdCopyBuffer"

    def _best(self, direction: Direction, host: memoryview) -> Blocking:
        return partial(self._lane(direction).move, len(host))

    def _lane(self, direction: Direction) -> _Lane:
        if direction not in self._lanes:
            self._lanes[direction] = _Lane(self._device, self._block, direction)
        return self._lanes[direction]


class _Lane:
    """One direction: a command buffer, and staging memory once it is needed. One call at a time."""

    def __init__(self, device: OpenVulkanDevice, block: Memory, direction: Direction) -> None:
        vk, handle = device.vk, device.handle
        self._device, self._block, self._direction = device, block, direction
        self._lock = threading.RLock()
        self._staged: Memory | None = None
        flags = vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
        info = vk.VkCommandPoolCreateInfo(flags=flags, queueFamilyIndex=device.family)
        self._pool = vk.vkCreateCommandPool(handle, info, None)
        level = vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY
        wanted = vk.VkCommandBufferAllocateInfo(commandPool=self._pool, level=level, commandBufferCount=1)
        self._commands = vk.vkAllocateCommandBuffers(handle, wanted)[0]
        self._fence = vk.vkCreateFence(handle, vk.VkFenceCreateInfo(), None)

    def write(self, array: Bytes) -> None:
        import numpy as np

        with self._lock:
            np.copyto(self._staging()[: len(array)], array)
            self.move(len(array))

    def read(self, array: Bytes) -> None:
        import numpy as np

        with self._lock:
            self.move(len(array))
            np.copyto(array, self._staging()[: len(array)])

    def move(self, nbytes: int) -> None:
        """Between staging memory and the device."""
        with self._lock:
            self._staging()
            assert self._staged is not None
            sides = (self._staged, self._block) if self._direction == "to device" else (self._block, self._staged)
            self._copy(*sides, 0, nbytes)

    def within(self, nbytes: int) -> None:
        with self._lock:
            self._copy(self._block, self._block, nbytes, nbytes)

    def synchronize(self) -> None:
        with self._lock:
            self._submit([])

    def close(self) -> None:
        vk, handle = self._device.vk, self._device.handle
        vk.vkDestroyFence(handle, self._fence, None)
        vk.vkDestroyCommandPool(handle, self._pool, None)
        if self._staged is not None:
            self._device.destroy(self._staged)

    def _staging(self) -> Bytes:
        if self._staged is None:
            self._staged = self._device.stage(self._block.nbytes)
        assert self._staged.array is not None
        return self._staged.array

    def _copy(self, src: Memory, dst: Memory, dst_offset: int, nbytes: int) -> None:
        vk, commands = self._device.vk, self._commands
        once = vk.VkCommandBufferBeginInfo(flags=vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT)
        to_host = vk.VkMemoryBarrier(
            srcAccessMask=vk.VK_ACCESS_TRANSFER_WRITE_BIT, dstAccessMask=vk.VK_ACCESS_HOST_READ_BIT
        )
        stages = vk.VK_PIPELINE_STAGE_TRANSFER_BIT, vk.VK_PIPELINE_STAGE_HOST_BIT
        vk.vkBeginCommandBuffer(commands, once)
        vk.vkCmdCopyBuffer(commands, src.buffer, dst.buffer, 1, [vk.VkBufferCopy(0, dst_offset, nbytes)])
        vk.vkCmdPipelineBarrier(commands, *stages, 0, 1, [to_host], 0, None, 0, None)
        vk.vkEndCommandBuffer(commands)
        self._submit([vk.VkSubmitInfo(pCommandBuffers=[commands])])

    def _submit(self, work: list[Any]) -> None:
        vk, handle = self._device.vk, self._device.handle
        self._device.submit(work, self._fence)
        vk.vkWaitForFences(handle, 1, [self._fence], True, _FOREVER)
        vk.vkResetFences(handle, 1, [self._fence])
