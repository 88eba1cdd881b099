"""CuPy's binding of the CUDA and HIP runtime: how to import it without CuPy, and the numbers that it speaks in."""

from __future__ import annotations

import importlib
from typing import Any, Final

from gpurt.backends.advice import INSTALL

CUDA_INSTALL_HINT: Final = INSTALL["cuda"]
ROCM_INSTALL_HINT: Final = INSTALL["rocm"]
"""On Linux on x86-64, the only platform with a wheel."""
ROCM_BUILD_HINT: Final = (
    "there is no CuPy for ROCm to install here: build it with AMD's HIP SDK, "
    "CUPY_INSTALL_USE_HIP=1 ROCM_HOME=<where HIP is> pip install --no-binary cupy cupy"
)
ROCM_LIBRARIES_HINT: Final = (
    "install ROCm 7 from repo.radeon.com (packages rocm-hip-runtime and rocm-hip-libraries), "
    "or add its lib directory to LD_LIBRARY_PATH"
)

# cudaMemcpyKind, cudaStreamNonBlocking, cudaHostAllocPortable and cudaError_t of CUDA's driver_types.h and
# cuda_runtime_api.h; HIP's agree.
HOST_TO_DEVICE: Final = 1
DEVICE_TO_HOST: Final = 2
DEVICE_TO_DEVICE: Final = 3
STREAM_NON_BLOCKING: Final = 1
HOST_ALLOC_PORTABLE: Final = 1
"""Pinned for every device of the process, not only for the one that was current."""
ERROR_MEMORY_ALLOCATION: Final = 2
ERROR_PEER_ACCESS_ALREADY_ENABLED: Final = 704
PEERS_REFUSED_STATUSES: Final = frozenset({217, 711})
"""Peer access unsupported between these two, or the device has as many peers as the hardware bears (eight, without a
switch). Neither spoils the context: their copies go through the host."""
LOST_STATUSES: Final = frozenset({46, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
"""Statuses after which "any further CUDA work will return the same error" (driver_types.h), uncorrectable ECC and
NVLink errors (214, 220), devices unavailable (46), and unknown (999), after which nothing is known of the context."""


def import_runtime() -> Any:
    """The runtime module.

    Raises:
        ImportError: CuPy is not installed, or not loadable.
    """
    try:
        # 15 ms. The public name is cupy.cuda.runtime, the same module, but importing it takes 600 ms.
        return importlib.import_module("cupy_backends.cuda.api.runtime")
    except ModuleNotFoundError:
        return importlib.import_module("cupy").cuda.runtime


def out_of_memory(runtime: Any, exc: Exception) -> bool:
    """Whether the runtime could not allocate, on the device or pinned on the host."""
    return isinstance(exc, runtime.CUDARuntimeError) and getattr(exc, "status", None) == ERROR_MEMORY_ALLOCATION


def bytes_array(view: memoryview) -> Any:
    """``view`` as an array, which keeps it exported and knows its address. ctypes refuses read-only memory."""
    import numpy as np

    return np.frombuffer(view, np.uint8)


def plain_buffer(nbytes: int) -> Any:
    """``nbytes`` of ordinary host memory with whatever is in it."""
    import numpy as np

    return np.empty(nbytes, np.uint8)


def address_of(array: Any) -> int:
    return array.__array_interface__["data"][0]
