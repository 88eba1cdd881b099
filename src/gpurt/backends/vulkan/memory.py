"""Vulkan's memory: which of its types to allocate from, what one allocation is, and how much there may be in all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpurt.backends.host_budget import HostBudget
from gpurt.sources import host
from gpurt.sources.vulkan_properties import VulkanDevice

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# VkMemoryPropertyFlagBits of vulkan_core.h.
DEVICE_LOCAL: Final = 1
HOST_VISIBLE: Final = 2
HOST_COHERENT: Final = 4
HOST_CACHED: Final = 8
_ORDINARY: Final = DEVICE_LOCAL | HOST_VISIBLE | HOST_COHERENT | HOST_CACHED
"""Types with other flags are for images on tiles, protected content or debugging."""

MAPPED: Final = DEVICE_LOCAL | HOST_VISIBLE | HOST_COHERENT

MEASURED_S: Final = 0.1
"""How long what the driver and the host said of free memory holds. Asking takes 1.5 ms, an allocation 0.05 ms."""


@dataclass(frozen=True, slots=True)
class MemoryType:
    """One of ``VkPhysicalDeviceMemoryProperties.memoryTypes``."""

    number: int
    flags: int
    heap: int


def choose(types: Sequence[MemoryType], *, needed: int, wanted: int = 0, unwanted: int = 0) -> list[MemoryType]:
    """The types that have all ``needed`` flags, best first: with those ``wanted`` and without those ``unwanted``."""
    fit = [one for one in types if one.flags & needed == needed and not one.flags & ~_ORDINARY]
    return sorted(fit, key=lambda one: ((wanted & ~one.flags).bit_count(), (unwanted & one.flags).bit_count()))


@dataclass(slots=True, eq=False)
class Memory:
    """One buffer with the memory behind it: what a driver's token is."""

    buffer: Any
    block: Any
    nbytes: int
    """As asked for: what drivers round it up to is not counted."""
    heap: int
    array: NDArray[np.uint8] | None = None
    """The memory itself, where it is mapped."""
    cached: bool = False
    """Reading ``array`` is as quick as reading any memory; else it is a tenth of that, or less."""


class MemoryBudget:
    """What may still be allocated of each heap of one device. Any thread.

    Kept here because drivers grant more than there is: the software ones any amount, until the host's kernel kills
    somebody who touches it.

    Args:
        name: of the device, for messages.
        sizes: bytes of each heap.
        read: the device as it is now.
        most: how many allocations the driver bears.
        pages: where the device's memory is ordinary pages of the host, what is left of those.
        integrated: its memory is the host's, taken when it is allocated.
    """

    def __init__(
        self,
        name: str,
        sizes: Sequence[int],
        read: Callable[[], VulkanDevice | None],
        *,
        most: int,
        pages: HostBudget | None = None,
        integrated: bool = False,
    ) -> None:
        self._name, self._sizes, self._read, self._most = name, tuple(sizes), read, most
        self._pages, self._integrated = pages, integrated
        self._lock = threading.Lock()
        self._live = [0] * len(self._sizes)
        self._count = 0
        self._limits = list(self._sizes)
        """By heap: what all live allocations together may come to, as it was measured."""
        self._measured_at = float("-inf")

    def take(self, heap: int, nbytes: int) -> None:
        """Count ``nbytes`` of ``heap`` as given out; :meth:`give_back` them if the driver refuses.

        Raises:
            MemoryError: there are not so many.
        """
        with self._lock:
            if self._count >= self._most:
                raise MemoryError(f"{self._name} holds {self._count:,} allocations, the most that its driver bears")
            if nbytes > self._free(heap) and nbytes > (free := self._free(heap, fresh=True)):
                raise MemoryError(
                    f"{nbytes:,} bytes asked for on {self._name}, {max(0, free):,} of {self._sizes[heap]:,} left for "
                    "this process; free handles or allocate less"
                )
            if self._pages is not None:
                self._pages.take(0, nbytes)
            self._live[heap] += nbytes
            self._count += 1

    def give_back(self, heap: int, nbytes: int) -> None:
        with self._lock:
            if self._pages is not None:
                self._pages.give_back(0, nbytes)
            self._live[heap] -= nbytes
            self._count -= 1

    def _free(self, heap: int, *, fresh: bool = False) -> int:
        now = time.monotonic()
        if fresh or now - self._measured_at > MEASURED_S:
            self._measure()
            self._measured_at = now
        return self._limits[heap] - self._live[heap]

    def _measure(self) -> None:
        device = self._read()
        heaps = device.heaps if device is not None and len(device.heaps) == len(self._sizes) else ()
        host_bytes = host.memory_budget().usable_bytes if self._integrated else None
        for number, size in enumerate(self._sizes):
            limits = [size]
            if heaps and (budget := heaps[number].budget_bytes) is not None:
                limits.append(budget - (heaps[number].usage_bytes or 0) + self._live[number])
            if host_bytes is not None:
                limits.append(host_bytes + self._live[number])
            self._limits[number] = min(limits)
