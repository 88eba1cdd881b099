"""The conformance kit over the ROCm driver on the stand-in runtime."""

from __future__ import annotations

import pytest
from tests.support.cupy_backends import hip_root, stand_in_hip

from gpurt.backends.rocm_backend import ROCmDriver
from gpurt.testing import DriverConformance


class TestPeers(DriverConformance):
    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> ROCmDriver:
        stand_in_hip(monkeypatch)
        return ROCmDriver(environ={}, root=hip_root())


class TestDeniedPeers(DriverConformance):
    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> ROCmDriver:
        stand_in_hip(monkeypatch, peers=False)
        return ROCmDriver(environ={}, root=hip_root())
