"""Detection: devices that are missed, invented, or lost without a word. The numbers are those of docs/problems.md."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurt import plugins
from gpurt.backends.cuda_backend import CUDADriver
from gpurt.cluster.changes import ChangeKind
from gpurt.cluster.state import device_keys
from gpurt.discovery.events import EventType
from gpurt.discovery.probe import ChildProber
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.wire import Failure, ProbeOutcome
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.factory import GPUBackendFactory
from gpurt.sources.pci import NVIDIA, has_pci_vendor
from gpurt.testing.faults import Fault
from gpurt.types import DeviceState, GPUDevice
from tests.discovery.cuda_rig import FakeCuPy
from tests.discovery.records import GIB, UUIDS, cpu, device
from tests.problems.rig import (
    Children,
    Host,
    Tree,
    a_cluster,
    answers_after,
    as_json,
    kinds,
    machine,
    plugged,
    rest,
    take,
)
from tests.sources import trees
from tests.support.fake_cuda import FakeRuntime, install, install_nvml
from tests.support.nvml_stub import NvmlStub, nvml_stub

__all__ = ["nvml_stub"]

on_posix = pytest.mark.skipif(sys.platform == "win32", reason="probe scripts use POSIX signals")

NO_DRIVER = Failure(ReasonCode.NO_DRIVER, "the kernel driver is not loaded")


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


@pytest.fixture
def unlisted(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    """CUDA with three cards of a make that no table of ours has, and without NVML."""
    runtime = install(monkeypatch, FakeRuntime(devices=3))
    install_nvml(monkeypatch, BackendUnavailable("libnvidia-ml not found", reason=ReasonCode.NO_DRIVER))
    for properties in runtime.properties:
        properties.update(name=b"NVIDIA Prototype 9090", major=99, minor=1)
        for key in ("clockRate", "memoryClockRate", "memoryBusWidth"):
            del properties[key]
    with plugged(CUDADriver(environ={}), "accel"):
        yield runtime


# What is there is listed


async def test_d01_cards_of_no_table_are_all_listed(unlisted: FakeRuntime, registry: Path) -> None:
    result = await GPUDiscoveryService(registry, backends=["accel", "cpu"]).discover_all_devices()
    found = [each for each in result.devices if each.backend == "cuda"]
    assert [(each.device_id, each.name, each.usable) for each in found] == [
        (f"cuda:{n}", "NVIDIA Prototype 9090", True) for n in range(3)
    ]


async def test_d03_what_no_table_tells_is_unknown_and_not_zero(unlisted: FakeRuntime, registry: Path) -> None:
    result = await GPUDiscoveryService(registry, backends=["accel"]).discover_all_devices()
    card = result.devices[0]
    assert card.compute_capability == "99.1"
    assert (card.tensor_core_count, card.clock_rate_mhz, card.bandwidth_gbps) == (None, None, None)
    assert card.memory_bytes == unlisted.capacity


async def test_d04_four_devices_of_one_host_are_four_for_the_master(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster:
        await cluster.start("n1", simulate="h100x4")
        assert cluster.available("n1") == [f"simulated:{n}" for n in range(4)]
        assert len({key for _, key in cluster.view.snapshot().available_devices}) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for NVML is an ELF library")
@pytest.mark.skipif(has_pci_vendor(Path("/"), NVIDIA) is True, reason="this machine's bus shows an NVIDIA card")
async def test_d20_partitions_are_listed_whatever_the_bus_shows(nvml_stub: NvmlStub, registry: Path) -> None:
    environ = nvml_stub.env("mig")
    async with GPUDiscoveryService(registry, backends=["cuda", "cpu"], environ=environ) as service:
        result = await service.discover_all_devices()
    found = {each.identity.partition: each for each in result.devices if each.backend == "cuda" and each.identity}
    assert {"2/0", "3/0"} <= found.keys()
    assert all(found[part].stable_id.startswith("MIG-") for part in ("2/0", "3/0"))


# What is not there has a reason, and costs nobody else


async def test_d02_without_nvidias_library_a_worker_serves_on_the_processor(
    nvml_stub: NvmlStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in nvml_stub.env("init12").items():  # what the binding says where there is no library
        monkeypatch.setenv(variable, value)
    async with a_cluster(tmp_path) as cluster:
        await cluster.start("n1", backends=["cuda", "cpu"])
        node = cluster.node("n1")
        assert (node.gpu_backend, cluster.available("n1")) == ("cpu", ["cpu:0"])
        report = {each.name: each for each in node.reports}["cuda"]
        assert (report.status, report.reason) == ("unavailable", ReasonCode.NO_DRIVER)
        assert "libnvidia-ml" in report.message
        assert report.hint


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for NVML is an ELF library")
async def test_d05_a_driver_that_fails_beside_its_device_nodes_is_no_absence(
    nvml_stub: NvmlStub, registry: Path, tmp_path: Path
) -> None:
    for n in range(4):
        (tmp_path / f"nvidia{n}").touch()
    (tmp_path / "nvidiactl").touch()
    child = (
        "import pathlib, gpurt.sources.nvml_errors as errors; from gpurt.discovery.probe_child import main\n"
        f"errors._DEV = pathlib.Path({str(tmp_path)!r}); raise SystemExit(main(['cuda']))"
    )
    prober = ChildProber(command=lambda _: (sys.executable, "-P", "-c", child))
    environ = nvml_stub.env("init999")
    async with GPUDiscoveryService(registry, backends=["cuda", "cpu"], environ=environ, prober=prober) as service:
        result = await service.discover_all_devices()
    report = result.reports[0]
    assert (report.status, report.reason) == ("unavailable", ReasonCode.ERROR)
    assert "unknown error" in report.message
    assert "/dev/nvidia0, /dev/nvidia1, /dev/nvidia2, /dev/nvidia3" in report.message
    assert report.hint
    assert (result.backend_name, result.discovery_status) == ("cpu", "partial")


async def test_d06_a_driver_that_is_unloaded_is_told_with_its_reason(tmp_path: Path) -> None:
    driver = machine("h100x2")
    async with a_cluster(tmp_path) as cluster:
        with plugged(driver):
            worker = await cluster.start("n1", backends=["accel", "cpu"])
            assert cluster.available("n1") == ["accel:0", "accel:1", "cpu:0"]
            changes = cluster.view.changes()
            gone = driver.inject(Fault("open", raises=BackendUnavailable("not loaded", reason=ReasonCode.NO_DRIVER)))
            await cluster.until(lambda: cluster.available("n1") == ["cpu:0"])
            node = cluster.node("n1")
            report = {each.name: each for each in node.reports}["accel"]
            assert (report.reason, "not loaded" in report.message) == (ReasonCode.NO_DRIVER, True)
            # Two devices still, and why they cannot be used: never silently none.
            kept = [each for each in node.gpu_devices if each.backend == "accel"]
            assert [(each.usable, each.state) for each in kept] == [(False, DeviceState.SUSPECT)] * 2
            assert all("no_driver" in (each.state_reason or "") for each in kept)
            assert gone.raises is not None
            driver.clear()
            await worker.discovery.discover_all_devices()
            await cluster.until(lambda: len(cluster.available("n1")) == 3)
            changes.close()
            told = [change.kind async for change in changes if change.device]
            assert told.count(ChangeKind.DEVICE_HEALTH) == 4
            assert not {ChangeKind.DEVICE_ADDED, ChangeKind.DEVICE_REMOVED} & set(told)


async def test_d07_one_of_four_that_is_lost_is_lost_alone(tmp_path: Path) -> None:
    driver = machine("h100x4")
    driver.inject(Fault("attach", index=2, lose=True))
    async with a_cluster(tmp_path) as cluster:
        with plugged(driver):
            await cluster.start("n1", backends=["accel"])
            states = {each.device_id: each.state for each in cluster.node("n1").gpu_devices}
            assert states == {f"accel:{n}": DeviceState.LOST if n == 2 else DeviceState.HEALTHY for n in range(4)}
            assert cluster.available("n1") == ["accel:0", "accel:1", "accel:3"]


async def test_d08_when_all_refuse_the_error_has_each_ones_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {})
    said = {
        "cuda": ImportError("No module named 'cupy'"),
        "rocm": BackendUnavailable("HIP is too old", reason=ReasonCode.DRIVER_MISMATCH, hint="upgrade ROCm"),
        "vulkan": OSError("libvulkan.so.1: cannot open shared object file"),
        "cpu": RuntimeError("out of luck"),
    }
    for name, error in said.items():
        driver = machine("h100", name)
        driver.inject(Fault("open", raises=error))
        plugins.register(name, lambda driver=driver: driver, replace=True)
    with pytest.raises(BackendUnavailable) as caught:
        await GPUBackendFactory.create_backend(candidates=list(said), environ={})
    for name, error in said.items():
        assert f"{name} (" in str(caught.value)
        assert (error.message if isinstance(error, BackendUnavailable) else str(error)) in str(caught.value)
    assert "driver_mismatch" in str(caught.value)
    assert "upgrade ROCm" in str(caught.value.hint)
    assert [report.name for report in GPUBackendFactory.last_reports()] == list(said)
    assert isinstance(caught.value.__cause__, ExceptionGroup)


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for NVML is an ELF library")
async def test_d09_cuda_is_found_where_nvml_finds_no_driver(
    nvml_stub: NvmlStub, registry: Path, tmp_path: Path
) -> None:
    """As under WSL 2: the management library says that no driver is loaded, and CUDA works."""
    environ = nvml_stub.env("init9") | {"PYTHONPATH": str(FakeCuPy(tmp_path).site)}
    async with GPUDiscoveryService(registry, backends=["cuda", "cpu"], environ=environ) as service:
        result = await service.discover_all_devices()
    assert result.reports[0].status == "ok"
    assert [(each.device_id, each.usable) for each in result.devices[:2]] == [("cuda:0", True), ("cuda:1", True)]
    assert result.backend_name == "cuda"


FORKING = """
import asyncio, os, sys
from gpurt.discovery.events import EventType
from gpurt.discovery.service import GPUDiscoveryService

