"""The memory that a node offers to exo's placement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol, Self, TypeVar

from gpurt.integrations.exo.figures import HasFigures
from gpurt.types import DeviceKind

ENGINE_DEVICES: Final = frozenset({"cuda"})
"""Backends of devices with memory of their own on which one of exo's engines computes. Where a node has another card,
exo computes on its processor, in the host's memory."""

_WITHOUT_OWN: Final = frozenset({DeviceKind.CPU.value, DeviceKind.SOFTWARE.value})


class Memory(Protocol):
    """exo's ``Memory``."""

    @property
    def in_bytes(self) -> int: ...


class MemoryUsage(Protocol):
    """exo's ``MemoryUsage``."""

    @property
    def ram_total(self) -> Memory: ...
    @property
    def ram_available(self) -> Memory: ...
    @property
    def swap_total(self) -> Memory: ...
    @property
    def swap_available(self) -> Memory: ...
    @classmethod
    def from_bytes(cls, *, ram_total: int, ram_available: int, swap_total: int, swap_available: int) -> Self: ...


Usage = TypeVar("Usage", bound=MemoryUsage)


def placement_memory(
    memory: Usage, devices: Iterable[HasFigures], *, backends: frozenset[str] = ENGINE_DEVICES
) -> Usage:
    """``memory`` with the figures of the accelerator that the node computes on in place of the host's.

    That is the device with the most usable memory among the healthy ones with memory of their own: a runner of exo
    computes on one device, and what two of them have together is no place for one shard. Unchanged where there is no
    such device: processors, unified memory (the host's figures are that device's), or nobody tells.

    Args:
        backends: whose devices count.
    """
    own = [
        (each.memory_usable_bytes, each.memory_total_bytes)
        for each in devices
        if each.healthy and not each.unified and each.kind not in _WITHOUT_OWN and each.backend in backends
    ]
    known = [(usable, total) for usable, total in own if usable is not None]
    if not known:
        return memory
    usable, total = max(known, key=lambda pair: pair[0])
    return type(memory).from_bytes(
        ram_total=usable if total is None else total,
        ram_available=usable,
        swap_total=memory.swap_total.in_bytes,
        swap_available=memory.swap_available.in_bytes,
    )
