"""NVML's fields, card by card as captured, through the discovery and the telemetry."""

from __future__ import annotations

import asyncio
import types
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.sight import sight
from gpurt.discovery.wire import ProbeOutcome
from gpurt.errors import DeviceNotFound
from gpurt.sources import host
from gpurt.sources.nvml import NvmlDevice, open_session
from gpurt.telemetry import wait_for_memory
from gpurt.types import DeviceState, GPUDevice, Telemetry
from gpurt.usable_memory import MemorySettings, with_usable_memory
from tests.cases.rig import GIB, MIB, NO_CUPY, Binding, Said, fails, installed, memory, outcome, rates, row, uuid
from tests.sources.trees import write

MEMINFO = "MemTotal: 127600748 kB\nMemFree: 1024 kB\nMemAvailable: 118566368 kB\n"

H100 = row(
    "NVIDIA H100 80GB HBM3", "00000000:00:09.0", (9, 0), MemoryInfo=memory(81559, 479, 0),
    MemoryInfo_v1=memory(81559, 0, 479), UtilizationRates=rates(0), Temperature=41, PowerUsage=69850,
    EccMode=(1, 1), MigMode=(0, 0), ClockInfo=345, RemappedRows=(0, 0, 0, 0), TotalEccErrors=0,
)  # fmt: skip
GB10 = row(
    "NVIDIA GB10", "0000000F:01:00.0", (12, 1), UtilizationRates=rates(0), Temperature=35, PowerUsage=11170,
    ComputeRunningProcesses=[types.SimpleNamespace(pid=324, usedGpuMemory=3 * GIB)], ClockInfo=208,
)  # fmt: skip


