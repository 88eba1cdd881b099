"""DriverConformance: what every Driver must do, without an event loop or a shell.

::

    class TestMyDriver(DriverConformance):
        @pytest.fixture
        def driver(self):
            return MyDriver()        # not opened
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest

from gpurt.driver import Driver
from gpurt.errors import BackendUnavailable, CompileFailed, DeviceLost, GPUError, OutOfMemory, Unsupported
from gpurt.testing.kit.kernels import FIELD_ADD, operands, scalars
from gpurt.testing.plugin import skip_unless_required
from gpurt.types import Capabilities, GPUDevice, Telemetry

T = TypeVar("T")


def on_thread(call: Callable[[], T]) -> T:
    """Run ``call`` on a thread of its own, as a lane would, and give back what came of it."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as exc:
            failure.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the driver call did not return"
    if failure:
        raise failure[0]
    return outcome[0]


class DriverConformance:
    """Subclass it, define ``driver``: a fixture that returns a driver that is not open."""

    gpurt_conformance: ClassVar[bool] = True
    unsupported: ClassVar[Mapping[str, str]] = {}
    _refusal: ClassVar[BackendUnavailable | None]
    expected_failures: ClassVar[Mapping[str, str]] = {}

    @pytest.fixture
    def driver(self) -> Driver:
        raise NotImplementedError(f"{type(self).__name__} must define a fixture `driver`")

    @pytest.fixture(autouse=True)
    def _only_where_it_opens(self, driver: Driver) -> None:
        """The first test of the class finds out whether the driver can be used here at all."""
        cls = type(self)
        if "_refusal" not in vars(cls):
            cls._refusal = None
            try:
                driver.open()
                driver.close()
            except BackendUnavailable as exc:
                cls._refusal = exc
        if cls._refusal is not None:
            skip_unless_required(cls._refusal)

    @pytest.fixture
    def devices(self, driver: Driver) -> Iterator[tuple[GPUDevice, ...]]:
        """The opened driver's devices; this thread is attached to each."""
        devices = tuple(driver.open())
        for index in range(len(devices)):
            driver.attach(index)
        yield devices
        for index in range(len(devices)):
            driver.detach(index)
        driver.close()

    @pytest.fixture
    def second(self, devices: tuple[GPUDevice, ...]) -> int:
        """Another device; the same again where there is one only, since the same must hold for it."""
        return min(1, len(devices) - 1)

    @staticmethod
    def put(driver: Driver, index: int, content: bytes) -> Any:
        mem = driver.alloc(index, len(content))
        driver.write(index, mem, 0, memoryview(content))
        return mem

    @staticmethod
    def get(driver: Driver, index: int, mem: Any, size: int, offset: int = 0) -> bytes:
        target = bytearray(size)
        driver.read(index, mem, offset, memoryview(target))
        return bytes(target)

    def test_constructor_binds_nothing(self, driver: Driver) -> None:
        assert driver.name
        assert isinstance(driver.capabilities, Capabilities)

    def test_open_lists_devices(self, driver: Driver, devices: tuple[GPUDevice, ...]) -> None:
        assert devices
        assert [device.device_id for device in devices] == [f"{driver.name}:{n}" for n in range(len(devices))]
        assert len({device.stable_id for device in devices}) == len(devices)

    def test_threading_claim_is_fixed(self, driver: Driver) -> None:
        before = driver.capabilities.threading
        driver.open()
        assert driver.capabilities.threading == before
        driver.close()

    def test_open_again_after_close(self, driver: Driver) -> None:
        first = [device.device_id for device in driver.open()]
        driver.close()
        assert [device.device_id for device in driver.open()] == first
        driver.attach(0)
        mem = self.put(driver, 0, b"again" * 4096)
        assert self.get(driver, 0, mem, 5 * 4096) == b"again" * 4096
        driver.free(0, mem)
        driver.detach(0)
        driver.close()

    @pytest.mark.parametrize("size", [1, 2, 255, 4096, 65_537, 1 << 20, (4 << 20) + 1])
    def test_bytes_come_back(self, driver: Driver, devices: tuple[GPUDevice, ...], size: int) -> None:
        alignment = driver.capabilities.alignment_bytes
        size = -(-size // alignment) * alignment
        content = random.Random(size).randbytes(size)
        for index in range(len(devices)):
            mem = self.put(driver, index, content)
            same = self.get(driver, index, mem, size) == content
            assert same
            driver.free(index, mem)

    @pytest.mark.parametrize(("offset", "size"), [(0, 1), (1, 1), (3, 17), (4095, 1), (100, 3996), (4096, 4096)])
    def test_odd_offsets_touch_nothing_else(
        self, driver: Driver, devices: tuple[GPUDevice, ...], offset: int, size: int
    ) -> None:
        unit = driver.capabilities.alignment_bytes
        offset, size = offset * unit, size * unit
        expected = bytearray(random.Random(0).randbytes(8192 * unit))
        mem = self.put(driver, 0, bytes(expected))
        content = random.Random(1).randbytes(size)
        driver.write(0, mem, offset, memoryview(content))
        expected[offset : offset + size] = content
        assert self.get(driver, 0, mem, 8192 * unit) == expected
        assert self.get(driver, 0, mem, size, offset) == content
        driver.free(0, mem)

    def test_write_is_done_with_its_source(self, driver: Driver, devices: tuple[GPUDevice, ...]) -> None:
        source = bytearray(b"a" * 65_536)
        mem = driver.alloc(0, len(source))
        driver.write(0, mem, 0, memoryview(source))
        source[:] = b"b" * len(source)
        assert self.get(driver, 0, mem, len(source)) == b"a" * len(source)
        driver.free(0, mem)
        source.append(0)  # nobody keeps it exported

    def test_random_programs_match_the_oracle(self, driver: Driver, devices: tuple[GPUDevice, ...]) -> None:
        rng = random.Random(11)
        unit = driver.capabilities.alignment_bytes
        live: list[tuple[int, Any, bytearray]] = []
        for _ in range(400):
            choice = rng.random()
            if len(live) < 2 or (choice < 0.15 and len(live) < 20):
                content = rng.randbytes(unit * rng.randrange(1, 3000))
                index = rng.randrange(len(devices))
                live.append((index, self.put(driver, index, content), bytearray(content)))
            elif choice < 0.25:
                index, mem, oracle = live.pop(rng.randrange(len(live)))
                assert self.get(driver, index, mem, len(oracle)) == oracle
                driver.free(index, mem)
            else:
                index, mem, oracle = rng.choice(live)
                count = unit * rng.randrange(1, len(oracle) // unit + 1)
                offset = unit * rng.randrange((len(oracle) - count) // unit + 1)
                if choice < 0.5:
                    content = rng.randbytes(count)
                    driver.write(index, mem, offset, memoryview(content))
                    oracle[offset : offset + count] = content
                elif choice < 0.75:
                    assert self.get(driver, index, mem, count, offset) == oracle[offset : offset + count]
                else:
                    to_index, to_mem, to_oracle = rng.choice(live)
                    if to_mem is mem or count > len(to_oracle):
                        continue
                    to = unit * rng.randrange((len(to_oracle) - count) // unit + 1)
                    driver.copy(index, mem, offset, to_index, to_mem, to, count)
                    to_oracle[to : to + count] = oracle[offset : offset + count]
        for index, mem, oracle in live:
            assert self.get(driver, index, mem, len(oracle)) == oracle
            driver.free(index, mem)

    def test_live_allocations_never_alias(self, driver: Driver, devices: tuple[GPUDevice, ...]) -> None:
        size = 4096
        mems = [self.put(driver, 0, bytes([n]) * size) for n in range(16)]
        for n in range(0, 16, 2):
            driver.free(0, mems[n])
            mems[n] = self.put(driver, 0, bytes([100 + n]) * size)
        for n, mem in enumerate(mems):
            assert self.get(driver, 0, mem, size) == bytes([n if n % 2 else 100 + n]) * size
            driver.free(0, mem)

    def test_copy_within_one_device(self, driver: Driver, devices: tuple[GPUDevice, ...]) -> None:
        src, dst = self.put(driver, 0, b"s" * 8192), self.put(driver, 0, b"d" * 8192)
        driver.copy(0, src, 1024, 0, dst, 2048, 512)
        assert self.get(driver, 0, dst, 8192) == b"d" * 2048 + b"s" * 512 + b"d" * 5632
        driver.write(0, src, 0, memoryview(b"1" * 1024))
        driver.copy(0, src, 0, 0, src, 4096, 1024)
        assert self.get(driver, 0, src, 1024, 4096) == b"1" * 1024
        driver.free(0, src)
        driver.free(0, dst)

    def test_copy_between_devices(self, driver: Driver, devices: tuple[GPUDevice, ...], second: int) -> None:
        content = random.Random(2).randbytes(1 << 20)
        src, dst = self.put(driver, 0, content), self.put(driver, second, bytes(len(content)))
        driver.copy(0, src, 0, second, dst, 0, len(content))
        assert (self.get(driver, second, dst, len(content)) == content) is True
        driver.copy(second, dst, 0, 0, src, len(content) // 2, len(content) // 2)
        assert self.get(driver, 0, src, 4096, len(content) // 2) == content[:4096]
        driver.free(0, src)
        driver.free(second, dst)

    def test_sync_returns(self, driver: Driver, devices: tuple[GPUDevice, ...]) -> None:
        for index in range(len(devices)):
            driver.sync(index)

    def test_telemetry_is_one_reading(self, driver: Driver, devices: tuple[GPUDevice, ...]) -> None:
        for index in range(len(devices)):
            reading = driver.telemetry(index)
            assert isinstance(reading, Telemetry)
            for name in ("temperature_c", "power_w", "clock_mhz", "memory_total_bytes"):
                value = getattr(reading, name)
                # What is not known is None with a reason, never 0.
                assert value is None or value > 0, name
                assert value is not None or name in reading.unavailable or name not in driver.capabilities.telemetry
            assert set(reading.unavailable) <= set(Telemetry.model_fields)
            if reading.memory_free_bytes is not None and reading.memory_total_bytes is not None:
                assert 0 <= reading.memory_free_bytes <= reading.memory_total_bytes

    def test_allocation_beyond_the_device(self, driver: Driver, devices: tuple[GPUDevice, ...]) -> None:
        # No machine has an exbibyte, for a library that does not tell how much it has.
        total = driver.telemetry(0).memory_total_bytes or devices[0].memory_bytes or 1 << 58
        with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the library raises
            driver.alloc(0, total * 4)
        assert self.kind(driver, caught.value) is OutOfMemory
        driver.free(0, self.put(driver, 0, bytes(driver.capabilities.alignment_bytes)))

    @staticmethod
    def kind(driver: Driver, exc: BaseException) -> type[GPUError] | None:
        if isinstance(exc, GPUError):
            return type(exc)
        assert isinstance(exc, Exception)
        return driver.classify(exc)

    def test_classify_knows_what_it_does_not_know(self, driver: Driver) -> None:
        assert driver.classify(MemoryError()) is OutOfMemory
        unknown = driver.classify(LookupError("nothing of this library"))
        assert unknown is None or not issubclass(unknown, DeviceLost)

    def test_each_thread_attaches(self, driver: Driver, devices: tuple[GPUDevice, ...]) -> None:
        """A driver of one thread is opened, used and closed by whichever thread it is."""
        content = b"from another thread" * driver.capabilities.alignment_bytes

        def work() -> bytes:
            for index in range(len(devices)):
                driver.attach(index)
            try:
                mem = self.put(driver, len(devices) - 1, content)
                found = self.get(driver, len(devices) - 1, mem, len(content))
                driver.free(len(devices) - 1, mem)
                return found
            finally:
                for index in range(len(devices)):
                    driver.detach(index)

        def whole_life() -> bytes:
            driver.open()
            try:
                return work()
            finally:
                driver.close()

        if driver.capabilities.threading != "backend":
            for _ in range(3):
                assert on_thread(work) == content
            return
        for index in range(len(devices)):
            driver.detach(index)
        driver.close()
        for _ in range(3):
            assert on_thread(whole_life) == content
        driver.open()
        for index in range(len(devices)):
            driver.attach(index)

    def test_threads_work_at_once_as_claimed(self, driver: Driver, devices: tuple[GPUDevice, ...]) -> None:
        """Four on one device, or one on each, or this one alone."""
        match driver.capabilities.threading:
            case "queue":
                places = [0] * 4
            case "device":
                places = list(range(len(devices)))
            case _:
                places = [0]
        contents = [random.Random(n).randbytes(1 << 18) for n in range(len(places))]
        mems = [driver.alloc(index, 1 << 18) for index in places]
        failures: list[str] = []

        def work(n: int) -> None:
            for _ in range(10):
                driver.write(places[n], mems[n], 0, memoryview(contents[n]))
                if self.get(driver, places[n], mems[n], 1 << 18) != contents[n]:
                    failures.append(f"thread {n} read something else than it wrote")

        def attached(n: int) -> None:
            driver.attach(places[n])
            work(n)
            driver.detach(places[n])

        if driver.capabilities.threading == "backend":
            work(0)
        else:
            threads = [threading.Thread(target=attached, args=(n,), daemon=True) for n in range(len(places))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads)
        assert failures == []
        for index, mem in zip(places, mems, strict=True):
            driver.free(index, mem)

    def test_claim_host_visible(self, driver: Driver, devices: tuple[GPUDevice, ...]) -> None:
        if not driver.capabilities.host_visible:
            mem = driver.alloc(0, 4096)
            with pytest.raises((NotImplementedError, GPUError)):
                driver.host_view(0, mem)
            driver.free(0, mem)
            return
        mem = self.put(driver, 0, b"v" * 4096)
        view = driver.host_view(0, mem)
        assert view.nbytes >= 4096
        assert not view.readonly
        assert view[0] == ord("v")
        view[0] = ord("w")
        assert self.get(driver, 0, mem, 2) == b"wv"
        view.release()
        driver.free(0, mem)

    def test_claim_kernels(self, driver: Driver, devices: tuple[GPUDevice, ...]) -> None:
        source = next((FIELD_ADD[name] for name in sorted(driver.capabilities.kernels) if name in FIELD_ADD), None)
        if source is None:
            with pytest.raises(GPUError):  # a compiler that is asked for nonsense, or none
                driver.compile(0, "this is no program", "missing")
            return
        try:
            kernel = driver.compile(0, source, "field_add")
        except Unsupported as exc:
            pytest.skip(str(exc))
        with pytest.raises(CompileFailed) as caught:
            driver.compile(0, source.replace("modulus", "undeclared_name", 1), "field_add")
        assert "modulus" in caught.value.log
        a, b, total = operands(1000)
        mems = [self.put(driver, 0, array.tobytes()) for array in (a, b, np.zeros_like(a))]
        driver.launch(0, kernel, (16, 1, 1), (64, 1, 1), (*mems, *scalars(1000)))
        assert self.get(driver, 0, mems[2], total.nbytes) == total.tobytes()
        for mem in mems:
            driver.free(0, mem)

    def test_trim_returns_bytes(self, driver: Driver, devices: tuple[GPUDevice, ...]) -> None:
        driver.free(0, driver.alloc(0, 1 << 20))
        assert driver.trim(0) >= 0
