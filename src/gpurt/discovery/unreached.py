"""Figures of a device that nobody can reach: what was free when it was last seen is not free now. Pure."""

from __future__ import annotations

from typing import Final

from gpurt.types import GPUDevice

LAST_SEEN: Final = "unknown: last seen"


def unreached(device: GPUDevice, seen_at: str) -> GPUDevice:
    """``device`` without the figures of its memory that change; how much it has in all stays true.

    Args:
        seen_at: ISO 8601, UTC: when they were read. Of a device that was out of reach already the first time stands.
    """
    if device.memory_available is None and device.memory_usable_bytes is None:
        return device
    return device.model_copy(
        update={
            "memory_available": None,
            "memory_usable_bytes": None,
            "memory_usable_source": f"{LAST_SEEN} {seen_at}",
        }
    )
