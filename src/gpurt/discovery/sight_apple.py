"""GPUs of Apple's computers as macOS's tools and MLX show them."""

from __future__ import annotations

from collections.abc import Iterator

from gpurt.discovery.line import ProbeLine
from gpurt.discovery.sight_names import MACOS
from gpurt.discovery.sight_record import View, doing, sighted_device, sighted_line, skipped_notes
from gpurt.errors import ReasonCode
from gpurt.identity import device_identity
from gpurt.sources.apple import AppleGpu, AppleInventory, read_apple
from gpurt.sources.host_identity import host_fingerprint
from gpurt.sources.table import Absence, absence_of, as_mapping
from gpurt.types import DeviceIdentity, GPUDevice


def look(view: View) -> Iterator[ProbeLine]:
    yield doing("asking macOS and MLX")

    def ask() -> object:
        from gpurt.sources.apple_query import query_apple

        return query_apple()

    table = view.table("apple", ask)
    whole = absence_of(as_mapping(table) or {})
    if whole is not None:
        yield sighted_line((), none=whole)
        return
    inventory = read_apple(table)
    devices = [_record(view, inventory, position, gpu) for position, gpu in enumerate(inventory.gpus)]
    yield sighted_line(devices, notes=skipped_notes(inventory.skipped), none=_none(inventory))


def _none(inventory: AppleInventory) -> Absence | None:
    if inventory.metal is not None:
        return inventory.metal  # without MLX no GPU of Apple's can be used, whatever the tools show
    return None if inventory.gpus else Absence(ReasonCode.NO_DEVICE, "macOS shows no GPU")


def _record(view: View, inventory: AppleInventory, position: int, gpu: AppleGpu) -> GPUDevice:
    own = gpu.vendor == "apple"
    reason = None
    if not own:
        reason = f"{ReasonCode.UNSUPPORTED_DEVICE}: MLX drives Apple's own GPUs alone"
    elif inventory.metal is not None:
        reason = f"{inventory.metal.reason}: {inventory.metal.message}"
    free = None
    if gpu.unified_memory and gpu.working_set_bytes is not None and gpu.memory_used_bytes is not None:
        free = max(0, gpu.working_set_bytes - gpu.memory_used_bytes)
    return sighted_device(
        device_id=f"{MACOS}:{position}",
        name=gpu.name,
        vendor=gpu.vendor,
        backend="metal",
        source=MACOS,
        identity=_identity(view, gpu, position, alone=len(inventory.gpus) == 1),
        root=view.root,
        kind=gpu.kind,
        architecture=gpu.architecture,
        memory_bytes=gpu.memory_total_bytes,
        memory_available=free,
        compute_units=gpu.cores,
        driver_version=None if inventory.os_version is None else f"macOS {inventory.os_version}",
        state_reason=reason,
        unified_memory=gpu.unified_memory,
        # The host's memory is the GPU's, but one process must not use all of it.
        memory_usable_bytes=gpu.working_set_bytes,
        memory_usable_source=gpu.working_set_source,
    )


def _identity(view: View, gpu: AppleGpu, position: int, *, alone: bool) -> DeviceIdentity:
    if alone and gpu.vendor == "apple" and view.tables is None:
        # Part of the processor: the computer's name is its own.
        return DeviceIdentity(key=f"host:{host_fingerprint(view.root)}/gpu")
    return device_identity(fallback=f"{MACOS}:{gpu.name}:{position}")
