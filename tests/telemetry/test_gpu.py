"""On a machine with NVIDIA GPUs: what is read is what nvidia-smi prints of the same second."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from typing import Any

import pytest

from gpurt.sources.nvml import NvmlSession, open_session
from gpurt.sources.nvml_events import open_xid_events
from gpurt.telemetry import NvmlReader, TelemetryCollector
from gpurt.types import DeviceState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi"),
]

MIB = 1 << 20
# Field of nvidia-smi, where it is in a reading, what one unit of it is, and the step by which two looks may differ.
FIELDS = (
    ("memory.total", "memory_total_bytes", MIB, MIB),
    ("memory.reserved", "memory_reserved_bytes", MIB, MIB),
    ("memory.used", "memory_used_bytes", MIB, MIB),
    ("memory.free", "memory_free_bytes", MIB, MIB),
    ("temperature.gpu", "temperature_c", 1, 1),
    ("power.draw", "power_w", 1, 5),
    ("clocks.sm", "clock_mhz", 1, 15),
    ("utilization.gpu", "utilization_percent", 1, 5),
    ("ecc.errors.corrected.volatile.total", "ecc_corrected", 1, 0),
    ("ecc.errors.uncorrected.volatile.total", "ecc_uncorrected", 1, 0),
    ("ecc.errors.uncorrected.aggregate.total", "ecc_uncorrected_lifetime", 1, 0),
    ("pcie.link.gen.current", "pcie_generation", 1, 0),
    ("pcie.link.gen.max", "pcie_max_generation", 1, 0),
    ("pcie.link.width.current", "pcie_width", 1, 0),
    ("pcie.link.width.max", "pcie_max_width", 1, 0),
)


def addresses(session: NvmlSession) -> list[str]:
    found = [device.pci_address for device in session.devices()]
    return [address for address in found if address is not None]


def look(session: NvmlSession, address: str) -> dict[str, Any]:
    condition = session.condition(address)
    names = [name for _, name, _, _ in FIELDS if hasattr(condition, name)]
    return {**session.telemetry(address).model_dump(), **{name: getattr(condition, name) for name in names}}


def nvidia_smi(address: str) -> list[str]:
    query = ",".join(field for field, _, _, _ in FIELDS)
    command = ["nvidia-smi", f"--id={address}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    return [value.strip() for value in printed.strip().split(",")]


def test_every_field_equals_nvidia_smi() -> None:
    with open_session() as session:
        for address in addresses(session):
            before, printed, after = look(session, address), nvidia_smi(address), look(session, address)
            for (field, name, unit, step), text in zip(FIELDS, printed, strict=True):
                low, high = before[name], after[name]
                try:
                    value = float(text) * unit
                except ValueError:
                    assert low is None, f"{field} is {text}, not {low}"
                    continue
                assert low is not None, f"{field} is {text}, and not told"
                assert min(low, high) - step <= value <= max(low, high) + step, f"{field}: {low} {text} {high}"


async def test_collector_and_events_on_a_real_driver() -> None:
    with open_session() as session:
        found = addresses(session)
        for address in found:
            condition = session.condition(address)
            assert condition.throttle is not None, condition.unavailable
            assert session.processes(address).processes is not None
    readers = {address: NvmlReader(address) for address in found}
    collector = TelemetryCollector(readers, patience_s=10)
    changes = await collector.poll()
    for reader in readers.values():
        await asyncio.to_thread(reader.close)  # it may wait for what another thread asks NVML
    assert [change.sample.contact for change in changes] == [DeviceState.HEALTHY] * len(found)
    async with open_xid_events(found):
        pass
