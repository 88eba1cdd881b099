"""The NVML source over the real nvidia-ml-py and a stand-in for the C library, in child processes."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.nvml_stub import (
    H100_RESERVED,
    H100_TOTAL,
    PCI_A,
    PCI_B,
    PCI_GB10,
    UUID_A,
    UUID_B,
    UUID_GB10,
    NvmlStub,
    nvml_stub,
)

from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.sources import nvml

__all__ = ["nvml_stub"]

MIB = 1 << 20
INIT_FAILURES = ["init4", "init6", "init9", "init12", "init18", "init28", "init999"]
SCENARIOS = [
    "ok2",
    "swapped",
    "only_b",
    "empty",
    "all999",
    "all15",
    "lost1",
    "fallen1",
    "remap1",
    "count_shrinks",
    "gb10",
    "orin",
    "mig",
    "util999",
    "noperm_field",
    "nov2",
    "absurd",
    "sentinel",
    *INIT_FAILURES,
]

# One child goes through every scenario: importing Python, pydantic and pynvml once each would take half a minute.
CHILD = """
import dataclasses, json, pathlib, sys
from gpurt.errors import GPUError
from gpurt.sources.nvml import open_session

scenario_file, root, answers = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), {}

def attempt(call):
    try:
        return call()
    except GPUError as error:
        return {"error": type(error).__name__, "text": str(error), "cause": type(error.__cause__).__name__,
                **error.fields()}

def ask(session):
    return {
        "driver_version": session.driver_version,
        "devices": attempt(lambda: [dataclasses.asdict(device) for device in session.devices(root)]),
        "telemetry": {pci: attempt(lambda: session.telemetry(pci, root).model_dump()) for pci in sys.argv[3].split()},
        "again": attempt(lambda: len(session.devices(root))),
    }

