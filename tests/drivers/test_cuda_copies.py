"""Which way host memory takes on CUDA: plain, striped, straight, from a file; and how that is decided."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fake_cuda import MIB, CUDARuntimeError, FakeNvml, FakeRuntime, install, install_nvml, nvml_record

from gpurt.backends.cuda_backend import CUDABackend, CUDADriver
from gpurt.backends.cupy import copy_tuning, host_copies, staging, staging_member
from gpurt.backends.cupy.copy_tuning import CopyTuning, smallest_worth_striping
from gpurt.backends.cupy.pinned import PinnedHost
from gpurt.backends.cupy.transfer import cut
from gpurt.errors import OutOfMemory, TransferFailed

KIB = 1 << 10
STRIPE = 64 * KIB
FROM = 256 * KIB
"""Copies are striped from here in these tests."""
WAIT = 5.0
THREADS = 4


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    for module in (staging_member, host_copies):
        monkeypatch.setattr(module, "STRIPE_BYTES", STRIPE)
    monkeypatch.setattr(copy_tuning, "SIZES", (FROM, 2 * FROM))
    monkeypatch.setattr(host_copies, "LARGEST", 2 * FROM)
    monkeypatch.setattr(staging, "crew_size", lambda: THREADS)
    install_nvml(monkeypatch, FakeNvml([nvml_record(0), nvml_record(1)]))
    return install(monkeypatch)


@pytest.fixture
def driver(runtime: FakeRuntime) -> Iterator[CUDADriver]:
    driver = opened()
    yield driver
    closed(driver)
    assert not runtime.pinned
    assert not runtime.streams


def opened() -> CUDADriver:
    driver = CUDADriver(environ={})
    driver.open()
    for index in (0, 1):
        driver.use_tuning(index, CopyTuning(THREADS, FROM, FROM))
    return driver


def closed(driver: CUDADriver) -> None:
    for index in (0, 1):
        driver.detach(index)
    driver.close()


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def stripes(nbytes: int) -> int:
    return len(cut(nbytes, STRIPE, THREADS))


class Watch:
    """Which threads queued host copies, and how many each."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.copies: dict[str, int] = {}

        def on_call(name: str, index: int) -> None:
            if name == "memcpyAsync":
                me = threading.current_thread().name
                self.copies[me] = self.copies.get(me, 0) + 1

        runtime.on_call = on_call

    def take(self) -> tuple[int, int]:
        """Copies by the calling thread, and by the crew, since last time."""
        copies, self.copies = self.copies, {}
        own = copies.pop(threading.current_thread().name, 0)
        assert all(name.startswith("gpurt:stage:") for name in copies)
        return own, sum(copies.values())


# Pageable


@pytest.mark.parametrize("size", [1, 4095, FROM - 1, FROM, FROM + 1, 3 * MIB + 12345])
@pytest.mark.parametrize("offset", [0, 1, 4097])
@pytest.mark.parametrize("misplaced", [0, 3])
def test_every_size_and_offset_arrives(driver: CUDADriver, size: int, offset: int, misplaced: int) -> None:
    mem = driver.alloc(1, size + offset + 5)
    driver.write(1, mem, 0, memoryview(bytes(size + offset + 5)))
    payload = noise(size + misplaced, size)
    driver.write(1, mem, offset, memoryview(payload)[misplaced:])
    back = bytearray(size + offset + 5)
    driver.read(1, mem, 0, memoryview(back))
    assert bytes(back) == bytes(offset) + payload[misplaced:] + bytes(5)


def test_copies_are_striped_from_the_threshold_on(driver: CUDADriver, runtime: FakeRuntime) -> None:
    mem = driver.alloc(0, MIB)
    watch = Watch(runtime)
    host = bytearray(MIB)
    for copy in (driver.write, driver.read):
        copy(0, mem, 0, memoryview(host)[: FROM - 1])
        assert watch.take() == (1, 0)
        copy(0, mem, 0, memoryview(host)[:FROM])
        assert watch.take() == (0, stripes(FROM))
    driver.use_tuning(0, CopyTuning(THREADS, None, MIB))
    driver.write(0, mem, 0, memoryview(host))
    assert watch.take() == (1, 0)
    driver.read(0, mem, 0, memoryview(host)[: MIB - 1])
    assert watch.take() == (1, 0)
    driver.read(0, mem, 0, memoryview(host))
    assert watch.take() == (0, stripes(MIB))


