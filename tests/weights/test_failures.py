"""What goes wrong: a typed error that names it, nothing left behind, nobody else harmed."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from gpurt.errors import DeviceLost, DeviceNotFound, GPUError, OutOfMemory, TransferFailed
from gpurt.runtime.backend import DriverBackend
from gpurt.testing import Fault, FaultyDriver, SimulatedDriver, create_simulated, parse_simulation
from gpurt.weights import WeightsError, load_safetensors
from tests.weights.support import (
    check,
    document,
    eventually,
    raw_file,
    tensor,
    write,
    write_index,
    write_sharded,
)

CONTENT = {f"layers.{n}.w": tensor("U8", 300_000 + n, seed=n) for n in range(8)}


class Rig:
    """Two simulated devices behind a driver that fails on demand."""

    def __init__(self, **options: Any) -> None:
        self.simulated = SimulatedDriver(parse_simulation("h100x2"))
        self.driver = FaultyDriver(self.simulated)
        self.backend = DriverBackend(self.driver, **options)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device.device_id for device in self.backend.devices)

    @property
    def both(self) -> Callable[[str], str]:
        devices = self.devices
        return lambda name: devices[int(name.split(".")[1]) % 2]

    def count(self, method: str) -> int:
        return sum(call.method == method for call in self.driver.calls)

    async def nothing_is_left(self) -> None:
        usages = [partial(self.backend.ledger.usage, device_id) for device_id in self.devices]
        await eventually(lambda: all(usage().committed_bytes == usage().current_count == 0 for usage in usages))
        await eventually(lambda: self.simulated.live_allocations == 0)
        await eventually(lambda: not lanes())


def lanes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gpurt:weights")]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    async with rig.backend:
        yield rig
        rig.driver.clear()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "model.safetensors", CONTENT)


class TestBeforeTheDeviceIsTouched:
    @pytest.fixture(autouse=True)
    async def _untouched(self, rig: Rig) -> AsyncIterator[None]:
        yield
        assert rig.count("alloc") == rig.count("write") == 0
        await rig.nothing_is_left()

    async def test_malformed_file(self, rig: Rig, tmp_path: Path) -> None:
        header = document(CONTENT)
        header["layers.3.w"]["data_offsets"][1] += 5
        (tmp_path / "f").write_bytes(raw_file(header, bytes(100)))
        with pytest.raises(WeightsError) as caught:
            await load_safetensors(tmp_path / "f", rig.backend, rig.devices[0])
        assert caught.value.tensor == "layers.3.w"
        assert str(tmp_path / "f") in str(caught.value)

    @pytest.mark.parametrize("cut", [1, 1000, 2_399_990, 2_400_000])
    async def test_truncated_file(self, rig: Rig, path: Path, cut: int) -> None:
        os.truncate(path, path.stat().st_size - cut)
        with pytest.raises(WeightsError):
            await load_safetensors(path, rig.backend, rig.devices[0])

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda path: None, "No such file"),
            (lambda path: path.mkdir(), "directory|Permission"),
            (lambda path: path.write_bytes(b""), "0 bytes"),
            pytest.param(
                lambda path: os.mkfifo(path),
                "regular",
                marks=pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs"),
            ),
        ],
    )
    async def test_no_such_file(self, rig: Rig, tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
        make(tmp_path / "f")
        with pytest.raises(WeightsError, match=says) as caught:
            await load_safetensors(tmp_path / "f", rig.backend, rig.devices[0])
        assert caught.value.path == str(tmp_path / "f")

    async def test_path_with_a_nul(self, rig: Rig) -> None:
        with pytest.raises(WeightsError, match="NUL"):
            await load_safetensors("a\0b", rig.backend, rig.devices[0])

    async def test_missing_shard(self, rig: Rig, tmp_path: Path) -> None:
        index = write_index(tmp_path, {"a": "1.safetensors"})
        with pytest.raises(WeightsError, match="No such file") as caught:
            await load_safetensors(index, rig.backend, rig.devices[0])
        assert caught.value.path == str(tmp_path / "1.safetensors")

    async def test_tensor_missing_in_its_shard(self, rig: Rig, tmp_path: Path) -> None:
        write(tmp_path / "1.safetensors", CONTENT)
        index = write_index(tmp_path, {"layers.0.w": "1.safetensors", "other": "1.safetensors"})
        with pytest.raises(WeightsError, match="not in this file") as caught:
            await load_safetensors(index, rig.backend, rig.devices[0])
        assert caught.value.tensor == "other"

    async def test_tensor_in_two_shards(self, rig: Rig, tmp_path: Path) -> None:
        index = write_sharded(tmp_path, {"1.safetensors": CONTENT, "2.safetensors": {"layers.0.w": tensor("U8", 5)}})
        with pytest.raises(WeightsError, match=r"says that it is in '2.safetensors'") as caught:
            await load_safetensors(index, rig.backend, rig.devices[0])
        assert caught.value.tensor == "layers.0.w"

    async def test_path_traversal(self, rig: Rig, tmp_path: Path) -> None:
        write(tmp_path / "secret", CONTENT)
        (tmp_path / "model").mkdir()
        index = write_index(tmp_path / "model", {"layers.0.w": "../secret"})
        with pytest.raises(WeightsError, match="inside the folder"):
            await load_safetensors(index, rig.backend, rig.devices[0])

    async def test_bad_index(self, rig: Rig, tmp_path: Path) -> None:
        (tmp_path / "i.json").write_text("{")
        with pytest.raises(WeightsError, match="not JSON"):
            await load_safetensors(tmp_path / "i.json", rig.backend, rig.devices[0])
        os.truncate(tmp_path / "i.json", 100_000_001)
        with pytest.raises(WeightsError, match="too many for an index"):
            await load_safetensors(tmp_path / "i.json", rig.backend, rig.devices[0])

    async def test_layer_that_does_not_exist(self, rig: Rig, path: Path) -> None:
        with pytest.raises(WeightsError, match=r"nothing is named 'layers\.9\.'"):
            await load_safetensors(path, rig.backend, rig.devices[0], only=["layers.9."])

    async def test_unknown_device(self, rig: Rig, path: Path) -> None:
        placement = {"": rig.devices[0], "layers.5": "cuda:99"}
        with pytest.raises(DeviceNotFound, match=r"layers\.5\.w") as caught:
            await load_safetensors(path, rig.backend, placement)
        assert caught.value.device_id == "cuda:99"
        assert rig.devices[1] in str(caught.value)

    async def test_does_not_fit(self, rig: Rig, tmp_path: Path) -> None:
        """The files may be huge: nothing is read but headers."""
        size = 1 << 40
        header = {"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        raw = raw_file(header)
        (tmp_path / "f").write_bytes(raw)
        os.truncate(tmp_path / "f", len(raw) + size)
        with pytest.raises(OutOfMemory) as caught:
            await load_safetensors(tmp_path / "f", rig.backend, rig.devices[1])
        error = caught.value
        assert (error.requested_bytes, error.device_id) == (size, rig.devices[1])
        assert error.free_bytes is not None
        assert error.free_bytes < size
        assert "1,099,511,627,776" in str(error)

    async def test_a_callable_that_fails(self, rig: Rig, path: Path) -> None:
        def fail(name: str) -> str:
            raise KeyError(name)

        with pytest.raises(KeyError):
            await load_safetensors(path, rig.backend, fail)


class TestRoom:
    async def test_limit_counts(self, path: Path) -> None:
        rig = Rig(memory_limit=2_000_000)
        async with rig.backend:
            with pytest.raises(OutOfMemory):
                await load_safetensors(path, rig.backend, rig.devices[0])
            async with await load_safetensors(path, rig.backend, rig.both) as weights:
                await check(rig.backend, weights, CONTENT)
                with pytest.raises(OutOfMemory):
                    await load_safetensors(path, rig.backend, rig.both)
            await rig.nothing_is_left()

    async def test_cached_memory_is_room(self, rig: Rig, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tight = rig.driver.inject(Fault("telemetry", first=1, lie={"memory_free_bytes": 1000}))
        monkeypatch.setattr(rig.simulated, "trim", lambda index: 10_000_000)
        async with await load_safetensors(path, rig.backend, rig.devices[0]) as weights:
            await check(rig.backend, weights, CONTENT)
        assert tight.lie
        assert rig.count("trim") == 1

    async def test_library_that_does_not_tell(self, rig: Rig, path: Path) -> None:
        rig.driver.inject(Fault("telemetry", lie={"memory_total_bytes": None}))
        rig.backend._devices = tuple(d.model_copy(update={"memory_bytes": None}) for d in rig.backend.devices)
        async with await load_safetensors(path, rig.backend, rig.devices[0]) as weights:
            await check(rig.backend, weights, CONTENT)


class TestOnTheWay:
    async def test_allocation_fails(self, rig: Rig, path: Path) -> None:
        rig.driver.inject(Fault("alloc", nth=2, raises=MemoryError("full")))
        with pytest.raises(OutOfMemory):
            await load_safetensors(path, rig.backend, rig.both)
        assert rig.count("write") == 0
        await rig.nothing_is_left()

    @pytest.mark.parametrize("nth", [1, 2, 5])
    async def test_copy_fails_and_others_go_on(self, rig: Rig, path: Path, tmp_path: Path, nth: int) -> None:
        zero, one = rig.devices
        other = {"other": tensor("U8", 3 << 20, seed=9)}
        rig.driver.inject(Fault("write", index=0, nth=nth, raises=OSError("link down")))
        results = await asyncio.gather(
            load_safetensors(path, rig.backend, rig.both),
            load_safetensors(write(tmp_path / "other", other), rig.backend, one),
            return_exceptions=True,
        )
        failed, loaded = results
        assert isinstance(failed, TransferFailed)
        assert failed.device_id == zero
        assert not isinstance(loaded, BaseException)
        await check(rig.backend, loaded, other)
        assert rig.simulated.live_allocations == 1
        await loaded.close()
        await rig.nothing_is_left()

    async def test_device_lost_half_way(self, rig: Rig, path: Path) -> None:
        rig.driver.inject(Fault("write", index=1, nth=2, lose=True))
        with pytest.raises(DeviceLost) as caught:
            await load_safetensors(path, rig.backend, rig.both)
        assert caught.value.device_id == rig.devices[1]
        for device_id in rig.devices:
            assert rig.backend.ledger.usage(device_id).current_count == 0
        async with await load_safetensors(path, rig.backend, rig.devices[0]) as weights:
            await check(rig.backend, weights, CONTENT)

    async def test_callback_fails(self, rig: Rig, path: Path) -> None:
        def fail(done: int, total: int) -> None:
            if done:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await load_safetensors(path, rig.backend, rig.both, on_progress=fail)
        await rig.nothing_is_left()

    @pytest.mark.parametrize("change", ["append", "shorten", "touch", "replace", "delete"])
    async def test_file_changes_under_the_reader(
        self, rig: Rig, path: Path, change: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        raw = path.read_bytes()

        fresh = path.with_name("fresh")
        fresh.write_bytes(raw)
        actions: dict[str, Callable[[], object]] = {
            "append": lambda: os.truncate(path, len(raw) + 1),
            "shorten": lambda: os.truncate(path, len(raw) // 2),
            "touch": lambda: os.utime(path, ns=(0, 0)),
            "replace": lambda: os.replace(fresh, path),
            "delete": lambda: os.unlink(path),
        }

        original = DriverBackend.load_file

        async def change_first(self: DriverBackend, *args: Any, **options: Any) -> int:
            if change in actions:
                await asyncio.to_thread(actions.pop(change))
            return await original(self, *args, **options)

        monkeypatch.setattr(DriverBackend, "load_file", change_first)
        with pytest.raises(WeightsError) as caught:
            await load_safetensors(path, rig.backend, rig.both)
        assert caught.value.path == str(path)
        says = {"append": "bytes", "shorten": "bytes", "touch": "written", "replace": "another", "delete": "read"}
        assert says[change] in str(caught.value)
        await rig.nothing_is_left()

    async def test_another_file_for_the_time_of_the_load(
        self, rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The path leads to what was checked before and after; in between a link on the way leads elsewhere."""
        folders = [tmp_path / name for name in "ab"]
        for folder in folders:
            folder.mkdir()
            content = CONTENT if folder.name == "a" else {name: tensor("U8", len(CONTENT[name][2])) for name in CONTENT}
            write(folder / "model.safetensors", content)
        link = tmp_path / "current"

        def lead_to(folder: Path) -> None:
            (tmp_path / "next").symlink_to(folder)
            os.replace(tmp_path / "next", link)

        lead_to(folders[0])
        original = DriverBackend.load_file

        async def swapped(self: DriverBackend, *args: Any, **options: Any) -> int:
            await asyncio.to_thread(lead_to, folders[1])
            try:
                return await original(self, *args, **options)
            finally:
                await asyncio.to_thread(lead_to, folders[0])

        monkeypatch.setattr(DriverBackend, "load_file", swapped)
        with pytest.raises(WeightsError, match="another file has its name"):
            await load_safetensors(link / "model.safetensors", rig.backend, rig.devices[0], max_concurrent=1)
        await rig.nothing_is_left()

    @pytest.mark.parametrize("always", [False, True])
    @pytest.mark.parametrize("error", [ZeroDivisionError, OSError, asyncio.CancelledError])
    async def test_progress_that_raises_ends_it_at_once(
        self, rig: Rig, tmp_path: Path, always: bool, error: type[BaseException]
    ) -> None:
        """Also one that says so once only, and one that raises what a task group takes for an ordinary end."""
        chunk = 1 << 16
        rig.driver.capabilities = rig.simulated.capabilities.model_copy(update={"chunk_bytes": chunk})
        content = {f"layers.{n}.w": tensor("U8", 16 * chunk, seed=n) for n in range(4)}
        heard: list[tuple[int, int]] = []

        def fail(done: int, total: int) -> None:
            heard.append((done, total))
            if done and (always or len(heard) == 2):
                raise error

        with pytest.raises(error):
            await load_safetensors(write(tmp_path / "f", content), rig.backend, rig.both, on_progress=fail)
        assert len(heard) == 2  # the first that raised was the last
        assert rig.count("write") < 64
        assert all(done <= total for done, total in heard)
        await rig.nothing_is_left()
        assert len(heard) == 2

    async def test_no_thread_can_be_started(self, rig: Rig, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        start = threading.Thread.start

        def refuse(self: threading.Thread) -> None:
            if self.name.startswith("gpurt:weights"):
                raise RuntimeError("can't start new thread")
            start(self)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(GPUError, match="no thread can be started") as caught:
            await load_safetensors(path, rig.backend, rig.devices[0])
        assert caught.value.operation == "load_safetensors"
        assert "ulimit" in (caught.value.hint or "")
        await rig.nothing_is_left()

    async def test_freeing_fails_too(self, rig: Rig, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        rig.driver.inject(Fault("write", nth=1, raises=OSError("link down")))
        fault = rig.driver.inject(Fault("free", nth=1, raises=OSError("driver is confused")))
        with pytest.raises(TransferFailed, match="link down"):
            await load_safetensors(path, rig.backend, rig.both)
        assert fault.raises
        assert "driver is confused" in caplog.text
        assert rig.count("free") == 2

    async def test_backend_shut_down_meanwhile(self, path: Path) -> None:
        rig = Rig()
        async with rig.backend:
            gate = threading.Event()
            rig.driver.inject(Fault("write", nth=1, gate=gate))
            loading = asyncio.create_task(load_safetensors(path, rig.backend, rig.both))
            await eventually(lambda: rig.count("write") >= 1)
            asyncio.get_running_loop().call_later(0.05, gate.set)
            with pytest.warns(ResourceWarning):
                await rig.backend.shutdown()
            with pytest.raises(GPUError):
                await loading
        await eventually(lambda: not lanes())


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
class TestCancellation:
    async def _cancel(self, rig: Rig, path: Path, how: str) -> None:
        if how == "task":
            loading = asyncio.create_task(load_safetensors(path, rig.backend, rig.both))
            await eventually(lambda: rig.count("write") >= 1)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
        elif how == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await load_safetensors(path, rig.backend, rig.both)
        elif how == "sibling":
            with pytest.raises(ExceptionGroup):
                await self._beside_one_that_fails(rig, path)
        else:
            with anyio.move_on_after(0.05) as scope:
                await load_safetensors(path, rig.backend, rig.both)
            assert scope.cancelled_caught

    async def _beside_one_that_fails(self, rig: Rig, path: Path) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(load_safetensors(path, rig.backend, rig.both))
            await eventually(lambda: rig.count("write") >= 1)
            raise ZeroDivisionError

    @pytest.mark.parametrize(
        ("how", "method"),
        [
            *itertools.product(["task", "timeout", "sibling", "anyio"], ["write"]),
            *itertools.product(["timeout", "anyio"], ["alloc", "telemetry"]),
        ],
    )
    async def test_inside_the_driver(self, rig: Rig, path: Path, how: str, method: Any) -> None:
        gate = threading.Event()
        rig.driver.inject(Fault(method, gate=gate))
        async with asyncio.timeout(5):
            await self._cancel(rig, path, how)  # returns although the driver hangs
        gate.set()
        rig.driver.clear()
        await rig.nothing_is_left()
        async with await load_safetensors(path, rig.backend, rig.both) as weights:
            await check(rig.backend, weights, CONTENT)

    async def test_at_any_moment(self, rig: Rig, path: Path) -> None:
        """Whatever step it is in: files closed, memory freed, threads ended."""
        files = _open_files()
        chance = random.Random(5)
        completed = 0
        for _ in range(150):
            loading = asyncio.create_task(load_safetensors(path, rig.backend, rig.both))
            steps = chance.randrange(60)
            for _ in range(steps):
                await asyncio.sleep(0 if steps % 3 else 0.0001)
            loading.cancel()
            try:
                weights = await loading
            except asyncio.CancelledError:
                continue
            completed += 1
            await weights.close()
        await rig.nothing_is_left()
        assert completed < 150
        await eventually(lambda: _open_files() == files)

    async def test_at_every_suspension(self, rig: Rig, path: Path) -> None:
        """The task is cancelled at its n-th suspension, for every n, the last one included."""
        for n in range(200):
            stepper = _CancelAt(load_safetensors(path, rig.backend, rig.both), n)
            loading = asyncio.create_task(stepper.run())
            try:
                weights = await loading
            except asyncio.CancelledError:
                await rig.nothing_is_left()
                continue
            await check(rig.backend, weights, CONTENT)
            await weights.close()
            await rig.nothing_is_left()
            break
        else:
            pytest.fail("never came to an end")
        assert n > 8


class _CancelAt:
    """Drives a coroutine and throws a cancellation into it where it is suspended for the n-th time."""

    def __init__(self, coroutine: Any, n: int) -> None:
        self.coroutine = coroutine
        self.n = n

    def __await__(self) -> Any:
        count = 0
        error: BaseException | None = None
        while True:
            try:
                future = self.coroutine.send(None) if error is None else self.coroutine.throw(error)
            except StopIteration as done:
                return done.value
            if count == self.n:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            count += 1
            error = None
            try:
                yield future
            except BaseException as exc:
                error = exc

    async def run(self) -> Any:
        return await self


def _open_files() -> int:
    return len(psutil.Process().open_files())


async def test_create_close_many_times(tmp_path: Path) -> None:
    path = write(tmp_path / "f", {"x": tensor("U8", 1000)})
    files = _open_files()
    async with create_simulated("h100") as backend:
        for _ in range(50):
            async with await load_safetensors(path, backend, backend.devices[0].device_id) as weights:
                assert len(weights) == 1
    await eventually(lambda: _open_files() == files and not lanes())
