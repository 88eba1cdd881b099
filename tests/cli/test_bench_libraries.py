"""``gpurt bench`` on other libraries' devices, all in software: what they are compared with, and the topics."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpurt import factory, plugins
from gpurt.backend import GPUBackend
from gpurt.backends.directml_backend import DirectMLBackend
from gpurt.backends.metal_backend import MetalBackend
from gpurt.backends.opencl_backend import OpenCLBackend
from gpurt.backends.tflite_gpu_backend import TFLiteGPUBackend
from gpurt.backends.vulkan_backend import VulkanBackend
from gpurt.benchmarks import bench, targets
from gpurt.benchmarks.library_raw import LibraryRaw
from gpurt.benchmarks.plan import Plan
from gpurt.benchmarks.raw import opened
from gpurt.benchmarks.runner import measure
from gpurt.benchmarks.vulkan_raw import RawVulkan
from gpurt.cli import main as cli
from gpurt.errors import GPUError
from gpurt.sources.host import HostMemory
from gpurt.types import DeviceKind
from tests.support import tflite_backends

KIB, MIB = 1 << 10, 1 << 20
TINY = Plan(sizes=(4 * KIB, 1 * MIB), bulk_bytes=MIB, file_bytes=MIB, rounds=1, most_turns=2, calls=64, seconds=0.03)
TOPICS = ["calls", "allocation", "wire", "copies", "loop", "latency", "file"]
SOFTWARE: Mapping[str, Callable[[], GPUBackend]] = {
    "vulkan": VulkanBackend,
    "opencl": OpenCLBackend,
    "metal": lambda: MetalBackend(device="cpu"),
    "directml": lambda: DirectMLBackend(device_type="cpu"),
    "tflite": lambda: TFLiteGPUBackend(accelerator="cpu"),
}
HOST, OWN = "the host's memory", "memory of its own"
PROGRAM = Path(__file__).parents[2] / "benchmarks/software_backends.py"


@pytest.fixture(params=SOFTWARE)
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[GPUBackend]:
    """Each on its real library."""
    async with SOFTWARE[request.param]() as made:
        yield made


@pytest.fixture
def chosen(backend: GPUBackend, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of ``backend``, which means its software devices now."""
    monkeypatch.setattr(plugins, "_registered", dict(plugins._registered))
    factory.register(backend.name, SOFTWARE[backend.name], replace=True)
    return backend.name


def noise(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)


def test_every_library_is_promised_the_same() -> None:
    assert set(bench.LIBRARIES) == set(targets.LIBRARIES) == set(SOFTWARE)
    for name in bench.LIBRARIES:
        for direction, memory in (("to device", "NumPy"), ("from device", "warm NumPy")):
            assert targets.host_copy(name, direction, memory, 64 * MIB) == {"least_of_peer": 0.9}
    for name in (*bench.LIBRARIES, "cpu", "cuda", "rocm"):
        assert targets.loop_gap(name, "max")["target"] <= 50


