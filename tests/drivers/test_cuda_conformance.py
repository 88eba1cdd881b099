"""The conformance kit over the CUDA driver on the stand-in runtime."""

from __future__ import annotations

import pytest
from tests.support.cupy_backends import stand_in_cuda

from gpurt.backends.cuda_backend import CUDADriver
from gpurt.testing import DriverConformance


class TestPeers(DriverConformance):
    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> CUDADriver:
        stand_in_cuda(monkeypatch)
        return CUDADriver(environ={})


class TestDeniedPeers(DriverConformance):
    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> CUDADriver:
        stand_in_cuda(monkeypatch, peers=False)
        return CUDADriver(environ={})
