"""The adapters that DirectML can use, as DXGI describes them, and how much of their memory this process may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.identity import device_identity, luid_identity
from gpurt.sources.dxgi import DxgiAdapter, directml_ordinal, read_dxgi
from gpurt.sources.dxgi_calls import LOCAL, DxgiCalls, DxgiError, record_dxgi
from gpurt.sources.host import host_fingerprint
from gpurt.sources.pci import VENDORS
from gpurt.types import DeviceIdentity, DeviceKind, GPUDevice, Telemetry

_UNREADABLE: Final = frozenset({"temperature_c", "power_w", "clock_mhz", "utilization_percent"})
"""DXGI knows nothing of them."""


class DirectMLDevices(Protocol):
    """Where the devices of a driver are known from. ``index`` is the place in what ``open`` returned."""

    def open(self, version: str) -> list[GPUDevice]:
        """Every device, the best first.

        Args:
            version: of ONNX Runtime.

        Raises:
            BackendUnavailable: there is none.
        """
        ...

    def ordinal(self, index: int) -> int:
        """ONNX Runtime's ``device_id``."""
        ...

    def take(self, index: int, nbytes: int) -> None:
        """Count an allocation that comes next.

        Raises:
            MemoryError: there is not so much.
        """
        ...

    def give_back(self, index: int, nbytes: int) -> None: ...
    def telemetry(self, index: int) -> Telemetry: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Budget:
    """What Windows says of an adapter's fastest memory, bytes; None with ``reason`` where it does not."""

    free: int | None
    reason: str = ""


class DxgiAdapters:
    """GPUs in this computer. Keeps DXGI open: its list of adapters stays the same for as long as that.

    Args:
        open_calls: opens DXGI.
    """

    def __init__(self, open_calls: Callable[[], DxgiCalls]) -> None:
        self._open_calls = open_calls
        self._calls: DxgiCalls | None = None
        self._adapters: tuple[DxgiAdapter, ...] = ()
        self._ordinals: list[int] = []
        self._given: list[int] = []

    def open(self, version: str) -> list[GPUDevice]:
        try:
            self._calls = calls = self._open_calls()
        except (DxgiError, OSError, AttributeError) as exc:  # AttributeError: a dxgi.dll without the function
            raise _unavailable(ReasonCode.ERROR, f"DXGI cannot be opened: {exc}") from exc
        inventory = read_dxgi(record_dxgi(calls))
        if inventory.absence is not None:
            raise _unavailable(inventory.absence.reason, inventory.absence.message)
        self._adapters = inventory.ranked()
        self._ordinals = [directml_ordinal(adapter).device_id for adapter in self._adapters]
        self._given = [0] * len(self._adapters)
        if not self._adapters:
            raise _unavailable(ReasonCode.NO_DEVICE, *_why_none(inventory.adapters))
        return [self._describe(index, adapter, version) for index, adapter in enumerate(self._adapters)]

    def ordinal(self, index: int) -> int:
        return self._ordinals[index]

    def take(self, index: int, nbytes: int) -> None:
        """Within the budget: Direct3D grants more, moving memory of this process to the host, without a word."""
        free = self._budget(index).free
        if free is None and (total := _total(self._adapters[index])) is not None:
            free = max(0, total - self._given[index])
        if free is not None and nbytes > free:
            raise MemoryError(
                f"{nbytes:,} bytes asked for on directml:{index}, and Windows lets this process use {free:,} more; "
                "free handles, allocate less, or close what else uses the GPU"
            )
        self._given[index] += nbytes

    def give_back(self, index: int, nbytes: int) -> None:
        self._given[index] -= nbytes

    def telemetry(self, index: int) -> Telemetry:
        adapter, budget = self._adapters[index], self._budget(index)
        total = _total(adapter)
        unavailable = dict.fromkeys(_UNREADABLE, "unsupported")
        # Usage is told of this process alone, and nobody tells what is set aside.
        unavailable |= {"memory_used_bytes": "unsupported", "memory_reserved_bytes": "unsupported"}
        if total is None:
            unavailable["memory_total_bytes"] = adapter.unavailable.get("dedicated_video_bytes", "unsupported")
        if budget.free is None:
            unavailable["memory_free_bytes"] = budget.reason
        return Telemetry(
            memory_total_bytes=total, memory_free_bytes=_within(budget.free, total), unavailable=unavailable
        )

    def close(self) -> None:
        calls, self._calls, self._adapters = self._calls, None, ()
        if calls is not None:
            calls.close()

    def _budget(self, index: int) -> _Budget:
        """As of now."""
        assert self._calls is not None, "not open"
        try:
            opened = self._calls.adapter(self._adapters[index].index)
            if opened is None:
                return _Budget(None, "error")
            try:
                budget, usage = opened.memory(LOCAL)
            finally:
                opened.close()
        except DxgiError as exc:
            return _Budget(None, exc.reason)
        except OSError:
            return _Budget(None, "error")
        # A budget of 0 is no answer: with that nothing could be drawn.
        return _Budget(max(0, budget - usage)) if budget else _Budget(None, "unsupported")

    def _describe(self, index: int, adapter: DxgiAdapter, version: str) -> GPUDevice:
        integrated = adapter.kind is DeviceKind.INTEGRATED_GPU
        total = _total(adapter)
        free = _within(adapter.memory_free_bytes, total) if adapter.local_budget_bytes else None
        vendor = VENDORS.get(adapter.vendor_id or 0, "unknown")
        return GPUDevice(
            device_id=f"directml:{index}",
            name=adapter.name or f"{vendor} device",
            vendor=vendor,
            backend="directml",
            compute_capability=None,
            memory_bytes=total,
            memory_available=free,
            compute_units=None,
            tensor_core_count=None,
            max_threads_per_block=None,
            clock_rate_mhz=None,
            bandwidth_gbps=None,
            # What is not for bytes alone, ONNX Runtime does on the CPU where DirectML lacks an operator.
            support_level="partial",
            driver_version=adapter.driver_version,
            backend_name=f"onnxruntime {version}",
            identity=adapter_identity(adapter),
            kind=adapter.kind,
            memory_usable_bytes=free,
            memory_usable_source=None if free is None else "driver",
            memory_pool_id=f"host:{host_fingerprint()}" if integrated else None,
            unified_memory=integrated,
            backends=("directml",),
        )


