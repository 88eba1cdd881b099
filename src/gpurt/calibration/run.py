"""calibrate: measure the devices whose figures nobody has, one after the other, and keep them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpurt.backend import GPUBackend
from gpurt.calibration.arithmetic import FATAL, Arithmetic, Figure
from gpurt.calibration.keep import keep_calibrations, kept_calibrations
from gpurt.calibration.rate import Clock
from gpurt.calibration.transfers import file_loads, fill, host_copies, weights_file, within
from gpurt.errors import BackendClosed, DeviceLost, DeviceNotFound, GPUError, OutOfRange, Unsupported, WrongLoop
from gpurt.registry.records import CalibrationRecord, utc_now
from gpurt.runtime.handles import brief, whole_number
from gpurt.telemetry.readers import backend_reader
from gpurt.types import DeviceSpeeds, GPUDevice

REVISION: Final = 2
"""Of what the figures mean: those of another revision are measured anew."""
MAX_BYTES: Final = 256 << 20
"""Of each of two allocations on a device, and of the file: more than any cache holds."""
SHARE: Final = 8
"""Each allocation is at most an eighth of what is free."""
LEAST_BYTES: Final = 64 << 10
QUICK_S: Final = 0.05
"""A load that is over sooner is mostly its beginning and its end, where not all staging threads have work: it is
measured again with a file that is LARGER times as large."""
LARGER: Final = 4
UNKNOWN_BYTES: Final = 16 << 20
"""Where the backend does not tell what is free."""
BUSY_PERCENT: Final = 10.0
"""A device that is used more than this has somebody at work on it."""

_log = logging.getLogger("gpurt.calibration")


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is known of one device."""

    device: GPUDevice
    speeds: DeviceSpeeds | None
    fresh: bool
    """Measured now; False: kept from earlier."""
    failure: str | None = None
    """Why it was not measured now, although it should have been."""


async def calibrate(
    backend: GPUBackend,
    device_ids: Sequence[str] | None = None,
    *,
    again: bool = False,
    busy: bool = False,
    max_bytes: int = MAX_BYTES,
    keep: bool = True,
    registry_path: str | os.PathLike[str] | None = None,
    weights_directory: str | os.PathLike[str] | None = None,
    clock: Clock = time.perf_counter,
    on_device: Callable[[GPUDevice, int, int], None] | None = None,
) -> tuple[Calibration, ...]:
    """Measure every device whose figures are not in the registry for its present backend and driver, and keep them.

    Measured one after the other, each for about two seconds at most where it is not slower than 1 GB/s, then, where
    there are several, for a quarter of a second how fast all of them load at once. On a device two allocations of
    ``max_bytes`` are taken, and at most a quarter of what is free; on the host one file, removed at the end, and
    64 MiB. While it lasts others who use the device get less of it, and the figures are too low; a device whose backend
    tells that it is in use is therefore left alone.

    Args:
        backend: initialised.
        device_ids: only these; None is every usable device.
        again: also those that are known.
        busy: also those that somebody uses.
        max_bytes: of each allocation; 64 KiB at least.
        keep: False reads and writes no file. A file that cannot be written is logged and no error. Devices without a
            stable identity are never kept.
        registry_path: the registry file; None is the one in the user's state directory.
        weights_directory: where the file is written that is loaded; None is the directory of temporary files. It is
            read from the host's page cache: a disk that is slower is what loading really waits for.
        clock: seconds.
        on_device: called with each device before it is looked at, how many were, and how many there are.

    Returns: one for each device, in order. What failed is told by it and costs no other device.

    Raises:
        DeviceNotFound, BackendClosed, WrongLoop. OutOfRange: no backend, or ``max_bytes`` is no such size.
    """
    if not isinstance(backend, GPUBackend):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OutOfRange(f"backend must be an initialised backend, not {type(backend).__name__}", operation="calibrate")
    if whole_number(max_bytes, "max_bytes") < LEAST_BYTES:
        raise OutOfRange(f"max_bytes must be {LEAST_BYTES:,} at least, not {brief(max_bytes)}", operation="calibrate")
    devices = await _devices(backend, device_ids)
    kept = await kept_calibrations(registry_path) if keep else ()
    results: list[Calibration] = []
    for done, device in enumerate(devices):
        if on_device is not None:
            on_device(device, done, len(devices))
        known = next((each for each in kept if each.holds_for(device) and each.revision == REVISION), None)
        if known is not None and not again:
            results.append(Calibration(device, known.speeds, fresh=False))
            continue
        before = known.speeds if known else None
        try:
            failure = None if busy else await _in_use(backend, device)
            if failure is None:
                speeds = await _measure(backend, device, max_bytes, weights_directory, clock)
                results.append(Calibration(device, speeds, fresh=True))
                continue
        except (BackendClosed, WrongLoop, DeviceNotFound):
            raise
        except GPUError as exc:
            failure = str(exc)
        _log.warning("%s is not measured: %s", device.device_id, failure)
        results.append(Calibration(device, before, fresh=False, failure=failure))
    results = await _together(backend, results, max_bytes, weights_directory, clock)
    if keep:
        # Where a device is known by its position only, the next start may mean another by it.
        await keep_calibrations([_record(each) for each in results if each.fresh and _lasting(each)], registry_path)
    return tuple(results)


