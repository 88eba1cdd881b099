"""A thread's own way to the queue of a Vulkan device, with two pieces of staging memory.

Host memory goes through a piece in both directions: while the device copies one, the host copies the other. Each piece
has a command buffer and a fence, so that neither the queue's lock nor the GIL is held while anybody waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from gpurt.backends.vulkan.library import telling
from gpurt.backends.vulkan.memory import Memory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.uint8]

STAGE_BYTES: Final = 4 << 20
"""Of one piece. Smaller ones pay the queue's 0.1 ms too often, larger ones leave the caches between the copies."""
REGION_BYTES: Final = 1 << 30
"""The most that one region of a copy covers: some drivers count in 32 bits."""

_FOREVER: Final = 2**64 - 1


class Owner(Protocol):
    """What a stream needs of its device."""

    vk: Any
    name: str
    handle: Any
    family: int

    def stage(self, nbytes: int) -> Memory: ...
    def destroy(self, memory: Memory) -> None: ...
    def submit(self, work: list[Any], fence: Any) -> None: ...


class Stream:
    """Copies of one thread. Each returns when it is done, but for those of :meth:`put`."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._handle = owner.handle
        vk = owner.vk
        with telling(f"making a command pool on {owner.name}"):
            flags = vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
            info = vk.VkCommandPoolCreateInfo(flags=flags, queueFamilyIndex=owner.family)
            self._pool = vk.vkCreateCommandPool(self._handle, info, None)
        self._slots: list[_Slot] = []
        try:
            self._slots.extend(_Slot(owner, self._pool) for _ in range(2))
        except BaseException:
            self.close()
            raise
        self._turn = 0

    def put(self, memory: Memory, offset: int, source: Array) -> None:
        """Begin to copy host memory to a device; ``source`` may be reused, :meth:`finish` waits for the rest."""
        import numpy as np

        for start in range(0, len(source), STAGE_BYTES):
            piece = source[start : start + STAGE_BYTES]
            slot = self._next()
            slot.wait()
            np.copyto(slot.array(len(piece)), piece)
            slot.copy(slot.memory, 0, memory, offset + start, len(piece))

    def finish(self) -> None:
        """Wait for what was put. After an error, too, nothing of it is under way any more."""
        failure: Exception | None = None
        for slot in self._slots:
            try:
                slot.wait()
            except Exception as exc:
                failure = exc
        if failure is not None:
            raise failure

    def incoming(self, memory: Memory, offset: int, nbytes: int) -> Iterator[tuple[int, Array]]:
        """Pieces of a device's memory, in order, with their places; each is valid until the next one is asked for."""
        begun: list[tuple[int, int, _Slot]] = []
        for start in range(0, nbytes, STAGE_BYTES):
            size = min(STAGE_BYTES, nbytes - start)
            slot = self._next()
            slot.array(size)
            slot.copy(memory, offset + start, slot.memory, 0, size)
            begun.append((start, size, slot))
            if len(begun) == 2:
                yield self._arrived(*begun.pop(0))
        for one in begun:
            yield self._arrived(*one)

    def copy(self, src: Memory, src_offset: int, dst: Memory, dst_offset: int, nbytes: int) -> None:
        """Within one device."""
        slot = self._next()
        slot.copy(src, src_offset, dst, dst_offset, nbytes)
        slot.wait()

    def sync(self) -> None:
        """Wait for everything that any thread has submitted to the queue before."""
        slot = self._next()
        slot.submit([])
        slot.wait()

    def close(self) -> None:
        """Nothing is under way."""
        for slot in self._slots:
            slot.close()
        # With it go its command buffers.
        self._owner.vk.vkDestroyCommandPool(self._handle, self._pool, None)

    def _next(self) -> _Slot:
        self._turn = 1 - self._turn
        return self._slots[self._turn]

    @staticmethod
    def _arrived(start: int, size: int, slot: _Slot) -> tuple[int, Array]:
        slot.wait()
        return start, slot.array(size)