class Seen:
    """What one table of cards becomes: NVML's records, readings by address, and the discovery's answer."""

    def __init__(self, *cards: dict[str, Any], root: Path = Path("/no/such/tree"), memory_v2: bool = True) -> None:
        self.cards, self.root, self.memory_v2 = cards, root, memory_v2

    def records(self, monkeypatch: pytest.MonkeyPatch) -> tuple[NvmlDevice, ...]:
        installed(monkeypatch, Binding(*self.cards, memory_v2=self.memory_v2))
        with open_session() as session:
            return session.devices(self.root)

    def reading(self, monkeypatch: pytest.MonkeyPatch) -> Telemetry:
        installed(monkeypatch, Binding(*self.cards, memory_v2=self.memory_v2))
        with open_session() as session:
            return session.telemetry(self.cards[0]["PciInfo"].busId, self.root)

    def discover(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> list[GPUDevice]:
        installed(monkeypatch, Binding(*self.cards, memory_v2=self.memory_v2))
        line = sight("cuda", environ={}, root=self.root)
        assert line is not None
        self.line = line
        said = Said(cuda=outcome(line, NO_CUPY))
        self.result = asyncio.run(said.discover(path / "r.json", root=self.root))
        return [device for device in self.result.devices if device.backend == "cuda"]


@pytest.fixture
def host_of_128_gib(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def test_nvf_1_reserved_memory_is_not_used_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (card,) = Seen(H100).discover(monkeypatch, tmp_path)
    assert (card.memory_bytes, card.memory_available) == (85520809984, 85520809984 - 502267904)
    reading = Seen(H100).reading(monkeypatch)
    assert (reading.memory_used_bytes, reading.memory_reserved_bytes) == (0, 502267904)
    (record,) = Seen(H100, memory_v2=False).records(monkeypatch)
    assert (record.memory_used_bytes, record.memory_reserved_bytes, record.includes_reserved) == (502267904, None, True)


def test_nvf_2_gb10_has_the_hosts_memory(monkeypatch: pytest.MonkeyPatch, host_of_128_gib: Path) -> None:
    seen = Seen(GB10, root=host_of_128_gib)
    (card,) = seen.discover(monkeypatch, host_of_128_gib)
    assert (card.name, card.unified_memory, card.state) == ("NVIDIA GB10", True, DeviceState.HEALTHY)
    assert card.identity is not None
    assert card.identity.pci_address == "0000000f:01:00.0"
    assert (card.memory_bytes, card.memory_available) == (127600748 << 10, 118566368 << 10)
    # One pool: what the GPU may take and what the processor may take is the same memory.
    gpu, processor = asyncio.run(both(host_of_128_gib, outcome(seen.line, NO_CUPY)))
    assert gpu.memory_pool_id == processor.memory_pool_id is not None
    assert (gpu.memory_usable_bytes, gpu.memory_usable_source) == (
        (118566368 << 10) - 512 * MIB,
        "meminfo",
    )  # a reserve
    assert processor.memory_usable_bytes == 118566368 << 10


async def both(root: Path, cuda: ProbeOutcome) -> tuple[GPUDevice, GPUDevice]:
    """The GPU and the processor of a host with this tree of files."""
    result = await Said(cuda=cuda).discover(root / "r2.json", backends=["cuda", "cpu"], root=root)
    gpu, processor = result.devices
    return gpu, processor


@pytest.mark.parametrize(("code", "reason"), [(3, "unsupported"), (999, "error")])
def test_nvf_3_memory_that_nobody_tells_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, reason: str
) -> None:
    """Of a card with memory of its own: the host's would be an invention."""
    processes = [types.SimpleNamespace(pid=7, usedGpuMemory=GIB)]
    silent = {**H100, "MemoryInfo": fails(code), "MemoryInfo_v1": fails(code), "ComputeRunningProcesses": processes}
    (card,) = Seen(silent).discover(monkeypatch, tmp_path)
    assert card.memory_bytes is card.memory_available is None
    assert not card.unified_memory
    (record,) = Seen(silent).records(monkeypatch)
    assert record.unavailable["memory_total_bytes"] == reason
    usable = with_usable_memory(card, MemorySettings())
    assert usable.memory_usable_bytes is None
    assert (usable.memory_usable_source or "").startswith("unknown: ")


def test_nvf_5_a_field_that_fails_costs_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for code, reason in ((999, "error"), (3, "unsupported")):
        wsl = {**H100, "UtilizationRates": fails(code)}
        (card,) = Seen(wsl).discover(monkeypatch, tmp_path)
        assert (card.name, card.memory_bytes) == ("NVIDIA H100 80GB HBM3", 85520809984)
        reading = Seen(wsl).reading(monkeypatch)
        assert reading.utilization_percent is None
        assert reading.unavailable == {"utilization_percent": reason}


def test_nvf_6_load_of_a_partitioned_card_is_unknown_and_not_0(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Seen({**H100, "UtilizationRates": fails(3), "MigMode": (1, 1)}).reading(monkeypatch)
    assert reading.utilization_percent is None
    assert reading.unavailable["utilization_percent"] == "unsupported"


def test_nvf_7_unknown_use_of_a_process_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [types.SimpleNamespace(pid=n, usedGpuMemory=size) for n, size in ((1, GIB), (2, None), (3, GIB))]
    installed(monkeypatch, Binding({**H100, "ComputeRunningProcesses": processes}))
    with open_session() as session:
        found = session.processes("00000000:00:09.0")
    assert (found.used_bytes, found.unknown_count) == (2 * GIB, 1)


ROWS = [
    (H100, 41, 69.85, True),
    (
        row(
            "NVIDIA GeForce RTX 4080 SUPER", "00000000:01:00.0", (8, 9), MemoryInfo=memory(16376, 434, 596),
            UtilizationRates=rates(0), Temperature=43, PowerUsage=26200, ClockInfo=210,
        ),
        43, 26.2, False,
    ),
    (
        row(
            "NVIDIA L40S", "00000000:01:00.0", (8, 9), MemoryInfo=memory(46068, 609, 0), UtilizationRates=rates(100),
            Temperature=63, PowerUsage=144970, EccMode=(1, 1), ClockInfo=2520,
        ),
        63, 144.97, True,
    ),
    (
        row(
            "NVIDIA GeForce RTX 2080 SUPER", "00000000:0C:00.0", (7, 5), MemoryInfo=memory(8192, 205, 702),
            UtilizationRates=rates(0), Temperature=40, PowerUsage=38920, ClockInfo=300,
        ),
        40, 38.92, False,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("answers", "celsius", "watt", "ecc"), ROWS, ids=["H100", "4080S", "L40S", "2080S"])
def test_nvf_8_every_card_has_a_full_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: dict[str, Any], celsius: int, watt: float, ecc: bool
) -> None:
    (card,) = Seen(answers).discover(monkeypatch, tmp_path)
    info = answers["MemoryInfo"]
    assert (card.name, card.memory_bytes, card.memory_available) == (answers["Name"], info.total, info.free)
    reading = Seen(answers).reading(monkeypatch)
    assert (reading.temperature_c, reading.power_w, dict(reading.unavailable)) == (celsius, watt, {})
    installed(monkeypatch, Binding(answers))
    with open_session() as session:
        condition = session.condition(answers["PciInfo"].busId)
    assert condition.ecc_enabled is (True if ecc else None)
    assert ("ecc_enabled" in condition.unavailable) is not ecc


def test_nvf_9_process_numbers_are_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of the host's namespace: no process of this machine, listed all the same and never looked up."""
    processes = [types.SimpleNamespace(pid=2**31 - 7, usedGpuMemory=GIB)]
    installed(monkeypatch, Binding({**H100, "ComputeRunningProcesses": processes}))
    with open_session() as session:
        found = session.processes("00000000:00:09.0")
    assert found.processes is not None
    assert [(each.pid, each.used_bytes) for each in found.processes] == [(2**31 - 7, GIB)]


async def test_nvf_10_waiting_for_memory_is_bounded() -> None:
    samples = [2.9, 2.9, 15.4]
    now = 0.0

    async def free() -> int:
        return int((samples.pop(0) if len(samples) > 1 else samples[0]) * GIB)

    async def sleep(seconds: float) -> None:
        nonlocal now
        if seconds >= 5:  # the deadline's own: it does not pass by itself
            await asyncio.Event().wait()
        now += seconds

    found = await wait_for_memory(free, 15 * GIB, interval_s=0.75, clock=lambda: now, sleep=sleep)
    assert (found.recovered, found.waited_s) == (True, 1.5)


def test_nvf_11_free_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Seen(ROWS[2][0]).reading(monkeypatch)
    assert (reading.memory_used_bytes, reading.utilization_percent) == (0, 100)


def test_nvf_13_memory_of_a_gpu_is_not_the_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", f"MemTotal: {576 << 20} kB\nMemAvailable: {570 << 20} kB\n")
    for number, cpus, size in ((0, "0-71", 480 << 20), (1, "", 96 << 20)):
        base = f"sys/devices/system/node/node{number}"
        write(tmp_path, f"{base}/cpulist", f"{cpus}\n")
        text = f"Node {number} MemTotal: {size} kB\nNode {number} MemFree: {size} kB\n"
        write(tmp_path, f"{base}/meminfo", text)
    hopper = {**H100, "Name": "NVIDIA GH200 480GB", "MemoryInfo": memory(96 << 10, 0, 0)}
    seen = Seen(hopper, root=tmp_path)
    seen.discover(monkeypatch, tmp_path)
    gpu, processor = asyncio.run(both(tmp_path, outcome(seen.line, NO_CUPY)))
    assert (gpu.memory_bytes, gpu.memory_pool_id) == (96 * GIB, None)
    assert processor.memory_usable_bytes is not None
    assert processor.memory_usable_bytes <= 480 * GIB
    assert host.memory_budget(tmp_path, device_memory_bytes=[96 * GIB]).total_bytes == 480 * GIB


ORIN = row("Orin (nvgpu)", "", (8, 7), 4)
del ORIN["PciInfo"]


def test_nvf_4_a_jetson_is_a_gpu(monkeypatch: pytest.MonkeyPatch, host_of_128_gib: Path) -> None:
    (card,) = Seen(ORIN, root=host_of_128_gib).discover(monkeypatch, host_of_128_gib)
    assert (card.compute_capability, card.unified_memory, card.state) == ("8.7", True, DeviceState.HEALTHY)
    assert (card.memory_bytes, card.memory_available) == (127600748 << 10, 118566368 << 10)
    assert card.identity is not None
    assert card.identity.stable
    assert card.name == "Orin (nvgpu)"


def test_nvf_4_the_board_says_what_nvml_does_not(monkeypatch: pytest.MonkeyPatch, host_of_128_gib: Path) -> None:
    root = host_of_128_gib
    write(root, "proc/device-tree/model", "NVIDIA Jetson AGX Orin Developer Kit\0")
    for n, (zone, celsius) in enumerate([("cpu-thermal", 51000), ("tj-thermal", 52500), ("gpu-thermal", 48250)]):
        write(root, f"sys/class/thermal/thermal_zone{n}/type", f"{zone}\n")
        write(root, f"sys/class/thermal/thermal_zone{n}/temp", f"{celsius}\n")
    (card,) = Seen(ORIN, root=root).discover(monkeypatch, root)
    assert card.name == "NVIDIA Jetson AGX Orin Developer Kit, Orin (nvgpu)"
    with open_session() as session:
        reading = session.telemetry(card.stable_id, root)
        with pytest.raises(DeviceNotFound):
            session.telemetry(uuid(9), root)
    assert reading.temperature_c == 48.25
    assert "temperature_c" not in reading.unavailable
    assert reading.unavailable["power_w"] == "unsupported"


def test_nvf_12_an_integrated_part_that_reports_too_little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """N1X: 8 GB by NVML, in a machine of 64 GiB."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n")
    told = {**GB10, "Name": "NVIDIA N1X", "MemoryInfo": memory(8128, 0, 199)}
    (card,) = Seen(told, root=tmp_path).discover(monkeypatch, tmp_path)
    assert card.unified_memory
    assert card.memory_bytes == 64 * GIB
    assert card.memory_usable_bytes == 60 * GIB - 512 * MIB
    (record,) = Seen(told, root=tmp_path).records(monkeypatch)
    assert record.memory_reported_bytes == 8128 * MIB