for scenario in sys.argv[4:]:
    scenario_file.write_text(scenario)
    session = attempt(open_session)
    if isinstance(session, dict):
        answers[scenario] = session
    else:
        with session:
            answers[scenario] = ask(session)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(nvml_stub: NvmlStub, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What the source says in each scenario, on a host with the memory of a GB10 machine."""
    directory = tmp_path_factory.mktemp("scenarios")
    (directory / "proc").mkdir()
    (directory / "proc/meminfo").write_text("MemTotal: 127600748 kB\nMemAvailable: 118566368 kB\n")
    node = directory / "sys/bus/pci/devices/0000:00:0a.0/numa_node"
    node.parent.mkdir(parents=True)
    node.write_text("1\n")
    scenario_file, script = directory / "scenario", directory / "child.py"
    script.write_text(CHILD)
    addresses = f"{PCI_A} {PCI_B} {PCI_GB10} 0000:7f:00.0 nonsense"
    argv = [str(script), str(scenario_file), str(directory), addresses, *SCENARIOS]
    child = f"import sys, runpy; sys.argv = {argv!r}; runpy.run_path(sys.argv[0])"
    result = nvml_stub.python(child, file=scenario_file)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


class TestInitialisation:
    @pytest.mark.parametrize(
        ("scenario", "reason", "said", "remedy"),
        [
            ("init12", "no_driver", "libnvidia-ml not found", "install the NVIDIA driver"),
            ("init9", "no_driver", "not loaded", "modprobe nvidia"),
            ("init18", "driver_mismatch", "different versions", "reboot"),
            ("init4", "no_permission", "may not open", "group"),
            ("init28", "no_device", "finds no GPU", None),
            ("init6", "no_device", "finds no GPU", None),
            ("init999", "error", "unknown error", "re-create it"),
        ],
    )
    def test_every_failure_has_its_reason_and_remedy(
        self, answers: Mapping[str, Any], scenario: str, reason: str, said: str, remedy: str | None
    ) -> None:
        answer = answers[scenario]
        assert answer["error"] == "BackendUnavailable"
        assert answer["reason"] == reason
        assert answer["code"] == int(scenario.removeprefix("init"))
        assert said in answer["text"]
        assert answer["hint"] is None if remedy is None else remedy in answer["hint"]
        assert answer["cause"].startswith("NVMLError")

    def test_no_library_on_this_machine(self) -> None:
        # The real binding, without the stub: this machine has no NVIDIA driver.
        if Path("/dev/nvidiactl").exists():
            pytest.skip("this machine has an NVIDIA driver")
        with pytest.raises(BackendUnavailable) as caught:
            nvml.open_session()
        assert caught.value.reason is ReasonCode.NO_DRIVER
        assert caught.value.code == 12

    def test_initialised_once_and_shut_down_with_the_last_session(self, nvml_stub: NvmlStub, tmp_path: Path) -> None:
        log = tmp_path / "log"
        result = nvml_stub.python(
            """
import threading
from concurrent.futures import ThreadPoolExecutor
from gpurt.sources.nvml import open_session
with ThreadPoolExecutor(8) as pool:
    sessions = list(pool.map(lambda _: open_session(), range(16)))
    list(pool.map(lambda s: [(s.devices(), s.telemetry("0000:00:09.0")) for _ in range(20)], sessions))
    for session in sessions:
        pool.submit(session.close); pool.submit(session.close)
print(threading.active_count())
with open_session():
    pass
""",
            log=log,
        )
        assert result.returncode == 0, result.stderr
        assert [line.split()[0] for line in log.read_text().splitlines()] == ["init", "shutdown"] * 2

    def test_call_that_runs_keeps_the_library_open(self, nvml_stub: NvmlStub, tmp_path: Path) -> None:
        log = tmp_path / "log"
        result = nvml_stub.python(
            """
import os, sys, threading, time
from gpurt.errors import BackendClosed
from gpurt.sources.nvml import open_session
session = open_session()
entered = threading.Event()
import pynvml
real = pynvml.nvmlDeviceGetTemperature
def observed(*args):
    entered.set()
    return real(*args)
pynvml.nvmlDeviceGetTemperature = observed
threading.Thread(target=session.telemetry, args=("0000:00:09.0",), daemon=True).start()
assert entered.wait(10)
session.close()
try:
    session.devices()
except BackendClosed:
    print("closed")
sys.stdout.flush()
os._exit(0)
""",
            "hang_field",
            log=log,
        )
        assert result.stdout == "closed\n", result.stderr
        assert log.read_text().split()[0::2] == ["init"]

    def test_forked_child_initialises_again(self, nvml_stub: NvmlStub, tmp_path: Path) -> None:
        log = tmp_path / "log"
        result = nvml_stub.python(
            """
import os
from gpurt.sources.nvml import open_session
session = open_session()
assert len(session.devices()) == 2
pid = os.fork()
if pid == 0:
    ok = len(session.devices()) == 2 and session.telemetry("0000:00:09.0").temperature_c == 41
    session.close()
    os._exit(0 if ok else 1)
assert os.waitpid(pid, 0)[1] == 0
assert len(session.devices()) == 2
session.close()
""",
            log=log,
        )
        assert result.returncode == 0, result.stderr
        events = [line.split() for line in log.read_text().splitlines()]
        assert [what for what, _ in events] == ["init", "init", "shutdown", "shutdown"]
        assert events[1][1] == events[2][1] != events[0][1] == events[3][1]


class TestDevices:
    def test_two_cards(self, answers: Mapping[str, Any]) -> None:
        first, second = answers["ok2"]["devices"]
        assert answers["ok2"]["driver_version"] == "590.48.01"
        assert (first["index"], first["name"], first["uuid"]) == (0, "NVIDIA H100 80GB HBM3", UUID_A)
        assert (first["pci_address"], second["pci_address"]) == (PCI_A, PCI_B)
        assert second["uuid"] == UUID_B
        assert first["memory_total_bytes"] == H100_TOTAL
        assert first["memory_reserved_bytes"] == H100_RESERVED
        assert first["memory_used_bytes"] == 0
        assert first["memory_free_bytes"] == H100_TOTAL - H100_RESERVED
        assert second["memory_used_bytes"] == 8192 * MIB
        assert first["compute_capability"] == "9.0"
        assert (first["core_count"], first["multiprocessor_count"]) == (16896, 132)
        assert first["max_clock_mhz"] == 1980
        assert first["memory_bandwidth_gbps"] == pytest.approx(3352.3, abs=0.1)
        assert (first["numa_node"], second["numa_node"]) == (None, 1)
        assert (first["state"], first["reason"], first["unavailable"]) == ("healthy", None, {})
        assert not first["unified_memory"]
        assert not first["includes_reserved"]

    def test_order_follows_nvml(self, answers: Mapping[str, Any]) -> None:
        assert [device["uuid"] for device in answers["swapped"]["devices"]] == [UUID_B, UUID_A]
        assert [(device["index"], device["uuid"]) for device in answers["only_b"]["devices"]] == [(0, UUID_B)]
        assert answers["empty"]["devices"] == []
        assert answers["count_shrinks"]["again"] == 1

    def test_lost_card_costs_itself_only(self, answers: Mapping[str, Any]) -> None:
        first, second = answers["lost1"]["devices"]
        assert (first["state"], first["uuid"]) == ("healthy", UUID_A)
        assert (second["index"], second["state"], second["uuid"], second["name"]) == (1, "lost", None, None)
        assert second["memory_total_bytes"] is None
        assert "fallen off the bus" in second["reason"]

    def test_card_that_falls_between_handle_and_fields(self, answers: Mapping[str, Any]) -> None:
        first, second = answers["fallen1"]["devices"]
        assert first["state"] == "healthy"
        assert second["state"] == "lost"
        assert second["memory_total_bytes"] is None
        assert second["unavailable"]["name"] == "error"

    def test_all_cards_lost_is_an_answer(self, answers: Mapping[str, Any]) -> None:
        assert [device["state"] for device in answers["all15"]["devices"]] == ["lost", "lost"]

    def test_revoked_device_nodes_are_no_removal(self, answers: Mapping[str, Any]) -> None:
        answer = answers["all999"]["devices"]
        assert (answer["error"], answer["reason"], answer["code"]) == ("BackendUnavailable", "error", 999)
        assert "re-create" in answer["hint"]

    def test_rows_that_wait_to_be_remapped_degrade(self, answers: Mapping[str, Any]) -> None:
        assert [device["state"] for device in answers["remap1"]["devices"]] == ["healthy", "degraded"]

    def test_memory_by_version_1_is_flagged(self, answers: Mapping[str, Any]) -> None:
        first = answers["nov2"]["devices"][0]
        assert first["includes_reserved"]
        assert first["memory_reserved_bytes"] is None
        assert first["memory_used_bytes"] == H100_RESERVED
        assert first["memory_total_bytes"] == H100_TOTAL

    def test_unified_memory_is_the_hosts(self, answers: Mapping[str, Any]) -> None:
        (device,) = answers["gb10"]["devices"]
        assert (device["name"], device["uuid"], device["pci_address"]) == ("NVIDIA GB10", UUID_GB10, PCI_GB10)
        assert device["unified_memory"]
        assert device["memory_total_bytes"] == 127600748 * 1024
        assert device["memory_free_bytes"] == 118566368 * 1024
        assert device["memory_reserved_bytes"] is None
        assert (device["compute_capability"], device["multiprocessor_count"]) == ("12.1", 48)
        assert device["memory_bandwidth_gbps"] is None
        assert device["state"] == "healthy"

    def test_board_that_tells_next_to_nothing_is_kept(self, answers: Mapping[str, Any]) -> None:
        (device,) = answers["orin"]["devices"]
        assert (device["name"], device["compute_capability"]) == ("Orin (nvgpu)", "8.7")
        assert device["unified_memory"]
        assert device["pci_address"] is None
        assert device["unavailable"]["core_count"] == "unsupported"

    def test_partitions(self, answers: Mapping[str, Any]) -> None:
        (device,) = answers["mig"]["devices"]
        parts = [(p["partition"], p["memory_total_bytes"], p["multiprocessor_count"]) for p in device["partitions"]]
        assert parts == [("2/0", 42412802048, 60), ("3/0", 20096 * MIB, 32)]
        assert device["partitions"][0]["uuid"].startswith("MIG-5e5e5e5e-")
        assert device["memory_total_bytes"] == H100_TOTAL

    def test_not_available_marks_are_no_values(self, answers: Mapping[str, Any]) -> None:
        first = answers["sentinel"]["devices"][0]
        for name in ("memory_total_bytes", "memory_free_bytes", "memory_used_bytes", "core_count", "max_clock_mhz"):
            assert first[name] is None, name
        assert first["unavailable"]["memory_total_bytes"] == "invalid"
        assert not first["unified_memory"]
        assert first["uuid"] == UUID_A


class TestTelemetry:
    def test_reading(self, answers: Mapping[str, Any]) -> None:
        reading = answers["ok2"]["telemetry"][PCI_B]
        assert reading == {
            "memory_total_bytes": H100_TOTAL,
            "memory_used_bytes": 8192 * MIB,
            "memory_free_bytes": H100_TOTAL - H100_RESERVED - 8192 * MIB,
            "memory_reserved_bytes": H100_RESERVED,
            "temperature_c": 63.0,
            "power_w": 421.5,
            "clock_mhz": 1980,
            "utilization_percent": 87.0,
            "unavailable": {},
        }
        assert answers["ok2"]["telemetry"][PCI_A]["power_w"] == 69.85

    def test_reading_follows_the_card_and_not_its_index(self, answers: Mapping[str, Any]) -> None:
        assert answers["swapped"]["telemetry"] == answers["ok2"]["telemetry"]

    @pytest.mark.parametrize("address", ["0000:7f:00.0", "nonsense"])
    def test_no_such_card(self, answers: Mapping[str, Any], address: str) -> None:
        assert answers["ok2"]["telemetry"][address]["error"] == "DeviceNotFound"

    @pytest.mark.parametrize("scenario", ["lost1", "fallen1"])
    def test_lost_card(self, answers: Mapping[str, Any], scenario: str) -> None:
        lost = answers[scenario]["telemetry"][PCI_B]
        assert (lost["error"], lost["code"], lost["cause"]) == ("DeviceLost", 15, "NVMLError_GpuIsLost")
        assert answers[scenario]["telemetry"][PCI_A]["temperature_c"] == 41

    def test_no_access_is_an_empty_reading_with_its_reason(self, answers: Mapping[str, Any]) -> None:
        reading = answers["all999"]["telemetry"][PCI_A]
        assert reading["memory_total_bytes"] is reading["temperature_c"] is None
        assert set(reading["unavailable"].values()) == {"error"}
        assert len(reading["unavailable"]) == 8

    @pytest.mark.parametrize(
        ("scenario", "field", "reason"),
        [
            ("util999", "utilization_percent", "error"),
            ("noperm_field", "temperature_c", "no_permission"),
            ("mig", "utilization_percent", "unsupported"),
            ("nov2", "memory_reserved_bytes", "unsupported"),
        ],
    )
    def test_failing_call_costs_its_field_only(
        self, answers: Mapping[str, Any], scenario: str, field: str, reason: str
    ) -> None:
        reading = answers[scenario]["telemetry"][PCI_A]
        assert reading["unavailable"] == {field: reason}
        assert [name for name, value in reading.items() if value is None] == [field]

    @pytest.mark.parametrize("scenario", ["absurd", "sentinel"])
    def test_values_no_card_can_have(self, answers: Mapping[str, Any], scenario: str) -> None:
        reading = answers[scenario]["telemetry"][PCI_A]
        for name in ("temperature_c", "power_w", "clock_mhz", "utilization_percent"):
            assert (reading[name], reading["unavailable"][name]) == (None, "invalid"), name
        assert (reading["memory_total_bytes"] is None) == (scenario == "sentinel")

    def test_unified_memory(self, answers: Mapping[str, Any]) -> None:
        reading = answers["gb10"]["telemetry"][PCI_GB10]
        assert reading["memory_total_bytes"] == 127600748 * 1024
        assert reading["memory_free_bytes"] == 118566368 * 1024
        assert (reading["power_w"], reading["temperature_c"]) == (11.17, 35)
        assert reading["unavailable"] == {"memory_reserved_bytes": "unsupported"}


class OldBinding(types.ModuleType):
    """What distributions other than nvidia-ml-py install as ``pynvml``: bytes, no memory version 2, few functions."""

    def __init__(self, power: int = 69850, temperature: int = 41) -> None:
        super().__init__("pynvml")
        self.open, self._power, self._temperature = 0, power, temperature

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        return object()

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> object:
        assert address == b"00000000:01:00.0"
        return object()

    def nvmlDeviceGetName(self, handle: object) -> bytes:
        return b"NVIDIA L4"

    def nvmlDeviceGetUUID(self, handle: object) -> bytes:
        return UUID_A.encode()

    def nvmlDeviceGetPciInfo(self, handle: object) -> object:
        return types.SimpleNamespace(busId=b"00000000:01:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> object:
        return types.SimpleNamespace(total=1000, free=600, used=400)

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int) -> int:
        return self._temperature

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:
        return self._power


class TestOtherBindings:
    def test_old_binding_is_used_for_what_it_can(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        binding = OldBinding()
        monkeypatch.setitem(sys.modules, "pynvml", binding)
        with nvml.open_session() as session:
            (device,) = session.devices()
            reading = session.telemetry("01:00.0")
        assert (device.name, device.uuid, device.pci_address) == ("NVIDIA L4", UUID_A, "00000000:01:00.0")
        assert (device.memory_total_bytes, device.memory_used_bytes, device.includes_reserved) == (1000, 400, True)
        assert not device.unified_memory
        assert device.unavailable["compute_capability"] == "unsupported"
        assert (reading.temperature_c, reading.power_w, reading.clock_mhz) == (41, 69.85, None)
        assert reading.unavailable["clock_mhz"] == "unsupported"
        assert session.driver_version is None
        assert "nvidia-ml-py" in caplog.text
        assert binding.open == 0

    @pytest.mark.parametrize(
        ("raw", "expected"),
        [(41, 41), (2**32 - 5, -5), (2**32 - 1, None), (2**32 - 51, None), (250, 250), (251, None), (2**31, None)],
    )
    def test_temperatures(self, monkeypatch: pytest.MonkeyPatch, raw: int, expected: int | None) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", OldBinding(temperature=raw))
        with nvml.open_session() as session:
            reading = session.telemetry("01:00.0")
        assert reading.temperature_c == expected
        assert reading.unavailable.get("temperature_c") == (None if expected is not None else "invalid")

    def test_module_that_is_something_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
        with pytest.raises(BackendUnavailable) as caught:
            nvml.open_session()
        assert caught.value.reason is ReasonCode.NO_LIBRARY
        assert "pip install nvidia-ml-py" in str(caught.value.install_hint)

    def test_binding_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        with pytest.raises(BackendUnavailable) as caught:
            nvml.open_session()
        assert caught.value.reason is ReasonCode.NO_LIBRARY
        assert caught.value.install_hint == "pip install nvidia-ml-py"
        assert isinstance(caught.value.__cause__, ImportError)
