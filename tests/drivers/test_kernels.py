"""Compilers and launches of each driver that has kernels; what all have in common is in the conformance kit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpurt.backends.cpu import kernels as cpu_kernels
from gpurt.backends.cpu.kernels import CPUKernels
from gpurt.backends.cpu_backend import CPUBackend, CPUDriver
from gpurt.errors import CompileFailed, Unsupported
from gpurt.testing.kit.base import filled
from gpurt.testing.kit.kernels import FIELD_ADD, operands, scalars

pytestmark = pytest.mark.skipif(not cpu_kernels.LANGUAGES, reason="kernels in C run on Linux and macOS")

RANGES = """
#include <stddef.h>
void ranges(size_t begin, size_t end, unsigned char *touched, size_t *longest) {
    for (size_t i = begin; i < end; i++) touched[i] += 1;
    if (end - begin > *longest) *longest = end - begin;
}
"""
EVERY_TYPE = """
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
void every_type(size_t begin, size_t end, double *out, bool a, int8_t b, uint8_t c, int16_t d, uint16_t e, int32_t f,
                uint32_t g, int64_t h, uint64_t i, float j, double k) {
    double all[] = {a, b, c, d, e, f, g, h, i, j, k};
    for (size_t n = begin; n < end; n++) out[n] = all[n];
}
"""
SCALARS = [
    np.bool_(True), np.int8(-128), np.uint8(255), np.int16(-32768), np.uint16(65535), np.int32(-(2**31)),
    np.uint32(2**32 - 1), np.int64(-(2**53)), np.uint64(2**53), np.float32(0.1), np.float64(0.1),
]  # fmt: skip


@pytest.fixture
def kernels() -> Iterator[CPUKernels]:
    kernels = CPUKernels(4)
    yield kernels
    kernels.close()


def mapped(part: str) -> int:
    """How many files of that name this process has mapped."""
    return len({line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if part in line})


class TestCPU:
    @pytest.mark.parametrize(
        ("grid", "block"), [((1, 1, 1), (70_000, 1, 1)), ((7, 5, 2), (10, 10, 10)), ((3, 1, 1),) * 2]
    )
    def test_every_index_once(self, kernels: CPUKernels, grid: Any, block: Any) -> None:
        total = int(np.prod(grid) * np.prod(block))
        touched, longest = np.zeros(total + 1, np.uint8), np.zeros(1, np.uint64)
        kernels.launch(kernels.compile(RANGES, "ranges"), grid, block, (touched, longest))
        assert touched.tolist() == [1] * total + [0]

    def test_blocks_are_spread_over_threads_and_not_cut(self, kernels: CPUKernels) -> None:
        block, blocks = 1000, 150
        touched, longest = np.zeros(block * blocks, np.uint8), np.zeros(1, np.uint64)
        kernel = kernels.compile(RANGES, "ranges")
        kernels.launch(kernel, (blocks, 1, 1), (block, 1, 1), (touched, longest))
        assert set(touched.tolist()) == {1}
        assert int(longest[0]) == 38_000  # 150 blocks over 4 threads
        kernels.launch(kernel, (1, 1, 1), (block * blocks, 1, 1), (touched, longest))
        assert int(longest[0]) == block * blocks

    def test_every_scalar_arrives_with_its_type(self, kernels: CPUKernels) -> None:
        out = np.zeros(len(SCALARS))
        kernels.launch(kernels.compile(EVERY_TYPE, "every_type"), (1, 1, 1), (len(SCALARS), 1, 1), (out, *SCALARS))
        assert out.tolist() == [float(scalar) for scalar in SCALARS]

    @pytest.mark.parametrize(
        ("source", "name", "said"),
        [
            ("void f(", "f", "expected"),
            ("void f(void) { g(); }", "f", "g"),  # refused by the compiler or the linker, never found out by a crash
            ("extern void g(void); void f(void) { g(); }", "f", "undefined symbol"),
            ("void f(void) {}", "strlen", "strlen"),  # of the C library, and not of the source
            ("int f;", "f", "constant"),
            ("#include <no_such_file.h>\nvoid f(void) {}", "f", "no_such_file.h"),
            ("void f(void) {} /*", "f", "unterminated comment"),
        ],
    )
    def test_bad_source(self, kernels: CPUKernels, source: str, name: str, said: str) -> None:
        with pytest.raises(CompileFailed) as caught:
            kernels.compile(source, name)
        assert said in caught.value.log.lower()
        assert name in caught.value.message

    def test_no_compiler(self, kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(Unsupported, match="C compiler") as caught:
            kernels.compile(FIELD_ADD["c"], "field_add")
        assert "install" in (caught.value.hint or "")

    @pytest.mark.skipif(sys.platform != "linux", reason="/proc")
    def test_nothing_is_left_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        driver = CPUDriver()
        for _ in range(2):
            driver.open()
            driver.compile(0, FIELD_ADD["c"], "field_add")
            with pytest.raises(CompileFailed):
                driver.compile(0, "no", "field_add")
            assert list(tmp_path.iterdir()) == []
            assert mapped(str(tmp_path)) == 1
            driver.close()
            assert mapped(str(tmp_path)) == 0

    def test_the_loop_runs_beside_a_kernel(self, kernels: CPUKernels) -> None:
        """Another Python thread moves on: neither the call nor the wait for the other threads holds the GIL."""
        source = "#include <stddef.h>\nvoid spin(size_t b, size_t e, volatile int *go) { while (!*go) ; }"
        go = np.zeros(1, np.int32)
        timer = threading.Timer(0.05, lambda: go.fill(1))
        timer.start()
        kernels.launch(kernels.compile(source, "spin"), (100_000, 1, 1), (1, 1, 1), (go,))
        assert go[0] == 1
        timer.join()

    async def test_a_crash_of_a_compiler_is_a_failure_to_compile(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiler = tmp_path / "cc"
        compiler.write_text("#!/bin/sh\nkill -SEGV $$\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        async with CPUBackend() as backend:
            with pytest.raises(CompileFailed) as caught:
                await backend.compile("cpu:0", FIELD_ADD["c"], "field_add")
        assert caught.value.code == -11

    def test_a_hung_kernel_does_not_keep_the_process(self) -> None:
        code = (
            "import asyncio, os, numpy, gpurt.errors\n"
            "from gpurt.backends.cpu_backend import CPUBackend\n"
            "async def main():\n"
            "    async with CPUBackend(hang_after=0.2) as backend:\n"
            "        text = 'void hang(unsigned long b, unsigned long e) { volatile int on = 1; while (on) ; }'\n"
            "        kernel = await backend.compile('cpu:0', text, 'hang')\n"
            "        try:\n"
            "            await backend.launch(kernel, 100_000, 1)\n"
            "        except gpurt.errors.DeviceUnresponsive:\n"
            "            print('unresponsive', flush=True)\n"
            "        await backend.shutdown(timeout=0.1)\n"
            "asyncio.run(main())\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
        assert (done.stdout, done.returncode) == ("unresponsive\n", 0), done.stderr

    async def test_a_name_belongs_to_its_device(self) -> None:
        a, b, total = operands(4096)
        async with CPUBackend(devices=2) as backend:
            for device in ("cpu:0", "cpu:1"):
                async with (
                    filled(backend, device, a.tobytes()) as first,
                    filled(backend, device, b.tobytes()) as second,
                ):
                    out = await backend.allocate(device, total.nbytes)
                    args = [first, second, out, *scalars(4096)]
                    assert await backend.execute_kernel("field_add", 16, 256, args) is False
                    await backend.compile(device, FIELD_ADD["c"], "field_add")
                    assert await backend.execute_kernel("field_add", 16, 256, args) is True
                    assert await backend.copy_from_device(out) == total.tobytes()
                    await backend.deallocate(out)


class TestCompiler:
    def test_one_that_does_not_end_is_ended(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        compiler = tmp_path / "cc"
        compiler.write_text("#!/bin/sh\nsleep 60 &\nwait\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr("gpurt.backends.cpu.kernels._MOST_SECONDS", 1)
        with pytest.raises(CompileFailed, match="killed after 1 s"):
            CPUKernels().compile("void f(size_t b, size_t e) {}", "f")

    async def test_a_slow_one_does_not_make_the_device_unresponsive(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        begun, go = tmp_path / "begun", tmp_path / "go"
        compiler = tmp_path / "cc"
        compiler.write_text(f"#!/bin/sh\ntouch {begun}\nwhile [ ! -e {go} ]; do sleep 0.01; done\nexit 1\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        async with CPUBackend(hang_after=0.05) as backend:
            compiling = asyncio.create_task(backend.compile("cpu:0", "void f(int b, int e) {}", "f"))
            while not await asyncio.to_thread(begun.exists):
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.15)
            handle = await backend.allocate("cpu:0", 64)
            await backend.copy_to_device(b"x" * 64, handle)
            await backend.deallocate(handle)
            await asyncio.to_thread(go.touch)
            with pytest.raises(CompileFailed):
                await compiling

    def test_a_name_without_a_definition(self, kernels: CPUKernels) -> None:
        source = "__attribute__((weak)) void f(unsigned long b, unsigned long e);"
        with pytest.raises(CompileFailed, match="does not define"):
            kernels.compile(source, "f")

    def test_a_long_name(self, kernels: CPUKernels) -> None:
        name = "f" * 300
        kernels.compile(f"void {name}(unsigned long b, unsigned long e) {{}}", name)
