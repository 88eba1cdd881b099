"""The driver suite over every driver that runs anywhere."""

from __future__ import annotations

import pytest

from gpurt.driver import Driver
from gpurt.testing import DriverConformance
from tests.support.reference_driver import ReferenceDriver


class TestCPUDriver(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        from gpurt.backends.cpu_backend import CPUDriver

        return CPUDriver(devices=2)


class TestSimulatedDriver(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        from gpurt.testing import create_simulated

        return create_simulated("h100x2").driver


class TestFaultyDriver(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        from gpurt.testing import FaultyDriver

        return FaultyDriver(ReferenceDriver())


class TestReferenceDriver(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return ReferenceDriver()


@pytest.mark.gpu
class TestCUDADriver(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        from gpurt.backends.cuda_backend import CUDADriver

        return CUDADriver()
