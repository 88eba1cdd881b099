"""Topics of ``gpurt bench`` on devices, and what they are compared with: bytes, memory taken and given back."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpurt.backends.cupy import copy_tuning
from gpurt.backends.cupy.copy_tuning import CopyTuning
from gpurt.backends.cupy.staging import crew_size
from gpurt.benchmarks import DEVICE_TOPICS, bench
from gpurt.benchmarks.cuda_raw import RawCUDA
from gpurt.benchmarks.plan import Plan
from gpurt.benchmarks.raw import HostRaw, Raw, opened
from gpurt.benchmarks.runner import Results, measure
from gpurt.errors import GPUError
from gpurt.sources.host import HostMemory
from tests.support.fake_cuda import MIB, CUDARuntimeError, FakeNvml, FakeRuntime, install, install_nvml, nvml_record

KIB = 1 << 10
TINY = Plan(sizes=(4 * KIB, 64 * KIB), bulk_bytes=MIB, file_bytes=MIB, rounds=1, most_turns=2, calls=64, seconds=0.03)
IN_PROCESS = [name for name in DEVICE_TOPICS if name != "start"]
NVML_FREE = 60 * MIB
"""What the stand-in NVML says is free."""


class Runtime(FakeRuntime):
    """With ``cudaMemcpy``, and streams that any thread may use, as CUDA's are. Knows the most memory that one device
    ever gave."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.peak = 0

    def malloc(self, size: int) -> int:
        address = super().malloc(size)
        self.peak = max(self.peak, sum(each.size for each in self.live.values() if each.device == self.current))
        return address

    def memcpy(self, target: int, source: int, size: int, kind: int) -> None:
        self._enter("memcpy")
        owners = (self._owner(target, size), self._owner(source, size))
        if owners != ((self.current, None) if kind == 1 else (None, self.current)):
            raise CUDARuntimeError(1)
        ctypes.memmove(target, source, size)

    def _stream(self, handle: int) -> Any:
        stream = self.streams.get(handle)
        if stream is None or stream.device != self.current:
            raise CUDARuntimeError(400)
        return stream


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "files").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "files"))
    yield tmp_path / "files"
    assert not list((tmp_path / "files").iterdir()), "files of the benchmark are left"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    install_nvml(monkeypatch, FakeNvml([nvml_record(0), nvml_record(1)]))
    runtime = Runtime()
    install(monkeypatch, runtime)
    yield runtime
    left = (len(runtime.live), len(runtime.pinned), len(runtime.streams))
    assert left == (0, 0, 0), "memory of the benchmark is left"


def names(results: Results, topic: str) -> list[str]:
    return [row.name for row in results.measurements if row.topic == topic]


class TestTopics:
    async def test_nothing_blocks_the_loop(self) -> None:
        results = await measure(IN_PROCESS, device_id="cpu:0", plan=TINY)
        assert (results.skipped, results.failed) == ({}, {})
        assert {row.topic for row in results.measurements} == set(IN_PROCESS)

    def test_cuda(self, runtime: Runtime) -> None:
        results = asyncio.run(measure(DEVICE_TOPICS, device_id="cuda:1", plan=TINY))
        assert results.failed == {}
        assert list(results.skipped) == ["start"], "the stand-in is not in a child process"
        rows = {(row.topic, row.name): row for row in results.measurements}
        pinned = rows["wire", "to device, 64 KiB, pinned"]
        assert (pinned.peer_name, pinned.ceiling_name) == ("cudaMemcpy", "pinned, cudaMemcpyAsync")
        across = rows["copies", "across to a second device, 1 MiB"]
        assert (across.peer_name, across.ceiling_name) == ("through pinned memory", "cudaMemcpyPeerAsync")
        hit = rows["allocation", "allocate + deallocate 4 KiB, pool hit"]
        assert (hit.peer_name, hit.target) == ("cudaMalloc, cudaFree", 6)
        assert rows["calls", "copy_to_device 4 KiB, 64 callers, CPU time"].least_of_peer == 4
        assert rows["weights", "host memory that loading 1 MiB takes"].target == 256
        assert runtime.enabled == [(1, 0)]

    def test_bounds_of_the_acceptance(self, runtime: Runtime) -> None:
        plan = replace(TINY, sizes=(MIB,))
        rows = {row.name: row for row in asyncio.run(measure(["wire"], device_id="cuda:0", plan=plan)).measurements}
        assert rows["to device, 1 MiB, NumPy"].least_of_peer == 0.9
        assert rows["both ways at once, 1 MiB each, pinned"].least_of_ceiling == 0.95
        assert rows["both ways at once, 1 MiB each, NumPy"].least_of_ceiling is None


