"""NVIDIA's management library and its handles: the real nvidia-ml-py wherever the case allows it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.sight import sight
from gpurt.discovery.subscription import Subscription
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.sources.nvml import open_session
from gpurt.types import DeviceState
from tests.cases.rig import (
    Binding,
    Said,
    card,
    cards,
    cluster,
    installed,
    memory,
    outcome,
    rates,
    row,
    uuid,
    verified,
    working,
)
from tests.discovery.cuda_rig import FakeCuPy
from tests.support.nvml_stub import PCI_A, PCI_B, SOURCE, UUID_A, UUID_B, NvmlStub, nvml_stub

__all__ = ["nvml_stub"]


class Machine:
    """Two cards under a driver that a test may break while the service lives."""

    def __init__(self, stub: NvmlStub, folder: Path, scenario: str) -> None:
        self._file = folder / "scenario"
        self.become(scenario)
        cupy = FakeCuPy(folder)
        runtime = cupy.site / "cupy_backends/cuda/api/runtime.py"
        # Where the driver is gone, CUDA has no device either.
        driverless = f"    if open({str(self._file)!r}).read()[:3] in ('ini', 'all'): raise CUDARuntimeError(100)\n"
        where = "def getDeviceCount():\n"
        runtime.write_text(runtime.read_text().replace(where, where + driverless))
        environ = stub.env(file=self._file) | {"PYTHONPATH": str(cupy.site)}
        self.service = GPUDiscoveryService(folder / "r.json", backends=["cuda"], environ=environ)

    def become(self, scenario: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(scenario)
        os.replace(new, self._file)

    async def see(self, scenario: str) -> DiscoveryResult:
        self.become(scenario)
        return await self.service.discover_all_devices()

    async def told(self, subscription: Subscription) -> list[tuple[str, str | None]]:
        await self.service.shutdown()
        events: list[DeviceEvent] = [event async for event in subscription]
        return [
            (event.type.value, event.stable_id or event.backend)
            for event in events
            if event.type not in (EventType.MEMORY, EventType.SNAPSHOT)
        ]


FAILURES = {12: "install the NVIDIA driver", 9: "modprobe nvidia", 18: "reboot", 4: "group", 999: "re-create"}


def test_nvi_1_five_failures_have_five_reasons_and_remedies(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    """The command, as a person runs it."""

    def command(code: int) -> subprocess.Popen[str]:
        arguments = ["-m", "gpurt.discover", "--json", "--backend", "cuda", "--backend", "cpu"]
        arguments += ["--registry", str(tmp_path / f"{code}.json")]
        return subprocess.Popen(
            [sys.executable, *arguments], env=nvml_stub.env(f"init{code}"), stdout=subprocess.PIPE, text=True
        )

    running = {code: command(code) for code in FAILURES}
    said: set[tuple[str, str]] = set()
    for code, process in running.items():
        document = json.loads(process.communicate(timeout=60)[0])
        assert process.returncode == 1
        report = document["reports"][0]
        assert (report["name"], report["status"], document["backend_name"]) == ("cuda", "unavailable", "cpu")
        assert FAILURES[code] in report["hint"]
        said.add((report["message"].split(";")[0], report["hint"]))
    assert len(said) == len(FAILURES)


async def test_nvi_2_revoked_devices_are_unavailable_and_told_once(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    machine = Machine(nvml_stub, tmp_path, "ok2")
    assert all(device.usable for device in (await machine.see("ok2")).devices)
    subscription = machine.service.subscribe(1000)
    for scenario in ("init999", "all999", "init999"):
        result = await machine.see(scenario)
        assert {device.stable_id for device in result.devices} == {UUID_A, UUID_B}
        assert not any(device.usable for device in result.devices)
        assert all(device.state is DeviceState.SUSPECT for device in result.devices)
        assert result.reports[0].reason is ReasonCode.ERROR
        assert "re-create" in (result.reports[0].hint or "")
    assert Counter(await machine.told(subscription)) == Counter(
        [("backend_unavailable", "cuda"), ("health", UUID_A), ("health", UUID_B)]
    )


async def test_nvi_3_one_lost_card_of_four_costs_itself(tmp_path: Path) -> None:
    said = Said(cuda=await asyncio.to_thread(working, tmp_path, 0, 1, 2, 3))
    path = tmp_path / "r.json"
    await said.discover(path)
    lost = {"state": "lost", "reason": "GPU is lost [15]"}  # no handle: no name, no UUID, no address
    seen = await asyncio.to_thread(cards, tmp_path, card(0), card(1), card(2), lost)
    said.outcomes["cuda"] = outcome(seen, verified(*seen.devices[:3]))
    result = await said.discover(path)
    four = [device for device in result.devices if device.backend == "cuda"]
    assert [device.usable for device in four] == [True, True, True, False]
    gone = four[3]
    assert (gone.state, gone.stable_id) == (DeviceState.LOST, uuid(3))
    assert gone.identity is not None
    assert gone.identity.pci_address == "00000000:04:00.0"


def test_nvi_4_no_call_without_a_handle(nvml_stub: NvmlStub) -> None:
    """The stand-in aborts the process on a null handle, as the real library does."""
    code = f"""
