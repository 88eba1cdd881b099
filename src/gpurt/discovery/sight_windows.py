"""Windows' graphics adapters as DXGI lists them."""

from __future__ import annotations

from collections.abc import Iterator

from gpurt.backends.directml.adapters import adapter_identity
from gpurt.discovery.line import ProbeLine
from gpurt.discovery.sight_names import DXGI
from gpurt.discovery.sight_record import View, doing, sighted_device, sighted_line, skipped_notes
from gpurt.errors import ReasonCode
from gpurt.sources.dxgi import DxgiAdapter, DxgiInventory, read_dxgi
from gpurt.sources.pci import VENDORS
from gpurt.sources.table import Absence
from gpurt.types import DeviceKind, GPUDevice


def look(view: View) -> Iterator[ProbeLine]:
    yield doing("asking DXGI")

    def ask() -> object:
        from gpurt.sources.dxgi_calls import query_dxgi

        return query_dxgi()

    inventory = read_dxgi(view.table(DXGI, ask))
    yield sighted_line(
        [_record(view, adapter) for adapter in inventory.adapters],
        notes=skipped_notes(inventory.skipped),
        none=_none(inventory),
    )


def _none(inventory: DxgiInventory) -> Absence | None:
    if inventory.absence is not None:
        return inventory.absence
    if inventory.ranked():
        return None
    if inventory.adapters:
        names = ", ".join(adapter.name or "one without a name" for adapter in inventory.adapters)
        return Absence(ReasonCode.NO_DEVICE, f"DXGI shows no GPU of this computer, only {names}")
    return Absence(ReasonCode.NO_DEVICE, "DXGI shows no adapter")


def _record(view: View, adapter: DxgiAdapter) -> GPUDevice:
    reason = None
    if adapter.remote:
        reason = f"{ReasonCode.UNSUPPORTED_DEVICE}: it belongs to a remote session; what it draws with is elsewhere"
    return sighted_device(
        # DirectML's number, which nothing confirms.
        device_id=f"{DXGI}:{adapter.index}",
        name=adapter.name,
        vendor=VENDORS.get(adapter.vendor_id or 0),
        backend="directml",
        source=DXGI,
        identity=adapter_identity(adapter),
        root=view.root,
        kind=adapter.kind,
        memory_bytes=adapter.memory_total_bytes,
        memory_available=adapter.memory_free_bytes,
        driver_version=adapter.driver_version,
        state_reason=reason,
        unified_memory=adapter.kind is DeviceKind.INTEGRATED_GPU,
    )