def test_nothing_is_pinned_before_a_large_copy(driver: CUDADriver, runtime: FakeRuntime) -> None:
    mem = driver.alloc(0, FROM)
    driver.write(0, mem, 0, memoryview(bytes(FROM - 1)))
    assert not runtime.pinned
    driver.write(0, mem, 0, memoryview(bytes(FROM)))
    assert len(runtime.pinned) == 2 * THREADS


def test_buffer_is_free_again_after_the_copy(driver: CUDADriver) -> None:
    mem = driver.alloc(0, MIB)
    host = bytearray(MIB)
    view = memoryview(host)
    driver.write(0, mem, 0, view)
    driver.read(0, mem, 0, view)
    view.release()
    host.append(1)  # BufferError while anything still exports it


def test_without_pinned_memory_copies_are_plain(driver: CUDADriver, runtime: FakeRuntime) -> None:
    runtime.pin_limit = STRIPE
    payload, back = noise(MIB), bytearray(MIB)
    mem = driver.alloc(0, MIB)
    driver.write(0, mem, 0, memoryview(payload))
    driver.read(0, mem, 0, memoryview(back))
    assert back == payload
    assert driver.calibrate(0) == CopyTuning(0, None, None)


def test_directions_and_devices_at_once(driver: CUDADriver, runtime: FakeRuntime) -> None:
    other = opened()
    payloads = [noise(MIB + seed, seed) for seed in range(6)]
    mems = [driver.alloc(seed % 2, MIB + seed) for seed in range(6)]

    def work(seed: int) -> None:
        used = (driver, other)[seed % 3 == 0]
        back = bytearray(MIB + seed)
        for _ in range(3):
            used.write(seed % 2, mems[seed], 0, memoryview(payloads[seed]))
            used.read(seed % 2, mems[seed], 0, memoryview(back))
            assert back == payloads[seed]
        used.detach(0)
        used.detach(1)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    closed(other)
    assert len(runtime.pinned) == 2 * THREADS  # the first driver's crew goes on
    driver.write(0, mems[0], 0, memoryview(payloads[0]))


@pytest.mark.parametrize("call", ["memcpyAsync", "streamSynchronize"])
def test_lost_device_in_the_middle_of_a_copy(driver: CUDADriver, runtime: FakeRuntime, call: str) -> None:
    mem = driver.alloc(0, MIB)
    calls = iter(range(1000))

    def on_call(name: str, index: int) -> None:
        if name == call and next(calls) > 10:
            raise CUDARuntimeError(700)

    runtime.on_call = on_call
    host = bytearray(MIB)
    for copy in (driver.write, driver.read):
        with pytest.raises(CUDARuntimeError):
            copy(0, mem, 0, memoryview(host))
    runtime.on_call = lambda name, index: None


# Pinned


def test_pinned_memory_goes_straight(driver: CUDADriver, runtime: FakeRuntime) -> None:
    mem, pinned = driver.alloc(1, MIB), driver.host_alloc(MIB)
    view = driver.host_memory(pinned)
    assert (view.nbytes, view.readonly, view.format, view.ndim) == (MIB, False, "B", 1)
    watch = Watch(runtime)
    payload = noise(MIB)
    view[:] = payload
    driver.write(1, mem, 0, view)
    assert watch.take() == (1, 0)
    view[:] = bytes(MIB)
    driver.read(1, mem, 3, view[5 : FROM + 5])
    assert watch.take() == (1, 0)
    assert bytes(view[:FROM]) == bytes(5) + payload[3 : FROM - 2]
    address = pinned.address
    del view
    driver.host_free(pinned)
    assert not driver._host.pinned.contains(address, 1)  # pyright: ignore[reportPrivateUsage]
    assert not runtime.pinned


