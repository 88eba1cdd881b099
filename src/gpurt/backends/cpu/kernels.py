"""Kernels in C on the host: built by the system's C compiler, called without the GIL, their blocks spread over threads.

A kernel of name ``scale`` is ``void scale(size_t begin, size_t end, …)``, followed by its own parameters: a pointer for
each allocation, and scalars of the types that are passed (``float`` for ``numpy.float32``). It does the work of the
threads ``begin`` to ``end - 1`` of grid times block, counted with x running fastest::

    #include <stddef.h>
    void scale(size_t begin, size_t end, size_t count, float factor, float *values) {
        for (size_t i = begin; i < end && i < count; i++) values[i] *= factor;
    }

It is called with disjoint ranges that cover all, each of whole blocks, from several threads at once.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final, cast

from gpurt.errors import CompileFailed, Unsupported

LANGUAGES: Final[frozenset[str]] = frozenset() if sys.platform == "win32" else frozenset({"c"})

_COMPILERS: Final = ("cc", "gcc", "clang")
_ENTRY: Final = "gpurt_entry"
_MOST_SECONDS: Final = 60
_MOST_BYTES: Final = 4 << 30
"""Of one compiler: a kernel takes 0.05 s and some 50 MiB."""
_MOST_LOG: Final = 64 << 10
_LEAST_INDICES: Final = 1 << 15
"""Of one thread: starting one takes 0.05 to 0.1 ms, in which even the lightest kernel gets that far."""

_C_TYPES: Final[dict[str, Any]] = {
    "?": ctypes.c_bool, "b": ctypes.c_byte, "B": ctypes.c_ubyte, "h": ctypes.c_short, "H": ctypes.c_ushort,
    "i": ctypes.c_int, "I": ctypes.c_uint, "l": ctypes.c_long, "L": ctypes.c_ulong, "q": ctypes.c_longlong,
    "Q": ctypes.c_ulonglong, "f": ctypes.c_float, "d": ctypes.c_double,
}  # fmt: skip
"""NumPy's character of a type → the type of C."""


class CPUKernels:
    """Of one driver, whose memory tokens are NumPy arrays. ``threads`` is how many a launch may use."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._libraries: list[int] = []

    def compile(self, source: str, name: str) -> Callable[..., None]:
        """What ``launch`` takes. Blocks for some 0.05 s.

        Raises:
            CompileFailed: with the compiler's log. Unsupported: there is no compiler.
        """
        compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
        if not LANGUAGES or compiler is None:
            raise Unsupported("kernels on the CPU need a C compiler, and there is none", hint=_how_to_install())
        # Its address by way of a constant: the compiler complains where the name is missing, while the dynamic linker
        # would find one of the C library.
        text = f"{source}\nvoid *const {_ENTRY} = (void *){name};\n"
        # The library stays mapped when its file goes: nothing is left behind, whatever ends the process.
        with tempfile.TemporaryDirectory(prefix="gpurt-", ignore_cleanup_errors=True) as folder:
            path = Path(folder, "kernel.so")
            code, log = _run_compiler(compiler, text, path)
            if code:
                raise CompileFailed(f"the C compiler refuses the source of {name}", code=code, log=log)
            try:
                library = ctypes.CDLL(str(path))
            except OSError as exc:  # an undefined symbol, or a directory of temporary files without execution
                hint = "define or declare what it calls; if files there must not be executed, set TMPDIR"
                raise CompileFailed(f"what was built of {name} cannot be loaded", log=str(exc), hint=hint) from exc
        self._libraries.append(library._handle)
        address = ctypes.c_void_p.in_dll(library, _ENTRY).value
        if address is None:  # declared weak, and nowhere defined
            raise CompileFailed(f"the source declares {name} and does not define it")
        return ctypes.CFUNCTYPE(None)(address)

    def launch(
        self,
        kernel: Callable[..., None],
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Any],
    ) -> None:
        """Run every block; returns when all are done."""
        values = [_as_c(argument) for argument in args]
        blocks, threads = prod(grid), prod(block)
        parts = max(1, min(self.threads, blocks, blocks * threads // _LEAST_INDICES))
        borders = [ctypes.c_size_t(blocks * part // parts * threads) for part in range(parts + 1)]
        helpers = [
            threading.Thread(target=kernel, args=(begin, end, *values), name="gpurt:cpu:kernel", daemon=True)
            for begin, end in pairwise(borders[1:])
        ]
        started: list[threading.Thread] = []
        try:
            for helper in helpers:
                helper.start()
                started.append(helper)
            kernel(borders[0], borders[1], *values)
        finally:
            for helper in started:
                helper.join()

    def close(self) -> None:
        """Forget what was compiled. Nothing of it runs any more."""
        libraries, self._libraries = self._libraries, []
        for handle in libraries:
            ctypes.CDLL(None).dlclose(ctypes.c_void_p(handle))


def _run_compiler(compiler: str, text: str, path: Path) -> tuple[int, str]:
    """Exit code and log. The compiler ends with its time, also where nobody is left to end it."""
    limits = f'ulimit -t {_MOST_SECONDS} && ulimit -v {_MOST_BYTES >> 10} 2>/dev/null; exec "$0" "$@"'
    options = ["-O3", "-shared", "-fPIC", "-fmax-errors=20", "-x", "c", "-", "-o", str(path), "-lm"]
    process = subprocess.Popen(
        ["/bin/sh", "-c", limits, compiler, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "LC_ALL": "C"},
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(text.encode(), timeout=_MOST_SECONDS)
        late = ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the compiler proper is a child of the one that was started
        said, _ = process.communicate()
        late = f"killed after {_MOST_SECONDS} s\n"
    return process.returncode, late + said[:_MOST_LOG].decode(errors="replace").strip()


def _as_c(argument: Any) -> Any:
    import numpy as np

    if isinstance(argument, np.generic):
        scalar = cast("Any", argument)
        return _C_TYPES[scalar.dtype.char](scalar.item())
    return ctypes.c_void_p(argument.ctypes.data)


def _how_to_install() -> str:
    if sys.platform == "darwin":
        return "xcode-select --install"
    if sys.platform == "win32":
        return "kernels in C run on Linux and macOS"
    return "apt install gcc, or your distribution's package of a C compiler"