async def main():
    async with GPUDiscoveryService(sys.argv[1], backends=["cuda", "cpu"]) as service:
        result = await service.discover_all_devices()
    assert [each.backend for each in result.devices][:2] == ["cuda", "cuda"], result.devices

asyncio.run(main())
loaded = [name for name in ("pynvml", "cupy", "cupy_backends") if name in sys.modules]
assert not loaded, loaded
maps = open("/proc/self/maps").read()
assert "libnvidia-ml" not in maps and "libcuda" not in maps
if (child := os.fork()) == 0:
    from gpurt.sources.nvml import open_session
    with_session = open_session()
    assert len(with_session.devices()) == 2
    with_session.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for NVML is an ELF library")
def test_d10_a_fork_after_discovery_starts_with_clean_libraries(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    program = tmp_path / "forking.py"
    program.write_text(FORKING)
    code = f"import runpy, sys; sys.argv = [{str(program)!r}, {str(tmp_path / 'registry.json')!r}]; "
    result = nvml_stub.python(code + "runpy.run_path(sys.argv[0], run_name='__main__')", "ok2")
    assert result.returncode == 0, result.stderr


# Probes that are slow, hang, crash


@on_posix
async def test_d11_a_validation_that_hangs_costs_its_library_alone(registry: Path, tmp_path: Path) -> None:
    cards = [device(n) for n in range(6)]
    others = [device(n, backend="other") for n in range(6)]
    children = Children(
        tmp_path,
        f"""
        if name == "cuda":
            say("opened", devices={as_json(*cards)!r})
            say("doing", message="verifying cuda:3")
            time.sleep(31)
        say("verified", devices={as_json(*others)!r})
        """,
    )
    async with children.service(registry, "cuda", "other", probe_timeout=1.5) as service:
        result = await service.discover_all_devices()
    cuda, other = result.reports
    assert (cuda.reason, other.status) == (ReasonCode.TIMEOUT, "ok")
    assert "verifying cuda:3" in cuda.message
    assert [(each.stable_id, each.backend, each.usable) for each in result.devices] == [
        (uuid, "other", True) for uuid in UUIDS
    ]
    assert all(each.backends == ("other", "cuda") for each in result.devices)
    assert children.alive == []


async def test_d12_a_late_answer_is_waited_for_and_nothing_is_removed_meanwhile(registry: Path) -> None:
    host = Host(cuda=(device(0),), toy=(cpu(backend="toy"),))
    await host.service(registry).discover_all_devices()
    host.shows["cuda"] = answers_after(40.0, device(0))
    service = host.service(registry)
    stale = await service.cached()
    assert stale is not None
    assert (stale.discovery_status, stale.devices[0].stable_id) == ("stale", UUIDS[0])
    subscription = service.subscribe(1000)
    usable = []
    for _ in range(3):
        result = await service.discover_all_devices()
        card = next(each for each in result.devices if each.stable_id == UUIDS[0])
        usable.append(card.usable)
        assert card.usable or (card.state, "timeout" in (card.state_reason or "")) == (DeviceState.UNRESPONSIVE, True)
    assert usable == [False, False, True]
    told = kinds(await rest(service, subscription))
    assert told[1:] == [
        ("backend_unavailable", "cuda"),
        ("health", UUIDS[0]),
        ("backend_available", "cuda"),
        ("recovered", UUIDS[0]),
    ]


async def test_d13_a_driver_of_uneven_speed_never_costs_its_device(registry: Path) -> None:
    host = Host(cuda=answers_after(5.0, device(0)), toy=(cpu(backend="toy"),))
    for seconds in (5.0, 12.0, 7.0, 12.0, 30.0):
        host.shows["cuda"] = answers_after(seconds, device(0))
        result = await host.service(registry).discover_all_devices()
        assert (result.backend_name, result.discovery_status) == ("cuda", "complete"), seconds


async def test_d14_devices_that_come_after_the_start_are_found(registry: Path) -> None:
    now = 1000.0
    host = Host(cuda=NO_DRIVER, toy=(cpu(backend="toy"),))
    service = host.service(registry, clock=lambda: now)
    subscription = service.subscribe()
    (first,) = await take(subscription, 1)
    assert first.snapshot is not None
    assert first.snapshot.backend_name == "toy"
    host.shows["cuda"] = (device(0), device(1))
    now += 10.1
    assert kinds(await take(subscription, 3)) == [
        ("backend_available", "cuda"),
        ("added", UUIDS[0]),
        ("added", UUIDS[1]),
    ]
    await service.shutdown()


@on_posix
async def test_d15_a_variable_that_hangs_one_library_leaves_the_others(registry: Path, tmp_path: Path) -> None:
    card = device(0, backend="other", vendor="amd", name="AMD Instinct MI300X")
    children = Children(
        tmp_path,
        f"""
        if name == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES") == "-1":
            say("doing", message="counting devices")
            signal.pause()
        say("verified", devices={as_json(card)!r})
        """,
    )
    environ = dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "-1"}
    async with children.service(registry, "cuda", "other", environ=environ, probe_timeout=1.5) as service:
        result = await service.discover_all_devices()
    assert [(each.name, each.reason) for each in result.reports] == [("cuda", ReasonCode.TIMEOUT), ("other", None)]
    assert [(each.backend, each.usable) for each in result.devices] == [("other", True)]