class TestBareLibraries:
    """They really copy, whatever their speed."""

    SIZE = 3 * MIB

    def bare(self, backend: GPUBackend, memory: str) -> LibraryRaw:
        """The library, and a second device of it, whose memory is the host's or of its own."""
        device = backend.devices[0]
        assert device.kind is DeviceKind.SOFTWARE
        raw = bench.LIBRARIES[backend.name](self.SIZE, device, device)
        for each in (raw, raw._second):
            assert each is not None
            assert each.on_host
            each.on_host = memory == HOST
            if isinstance(each, RawVulkan):
                each.mapped = each.on_host
        return raw

    @pytest.mark.parametrize("memory", [HOST, OWN])
    async def test_bytes(self, backend: GPUBackend, memory: str) -> None:
        raw = self.bare(backend, memory)
        sent, back, half = noise(self.SIZE), np.zeros(self.SIZE, np.uint8), self.SIZE // 2
        async with opened(raw) as threads:
            await threads(raw.writer(memoryview(sent.tobytes())))
            await threads(raw.reader(back.data))
            assert np.array_equal(sent, back)
            await threads(raw.writer(sent.data[100:5100]))
            await threads(raw.reader(back.data[:5000]))
            assert np.array_equal(sent[100:5100], back[:5000])
            await threads(raw.both_ways(back.data))
            for across in (False, True):
                for way in raw.device_copies(half, across=across):
                    if way is not None:
                        await threads(way.call)
            for way in raw.allocations(self.SIZE):
                await threads(way.call)
            await threads(raw.synchronize)

    async def test_ceilings_of_memory_of_its_own(self, backend: GPUBackend) -> None:
        raw = self.bare(backend, OWN)
        sent, back = noise(self.SIZE), np.zeros(self.SIZE, np.uint8)
        async with opened(raw) as threads:
            await threads(raw.writer(sent.data))
            await threads(raw.fastest("from device", back.data, 2 * self.SIZE))
            back[:] = sent  # of those that have no memory between
            await threads(raw.writer(np.zeros(4 * KIB, np.uint8).data))
            await threads(raw.reader(back.data[: 4 * KIB]))
            assert not back[: 4 * KIB].any()
            if isinstance(raw, RawVulkan):
                await threads(raw.writer(sent.data))  # what is staged already
            await threads(raw.fastest("to device", sent.data))
            await threads(raw.reader(back.data))
        assert np.array_equal(sent, back)

    @pytest.mark.parametrize("memory", [HOST, OWN])
    async def test_copies_from_device_to_device(self, backend: GPUBackend, memory: str) -> None:
        raw = self.bare(backend, memory)
        half = self.SIZE // 2
        sent, back = noise(self.SIZE)[:half], np.zeros(half, np.uint8)
        async with opened(raw) as threads:
            await threads(raw.writer(sent.data))
            ordinary, best = raw.device_copies(half, across=True)
            await threads((ordinary or best).call)
            assert raw._second is not None
            await threads(raw._second.reader(back.data))
        assert np.array_equal(sent, back)

    async def test_open_that_fails_half_way(self, backend: GPUBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing stays open; and what the library raises is an error of gpurt's, whatever its class."""

        def full(*_: object) -> None:
            raise Exception("no room")

        raw = bench.LIBRARIES[backend.name](MIB, backend.devices[0])
        monkeypatch.setattr(raw, "_made_memory", full)
        with pytest.raises(GPUError, match="what gpurt is compared with failed: Exception: no room"):
            async with opened(raw):
                pytest.fail("it opened")


class TestTopics:
    def test_every_topic(self, chosen: str) -> None:
        results = asyncio.run(measure(TOPICS, device_id=chosen, plan=TINY))
        assert (results.failed, results.skipped) == ({}, {})
        assert results.device is not None
        assert results.device.device_id == f"{chosen}:0"
        assert {row.topic for row in results.measurements} == set(TOPICS)
        rows = {(row.topic, row.name): row for row in results.measurements}
        copy = rows["wire", "to device, 1 MiB, NumPy"]
        assert copy.peer_name not in ("", "np.copyto"), "the library's own"
        assert copy.ceiling_name == copy.peer_name or copy.ceiling_name.startswith("memcpy, ")
        assert rows["loop", "gap beside copy_into 1 MiB, max"].target == 50

    async def test_memory_of_software_is_the_hosts(self, backend: GPUBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        budget = HostMemory(total_bytes=8 * MIB, usable_bytes=MIB, available_bytes=MIB, source="cgroup")
        monkeypatch.setattr(bench, "memory_budget", lambda: budget)
        tried = bench.Bench(backend, backend.devices[0], TINY)
        lack = await tried.lack(64 * KIB, host=1, device=5)
        raw = bench.LIBRARIES[backend.name]
        needed = (1 + raw.host_share + 5 + raw.device_share) * 64 * KIB
        assert (lack is not None) == (needed > MIB // 2)
        lack = await tried.lack(256 * KIB, host=0, device=2)
        assert lack is not None
        assert "half of what the host has free is 524,288" in lack

    async def test_largest_allocation(self, backend: GPUBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        driver: Any = backend.driver  # pyright: ignore[reportAttributeAccessIssue]
        capabilities = driver.capabilities.model_copy(update={"max_allocation_bytes": MIB})
        monkeypatch.setattr(driver, "capabilities", capabilities)
        tried = bench.Bench(backend, backend.devices[0], TINY)
        assert await tried.lack(MIB, host=1, device=1) is None
        assert "1,048,576" in (await tried.lack(MIB + 1, host=1, device=1) or "")
        assert "1,048,576" in (await tried.lack(MIB, host=1, device=0, raw=2) or ""), "what it is compared with, too"

    async def test_memory_that_nobody_knows(self) -> None:
        async with tflite_backends.fake_gpu() as phone:
            device = phone.devices[0].model_copy(update={"unified_memory": False, "kind": DeviceKind.GPU})
            tried = bench.Bench(phone, device, TINY)

            async def unknown(_: str) -> Any:
                raise bench.Unsupported("the library does not tell")

            phone.get_device_memory_info = unknown  # pyright: ignore[reportAttributeAccessIssue]
            assert await tried.lack(KIB, host=1, device=1) is None


class TestCommand:
    def test_name_of_a_backend(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpurt.benchmarks.runner.QUICK", replace(TINY, sizes=(4 * KIB,)))
        assert cli.main(["bench", "--quick", "calls", "--device", "cpu", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["device"]["device_id"] == "cpu:0"

    @pytest.mark.skipif(sys.platform == "darwin", reason="has Metal")
    @pytest.mark.parametrize("device", ["metal", "metal:0"])
    def test_backend_that_cannot_be_here(self, device: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", "wire", "--device", device, "--json"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("gpurt bench: ")
        assert "macOS" in captured.err
        assert captured.err.count("\n") == 1


class TestProgramOfSoftwareBackends:
    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(PROGRAM), *words], capture_output=True, text=True, timeout=120, check=False
        )

    @pytest.mark.wide
    @pytest.mark.skipif(importlib.util.find_spec("mlx") is None, reason="no MLX")
    def test_life_of_a_backend(self) -> None:
        """That its first process, too, makes the software device."""
        done = self.run("--quick", "--json", "--backend", "metal", "start")
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)["metal"]
        assert (record["failed"], record["skipped"]) == ({}, {})
        rows = {row["name"]: row for row in record["measurements"]}
        for name in (
            "gap of the loop meanwhile, max",
            "gap of the loop beside the first copies, 256 MiB, max",
            "gap of the loop during shutdown, max",
        ):
            assert rows[name]["target"] == 50
            assert rows[name]["ours"] >= 0

    def test_absent(self) -> None:
        done = self.run("--quick", "--json", "--backend", "nope", "calls")
        assert done.returncode == 2
        assert json.loads(done.stdout) == {}
        assert "no backend named 'nope'" in done.stderr