class TestMemory:
    def test_at_most_half_of_what_the_device_has_free(self, runtime: Runtime) -> None:
        runtime.capacity = 80 * MIB
        plan = replace(TINY, sizes=(4 * KIB, 16 * MIB), bulk_bytes=64 * MIB, file_bytes=64 * MIB)
        # Or the driver would calibrate, which takes memory of its own.
        copy_tuning.known(runtime)[0] = CopyTuning(crew_size(), None, None)
        results = asyncio.run(measure(IN_PROCESS, device_id="cuda:0", plan=plan))
        assert results.failed == {}
        assert f"{NVML_FREE // 2:,}" in results.skipped["wire, 16 MiB"]
        assert "to device, 4 KiB, NumPy" in names(results, "wire")
        assert "both ways at once, 4 MiB each, NumPy" in names(results, "wire"), "halved until it fits"
        assert "load_file from the page cache, 8 MiB" in names(results, "file")
        assert runtime.peak <= NVML_FREE // 2

    async def test_at_most_half_of_what_the_host_has_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        budget = HostMemory(total_bytes=8 * MIB, usable_bytes=MIB, available_bytes=MIB, source="cgroup")
        monkeypatch.setattr(bench, "memory_budget", lambda: budget)
        results = await measure(["wire", "loop"], device_id="cpu:0", plan=replace(TINY, sizes=(4 * KIB, 256 * KIB)))
        assert "half of what the host has free is 524,288" in results.skipped["wire, 256 KiB"]
        assert "gap beside copy_into 64 KiB, p99" in names(results, "loop")

    async def test_no_room_at_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        budget = HostMemory(total_bytes=8 * MIB, usable_bytes=4 * KIB, available_bytes=4 * KIB, source="cgroup")
        monkeypatch.setattr(bench, "memory_budget", lambda: budget)
        results = await measure(["calls", "latency"], device_id="cpu:0", plan=TINY)
        assert results.measurements == []
        assert set(results.skipped) == {"calls", "latency"}

    async def test_no_room_on_the_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Usage:
            free = 2 * MIB - 1

        monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
        results = await measure(["file"], device_id="cpu:0", plan=TINY)
        assert f"needs {MIB:,} bytes" in results.skipped["file"]

    @pytest.mark.parametrize("call", [1, 3, 20, 60, 200])
    def test_ctrl_c_gives_everything_back(self, runtime: Runtime, call: int) -> None:
        """Cancelled while a copy without gpurt is in a thread: its memory must outlive it."""
        topics = ["wire", "copies", "latency", "file", "weights"]

        async def run() -> None:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            done = 0

            def on_call(name: str, _: int) -> None:
                nonlocal done
                done += 1
                if done == call:
                    loop.call_soon_threadsafe(task.cancel)

            runtime.on_call = on_call
            await measure(topics, device_id="cuda:0", plan=TINY)

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(run())
        assert not [thread.name for thread in threading.enumerate() if "ThreadPool" in thread.name]

    def test_a_peer_that_fails(self, runtime: Runtime) -> None:
        def on_call(name: str, _: int) -> None:
            if name == "memcpy":
                raise CUDARuntimeError(700)

        runtime.on_call = on_call
        results = asyncio.run(measure(["wire", "copies"], device_id="cuda:0", plan=TINY))
        assert "what gpurt is compared with failed: CUDARuntimeError: cudaErrorIllegalAddress" in results.failed["wire"]
        assert {row.topic for row in results.measurements} == {"copies"}