@on_posix
async def test_d16_a_probe_that_crashes_is_not_started_again_in_a_loop(registry: Path, tmp_path: Path) -> None:
    children = Children(
        tmp_path,
        f"""
        if name == "cuda":
            say("doing", message="loading the driver")
            os.kill(os.getpid(), signal.SIGSEGV)
        say("verified", devices={as_json(cpu(backend="other"))!r})
        """,
    )
    for _ in range(2):  # the second time after a restart of the process
        async with children.service(registry, "cuda", "other") as service:
            async for event in service.subscribe(0.01):
                assert event.type is EventType.SNAPSHOT
                break
            others = children.started("other")
            while children.started("other") < others + 2:
                await service._poll()
            result = await service.discover_all_devices(refresh=False)
            assert result.reports[0].reason is ReasonCode.CRASHED
            assert f"SIG{signal.SIGSEGV.name[3:]}" in result.reports[0].message
            assert "loading the driver" in result.reports[0].message
            assert result.backend_name == "other"
    assert children.started("cuda") == 1


# One device is one device, whoever shows it


async def test_d17_seen_by_cuda_first_and_by_another_library_after_a_restart(registry: Path) -> None:
    seen = device(0, backend="other", backend_name="other", known="uuid")
    host = Host(cuda=(device(0),), other=(seen,))
    first = await host.service(registry).discover_all_devices()
    assert [(each.stable_id, each.device_id, each.backends) for each in first.devices] == [
        (UUIDS[0], "cuda:0", ("cuda", "other"))
    ]
    host.shows["cuda"] = NO_DRIVER
    service = host.service(registry)
    subscription = service.subscribe(1000)
    second = await service.discover_all_devices()
    assert [(each.stable_id, each.device_id, each.usable) for each in second.devices] == [(UUIDS[0], "other:0", True)]
    told = {kind for kind, _ in kinds(await rest(service, subscription))}
    assert not told & {"added", "removed", "lost"}
    # A variable that hides the card hides it whoever shows it.
    nvml = device(0, backend_name="nvml", device_id="nvml:0", usable=False)
    no_device = Failure(ReasonCode.NO_DEVICE, "no CUDA-capable device is detected")
    host.shows["cuda"] = ProbeOutcome(sighted=(nvml,), failure=no_device)
    third = await host.service(registry, environ={"CUDA_VISIBLE_DEVICES": "-1"}).discover_all_devices()
    assert [(each.stable_id, each.usable) for each in third.devices] == [(UUIDS[0], False)]
    assert "hidden_by_environment" in (third.devices[0].state_reason or "")


