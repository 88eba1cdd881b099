"""BackendConformance: what every GPUBackend must do, as one pytest class to subclass.

::

    class TestMine(BackendConformance):
        factory = "mine.backend:create"                      # optional: exit, fork and model tests

        @pytest.fixture
        async def backend(self):                             # the only thing required
            async with create() as backend:
                yield backend

        unsupported = {"test_view_*": "no host-visible memory in this library"}
        expected_failures = {"test_large_round_trip": "driver bug 12"}

Needs pytest, pytest-asyncio and numpy, and hypothesis for the model test. A ``backend`` fixture that raises
``BackendUnavailable`` skips, unless ``GPURT_TEST_REQUIRE`` names the backend. Tests that watch or hold driver calls
run on a :class:`gpurt.runtime.backend.DriverBackend` and skip on others.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import ClassVar

import pytest

from gpurt.backend import GPUBackend
from gpurt.testing.kit.base import load_factory
from gpurt.testing.kit.cancellation import CancellationTests
from gpurt.testing.kit.copies import CopyTests, DeviceToDeviceTests, ViewTests
from gpurt.testing.kit.devices import DeviceTests
from gpurt.testing.kit.endings import EndingTests
from gpurt.testing.kit.errors import ErrorTests
from gpurt.testing.kit.hostile import HostileTests
from gpurt.testing.kit.hygiene import HangTests, LoopTests, ProcessTests
from gpurt.testing.kit.kernels import KernelTests
from gpurt.testing.kit.lifecycle import LifecycleTests
from gpurt.testing.kit.memory import AccountingTests, MemoryTests
from gpurt.testing.kit.ordering import ConcurrencyTests, OrderingTests
from gpurt.testing.kit.storm import StormTests

__all__ = ["BackendConformance"]


class BackendConformance(
    LifecycleTests,
    DeviceTests,
    MemoryTests,
    AccountingTests,
    CopyTests,
    DeviceToDeviceTests,
    ViewTests,
    OrderingTests,
    ConcurrencyTests,
    CancellationTests,
    ErrorTests,
    HostileTests,
    EndingTests,
    KernelTests,
    LoopTests,
    HangTests,
    ProcessTests,
    StormTests,
):
    """Subclass it, define ``backend``; see the module's docstring and :class:`ConformanceBase` for the settings."""

    model_examples: ClassVar[int] = 12
    """Random programs that the model test runs."""

    async def test_model(self, backend: GPUBackend) -> None:
        """Random programs do what a dict of byte arrays does."""
        if self.factory is None:
            pytest.skip("needs `factory`, to make one backend per random program")
        pytest.importorskip("hypothesis")
        from gpurt.testing.model import run_machine

        # The machine runs loops of its own, which needs a thread without one.
        await asyncio.to_thread(run_machine, partial(load_factory, self.factory), examples=self.model_examples)
