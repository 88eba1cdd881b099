"""Copies between devices over the stand-in runtime: access enabled once a pair, and the way through the host."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from tests.support.fake_cuda import MIB, CUDARuntimeError, FakeNvml, FakeRuntime, install, install_nvml, nvml_record

from gpurt.backends.cuda_backend import CUDABackend, CUDADriver
from gpurt.backends.cupy import bounce
from gpurt.errors import TransferFailed

DEVICES = 3
BOUNCE = 64 << 10


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    monkeypatch.setattr(bounce, "BOUNCE_BYTES", BOUNCE)
    install_nvml(monkeypatch, FakeNvml([nvml_record(index) for index in range(DEVICES)]))
    return install(monkeypatch, FakeRuntime(devices=DEVICES))


@pytest.fixture
def driver(runtime: FakeRuntime) -> Iterator[CUDADriver]:
    driver = CUDADriver(environ={})
    driver.open()
    yield driver
    leave(driver)
    driver.close()
    assert not runtime.streams
    assert not runtime.pinned


def leave(driver: CUDADriver) -> None:
    for index in range(DEVICES):
        driver.detach(index)


def copy(driver: CUDADriver, src: int, dst: int, nbytes: int = 1000, src_offset: int = 3, dst_offset: int = 5) -> None:
    """Copy between two allocations, and look at every byte of the target."""
    payload = np.random.default_rng(nbytes).bytes(src_offset + nbytes + 7)
    source, target = driver.alloc(src, len(payload)), driver.alloc(dst, dst_offset + nbytes + 11)
    driver.write(src, source, 0, memoryview(payload))
    driver.write(dst, target, 0, memoryview(b"\xee" * (dst_offset + nbytes + 11)))
    driver.copy(src, source, src_offset, dst, target, dst_offset, nbytes)
    back = bytearray(dst_offset + nbytes + 11)
    driver.read(dst, target, 0, memoryview(back))
    assert back == b"\xee" * dst_offset + payload[src_offset : src_offset + nbytes] + b"\xee" * 11
    driver.free(src, source)
    driver.free(dst, target)


# Access


def test_each_direction_of_each_pair_is_enabled_once(driver: CUDADriver, runtime: FakeRuntime) -> None:
    pairs = [(src, dst) for src in range(DEVICES) for dst in range(DEVICES) if src != dst]
    for _ in range(3):
        for src, dst in pairs:
            copy(driver, src, dst)
    assert sorted(runtime.enabled) == pairs
    assert runtime.calls.count("deviceEnablePeerAccess") == runtime.calls.count("deviceCanAccessPeer") == len(pairs)
    assert runtime.calls.count("memcpyPeerAsync") == 3 * len(pairs)


def test_threads_that_come_at_once_enable_it_once(driver: CUDADriver, runtime: FakeRuntime) -> None:
    together = Barrier(6)

    def work(number: int) -> None:
        together.wait(5)
        copy(driver, number % 2, 1 - number % 2, 100 + number)
        leave(driver)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert runtime.calls.count("deviceEnablePeerAccess") == 2


def test_drivers_of_one_process_share_what_is_enabled(driver: CUDADriver, runtime: FakeRuntime) -> None:
    copy(driver, 0, 1)
    other = CUDADriver(environ={})
    for _ in range(2):
        other.open()
        copy(other, 0, 1)
        leave(other)
        other.close()
    assert runtime.enabled == [(0, 1)]
    assert runtime.calls.count("memcpyPeerAsync") == 3


def test_copies_within_a_device_need_no_access(driver: CUDADriver, runtime: FakeRuntime) -> None:
    copy(driver, 1, 1, MIB + 1)
    assert "deviceCanAccessPeer" not in runtime.calls
    assert not runtime.pinned


def test_what_is_known_of_access(driver: CUDADriver, runtime: FakeRuntime) -> None:
    assert driver.peer_access(0, 1) is None
    assert driver.peer_access(2, 2) is True
    assert not runtime.enabled
    copy(driver, 0, 1)
    assert (driver.peer_access(0, 1), driver.peer_access(1, 0)) == (True, None)
    runtime.peers = False
    copy(driver, 1, 0)
    assert driver.peer_access(1, 0) is False
    driver.close()
    assert driver.peer_access(0, 1) is None


# Refused


@pytest.mark.parametrize("status", [217, 711])
def test_access_that_is_refused_late_goes_through_the_host(
    driver: CUDADriver, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Unsupported after all, or one peer too many: the runtime says so only when it is to be enabled."""
    asked: list[int] = []

    def enable(peer: int) -> None:
        asked.append(peer)
        raise CUDARuntimeError(status)

    monkeypatch.setattr(runtime, "deviceEnablePeerAccess", enable)
    copy(driver, 0, 1, 3 * BOUNCE + 1)
    copy(driver, 0, 1)
    assert asked == [1]
    assert "memcpyPeerAsync" not in runtime.calls
    assert driver.peer_access(0, 1) is False