class _Slot:
    """One command buffer with its fence, and a piece of staging memory once one is needed."""

    def __init__(self, owner: Owner, pool: Any) -> None:
        vk = self._vk = owner.vk
        self._owner = owner
        self._handle = owner.handle
        self._busy = False
        self._memory: Memory | None = None
        with telling(f"making a command buffer on {owner.name}"):
            info = vk.VkCommandBufferAllocateInfo(
                commandPool=pool, level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1
            )
            self._commands: Any = vk.vkAllocateCommandBuffers(self._handle, info)[0]
            self._fence: Any = vk.vkCreateFence(self._handle, vk.VkFenceCreateInfo(), None)
        self._begin = vk.VkCommandBufferBeginInfo(flags=vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT)
        # What was copied before, by whatever thread, is there for this copy; what it writes is there for the host.
        self._before = vk.VkMemoryBarrier(
            srcAccessMask=vk.VK_ACCESS_TRANSFER_WRITE_BIT | vk.VK_ACCESS_TRANSFER_READ_BIT,
            dstAccessMask=vk.VK_ACCESS_TRANSFER_WRITE_BIT | vk.VK_ACCESS_TRANSFER_READ_BIT,
        )
        self._after = vk.VkMemoryBarrier(
            srcAccessMask=vk.VK_ACCESS_TRANSFER_WRITE_BIT,
            dstAccessMask=vk.VK_ACCESS_HOST_READ_BIT | vk.VK_ACCESS_HOST_WRITE_BIT,
        )
        self._work = [vk.VkSubmitInfo(pCommandBuffers=[self._commands])]
        self._fences = [self._fence]

    @property
    def memory(self) -> Memory:
        assert self._memory is not None
        return self._memory

    def array(self, size: int) -> Array:
        """The first ``size`` bytes of the piece, which is made by the first call."""
        if self._memory is None:
            self._memory = self._owner.stage(STAGE_BYTES)
        assert self._memory.array is not None
        return self._memory.array[:size]

    def copy(self, src: Memory, src_offset: int, dst: Memory, dst_offset: int, nbytes: int) -> None:
        """Begin, after what is under way in this slot."""
        self.wait()
        vk, commands = self._vk, self._commands
        regions = [
            vk.VkBufferCopy(src_offset + start, dst_offset + start, min(REGION_BYTES, nbytes - start))
            for start in range(0, nbytes, REGION_BYTES)
        ]
        transfer, to_host = vk.VK_PIPELINE_STAGE_TRANSFER_BIT, vk.VK_PIPELINE_STAGE_HOST_BIT
        with telling(f"copying {nbytes:,} bytes on {self._owner.name}"):
            vk.vkBeginCommandBuffer(commands, self._begin)
            vk.vkCmdPipelineBarrier(commands, transfer, transfer, 0, 1, [self._before], 0, None, 0, None)
            vk.vkCmdCopyBuffer(commands, src.buffer, dst.buffer, len(regions), regions)
            vk.vkCmdPipelineBarrier(commands, transfer, to_host, 0, 1, [self._after], 0, None, 0, None)
            vk.vkEndCommandBuffer(commands)
        self.submit(self._work)

    def submit(self, work: list[Any]) -> None:
        with telling(f"submitting to the queue of {self._owner.name}"):
            self._owner.submit(work, self._fence)
        self._busy = True

    def wait(self) -> None:
        """Until nothing is under way in this slot."""
        if not self._busy:
            return
        vk, handle = self._vk, self._handle
        with telling(f"waiting for the queue of {self._owner.name}"):
            vk.vkWaitForFences(handle, 1, self._fences, True, _FOREVER)
            vk.vkResetFences(handle, 1, self._fences)
        self._busy = False

    def close(self) -> None:
        self._vk.vkDestroyFence(self._handle, self._fence, None)
        memory, self._memory = self._memory, None
        if memory is not None:
            self._owner.destroy(memory)
