"""The fault-injecting driver: when faults strike, what they do, what is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpurt.driver import Driver
from gpurt.errors import BackendUnavailable, DeviceLost, GPUError, OutOfMemory, ReasonCode, TransferFailed
from gpurt.runtime.backend import DriverBackend
from gpurt.testing import Fault, FaultyDriver, InjectedDeviceLoss, SimulatedDriver, parse_simulation
from gpurt.types import Capabilities


class Broken(OSError):
    """A library's own error."""


@pytest.fixture
def driver() -> Iterator[FaultyDriver]:
    driver = FaultyDriver(SimulatedDriver(parse_simulation("h100x2")))
    driver.open()
    yield driver
    driver.clear()


def outcomes(call: Callable[[], Any], times: int) -> str:
    """``.`` for each call that went well, ``x`` for each that raised Broken."""
    text = ""
    for _ in range(times):
        try:
            call()
            text += "."
        except Broken:
            text += "x"
    return text


# When


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({}, "xxxxxx"),
        ({"nth": 3}, "..x..."),
        ({"first": 2}, "xx...."),
        ({"every": 3}, "..x..x"),
        ({"first": 4, "every": 2}, ".x.x.."),
        ({"probability": 0.0}, "......"),
        ({"probability": 1.0}, "xxxxxx"),
        ({"index": 0}, "xxxxxx"),
        ({"index": 1}, "......"),
    ],
)
def test_conditions(driver: FaultyDriver, when: dict[str, Any], expected: str) -> None:
    driver.inject(Fault("sync", raises=Broken, **when))
    assert outcomes(lambda: driver.sync(0), 6) == expected


def test_chance_follows_its_seed(driver: FaultyDriver) -> None:
    runs: list[str] = []
    for seed in (1, 1, 2):
        driver.clear()
        driver.inject(Fault("sync", raises=Broken, probability=0.5, seed=seed))
        runs.append(outcomes(lambda: driver.sync(0), 64))
    assert runs[0] == runs[1] != runs[2]
    assert 16 < runs[0].count("x") < 48


def test_calls_are_counted_from_the_injection_and_per_device(driver: FaultyDriver) -> None:
    driver.sync(0)
    driver.inject(Fault("sync", index=1, nth=2, raises=Broken))
    driver.sync(0)
    driver.sync(1)
    driver.sync(0)
    with pytest.raises(Broken):
        driver.sync(1)


# What


def test_raises_an_instance_a_class_or_what_a_function_makes(driver: FaultyDriver) -> None:
    error = Broken(5, "link down")
    for raises in (error, Broken, lambda: Broken("made")):
        driver.clear()
        driver.inject(Fault("alloc", raises=raises))
        with pytest.raises(Broken) as caught:
            driver.alloc(0, 1)
        assert raises is not error or caught.value is error
    assert isinstance(driver.inner, SimulatedDriver)
    assert driver.inner.live_allocations == 0


def test_delay_uses_the_given_sleep() -> None:
    slept: list[float] = []
    driver = FaultyDriver(SimulatedDriver(parse_simulation("phone")), [Fault("open", delay=12.5)], sleep=slept.append)
    driver.open()
    assert slept == [12.5]


def test_hang_until_the_gate_opens(driver: FaultyDriver) -> None:
    gate = threading.Event()
    driver.inject(Fault("sync", index=0, gate=gate))
    thread = threading.Thread(target=driver.sync, args=(0,), daemon=True)
    thread.start()
    driver.wait_until_called("sync", index=0)
    assert thread.is_alive()
    # Neither the other device nor bookkeeping hangs with it.
    driver.sync(1)
    assert len(driver.calls) == 3
    gate.set()
    thread.join(5)
    assert not thread.is_alive()


def test_clear_lets_hanging_calls_go(driver: FaultyDriver) -> None:
    driver.inject(Fault("sync", gate=threading.Event()))
    thread = threading.Thread(target=driver.sync, args=(0,), daemon=True)
    thread.start()
    driver.wait_until_called("sync")
    driver.clear()
    thread.join(5)
    assert not thread.is_alive()


def test_lies(driver: FaultyDriver) -> None:
    driver.inject(Fault("telemetry", index=0, lie={"temperature_c": 9999.0, "memory_free_bytes": -1}))
    reading = driver.telemetry(0)
    assert (reading.temperature_c, reading.memory_free_bytes) == (9999.0, -1)
    assert driver.telemetry(1).temperature_c == 41.0
    driver.inject(Fault("open", lie={"memory_bytes": 1}))
    assert [device.memory_bytes for device in driver.open()] == [1, 1]


def test_corrupted_read_differs_in_one_byte_and_only_there(driver: FaultyDriver) -> None:
    mem = driver.alloc(0, 8)
    driver.write(0, mem, 0, memoryview(b"abcdefgh"))
    driver.inject(Fault("read", nth=1, corrupt=10))
    first, second = bytearray(8), bytearray(8)
    driver.read(0, mem, 0, memoryview(first))
    driver.read(0, mem, 0, memoryview(second))
    assert second == b"abcdefgh"
    assert [n for n in range(8) if first[n] != second[n]] == [2]


