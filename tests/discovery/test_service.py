"""The service: one answer out of everything, kept up to date."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import pytest

from gpurt.discovery.conversation import Sighted
from gpurt.discovery.events import DeviceEvent, EventType
from gpurt.discovery.registry import RegistryFile
from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.subscription import Subscription
from gpurt.discovery.wire import Failure, ProbeOutcome
from gpurt.errors import BackendClosed, ReasonCode
from gpurt.runtime.backend import DriverBackend
from gpurt.testing.faults import Fault, FaultyDriver
from gpurt.testing.profiles import parse_simulation
from gpurt.testing.simulated import SimulatedDriver, create_simulated
from gpurt.types import DeviceState, GPUDevice
from tests.discovery.records import UUIDS, cpu, device

TIMED_OUT = Failure(ReasonCode.TIMEOUT, "no answer")
NO_DRIVER = Failure(ReasonCode.NO_DRIVER, "not loaded")


class Host:
    """Stands in for child processes: what each backend shows at the moment."""

    def __init__(self, *devices: GPUDevice) -> None:
        self.shows: dict[str, Sequence[GPUDevice] | Failure] = {"cuda": devices, "toy": (cpu(backend="toy"),)}
        self.probes: list[str] = []
        self.deadlines: list[float] = []
        self.verified: list[Set[str]] = []
        self.gate: asyncio.Event | None = None
        self.gates: dict[str, asyncio.Event] = {}
        self.sees: dict[str, tuple[GPUDevice, ...]] = {}
        self.running = 0
        self.most_running = 0

    async def probe(
        self,
        name: str,
        *,
        deadline: float,
        environ: Mapping[str, str],
        verified: Set[str] = frozenset(),
        known: Set[str] = frozenset(),
        on_sighted: Sighted | None = None,
    ) -> ProbeOutcome:
        self.probes.append(name)
        self.deadlines.append(deadline)
        self.verified.append(verified)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            if on_sighted is not None and name in self.sees:
                on_sighted(self.sees[name])
            if self.gate is not None:
                await self.gate.wait()
            if name in self.gates:
                await self.gates[name].wait()
        finally:
            self.running -= 1
        shown = self.shows[name]
        if isinstance(shown, Failure):
            return ProbeOutcome(failure=shown)
        return ProbeOutcome(verified=tuple(shown))

    def service(self, path: Path, **options: Any) -> GPUDiscoveryService:
        options = {"backends": ["cuda", "toy"], "environ": {}, "interval": 0.02} | options
        return GPUDiscoveryService(registry_path=path, prober=self, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


async def take(subscription: Subscription, count: int) -> list[DeviceEvent]:
    async with asyncio.timeout(5):
        return [await anext(subscription) for _ in range(count)]


def kinds(events: Iterable[DeviceEvent]) -> list[tuple[str, str | None]]:
    return [(event.type.value, event.stable_id or event.backend) for event in events]


async def test_the_host_itself_is_found_by_the_real_thing(path: Path) -> None:
    async with GPUDiscoveryService(path) as service:
        result = await service.discover_all_devices()
    assert result["backend_name"] == next(device for device in result.devices if device.usable).backend
    assert "cpu:0" in [d.device_id for d in result["devices"]]
    assert [report.name for report in result.reports][-1] == "cpu"
    assert all(report.hint for report in result.reports if report.status != "ok")
    assert result.persisted
    assert result.registry == str(path)
    assert json.loads(path.read_text())["backend_name"] == result.backend_name


async def test_the_answer_of_all_backends_is_one(path: Path) -> None:
    host = Host(device(0), device(1))
    result = await host.service(path).discover_all_devices()
    assert [d.device_id for d in result.devices] == ["cuda:0", "cuda:1", "toy:0"]
    assert result.backend_name == "cuda"
    assert result.discovery_status == "complete"
    assert host.most_running == 2


async def test_a_backend_that_hangs_costs_only_itself(path: Path) -> None:
    host = Host()
    host.shows["cuda"] = TIMED_OUT
    result = await host.service(path).discover_all_devices()
    assert result.backend_name == "toy"
    assert result.discovery_status == "partial"
    assert result.reports[0].reason is ReasonCode.TIMEOUT


async def test_the_first_run_gets_more_time(path: Path) -> None:
    host = Host()
    await host.service(path).discover_all_devices()
    await host.service(path).discover_all_devices()
    await host.service(path, probe_timeout=3).discover_all_devices()
    assert host.deadlines == [30, 30, 10, 10, 3, 3]


async def test_a_passed_verification_is_remembered(path: Path) -> None:
    broken = device(1, usable=False, state_reason="failed verification: x", state=DeviceState.DEGRADED)
    host = Host(device(0), broken)
    first = await host.service(path).discover_all_devices()
    assert first.discovery_status == "partial"
    await host.service(path).discover_all_devices()
    assert any(key.startswith(UUIDS[0]) for key in host.verified[-1])
    assert not any(key.startswith(UUIDS[1]) for key in host.verified[-1])


async def test_the_registrys_answer_is_there_at_once_and_marked_stale(path: Path) -> None:
    host = Host(device(0))
    service = host.service(path)
    assert await service.cached() is None
    fresh = await service.discover_all_devices()
    cached = await service.cached()
    assert cached is not None
    assert cached.discovery_status == "complete"
    other = await host.service(path).cached()
    assert other is not None
    assert other.discovery_status == "stale"
    assert other.devices == fresh.devices
    assert other.age_s >= 0
    assert len(host.probes) == 2


async def test_ages_follow_the_monotonic_clock(path: Path) -> None:
    now = 100.0
    service = Host(device(0)).service(path, clock=lambda: now)
    await service.discover_all_devices()
    now += 7.0
    cached = await service.discover_all_devices(refresh=False)
    assert cached.age_s == 7.0


async def test_concurrent_callers_share_one_look_up(path: Path) -> None:
    host = Host(device(0))
    service = host.service(path)
    results = await asyncio.gather(*(service.discover_all_devices() for _ in range(20)))
    assert host.probes == ["cuda", "toy"]
    assert all(result is results[0] for result in results)


async def test_cancelling_one_caller_leaves_the_others_their_answer(path: Path) -> None:
    host = Host(device(0))
    host.gate = asyncio.Event()
    service = host.service(path)
    callers = [asyncio.create_task(service.discover_all_devices()) for _ in range(2)]
    while host.running < 2:
        await asyncio.sleep(0.001)
    callers[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await callers[0]
    host.gate.set()
    assert (await callers[1]).backend_name == "cuda"
    assert host.probes == ["cuda", "toy"]


async def test_shutdown_ends_a_running_look_up_and_all_iterators_and_the_service_works_again(path: Path) -> None:
    host = Host(device(0))
    service = host.service(path)
    await service.discover_all_devices()
    watcher = service.watch(1000)
    await anext(watcher)
    watching = asyncio.ensure_future(anext(watcher, None))
    subscription = service.subscribe(1000)
    await take(subscription, 1)
    subscribed = asyncio.ensure_future(anext(subscription, None))
    host.gate = asyncio.Event()
    running = asyncio.create_task(service.discover_all_devices())
    while host.running < 2:
        await asyncio.sleep(0.001)
    started = time.monotonic()
    await service.shutdown()
    await service.shutdown()
    assert time.monotonic() - started < 1.0
    with pytest.raises(BackendClosed):
        await running
    assert host.running == 0
    async with asyncio.timeout(1):
        assert await watching is None
        assert await subscribed is None
    host.gate = None
    assert (await service.discover_all_devices()).backend_name == "cuda"


def test_a_service_may_serve_one_loop_after_another(path: Path) -> None:
    service = Host(device(0)).service(path)

    async def once() -> str | None:
        async with service:
            subscription = service.subscribe()
            result = await service.discover_all_devices()
            await take(subscription, 1)
            return result.backend_name

    assert [asyncio.run(once()) for _ in range(3)] == ["cuda"] * 3


async def test_a_card_that_comes_and_goes_is_one_event_each(path: Path) -> None:
    host = Host(device(0))
    service = host.service(path)
    subscription = service.subscribe()
    (first,) = await take(subscription, 1)
    assert first.type is EventType.SNAPSHOT
    assert first.snapshot is not None
    host.shows["cuda"] = (device(0), device(1))
    assert kinds(await take(subscription, 1)) == [("added", UUIDS[1])]
    host.shows["cuda"] = (device(1),)
    assert kinds(await take(subscription, 1)) == [("removed", UUIDS[0])]
    seen = len(host.probes)
    while len(host.probes) < seen + 6:
        await service._poll()
    await service.shutdown()
    assert [event async for event in subscription] == []


async def test_a_permutation_after_a_restart_is_no_addition(path: Path) -> None:
    host = Host(device(0, device_id="cuda:0"), device(1, device_id="cuda:1"))
    await host.service(path).discover_all_devices()
    host.shows["cuda"] = (device(1, device_id="cuda:0"), device(0, device_id="cuda:1"))
    service = host.service(path)
    subscription = service.subscribe()
    events = await take(subscription, 3)
    assert [event.type.value for event in events] == ["snapshot", "changed", "changed"]
    assert events[0].snapshot is not None
    assert events[0].snapshot.discovery_status == "stale"


async def test_a_card_that_went_while_nobody_looked_is_removed(path: Path) -> None:
    host = Host(*(device(n) for n in range(4)))
    await host.service(path).discover_all_devices()
    host.shows["cuda"] = tuple(device(n) for n in range(3))
    events = await take(host.service(path).subscribe(), 2)
    assert kinds(events)[1] == ("removed", UUIDS[3])


async def test_a_card_that_is_on_no_bus_any_more_is_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurt.discovery.survey.has_pci_vendor", lambda *_: False)
    host = Host(device(0))
    await host.service(path).discover_all_devices()
    host.shows["cuda"] = NO_DRIVER
    events = await take(host.service(path).subscribe(), 2)
    assert kinds(events)[1] == ("removed", UUIDS[0])


async def test_a_failed_enumeration_removes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurt.discovery.survey.has_pci_vendor", lambda *_: None)  # nobody knows what is on the bus
    host = Host(device(0))
    await host.service(path).discover_all_devices()
    host.shows["cuda"] = NO_DRIVER
    service = host.service(path)
    subscription = service.subscribe()
    events = await take(subscription, 3)
    assert kinds(events)[1:] == [("backend_unavailable", "cuda"), ("health", UUIDS[0])]
    cached = await service.cached()
    assert cached is not None
    assert [(d.stable_id, d.usable) for d in cached.devices if d.backend == "cuda"] == [(UUIDS[0], False)]
    # Known after yet another restart, and back when the driver is.
    host.shows["cuda"] = (device(0),)
    events = await take(host.service(path).subscribe(), 3)
    assert kinds(events)[1:] == [("backend_available", "cuda"), ("recovered", UUIDS[0])]


async def test_a_corrupt_registry_is_a_snapshot_not_removals(path: Path) -> None:
    path.write_bytes(b"\0" * 100)
    events = await take(Host(device(0), device(1)).service(path).subscribe(), 1)
    assert events[0].type is EventType.SNAPSHOT
    assert (events[0].reason or "").startswith("recovered")


async def test_watching_respects_the_back_off_and_an_explicit_call_does_not(path: Path) -> None:
    now = 1000.0
    host = Host()
    host.shows["cuda"] = NO_DRIVER
    service = host.service(path, clock=lambda: now)
    await service._poll()
    assert host.probes.count("cuda") == 1
    for _ in range(3):
        await service._poll()
    assert host.probes.count("cuda") == 1
    assert host.probes.count("toy") == 4
    now += 10.1
    await service._poll()
    assert host.probes.count("cuda") == 2
    now += 10.1
    await service._poll()
    assert host.probes.count("cuda") == 2
    await service.discover_all_devices()
    assert host.probes.count("cuda") == 3


async def test_a_restart_looks_again_but_does_not_crash_in_a_loop(path: Path) -> None:
    host = Host()
    host.shows["cuda"] = NO_DRIVER
    await host.service(path)._poll()
    await host.service(path)._poll()
    assert host.probes.count("cuda") == 2
    host.shows["cuda"] = Failure(ReasonCode.CRASHED, "SIGSEGV")
    await host.service(path).discover_all_devices()
    result = await host.service(path)._poll()
    assert host.probes.count("cuda") == 3
    assert result.reports[0].reason is ReasonCode.CRASHED
    await host.service(path).discover_all_devices()
    assert host.probes.count("cuda") == 4


async def test_watch_yields_only_what_changed(path: Path) -> None:
    host = Host(device(0))
    service = host.service(path)
    seen: list[DiscoveryResult] = []
    async with asyncio.timeout(5):
        async for result in service.watch():
            seen.append(result)
            if len(seen) == 2:
                break
            probes = len(host.probes)
            asyncio.get_running_loop().call_later(0.1, lambda: host.shows.update(cuda=(device(0), device(1))))
    assert len(host.probes) > probes + 2
    assert [len(result.devices) for result in seen] == [2, 3]


async def test_a_subscriber_that_does_not_read_gets_a_snapshot(path: Path) -> None:
    host = Host(device(0))
    service = host.service(path)
    slow = service.subscribe(1000, max_events=3)
    quick = service.subscribe(1000)
    for n in (1, 2, 3, 4):
        host.shows["cuda"] = (device(n),)
        await service.discover_all_devices()
    (event,) = await take(slow, 1)
    assert event.type is EventType.SNAPSHOT
    assert event.reason == "overflow"
    assert event.snapshot is not None
    assert event.snapshot.devices[0].stable_id == UUIDS[4]
    assert len(await take(quick, 7)) == 7


async def test_free_memory_is_said_at_most_every_ten_seconds(path: Path) -> None:
    now = 0.0
    host = Host()
    service = host.service(path, clock=lambda: now)
    subscription = service.subscribe(1e9)
    for step in range(30):
        now = float(step)
        host.shows["cuda"] = (device(0, memory_available=(70 - step) << 30),)
        await service.discover_all_devices()
    await service.shutdown()
    events = [event.type.value async for event in subscription]
    assert events == ["snapshot", "memory", "memory", "memory"]


async def test_a_change_of_free_memory_that_was_held_is_said_afterwards(path: Path) -> None:
    now = 0.0
    host = Host()
    service = host.service(path, clock=lambda: now)
    subscription = service.subscribe(1e9)
    for now, free in ((0.0, 70), (1.0, 60), (2.0, 20), (12.0, 20), (30.0, 20)):  # noqa: B007 - the clock reads it
        host.shows["cuda"] = (device(0, memory_available=free << 30),)
        await service.discover_all_devices()
    await service.shutdown()
    said = [event.device.memory_available async for event in subscription if event.device is not None]
    assert said == [60 << 30, 20 << 30]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
async def test_discovery_answers_although_nothing_can_be_saved(
    path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fails)
    service = Host(device(0)).service(path)
    for _ in range(2):
        result = await service.discover_all_devices()
        assert result.backend_name == "cuda"
        assert not result.persisted
    assert len([r for r in caplog.records if "not saved" in r.message]) == 1


async def test_a_newer_registry_is_not_touched(path: Path) -> None:
    path.write_text('{"schema": 99}')
    result = await Host(device(0)).service(path).discover_all_devices()
    assert not result.persisted
    assert path.read_text() == '{"schema": 99}'


async def test_asking_one_backend_does_not_forget_the_others(path: Path) -> None:
    host = Host(device(0))
    await host.service(path).discover_all_devices()
    result = await host.service(path, backends=["toy"]).discover_all_devices()
    assert [d.device_id for d in result.devices] == ["toy:0"]
    stored = await host.service(path).cached()
    assert stored is not None
    assert {d.device_id for d in stored.devices} == {"cuda:0", "toy:0"}
    assert stored.backend_name == "cuda"


async def test_an_unknown_backend_is_a_report_not_an_exception(path: Path) -> None:
    async with GPUDiscoveryService(path, backends=["no_such"]) as service:
        result = await service.discover_all_devices()
    assert result.discovery_status == "failed"
    assert result.backend_name is None
    assert "no_such" in result.reports[0].message


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPUDiscoveryService("a", registry_path="b"),
        lambda: GPUDiscoveryService(backends=[]),
        lambda: GPUDiscoveryService(interval=0),
        lambda: GPUDiscoveryService(probe_timeout=-1),
        lambda: GPUDiscoveryService(probe_timeout=float("nan")),
        lambda: GPUDiscoveryService().subscribe(0),
        lambda: GPUDiscoveryService().subscribe(max_events=0),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"given twice|at least one|positive"):
        make()


async def test_a_registry_that_only_counts_epochs_remembers_no_discovery(path: Path) -> None:
    await asyncio.to_thread(RegistryFile(path).next_epoch)
    assert await Host().service(path).cached() is None
    host = Host()
    host.shows["toy"] = host.shows["cuda"] = Failure(ReasonCode.NO_DEVICE, "none")
    await host.service(path).discover_all_devices()
    found_nothing = await host.service(path).cached()
    assert found_nothing is not None
    assert found_nothing.devices == ()
    assert len(found_nothing.reports) == 2


async def test_simulated_devices_among_the_hosts_are_not_remembered(path: Path) -> None:
    host = Host(device(0), device(1, simulated=True))
    result = await host.service(path).discover_all_devices()
    assert any(d.simulated for d in result.devices)
    cached = await host.service(path).cached()
    assert cached is not None
    assert [d.device_id for d in cached.devices] == ["cuda:0", "toy:0"]


# With a backend as the source


async def test_a_real_and_a_simulated_worker_do_not_announce_each_others_devices(path: Path) -> None:
    host = Host(device(0))
    async with create_simulated("h100x2", seed="w1") as backend:
        simulated = await GPUDiscoveryService(backend, registry_path=path).discover_all_devices()
        assert simulated.persisted
        assert await host.service(path).cached() is None
        first = await take(host.service(path).subscribe(), 1)
        assert first[0].snapshot is not None
        assert not any(d.simulated for d in first[0].snapshot.devices)
        cached = await GPUDiscoveryService(backend, registry_path=path).cached()
        assert cached is not None
        assert cached.discovery_status == "stale"
        assert [d.stable_id for d in cached.devices] == [d.stable_id for d in simulated.devices]
        assert [report.name for report in cached.reports] == ["simulated"]
    document = await asyncio.to_thread(RegistryFile(path).load)
    assert document is not None
    assert [d.device_id for d in document.devices] == ["cuda:0", "toy:0"]
    assert document.simulated is not None
    async with create_simulated("h100x2", seed="w2") as other:
        assert await GPUDiscoveryService(other, registry_path=path).cached() is None


async def test_a_given_backend_is_not_told_what_else_the_host_has(path: Path) -> None:
    from gpurt.backends.cpu_backend import CPUBackend

    await Host(device(0)).service(path).discover_all_devices()
    async with CPUBackend() as backend:
        assert await GPUDiscoveryService(backend, registry_path=path).cached() is None
        await GPUDiscoveryService(backend, registry_path=path).discover_all_devices()
        cached = await GPUDiscoveryService(backend, registry_path=path).cached()
        assert cached is not None
        assert [d.backend for d in cached.devices] == ["cpu"]
        assert [report.name for report in cached.reports] == ["cpu"]


async def test_an_opened_backend_is_asked_and_left_open(path: Path) -> None:
    async with create_simulated("h100x2") as backend:
        service = GPUDiscoveryService(backend, registry_path=path)
        result = await service.discover_all_devices()
        assert result["backend_name"] == "simulated"
        assert len(result["devices"]) == 2
        assert all(d.simulated for d in result.devices)
        await service.shutdown()
        await service.shutdown()
        await backend.synchronize(result.devices[0].device_id)


async def test_a_backend_with_a_corrupt_read_back_is_not_usable(path: Path) -> None:
    driver = FaultyDriver(SimulatedDriver(parse_simulation("h100x2")))
    async with DriverBackend(driver) as backend:
        service = GPUDiscoveryService(backend, registry_path=path)
        assert (await service.discover_all_devices()).discovery_status == "complete"
        driver.inject(Fault("read", index=1, corrupt=5))
        result = await service.discover_all_devices()
        assert result.discovery_status == "partial"
        assert [d.usable for d in result.devices] == [True, False]
        assert result.devices[1].state is DeviceState.DEGRADED


async def test_a_backend_that_was_not_initialised_is_told_so(path: Path) -> None:
    result = await GPUDiscoveryService(create_simulated("h100"), registry_path=path).discover_all_devices()
    assert result.discovery_status == "failed"
    assert "initialize" in (result.reports[0].hint or "")


async def test_a_backend_that_hangs_is_reported(path: Path) -> None:
    import threading

    gate = threading.Event()
    driver = FaultyDriver(SimulatedDriver(parse_simulation("h100")), [Fault("alloc", gate=gate)])
    async with DriverBackend(driver) as backend:
        service = GPUDiscoveryService(backend, registry_path=path, probe_timeout=0.2)
        result = await service.discover_all_devices()
        gate.set()
    assert result.reports[0].reason is ReasonCode.TIMEOUT
    assert [d.usable for d in result.devices] == [False]


async def first(seen: list[DiscoveryResult]) -> DiscoveryResult:
    async with asyncio.timeout(5):
        while not seen:
            await asyncio.sleep(0.001)
    return seen[0]


async def test_devices_are_told_before_their_driver_has_answered(path: Path) -> None:
    host = Host(device(0), device(1))
    host.sees["cuda"] = tuple(each.model_copy(update={"usable": False}) for each in (device(0), device(1)))
    host.gate = asyncio.Event()
    seen: list[DiscoveryResult] = []
    late: list[DiscoveryResult] = []
    async with host.service(path) as service:
        looking = asyncio.create_task(service.discover_all_devices(on_preview=seen.append))
        preview = await first(seen)
        sharing = asyncio.create_task(service.discover_all_devices(on_preview=late.append))
        await asyncio.sleep(0)
        assert not looking.done()
        assert late == seen
        assert (preview.discovery_status, preview.pending) == ("preview", ("cuda", "toy"))
        assert [each.stable_id for each in preview.devices] == [device(0).stable_id, device(1).stable_id]
        assert [(each.usable, each.state_reason) for each in preview.devices] == [(False, "not verified yet")] * 2
        host.gate.set()
        result = await looking
        assert await sharing == result
        assert [each.usable for each in result.devices] == [True] * 3
        assert "pending" not in result.document()
        # What is known better needs no preview.
        await service.discover_all_devices(on_preview=seen.append)
    assert len(seen) == 1


async def test_a_slow_backend_delays_nobody_elses_devices(path: Path) -> None:
    """HNG-3: one library needs 12 s to say no. The rest is known within a second, and the slow one is named."""
    host = Host(device(0))
    host.gates["toy"] = asyncio.Event()
    seen: list[DiscoveryResult] = []
    async with host.service(path) as service:
        looking = asyncio.create_task(service.discover_all_devices(on_preview=seen.append))
        preview = await first(seen)
        assert not looking.done()
        assert preview.pending == ("toy",)
        assert [report.name for report in preview.reports] == ["cuda"]
        assert [(each.backend, each.usable) for each in preview.devices] == [("cuda", True)]
        assert preview.backend_name == "cuda"
        host.gates["toy"].set()
        result = await looking
        assert [each.backend for each in result.devices] == ["cuda", "toy"]


async def test_a_crash_is_remembered_for_the_driver_that_crashed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HNG-2, NVI-9: not asked again in a loop, also after a restart, but at once when another driver is installed."""
    installed = {"cuda": "driver 1", "toy": "-"}
    monkeypatch.setattr("gpurt.discovery.installed.installed_mark", lambda name, root: installed[name])
    host = Host()
    host.shows["cuda"] = Failure(ReasonCode.CRASHED, "signal 11")

    async def poll(service: GPUDiscoveryService) -> int:
        before = host.probes.count("cuda")
        async for _ in service.watch(0.01):
            break
        return host.probes.count("cuda") - before

    async with host.service(path) as service:
        assert await poll(service) == 1
        assert await poll(service) == 0
    async with host.service(path) as service:
        assert await poll(service) == 0
        installed["cuda"] = "driver 2"
        host.shows["cuda"] = (device(0),)
        assert await poll(service) == 1
        result = await service.discover_all_devices(refresh=False)
        assert [each.usable for each in result.devices] == [True, True]


