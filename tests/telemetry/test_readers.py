"""Readings through backends, whatever they are, and through NVML."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpurt.backends.cpu_backend import CPUDriver
from gpurt.errors import DeviceLost, GPUError, Unsupported
from gpurt.runtime.backend import DriverBackend
from gpurt.telemetry import (
    METRICS,
    BlockingReader,
    NvmlReader,
    RawReading,
    TelemetryCollector,
    backend_reader,
    with_fallback,
)
from gpurt.testing.faults import Fault, FaultyDriver
from gpurt.testing.profiles import parse_simulation
from gpurt.testing.simulated import SimulatedDriver
from gpurt.types import DeviceState, MemoryInfo, Telemetry
from tests.support.nvml_stub import H100_TOTAL, PCI_A, PCI_B, NvmlStub, nvml_stub
from tests.telemetry.rig import Device

__all__ = ["nvml_stub"]


def collect(backend: DriverBackend, ids: Sequence[str], **options: Any) -> TelemetryCollector:
    return TelemetryCollector({each: backend_reader(backend, each) for each in ids}, patience_s=30, **options)


class TestBackends:
    async def test_c27_host_processor_gives_memory_and_plausible_others(self) -> None:
        async with DriverBackend(CPUDriver()) as backend:
            collector = collect(backend, ["cpu:0"])
            await collector.poll()
            readings = collector.readings("cpu:0")
            info = dict(await backend.get_device_memory_info("cpu:0"))
        assert set(info) == {"total_bytes", "used_bytes", "available_bytes", "reserved_bytes"}
        assert all(type(value) is int for value in info.values())
        assert readings["memory_total_bytes"].value == info["total_bytes"]
        assert readings["utilization_percent"].reason == "unsupported"
        for metric in METRICS:
            assert (readings[metric].value is None) == (readings[metric].reason is not None)
        assert collector.dropped("cpu:0") == {}

    async def test_c27_values_of_the_driver_are_forwarded(self) -> None:
        driver = SimulatedDriver(parse_simulation("h100x2"))
        async with DriverBackend(driver) as backend:
            driver.set_telemetry(1, temperature_c=77.0, power_w=None)
            collector = collect(backend, ["simulated:0", "simulated:1"])
            await collector.poll()
        readings = collector.readings("simulated:1")
        assert (readings["temperature_c"].value, readings["power_w"].reason) == (77, "unsupported")

    async def test_l43_device_that_falls_off_the_bus(self) -> None:
        driver = SimulatedDriver(parse_simulation("h100x8"))
        async with DriverBackend(driver) as backend:
            collector = collect(backend, [f"simulated:{index}" for index in range(8)])
            await collector.poll()
            driver.remove(3)
            (change,) = await collector.poll()
            assert (change.device_id, change.sample.contact) == ("simulated:3", DeviceState.LOST)
            assert all(
                collector.latest(f"simulated:{index}").contact is DeviceState.HEALTHY  # type: ignore[union-attr]
                for index in range(8)
                if index != 3
            )

    async def test_e47_hung_driver_of_one_device(self) -> None:
        driver = FaultyDriver(SimulatedDriver(parse_simulation("h100x2")))
        gate = threading.Event()
        async with DriverBackend(driver) as backend:
            driver.inject(Fault("telemetry", index=0, gate=gate))
            collector = TelemetryCollector(
                {each.device_id: backend_reader(backend, each.device_id) for each in backend.devices}, patience_s=0.05
            )
            try:
                while collector.latest("simulated:1") is None:
                    await collector.poll()
                assert collector.latest("simulated:0") is None
            finally:
                gate.set()
            while collector.latest("simulated:0") is None:
                await collector.poll()

    @pytest.mark.parametrize("lie", [{"temperature_c": float("nan")}, {"utilization_percent": 2**31}, {"power_w": "x"}])
    async def test_tel_1_driver_that_lies(self, lie: dict[str, Any]) -> None:
        driver = FaultyDriver(SimulatedDriver(parse_simulation("h100")))
        async with DriverBackend(driver) as backend:
            driver.inject(Fault("telemetry", lie=lie))
            collector = collect(backend, ["simulated:0"])
            await collector.poll()
        (metric,) = lie
        assert collector.readings("simulated:0")[metric].reason == "invalid"
        assert collector.dropped("simulated:0") == {metric: 1}
        assert collector.readings("simulated:0")["clock_mhz"].value is not None


class TestBlocking:
    async def test_e47_a_blocking_source_that_hangs_stalls_neither_loop_nor_exit(self) -> None:
        gate, loop_thread = threading.Event(), threading.get_ident()
        threads: list[int] = []

        def hangs() -> Telemetry:
            threads.append(threading.get_ident())
            gate.wait(30)
            return Telemetry(temperature_c=50.0)

        hung = BlockingReader(hangs, "hung")
        well = BlockingReader(lambda: Telemetry(temperature_c=40.0), "well")
        collector = TelemetryCollector({"hung": hung, "well": well}, patience_s=0.05)
        while collector.latest("well") is None:
            await collector.poll()
        assert collector.latest("hung") is None
        assert threads
        assert loop_thread not in threads
        gate.set()
        while collector.latest("hung") is None:
            await collector.poll()
        assert len(threads) == 1
        for reader in (hung, well):
            reader.close()
            reader.close()


class FourMethods:
    """A backend of old: the four abstract methods and no more."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    async def _answer(self, name: str) -> Any:
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def get_device_memory_info(self, device_id: str) -> Any:
        return await self._answer("memory")

    async def get_device_temperature(self, device_id: str) -> Any:
        return await self._answer("temperature")

    async def get_device_power_usage(self, device_id: str) -> Any:
        return await self._answer("power")

    async def get_device_clock_rate(self, device_id: str) -> Any:
        return await self._answer("clock")


