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


# A freed block stays with gpurt, so these wait in vain for the driver's free; tests/memory shows what happens instead.
POOL_HIDES_THE_DRIVER = {
    "test_failed_free_is_reported_and_final": "a pooled block is not freed",
    "test_free_waits_for_a_copy_under_way": "a pooled block is not freed",
    **{
        f"{test}[{loop}deallocate-{how}]": "a pooled block is not freed"
        for test in ("test_cancelled_in_the_driver", "test_cancelled_when_the_result_is_there")
        for loop in ("", "asyncio-", "uvloop-")
        for how in ("task_cancel", "asyncio_timeout", "task_group", "anyio_scope")
    },
}


class TestCPU(Conformance):
    factory = "tests.support.backends:cpu"


class TestSimulated(Conformance):
    factory = "tests.support.backends:simulated"
    large_bytes = 16 << 20


class TestFaultyWithoutFaults(Conformance):
    factory = "tests.support.backends:faulty"
    large_bytes = 16 << 20


@pytest.mark.slow  # what wraps it, without faults, is above
class TestReference(Conformance):
    factory = "tests.support.backends:reference"
    one_loop = True
    # Byte arrays are copied under the GIL, as no driver should; the loop waits for each of them.
    large_bytes = 4 << 20


@pytest.mark.slow
@pytest.mark.slow  # the same driver as above; its threads alone differ
class TestReferenceOneThreadPerDevice(Conformance):
    factory = "tests.support.backends:reference_one_thread_per_device"
    one_loop = True
    large_bytes = 4 << 20


@pytest.mark.slow
class TestReferenceOneThread(Conformance):
    factory = "tests.support.backends:reference_one_thread"
    one_loop = True
    large_bytes = 4 << 20


class TestPooled(Conformance):
    factory = "tests.support.backends:pooled"
    one_loop = True
    large_bytes = 4 << 20
    unsupported = POOL_HIDES_THE_DRIVER


@pytest.mark.gpu
class TestCUDA(Conformance):
    factory = "tests.support.backends:cuda"


@pytest.mark.gpu
class TestCUDAPooled(Conformance):
    factory = "tests.support.backends:cuda_pooled"
    one_loop = True
    unsupported = POOL_HIDES_THE_DRIVER
