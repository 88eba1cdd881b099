"""``GPURT_MEMORY_LIMIT`` reaches the backends that the factory makes, and all of a limit can be allocated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpurt import plugins
from gpurt.backends.cpu_backend import CPUBackend
from gpurt.errors import GPUError, OutOfMemory
from gpurt.factory import create_backend
from gpurt.testing.simulated import create_simulated

MIB = 1 << 20


@pytest.fixture
def two() -> Iterator[str]:
    """A backend of two devices under the name ``two``."""
    plugins.register("two", lambda: create_simulated("h100x2"))
    yield "two"
    plugins.unregister("two")


async def test_every_byte_of_a_limit_can_be_allocated() -> None:
    # 9,437,185 bytes are served by blocks of 10 MiB: six of them would not fit a limit of what was asked for.
    piece = 9 * MIB + 1
    async with CPUBackend(memory_limit=6 * piece) as backend:
        handles = [await backend.allocate("cpu:0", piece) for _ in range(5)]
        assert (await backend.get_device_memory_info("cpu:0")).available_bytes == piece
        handles.append(await backend.allocate("cpu:0", piece))
        assert (await backend.get_device_memory_info("cpu:0")).available_bytes == 0
        with pytest.raises(OutOfMemory) as caught:
            await backend.allocate("cpu:0", 1)
        assert caught.value.free_bytes == 0
        for handle in handles:
            await backend.deallocate(handle)
        await backend.allocate("cpu:0", 6 * piece)


async def test_the_limit_of_the_environment_reaches_every_device() -> None:
    async with await create_backend("cpu", environ={"GPURT_MEMORY_LIMIT": "3MiB"}) as backend:
        assert isinstance(backend, CPUBackend)
        assert backend.ledger.usage("cpu:0").limit_bytes == 3 * MIB
        handle = await backend.allocate("cpu:0", 3 * MIB)
        with pytest.raises(OutOfMemory):
            await backend.allocate("cpu:0", 1)
        await backend.deallocate(handle)


async def test_a_limit_of_one_device_leaves_the_others(two: str) -> None:
    environ = {"GPURT_MEMORY_LIMIT": "simulated:1=2MiB"}
    async with await create_backend(two, environ=environ) as backend:
        first, second = (device.device_id for device in backend.devices)
        assert second == "simulated:1"
        await backend.allocate(first, 64 * MIB)
        await backend.allocate(second, 2 * MIB)
        with pytest.raises(OutOfMemory) as caught:
            await backend.allocate(second, 1)
        assert caught.value.limit_bytes == 2 * MIB


async def test_a_stable_id_names_a_device_too(two: str) -> None:
    async with create_simulated("h100x2") as backend:
        stable = backend.devices[0].stable_id
    async with await create_backend(two, environ={"GPURT_MEMORY_LIMIT": f"{stable}=1MiB,5MiB"}) as backend:
        limits = [backend.ledger.usage(device.device_id).limit_bytes for device in backend.devices]  # type: ignore[attr-defined]
    assert limits == [MIB, 5 * MIB]


async def test_a_backends_own_limit_is_not_raised(two: str) -> None:
    plugins.register("two", lambda: create_simulated("h100x2", memory_limit=4 * MIB), replace=True)
    async with await create_backend(two, environ={"GPURT_MEMORY_LIMIT": "simulated:0=9MiB,1MiB"}) as backend:
        limits = [backend.ledger.usage(device.device_id).limit_bytes for device in backend.devices]  # type: ignore[attr-defined]
    assert limits == [4 * MIB, MIB]


async def test_a_limit_that_is_not_a_size_is_said_before_anything_is_opened() -> None:
    with pytest.raises(GPUError, match="GPURT_MEMORY_LIMIT"):
        await create_backend("cpu", environ={"GPURT_MEMORY_LIMIT": "much"})


async def test_simulated_devices_obey_as_real_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPURT_MEMORY_LIMIT", "simulated:0=1MiB")
    monkeypatch.setenv("GPURT_MEMORY_RESERVE", "2GiB")
    async with create_simulated("h100x2") as backend:
        first, second = backend.devices
        with pytest.raises(OutOfMemory) as caught:
            await backend.allocate(first.device_id, 2 * MIB)
        assert caught.value.limit_bytes == MIB
        assert (first.memory_usable_bytes, first.memory_usable_source) == (MIB, "limit")
        free = second.memory_available
        assert free is not None
        assert (second.memory_usable_bytes, second.memory_usable_source) == (free - (2 << 30), "profile")
        assert (await backend.get_device_memory_info(first.device_id)).available_bytes == MIB
        assert (await backend.get_device_memory_info(second.device_id)).available_bytes == free - (2 << 30)


async def test_simulated_devices_without_a_limit_have_all_that_they_simulate() -> None:
    async with create_simulated("h100,m2-ultra", environ={}) as backend:
        for device in backend.devices:
            assert (device.memory_usable_bytes, device.memory_usable_source) == (device.memory_available, "profile")


def test_a_limit_of_simulated_devices_that_is_not_a_size() -> None:
    with pytest.raises(GPUError, match="GPURT_MEMORY_LIMIT"):
        create_simulated("h100", environ={"GPURT_MEMORY_LIMIT": "lots"})


async def test_a_reserve_is_left_free() -> None:
    async with await create_backend("cpu") as backend:
        free = backend.devices[0].memory_available
    assert free is not None
    reserve = free - 64 * MIB
    async with await create_backend("cpu", environ={"GPURT_MEMORY_RESERVE": f"{reserve}B"}) as backend:
        assert isinstance(backend, CPUBackend)
        limit = backend.ledger.usage("cpu:0").limit_bytes
        assert limit is not None
        assert limit <= 64 * MIB + (1 << 30)  # what is free changes while others run
        assert backend.devices[0].memory_usable_bytes == limit
        assert backend.devices[0].memory_usable_source == "limit"
    async with await create_backend("cpu", environ={"GPURT_MEMORY_RESERVE": "100TiB"}) as backend:
        with pytest.raises(OutOfMemory, match="GPURT_MEMORY_LIMIT"):
            await backend.allocate("cpu:0", 1)