class TestFourMethods:
    async def test_each_method_costs_its_own_metric(self) -> None:
        memory = MemoryInfo(total_bytes=10, used_bytes=4, available_bytes=5, reserved_bytes=1)
        backend: Any = FourMethods(memory=memory, temperature=GPUError("no"), power=Unsupported("no"), clock=1980)
        raw = await backend_reader(backend, "x:0")()
        assert raw.values["memory_used_bytes"] == 4
        assert raw.values["clock_mhz"] == 1980
        assert raw.unavailable == {"temperature_c": "error", "power_w": "unsupported"}

    async def test_memory_that_is_not_told(self) -> None:
        backend: Any = FourMethods(memory=Unsupported("no"), temperature=40.0)
        raw = await backend_reader(backend, "x:0")()
        assert (raw.values["temperature_c"], raw.unavailable["memory_total_bytes"]) == (40.0, "unsupported")

    async def test_lost_device(self) -> None:
        backend: Any = FourMethods(memory=DeviceLost("gone"))
        with pytest.raises(DeviceLost):
            await backend_reader(backend, "x:0")()


class TestFallback:
    async def test_m25_apl_3_second_source_takes_over_and_is_remembered(self) -> None:
        """M-25 and APL-3: the first tool is absent, fails or tells nothing; nobody sees 0 meanwhile."""
        first, second = Device(), Device(temperature_c=55)
        first.error = FileNotFoundError("macmon")
        read = with_fallback(first, second)
        for _ in range(3):
            assert (await read()).values["temperature_c"] == 55
        assert (first.calls, second.calls) == (1, 3)
        second.error = RuntimeError("exit status 1")
        first.error = None
        assert (await read()).values["temperature_c"] == 41

    async def test_when_none_works_the_last_ones_error_is_told(self) -> None:
        first, second = Device(), Device()
        first.error, second.error = OSError("first"), RuntimeError("second")
        with pytest.raises(RuntimeError, match="second"):
            await with_fallback(first, second)()

    async def test_an_empty_answer_is_better_than_an_error(self) -> None:
        async def empty() -> RawReading:
            return RawReading({}, {"power_w": "no_permission"})

        failing = Device()
        failing.error = OSError("no")
        assert (await with_fallback(empty, failing)()).unavailable == {"power_w": "no_permission"}

    async def test_a_lost_device_is_not_asked_elsewhere(self) -> None:
        first, second = Device(), Device()
        first.error = DeviceLost("gone")
        with pytest.raises(DeviceLost):
            await with_fallback(first, second)()
        assert second.calls == 0


