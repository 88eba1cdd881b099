"""Where readings come from: one awaitable call per device."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from gpurt.backend import GPUBackend
from gpurt.errors import DeviceLost, GPUError, Unsupported
from gpurt.runtime.lane import Lane
from gpurt.runtime.protocols import ReportsTelemetry
from gpurt.sources.nvml import NvmlSession, open_session
from gpurt.telemetry.reading import METRICS, RawReading
from gpurt.types import Telemetry

_log = logging.getLogger("gpurt.telemetry")

Read = Callable[[], Awaitable[RawReading]]
"""One reading of one device. Raises ``DeviceLost`` when it is gone, ``DeviceUnresponsive`` when its driver hangs, and
anything else when the reading fails. Cancelled, it must return at once."""

_FAILED: Final = frozenset({"error", "no_permission"})


def backend_reader(backend: GPUBackend, device_id: str) -> Read:
    """Read through a backend that is open: in one call where it has ``get_telemetry``, else by its four methods."""

    async def read() -> RawReading:
        if isinstance(backend, ReportsTelemetry):
            return from_telemetry(await backend.get_telemetry(device_id))
        return await _by_metric(backend, device_id)

    return read


def with_fallback(*reads: Read) -> Read:
    """The first of several sources that gives any value; the one that did is asked first the next time.

    Raises:
        what the last of them raised, when none gives anything.
    """
    order = list(reads)

    async def read() -> RawReading:
        answer: RawReading | None = None
        for position, source in enumerate(tuple(order)):
            try:
                answer = await source()
            except DeviceLost:
                raise
            except Exception as exc:
                if position == len(order) - 1 and answer is None:
                    raise
                _log.debug("the next source is asked, since one failed: %s: %s", type(exc).__name__, exc)
                continue
            if any(value is not None for value in answer.values.values()):
                order.insert(0, order.pop(position))
                return answer
        assert answer is not None  # the last one raises otherwise
        return answer

    return read


class BlockingReader:
    """Read by a call that blocks, such as those of :mod:`gpurt.sources`; a :data:`Read`.

    The device has a thread of its own, so that one whose driver hangs holds up no other, and no exit of the process.

    Args:
        read: makes one reading; runs on the thread.
        name: of the device, for the thread's name.
    """

    def __init__(self, read: Callable[[], RawReading | Telemetry], name: str) -> None:
        self._read = read
        self._lane = Lane(f"gpurt:telemetry:{name}")
        self._closed = False

    async def __call__(self) -> RawReading:
        reading = await asyncio.wrap_future(self._lane.submit(self._read))
        return from_telemetry(reading) if isinstance(reading, Telemetry) else reading

    def close(self) -> None:
        """End the thread once the reading that runs is done. Does not wait; idempotent."""
        if not self._closed:
            self._closed = True
            self._lane.submit(self._release)
            self._lane.stop()

    def _release(self) -> None:
        """On the thread, as its last act."""


class NvmlReader(BlockingReader):
    """Read an NVIDIA GPU through NVML, telemetry and condition, without any backend.

    NVML is opened at the first reading, on the GPU's thread, and anew after a reading that failed, as after the machine
    has slept.

    Args:
        pci_address: in any spelling.
        root: where the host's own figures are read from.
    """

    def __init__(self, pci_address: str, *, root: Path = Path("/")) -> None:
        super().__init__(self._look, pci_address)
        self._address, self._root = pci_address, root
        self._session: NvmlSession | None = None

    def _look(self) -> RawReading:
        try:
            if self._session is None:
                self._session = open_session()
            reading = from_telemetry(self._session.telemetry(self._address, self._root))
            condition = self._session.condition(self._address)
        except Exception:
            self._release()
            raise
        if not any(value is not None for value in reading.values.values()):
            self._release()
        return RawReading(reading.values, reading.unavailable, condition)

    def _release(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def from_telemetry(telemetry: Telemetry) -> RawReading:
    return RawReading({name: getattr(telemetry, name) for name in METRICS}, telemetry.unavailable)


def gives_nothing(raw: RawReading) -> str | None:
    """Why a reading without any value is a failed one, or None: a device may support no metric, and be well."""
    if any(value is not None for value in raw.values.values()):
        return None
    return next((reason for reason in raw.unavailable.values() if reason in _FAILED), None)


async def _by_metric(backend: GPUBackend, device_id: str) -> RawReading:
    """The four methods that every backend has; one that fails costs its metric."""
    values: dict[str, Any] = {}
    unavailable: dict[str, str] = {}

    async def ask(names: tuple[str, ...], call: Callable[[str], Awaitable[Any]]) -> Any:
        try:
            return await call(device_id)
        except DeviceLost:
            raise
        except GPUError as exc:
            unavailable.update(dict.fromkeys(names, "unsupported" if isinstance(exc, Unsupported) else "error"))
            return None

    memory_names = ("memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes")
    memory = await ask(memory_names, backend.get_device_memory_info)
    if memory is not None:
        parts = (memory.total_bytes, memory.used_bytes, memory.available_bytes, memory.reserved_bytes)
        values.update(zip(memory_names, parts, strict=True))
    values["temperature_c"] = await ask(("temperature_c",), backend.get_device_temperature)
    values["power_w"] = await ask(("power_w",), backend.get_device_power_usage)
    values["clock_mhz"] = await ask(("clock_mhz",), backend.get_device_clock_rate)
    return RawReading(values, unavailable)