def _record(result: Calibration) -> CalibrationRecord:
    device = result.device
    assert result.speeds is not None
    return CalibrationRecord(
        device=device.stable_id, revision=REVISION, speeds=result.speeds, simulated=device.simulated
    )


def _lasting(result: Calibration) -> bool:
    identity = result.device.identity
    return identity is not None and identity.stable


async def _devices(backend: GPUBackend, device_ids: Sequence[str] | None) -> list[GPUDevice]:
    if device_ids is None:
        return [device for device in await backend.list_devices() if device.usable]
    devices: list[GPUDevice] = []
    for device_id in dict.fromkeys(device_ids):
        device = await backend.get_device(device_id)
        if device is None:
            known = ", ".join(each.device_id for each in backend.devices)
            raise DeviceNotFound(
                f"no such device; there are {known or 'none'}",
                backend=backend.name,
                device_id=device_id,
                operation="calibrate",
            )
        devices.append(device)
    return devices


async def _in_use(backend: GPUBackend, device: GPUDevice) -> str | None:
    """Why the device is to be left alone, or None; also where nobody can tell."""
    reading = await backend_reader(backend, device.device_id)()
    used = reading.values.get("utilization_percent")
    if used is None or used <= BUSY_PERCENT:
        return None
    return f"somebody uses it: {used:.0f} % busy; measure it when it is idle, or all the same with busy=True"


async def _affordable(backend: GPUBackend, device_id: str, max_bytes: int) -> int:
    """Bytes of each allocation."""
    try:
        free = (await backend.get_device_memory_info(device_id)).available_bytes
    except Unsupported:
        return min(max_bytes, UNKNOWN_BYTES)
    return max(LEAST_BYTES, min(max_bytes, free // SHARE) // 4096 * 4096)


async def _measure(
    backend: GPUBackend,
    device: GPUDevice,
    max_bytes: int,
    directory: str | os.PathLike[str] | None,
    clock: Clock,
) -> DeviceSpeeds:
    device_id = device.device_id
    nbytes = await _affordable(backend, device_id, max_bytes)
    async with backend.allocation(device_id, nbytes) as source, backend.allocation(device_id, nbytes) as target:
        await fill(backend, source)
        there, back = await host_copies(backend, target, clock)
        copied = await within(backend, source, target, clock)
        arithmetic = Arithmetic(backend, device, target, clock)
        read = await arithmetic.read(source)
        single = await arithmetic.multiply_add()
        matrices = await arithmetic.multiply_matrices()
    loads = await _loads(backend, [device_id], nbytes, directory, clock)
    notes = dict.fromkeys(each.note for each in (read, single, matrices, loads) if each.note)
    return DeviceSpeeds(
        backend=device.backend,
        driver_version=device.driver_version,
        measured_at=utc_now(),
        to_device_gbps=there / 1e9,
        from_device_gbps=back / 1e9,
        memory_gbps=max(copied, read.value or 0.0) / 1e9,
        fp32_tflops=_scaled(single, 1e12),
        bf16_tflops=_scaled(matrices, 1e12),
        load_gbps=_scaled(loads, 1e9),
        notes=tuple(notes),
    )


async def _loads(
    backend: GPUBackend, device_ids: list[str], nbytes: int, directory: str | os.PathLike[str] | None, clock: Clock
) -> Figure:
    try:
        async with weights_file(directory, nbytes) as path:
            figure = Figure(await file_loads(backend, path, nbytes, device_ids, clock))
        if nbytes < MAX_BYTES or not figure.value or nbytes * len(device_ids) / figure.value > QUICK_S:
            return figure
        larger = min([await _affordable(backend, device_id, LARGER * nbytes) for device_id in device_ids])
        async with weights_file(directory, larger) as path:
            return Figure(await file_loads(backend, path, larger, device_ids, clock))
    except FATAL:
        raise
    except (OSError, GPUError) as exc:
        return Figure(None, f"loading files: {exc}")


async def _together(
    backend: GPUBackend,
    results: list[Calibration],
    max_bytes: int,
    directory: str | os.PathLike[str] | None,
    clock: Clock,
) -> list[Calibration]:
    """With how fast all devices that were measured now load at once: what they share is not seen by one alone."""
    fresh = [result.device.device_id for result in results if result.fresh]
    if len(fresh) < 2:
        return results
    try:
        nbytes = min([await _affordable(backend, device_id, max_bytes) for device_id in fresh])
        together = await _loads(backend, fresh, nbytes, directory, clock)
    except DeviceLost as exc:
        together = Figure(None, f"loading to {len(fresh)} devices at once: {exc}")

    def told(result: Calibration) -> Calibration:
        if result.speeds is None or not result.fresh:
            return result
        notes = result.speeds.notes if together.note is None else (*result.speeds.notes, together.note)
        update = {"load_together_gbps": _scaled(together, 1e9), "notes": notes}
        return replace(result, speeds=result.speeds.model_copy(update=update))

    return [told(result) for result in results]


def _scaled(figure: Figure, unit: float) -> float | None:
    return None if figure.value is None else figure.value / unit
