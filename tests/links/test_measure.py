"""Measuring links: figures, failures, memory, and what is kept."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from gpurt.errors import BackendClosed, DeviceNotFound, OutOfMemory, OutOfRange, TransferFailed
from gpurt.links import Link, LinkType, keep_links, kept_links, measure_link, measure_links
from gpurt.links.measure import MAX_BYTES, SMALL_BYTES
from gpurt.runtime.backend import DriverBackend
from gpurt.testing import Fault, FaultyDriver, create_simulated
from gpurt.testing.profiles import parse_simulation
from gpurt.testing.simulated import SimulatedDriver
from tests.support.reference_driver import ReferenceDriver

KIB = 1 << 10
MIB = 1 << 20
A, B = "simulated:0", "simulated:1"


class TellingDriver(SimulatedDriver):
    """Says who reaches whom, as CUDA's does."""

    access: bool | None = True

    def peer_access(self, src_index: int, dst_index: int) -> bool | None:
        return self.access


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.json"


# Figures


async def test_a_link_has_its_figures_and_says_what_it_is() -> None:
    ticks = 0.0

    def clock() -> float:
        nonlocal ticks
        ticks += 0.004
        return ticks

    async with create_simulated("h100x2") as backend:
        link = await measure_link(backend, A, B, max_bytes=300_000, clock=clock)
        assert link.bytes_measured == 73 * SMALL_BYTES
        # 4 ms from one look at the clock to the next: five copies in a row make up a round of 20 ms.
        assert link.bandwidth_gbps == pytest.approx(73 * SMALL_BYTES / (0.004 / 5) / 1e9)
        assert link.latency_us == pytest.approx(4000)
        assert (link.src, link.dst) == tuple(device.stable_id for device in backend.devices)
        assert (link.src_device_id, link.dst_device_id) == (A, B)
        assert (link.simulated, link.failure) == (True, None)
        assert link.measured_at.endswith("+00:00")
        assert Link.model_validate_json(link.model_dump_json()) == link
        assert link["bandwidth_gbps"] == link.bandwidth_gbps


@pytest.mark.parametrize(
    ("machine", "gbps", "at_least"),
    [("h100x2", 450.0, 300.0), ("h100,h200", 64.0, 50.0), ("m2-ultra,h100", 64.0, 10.0)],
)
async def test_figures_are_those_of_the_machine(machine: str, gbps: float, at_least: float) -> None:
    lock, now = threading.Lock(), 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        with lock:
            now += seconds

    driver = SimulatedDriver(parse_simulation(machine), realtime=True, clock=lambda: now, sleep=sleep)
    async with DriverBackend(driver) as backend:
        link = await measure_link(backend, A, B, max_bytes=16 * MIB, clock=lambda: now)
    assert link.bandwidth_gbps is not None
    assert at_least < link.bandwidth_gbps < gbps
    assert link.latency_us is not None
    assert 10 <= link.latency_us < 200


@pytest.mark.parametrize(
    ("access", "dst", "link_type", "peers"),
    [
        (True, B, LinkType.UNKNOWN, True),
        (None, B, LinkType.UNKNOWN, None),
        (False, B, LinkType.HOST, False),
        (False, A, LinkType.SAME, True),
    ],
)
async def test_the_way_is_what_the_backend_found(
    access: bool | None, dst: str, link_type: LinkType, peers: bool | None
) -> None:
    driver = TellingDriver(parse_simulation("h100x2"))
    driver.access = access
    async with DriverBackend(driver) as backend:
        link = await measure_link(backend, A, dst, max_bytes=64 * KIB)
    assert (link.link_type, link.peer_access) == (link_type, peers)
    assert (link.link_reason is None) == (link_type is LinkType.SAME)
    assert link.bandwidth_gbps is not None


async def test_a_backend_that_says_nothing_is_unknown_with_a_reason() -> None:
    async with DriverBackend(FaultyDriver(SimulatedDriver(parse_simulation("h100x2")))) as backend:
        link = await measure_link(backend, A, B, max_bytes=64 * KIB)
    assert (link.link_type, link.peer_access) == (LinkType.UNKNOWN, None)
    assert "does not tell" in (link.link_reason or "")


async def test_simulated_devices_of_a_kind_reach_each_other() -> None:
    async with create_simulated("h100x2,l40s") as backend:
        near = await measure_link(backend, A, B, max_bytes=64 * KIB)
        far = await measure_link(backend, A, backend.devices[2].device_id, max_bytes=64 * KIB)
    assert (near.peer_access, far.peer_access, far.link_type) == (True, False, LinkType.HOST)