def test_pinned_memory_is_not_freed_under_a_view(driver: CUDADriver, runtime: FakeRuntime) -> None:
    pinned = driver.host_alloc(100)
    part: Any = np.frombuffer(driver.host_memory(pinned)[10:20], np.uint8)[2:]
    address = pinned.address
    driver.host_free(pinned)
    driver.host_free(driver.host_alloc(1))
    part[:] = 7
    assert bytes(runtime.pinned[address]) == bytes(12) + b"\7" * 8 + bytes(80)
    assert driver._host.pinned.contains(address, 100)  # pyright: ignore[reportPrivateUsage]
    del part
    assert address in runtime.pinned  # not by the thread that dropped the view
    driver.host_free(driver.host_alloc(1))
    assert not runtime.pinned


def test_pinned_memory_is_freed_at_close_if_its_views_are_gone(driver: CUDADriver, runtime: FakeRuntime) -> None:
    pinned = driver.host_alloc(100)
    view = driver.host_memory(pinned)
    driver.host_free(pinned)
    del view
    driver.close()
    assert not runtime.pinned


def test_pinning_uses_a_device_that_is_in_use_already(driver: CUDADriver, runtime: FakeRuntime) -> None:
    selected: list[int] = []
    driver.alloc(1, 1)
    runtime.on_set_device = selected.append
    driver.host_free(driver.host_alloc(10))
    assert set(selected) == {1}


def test_pinning_has_a_limit(driver: CUDADriver, runtime: FakeRuntime) -> None:
    runtime.pin_limit = 100
    with pytest.raises(CUDARuntimeError) as caught:
        driver.host_alloc(101)
    assert driver.classify(caught.value) is OutOfMemory


def test_only_whole_ranges_count_as_pinned(runtime: FakeRuntime) -> None:
    runtime.setDevice(0)
    host = PinnedHost()
    assert not host.contains(1, 1)
    memories = [host.allocate(runtime, 100) for _ in range(5)]
    for memory in memories:
        start = memory.address
        assert host.contains(start, 100)
        assert host.contains(start + 99, 1)
        assert not host.contains(start, 101)
        assert not host.contains(start + 100, 1)
        assert not host.contains(start - 1, 2)
    host.free(runtime, memories[2])
    assert [host.contains(memory.address, 100) for memory in memories] == [True, True, False, True, True]
    for memory in memories[:2] + memories[3:]:
        host.free(runtime, memory)


# Tuning


def clockwork(plain_ns: Callable[[int], int], striped_ns: Callable[[int], int]) -> tuple[int | None, list[int]]:
    """The answer for copies that take so long, and the sizes that were measured."""
    now, sizes = 0, []

    def copy(cost: Callable[[int], int]) -> Callable[[int], None]:
        def run(size: int) -> None:
            nonlocal now
            now += cost(size)
            sizes.append(size)

        return run

    answer = smallest_worth_striping(copy(plain_ns), copy(striped_ns), clock=lambda: now / 1e9)
    return answer, sorted(set(sizes))


