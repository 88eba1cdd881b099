"""How each device of a discovery is read without opening its driver, or why it cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpurt.errors import DeviceLost
from gpurt.telemetry.readers import BlockingReader, NvmlReader
from gpurt.types import DeviceKind, GPUDevice, Telemetry


@dataclass(frozen=True, slots=True)
class Source:
    """Exactly one of the two is set."""

    reader: BlockingReader | None = None
    why_none: str | None = None
    """For people, a few words."""


def source_of(device: GPUDevice, root: Path = Path("/")) -> Source:
    """The reader for one device. Opens and reads nothing yet.

    Args:
        root: where ``/sys`` and ``/proc`` are found.
    """
    address = device.identity.pci_address if device.identity else None
    partition = device.identity.partition if device.identity else None
    if device.simulated:
        return Source(why_none="simulated: its backend alone can read it")
    if device.kind is DeviceKind.CPU:
        return Source(BlockingReader(lambda: _host(root), device.device_id))
    if device.kind is DeviceKind.SOFTWARE:
        return Source(why_none="a program, which has no sensors")
    if device.vendor == "apple":
        return Source(why_none="macOS tells sensors to root only")
    if device.vendor not in ("nvidia", "amd", "intel"):
        return Source(why_none=f"gpurt cannot read sensors of devices of {device.vendor}")
    if address is None:
        return Source(why_none="its PCI address is unknown")
    if device.vendor == "nvidia":
        if partition is not None:
            # The whole card's readings would be taken for the partition's.
            return Source(why_none="NVML has no readings of a MIG partition")
        return Source(NvmlReader(address, root=root))
    read = _Amd(root, address, partition) if device.vendor == "amd" else _Intel(root, address)
    return Source(BlockingReader(read, device.device_id))


def _host(root: Path) -> Telemetry:
    import psutil

    from gpurt.sources.host import cpu_clock_mhz, cpu_temperature_c, memory_budget

    memory = memory_budget(root)
    clock, celsius = cpu_clock_mhz(), cpu_temperature_c()
    missing = [name for name, value in (("clock_mhz", clock), ("temperature_c", celsius)) if value is None]
    return Telemetry(
        memory_total_bytes=memory.total_bytes,
        memory_used_bytes=max(0, memory.total_bytes - memory.available_bytes),
        memory_free_bytes=memory.available_bytes,
        clock_mhz=clock,
        temperature_c=celsius,
        utilization_percent=psutil.cpu_percent(None),
        unavailable=dict.fromkeys([*missing, "power_w", "memory_reserved_bytes"], "unsupported"),
    )


class _Amd:
    """One of AMD's, found in ``/sys`` anew each time: numbers of cards are given out again."""

    def __init__(self, root: Path, address: str, partition: str | None) -> None:
        self._root, self._place = root, (address, partition)

    def __call__(self) -> Telemetry:
        from gpurt.sources.amd import read_amd
        from gpurt.sources.amd_telemetry import read_amd_telemetry

        found = (each for each in read_amd(self._root).devices if (each.pci_address, each.partition) == self._place)
        device = next(found, None)
        if device is None:
            raise DeviceLost(f"/sys shows no AMD GPU at {self._place[0]} any more")
        return read_amd_telemetry(self._root, device)


class _Intel:
    """One of Intel's, found in ``/sys`` anew each time: numbers of cards are given out again."""

    def __init__(self, root: Path, address: str) -> None:
        self._root, self._address = root, address

    def __call__(self) -> Telemetry:
        from gpurt.sources.intel import read_intel, read_intel_telemetry

        device = next((each for each in read_intel(self._root).devices if each.pci_address == self._address), None)
        if device is None:
            raise DeviceLost(f"/sys shows no Intel GPU at {self._address} any more")
        return read_intel_telemetry(self._root, device)
