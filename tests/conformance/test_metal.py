"""The conformance kit over the Metal backend on MLX's CPU device, and over its GPU side on a Mac out of a recording."""

from __future__ import annotations

import pytest

from gpurt.driver import Driver
from gpurt.testing import DriverConformance
from tests.conformance.test_backends import Conformance
from tests.support import metal_backends


class TestMetal(Conformance):
    factory = "tests.support.metal_backends:cpu"
    runs_kernels = False
    one_loop = True
    large_bytes = 64 << 20


@pytest.mark.slow
class TestMetalOnAnEmulatedMac(Conformance):
    factory = "tests.support.metal_backends:emulated"
    runs_kernels = False
    one_loop = True
    large_bytes = 64 << 20


class TestMetalDriver(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return metal_backends.cpu_driver()


class TestMetalDriverOnAnEmulatedMac(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return metal_backends.emulated_driver()
