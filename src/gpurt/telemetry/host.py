"""Readers of this host's own devices, without any backend: what the system and the management libraries tell."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from gpurt.errors import DeviceLost
from gpurt.identity import normalize_pci_address
from gpurt.telemetry.readers import BlockingReader, NvmlReader, gives_nothing
from gpurt.telemetry.reading import METRICS, RawReading
from gpurt.types import DeviceKind, GPUDevice, Telemetry

_log = logging.getLogger("gpurt.telemetry")


class HostReader:
    """A reader whose source may not be there at all, which says nothing about the device; a :data:`Read`.

    Until it has told a value once, a reading that fails is one of a device that supports no metric. Afterwards it
    fails as any other does, for then something has happened.
    """

    def __init__(self, source: BlockingReader, name: str) -> None:
        self._source, self._name = source, name
        self._has_told = False
        self._has_failed = False

    async def __call__(self) -> RawReading:
        try:
            reading = await self._source()
        except DeviceLost:
            raise
        except Exception as exc:
            if self._has_told:
                raise
            return self._nothing(f"{type(exc).__name__}: {exc}")
        if not self._has_told and (reason := gives_nothing(reading)) is not None:
            return self._nothing(reason)
        self._has_told = self._has_told or any(value is not None for value in reading.values.values())
        return reading

    def close(self) -> None:
        """As :meth:`BlockingReader.close`."""
        self._source.close()

    def _nothing(self, why: str) -> RawReading:
        if not self._has_failed:
            self._has_failed = True
            _log.info("%s tells no telemetry: %s", self._name, why)
        return RawReading({}, dict.fromkeys(METRICS, "unsupported"))


def host_reader(device: GPUDevice, *, root: Path = Path("/")) -> HostReader | None:
    """How to read ``device``, or None where nothing but its own driver tells. Close it.

    Partitions of a GPU have no reader: the figures of the whole GPU are not theirs. Nothing is opened before the first
    reading, and no device is woken by one.
    """
    source = None if device.simulated else _source(device, root)
    return None if source is None else HostReader(source, device.device_id)


def _source(device: GPUDevice, root: Path) -> BlockingReader | None:
    if device.kind is DeviceKind.CPU:
        return BlockingReader(lambda: _host(root), device.device_id)
    address = device.identity.pci_address if device.identity else None
    if address is None or (device.identity and device.identity.partition is not None):
        return None
    if device.vendor == "nvidia":
        return NvmlReader(address, root=root)
    if device.vendor == "amd":
        return BlockingReader(_amd(address, root), device.device_id)
    return None


def _host(root: Path) -> Telemetry:
    from gpurt.sources import host

    memory = host.memory_budget(root)
    clock, temperature = host.cpu_clock_mhz(), host.cpu_temperature_c()
    missing = {"memory_reserved_bytes", "power_w", "utilization_percent"}
    missing |= {name for name, value in (("clock_mhz", clock), ("temperature_c", temperature)) if value is None}
    return Telemetry(
        memory_total_bytes=memory.total_bytes,
        memory_used_bytes=max(0, memory.total_bytes - memory.usable_bytes),
        memory_free_bytes=memory.usable_bytes,
        temperature_c=temperature,
        clock_mhz=clock,
        unavailable=dict.fromkeys(sorted(missing), "unsupported"),
    )


def _amd(address: str, root: Path) -> Callable[[], Telemetry]:
    wanted = normalize_pci_address(address)

    def read() -> Telemetry:
        from gpurt.sources.amd import read_amd
        from gpurt.sources.amd_telemetry import read_amd_telemetry

        for device in read_amd(root).devices:
            if device.pci_address == wanted and device.partition is None:
                return read_amd_telemetry(root, device)
        raise OSError(f"the kernel shows no AMD device at {address}")

    return read
