"""One NVIDIA GPU through NVML: what it is, and one reading of its sensors.

Internal to :mod:`gpurt.sources.nvml`, which owns the library; nothing here initialises it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpurt.identity import normalize_pci_address, normalize_uuid
from gpurt.sources.board import board_name, gpu_zone_temperature_c
from gpurt.sources.host_identity import pci_numa_node
from gpurt.sources.nvml_fields import GPU_IS_LOST, IN_A_PROCESSOR, RESET_REQUIRED, FieldReader, error_code
from gpurt.types import DeviceState, Telemetry

_log = logging.getLogger("gpurt.sources.nvml")

_CLOCK_SM, _CLOCK_MEM, _TEMPERATURE_GPU = 1, 2, 0

# CUDA C++ Programming Guide, throughput of 32-bit floating-point instructions: lanes of one multiprocessor.
_CORES_PER_MULTIPROCESSOR = {
    "6.0": 64, "6.1": 128, "6.2": 128, "7.0": 64, "7.2": 64, "7.5": 64, "8.0": 64, "8.6": 128, "8.7": 128,
    "8.9": 128, "9.0": 128, "10.0": 128, "10.3": 128, "11.0": 128, "12.0": 128, "12.1": 128,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NvmlPartition:
    """One MIG device of a GPU. ``partition`` is ``gi/ci``: GPU instance and compute instance."""

    uuid: str | None
    name: str | None
    partition: str | None
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    multiprocessor_count: int | None


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """One physical GPU as NVML shows it; visibility variables do not apply. None is "not told"; bytes, MHz, GB/s.

    ``index`` is NVML's order (by PCI bus), which need not be CUDA's: join by ``uuid`` or ``pci_address``.
    ``unavailable`` says why a field is None: ``unsupported no_permission error invalid``.
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    pci_address: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    """What the driver keeps for itself. ``total = used + free + reserved``."""
    includes_reserved: bool = False
    """``memory_used_bytes`` contains the driver's own part: this driver cannot tell them apart."""
    unified_memory: bool = False
    """The GPU has no memory of its own: the figures are the host's."""
    memory_reported_bytes: int | None = None
    """What NVML calls the total of such a GPU, where it says anything: a part of what it can really use."""
    compute_capability: str | None = None
    core_count: int | None = None
    multiprocessor_count: int | None = None
    max_clock_mhz: int | None = None
    memory_bandwidth_gbps: float | None = None
    numa_node: int | None = None
    state: DeviceState = DeviceState.HEALTHY
    reason: str | None = None
    """Why ``state`` is not healthy, for people."""
    partitions: tuple[NvmlPartition, ...] = ()
    """Not empty: MIG is on, and only these can be allocated from, not the whole GPU."""
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])


def describe_device(nvml: Any, index: int, handle: Any, root: Path, mig_modes: MutableMapping[str, bool]) -> NvmlDevice:
    """Everything that does not change from second to second, and memory. Never raises for the device's sake.

    ``mig_modes`` remembers by UUID whether MIG is on.
    """
    fields = FieldReader(nvml)
    name = fields.text("name", "nvmlDeviceGetName", handle)
    uuid = normalize_uuid(fields.text("uuid", "nvmlDeviceGetUUID", handle))
    pci = fields.read("pci_address", "nvmlDeviceGetPciInfo", handle)
    address = normalize_pci_address(getattr(pci, "busId", None))
    compute_capability = fields.compute_capability(handle)
    memory = fields.memory(handle, root, compute_capability)
    cores = fields.number("core_count", 1, 2**24, "nvmlDeviceGetNumGpuCores", handle)
    lanes = _CORES_PER_MULTIPROCESSOR.get(compute_capability or "")
    max_clock = fields.number("max_clock_mhz", 1, 100_000, "nvmlDeviceGetMaxClockInfo", handle, _CLOCK_SM)
    state, reason = _health(fields, handle)
    is_cut = _mig(fields, handle, uuid, mig_modes)
    parts = _partitions(nvml, fields, handle, root, compute_capability) if is_cut else ()
    board = board_name(root) if compute_capability in IN_A_PROCESSOR else None
    return NvmlDevice(
        index=index,
        # "Orin (nvgpu)" says little.
        name=name if board is None else f"{board}, {name}" if name else board,
        uuid=uuid,
        pci_address=address,
        memory_total_bytes=memory.total,
        memory_free_bytes=memory.free,
        memory_used_bytes=memory.used,
        memory_reserved_bytes=memory.reserved,
        includes_reserved=memory.includes_reserved,
        unified_memory=memory.unified,
        memory_reported_bytes=memory.reported,
        compute_capability=compute_capability,
        core_count=cores,
        multiprocessor_count=cores // lanes if cores and lanes else None,
        max_clock_mhz=max_clock,
        memory_bandwidth_gbps=_bandwidth(fields, handle),
        numa_node=pci_numa_node(address, root) if address else None,
        partitions=parts,
        # Last, because any of the calls above may be the one that finds out.
        state=state if fields.lost is None else DeviceState.LOST,
        reason=reason if fields.lost is None else describe_error(fields.lost),
        unavailable=fields.unavailable,
    )


