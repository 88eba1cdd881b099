"""The conformance kit over CUDA and ROCm, both on the shared CuPy driver over stand-in runtimes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import ClassVar

import pytest

from gpurt.backend import GPUBackend
from gpurt.testing import BackendConformance
from gpurt.testing.kit.base import load_factory, shutdown_quietly
from tests.support.cupy_backends import stand_in_cuda, stand_in_hip
from tests.support.fake_cuda import FakeRuntime


class Conformance(BackendConformance):
    install: ClassVar[Callable[[pytest.MonkeyPatch], FakeRuntime]]
    one_loop = True
    large_bytes = 16 << 20

    @pytest.fixture
    def runtime(self, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
        return type(self).install(monkeypatch)

    @pytest.fixture
    async def backend(self, runtime: FakeRuntime) -> AsyncIterator[GPUBackend]:
        assert self.factory is not None
        backend = load_factory(self.factory)
        await backend.initialize()
        yield backend
        await shutdown_quietly(backend)


class TestCUDA(Conformance):
    install = staticmethod(stand_in_cuda)
    factory = "tests.support.cupy_backends:cuda"
    stand_in = "stand-in for CuPy's CUDA runtime, in host memory"


class TestROCm(Conformance):
    install = staticmethod(stand_in_hip)
    factory = "tests.support.cupy_backends:hip"
    stand_in = "stand-in for CuPy's HIP runtime, in host memory"


@pytest.mark.slow  # the pool is the shell's, and the same over every driver
class TestCUDAPooled(Conformance):
    install = staticmethod(stand_in_cuda)
    factory = "tests.support.cupy_backends:cuda_pooled"
    stand_in = "stand-in for CuPy's CUDA runtime, in host memory"
