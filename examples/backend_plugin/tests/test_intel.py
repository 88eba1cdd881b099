"""gpurt's kit over the backend as users get it. Without an Intel GPU: GPURT_INTEL_TEST_ANY_VENDOR=1 pytest"""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
import pytest_asyncio

import gpurt
from gpurt.testing import BackendConformance, DriverConformance


def create() -> gpurt.DriverBackend:
    """By the entry point, as gpurt does it. The tests in child processes find it by its name, too."""
    (point,) = entry_points(group="gpurt.backends", name="intel")
    return gpurt.DriverBackend(point.load()())


class TestIntelDriver(DriverConformance):
    @pytest.fixture
    def driver(self):
        return create().driver


class TestIntelBackend(BackendConformance):
    factory = "test_intel:create"
    runs_kernels = False
    large_bytes = 16 << 20

    @pytest_asyncio.fixture
    async def backend(self):
        async with await gpurt.create_backend("intel") as backend:
            yield backend