async def test_a_driver_without_peer_copies_goes_through_the_host() -> None:
    driver = SimulatedDriver(parse_simulation("h100x2"))
    driver.capabilities = driver.capabilities.model_copy(update={"p2p": False})
    async with DriverBackend(FaultyDriver(driver)) as backend:
        link = await measure_link(backend, A, B, max_bytes=64 * KIB)
    assert (link.link_type, link.peer_access) == (LinkType.HOST, False)


# All pairs


async def test_every_ordered_pair_is_measured_and_kept(path: Path) -> None:
    async with create_simulated("h100x3") as backend:
        links = await measure_links(backend, max_bytes=64 * KIB, registry_path=path)
        assert [(link.src_device_id[-1], link.dst_device_id[-1]) for link in links] == [
            *(("0", "1"), ("0", "2"), ("1", "0"), ("1", "2"), ("2", "0"), ("2", "1"))
        ]
        assert await kept_links(path) == links
        again = await measure_links(backend, [A, B, A], max_bytes=64 * KIB, registry_path=path)
        assert [(link.src_device_id, link.dst_device_id) for link in again] == [(A, B), (B, A)]
        replaced = {(A, B), (B, A)}
        others = [link for link in links if (link.src_device_id, link.dst_device_id) not in replaced]
        assert await kept_links(path) == (*again, *others)
    assert "topology" not in json.loads(await asyncio.to_thread(path.read_text))  # it is in the simulated part


async def test_one_device_has_no_links(path: Path) -> None:
    async with create_simulated("h100") as backend:
        assert await measure_links(backend, registry_path=path) == ()
    assert not await asyncio.to_thread(path.exists)


async def test_nothing_is_written_unasked(path: Path) -> None:
    async with create_simulated("h100x2") as backend:
        assert len(await measure_links(backend, max_bytes=64 * KIB, keep=False, registry_path=path)) == 2
    assert not await asyncio.to_thread(path.exists)


async def test_devices_without_lasting_names_are_measured_and_not_kept(path: Path) -> None:
    async with DriverBackend(ReferenceDriver()) as backend:
        assert all(device.identity is None or not device.identity.stable for device in backend.devices)
        links = await measure_links(backend, max_bytes=64 * KIB, registry_path=path)
    assert links
    assert not await asyncio.to_thread(path.exists)


async def test_a_registry_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def occupy() -> None:
        (tmp_path / "file").touch()

    await asyncio.to_thread(occupy)
    place = tmp_path / "file" / "registry.json"
    async with create_simulated("h100x2") as backend:
        links = await measure_links(backend, max_bytes=64 * KIB, registry_path=place)
        assert len(links) == 2
        assert not await keep_links(links, place)
    assert "not kept" in caplog.text
    assert await kept_links(place) == ()


# Failures


async def test_a_link_that_delivers_other_bytes_is_refused() -> None:
    driver = FaultyDriver(SimulatedDriver(parse_simulation("h100x2")), [Fault("read", index=1, corrupt=1234)])
    async with DriverBackend(driver) as backend:
        with pytest.raises(TransferFailed, match="other bytes") as caught:
            await measure_link(backend, A, B, max_bytes=64 * KIB)
        assert caught.value.device_id == B
        assert A in (caught.value.operation or "")
        assert (await measure_link(backend, B, A, max_bytes=64 * KIB)).failure is None


async def test_bytes_of_an_earlier_measurement_do_not_pass_for_new_ones() -> None:
    """A copy that does nothing finds in a pooled block what the last one brought."""

    class Idle(SimulatedDriver):
        idle = False

        def copy(self, *args: Any) -> None:
            if not self.idle:
                super().copy(*args)

    driver = Idle(parse_simulation("h100x2"))
    async with DriverBackend(driver, pool_bytes=MIB) as backend:
        await measure_link(backend, A, B, max_bytes=64 * KIB)
        driver.idle = True
        with pytest.raises(TransferFailed, match="other bytes"):
            await measure_link(backend, A, B, max_bytes=64 * KIB)


