"""Stand-ins for CuPy's bindings of NVRTC and of the driver API's modules, beside :mod:`tests.support.fake_cuda`.

The host's C compiler takes NVRTC's place: a kernel in the C subset of CUDA is really compiled, its errors are real, and
a launch runs it thread by thread in host memory, at the synchronisation of its stream.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.fake_cuda import FakeRuntime

_PRELUDE = """
#include <stddef.h>
static _Thread_local struct { unsigned x, y, z; } blockIdx, threadIdx, blockDim, gridDim;
#define __global__
#line 1 "kernel.cu"
"""
_EACH = "for (threadIdx.{0} = 0; threadIdx.{0} < blockDim.{0}; threadIdx.{0}++) "
_EACH_BLOCK = "for (blockIdx.{0} = 0; blockIdx.{0} < gridDim.{0}; blockIdx.{0}++) "
_TRAMPOLINE = """
size_t {name}_sizes[] = {{ {count}, {sizes} }};
void {name}_run(void **p, const unsigned *d) {{
    gridDim.x = d[0]; gridDim.y = d[1]; gridDim.z = d[2];
    blockDim.x = d[3]; blockDim.y = d[4]; blockDim.z = d[5];
    {loops} {name}({values});
}}
"""


class NVRTCError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"NVRTC_ERROR_COMPILATION ({status})")


class CUDADriverError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"CUDA_ERROR_{status}")


class FakeNvrtc(ModuleType):
    """``programs`` has what was not destroyed, ``options`` those of every compilation."""

    NVRTCError = NVRTCError

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__("cupy_backends.cuda.libs.nvrtc")
        self._runtime = runtime
        self._next = 1
        self.programs: dict[int, str] = {}
        self.options: list[tuple[str, ...]] = []
        self._images: dict[int, bytes] = {}
        self._logs: dict[int, str] = {}

    def getVersion(self) -> tuple[int, int]:
        return 12, 9

    def createProgram(self, source: str, name: str, headers: tuple[()], include_names: tuple[()]) -> int:
        handle, self._next = self._next, self._next + 1
        self.programs[handle] = source
        return handle

    def destroyProgram(self, handle: int) -> None:
        del self.programs[handle]

    def compileProgram(self, handle: int, options: tuple[str, ...]) -> None:
        self.options.append(tuple(options))
        source = self.programs[handle]
        text = _PRELUDE + source.replace('extern "C" ', "") + "".join(map(_trampoline, _kernels(source)))
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "image.so")
            compiler = shutil.which("cc")
            assert compiler is not None
            done = subprocess.run(
                [compiler, "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(out)],
                input=text,
                text=True,
                capture_output=True,
            )
            self._logs[handle] = done.stderr + "\0"
            if done.returncode:
                raise NVRTCError(6)
            self._images[handle] = out.read_bytes()

    def getProgramLog(self, handle: int) -> str:
        assert handle in self.programs
        return self._logs[handle]

    def getCUBIN(self, handle: int) -> bytes:
        if self._runtime.is_hip:
            raise RuntimeError("HIP does not support getCUBIN")
        return self._images[handle]

    def getPTX(self, handle: int) -> bytes:
        assert self._runtime.is_hip, "PTX of a newer NVRTC is refused by an older driver"
        return self._images[handle]


class FakeDriverApi(ModuleType):
    """``modules`` has what is loaded: handle → device and library."""

    CUDADriverError = CUDADriverError

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__("cupy_backends.cuda.api.driver")
        self._runtime = runtime
        self.modules: dict[int, tuple[int, Any]] = {}
        self._functions: dict[int, tuple[int, str]] = {}
        self._next = 1

    def moduleLoadData(self, image: bytes) -> int:
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(image)
            file.flush()
            library = ctypes.CDLL(file.name)
        handle, self._next = self._next, self._next + 1
        self.modules[handle] = (self._runtime.current, library)
        return handle

    def moduleUnload(self, handle: int) -> None:
        if self.modules.pop(handle)[0] != self._runtime.current:
            raise CUDADriverError(201)

    def moduleGetFunction(self, handle: int, name: str) -> int:
        if not hasattr(self.modules[handle][1], f"{name}_run"):
            raise CUDADriverError(500)
        function, self._next = self._next, self._next + 1
        self._functions[function] = (handle, name)
        return function

    def launchKernel(self, function: int, *rest: int) -> None:
        *shape, shared, stream_handle, parameters, extra = rest
        handle, name = self._functions[function]
        if handle not in self.modules or self.modules[handle][0] != self._runtime.current:
            raise CUDADriverError(400)
        if shape[3] * shape[4] * shape[5] > 1024:
            raise CUDADriverError(1)
        assert (shared, extra) == (0, 0)
        library = self.modules[handle][1]
        count = ctypes.c_size_t.in_dll(library, f"{name}_sizes").value
        sizes = (ctypes.c_size_t * (count + 1)).in_dll(library, f"{name}_sizes")[1:]
        # As CUDA, it takes the values now and runs later.
        sources = (ctypes.c_void_p * count).from_address(parameters)
        values = [ctypes.string_at(source, size) for source, size in zip(sources, sizes, strict=True)]
        cells = [ctypes.create_string_buffer(value, len(value)) for value in values]

        def run() -> None:
            getattr(library, f"{name}_run")((ctypes.c_void_p * count)(*map(ctypes.addressof, cells)), dims)

        dims = (ctypes.c_uint * 6)(*shape)
        stream = self._runtime.streams[stream_handle]
        assert stream.device == self._runtime.current
        stream.queue.append(run)


def install_compiler(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> tuple[FakeNvrtc, FakeDriverApi]:
    """Put both where CuPy's bindings would be found; :func:`fake_cuda.install` was called."""
    nvrtc, driver = FakeNvrtc(runtime), FakeDriverApi(runtime)
    runtime.attributes = {75: 9, 76: 0, **runtime.attributes}  # compute capability, which NVRTC must be told
    libs = ModuleType("cupy_backends.cuda.libs")
    libs.__path__ = []
    for module in (libs, nvrtc, driver):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return nvrtc, driver


def _kernels(source: str) -> list[tuple[str, list[str]]]:
    """Name and types of the parameters of each kernel."""
    found = re.findall(r"__global__\s+void\s+(\w+)\s*\(([^)]*)\)", source)
    return [(name, [re.sub(r"\w+\s*$", "", each) for each in given.split(",")]) for name, given in found]


def _trampoline(kernel: tuple[str, list[str]]) -> str:
    name, types = kernel
    return _TRAMPOLINE.format(
        name=name,
        count=len(types),
        sizes=", ".join(f"sizeof({each})" for each in types),
        values=", ".join(f"*({each} *)p[{position}]" for position, each in enumerate(types)),
        loops="".join(form.format(axis) for form in (_EACH_BLOCK, _EACH) for axis in "zyx"),
    )
