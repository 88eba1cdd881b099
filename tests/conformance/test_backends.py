"""The conformance kit over every backend that runs anywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from gpurt.backend import GPUBackend
from gpurt.testing import BackendConformance, CheckingDriver
from gpurt.testing.kit.base import load_factory, shutdown_quietly


class Conformance(BackendConformance):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[GPUBackend]:
        assert self.factory is not None
        backend = load_factory(self.factory)
        await backend.initialize()
        yield backend
        await shutdown_quietly(backend)


class TestCPU(Conformance):
    factory = "tests.support.backends:cpu"


class TestSimulated(Conformance):
    factory = "tests.support.backends:simulated"
    runs_kernels = False
    large_bytes = 16 << 20


class TestFaultyWithoutFaults(Conformance):
    factory = "tests.support.backends:faulty"
    runs_kernels = False
    large_bytes = 16 << 20


class CheckedConformance(Conformance):
    """Over a driver that writes down every breach of the promises to it."""

    runs_kernels = False
    one_loop = True
    large_bytes = 4 << 20

    @pytest.fixture(autouse=True)
    def _no_breach(self, backend: GPUBackend) -> Iterator[None]:
        yield
        driver = getattr(backend, "driver", None)
        assert isinstance(driver, CheckingDriver)
        # What the kit makes fail never reaches the driver: to it, such memory, threads and openings are still there.
        failed = ("close with", "close while gpurt", "open while the library is open")
        assert [each for each in driver.violations if not each.startswith(failed)] == []


class TestChecking(CheckedConformance):
    factory = "tests.support.backends:checking"


@pytest.mark.wide
class TestCheckingPointers(CheckedConformance):
    factory = "tests.support.backends:checking_pointers"


@pytest.mark.wide
class TestCheckingOneThread(CheckedConformance):
    factory = "tests.support.backends:checking_one_thread"


@pytest.mark.slow  # what wraps it, without faults, is above
class TestReference(Conformance):
    factory = "tests.support.backends:reference"
    runs_kernels = False
    one_loop = True
    # Byte arrays are copied under the GIL, as no driver should; the loop waits for each of them.
    large_bytes = 4 << 20


@pytest.mark.slow  # the same driver as above; its threads alone differ
class TestReferenceOneThreadPerDevice(Conformance):
    factory = "tests.support.backends:reference_one_thread_per_device"
    runs_kernels = False
    one_loop = True
    large_bytes = 4 << 20


@pytest.mark.slow
class TestReferenceOneThread(Conformance):
    factory = "tests.support.backends:reference_one_thread"
    runs_kernels = False
    one_loop = True
    large_bytes = 4 << 20


class TestPooled(Conformance):
    factory = "tests.support.backends:pooled"
    runs_kernels = False
    one_loop = True
    large_bytes = 4 << 20


@pytest.mark.gpu
class TestCUDA(Conformance):
    factory = "tests.support.backends:cuda"


@pytest.mark.gpu
class TestCUDAPooled(Conformance):
    factory = "tests.support.backends:cuda_pooled"
    one_loop = True
