"""Small copies on the event loop's own thread: when they may, and that nobody can tell the difference."""

from __future__ import annotations

import asyncio
import mmap
import random
import threading
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpurt.backends.cpu_backend import CPUDriver
from gpurt.errors import DeviceLost, GPUError, TransferFailed
from gpurt.runtime.backend import DriverBackend
from gpurt.runtime.dispatch import STOP_AFTER_S, YIELD_AFTER_S, LoopTurn
from gpurt.runtime.operations import in_memory
from gpurt.testing.faults import FaultyDriver

DEVICE = "cpu:0"
WAIT = 5.0


class Recording(CPUDriver):
    """Remembers where copies ran, and holds those above the limit until they are let go."""

    inline_copy_bytes = 4096

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.kind: type[GPUError] | None = None

    def _enter(self) -> None:
        self.threads.append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            self.entered.set()
            assert self.gate.wait(WAIT)
        if self.error is not None:
            raise self.error

    def write(self, index: int, mem: Any, offset: int, src: memoryview) -> None:
        self._enter()
        super().write(index, mem, offset, src)

    def read(self, index: int, mem: Any, offset: int, dst: memoryview) -> None:
        self._enter()
        super().read(index, mem, offset, dst)

    def classify(self, exc: Exception) -> type[GPUError] | None:
        return self.kind or super().classify(exc)

    def taken(self) -> list[str]:
        threads, self.threads = self.threads, []
        return ["loop" if name == "MainThread" else name for name in threads]


@pytest.fixture
def driver() -> Recording:
    return Recording()


@pytest.fixture
async def backend(driver: Recording, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DriverBackend]:
    monkeypatch.setattr("gpurt.runtime.dispatch.STOP_AFTER_S", 60.0)
    async with DriverBackend(driver) as backend:
        yield backend
        driver.gate.set()


# Turns of the loop


async def test_a_turn_has_a_budget_and_the_next_one_a_new_one() -> None:
    now = [0.0]
    turn = LoopTurn(asyncio.get_running_loop(), lambda: now[0])
    assert turn.has_room()
    now[0] += STOP_AFTER_S * 0.9
    assert turn.has_room()
    now[0] += STOP_AFTER_S * 0.2
    assert not turn.has_room()
    assert not turn.has_room()
    await asyncio.sleep(0)
    assert turn.has_room()


async def test_late_in_a_turn_the_others_come_first() -> None:
    now = [0.0]
    turn = LoopTurn(asyncio.get_running_loop(), lambda: now[0])
    assert not turn.is_long()
    assert turn.has_room()
    assert not turn.is_long()
    now[0] += YIELD_AFTER_S
    assert turn.is_long()
    await asyncio.sleep(0)
    assert not turn.is_long()
    assert turn.has_room()


async def test_who_copies_in_a_loop_can_be_cancelled(driver: Recording) -> None:
    async with DriverBackend(driver) as backend:
        handle = await backend.allocate(DEVICE, 64)

        async def for_ever() -> None:
            while True:
                await backend.copy_to_device(b"x" * 64, handle)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await for_ever()
        assert "loop" in driver.taken()
        assert await backend.copy_from_device(handle) == b"x" * 64


async def test_the_time_between_turns_is_not_counted() -> None:
    now = [0.0]
    turn = LoopTurn(asyncio.get_running_loop(), lambda: now[0])
    assert turn.has_room()
    await asyncio.sleep(0)
    now[0] += 1000.0
    assert turn.has_room()