async def test_one_lost_device_costs_its_own_links(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inner = SimulatedDriver(parse_simulation("h100x3"))
    async with DriverBackend(FaultyDriver(inner, [Fault("copy", index=1, lose=True)])) as backend:
        links = await measure_links(backend, max_bytes=64 * KIB, registry_path=path)
    measured = {(link.src_device_id[-1], link.dst_device_id[-1]) for link in links if link.failure is None}
    # From 0 to 1 was measured before the device went.
    assert measured == {("0", "1"), ("0", "2"), ("2", "0")}
    for link in links:
        assert (link.bandwidth_gbps is None) == (link.latency_us is None) == (link.failure is not None)
        if link.failure:
            assert (link.link_type, link.link_reason) == (LinkType.UNKNOWN, "not measured")
            assert "simulated:1" in link.failure
    assert [record for record in caplog.records if record.levelno == logging.WARNING and "not measured" in record.msg]
    assert await kept_links(path) == links


async def test_a_full_device_fails_as_one_and_costs_the_others_nothing(path: Path) -> None:
    async with create_simulated("h100x2", memory_limit={A: 0, B: 1 << 30}) as backend:
        with pytest.raises(OutOfMemory):
            await measure_link(backend, A, B)
        links = await measure_links(backend, registry_path=path)
        assert all("limit" in (link.failure or "") for link in links)


async def test_a_failed_measurement_keeps_the_figures_of_the_last_good_one(path: Path) -> None:
    async with create_simulated("h100x2") as backend:
        good = await measure_links(backend, max_bytes=64 * KIB, registry_path=path)
    async with create_simulated("h100x2", memory_limit=1000) as backend:
        for _ in range(2):
            failed = await measure_links(backend, max_bytes=64 * KIB, registry_path=path)
            kept = await kept_links(path)
            for before, now, link in zip(good, failed, kept, strict=True):
                assert now.failure is not None
                assert now.bandwidth_gbps is None
                same = ("bandwidth_gbps", "latency_us", "measured_at", "link_type", "bytes_measured")
                assert [link[name] for name in same] == [before[name] for name in same]
                assert (link.failure, link.failed_at) == (now.failure, now.failed_at)
                assert link.failed_at is not None
    async with create_simulated("h100x2") as backend:
        again = await measure_links(backend, max_bytes=64 * KIB, registry_path=path)
    assert await kept_links(path) == again
    assert all(link.failure is None and link.failed_at is None for link in again)


async def test_arguments_of_other_kinds(path: Path) -> None:
    with pytest.raises(OutOfRange, match="NoneType") as caught:
        await measure_links(None, registry_path=path)  # type: ignore[arg-type]
    assert caught.value.operation == "measure_links"
    async with create_simulated("h100x2") as backend:
        for wrong in (1.5, "8", None, True):
            with pytest.raises(OutOfRange, match="max_bytes"):
                await measure_links(backend, max_bytes=wrong, registry_path=path)  # type: ignore[arg-type]


async def test_a_quarter_of_what_is_free_is_taken_at_most() -> None:
    async with create_simulated("h100x2", memory_limit={A: 400_000}) as backend:
        link = await measure_link(backend, A, B)
        assert link.bytes_measured == 100_000 // SMALL_BYTES * SMALL_BYTES < MAX_BYTES
        within = await measure_link(backend, A, A)
        assert within.link_type is LinkType.SAME


async def test_unknown_devices_and_closed_backends_are_errors(path: Path) -> None:
    backend = create_simulated("h100x2")
    with pytest.raises(BackendClosed):
        await measure_links(backend, registry_path=path)
    async with backend:
        for call in (measure_link(backend, A, "simulated:7"), measure_links(backend, [A, "simulated:7"])):
            with pytest.raises(DeviceNotFound, match="simulated:0, simulated:1"):
                await call
        with pytest.raises(ValueError, match="max_bytes"):
            await measure_link(backend, A, B, max_bytes=SMALL_BYTES - 1)
    assert not await asyncio.to_thread(path.exists)


async def test_memory_is_given_back_also_when_cancelled() -> None:
    gate = threading.Event()
    inner = SimulatedDriver(parse_simulation("h100x2"))
    driver = FaultyDriver(inner)
    async with DriverBackend(driver, pool_bytes=0) as backend:
        await measure_link(backend, A, B, max_bytes=64 * KIB)
        with pytest.raises(DeviceNotFound):
            await measure_link(backend, A, "nothing", max_bytes=64 * KIB)
        assert inner.live_allocations == 0
        copies = sum(call.method == "copy" for call in driver.calls)
        driver.inject(Fault("copy", nth=10, gate=gate))
        task = asyncio.ensure_future(measure_link(backend, A, B, max_bytes=64 * KIB))
        async with asyncio.timeout(5):
            while sum(call.method == "copy" for call in driver.calls) < copies + 10:
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await backend.synchronize(A)
        assert inner.live_allocations == 0
        assert not math.isnan((await measure_link(backend, A, B, max_bytes=64 * KIB)).bandwidth_gbps or math.nan)
