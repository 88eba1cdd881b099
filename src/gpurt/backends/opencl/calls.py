"""The OpenCL calls that pyopencl makes under the GIL and that take long: made by ctypes, which lets go of it.

Measured with pocl 3.1: loading the drivers 25 ms, giving 512 MiB back 50 ms; making a context takes a vendor's driver
up to seconds. An event loop would stand still as long, however many threads there are.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

_SUCCESS: Final = 0
_WINDOWS_LOADER: Final = "OpenCL.dll"


class OpenCLCalls:
    """Of one package ``pyopencl``, through the loader that it has in the process already."""

    def __init__(self, cl: Any) -> None:
        self._cl = cl
        # dlsym also looks in what a library needs; Windows looks in the library itself alone.
        library = _WINDOWS_LOADER if sys.platform == "win32" else str(cl._cl.__file__)
        self._library = ctypes.CDLL(library)
        self._create_context = self._library.clCreateContext
        self._create_context.restype = ctypes.c_void_p

    def load_drivers(self) -> None:
        """Make the loader load every driver. What it answers is told again when pyopencl asks."""
        self._library.clGetPlatformIDs(0, None, ctypes.byref(ctypes.c_uint()))

    def create_context(self, device: Any) -> Any:
        """A context of one device, as pyopencl's object.

        Raises:
            pyopencl.Error: with the library's code, as pyopencl's own call would.
        """
        code, handle = ctypes.c_int(), ctypes.c_void_p(device.int_ptr)
        made = self._create_context(None, 1, ctypes.byref(handle), None, None, ctypes.byref(code))
        if code.value != _SUCCESS:
            context = self._cl.Context([device])  # raises pyopencl's error
            self._library.clRetainContext(ctypes.c_void_p(context.int_ptr))
            return context
        # The reference of the call stays ours, so that the last one goes by release_context().
        return self._cl.Context.from_int_ptr(made, True)

    def release_context(self, address: int) -> None:
        """Let go of what :meth:`create_context` holds; ``address`` is the context's ``int_ptr``. Call it when every
        object that refers to the context is gone: whoever lets go last waits for the driver."""
        self._library.clReleaseContext(ctypes.c_void_p(address))

    def release(self, buffer: Any) -> None:
        """Give a buffer's memory back. Nobody may use the object any more: the library would crash."""
        handle = ctypes.c_void_p(buffer.int_ptr)
        self._library.clRetainMemObject(handle)
        buffer.release()
        self._library.clReleaseMemObject(handle)
