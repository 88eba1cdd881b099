"""Verification: does a device give back the bytes that were written to it?

A device that does not is listed, but nothing may be placed on it. A device with no free memory cannot be judged and
keeps its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Set
from typing import Final

from gpurt.backend import GPUBackend
from gpurt.driver import Driver
from gpurt.errors import DeviceLost, GPUError, OutOfMemory
from gpurt.types import DeviceState, GPUDevice

VERIFY_BYTES: Final = 64 << 10
"""Enough to cross page and cache-line borders, small enough to fit into whatever is free."""


def verification_key(device: GPUDevice) -> str | None:
    """What a passed verification is remembered under, or None when it must not be remembered.

    It names the device, the driver implementation and its version: a new driver is a new question. Devices
    without a stable identity and simulated ones are verified every time.
    """
    if device.simulated or device.identity is None or not device.identity.stable:
        return None
    return f"{device.identity.key} {device.backend}/{device.backend_name} {device.driver_version or '-'}"


def failed(device: GPUDevice, reason: str) -> GPUDevice:
    """``device`` as one that failed verification."""
    return device.model_copy(update={"usable": False, "state": DeviceState.DEGRADED, "state_reason": reason})


def verify_driver(
    driver: Driver,
    devices: Sequence[GPUDevice],
    *,
    already: Set[str] = frozenset(),
    doing: Callable[[str], None] = lambda what: None,
) -> tuple[GPUDevice, ...]:
    """Verify every device of an opened driver on the calling thread, except those whose key is in ``already``.

    ``doing`` hears what comes next, before it is done: if it hangs, somebody knows where.
    """
    verified: list[GPUDevice] = []
    for index, device in enumerate(devices):
        if not device.usable or verification_key(device) in already:
            verified.append(device)
            continue
        doing(f"verifying {device.device_id}")
        try:
            problem = _read_back(driver, index)
        except Exception as exc:
            verified.append(_after_error(device, driver.classify(exc), exc))
        else:
            verified.append(failed(device, problem) if problem else device)
    return tuple(verified)


def _read_back(driver: Driver, index: int) -> str | None:
    """What is wrong with the device, or None."""
    capabilities = driver.capabilities
    size = min(VERIFY_BYTES, capabilities.chunk_bytes)
    size = -(-size // capabilities.alignment_bytes) * capabilities.alignment_bytes
    written = os.urandom(size)
    read = bytearray(size)
    driver.attach(index)
    try:
        memory = driver.alloc(index, size)
        try:
            driver.write(index, memory, 0, memoryview(written))
            driver.sync(index)
            driver.read(index, memory, 0, memoryview(read))
        finally:
            driver.free(index, memory)
    finally:
        driver.detach(index)
    return _difference(written, read)


async def verify_backend(
    backend: GPUBackend, devices: Sequence[GPUDevice], *, already: Set[str] = frozenset()
) -> tuple[GPUDevice, ...]:
    """Verify devices of an initialised backend through its public calls, except those of ``already``."""
    verified: list[GPUDevice] = []
    for device in devices:
        if not device.usable or verification_key(device) in already:
            verified.append(device)
            continue
        written = os.urandom(VERIFY_BYTES)
        try:
            async with backend.allocation(device.device_id, VERIFY_BYTES) as handle:
                await backend.copy_to_device(written, handle)
                await backend.synchronize(device.device_id)
                problem = _difference(written, await backend.copy_from_device(handle))
        except (GPUError, OSError) as exc:
            verified.append(_after_error(device, type(exc), exc))
        else:
            verified.append(failed(device, problem) if problem else device)
    return tuple(verified)


def _difference(written: bytes, read: bytes | bytearray) -> str | None:
    if len(read) != len(written):
        return f"failed verification: {len(written)} bytes were written, {len(read)} came back"
    wrong = sum(a != b for a, b in zip(written, read, strict=True)) if written != read else 0
    if wrong:
        return f"failed verification: {wrong} of {len(written)} bytes came back different"
    return None


def _after_error(device: GPUDevice, meaning: type[Exception] | None, exc: Exception) -> GPUDevice:
    if meaning is not None and issubclass(meaning, OutOfMemory):
        return device.model_copy(update={"state_reason": "not verified: no free memory"})
    after = failed(device, f"failed verification: {type(exc).__name__}: {exc}")
    lost = meaning is not None and issubclass(meaning, DeviceLost)
    return after.model_copy(update={"state": DeviceState.LOST}) if lost else after