from gpurt.errors import DeviceLost
from gpurt.sources.nvml import open_session
lost = 0
with open_session() as session:
    for _ in range(3):
        assert [device.state.value for device in session.devices()] == ["healthy", "lost"]
        for ask in (session.telemetry, session.condition, session.processes):
            ask({PCI_A!r})
            try:
                ask({PCI_B!r})
            except DeviceLost:
                lost += 1
print(lost)
"""
    done = nvml_stub.python(code, "lost1")
    assert (done.returncode, done.stdout) == (0, "9\n"), done.stderr


@pytest.mark.parametrize("as_bytes", [True, False])
def test_nvi_5_text_and_bytes_give_text(monkeypatch: pytest.MonkeyPatch, as_bytes: bool) -> None:
    def say(text: str) -> Any:
        return text.encode() if as_bytes else text

    answers = row("", "", (8, 9), MemoryInfo=memory(23034, 500, 0), UtilizationRates=rates(0))
    answers |= {"Name": say("NVIDIA L4"), "UUID": say(UUID_A)}
    answers["PciInfo"].busId = say("00000000:01:00.0")
    installed(monkeypatch, Binding(answers))
    line = sight("cuda", environ={}, root=Path("/no/such/tree"))
    assert line is not None
    (record,) = line.devices
    assert (record.name, record.stable_id) == ("NVIDIA L4", UUID_A)
    assert record.identity is not None
    assert record.identity.pci_address == "00000000:01:00.0"
    assert json.loads(record.model_dump_json())["name"] == "NVIDIA L4"


def test_nvi_6_another_module_of_that_name_is_used_for_what_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = row("NVIDIA L4", "00000000:01:00.0", (8, 9), MemoryInfo=memory(23034, 0, 500))
    installed(monkeypatch, Binding(answers, memory_v2=False))
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"pynvml": ["nvidia-ml-py3"]})
    with open_session() as session:
        (device,) = session.devices()
    assert (device.memory_total_bytes, device.includes_reserved) == (23034 << 20, True)
    assert "module pynvml comes from nvidia-ml-py3" in caplog.text
    assert "pip uninstall nvidia-ml-py3" in caplog.text


def test_nvi_7_missing_symbols_cost_their_fields(tmp_path: Path) -> None:
    """A library of an older driver: built without the symbols."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and ELF")
    text = SOURCE.read_text()
    for symbol in ("nvmlDeviceGetTemperature(", "nvmlDeviceGetComputeRunningProcesses_v3("):
        assert symbol in text
        text = text.replace(f"int {symbol}", f"int not_{symbol}")
    (tmp_path / "nvml.c").write_text(text)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "nvml.c")], check=True)
    code = f"""
import json
from gpurt.sources.nvml import open_session
with open_session() as session:
    first, second = session.devices()
    reading, processes = session.telemetry({PCI_A!r}), session.processes({PCI_A!r})
print(json.dumps([first.uuid, second.uuid, first.state, reading.temperature_c,
                  dict(reading.unavailable), reading.power_w, processes.reason]))
"""
    done = NvmlStub(library).python(code)
    assert done.returncode == 0, done.stderr
    first, second, state, temperature, unavailable, power, processes = json.loads(done.stdout)
    assert (first, second, state) == (UUID_A, UUID_B, "healthy")
    assert (temperature, unavailable, power) == (None, {"temperature_c": "unsupported"}, 69.85)
    assert processes in (None, "unsupported")  # version 2 of the call stands in where it is there