class TestRaw:
    """What gpurt is compared with really copies, whatever its speed."""

    SIZE = 3 * MIB

    @pytest.fixture(params=["host", "cuda"])
    def raw(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Raw:
        if request.param == "host":
            monkeypatch.setattr("gpurt.sources.host.cpu_count", lambda: 3)
            return HostRaw(self.SIZE)
        request.getfixturevalue("runtime")
        monkeypatch.setattr("gpurt.benchmarks.cuda_raw._LARGEST_PINNED", MIB)  # several pieces
        return RawCUDA(self.SIZE, 0, second=1)

    def noise(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.random.default_rng(1).integers(0, 256, self.SIZE, np.uint8)

    async def test_round_trip(self, raw: Raw) -> None:
        sent, back = self.noise(), np.zeros(self.SIZE, np.uint8)
        async with opened(raw) as threads:
            await threads(raw.writer(memoryview(sent.tobytes())))
            await threads(raw.reader(back.data))
        assert np.array_equal(sent, back)

    async def test_a_part(self, raw: Raw) -> None:
        sent, back = self.noise(), np.zeros(5000, np.uint8)
        async with opened(raw) as threads:
            await threads(raw.writer(sent.data[:5000]))
            await threads(raw.reader(back.data))
        assert np.array_equal(sent[:5000], back)

    async def test_ceilings_of_the_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpurt.sources.host.cpu_count", lambda: 3)
        raw, host = HostRaw(self.SIZE), self.noise()
        sent, half = host.copy(), self.SIZE // 2
        async with opened(raw) as threads:
            assert raw.ceiling_name == "memcpy, 3 threads"
            await threads(raw.fastest("to device", host.data, 2 * self.SIZE))
            host[:] = 0
            await threads(raw.fastest("from device", host.data))
            assert np.array_equal(host, sent)
            host[:half], host[half:] = 7, 0
            await threads(raw.both_ways(host.data))
            assert np.array_equal(host[half:], sent[half:])
            await threads(raw.reader(host.data))
            assert set(host[:half]) == {7}
            for way in raw.device_copies(half, across=False):
                assert way is not None
                await threads(way.call)
                await threads(raw.reader(host.data))
                assert set(host) == {7}

    def test_ceilings_of_cuda(self, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpurt.benchmarks.cuda_raw._LARGEST_PINNED", MIB)
        copied: list[tuple[int, int]] = []
        original = runtime.memcpyAsync

        def memcpy_async(target: int, source: int, size: int, kind: int, stream: int) -> None:
            copied.append((kind, size))
            original(target, source, size, kind, stream)

        monkeypatch.setattr(runtime, "memcpyAsync", memcpy_async)
        raw, host = RawCUDA(self.SIZE, 1, second=0), self.noise()
        try:
            raw.open()
            raw.fastest("to device", host.data, 2 * self.SIZE)()
            assert copied == [(1, MIB)] * 6
            copied.clear()
            raw.both_ways(host.data)()
            assert sorted({kind for kind, _ in copied}) == [1, 2]
            assert sum(size for _, size in copied) == self.SIZE
            runtime.setDevice(1)
            runtime.deviceEnablePeerAccess(0)
            for way in raw.device_copies(self.SIZE // 2, across=True):
                assert way is not None
                way.call()
            assert "memcpyPeerAsync" in runtime.calls
        finally:
            raw.close()

    def test_open_that_fails_half_way(self, runtime: Runtime) -> None:
        runtime.pin_limit = 0
        raw = RawCUDA(MIB, 0)

        async def run() -> None:
            async with opened(raw):
                pytest.fail("it opened")

        with pytest.raises(GPUError, match="out of memory"):
            asyncio.run(run())