def test_lost_device_stays_lost_and_the_other_one_works(driver: FaultyDriver) -> None:
    mem, other = driver.alloc(0, 8), driver.alloc(1, 8)
    driver.inject(Fault("write", index=0, nth=2, lose=True))
    driver.write(0, mem, 0, memoryview(b"x"))
    calls: list[Callable[[], Any]] = [
        lambda: driver.write(0, mem, 0, memoryview(b"x")),
        lambda: driver.read(0, mem, 0, memoryview(bytearray(1))),
        lambda: driver.alloc(0, 1),
        lambda: driver.free(0, mem),
        lambda: driver.copy(1, other, 0, 0, mem, 0, 1),
        lambda: driver.copy(0, mem, 0, 1, other, 0, 1),
        lambda: driver.telemetry(0),
        lambda: driver.attach(0),
    ]
    for call in calls:
        with pytest.raises(InjectedDeviceLoss) as caught:
            call()
        assert driver.classify(caught.value) is DeviceLost
    driver.write(1, other, 0, memoryview(b"x"))
    driver.detach(0)
    driver.clear()
    driver.telemetry(0)


def test_open_can_fail() -> None:
    refusal = BackendUnavailable("no", reason=ReasonCode.NO_PERMISSION)
    driver = FaultyDriver(SimulatedDriver(parse_simulation("h100")), [Fault("open", first=1, raises=refusal)])
    with pytest.raises(BackendUnavailable):
        driver.open()
    assert len(driver.open()) == 1


# Transparency


def test_record_of_calls(driver: FaultyDriver) -> None:
    here, there = driver.alloc(0, 64), driver.alloc(1, 64)
    driver.write(0, here, 0, memoryview(b"abc"))
    driver.copy(0, here, 0, 1, there, 0, 3)
    driver.free(1, there)
    assert [(call.method, call.index, call.nbytes) for call in driver.calls] == [
        ("open", None, None),
        ("alloc", 0, 64),
        ("alloc", 1, 64),
        ("write", 0, 3),
        ("copy", 0, 3),
        ("free", 1, None),
    ]
    assert {call.thread for call in driver.calls} == {threading.current_thread().name}


def test_waiting_for_a_call_that_never_comes(driver: FaultyDriver) -> None:
    with pytest.raises(TimeoutError, match="trim was called 0 times, not 2"):
        driver.wait_until_called("trim", 2, timeout=0.01)


def test_it_is_its_inner_driver_otherwise() -> None:
    class Odd(SimulatedDriver):
        name = "odd"

        def open(self) -> Any:
            self.capabilities = Capabilities(threading="queue", max_allocation_bytes=7)
            return super().open()

        def classify(self, exc: Exception) -> type[GPUError] | None:
            return OutOfMemory if isinstance(exc, KeyError) else None

        def trim(self, index: int) -> int:
            return 42

    driver = FaultyDriver(Odd(parse_simulation("h100")))
    assert driver.name == "odd"
    assert driver.open()[0].device_id == "odd:0"
    assert driver.capabilities.max_allocation_bytes == 7
    assert driver.trim(0) == 42
    assert driver.classify(KeyError()) is OutOfMemory
    with pytest.raises(NotImplementedError):
        driver.host_view(0, None)


def test_every_driver_method_can_be_given_a_fault() -> None:
    from typing import get_args

    from gpurt.testing.faults import Method

    methods = {name for name, value in vars(Driver).items() if callable(value) and not name.startswith("_")}
    assert set(get_args(Method)) == methods - {"classify", "peer_access"}


def test_many_threads_are_all_recorded(driver: FaultyDriver) -> None:
    driver.inject(Fault("sync", every=2, raises=Broken))
    counts: list[str] = []
    threads = [threading.Thread(target=lambda: counts.append(outcomes(lambda: driver.sync(0), 50))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(text.count("x") for text in counts) == 200
    driver.wait_until_called("sync", 400, timeout=0)


# Through the shell


async def test_shell_turns_faults_into_its_errors(driver: FaultyDriver) -> None:
    async with DriverBackend(driver) as backend:
        handle = await backend.allocate("simulated:0", 8)
        driver.inject(Fault("write", nth=1, raises=Broken("link down")))
        with pytest.raises(TransferFailed, match="link down") as caught:
            await backend.copy_to_device(b"x", handle)
        assert isinstance(caught.value.__cause__, Broken)
        await backend.copy_to_device(b"x", handle)
        driver.inject(Fault("alloc", raises=MemoryError))
        with pytest.raises(OutOfMemory):
            await backend.allocate("simulated:0", 8)
        driver.lose(0)
        with pytest.raises(DeviceLost):
            await backend.copy_to_device(b"x", handle)
        await backend.deallocate(handle)
        await backend.synchronize("simulated:1")