def test_nvi_8_a_forked_child_initialises_again(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = """
import os
from gpurt.sources.nvml import open_session
session = open_session()
child = os.fork()
if child == 0:
    os._exit(len(session.devices()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(session.devices()))
"""
    assert nvml_stub.python(code, log=log).stdout == "2 2\n"
    inits = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("init")]
    assert len(set(inits)) == 2


async def test_nvi_9_a_driver_that_comes_late_is_found(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    machine = Machine(nvml_stub, tmp_path, "init9")
    for _ in range(2):
        result = await machine.see("init9")
        assert (result.devices, result.reports[0].reason) == ((), ReasonCode.NO_DRIVER)
    subscription = machine.service.subscribe(1000)
    for _ in range(2):
        assert all(device.usable for device in (await machine.see("ok2")).devices)
    told = Counter(await machine.told(subscription))
    assert told == Counter([("added", UUID_A), ("added", UUID_B), ("backend_available", "cuda")])


async def test_nvi_11_pending_rows_degrade_and_replaced_ones_do_not(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    machine = Machine(nvml_stub, tmp_path, "remapped1")
    async with machine.service:
        assert all(device.usable for device in (await machine.see("remapped1")).devices)
        by_uuid = {device.stable_id: device for device in (await machine.see("remap1")).devices}
        assert (by_uuid[UUID_B].state, by_uuid[UUID_B].usable) == (DeviceState.DEGRADED, False)
        assert "reset" in (by_uuid[UUID_B].state_reason or "")
        assert by_uuid[UUID_A].usable


async def test_nvi_12_a_count_that_shrinks_is_a_removal_that_the_master_hears(tmp_path: Path) -> None:
    said = Said(cuda=await asyncio.to_thread(working, tmp_path, *range(8)))
    path = tmp_path / "r.json"
    before = await said.discover(path)
    said.outcomes["cuda"] = await asyncio.to_thread(working, tmp_path, 0, 1, 2, 3, 4, 6, 7)
    async with cluster() as (view, publisher, settled), said.service(path) as service:
        await publisher.start(before)
        subscription = service.subscribe(1000)
        await service.discover_all_devices()
        await service.shutdown()
        gone: list[str | None] = []
        async for event in subscription:
            await publisher.publish_event(event)
            if event.type is EventType.REMOVED:
                gone.append(event.stable_id)
        assert gone == [uuid(5)]
        await settled()
        record = view.node("n1")
        assert record is not None
        assert {uuid(n) for n in range(8)} - set(record.devices) == {uuid(5)}


def test_nvi_1_without_the_binding_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(BackendUnavailable) as caught:
        open_session()
    assert caught.value.reason is ReasonCode.NO_LIBRARY


async def test_nvi_6_a_module_made_by_hand_is_no_error_of_discovery(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some programs put a module of their own in the place of pynvml."""
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    said = Said(cuda=await asyncio.to_thread(working, tmp_path, 0))
    result = await said.discover(tmp_path / "r.json")
    assert result.backend_name == "cuda"
