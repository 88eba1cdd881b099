"""The conformance kit over the CUDA driver on the stand-in runtime."""

from __future__ import annotations

import pytest
from tests.support.fake_cuda import FakeNvml, FakeRuntime, install, install_nvml, nvml_record

from gpurt.backends.cuda_backend import CUDADriver
from gpurt.testing import DriverConformance


class TestPeers(DriverConformance):
    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> CUDADriver:
        install(monkeypatch)
        install_nvml(monkeypatch, FakeNvml([nvml_record(0), nvml_record(1)]))
        return CUDADriver(environ={})


class TestDeniedPeers(DriverConformance):
    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> CUDADriver:
        install(monkeypatch, FakeRuntime(peers=False))
        install_nvml(monkeypatch, FakeNvml([nvml_record(0), nvml_record(1)]))
        return CUDADriver(environ={})
