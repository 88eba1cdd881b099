"""LiteRT in processes of their own: it grants what there is not, writes to stderr, and aborts where it likes to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ai_edge_litert", reason="pip install 'gpurt[tflite]'")

ROOT = Path(__file__).parents[2]

OUT_OF_MEMORY = """
import asyncio, resource, sys
from gpurt.errors import OutOfMemory
from gpurt.runtime.backend import DriverBackend
from tests.support import tflite_backends

GIB = 1 << 30

async def main():
    async with getattr(tflite_backends, sys.argv[1])() as backend:
        async with backend.allocation("tflite:0", 1 << 20):  # the library has made what it needs
            pass
        # Addresses that were tried for tensors stay theirs, so what this program needs, it takes before.
        content, target = b"x" * (5 << 20), bytearray(5 << 20)
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + GIB // 4
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for size in (GIB, GIB // 2):
            try:
                await backend.allocate("tflite:0", size)
            except OutOfMemory as exc:
                assert exc.requested_bytes == size
                print("refused")
        async with backend.allocation("tflite:0", 5 << 20) as handle:
            await backend.copy_to_device(content, handle)
            await backend.copy_into(handle, target)
            assert target == content
    print("alive")

asyncio.run(main())
"""

MISUSE_OF_THE_DRIVER = """
from gpurt.backends.tflite_gpu_backend import TFLiteGPUDriver

driver = TFLiteGPUDriver(accelerator="cpu")
driver.open()
driver.attach(0)
mem = driver.alloc(0, 5000)
chunk = mem.chunks[0]
for call in (
    lambda: driver.write(0, mem, 0, memoryview(bytes(1 << 20))),
    lambda: driver.read(0, mem, 0, memoryview(bytearray(1 << 20))),
    lambda: driver.write(0, mem, 1 << 20, memoryview(b"beyond")),
):
    try:
        call()
    except (RuntimeError, IndexError, ValueError):
        print("refused")
driver.free(0, mem)
chunk.free()
for call in (lambda: driver.write(0, mem, 0, memoryview(b"freed")), lambda: driver._opened.runtime.chunk(7)):
    try:
        call()
    except (RuntimeError, IndexError, ValueError):
        print("refused")
driver.close()
driver.close()
print("alive")
"""

REAL_GPU = """
import asyncio
from gpurt.backends.tflite_gpu_backend import create
from gpurt.errors import BackendUnavailable

async def main():
    for _ in range(3):
        backend = create()
        try:
            await backend.initialize()
        except BackendUnavailable:
            pass
        await backend.shutdown()

asyncio.run(main())
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
@pytest.mark.parametrize("backend", ["litert_cpu", "interpreter_cpu"])
def test_out_of_memory_of_the_library_is_typed(backend: str) -> None:
    assert run(OUT_OF_MEMORY, backend).stdout.split() == ["refused", "refused", "alive"]


def test_the_library_is_safe_below_the_shell() -> None:
    assert run(MISUSE_OF_THE_DRIVER).stdout.split() == ["refused"] * 5 + ["alive"]


def test_stdout_is_the_users_and_no_plugin_is_tried() -> None:
    result = run(REAL_GPU)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    # LiteRT has no switch for its log. Looking for compilers of NPUs would make most of it.
    assert "compiler_plugin" not in result.stderr