def test_other_failures_are_failures(driver: CUDADriver, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    def enable(peer: int) -> None:
        raise CUDARuntimeError(700)

    monkeypatch.setattr(runtime, "deviceEnablePeerAccess", enable)
    with pytest.raises(CUDARuntimeError):
        copy(driver, 0, 1)
    assert driver.peer_access(0, 1) is None


SIZES = [1, 4095, BOUNCE - 1, BOUNCE, BOUNCE + 1, 2 * BOUNCE, 5 * BOUNCE + 12345]


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize(("src", "dst"), [(0, 1), (2, 0), (1, 1)])
@pytest.mark.parametrize(("src_offset", "dst_offset"), [(0, 0), (1, 0), (0, 3), (4097, 65537)])
def test_every_byte_arrives_and_no_other_changes(
    driver: CUDADriver, runtime: FakeRuntime, peers: bool, src: int, dst: int, src_offset: int, dst_offset: int
) -> None:
    runtime.peers = peers
    for nbytes in SIZES:
        copy(driver, src, dst, nbytes, src_offset, dst_offset)
    assert ("memcpyPeerAsync" in runtime.calls) == (peers and src != dst)


@pytest.mark.parametrize("pinned", [True, False])
def test_staged_copies_at_once_do_not_mix(driver: CUDADriver, runtime: FakeRuntime, pinned: bool) -> None:
    runtime.peers = False
    runtime.pin_limit = 1 << 40 if pinned else 0

    def work(number: int) -> None:
        copy(driver, number % 3, (number + 1) % 3, 3 * BOUNCE + number, number, 2 * number)
        leave(driver)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    assert bool(runtime.calls.count("hostAlloc"))


def test_copies_within_an_allocation(driver: CUDADriver) -> None:
    payload = np.random.default_rng(0).bytes(MIB)
    mem = driver.alloc(2, 2 * MIB)
    driver.write(2, mem, 0, memoryview(payload + bytes(MIB)))
    driver.copy(2, mem, 11, 2, mem, MIB + 7, MIB - 11)
    back = bytearray(MIB)
    driver.read(2, mem, MIB, memoryview(back))
    assert back == bytes(7) + payload[11:] + bytes(4)


# Through the backend


@pytest.mark.parametrize("peers", [True, False])
async def test_through_the_backend(runtime: FakeRuntime, peers: bool, tmp_path: Any) -> None:
    runtime.peers = peers
    payload = np.random.default_rng(1).bytes(3 * BOUNCE)
    async with CUDABackend(registry_path=tmp_path / "registry.json") as backend:
        handles = [await backend.allocate(f"cuda:{index}", len(payload) + 9) for index in (0, 1, 1)]
        await backend.copy_to_device(payload + bytes(9), handles[0])
        for handle in handles[1:]:
            await backend.copy_to_device(bytes(len(payload) + 9), handle)
        # In order, though they go over different ways.
        await asyncio.gather(
            backend.copy_device_to_device(handles[0], handles[1], len(payload) - 1, src_offset_bytes=1),
            backend.copy_device_to_device(handles[1], handles[2], len(payload) - 1, dst_offset_bytes=9),
            backend.copy_device_to_device(handles[2], handles[0], 100, src_offset_bytes=9, dst_offset_bytes=50),
        )
        assert await backend.copy_from_device(handles[2]) == bytes(9) + payload[1:] + bytes(1)
        assert await backend.copy_from_device(handles[0]) == (payload[:50] + payload[1:101] + payload[150:] + bytes(9))
        for handle in handles:
            await backend.deallocate(handle)
    assert ("memcpyPeerAsync" in runtime.calls) == peers


async def test_a_staged_copy_that_fails_is_typed(runtime: FakeRuntime, tmp_path: Any) -> None:
    runtime.peers = False
    copies = iter(range(100))

    def on_call(name: str, index: int) -> None:
        if name == "memcpyAsync" and next(copies) == 3:
            raise CUDARuntimeError(1)

    async with (
        CUDABackend(registry_path=tmp_path / "registry.json") as backend,
        backend.allocation("cuda:0", 5 * BOUNCE) as source,
        backend.allocation("cuda:1", 5 * BOUNCE) as target,
    ):
        runtime.on_call = on_call
        with pytest.raises(TransferFailed):
            await backend.copy_device_to_device(source, target, 5 * BOUNCE)
        runtime.on_call = lambda name, index: None
        await backend.copy_device_to_device(source, target, 5 * BOUNCE)
