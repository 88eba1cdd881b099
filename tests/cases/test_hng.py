"""Libraries that hang, crash, take their time or do not load. Names carry the case."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpurt.discovery.result import DiscoveryResult
from gpurt.discovery.service import GPUDiscoveryService
from gpurt.discovery.wire import ProbeOutcome
from gpurt.errors import ReasonCode
from tests.cases.rig import CountingProber, Said, working
from tests.support.nvml_stub import NvmlStub, nvml_stub

__all__ = ["nvml_stub"]

HANG = """
import asyncio, json, sys, time
from gpurt.discovery.service import GPUDiscoveryService
async def main():
    ticks = 0
    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1
    ticker = asyncio.create_task(tick())
    answers = []
    for _ in range(2):
        # Long enough for the CPU's own child on a busy machine: it must answer while CUDA's does not.
        service = GPUDiscoveryService(sys.argv[1], backends=["cuda", "cpu"], probe_timeout=2.0)
        started = time.monotonic()
        result = await service.discover_all_devices()
        cards = [device.device_id for device in result.devices if device.usable]
        answers.append([result.reports[0].reason, cards, time.monotonic() - started])
    # Other blocking work goes on: nobody's pool is full of hung calls.
    answers.append(await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 2))
    ticker.cancel()
    return [*answers, ticks]
print(json.dumps(asyncio.run(main())), flush=True)
"""


def test_hng_1_a_driver_that_never_returns_costs_its_deadline(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    """Twice; the loop goes on, other work is done, and the process ends although nobody ever answered."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANG, str(tmp_path / "r.json")],
        env=nvml_stub.env("hang"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert time.monotonic() - started < 20
    assert done.returncode == 0, done.stderr
    first, second, other, ticks = json.loads(done.stdout)
    for reason, usable, seconds in (first, second):
        assert (reason, usable) == ("timeout", ["cpu:0"])
        assert seconds < 6.0
    assert other == "done"
    assert ticks > 20


async def test_hng_2_a_crash_is_an_answer_and_remembered(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    path, prober = tmp_path / "r.json", CountingProber()

    def service() -> GPUDiscoveryService:
        environ = nvml_stub.env("segv")
        return GPUDiscoveryService(path, backends=["cuda", "cpu"], environ=environ, prober=prober)

    async def poll() -> DiscoveryResult:
        async with service() as watching:
            async for result in watching.watch(1000):
                return result
        raise AssertionError("nothing was seen")

    result = await poll()
    assert (result.reports[0].reason, result.backend_name) == (ReasonCode.CRASHED, "cpu")
    assert "SIGSEGV" in result.reports[0].message
    for _ in range(2):
        assert (await poll()).reports[0].reason is ReasonCode.CRASHED
    assert prober.probes == ["cuda"]  # not again for the driver that crashed, also after a restart


async def test_hng_3_a_slow_library_is_pending_and_delays_nobody(tmp_path: Path) -> None:
    answered = asyncio.Event()

    class Slow(Said):
        async def probe(self, name: str, **options: object) -> ProbeOutcome:  # type: ignore[override]
            if name == "cuda":
                await answered.wait()
            return await super().probe(name, **options)  # type: ignore[arg-type]

    said = Slow(cuda=await asyncio.to_thread(working, tmp_path, 0))
    previews: list[DiscoveryResult] = []
    async with said.service(tmp_path / "r.json") as service:
        subscription = service.subscribe(1000)
        looking = asyncio.create_task(service.discover_all_devices(on_preview=previews.append))
        async with asyncio.timeout(5):
            while not previews:
                await asyncio.sleep(0.01)
        (preview,) = previews
        assert (preview.discovery_status, preview.pending) == ("preview", ("cuda",))
        assert [device.backend for device in preview.devices] == ["toy"]
        answered.set()
        result = await looking
        assert [device.backend for device in result.devices] == ["cuda", "toy"]
        event = await anext(subscription)
        assert event.snapshot is not None
        assert [device.backend for device in event.snapshot.devices] == ["cuda", "toy"]


BROKEN = {
    "chained": "try:\n    raise OSError('libcublas.so.12: cannot open shared object file')\n"
    "except OSError as exc:\n    raise ImportError('cupy is not correctly installed\\ufffd\\x1b[2J') from exc",
    "os": "raise OSError('DLL load failed')",
    "runtime": "raise RuntimeError('CUDA path could not be detected')",
    "attribute": "raise AttributeError(\"module 'x' has no attribute 'y'\")",
}


async def test_hng_4_a_package_that_does_not_load_is_a_sentence(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    async def discover(name: str) -> DiscoveryResult:
        folder = tmp_path / name
        environ = nvml_stub.env("ok2") | {"PYTHONPATH": str(folder)}
        async with GPUDiscoveryService(folder / "r.json", backends=["cuda", "cpu"], environ=environ) as service:
            return await service.discover_all_devices()

    for name, text in BROKEN.items():
        for package in ("cupy", "cupy_backends"):
            module = tmp_path / name / package / "__init__.py"
            module.parent.mkdir(parents=True)
            module.write_text(text)
    for result in await asyncio.gather(*map(discover, BROKEN)):
        report = result.reports[0]
        assert (report.status, result.backend_name) == ("unavailable", "cpu")
        assert report.reason in (ReasonCode.NO_LIBRARY, ReasonCode.ERROR)
        assert report.hint
        assert "Traceback" not in report.message
        assert "\n" not in report.message
        assert len([device for device in result.devices if device.backend == "cuda"]) == 2


def test_hng_5_importing_gpurt_loads_no_vendor_library() -> None:
    code = "import sys, gpurt; print(*(name for name in sys.modules if name.partition('.')[0] in sys.argv[1:]))"
    vendors = ["cupy", "cupy_backends", "torch", "mlx", "onnxruntime", "pynvml", "vulkan", "pyopencl", "numpy"]
    done = subprocess.run([sys.executable, "-c", code, *vendors], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


@pytest.mark.parametrize("attribute", ["GPUBackend", "create_backend", "GPUDiscoveryService"])
def test_hng_5_using_it_does_not_either(attribute: str) -> None:
    code = f"import sys, gpurt; gpurt.{attribute}; print(*({{'cupy', 'torch', 'mlx', 'pynvml'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
