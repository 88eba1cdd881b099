"""Kernels in CUDA C++ and HIP C++: compiled at run time by NVRTC or HIPRTC, launched on a lane's own stream.

CuPy's bindings again, raw: its ``RawModule`` keeps what it compiled in the user's home and unloads it on whatever
thread collects it. A kernel is declared ``extern "C" __global__``; allocations are its pointers.

The compilers are in none of CuPy's wheels: memory and copies do without them.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpurt.backends.cupy.runtime import address_of
from gpurt.errors import CompileFailed, Unsupported
from gpurt.runtime.turns import short_turns

log = logging.getLogger("gpurt.cupy")

# cudaDeviceAttr of driver_types.h, CUresult of cuda.h.
_CAPABILITY_MAJOR: Final = 75
_CAPABILITY_MINOR: Final = 76
_NOT_FOUND: Final = 500

_CUDA_HINT: Final = "pip install 'cupy-cuda12x[ctk]', or 'cupy-cuda13x[ctk]' where that CuPy is; a CUDA toolkit will do"
_HIP_HINT: Final = "install ROCm's run-time compiler, libhiprtc"


class CuPyKernels:
    """Kernels of one driver; any thread.

    Args:
        select: makes a device the calling thread's.
        on_stream: does so, too, and gives CuPy's runtime module and the thread's stream.
    """

    def __init__(self, select: Callable[[int], Any], on_stream: Callable[[int], tuple[Any, int]]) -> None:
        self._select = select
        self._on_stream = on_stream
        self._lock = threading.Lock()
        self._modules: list[tuple[int, int]] = []

    def compile(self, index: int, source: str, name: str) -> int:
        """The kernel's function in the driver API. Blocks for some 0.1 s, and longer the first time.

        Raises:
            CompileFailed: with the compiler's log. Unsupported: the compiler is not installed.
        """
        runtime, _ = self._on_stream(index)
        compiler = _compiler(hip=bool(runtime.is_hip))
        if runtime.is_hip:
            image = _build(compiler, compiler.getPTX, source, name)  # HIPRTC looks at the current device
        else:
            # For this very device: what NVRTC makes for others goes through the driver's compiler once more, which
            # may be older.
            major, minor = (runtime.deviceGetAttribute(each, index) for each in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR))
            image = _build(compiler, compiler.getCUBIN, source, name, f"--gpu-architecture=sm_{major}{minor}")
        driver = _driver()
        try:
            module = driver.moduleLoadData(image)
            with self._lock:
                self._modules.append((index, module))
            return driver.moduleGetFunction(module, name)
        except driver.CUDADriverError as exc:
            if exc.status != _NOT_FOUND:
                raise runtime.CUDARuntimeError(exc.status) from exc
            hint = f'declare it extern "C" __global__ void {name}(…)'
            raise CompileFailed(f"the source has no kernel {name}", code=exc.status, hint=hint) from exc

    def launch(
        self, index: int, function: int, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Any]
    ) -> None:
        """Run on the calling thread's stream; returns when it is done. Failures are ``CUDARuntimeError``."""
        import numpy as np

        runtime, stream = self._on_stream(index)
        driver = _driver()
        cells: list[Any] = [np.array(each, None if isinstance(each, np.generic) else np.uint64) for each in args]
        addresses = (ctypes.c_void_p * len(cells))(*map(address_of, cells))
        try:
            driver.launchKernel(function, *grid, *block, 0, stream, ctypes.addressof(addresses), 0)
        except driver.CUDADriverError as exc:
            # The two interfaces number their errors alike since CUDA 11; one of them has its meanings looked up.
            raise runtime.CUDARuntimeError(exc.status) from exc
        runtime.streamSynchronize(stream)

    def close(self) -> None:
        """Unload what was compiled. Nothing of it runs any more."""
        with self._lock:
            modules, self._modules = self._modules, []
        for index, module in modules:
            try:
                self._select(index)
                _driver().moduleUnload(module)
            except RuntimeError as exc:  # of either interface: a lost device has taken its modules with it
                log.info("a kernel's module on device %d was not unloaded: %s", index, exc)


def _driver() -> Any:
    return importlib.import_module("cupy_backends.cuda.api.driver")


def _compiler(*, hip: bool) -> Any:
    """CuPy's binding of the compiler, with the compiler's library loaded.

    Raises:
        Unsupported: there is none.
    """
    try:
        with short_turns():  # the first time it loads much, CuPy itself included
            compiler: Any = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
            compiler.getVersion()
    except Exception as exc:  # of CuPy, of its helpers that look for the library, or of the library
        text = f"{'HIPRTC' if hip else 'NVRTC'} cannot be loaded: {type(exc).__name__}: {str(exc).strip()[:200]}"
        raise Unsupported(text, hint=_HIP_HINT if hip else _CUDA_HINT) from exc
    return compiler


def _build(compiler: Any, image: Callable[[int], bytes], source: str, name: str, *options: str) -> bytes:
    program: int = compiler.createProgram(source, f"{name}.cu", (), ())
    try:
        compiler.compileProgram(program, options)
        return image(program)
    except compiler.NVRTCError as exc:
        log = str(compiler.getProgramLog(program)).strip("\0 \n")
        raise CompileFailed(f"the compiler refuses the source of {name}: {exc}", code=exc.status, log=log) from exc
    finally:
        compiler.destroyProgram(program)
