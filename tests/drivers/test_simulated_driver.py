"""Simulated devices: the table, specifications, memory, links, sensors, hot-plug."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from gpurt.errors import BackendUnavailable, DeviceLost, OutOfMemory, ReasonCode
from gpurt.testing import PROFILES, SimulatedBackend, SimulatedDriver, create_simulated, parse_simulation
from gpurt.testing.profiles import GIB, MAX_DEVICES, MIB
from gpurt.types import GPUDevice

# Specifications


def test_table_has_the_nine_models_with_sane_figures() -> None:
    assert set(PROFILES) == {"h100", "h200", "a100", "l40s", "rtx-4090", "mi300x", "m2-ultra", "gb10", "phone"}
    for profile in PROFILES.values():
        assert GIB < profile.capacity_bytes <= profile.memory_bytes
        assert profile.fp16_tflops >= profile.fp32_tflops > 0
        # Host memory is never faster than the device's own.
        assert 0 < profile.host_link_gbps <= profile.memory_bandwidth_gbps
        assert 0 < profile.latency_s < 1e-3
        if profile.vendor == "nvidia":
            assert profile.tensor_core_count == 4 * profile.compute_units


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("h100", ["h100"]),
        ("h100x2,m2-ultra", ["h100", "h100", "m2-ultra"]),
        (" H100X2 , Phone ", ["h100", "h100", "phone"]),
        ("mi300x", ["mi300x"]),
        ("mi300xx2", ["mi300x", "mi300x"]),
        ("rtx-4090x1", ["rtx-4090"]),
    ],
)
def test_specification(text: str, keys: list[str]) -> None:
    assert [profile.key for profile in parse_simulation(text)] == keys


@pytest.mark.parametrize("text", ["", "h100,", "h101", "h100x", "x8", "h100x-1", "mi300x2", "h100 x2", "h100x²"])
def test_unknown_device_lists_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match=r"known are h100, h200, a100"):
        parse_simulation(text)


@pytest.mark.parametrize("text", ["h100x0", f"h100x{MAX_DEVICES + 1}", f"h100x{MAX_DEVICES},phone", "h100x9999999999"])
def test_absurd_counts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"1 to {MAX_DEVICES} devices"):
        parse_simulation(text)


# Records


def opened(spec: str, **options: object) -> tuple[SimulatedDriver, list[GPUDevice]]:
    driver = SimulatedDriver(parse_simulation(spec), **options)  # pyright: ignore[reportArgumentType]
    return driver, list(driver.open())


def test_records_are_marked_and_identities_are_stable() -> None:
    _, devices = opened("h100x2,m2-ultra,h100", seed="node-a")
    assert [device.device_id for device in devices] == [f"simulated:{n}" for n in range(4)]
    assert all(device.simulated and device.name.startswith("Simulated ") for device in devices)
    assert [device.stable_id for device in devices] == [
        "sim:node-a:h100:0",
        "sim:node-a:h100:1",
        "sim:node-a:m2-ultra:0",
        "sim:node-a:h100:2",
    ]
    assert opened("h100x2,m2-ultra,h100", seed="node-a")[1] == devices
    assert opened("h100", seed="node-b")[1][0].stable_id == "sim:node-b:h100:0"
    unified = devices[2]
    assert unified.unified_memory
    assert unified.memory_pool_id
    assert (unified.memory_bytes, unified.memory_usable_bytes) == (192 * GIB, 144 * GIB)


def test_no_device_is_a_refusal() -> None:
    with pytest.raises(BackendUnavailable) as caught:
        SimulatedDriver(()).open()
    assert caught.value.reason is ReasonCode.NO_DEVICE


# Memory


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 1), (1, 7), (MIB - 1, 2), (MIB - 3, 2 * MIB + 5), (12345, 3 * MIB), (0, 4 * MIB + 1)]
)
def test_bytes_come_back_and_neighbours_stay(offset: int, size: int) -> None:
    driver, _ = opened("phone")
    total = 4 * MIB + 1 + 12345
    mem = driver.alloc(0, total)
    payload = np.random.default_rng(size).bytes(size)
    driver.write(0, mem, offset, memoryview(payload))
    back = bytearray(b"\xff" * total)
    driver.read(0, mem, 0, memoryview(back))
    assert back == bytes(offset) + payload + bytes(total - offset - size)


def test_copy_between_models_and_within_one_allocation() -> None:
    driver, _ = opened("h100,mi300x")
    here, there = driver.alloc(0, 3 * MIB), driver.alloc(1, 3 * MIB)
    payload = np.random.default_rng(0).bytes(2 * MIB + 9)
    driver.write(0, here, 5, memoryview(payload))
    driver.copy(0, here, 5, 1, there, 17, len(payload))
    back = bytearray(len(payload))
    driver.read(1, there, 17, memoryview(back))
    assert back == payload
    driver.copy(1, there, 17, 1, there, 2 * MIB + 100, 1000)
    driver.read(1, there, 2 * MIB + 100, memoryview(back)[:1000])
    assert back[:1000] == payload[:1000]


def test_capacity_is_the_device_s_and_costs_nothing() -> None:
    driver, devices = opened("h100x8", real_bytes_limit=MIB)
    assert devices[0].memory_bytes is not None
    mems = [driver.alloc(index, devices[0].memory_bytes) for index in range(8)]
    with pytest.raises(MemoryError, match="0 of"):
        driver.alloc(0, 1)
    assert driver.telemetry(3).memory_free_bytes == 0
    driver.free(0, mems[0])
    assert driver.telemetry(0).memory_free_bytes == devices[0].memory_bytes
    assert driver.live_allocations == 7
    driver.close()
    assert driver.live_allocations == 0


def test_capacity_of_unified_memory_is_what_may_be_used() -> None:
    driver, _ = opened("m2-ultra")
    driver.alloc(0, 144 * GIB)
    with pytest.raises(MemoryError) as caught:
        driver.alloc(0, 1)
    assert driver.classify(caught.value) is OutOfMemory


def test_written_memory_is_bounded_and_comes_back() -> None:
    driver, _ = opened("h100", real_bytes_limit=2 * MIB)
    first = driver.alloc(0, GIB)
    driver.write(0, first, 0, memoryview(bytes(2 * MIB)))
    with pytest.raises(RuntimeError, match="real_bytes_limit"):
        driver.write(0, first, 5 * MIB, memoryview(b"x"))
    driver.write(0, first, MIB, memoryview(b"x"))
    driver.free(0, first)
    second = driver.alloc(0, GIB)
    driver.write(0, second, 512 * MIB, memoryview(bytes(2 * MIB)))


def test_threads_may_write_one_allocation_side_by_side() -> None:
    driver, _ = opened("h100")
    mem = driver.alloc(0, 8 * MIB)
    # Borders inside a page: two threads make the same page at once.
    parts = [(n * MIB + 77 * n, np.random.default_rng(n).bytes(MIB + 77)) for n in range(7)]
    threads = [threading.Thread(target=driver.write, args=(0, mem, offset, memoryview(data))) for offset, data in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    back = bytearray(8 * MIB)
    driver.read(0, mem, 0, memoryview(back))
    assert all(back[offset : offset + len(data)] == data for offset, data in parts)


# Time


class FakeTime:
    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_realtime_takes_as_long_as_the_links_need() -> None:
    time = FakeTime()
    driver, _ = opened("h100x2,l40s", realtime=True, clock=lambda: time.now, sleep=time.sleep)
    mems = [driver.alloc(index, 64 * MIB) for index in range(3)]
    data = memoryview(bytes(64 * MIB))
    seconds = len(data) / 1e9
    driver.write(0, mems[0], 0, data)
    driver.write(2, mems[2], 0, data)
    driver.copy(0, mems[0], 0, 1, mems[1], 0, len(data))
    driver.copy(0, mems[0], 0, 2, mems[2], 0, len(data))
    driver.copy(0, mems[0], 0, 0, mems[0], 32 * MIB, 32 * MIB)
    latency = 10e-6
    expected = [seconds / 64, seconds / 32, seconds / 450, seconds / 32, seconds / 2 / 1675]
    assert [pytest.approx(each + latency) for each in expected] == time.slept


def test_one_link_is_shared_and_directions_are_not() -> None:
    # The clock stands still, as it does for two transfers that begin at once.
    waits: list[float] = []
    driver, _ = opened("h100,m2-ultra", realtime=True, clock=lambda: 0.0, sleep=waits.append)
    data = bytearray(MIB)
    for index in (0, 1):
        mem = driver.alloc(index, MIB)
        driver.write(index, mem, 0, memoryview(data))
        driver.write(index, mem, 0, memoryview(data))
        driver.read(index, mem, 0, memoryview(data))
    one, two, other_way, unified, _, third = waits
    assert two == pytest.approx(2 * one)
    assert other_way == pytest.approx(one)
    assert third == pytest.approx(3 * unified)


def test_without_realtime_nothing_sleeps() -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError(seconds)

    driver, _ = opened("phone", sleep=sleep)
    driver.write(0, driver.alloc(0, MIB), 0, memoryview(bytes(MIB)))


# Sensors


def test_telemetry_follows_profile_allocations_and_orders() -> None:
    driver, _ = opened("h100,m2-ultra")
    driver.alloc(0, 5 * MIB)
    reading = driver.telemetry(0)
    assert (reading.memory_used_bytes, reading.temperature_c, reading.power_w) == (5 * MIB, 41.0, 69.85)
    assert (reading.clock_mhz, reading.utilization_percent, dict(reading.unavailable)) == (1980, 0.0, {})
    # Metal has no sensors.
    apple = driver.telemetry(1)
    assert (apple.temperature_c, apple.power_w) == (None, None)
    assert dict(apple.unavailable) == {"temperature_c": "unsupported", "power_w": "unsupported"}
    assert apple.memory_total_bytes == apple.memory_free_bytes + apple.memory_reserved_bytes  # pyright: ignore
    driver.set_telemetry(0, temperature_c=97.5, power_w=None)
    hot = driver.telemetry(0)
    assert (hot.temperature_c, hot.power_w, hot.unavailable["power_w"]) == (97.5, None, "unsupported")
    assert all(not isinstance(value, float) or math.isfinite(value) for value in hot.model_dump().values())
    with pytest.raises(ValueError, match="temperature_f"):
        driver.set_telemetry(0, temperature_f=200)


# Hot-plug


def test_removed_device_is_lost_now_and_gone_at_the_next_open() -> None:
    driver, _ = opened("h100x3")
    mem = driver.alloc(1, MIB)
    driver.write(1, mem, 0, memoryview(bytes(MIB)))
    driver.remove(1)
    for call in (
        lambda: driver.write(1, mem, 0, memoryview(b"x")),
        lambda: driver.telemetry(1),
        lambda: driver.sync(1),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert driver.classify(caught.value) is DeviceLost
    driver.sync(0)
    assert driver.live_allocations == 0
    driver.close()
    assert [device.stable_id for device in driver.open()] == ["sim:0:h100:0", "sim:0:h100:2"]
    assert driver.add(PROFILES["h100"]) == "sim:0:h100:3"
    driver.close()
    assert [device.stable_id[-1] for device in driver.open()] == ["0", "2", "3"]


def test_a_device_is_removed_by_its_key_while_the_driver_is_closed() -> None:
    driver, _ = opened("h100x3")
    driver.close()
    driver.remove("sim:0:h100:1")
    with pytest.raises(LookupError, match="sim:0:h100:1"):
        driver.remove("sim:0:h100:1")
    assert [device.stable_id[-1] for device in driver.open()] == ["0", "2"]


# As a backend


async def test_backend_of_a_mixed_machine() -> None:
    async with create_simulated("h100x2,phone", seed="laptop") as backend:
        assert isinstance(backend, SimulatedBackend)
        assert backend.name == "simulated"
        devices = await backend.list_devices()
        assert [device.vendor for device in devices] == ["nvidia", "nvidia", "qualcomm"]
        handle = await backend.allocate("simulated:1", 40 * GIB)
        await backend.copy_to_device(b"hello", handle, 30 * GIB)
        assert await backend.copy_from_device(handle, 30 * GIB - 1, 7) == b"\0hello\0"
        info = await backend.get_device_memory_info("simulated:1")
        assert info.used_bytes == 40 * GIB
        with pytest.raises(OutOfMemory):
            await backend.allocate("simulated:2", 7 * GIB)
        await backend.deallocate(handle)
