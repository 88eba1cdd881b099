"""Files that are wrong, or change under the reader, and devices that fail: a typed error that names what it is, nothing
left behind, and everybody else goes on. On each way from a file to a device."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from gpurt.backends.cpu_backend import CPUDriver
from gpurt.driver import Driver
from gpurt.errors import BackendClosed, DeviceLost, GPUError, InvalidHandle, OutOfMemory, OutOfRange, TransferFailed
from gpurt.runtime.backend import DriverBackend
from gpurt.testing import Fault, FaultyDriver, SimulatedDriver, parse_simulation
from gpurt.testing.kit.base import shutdown_quietly
from gpurt.testing.loops import turns, until
from gpurt.types import MemoryHandle
from gpurt.weights import WeightsError, load_safetensors
from tests.support.reference_driver import ReferenceDriver
from tests.weights.support import Content, check, document, raw_file, tensor, write

CHUNK = 1 << 18
SIZE = 5 * CHUNK + 7
DATA = random.Random(7).randbytes(SIZE)
OTHER = random.Random(8).randbytes(SIZE)


class FileReader(ReferenceDriver):
    """Reads files itself."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = self.capabilities.model_copy(update={"loads_files": True})

    def load(self, index: int, mem: Any, offset: int, fd: int, file_offset: int, nbytes: int) -> int:
        data = os.pread(fd, nbytes, file_offset)
        self.write(index, mem, offset, memoryview(data))
        return len(data)


WAYS: dict[str, tuple[Callable[[], Driver], Any]] = {
    "staged": (lambda: SimulatedDriver(parse_simulation("h100x2")), "write"),
    "straight": (lambda: CPUDriver(devices=2), "host_view"),
    "by the driver": (FileReader, "load"),
}
"""How a chunk gets to the device, and the driver's method that is called once for each."""


class Rig:
    """Two devices behind a driver that fails on demand, and an eye on what a load leaves behind."""

    def __init__(self, way: str, folder: Path) -> None:
        make, self.method = WAYS[way]
        driver = make()
        driver.capabilities = driver.capabilities.model_copy(update={"chunk_bytes": CHUNK})
        self.way = way
        self.folder = folder
        self.driver = FaultyDriver(driver)
        self.backend = DriverBackend(self.driver, pool_bytes=1 << 20, on_background_error=lambda error: None)

    @property
    def devices(self) -> list[str]:
        return [device.device_id for device in self.backend.devices]

    def file(self, name: str, data: bytes = DATA) -> Path:
        path = self.folder / name
        path.write_bytes(data)
        os.utime(path, (1, 1))  # so that a change within one tick of the clock shows too
        return path

    async def stop_at_chunk(self, number: int) -> threading.Event:
        """Where device 0 waits; set it to go on."""
        gate = threading.Event()
        self.driver.inject(Fault(self.method, index=0, nth=number, gate=gate))
        return gate

    async def chunks(self, number: int) -> None:
        def seen() -> int:
            return sum(call.method == self.method and call.index == 0 for call in self.driver.calls)

        await until(lambda: seen() >= number, f"chunk {number} of the load")

    async def neighbour(self) -> tuple[asyncio.Task[int], MemoryHandle]:
        """A load of another file to the other device."""
        handle = await self.backend.allocate(self.devices[1], SIZE)
        path = self.file("neighbour", OTHER)
        return asyncio.create_task(self.backend.load_file(path, handle)), handle

    async def neighbour_is_well(self, load: asyncio.Task[int], handle: MemoryHandle) -> None:
        assert await load == SIZE
        assert await self.backend.copy_from_device(handle) == OTHER
        await self.backend.deallocate(handle)

    async def nothing_is_left(self, *, lost: bool = False) -> None:
        def open_files() -> list[str]:
            files = [each.path for each in psutil.Process().open_files()]
            return [path for path in files if path.startswith(str(self.folder))]

        def held() -> int:
            counts = [sum(call.method == method for call in self.driver.calls) for method in ("alloc", "free")]
            return counts[0] - counts[1]

        await until(lambda: not open_files(), "files left open")
        usages = [self.backend.ledger.usage(device_id) for device_id in self.devices]
        assert [(usage.current_count, usage.committed_bytes) for usage in usages] == [(0, 0), (0, 0)]
        assert self.backend.live_handles == 0
        assert self.backend._opening.host_pool.used_bytes == 0
        assert not [each.name for each in threading.enumerate() if each.name.startswith("gpurt:weights")]
        if not lost:  # a lost device takes its memory with it
            await self.backend.trim()
            assert held() == 0