def read_telemetry(fields: FieldReader, handle: Any, root: Path) -> Telemetry:
    """One reading; ``fields.lost`` is set afterwards if the GPU turned out to be gone."""
    capability = fields.compute_capability(handle)
    fields.unavailable.pop("compute_capability", None)  # not a metric
    memory = fields.memory(handle, root, capability)
    raw_temperature = fields.read("temperature_c", "nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU)
    if raw_temperature is not None and 2**31 <= raw_temperature < 2**32 - 1:
        raw_temperature -= 2**32  # the binding reads a signed value as unsigned; -1 means "not available"
    temperature: float | None = fields.checked("temperature_c", raw_temperature, -50, 250)
    if temperature is None and capability in IN_A_PROCESSOR and fields.unavailable["temperature_c"] == "unsupported":
        temperature = gpu_zone_temperature_c(root)
        if temperature is not None:
            del fields.unavailable["temperature_c"]
    milliwatt = fields.number("power_w", 0, 2**31 - 1, "nvmlDeviceGetPowerUsage", handle)
    clock = fields.number("clock_mhz", 0, 100_000, "nvmlDeviceGetClockInfo", handle, _CLOCK_SM)
    rates = fields.read("utilization_percent", "nvmlDeviceGetUtilizationRates", handle)
    utilization = fields.checked("utilization_percent", int(rates.gpu) if rates is not None else None, 0, 100)
    return Telemetry(
        memory_total_bytes=memory.total,
        memory_used_bytes=memory.used,
        memory_free_bytes=memory.free,
        memory_reserved_bytes=memory.reserved,
        temperature_c=temperature,
        power_w=milliwatt / 1000 if milliwatt is not None else None,
        clock_mhz=clock,
        utilization_percent=utilization,
        unavailable=fields.unavailable,
    )


def error_state(exc: BaseException) -> DeviceState:
    """What a device is whose handle cannot be had."""
    states = {GPU_IS_LOST: DeviceState.LOST, RESET_REQUIRED: DeviceState.DEGRADED}
    return states.get(error_code(exc) or 0, DeviceState.SUSPECT)


def describe_error(exc: BaseException) -> str:
    code = error_code(exc)
    advice = {GPU_IS_LOST: "fallen off the bus; reboot the machine", RESET_REQUIRED: "needs `nvidia-smi --gpu-reset`"}
    return f"{advice.get(code or 0, 'NVML gives no access to it')}: {exc}" + ("" if code is None else f" [{code}]")


def _health(fields: FieldReader, handle: Any) -> tuple[DeviceState, str | None]:
    rows = fields.read("remapped_rows", "nvmlDeviceGetRemappedRows", handle)
    fields.unavailable.pop("remapped_rows", None)  # not a field of the record
    if rows is not None:
        _, _, pending, failed = rows
        # Rows that have been remapped are history; only what still waits, or failed, is a defect of today.
        if failed:
            return DeviceState.DEGRADED, "a memory row could not be remapped: replace the GPU"
        if pending:
            return DeviceState.DEGRADED, "memory rows wait to be remapped: reset the GPU (`nvidia-smi --gpu-reset`)"
    return DeviceState.HEALTHY, None


def _bandwidth(fields: FieldReader, handle: Any) -> float | None:
    field_name = "memory_bandwidth_gbps"
    clock = fields.number(field_name, 1, 100_000, "nvmlDeviceGetMaxClockInfo", handle, _CLOCK_MEM)
    bits = fields.number(field_name, 1, 2**20, "nvmlDeviceGetMemoryBusWidth", handle)
    # Two transfers a clock: NVML gives the clock of the data lines' strobe for every memory type.
    return 2 * clock * 1e6 * bits / 8 / 1e9 if clock and bits else None


def _mig(fields: FieldReader, handle: Any, uuid: str | None, modes: MutableMapping[str, bool]) -> bool:
    if uuid is not None and uuid in modes:
        return modes[uuid]
    mode = fields.read("mig", "nvmlDeviceGetMigMode", handle)
    reason = fields.unavailable.pop("mig", None)  # not a field of the record, and most GPUs have no such thing
    on = bool(mode) and mode[0] == 1
    if uuid is not None and reason in (None, "unsupported"):
        modes[uuid] = on
    return on


def _partitions(
    nvml: Any, fields: FieldReader, handle: Any, root: Path, capability: str | None
) -> tuple[NvmlPartition, ...]:
    found: list[NvmlPartition] = []
    for index in range(fields.number("partitions", 0, 64, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except Exception as exc:  # most slots are empty: NOT_FOUND is the normal answer
            _log.debug("no MIG device %d: %s", index, exc)
            continue
        own = FieldReader(nvml)
        gpu_instance = own.read("partition", "nvmlDeviceGetGpuInstanceId", part)
        compute_instance = own.read("partition", "nvmlDeviceGetComputeInstanceId", part)
        attributes = own.read("multiprocessor_count", "nvmlDeviceGetAttributes", part)
        memory = own.memory(part, root, capability)
        known = gpu_instance is not None and compute_instance is not None
        found.append(
            NvmlPartition(
                uuid=normalize_uuid(own.text("uuid", "nvmlDeviceGetUUID", part), prefix="MIG-"),
                name=own.text("name", "nvmlDeviceGetName", part),
                partition=f"{gpu_instance}/{compute_instance}" if known else None,
                memory_total_bytes=memory.total,
                memory_free_bytes=memory.free,
                multiprocessor_count=int(attributes.multiprocessorCount) if attributes is not None else None,
            )
        )
    return tuple(found)