@pytest.mark.parametrize(
    ("fixed_ns", "answer_mib", "measured_mib"),
    [(0, 8, [8, 16]), (900_000, 16, [8, 16, 32]), (2_000_000, 32, [8, 16, 32]), (10_000_000, None, [8, 16, 32])],
)
def test_threshold_is_where_striping_starts_to_win(
    fixed_ns: int, answer_mib: int | None, measured_mib: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_tuning, "BUDGET_S", 1.0)
    # 8 bytes a ns, and 32 after a fixed cost.
    answer, measured = clockwork(lambda size: size // 8, lambda size: fixed_ns + size // 32)
    assert answer == (None if answer_mib is None else answer_mib * MIB)
    assert measured == [size * MIB for size in measured_mib]


def test_striping_must_win_clearly() -> None:
    assert clockwork(lambda size: size, lambda size: size * 9 // 10)[0] is None


def test_slow_link_does_not_make_the_calibration_long() -> None:
    # 1 byte a ns: 8 MiB twice are 17 ms already.
    answer, measured = clockwork(lambda size: size, lambda size: size // 2)
    assert answer == 8 * MIB
    assert measured == [8 * MIB]


def test_calibration_happens_once_a_process_and_device(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[None] = []

    def smallest(plain: Any, striped: Any) -> int:
        plain(FROM)
        striped(FROM)
        measured.append(None)
        return FROM

    monkeypatch.setattr(host_copies, "smallest_worth_striping", smallest)
    first, second = CUDADriver(environ={}), CUDADriver(environ={})
    for driver in (first, second):
        driver.open()
        mem = driver.alloc(0, FROM)
        for _ in range(2):
            driver.write(0, mem, 0, memoryview(bytes(FROM)))
        driver.free(0, mem)
        closed(driver)
        assert len(measured) == 2  # one a direction
    first.open()
    assert first.calibrate(0) == CopyTuning(THREADS, FROM, FROM)
    assert len(measured) == 4
    # What another crew was measured with counts for nothing.
    first.use_tuning(0, CopyTuning(THREADS + 1, None, None))
    mem = first.alloc(0, FROM)
    first.write(0, mem, 0, memoryview(bytes(FROM)))
    assert len(measured) == 6
    first.free(0, mem)
    closed(first)
    assert not runtime.live


def test_full_device_is_measured_later(runtime: FakeRuntime) -> None:
    driver = CUDADriver(environ={})
    driver.open()
    mem = driver.alloc(0, runtime.capacity - FROM)
    payload = noise(2 * FROM)
    watch = Watch(runtime)
    for part, way in ((payload, (0, stripes(2 * FROM))), (payload[:FROM], (1, 0))):
        driver.write(0, mem, 0, memoryview(part))
        assert watch.take() == way
    assert not copy_tuning.known(runtime)
    with pytest.raises(CUDARuntimeError):
        driver.calibrate(0)
    driver.free(0, mem)
    assert driver.calibrate(0).threads == THREADS
    assert not runtime.live
    closed(driver)


def test_tuning_is_json() -> None:
    tuning = CopyTuning(8, 8 * MIB, None)
    assert CopyTuning(**json.loads(json.dumps(asdict(tuning)))) == tuning


# Files


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    content = noise(2 * MIB + 777)
    path = tmp_path / "weights"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    yield fd, content
    os.close(fd)


@pytest.mark.parametrize("pin_limit", [1 << 40, 0])
@pytest.mark.parametrize(
    ("offset", "file_offset", "size"),
    [(0, 0, 2 * MIB + 777), (5, 12345, MIB + 1), (1, 2 * MIB + 776, 1), (0, 7, STRIPE), (9, 0, 0)],
)
def test_file_arrives(
    driver: CUDADriver,
    runtime: FakeRuntime,
    file: tuple[int, bytes],
    offset: int,
    file_offset: int,
    size: int,
    pin_limit: int,
) -> None:
    runtime.pin_limit = pin_limit
    fd, content = file
    os.lseek(fd, 3, os.SEEK_SET)
    mem = driver.alloc(0, size + offset + 4)
    driver.write(0, mem, 0, memoryview(bytes(size + offset + 4)))
    assert driver.load(0, mem, offset, fd, file_offset, size) == size
    back = bytearray(size + offset + 4)
    driver.read(0, mem, 0, memoryview(back))
    assert bytes(back) == bytes(offset) + content[file_offset : file_offset + size] + bytes(4)
    assert os.lseek(fd, 0, os.SEEK_CUR) == 3


@pytest.mark.parametrize("pin_limit", [1 << 40, 0])
@pytest.mark.parametrize("file_offset", [0, 1, 2 * MIB + 776, 2 * MIB + 777, 3 * MIB])
def test_short_file_gives_what_there_is(
    driver: CUDADriver, runtime: FakeRuntime, file: tuple[int, bytes], pin_limit: int, file_offset: int
) -> None:
    runtime.pin_limit = pin_limit
    fd, content = file
    rest = content[file_offset:]
    mem = driver.alloc(0, 4 * MIB)
    driver.write(0, mem, 0, memoryview(bytes(4 * MIB)))
    assert driver.load(0, mem, 0, fd, file_offset, 4 * MIB) == len(rest)
    back = bytearray(4 * MIB)
    driver.read(0, mem, 0, memoryview(back))
    assert bytes(back) == rest + bytes(4 * MIB - len(rest))


def test_unreadable_file_is_the_system_s_error(driver: CUDADriver, tmp_path: Path) -> None:
    mem = driver.alloc(0, MIB)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            driver.load(0, mem, 0, fd, 0, MIB)
    finally:
        os.close(fd)


def test_reads_that_give_less_than_asked_go_on(
    driver: CUDADriver, file: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][: min(1000, len(views[0]))]], at))
    fd, content = file
    mem = driver.alloc(0, len(content))
    assert driver.load(0, mem, 0, fd, 0, len(content)) == len(content)
    back = bytearray(len(content))
    driver.read(0, mem, 0, memoryview(back))
    assert back == content


# Through the shell


@pytest.fixture
async def backend(runtime: FakeRuntime) -> Any:
    backend = CUDABackend()
    capabilities = backend.driver.capabilities.model_copy(update={"chunk_bytes": MIB})
    backend.driver.capabilities = capabilities
    async with backend:
        for index in (0, 1):
            backend.driver.use_tuning(index, CopyTuning(THREADS, FROM, FROM))  # pyright: ignore[reportAttributeAccessIssue]
        yield backend
    assert not runtime.live
    async with asyncio.timeout(WAIT):
        while runtime.streams or runtime.pinned:
            await asyncio.sleep(0.001)


async def test_many_copies_at_once_come_back_whole(backend: CUDABackend) -> None:
    async def round_trips(number: int) -> None:
        payload = noise(MIB // 2 + number * 300_001, number)
        async with backend.allocation(f"cuda:{number % 2}", len(payload)) as handle:
            for _ in range(3):
                await backend.copy_to_device(payload, handle)
                back = bytearray(len(payload))
                await backend.copy_into(handle, back)
                assert back == payload
                assert await backend.copy_from_device(handle) == payload

    async with asyncio.timeout(WAIT):
        await asyncio.gather(*(round_trips(number) for number in range(8)))


@pytest.mark.parametrize("way", ["to", "into"])
async def test_cancelled_copy_stops_after_its_chunk(backend: CUDABackend, runtime: FakeRuntime, way: str) -> None:
    host = bytearray(8 * MIB)
    async with backend.allocation("cuda:0", 8 * MIB) as handle:
        entered, opened, copies = threading.Event(), threading.Event(), 0

        def on_call(name: str, index: int) -> None:
            nonlocal copies
            if name == "memcpyAsync" and threading.current_thread().name.startswith("gpurt:stage"):
                copies += 1
                entered.set()
                assert opened.wait(WAIT)

        runtime.on_call = on_call
        copy = backend.copy_to_device(host, handle) if way == "to" else backend.copy_into(handle, host)
        task = asyncio.ensure_future(copy)
        await asyncio.get_running_loop().run_in_executor(None, entered.wait, WAIT)
        task.cancel()
        await asyncio.sleep(0)
        opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await backend.synchronize("cuda:0")
        assert copies == stripes(MIB)
        runtime.on_call = lambda name, index: None
    async with asyncio.timeout(WAIT):
        while True:
            try:
                host.append(1)
                break
            except BufferError:
                await asyncio.sleep(0.001)


async def test_failed_copy_is_typed(backend: CUDABackend, runtime: FakeRuntime) -> None:
    def on_call(name: str, index: int) -> None:
        if name == "memcpyAsync":
            raise CUDARuntimeError(1)

    async with backend.allocation("cuda:0", MIB) as handle:
        runtime.on_call = on_call
        with pytest.raises(TransferFailed) as caught:
            await backend.copy_to_device(bytes(MIB), handle)
        assert isinstance(caught.value.__cause__, CUDARuntimeError)
        runtime.on_call = lambda name, index: None
        await backend.copy_to_device(bytes(MIB), handle)
