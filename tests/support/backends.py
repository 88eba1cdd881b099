"""The backends that the conformance kit runs over here. Importable in child processes, hence functions."""

from __future__ import annotations

from gpurt.backend import GPUBackend
from gpurt.runtime.backend import DriverBackend
from tests.support.reference_driver import ReferenceDriver


def cpu() -> GPUBackend:
    from gpurt.backends.cpu_backend import CPUDriver

    return DriverBackend(CPUDriver(devices=2), pool_bytes=0)


def simulated() -> GPUBackend:
    from gpurt.testing import create_simulated

    return create_simulated("h100x2")


def faulty() -> GPUBackend:
    """The fault-injecting driver with no fault armed must be invisible."""
    from gpurt.testing import FaultyDriver

    return DriverBackend(FaultyDriver(ReferenceDriver()))


def reference() -> GPUBackend:
    return DriverBackend(ReferenceDriver(chunk_bytes=1 << 14))


def pooled() -> GPUBackend:
    return DriverBackend(ReferenceDriver(chunk_bytes=1 << 14), pool_bytes=1 << 20)


def reference_one_thread_per_device() -> GPUBackend:
    return DriverBackend(ReferenceDriver("device"))


def reference_one_thread() -> GPUBackend:
    return DriverBackend(ReferenceDriver("backend"))


def checking() -> GPUBackend:
    """It has everything that a driver can have, for the tests that only some drivers can run."""
    from gpurt.testing import CheckingDriver

    return DriverBackend(CheckingDriver(host_visible=True, pins_memory=True, loads_files=True, chunk_bytes=1 << 20))


def checking_pointers() -> GPUBackend:
    """Its memory is visible to other libraries of the device alone, and it takes one call at a time."""
    from gpurt.testing import CheckingDriver

    return DriverBackend(
        CheckingDriver(threading="device", cuda_pointers=True, pool_bytes=1 << 20, chunk_bytes=1 << 20)
    )


def checking_one_thread() -> GPUBackend:
    from gpurt.testing import CheckingDriver

    return DriverBackend(CheckingDriver(threading="backend", host_visible=True, chunk_bytes=1 << 20))


def cuda() -> GPUBackend:
    from gpurt.backends.cuda_backend import CUDABackend

    return CUDABackend(pool_bytes=0)


def cuda_pooled() -> GPUBackend:
    from gpurt.backends.cuda_backend import create

    return create()
