"""OpenCL on pocl, the host's processor as a device, as the conformance kit runs over it. Importable in child processes.

One device shown twice gives two contexts, each with memory of its own, between which the library copies nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

from gpurt.backend import GPUBackend
from gpurt.backends.opencl_backend import OpenCLBackend, OpenCLDriver
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.runtime.backend import DriverBackend


class StandIn:
    """An object with other values under some of its names."""

    def __init__(self, of: Any, **others: Any) -> None:
        self._of = of
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def package() -> Any:
    """``pyopencl``, or a refusal that skips the test."""
    try:
        return importlib.import_module("pyopencl")
    except ImportError as exc:
        raise BackendUnavailable(str(exc), reason=ReasonCode.NO_LIBRARY, backend="opencl") from exc


def twice() -> StandIn:
    """The package in which every device of the computer is shown as two."""
    cl = package()

    def platforms() -> list[Any]:
        return [StandIn(each, get_devices=lambda each=each: each.get_devices() * 2) for each in cl.get_platforms()]

    return StandIn(cl, get_platforms=platforms)


class SmallChunks(OpenCLDriver):
    capabilities = OpenCLDriver.capabilities.model_copy(update={"chunk_bytes": 1 << 20})


def driver() -> OpenCLDriver:
    return SmallChunks(cl=twice())


def opencl() -> GPUBackend:
    """Two devices, and every call reaches the driver."""
    return DriverBackend(driver(), pool_bytes=0)


def pooled() -> GPUBackend:
    """As users get it."""
    return OpenCLBackend()
