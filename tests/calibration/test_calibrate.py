"""Calibration: figures that are the device's own, kept with their driver, and taken within bounds."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpurt.backends.cpu import kernels as cpu_kernels
from gpurt.backends.cpu_backend import CPUBackend
from gpurt.calibration import REVISION, Calibration, calibrate, kept_calibrations
from gpurt.calibration import run as running
from gpurt.calibration.rate import FIGURE_S, QUEUED, ROUND_S, ROUNDS, rate
from gpurt.discovery.registry import RegistryFile
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.errors import DeviceNotFound, OutOfRange
from gpurt.registry.measured import MeasuredFile
from gpurt.registry.records import CalibrationRecord
from gpurt.runtime.backend import DriverBackend
from gpurt.testing import Fault, FaultyDriver, create_simulated
from gpurt.testing.profiles import PROFILES
from gpurt.testing.simulated import SimulatedDriver
from tests.calibration.clocks import FakeClock, modelled
from tests.support.reference_driver import ReferenceDriver

KIB = 1 << 10
MIB = 1 << 20
SLOW = replace(
    PROFILES["rtx-4090"], key="slow", host_link_gbps=0.05, memory_bandwidth_gbps=0.4, latency_s=1e-6
)  # 256 KiB take 5 ms, so that one microsecond is nothing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


async def measured(backend: Any, **options: Any) -> list[Calibration]:
    return list(await calibrate(backend, **({"keep": False, "max_bytes": 256 * KIB} | options)))


class Versioned(SimulatedDriver):
    """Devices with a driver version, as real ones have."""

    version = "590.48.01"

    def _record(self, index: int, slot: Any) -> Any:
        return super()._record(index, slot).model_copy(update={"driver_version": self.version})


def versioned(version: str) -> DriverBackend:
    driver = Versioned([SLOW])
    driver.version = version
    return DriverBackend(driver)


# Figures


async def test_figures_are_those_by_which_the_device_sleeps() -> None:
    clock = FakeClock()
    async with modelled([SLOW], clock) as backend:
        (found,) = await measured(backend, clock=clock)
    speeds = found.speeds
    assert speeds is not None
    assert found.fresh
    assert found.failure is None
    assert speeds.to_device_gbps == pytest.approx(0.05, rel=0.01)
    assert speeds.from_device_gbps == pytest.approx(0.05, rel=0.01)
    assert speeds.memory_gbps == pytest.approx(0.4, rel=0.01)
    assert speeds.load_gbps == pytest.approx(0.05, rel=0.05)
    assert speeds.load_together_gbps is None  # there is one device
    assert (speeds.fp32_tflops, speeds.bf16_tflops) == (None, None)
    assert any("runs no kernels" in note for note in speeds.notes)


async def test_several_devices_also_load_at_once() -> None:
    clock = FakeClock()
    async with modelled([SLOW, SLOW], clock) as backend:
        one, two = await measured(backend, clock=clock)
    assert one.speeds is not None
    assert two.speeds is not None
    assert one.speeds.load_together_gbps == two.speeds.load_together_gbps
    # Each has a link of its own; how far their sleeps overlap on one clock is the threads' matter.
    assert 0.04 < one.speeds.load_together_gbps <= 0.11  # type: ignore[operator]


@pytest.mark.skipif(not cpu_kernels.LANGUAGES, reason="kernels in C run on Linux and macOS")
async def test_the_cpu_has_every_figure_but_that_of_matrix_units() -> None:
    async with CPUBackend() as backend:
        (found,) = await measured(backend, max_bytes=4 * MIB)
    speeds = found.speeds
    assert speeds is not None
    for name in ("to_device_gbps", "from_device_gbps", "memory_gbps", "fp32_tflops", "load_gbps"):
        assert getattr(speeds, name) > 0, name
    # A core does 2 to 64 operations a cycle: another figure would be a wrong count of them.
    assert 1e-4 < speeds.fp32_tflops < 100  # type: ignore[operator]
    assert speeds.bf16_tflops is None


async def test_no_compiler_costs_the_arithmetic_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with CPUBackend() as backend:
        (found,) = await measured(backend)
    assert found.speeds is not None
    assert found.speeds.memory_gbps is not None
    assert found.speeds.fp32_tflops is None
    if cpu_kernels.LANGUAGES:
        assert any("C compiler" in note for note in found.speeds.notes)


@pytest.mark.parametrize("seconds", [1e-4, 0.004, 0.5])
async def test_a_figure_takes_a_bounded_time(seconds: float) -> None:
    clock, calls = FakeClock(), 0

    async def call() -> None:
        nonlocal calls
        calls += 1
        clock.sleep(seconds)

    began = clock()
    assert await rate(clock, 10.0, call) == pytest.approx(10 / seconds)
    assert calls <= 2 + ROUNDS * QUEUED
    assert clock() - began <= 2 * seconds + FIGURE_S + max(ROUND_S, seconds)


# What is taken


async def test_at_most_a_quarter_of_what_is_free_is_taken_and_all_given_back() -> None:
    small = replace(SLOW, key="small", memory_bytes=MIB, host_link_gbps=10, memory_bandwidth_gbps=10)
    driver, most = SimulatedDriver([small]), 0
    backend = DriverBackend(driver, pool_bytes=0)
    alloc = driver.alloc

    def counted(index: int, nbytes: int) -> Any:
        nonlocal most
        memory = alloc(index, nbytes)
        most = max(most, driver._open[index].used)
        return memory

    driver.alloc = counted  # type: ignore[method-assign]
    async with backend:
        (found,) = await measured(backend, max_bytes=64 * MIB)
        assert found.speeds is not None
        assert 0 < most <= MIB // 4
        assert driver.live_allocations == 0


async def test_cancelled_it_frees_and_removes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loading = asyncio.Event()
    original = running.file_loads

    async def seen(*args: Any) -> float:
        loading.set()
        await asyncio.Event().wait()
        return await original(*args)

    monkeypatch.setattr(running, "file_loads", seen)
    async with create_simulated("h100") as backend:
        task = asyncio.create_task(measured(backend))
        await loading.wait()
        assert len(list(tmp_path.iterdir())) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.driver.live_allocations == 0  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []


async def test_a_device_in_use_is_left_alone_unless_asked(path: Path) -> None:
    async with create_simulated("h100x2") as backend:
        backend.driver.set_telemetry(0, utilization_percent=93.0)  # type: ignore[attr-defined]
        used, idle = await measured(backend, keep=True, registry_path=path)
        assert used.speeds is None
        assert "93 % busy" in (used.failure or "")
        assert idle.fresh
        assert len(await kept_calibrations(path)) == 1
        used, idle = await measured(backend, keep=True, registry_path=path, busy=True)
        assert used.fresh
        assert not idle.fresh


async def test_a_device_that_fails_costs_no_other() -> None:
    driver = FaultyDriver(SimulatedDriver([SLOW, SLOW]))
    driver.inject(Fault("copy", index=0, raises=OSError("link down")))
    async with DriverBackend(driver) as backend:
        broken, whole = await measured(backend)
    assert broken.speeds is None
    assert "link down" in (broken.failure or "")
    assert whole.fresh


async def test_a_directory_that_cannot_be_written_costs_the_load_alone(tmp_path: Path) -> None:
    async with create_simulated("h100") as backend:
        (found,) = await measured(backend, weights_directory=tmp_path / "nowhere")
    assert found.speeds is not None
    assert found.speeds.load_gbps is None
    assert any("nowhere" in note for note in found.speeds.notes)


async def test_bad_arguments() -> None:
    async with create_simulated("h100") as backend:
        with pytest.raises(DeviceNotFound, match="simulated:0"):
            await measured(backend, device_ids=["simulated:7"])
        with pytest.raises(OutOfRange):
            await measured(backend, max_bytes=4096)
    with pytest.raises(OutOfRange):
        await measured("cuda:0")


# What is kept


async def test_what_is_known_for_this_driver_is_not_measured_again(path: Path) -> None:
    async with versioned("590.48.01") as backend:
        (first,) = await measured(backend, keep=True, registry_path=path)
        (second,) = await measured(backend, keep=True, registry_path=path)
        (third,) = await measured(backend, keep=True, registry_path=path, again=True)
    assert [each.fresh for each in (first, second, third)] == [True, False, True]
    assert second.speeds == first.speeds
    (record,) = await kept_calibrations(path)
    assert record.speeds == third.speeds
    assert record.speeds.driver_version == "590.48.01"
    assert record.revision == REVISION
    assert record.simulated


@pytest.mark.parametrize("field", ["driver", "revision"])
async def test_a_new_driver_or_revision_is_measured_anew(
    path: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with versioned("590.48.01") as backend:
        await measured(backend, keep=True, registry_path=path)
    if field == "revision":
        monkeypatch.setattr(running, "REVISION", REVISION + 1)
    async with versioned("600.10" if field == "driver" else "590.48.01") as backend:
        (found,) = await measured(backend, keep=True, registry_path=path)
    assert found.fresh
    assert len(await kept_calibrations(path)) == 1


async def test_a_device_without_a_stable_identity_is_not_kept(path: Path) -> None:
    async with DriverBackend(ReferenceDriver()) as backend:
        found = await measured(backend, keep=True, registry_path=path)
    assert all(each.fresh for each in found)
    assert await kept_calibrations(path) == ()


async def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with create_simulated("h100") as backend:
        (found,) = await measured(backend, keep=True, registry_path=tmp_path / "a" / "b" / "registry.json")
    assert found.fresh
    assert "not kept" in caplog.text


@pytest.mark.parametrize("damage", [lambda e: e.pop("speeds"), lambda e: e.update(device=""), lambda e: e.clear()])
def test_an_entry_that_is_none_costs_no_other(path: Path, damage: Callable[[dict[str, Any]], Any]) -> None:
    async def measure() -> None:
        async with create_simulated("h100x2") as backend:
            await measured(backend, keep=True, registry_path=path)

    asyncio.run(measure())
    document = json.loads(path.read_text())
    entries = document["simulated"]["calibration"]
    kept = CalibrationRecord.model_validate(entries[1])
    damage(entries[0])
    path.write_text(json.dumps(document))
    assert MeasuredFile(path).calibrations() == (kept,)
    loaded = RegistryFile(path).load()
    assert loaded is not None
    assert loaded.simulated is not None
    assert loaded.simulated.calibration == (kept,)


# How the cluster learns of it


async def test_discovery_shows_what_was_measured_while_the_driver_is_the_same(path: Path) -> None:
    async with versioned("590.48.01") as backend, GPUDiscoveryService(backend, registry_path=path) as service:
        before = await service.discover_all_devices()
        assert [device.speeds for device in before.devices] == [None]
        events = service.subscribe()
        await anext(events)
        (found,) = await measured(backend, keep=True, registry_path=path)
        await service.read_measurements()
        changed = await asyncio.wait_for(anext(events), 10)
        assert changed.reason == "speeds"
        assert changed.device is not None
        assert changed.device.speeds == found.speeds
        events.close()
    async with versioned("590.48.01") as backend, GPUDiscoveryService(backend, registry_path=path) as service:
        again = await service.discover_all_devices()
        assert again.devices[0].speeds == found.speeds  # discovery's own writing has not lost it
    async with versioned("600.10") as backend, GPUDiscoveryService(backend, registry_path=path) as service:
        other = await service.discover_all_devices()
        assert other.devices[0].speeds is None
