"""The conformance kit over every backend that runs anywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gpurt.backend import GPUBackend
from gpurt.testing import BackendConformance
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
