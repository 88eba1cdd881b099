"""The checking driver itself: each breach of the promises to drivers is written down, and nothing else is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpurt import DeviceLost, Driver, DriverBackend
from gpurt.testing import CheckedDeviceLoss, CheckingDriver, DriverConformance, Fault, FaultyDriver
from gpurt.testing.driver_conformance import on_thread


class TestCheckingDriver(DriverConformance):
    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        yield (driver := CheckingDriver(threading="queue", host_visible=True, pins_memory=True, chunk_bytes=8 << 20))
        # The kit of drivers leaves memory behind where it must end a driver in the middle of something.
        assert [each for each in driver.violations if not each.startswith(("close with", "detach"))] == []


def opened(**options: Any) -> CheckingDriver:
    driver = CheckingDriver(**options)
    driver.open()
    driver.attach(0)
    return driver


def closed_before(call: Callable[[CheckingDriver], object]) -> Callable[[], CheckingDriver]:
    def breach() -> CheckingDriver:
        driver = opened()
        driver.detach(0)
        driver.close()
        call(driver)
        return driver

    return breach


def breach_of(call: Callable[[CheckingDriver], object], **options: Any) -> Callable[[], CheckingDriver]:
    def breach() -> CheckingDriver:
        driver = opened(**options)
        call(driver)
        return driver

    return breach


def held(driver: CheckingDriver, other: Callable[[Any], object]) -> None:
    """``other`` while a write is inside: the buffer that it copies from is one whose copy waits."""
    mem = driver.alloc(0, 8)
    with driver._call("write", 0, mem):
        other(mem)


def twice(driver: CheckingDriver) -> None:
    mem = driver.alloc(0, 8)
    driver.free(0, mem)
    driver.free(0, mem)


def freed(use: Callable[[CheckingDriver, Any], object]) -> Callable[[], CheckingDriver]:
    def call(driver: CheckingDriver) -> None:
        mem = driver.alloc(0, 8)
        driver.free(0, mem)
        use(driver, mem)

    return breach_of(call)


def viewed(driver: CheckingDriver) -> None:
    mem = driver.alloc(0, 8)
    view = driver.host_view(0, mem)
    driver.free(0, mem)
    assert view[0] == 0xDD


def written_after_free(driver: CheckingDriver) -> None:
    mem = driver.alloc(0, 8)
    array = np.frombuffer(driver.host_view(0, mem), np.uint8)
    driver.free(0, mem)
    array[:] = 1


def earlier_memory(driver: CheckingDriver) -> None:
    mem = driver.alloc(0, 8)
    driver.detach(0)
    driver.close()
    driver.open()
    driver.attach(0)
    driver.read(0, mem, 0, memoryview(bytearray(8)))


def host_twice(driver: CheckingDriver) -> None:
    block = driver.host_alloc(8)
    driver.host_free(block)
    driver.host_free(block)


def second_thread(driver: CheckingDriver) -> None:
    driver.sync(0)
    on_thread(lambda: (driver.attach(0), driver.sync(0), driver.detach(0)))


def earlier_thread(driver: CheckingDriver) -> None:
    driver.close()
    driver.open()
    driver.sync(0)


BREACHES: dict[str, tuple[str, Callable[[], CheckingDriver]]] = {
    "call while closed": ("while the library is closed", closed_before(lambda d: d.sync(0))),
    "close while closed": ("close while the library is closed", closed_before(lambda d: d.close())),
    "open while open": ("open while the library is open", breach_of(lambda d: d.open())),
    "open beside a call": ("open while write(0) has not", breach_of(lambda d: held(d, lambda _: d.open()))),
    "close beside a call": ("close while write(0) has not", breach_of(lambda d: held(d, lambda _: d.close()))),
    "unattached thread": ("without attach", breach_of(lambda d: on_thread(lambda: d.sync(0)))),
    "thread of an earlier opening": ("in an earlier opening", breach_of(earlier_thread)),
    "second thread of a device": ("served before", breach_of(second_thread, threading="device")),
    "second thread of a library": ("served before", breach_of(second_thread, threading="backend")),
    "attach twice": ("attach(0) twice", breach_of(lambda d: d.attach(0))),
    "detach elsewhere": ("is not attached", breach_of(lambda d: on_thread(lambda: d.detach(0)))),
    "detach after close": ("after the library was closed", breach_of(lambda d: (d.close(), d.detach(0)))),
    "double free": ("free(0) of memory of device 0 no. 2 (8 B), which was freed", breach_of(twice)),
    "write to freed": ("which was freed", freed(lambda d, mem: d.write(0, mem, 0, memoryview(b"x")))),
    "read of freed": ("which was freed", freed(lambda d, mem: d.read(0, mem, 0, memoryview(bytearray(1))))),
    "view of freed": ("which was freed", freed(lambda d, mem: d.host_view(0, mem))),
    "free under a view": ("while somebody looks into it", breach_of(viewed)),
    "write after free": ("written to after it was freed", breach_of(written_after_free)),
    "memory of an earlier opening": ("of an earlier opening", breach_of(earlier_memory)),
    "memory of another device": ("free(1) of memory of device 0", breach_of(lambda d: d.free(1, d.alloc(0, 8)))),
    "no memory": ("no live memory", breach_of(lambda d: d.free(0, object()))),
    "None where none is named so": ("no live memory", breach_of(lambda d: d.free(0, None))),
    "at once on one memory": (
        "while write(0) works on",
        breach_of(lambda d: held(d, lambda mem: d.read(0, mem, 0, memoryview(bytearray(1))))),
    ),
    "past the end": ("of 2 bytes at 7", breach_of(lambda d: d.write(0, d.alloc(0, 8), 7, memoryview(b"xx")))),
    "copy past the end": ("copy of 8 bytes", breach_of(lambda d: d.copy(0, d.alloc(0, 4), 0, 0, d.alloc(0, 8), 0, 8))),
    "over a chunk": (
        "over chunk",
        breach_of(lambda d: d.write(0, d.alloc(0, 8), 0, memoryview(b"xxx")), chunk_bytes=2),
    ),
    "misaligned": (
        "multiples of 4",
        breach_of(lambda d: d.write(0, d.alloc(0, 8), 2, memoryview(b"xx")), alignment_bytes=4),
    ),
    "misaligned size": ("alloc(0) of 7 bytes", breach_of(lambda d: d.alloc(0, 7), alignment_bytes=4)),
    "read-only target": ("read-only", breach_of(lambda d: d.read(0, d.alloc(0, 8), 0, memoryview(b"xx")))),
    "close with live memory": ("close with live memory", breach_of(lambda d: (d.alloc(0, 8), d.close()))),
    "close with page-locked memory": ("page-locked", breach_of(lambda d: (d.host_alloc(8), d.close()))),
    "close while attached": ("is attached", breach_of(lambda d: d.close())),
    "host_free twice": ("host_free of page-locked memory no. 2 (8 B), which was freed", breach_of(host_twice)),
    "kernel of another device": (
        "another device",
        breach_of(lambda d: d.launch(0, d.compile(0, "fill", "fill")[::-1], (1, 1, 1), (1, 1, 1), []), kernels=True),
    ),
}


@pytest.mark.parametrize("name", list(BREACHES))
def test_breach_is_written_down(name: str) -> None:
    text, breach = BREACHES[name]
    driver = breach()
    assert any(text in each for each in driver.violations), driver.violations


@pytest.mark.parametrize("mode", ["backend", "device", "queue"])
async def test_ordinary_use_breaks_nothing(mode: Any) -> None:
    checking = CheckingDriver(threading=mode, alignment_bytes=4, host_visible=True, pins_memory=True, kernels=True)
    backend = DriverBackend(FaultyDriver(checking))
    for _ in range(2):
        async with backend:
            for device in backend.devices:
                handle = await backend.allocate(device.device_id, 100)
                await backend.copy_to_device(b"abcd", handle, 96)
                assert await backend.copy_from_device(handle, 96) == b"abcd"
                with await backend.host_buffer(device.device_id, 100) as buffer:
                    await backend.copy_into(handle, buffer.memory)
                    assert bytes(buffer.memory[96:]) == b"abcd"
                kernel = await backend.compile(device.device_id, "fill", "fill")
                await backend.launch(kernel, 1, 1, [handle, np.uint8(7)])
                assert await backend.copy_from_device(handle) == b"\7" * 100
                with await backend.view(handle) as view:
                    view.numpy()[:] = 8
                assert await backend.copy_from_device(handle) == b"\x08" * 100
                await backend.deallocate(handle)
    assert checking.violations == []
    assert (checking.live, checking.host_live, checking.opens, checking.closes) == (0, 0, 2, 2)


def test_lost_device_takes_its_memory_with_it() -> None:
    driver = opened(none_token=True)
    assert driver.alloc(0, 8) is None
    mem = driver.alloc(0, 8)
    driver.lose(0)
    assert driver.live == 0
    for token in (mem, None):
        with pytest.raises(CheckedDeviceLoss):
            driver.free(0, token)
    assert driver.classify(CheckedDeviceLoss()) is DeviceLost
    driver.detach(0)
    driver.close()
    assert driver.violations == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_faults_raise_whatever_can_be_raised(kind: type[BaseException]) -> None:
    driver = FaultyDriver(checking := CheckingDriver())
    driver.open()
    driver.attach(0)
    mem = driver.alloc(0, 8)
    driver.inject(Fault("free", first=1, raises=kind, after=True))
    with pytest.raises(kind):
        driver.free(0, mem)
    assert checking.live == 0


def test_a_fault_after_the_call_waits_when_the_work_is_done() -> None:
    driver = FaultyDriver(checking := CheckingDriver())
    driver.open()
    gate, attached = threading.Event(), threading.Event()

    def allocate() -> None:
        driver.attach(0)
        attached.set()
        driver.alloc(0, 8)

    driver.inject(Fault("alloc", gate=gate, after=True))
    thread = threading.Thread(target=allocate)
    thread.start()
    assert attached.wait(5)
    while not checking.live:
        assert thread.is_alive()
    assert thread.is_alive()
    gate.set()
    thread.join(5)