def adapter_identity(adapter: DxgiAdapter) -> DeviceIdentity:
    """By the place on the bus, else by the LUID, which holds until the next boot, else by the name of today."""
    fallback = f"dxgi:{adapter.name}:{adapter.index}"
    if adapter.pci_address is not None or adapter.luid is None:
        return device_identity(pci_address=adapter.pci_address, fallback=fallback)
    return luid_identity(adapter.luid, fallback)


def _total(adapter: DxgiAdapter) -> int | None:
    """0 is what DXGI says of a memory of which it knows nothing."""
    return adapter.memory_total_bytes or None


def _within(free: int | None, total: int | None) -> int | None:
    """Budgets may count what the firmware keeps of the memory."""
    return free if free is None or total is None else min(free, total)


def _why_none(adapters: tuple[DxgiAdapter, ...]) -> tuple[str, str | None]:
    """What is there instead, and what to do."""
    if not adapters:
        return "DXGI shows no adapter", "install the graphics driver of the card's vendor"
    names = ", ".join(adapter.name or "one without a name" for adapter in adapters)
    text = f"DXGI shows no GPU of this computer, only {names}"
    if any(adapter.remote for adapter in adapters):
        return text, "start it in a session at the computer's own console, or allow GPUs in remote sessions by policy"
    return text, "install the graphics driver of the card's vendor: Windows' own draws by the processor"


def _unavailable(reason: ReasonCode, text: str, hint: str | None = None) -> BackendUnavailable:
    return BackendUnavailable(text, reason=reason, backend="directml", hint=hint)