async def test_over_the_budget_copies_take_their_lane(driver: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurt.runtime.dispatch.YIELD_AFTER_S", 60.0)
    monkeypatch.setattr("gpurt.runtime.dispatch.STOP_AFTER_S", -1.0)
    async with DriverBackend(driver) as backend:
        handle = await backend.allocate(DEVICE, 64)
        ticks = 0

        async def ticker() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(ticker())
        driver.taken()
        for _ in range(10):
            await backend.copy_to_device(b"x" * 64, handle)
        beside.cancel()
        # The first of a turn is free; a lane's answer is the beginning of the next turn.
        assert set(driver.taken()) == {"loop", "gpurt:cpu:0:small"}
        assert ticks >= 5


# Which memory


def test_only_memory_of_our_own_counts_as_present(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    owned = np.zeros(64, np.uint8)
    read = np.frombuffer(path.read_bytes(), np.uint8)
    numbers = array("d", [1.0, 2.0])
    views = (
        owned[3:],
        owned.reshape(8, 8)[2:],
        memoryview(owned)[4:],
        np.frombuffer(numbers, np.float64),
        read,
        read[5:],
    )
    for present in (b"x", bytearray(b"x"), owned, np.zeros((4, 4), np.float32), numbers, *views):
        assert in_memory(memoryview(present).obj)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped_array = np.memmap(path, np.uint8, "r")
        plain = np.frombuffer(mapped, np.uint8)
        for other in (mapped, mapped_array, mapped_array[3:], np.asarray(mapped_array), plain, plain[1:]):
            with memoryview(other) as view:
                assert not in_memory(view.obj)
        with memoryview(mapped) as view, view[5:10] as part:
            assert not in_memory(part.obj)
        del mapped_array, other, plain
    assert in_memory(memoryview(b"abc")[1:].obj)


# Which way


async def test_small_copies_stay_on_the_loop_and_others_do_not(
    backend: DriverBackend, driver: Recording, tmp_path: Path
) -> None:
    handle = await backend.allocate(DEVICE, 8192)
    payload = bytes(range(256)) * 16
    await backend.copy_to_device(payload, handle)
    assert await backend.copy_from_device(handle, 0, 4096) == payload
    back = bytearray(4096)
    assert await backend.copy_into(handle, back) == 4096
    assert back == payload
    assert driver.taken() == ["loop"] * 3
    await backend.copy_to_device(payload + b"x", handle, 100)
    assert await backend.copy_from_device(handle, 100, 4097) == payload + b"x"
    assert await backend.copy_into(handle, bytearray(4097)) == 4097
    assert "loop" not in driver.taken()
    (tmp_path / "file").write_bytes(payload)
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        await backend.copy_to_device(mapped, handle)
    assert driver.taken() == ["gpurt:cpu:0:small"]
    assert await backend.copy_from_device(handle, 0, 4096) == payload


async def test_an_inline_copy_waits_for_what_was_submitted_before(backend: DriverBackend, driver: Recording) -> None:
    handle, other = await backend.allocate(DEVICE, 8192), await backend.allocate(DEVICE, 64)
    driver.gate.clear()
    large = asyncio.create_task(backend.copy_to_device(b"a" * 8192, handle))
    await asyncio.to_thread(driver.entered.wait, WAIT)
    small = asyncio.create_task(backend.copy_to_device(b"b" * 64, handle, 64))
    read = asyncio.create_task(backend.copy_from_device(handle, 0, 256))
    await asyncio.sleep(0)
    await backend.copy_to_device(b"c" * 64, other)  # nothing is before this one
    assert not small.done()
    assert not read.done()
    driver.gate.set()
    assert await read == b"a" * 64 + b"b" * 64 + b"a" * 128
    await large
    await small
    assert driver.taken().count("loop") == 1


async def test_random_copies_at_once_are_as_if_one_after_another(backend: DriverBackend, driver: Recording) -> None:
    rng = random.Random(3)
    handle = await backend.allocate(DEVICE, 16384)
    model = bytearray(16384)
    await backend.copy_to_device(bytes(model), handle)
    for _ in range(60):
        reads: list[tuple[asyncio.Task[bytes], bytes]] = []
        tasks: list[asyncio.Task[Any]] = []
        for _ in range(rng.randrange(1, 12)):
            size = rng.choice((1, 64, 4096, 4097, 9000))
            start = rng.randrange(0, 16384 - size)
            if rng.random() < 0.6:
                payload = rng.randbytes(size)
                model[start : start + size] = payload
                tasks.append(asyncio.create_task(backend.copy_to_device(payload, handle, start)))
            else:
                task = asyncio.create_task(backend.copy_from_device(handle, start, size))
                reads.append((task, bytes(model[start : start + size])))
        await asyncio.gather(*tasks, *(task for task, _ in reads))
        for task, expected in reads:
            assert task.result() == expected
    ways = driver.taken()
    assert ways.count("loop") > 20
    assert len(ways) - ways.count("loop") > 20


def test_a_driver_that_wraps_another_promises_nothing() -> None:
    assert CPUDriver().inline_copy_bytes > 0
    assert FaultyDriver(CPUDriver()).inline_copy_bytes == 0


# Failures


@pytest.mark.parametrize("copy", ["copy_to_device", "copy_from_device", "copy_into"])
async def test_a_failure_is_ours_and_lets_go_of_the_buffer(
    backend: DriverBackend, driver: Recording, copy: str
) -> None:
    handle = await backend.allocate(DEVICE, 64)
    driver.error = OSError("no")
    buffer = bytearray(64)
    arguments = {"copy_to_device": (buffer, handle), "copy_into": (handle, buffer), "copy_from_device": (handle,)}
    with pytest.raises(TransferFailed) as caught:
        await getattr(backend, copy)(*arguments[copy])
    assert caught.value.operation == f"{copy}(64 B at 0)"
    assert caught.value.__cause__ is driver.error
    assert caught.value.device_id == DEVICE
    assert driver.taken() == ["loop"]
    del arguments
    buffer.append(1)  # BufferError while anything still exports it
    driver.error = None
    await backend.copy_to_device(b"x" * 64, handle)


async def test_a_loss_is_remembered(backend: DriverBackend, driver: Recording) -> None:
    handle = await backend.allocate(DEVICE, 64)
    driver.error, driver.kind = OSError("fell off"), DeviceLost
    for _ in range(2):
        with pytest.raises(DeviceLost):
            await backend.copy_to_device(b"x" * 64, handle)
    assert driver.taken() == ["loop"]
    assert backend.devices[0].state == "lost"