async def test_a_callback_that_fails_costs_nobody_the_devices(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = Host(device(0))
    host.sees["cuda"] = (device(0),)
    host.gate = asyncio.Event()
    seen: list[DiscoveryResult] = []

    def fails(_: DiscoveryResult) -> None:
        raise ZeroDivisionError("a caller's fault")

    async with host.service(path) as service:
        careless = asyncio.create_task(service.discover_all_devices(on_preview=fails))
        other = asyncio.create_task(service.discover_all_devices(on_preview=seen.append))
        await first(seen)
        host.gate.set()
        assert await careless == await other
    assert "a caller's fault" in caplog.text


async def test_the_preview_of_a_known_host_is_what_the_registry_remembers(path: Path) -> None:
    host = Host(device(0))
    async with host.service(path) as service:
        await service.discover_all_devices()
    seen: list[DiscoveryResult] = []
    host.sees["cuda"] = (device(0).model_copy(update={"usable": False}),)
    async with host.service(path) as service:
        await service.discover_all_devices(on_preview=seen.append)
    assert [preview.discovery_status for preview in seen] == ["stale"]
    assert seen[0].devices[0].usable


async def test_a_preview_that_nobody_waits_for_any_more_is_not_told(path: Path) -> None:
    host = Host(device(0))
    host.gate = asyncio.Event()
    host.sees["cuda"] = (device(0),)
    seen: list[DiscoveryResult] = []
    async with host.service(path) as service:
        impatient = asyncio.create_task(service.discover_all_devices(on_preview=seen.append))
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        host.gate.set()
        await service.discover_all_devices()
    assert seen == []
