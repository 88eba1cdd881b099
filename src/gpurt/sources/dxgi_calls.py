"""From DXGI's calls to the table that :func:`gpurt.sources.dxgi.read_dxgi` understands. Knows nothing of ctypes.

Adapters are closed as soon as they have been asked, whatever they answer. One failing call costs one field.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from gpurt.errors import ReasonCode
from gpurt.sources.table import Absence

_MOST_ADAPTERS: Final = 64
"""DXGI ends its lists with an error code; a driver that never gives it must not keep us for ever."""

HIGH_PERFORMANCE: Final = 2  # DXGI_GPU_PREFERENCE of dxgi1_6.h
LOCAL, NON_LOCAL = 0, 1  # DXGI_MEMORY_SEGMENT_GROUP of dxgi1_4.h

DESCRIBED: Final = (
    "name",
    "vendor_id",
    "device_id",
    "subsystem_id",
    "revision",
    "luid",
    "flags",
    "dedicated_video_bytes",
    "dedicated_system_bytes",
    "shared_system_bytes",
)
"""Keys of :meth:`DxgiAdapterCalls.description`: identifiers are numbers, ``luid`` is 16 digits, sizes are bytes."""

# winerror.h
_E_NOINTERFACE: Final = 0x80004002
_E_ACCESSDENIED: Final = 0x80070005
_DXGI_ERROR_UNSUPPORTED: Final = 0x887A0004


class DxgiError(Exception):
    """A call failed. ``code`` is its HRESULT or NTSTATUS as an unsigned number."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with 0x{code & 0xFFFFFFFF:08x}")
        self.code = code & 0xFFFFFFFF

    @property
    def reason(self) -> str:
        """As in the ``unavailable`` of a device."""
        if self.code == _E_ACCESSDENIED:
            return "no_permission"
        return "unsupported" if self.code in (_E_NOINTERFACE, _DXGI_ERROR_UNSUPPORTED) else "error"


class DxgiAdapterCalls(Protocol):
    """One open adapter. Methods raise :class:`DxgiError` or :class:`OSError`."""

    def description(self) -> Mapping[str, int | str]:
        """A value for each of :data:`DESCRIBED`."""
        ...

    def memory(self, group: int) -> tuple[int, int]:
        """Budget and usage of this process in one group of segments, bytes."""
        ...

    def pci_location(self) -> tuple[int, int, int]:
        """Bus, device and function."""
        ...

    def driver_version(self) -> str: ...

    def close(self) -> None: ...


class DxgiCalls(Protocol):
    """An open factory. Methods raise :class:`DxgiError` or :class:`OSError`; None is the end of a list."""

    size_bits: int
    """Width of ``SIZE_T``."""

    def adapter(self, index: int) -> DxgiAdapterCalls | None:
        """EnumAdapters1."""
        ...

    def preferred(self, index: int, preference: int) -> DxgiAdapterCalls | None:
        """EnumAdapterByGpuPreference."""
        ...

    def close(self) -> None: ...


def query_dxgi(open_calls: Callable[[], DxgiCalls] | None = None) -> dict[str, Any]:
    """The table of this computer. Blocking: loads the drivers of every adapter, so call it in a probe's process.

    Args:
        open_calls: default: DXGI itself, on Windows.
    """
    if open_calls is None:
        if sys.platform != "win32":
            return Absence(ReasonCode.WRONG_PLATFORM, f"there is no DXGI on {sys.platform}").as_table()
        from gpurt.sources.dxgi_com import open_dxgi

        open_calls = open_dxgi
    try:
        calls = open_calls()
    except (DxgiError, OSError, AttributeError) as exc:  # AttributeError: a dxgi.dll without the function
        return Absence(ReasonCode.ERROR, f"DXGI cannot be opened: {exc}").as_table()
    with contextlib.closing(calls):
        return record_dxgi(calls)


def record_dxgi(calls: DxgiCalls) -> dict[str, Any]:
    """Asks an open factory everything. Raises nothing that a call may raise."""
    table: dict[str, Any] = {"size_bits": calls.size_bits, "adapters": [], "errors": {}}
    try:
        for adapter in _all(calls.adapter):
            with adapter as opened:
                table["adapters"].append(_recorded(opened))
    except (DxgiError, OSError) as exc:
        if not table["adapters"]:
            return Absence(ReasonCode.ERROR, f"DXGI cannot list adapters: {exc}").as_table()
        table["errors"]["adapters"] = f"the list ends early: {exc}"
    order: list[Any] = []
    try:
        for adapter in _all(lambda index: calls.preferred(index, HIGH_PERFORMANCE)):
            with adapter as opened:
                order.append(opened.description().get("luid"))
        table["high_performance"] = order
    except (DxgiError, OSError) as exc:
        table["errors"]["high_performance"] = exc.reason if isinstance(exc, DxgiError) else "error"
    return table


def _all(
    get: Callable[[int], DxgiAdapterCalls | None],
) -> Iterator[AbstractContextManager[DxgiAdapterCalls]]:
    for index in range(_MOST_ADAPTERS):
        adapter = get(index)
        if adapter is None:
            return
        yield contextlib.closing(adapter)


def _recorded(adapter: DxgiAdapterCalls) -> dict[str, Any]:
    row: dict[str, Any] = {}
    errors: dict[str, str] = {}

    def ask(names: tuple[str, ...], call: Callable[[], tuple[Any, ...]]) -> None:
        try:
            row.update(zip(names, call(), strict=True))
        except DxgiError as exc:
            errors.update(dict.fromkeys(names, exc.reason))
        except OSError:
            # A driver's access violation inside a call, as ctypes tells it.
            errors.update(dict.fromkeys(names, "error"))

    try:
        row.update(adapter.description())
    except (DxgiError, OSError):
        errors.update(dict.fromkeys(DESCRIBED, "error"))
    ask(("local_budget_bytes", "local_usage_bytes"), lambda: adapter.memory(LOCAL))
    ask(("non_local_budget_bytes", "non_local_usage_bytes"), lambda: adapter.memory(NON_LOCAL))
    ask(("pci_bus", "pci_device", "pci_function"), adapter.pci_location)
    ask(("driver_version",), lambda: (adapter.driver_version(),))
    return {**row, "errors": errors} if errors else row