async def test_d18_two_drivers_of_one_interface_show_one_card_once(registry: Path) -> None:
    radv = device(0, backend="other", backend_name="radv", known="uuid")
    amdvlk = device(0, backend="other", backend_name="amdvlk", known="uuid", device_id="other:1")
    result = await Host(other=(radv, amdvlk)).service(registry).discover_all_devices()
    assert [each.device_id for each in result.devices] == ["other:0"]


async def test_d19_cards_that_share_a_uuid_within_one_driver_stay_apart(registry: Path) -> None:
    cards: list[GPUDevice] = []
    for n in range(4):
        card = device(n // 2, backend="other", known="uuid", device_id=f"other:{n}")
        cards.append(card.model_copy(update={"memory_bytes": (n + 10) * GIB}))
    assert len({card.stable_id for card in cards}) == 2
    service = Host(other=tuple(cards)).service(registry)
    subscription = service.subscribe(1000)
    for _ in range(2):
        result = await service.discover_all_devices()
        assert [each.device_id for each in result.devices] == [f"other:{n}" for n in range(4)]
        assert [each.memory_bytes for each in result.devices] == [(n + 10) * GIB for n in range(4)]
        assert all(each.usable for each in result.devices)
    assert kinds(await rest(service, subscription)) == [("snapshot", None)]
    assert len(device_keys(result.devices)) == 4  # for the master, too


async def test_d21_a_card_that_was_taken_out_between_two_runs(tmp_path: Path) -> None:
    driver = machine("h100x2")
    with plugged(driver):
        async with a_cluster(tmp_path) as cluster:
            await cluster.start("n1", backends=["accel"])
            assert len(cluster.available("n1")) == 2
        driver.inner.remove("sim:0:h100:0")  # type: ignore[attr-defined]
        service = GPUDiscoveryService(tmp_path / "n1.json", backends=["accel"])
        subscription = service.subscribe(1000)
        result = await service.discover_all_devices()
        assert len(result.devices) == 1
        told = kinds(await rest(service, subscription))
        assert ("removed", "sim:0:h100:0") in told
        async with a_cluster(tmp_path) as cluster:
            await cluster.start("n1", backends=["accel"])
            assert len(cluster.node("n1").devices) == 1
            assert cluster.available("n1") == ["accel:0"]


async def test_d22_hosts_of_other_vendors_have_their_devices_listed(tmp_path: Path) -> None:
    amd, other = tmp_path / "amd", tmp_path / "other"
    for folder in (amd, other):
        folder.mkdir()
    trees.mi210_host(amd)
    result = await Tree(amd).discover("rocm", "cpu")
    (card,) = (each for each in result.devices if each.backend == "rocm")
    assert (card.name, card.vendor, card.memory_bytes) == ("AMD Instinct MI210", "amd", 68702699520)
    assert card.stable_id == trees.MI210_UUID
    # Listed, and why it is not used: its library is not installed.
    assert not card.usable
    assert "no_library" in (card.state_reason or "")
    trees.intel_host(other)
    result = await Tree(other).discover("vulkan", "cpu")
    shown = [each for each in result.devices if each.backend == "vulkan"]
    assert [(each.vendor, each.usable) for each in shown] == [("intel", False)] * 2
    assert {each.stable_id for each in shown} == {"pci:00000000:00:02.0", "pci:00000000:03:00.0"}
    # With a driver they are what is chosen.
    for name, spec in (("rocm", "mi300x"), ("vulkan", "phone")):
        with plugged(machine(spec, name)):
            service = GPUDiscoveryService(tmp_path / f"{name}.json", backends=[name, "cpu"])
            result = await service.discover_all_devices()
            assert (result.backend_name, result.devices[0].usable) == (name, True)
