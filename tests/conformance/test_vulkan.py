"""The conformance kit over Vulkan on lavapipe, a software device: mapped memory, and memory behind a queue."""

from __future__ import annotations

import pytest

from gpurt.driver import Driver
from gpurt.testing import DriverConformance
from gpurt.testing.kit.copies import CopyTests, DeviceToDeviceTests, ViewTests
from gpurt.testing.kit.ordering import ConcurrencyTests
from tests.conformance.test_backends import Conformance as _Conformance
from tests.support import vulkan_backends


class TestVulkanMapped(_Conformance):
    factory = "tests.support.vulkan_backends:mapped"
    runs_kernels = False
    one_loop = True
    large_bytes = 16 << 20


@pytest.mark.slow  # below is what depends on how bytes move; the rest is the same code as above
class TestVulkanStaged(_Conformance):
    factory = "tests.support.vulkan_backends:staged"
    runs_kernels = False
    one_loop = True
    large_bytes = 16 << 20


class TestVulkanStagedCopies(CopyTests, DeviceToDeviceTests, ViewTests, ConcurrencyTests):
    factory = "tests.support.vulkan_backends:staged"
    one_loop = True
    large_bytes = 16 << 20
    backend = _Conformance.backend


class TestVulkanDriverMapped(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return vulkan_backends.driver()


class TestVulkanDriverStaged(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return vulkan_backends.driver(mapped=False)
