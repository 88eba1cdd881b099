"""Files to devices: through host memory, straight into visible memory, and by a driver that reads files itself."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest

from gpurt.backends.cpu_backend import CPUDriver
from gpurt.driver import Driver
from gpurt.errors import InvalidHandle, OutOfRange, TransferFailed
from gpurt.runtime.backend import DriverBackend
from gpurt.testing import FaultyDriver, SimulatedDriver, parse_simulation
from gpurt.testing.kit.probe import DriverProbe
from tests.support.reference_driver import ReferenceDriver

SIZE = 3 << 20
DATA = random.Random(3).randbytes(SIZE)


class FileReader(ReferenceDriver):
    """A driver that reads files itself."""

    def __init__(self) -> None:
        super().__init__(chunk_bytes=1 << 18)
        self.capabilities = self.capabilities.model_copy(update={"loads_files": True})

    def load(self, index: int, mem: Any, offset: int, fd: int, file_offset: int, nbytes: int) -> int:
        data = os.pread(fd, nbytes, file_offset)
        self.write(index, mem, offset, memoryview(data))
        return len(data)


def hidden() -> ReferenceDriver:
    """A driver whose memory the host cannot address, so that each chunk is a ``write``."""
    driver = ReferenceDriver(chunk_bytes=1 << 18)
    driver.capabilities = driver.capabilities.model_copy(update={"host_visible": False})
    return driver


DRIVERS = {
    "staged": lambda: SimulatedDriver(parse_simulation("h100")),
    "straight": lambda: CPUDriver(),
    "by the driver": FileReader,
}


@pytest.fixture(params=list(DRIVERS))
async def backend(request: pytest.FixtureRequest):
    driver: Driver = DRIVERS[request.param]()
    async with DriverBackend(driver) as backend:
        yield backend


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(DATA)
    return path


async def test_whole_file(backend: DriverBackend, path: Path) -> None:
    device = backend.devices[0].device_id
    seen: list[int] = []
    async with backend.allocation(device, SIZE) as handle:
        assert await backend.load_file(path, handle, on_progress=seen.append) == SIZE
        assert await backend.copy_from_device(handle) == DATA
    await asyncio.sleep(0)
    assert seen == sorted(seen)
    assert seen[-1] == SIZE


async def test_range_leaves_the_neighbours_alone(backend: DriverBackend, path: Path) -> None:
    async with backend.allocation(backend.devices[0].device_id, 1000) as handle:
        await backend.copy_to_device(b"." * 1000, handle)
        done = await backend.load_file(str(path), handle, file_offset=12345, size_bytes=77, handle_offset=100)
        assert done == 77
        got = await backend.copy_from_device(handle)
    assert got == b"." * 100 + DATA[12345 : 12345 + 77] + b"." * 823


async def test_order_with_copies(backend: DriverBackend, path: Path) -> None:
    async with backend.allocation(backend.devices[0].device_id, SIZE) as handle:
        load = asyncio.create_task(backend.load_file(path, handle))
        write = asyncio.create_task(backend.copy_to_device(b"after", handle))
        await asyncio.gather(load, write)
        assert await backend.copy_from_device(handle, 0, 8) == b"after" + DATA[5:8]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"file_offset": -1}, OutOfRange, "file_offset"),
        ({"file_offset": SIZE + 1}, OutOfRange, "not inside"),
        ({"size_bytes": SIZE + 1}, OutOfRange, "inside"),
        ({"file_offset": 10, "size_bytes": SIZE}, OutOfRange, "not inside"),
        ({"size_bytes": -1}, OutOfRange, "inside"),
        ({"handle_offset": 1}, OutOfRange, "do not fit"),
        ({"handle_offset": SIZE + 1}, OutOfRange, "inside"),
        ({"size_bytes": 1.5}, OutOfRange, "integer"),
    ],
)
async def test_ranges_outside(
    backend: DriverBackend, path: Path, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    async with backend.allocation(backend.devices[0].device_id, SIZE) as handle:
        with pytest.raises(error, match=words):
            await backend.load_file(path, handle, **arguments)


async def test_unreadable(backend: DriverBackend, path: Path, tmp_path: Path) -> None:
    async with backend.allocation(backend.devices[0].device_id, 10) as handle:
        for bad in (tmp_path / "absent", tmp_path):
            with pytest.raises(TransferFailed, match=str(bad.name)):
                await backend.load_file(bad, handle)
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(TransferFailed, match="regular"):
            await backend.load_file(tmp_path / "fifo", handle)
        await backend.load_file(path, handle, size_bytes=0)
    with pytest.raises(InvalidHandle):
        await backend.load_file(path, handle)


async def test_empty_file(backend: DriverBackend, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    async with backend.allocation(backend.devices[0].device_id, 10) as handle:
        assert await backend.load_file(tmp_path / "empty", handle) == 0


async def test_a_file_changed_under_the_reader_is_refused(path: Path) -> None:
    driver = hidden()
    hold = DriverProbe(driver)
    async with DriverBackend(driver) as backend, backend.allocation("reference:0", SIZE) as handle:
        for change, words in ((lambda: os.truncate(path, 1 << 19), "shorter"), (lambda: path.touch(), "changed")):
            path.write_bytes(DATA)
            os.utime(path, (1, 1))
            gate = hold.hold("write")
            load = asyncio.create_task(backend.load_file(path, handle))
            await gate.entered()
            change()
            gate.release()
            with pytest.raises(TransferFailed, match=words):
                await load


async def test_cancelled_load_stops_at_the_next_chunk(path: Path) -> None:
    driver = hidden()
    hold = DriverProbe(driver)
    async with DriverBackend(driver) as backend, backend.allocation("reference:0", SIZE) as handle:
        gate = hold.hold("write")
        load = asyncio.create_task(backend.load_file(path, handle))
        await gate.entered()
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        gate.release()
        await backend.synchronize("reference:0")
        assert hold.counts["write"] == 1


async def test_a_device_lost_half_way_costs_only_its_load(path: Path) -> None:
    faulty = FaultyDriver(hidden())
    async with DriverBackend(faulty) as backend:
        doomed = await backend.allocate("reference:0", SIZE)
        async with backend.allocation("reference:1", SIZE) as safe:
            faulty.lose(0)
            failed, done = await asyncio.gather(
                backend.load_file(path, doomed), backend.load_file(path, safe), return_exceptions=True
            )
            assert type(failed).__name__ == "DeviceLost"
            assert done == SIZE
            assert await backend.copy_from_device(safe) == DATA
        await backend.deallocate(doomed)
