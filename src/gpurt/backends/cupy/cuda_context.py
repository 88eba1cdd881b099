"""CUDA contexts made without holding the GIL."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from typing import Any

from gpurt.backends.cupy.cuda_properties import read_properties

log = logging.getLogger("gpurt.cuda")


class PrimaryContexts:
    """Makes contexts through the driver API, which releases the GIL where CuPy's ``setDevice`` holds it.

    ``cuInit`` takes about 0.5 s and a context 0.1 s or more, all of which the event loop would stand still. CuPy
    then finds them made. Every error is left for CuPy to meet and to report.
    """

    def __init__(self, library: str = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1") -> None:
        self._library_name = library
        self._library: Any = None
        self._devices: dict[int, int | None] = {}
        self._lock = threading.Lock()

    def prepare(self) -> None:
        try:
            _load(self._library_name)
            library = ctypes.CDLL(self._library_name)
            if self._done(library.cuInit(0), "cuInit"):
                self._library = library
        except (OSError, AttributeError) as exc:
            log.debug("no warm-up: %s", exc)

    def properties(self, index: int) -> dict[str, Any] | None:
        """Of the ``index``-th visible device (:mod:`gpurt.backends.cupy.cuda_properties`); None: ask CuPy."""
        return None if self._library is None else read_properties(self._library, index)

    def retain(self, index: int) -> None:
        """Make the context of CUDA device ``index`` and keep it; instant from the second time on."""
        if index in self._devices or self._library is None:
            return
        with self._lock:
            if index not in self._devices:
                self._devices[index] = self._retain(index)

    def release(self) -> None:
        """Give our references back. A context that CuPy uses lives on until the process ends."""
        with self._lock:
            held, self._devices = self._devices, {}
            for device in held.values():
                if device is not None:
                    self._done(self._library.cuDevicePrimaryCtxRelease_v2(device), "cuDevicePrimaryCtxRelease")

    def _retain(self, index: int) -> int | None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        ok = self._done(self._library.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet") and self._done(
            self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain"
        )
        return device.value if ok else None

    def _done(self, status: int, call: str) -> bool:
        if status:
            log.debug("%s answered %d", call, status)
        return status == 0


def _load(name: str) -> None:
    """Load a shared library. ``ctypes.CDLL`` would, too, but holds the GIL, for 50 to 80 ms with CUDA's driver; a
    call of the system's own function does not, and ``CDLL`` then finds the library loaded."""
    if sys.platform == "win32":
        ctypes.windll.kernel32.LoadLibraryW(ctypes.c_wchar_p(name))
    else:
        ctypes.CDLL(None).dlopen(name.encode(), ctypes.c_int(os.RTLD_NOW))
