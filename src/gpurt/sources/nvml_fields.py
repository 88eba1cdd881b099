"""Calls of NVML one by one: what cannot be read costs its field and leaves the reason.

Internal to :mod:`gpurt.sources.nvml`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurt.sources.host_memory import memory_budget

_log = logging.getLogger("gpurt.sources.nvml")

# nvmlReturn_t of nvml.h
NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED = 3, 4, 13, 15, 16
ARGUMENT_VERSION_MISMATCH = 25

_REASONS = {NOT_SUPPORTED: "unsupported", FUNCTION_NOT_FOUND: "unsupported", ARGUMENT_VERSION_MISMATCH: "unsupported"}
_REASONS[NO_PERMISSION] = "no_permission"

_MEMORY_V2 = 0x02000028  # nvmlMemory_v2 of nvml.h
_MEMORY_FIELDS = ("memory_total_bytes", "memory_free_bytes", "memory_used_bytes", "memory_reserved_bytes")
IN_A_PROCESSOR = frozenset({"3.2", "5.3", "6.2", "7.2", "8.7", "10.1", "11.0", "12.1"})
"""Compute capabilities, by NVIDIA's list of CUDA GPUs, of those that are part of a processor and work in its memory:
Tegra K1, X1, X2, Xavier, Orin, Thor (10.1, since CUDA 13 11.0), GB10 and its relatives."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes; None is "not told"."""

    total: int | None = None
    free: int | None = None
    used: int | None = None
    reserved: int | None = None
    includes_reserved: bool = False
    unified: bool = False
    """The host's figures: ``reported`` is NVML's own total, if it has one."""
    reported: int | None = None


def error_code(exc: BaseException) -> int | None:
    """NVML's return code, or None for an exception that is not NVML's."""
    value = getattr(exc, "value", None)
    return value if isinstance(value, int) else None


class FieldReader:
    """Calls functions of the ``pynvml`` module by name and keeps the reason of each field that stays empty.

    Attributes:
        unavailable: field name to reason.
        error: the exception of the last call that failed.
        lost: the exception that said "GPU is lost"; no call is made after it.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self.unavailable: dict[str, str] = {}
        self.error: Exception | None = None
        self.lost: Exception | None = None

    def read(self, name: str, function: str, *args: Any) -> Any:
        """What the function returns, or None."""
        if self.lost is not None:
            self.unavailable[name] = "error"
            return None
        try:
            return getattr(self._nvml, function)(*args)
        except Exception as exc:  # also what modules that only look like nvidia-ml-py raise
            code = error_code(exc)
            if code == GPU_IS_LOST:
                self.lost = exc
            missing = isinstance(exc, AttributeError | TypeError)
            self.unavailable[name] = "unsupported" if missing else _REASONS.get(code or 0, "error")
            self.error = exc
            _log.debug("%s failed: %s", function, exc)
            return None

    def text(self, name: str, function: str, *args: Any) -> str | None:
        """Text; modules up to 11.4 return bytes."""
        value = self.read(name, function, *args)
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        return value or None

    def number(self, name: str, low: int, high: int, function: str, *args: Any) -> int | None:
        """An integer within ``low`` and ``high``. What cannot be is no value, and never clamped to one; that takes in
        NVML's marks for "not available", the largest unsigned int and unsigned long long."""
        return self.checked(name, self.read(name, function, *args), low, high)

    def checked(self, name: str, value: int | None, low: int, high: int) -> int | None:
        if value is not None and not low <= value <= high:
            self.unavailable[name] = "invalid"
            return None
        return value

    def compute_capability(self, handle: Any) -> str | None:
        """``"9.0"``."""
        capability = self.read("compute_capability", "nvmlDeviceGetCudaComputeCapability", handle)
        return f"{capability[0]}.{capability[1]}" if capability else None

    def memory(self, handle: Any, root: Path, capability: str | None) -> Memory:
        """Memory figures by version 2, else by version 1; the host's where the GPU shares the host's memory.

        ``capability``: the compute capability, where it is known: which GPUs have no memory of their own.
        """
        memory = self._device_memory(handle)
        silent = memory is None and self.unavailable.get("memory") == "unsupported"
        silent = silent and self.error is not None and error_code(self.error) == NOT_SUPPORTED
        shared = silent if capability is None else capability in IN_A_PROCESSOR
        if shared and (silent or memory is not None):
            # One memory for CPU and GPU, of which NVML reports nothing (GB10, Jetson) or too little.
            host, reported = memory_budget(root), memory.total if memory else None
            used = host.total_bytes - host.usable_bytes
            memory = Memory(host.total_bytes, host.usable_bytes, used, unified=True, reported=reported)
            for name in ("memory", *_MEMORY_FIELDS):
                self.unavailable.pop(name, None)
        memory = memory or Memory()
        reason = self.unavailable.pop("memory", "unsupported")
        values = (memory.total, memory.free, memory.used, memory.reserved)
        for name, value in zip(_MEMORY_FIELDS, values, strict=True):
            if value is None:
                self.unavailable.setdefault(name, reason)
        return memory

    def _device_memory(self, handle: Any) -> Memory | None:
        version = getattr(self._nvml, "nvmlMemory_v2", _MEMORY_V2)
        info, includes_reserved = self.read("memory", "nvmlDeviceGetMemoryInfo", handle, version), False
        if info is None:
            info, includes_reserved = self.read("memory", "nvmlDeviceGetMemoryInfo", handle), True
        if info is None:
            return None
        self.unavailable.pop("memory", None)
        total = self.checked("memory", int(info.total), 1, 2**62)
        if total is None:
            return None
        return Memory(
            total,
            self.checked("memory_free_bytes", int(info.free), 0, total),
            self.checked("memory_used_bytes", int(info.used), 0, total),
            None if includes_reserved else self.checked("memory_reserved_bytes", int(info.reserved), 0, total),
            includes_reserved=includes_reserved,
        )