@pytest.fixture(params=list(WAYS))
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(request.param, tmp_path)
    async with rig.backend:
        yield rig
        rig.driver.clear()


def rewrite_and_set_back(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"?" * 100, before.st_size - 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class TestFiles:
    @pytest.mark.parametrize(
        ("make", "says"),
        [
            pytest.param(lambda path: None, "No such file", id="missing"),
            pytest.param(lambda path: path.mkdir(), "directory|regular|denied", id="directory"),
            pytest.param(lambda path: path.symlink_to(path), "symbolic|links", id="loop"),
            pytest.param(lambda path: path.symlink_to("/dev/zero"), "regular", id="device"),
            pytest.param(lambda path: os.mkfifo(path), "regular", id="pipe"),
        ],
    )
    async def test_no_file(self, rig: Rig, make: Callable[[Path], None], says: str) -> None:
        path = rig.folder / "bad"
        make(path)
        handle = await rig.backend.allocate(rig.devices[0], SIZE)
        neighbour = await rig.neighbour()
        with pytest.raises(TransferFailed, match=says) as caught:
            await rig.backend.load_file(path, handle)
        assert str(path) in caught.value.message
        assert (caught.value.hint is not None) == (says == "No such file")
        await rig.neighbour_is_well(*neighbour)
        # The handle is none the worse.
        assert await rig.backend.load_file(rig.file("good"), handle) == SIZE
        assert await rig.backend.copy_from_device(handle) == DATA
        await rig.backend.deallocate(handle)
        await rig.nothing_is_left()

    @pytest.mark.parametrize("name", ["a\0b", "\ud800", "n" * 5000])
    async def test_names_that_no_file_has(self, rig: Rig, name: str) -> None:
        handle = await rig.backend.allocate(rig.devices[0], 8)
        with pytest.raises(TransferFailed, match=r"null|encode|too long"):
            await rig.backend.load_file(rig.folder / name, handle)
        with pytest.raises(TransferFailed) as caught:
            await rig.backend.load_file(rig.folder / name, handle)
        assert len(str(caught.value)) < 1000
        await rig.backend.deallocate(handle)
        await rig.nothing_is_left()

    @pytest.mark.parametrize("path", [3, 3.5, None, ["a"]])
    async def test_what_is_no_path(self, rig: Rig, path: Any) -> None:
        async with rig.backend.allocation(rig.devices[0], 8) as handle:
            with pytest.raises(OutOfRange, match=f"{type(path).__name__} is not a path") as caught:
                await rig.backend.load_file(path, handle)
        assert (caught.value.device_id, caught.value.operation) == (rig.devices[0], "load_file")

    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
    async def test_files_without_a_size(self, rig: Rig) -> None:
        async with rig.backend.allocation(rig.devices[0], 1 << 20) as handle:
            with pytest.raises(TransferFailed, match="no ordinary file"):
                await rig.backend.load_file("/proc/self/maps", handle)

    async def test_behind_the_end(self, rig: Rig) -> None:
        async with rig.backend.allocation(rig.devices[0], 8) as handle:
            with pytest.raises(OutOfRange, match=f"has {SIZE:,} bytes; file_offset {SIZE + 1:,} is not inside"):
                await rig.backend.load_file(rig.file("file"), handle, file_offset=SIZE + 1)

    async def test_no_room(self, rig: Rig) -> None:
        handle = await rig.backend.allocate(rig.devices[0], SIZE - 1)
        await rig.backend.copy_to_device(bytes(SIZE - 1), handle)
        with pytest.raises(OutOfRange, match=f"{SIZE:,} bytes of .*file do not fit: .*{SIZE - 1:,}"):
            await rig.backend.load_file(rig.file("file"), handle)
        assert await rig.backend.copy_from_device(handle) == bytes(SIZE - 1)
        await rig.backend.deallocate(handle)
        with pytest.raises(InvalidHandle, match="freed"):
            await rig.backend.load_file(rig.file("file"), handle)
        await rig.nothing_is_left()


class TestWhileItIsRead:
    """Something happens between two chunks."""

    async def _during(self, rig: Rig, happens: Callable[[], object], chunk: int = 3) -> bytes | GPUError:
        """The third chunk is on its way when ``happens`` is called: what the device holds in the end, or the error."""
        handle = await rig.backend.allocate(rig.devices[0], SIZE + 100)
        gate = await rig.stop_at_chunk(chunk)
        neighbour = await rig.neighbour()
        load = asyncio.create_task(rig.backend.load_file(rig.folder / "file", handle))
        await rig.chunks(chunk)
        happens()
        gate.set()
        result: bytes | GPUError
        try:
            await load
            result = await rig.backend.copy_from_device(handle, 0, SIZE)
        except GPUError as exc:
            result = exc
        await rig.neighbour_is_well(*neighbour)
        lost = isinstance(result, DeviceLost)
        if not lost:
            assert await rig.backend.load_file(rig.file("again", OTHER), handle) == SIZE
            assert await rig.backend.copy_from_device(handle, 0, SIZE) == OTHER
        await rig.backend.deallocate(handle)
        await rig.nothing_is_left(lost=lost)
        return result

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            pytest.param(lambda path: os.truncate(path, CHUNK), "ended at byte .*shorter", id="truncated"),
            pytest.param(lambda path: os.truncate(path, SIZE - 1), "shorter", id="truncated by one"),
            pytest.param(lambda path: os.truncate(path, 0), "shorter", id="emptied"),
            pytest.param(lambda path: os.truncate(path, SIZE + 1), "changed", id="longer"),
            pytest.param(lambda path: path.write_bytes(OTHER), "changed", id="written anew"),
            pytest.param(lambda path: rewrite_and_set_back(path), "time set back", id="written and its time set back"),
        ],
    )
    async def test_changed(self, rig: Rig, change: Callable[[Path], object], says: str) -> None:
        path = rig.file("file")
        error = await self._during(rig, lambda: change(path))
        assert isinstance(error, TransferFailed)
        assert str(path) in error.message
        with pytest.raises(TransferFailed, match=says):
            raise error

    @pytest.mark.parametrize("change", ["replaced", "deleted"])
    async def test_another_file_of_its_name_is_no_matter(self, rig: Rig, change: str) -> None:
        """What was opened is read to its end, whole."""
        path, fresh = rig.file("file"), rig.file("fresh", OTHER)
        happens = {"replaced": lambda: os.replace(fresh, path), "deleted": path.unlink}
        assert await self._during(rig, happens[change]) == DATA

    async def test_device_lost(self, rig: Rig) -> None:
        rig.file("file")
        error = await self._during(rig, lambda: rig.driver.lose(0), chunk=2)
        assert type(error) is DeviceLost
        assert error.device_id == rig.devices[0]

    async def test_error_of_the_device_is_not_the_file_s(self, rig: Rig) -> None:
        path = rig.file("file")
        rig.driver.inject(Fault(rig.method, index=0, nth=4, raises=OSError(errno.EIO, "link down")))
        error = await self._during(rig, lambda: None)
        assert isinstance(error, TransferFailed)
        assert isinstance(error.__cause__, OSError)
        # Only where the driver reads the file itself can it be the file.
        assert (str(path) in error.message) == (rig.way == "by the driver")
        assert "link down" in error.message

    async def test_error_that_the_driver_knows(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        """Libraries tell of a device that is gone by OSError, too."""
        rig.file("file")
        monkeypatch.setattr(rig.driver, "classify", lambda exc: DeviceLost if isinstance(exc, OSError) else None)
        rig.driver.inject(Fault(rig.method, index=0, nth=4, raises=OSError(errno.ENODEV, "gone")))
        assert type(await self._during(rig, lambda: None)) is DeviceLost

    async def test_cancelled(self, rig: Rig) -> None:
        handle = await rig.backend.allocate(rig.devices[0], SIZE)
        gate = await rig.stop_at_chunk(3)
        neighbour = await rig.neighbour()
        load = asyncio.create_task(rig.backend.load_file(rig.file("file"), handle))
        await rig.chunks(3)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        gate.set()
        await rig.neighbour_is_well(*neighbour)
        await rig.backend.deallocate(handle)
        await rig.nothing_is_left()

    async def test_backend_shut_down(self, rig: Rig) -> None:
        handle = await rig.backend.allocate(rig.devices[0], SIZE)
        gate = await rig.stop_at_chunk(3)
        load = asyncio.create_task(rig.backend.load_file(rig.file("file"), handle))
        await rig.chunks(3)
        shutdown = asyncio.create_task(shutdown_quietly(rig.backend))
        await turns(5)
        with pytest.raises(BackendClosed):
            await rig.backend.load_file(rig.file("other"), handle)
        gate.set()
        await asyncio.gather(load, shutdown, return_exceptions=True)
        assert not load.cancelled()
        await until(
            lambda: not [each for each in psutil.Process().open_files() if each.path.startswith(str(rig.folder))],
            "files left open",
        )


def entry(shape: list[int], begin: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


LIES: dict[str, tuple[bytes, str]] = {
    "beyond the file": (raw_file({"x": entry([8], 4, 12)}, bytes(8)), "ends at byte"),
    "far beyond the file": (raw_file({"x": entry([1 << 40], 0, 1 << 40)}, bytes(8)), "ends at byte"),
    "overlap": (raw_file({"x": entry([6], 0, 6), "y": entry([4], 4, 8)}, bytes(8)), "overlaps"),
    "negative offset": (raw_file({"x": entry([8], -4, 4)}, bytes(8)), "data_offsets"),
    "offsets backwards": (raw_file({"x": entry([8], 8, 0)}, bytes(8)), "ascending"),
    "negative shape": (raw_file({"x": entry([-8], 0, 8)}, bytes(8)), "shape"),
    "unknown dtype": (raw_file({"x": entry([8], 0, 8, "F33")}, bytes(8)), "dtype"),
    "dtype of another size": (raw_file({"x": entry([8], 0, 8, "F32")}, bytes(8)), "needs 32 bytes"),
    "truncated": (raw_file({"x": entry([8], 0, 8)}, bytes(7)), "ends at byte"),
    "too long": (raw_file({"x": entry([8], 0, 8)}, bytes(9)), "belong to no tensor"),
    "header of 10 GiB": (raw_file({"x": entry([8], 0, 8)}, bytes(8), length=10 << 30), "10,737,418,240"),
    "header beyond the file": (raw_file({"x": entry([8], 0, 8)}, bytes(8), length=99_000_000), "the file has"),
    "half a header": (raw_file(b'{"x":'), "JSON"),
    "empty": (b"", "0 bytes"),
}


class TestWeights:
    NEIGHBOUR: ClassVar[Content] = {f"n{number}": tensor("F32", 200_000, seed=number) for number in range(3)}

    @pytest.mark.parametrize("lie", list(LIES))
    @pytest.mark.parametrize("rig", ["staged"], indirect=True)  # no way is taken
    async def test_lies(self, rig: Rig, lie: str) -> None:
        raw, says = LIES[lie]
        path = rig.file("bad", raw)
        loading = asyncio.create_task(
            load_safetensors(write(rig.folder / "neighbour", self.NEIGHBOUR), rig.backend, rig.devices[0])
        )
        with pytest.raises(WeightsError, match=says) as caught:
            await load_safetensors(path, rig.backend, rig.devices[0])
        assert caught.value.path == str(path)
        async with await loading as weights:
            await check(rig.backend, weights, self.NEIGHBOUR)
        await rig.nothing_is_left()

    async def test_no_room(self, rig: Rig) -> None:
        rig.backend.ledger._usage[rig.devices[0]].limit_bytes = 1_000_000
        path = write(rig.folder / "file", self.NEIGHBOUR)
        with pytest.raises(OutOfMemory) as caught:
            await load_safetensors(path, rig.backend, rig.devices[0])
        assert caught.value.requested_bytes >= 2_400_000
        async with await load_safetensors(path, rig.backend, rig.devices[1]) as weights:
            await check(rig.backend, weights, self.NEIGHBOUR)
        await rig.nothing_is_left()

    CHANGES = ("truncated", "written anew", "set back", "replaced", "swapped", "deleted")

    @pytest.mark.parametrize("change", CHANGES)
    async def test_changed_while_it_is_streamed(self, rig: Rig, change: str) -> None:
        await self._change(rig, change, rig.method, {"w": tensor("U8", SIZE), "v": tensor("U8", SIZE, seed=1)})

    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("rig", ["staged"], indirect=True)  # tensors of this size take one way
    async def test_changed_while_small_tensors_are_gathered(self, rig: Rig, change: str) -> None:
        await self._change(
            rig, change, "write", {f"w{number}": tensor("U8", 50_000, seed=number) for number in range(200)}
        )

    async def _change(self, rig: Rig, change: str, method: Any, content: Content) -> None:
        """The file changes while the second piece of it is on its way."""
        path = write(rig.folder / "file", content)
        raw = path.read_bytes()
        fresh = rig.file("fresh", raw)
        os.utime(path, (1, 1))
        gate = threading.Event()
        rig.driver.inject(Fault(method, index=0, nth=2, gate=gate))

        def swap() -> None:
            """And back, under other names."""
            aside = path.with_name("aside")
            path.rename(aside)
            fresh.rename(path)
            path.rename(fresh)
            aside.rename(path)

        happens: dict[str, Callable[[], object]] = {
            "truncated": lambda: os.truncate(path, 100_000),
            "written anew": lambda: path.write_bytes(raw[:-1] + b"?"),
            "set back": lambda: rewrite_and_set_back(path),
            "replaced": lambda: os.replace(fresh, path),
            "swapped": swap,
            "deleted": path.unlink,
        }
        loading = asyncio.create_task(load_safetensors(path, rig.backend, rig.devices[0], max_concurrent=1))
        await until(
            lambda: sum(call.method == method and call.index == 0 for call in rig.driver.calls) >= 2, "a second chunk"
        )
        happens[change]()
        gate.set()
        with pytest.raises(WeightsError) as caught:
            await loading
        assert caught.value.path == str(path)
        rig.driver.clear()
        again = write(rig.folder / "again", content)
        async with await load_safetensors(again, rig.backend, rig.devices[0]) as weights:
            await check(rig.backend, weights, content)
        await rig.nothing_is_left()

    async def test_device_lost_half_way(self, rig: Rig) -> None:
        content = {"w": tensor("U8", SIZE)}
        rig.driver.inject(Fault(rig.method, index=0, nth=3, lose=True))
        neighbour = load_safetensors(write(rig.folder / "n", self.NEIGHBOUR), rig.backend, rig.devices[1])
        loading = load_safetensors(write(rig.folder / "file", content), rig.backend, rig.devices[0])
        failed, weights = await asyncio.gather(loading, neighbour, return_exceptions=True)
        assert isinstance(failed, DeviceLost)
        assert failed.device_id == rig.devices[0]
        assert not isinstance(weights, BaseException)
        async with weights:
            await check(rig.backend, weights, self.NEIGHBOUR)
        await rig.nothing_is_left(lost=True)


def test_documents_are_what_they_say() -> None:
    """The lies above differ in one thing each from a file that is right."""
    right = raw_file({"x": entry([8], 0, 8)}, bytes(8))
    assert right == raw_file(document({"x": ("U8", (8,), bytes(8))}), bytes(8))