NVML_CHILD = """
import asyncio, json, pathlib, sys
from gpurt.telemetry import GPUMonitoringService, NvmlReader
scenario_file, addresses = pathlib.Path(sys.argv[1]), sys.argv[2].split()

async def main():
    answers = {}
    readers = {address: NvmlReader(address) for address in addresses}
    transitions = []
    service = GPUMonitoringService(
        readers, patience_s=30, on_health=lambda step: transitions.append([step.key, str(step.state)])
    )
    for scenario in sys.argv[3].split():
        scenario_file.write_text(scenario)
        for _ in range(4):
            await service.collector.poll()
        answers[scenario] = {
            "transitions": list(transitions),
            **{address: service.collector.latest(address).record(0, 1e9) for address in addresses},
            "throttled": [service.collector.latest(address).throttled for address in addresses],
        }
        transitions.clear()
    for reader in readers.values():
        reader.close()
        reader.close()
    print(json.dumps(answers))

asyncio.run(main())
"""


class TestNvml:
    def test_telemetry_and_health_over_the_real_binding(self, nvml_stub: NvmlStub, tmp_path: Path) -> None:
        """L-42, L-43, L-44, NVI-2, NVI-11, D20 and TEL-1 through NVML: one card changes, the other never does."""
        scenario_file, log, script = tmp_path / "scenario", tmp_path / "log", tmp_path / "child.py"
        scenario_file.write_text("ok2")
        script.write_text(NVML_CHILD)
        scenarios = "ok2 fallen1 ok2b fields999 ok2c remap1 hot1 ok2d absurd"
        argv = [str(script), str(scenario_file), f"{PCI_A} {PCI_B}", scenarios]
        child = f"import sys, runpy; sys.argv = {argv!r}; runpy.run_path(sys.argv[0])"
        result = nvml_stub.python(child, file=scenario_file, log=log)
        assert result.returncode == 0, result.stderr
        answers = json.loads(result.stdout)
        changes = {scenario: sorted(answer["transitions"]) for scenario, answer in answers.items()}
        assert changes == {
            "ok2": [],
            "fallen1": [[PCI_B, "lost"]],
            "ok2b": [[PCI_B, "healthy"]],
            "fields999": [[PCI_A, "suspect"], [PCI_B, "suspect"]],
            "ok2c": [[PCI_A, "healthy"], [PCI_B, "healthy"]],
            "remap1": [[PCI_B, "degraded"]],
            "hot1": [],
            "ok2d": [[PCI_B, "healthy"]],
            "absurd": [],
        }
        first = answers["ok2"][PCI_B]
        assert (first["temperature_c"], first["power_w"], first["memory_total_bytes"]) == (63, 421.5, H100_TOTAL)
        assert answers["hot1"]["throttled"] == [False, True]
        assert answers["hot1"][PCI_B]["temperature_c"] == 91
        assert answers["absurd"][PCI_A]["unavailable"]["power_w"] == "invalid"
        # Opened once for both, and anew after the readings that failed.
        kinds = [line.split()[0] for line in log.read_text().splitlines()]
        assert kinds.count("init") == kinds.count("shutdown")

    async def test_l42_nvml_is_opened_anew_after_a_reading_that_failed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers: list[Any] = [
            DeviceLost("gone"),
            Telemetry(),
            Telemetry(temperature_c=41.0),
            Telemetry(temperature_c=42.0),
        ]
        opened: list[str] = []

        class Session:
            def telemetry(self, address: str, root: Path) -> Telemetry:
                answer = answers.pop(0)
                if isinstance(answer, Exception):
                    raise answer
                return answer

            def condition(self, address: str) -> None:
                return None

            def close(self) -> None:
                opened.append("closed")

        def open_session() -> Session:
            opened.append("opened")
            return Session()

        monkeypatch.setattr("gpurt.telemetry.readers.open_session", open_session)
        reader = NvmlReader(PCI_A)
        with pytest.raises(DeviceLost):
            await reader()
        await reader()
        assert (await reader()).values["temperature_c"] == 41
        assert (await reader()).values["temperature_c"] == 42
        assert opened == ["opened", "closed", "opened", "closed", "opened"]
        reader.close()

    async def test_without_a_driver_it_is_a_failed_reading(self) -> None:
        if Path("/dev/nvidiactl").exists():
            pytest.skip("this machine has an NVIDIA driver")
        reader = NvmlReader(PCI_A)
        collector = TelemetryCollector({"gpu:0": reader}, patience_s=30)
        (change,) = await collector.poll()
        assert change.sample.contact is DeviceState.SUSPECT
        assert "libnvidia-ml" in (change.sample.contact_reason or "")
        reader.close()
