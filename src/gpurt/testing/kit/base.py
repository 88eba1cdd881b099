"""What every group of the kit shares: settings, fixtures and small helpers."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from gpurt.backend import GPUBackend
from gpurt.testing.kit.probe import DriverProbe
from gpurt.testing.loops import until
from gpurt.types import Capabilities, DeviceState, MemoryHandle

if TYPE_CHECKING:
    from gpurt.runtime.backend import DriverBackend


class ConformanceBase:
    """Settings and fixtures; see :class:`gpurt.testing.BackendConformance`."""

    gpurt_conformance: ClassVar[bool] = True
    pytestmark: ClassVar[list[pytest.MarkDecorator]] = [pytest.mark.asyncio]

    unsupported: ClassVar[Mapping[str, str]] = {}
    """Test-name pattern → why this backend will never pass it. Such tests are skipped and show the reason."""
    expected_failures: ClassVar[Mapping[str, str]] = {}
    """Test-name pattern → the bug behind it. Strict: a test that passes after all fails the run."""
    factory: ClassVar[str | None] = None
    """``"package.module:callable"``, returning a new backend that is not initialised. Enables the tests that need
    a process of their own (exit, fork) and the stateful model test."""
    runs_kernels: ClassVar[bool] = True
    """False for a library that runs none: the tests that launch one are not collected, and a test shows that it
    refuses."""
    large_bytes: ClassVar[int] = 256 << 20
    """Size of the copies beside which the event loop must keep running."""

    @pytest.fixture
    def backend(self) -> GPUBackend:
        """Override: an ``async`` fixture that yields an *initialised* backend and shuts it down afterwards."""
        raise NotImplementedError(f"{type(self).__name__} must define an async fixture `backend`")

    @pytest.fixture
    def capabilities(self, backend: GPUBackend) -> Capabilities:
        """What the backend claims. Override it for a backend that is not a ``DriverBackend``."""
        driver = getattr(backend, "driver", None)
        return driver.capabilities if driver is not None else Capabilities()

    @pytest.fixture
    def device_id(self, backend: GPUBackend) -> str:
        """The first healthy device."""
        for device in backend.devices:
            if device.usable and device.state == DeviceState.HEALTHY:
                return device.device_id
        pytest.fail(f"no usable device in {backend.devices}")

    @pytest.fixture
    def second_device_id(self, backend: GPUBackend, device_id: str) -> str:
        """Another device; the same again where there is one only, since the same must hold for it."""
        for device in backend.devices:
            if device.usable and device.device_id != device_id:
                return device.device_id
        return device_id

    @pytest.fixture
    def shell(self, backend: GPUBackend) -> DriverBackend:
        """The backend as a ``DriverBackend``; tests that need its driver skip on other backends."""
        from gpurt.runtime.backend import DriverBackend

        if not isinstance(backend, DriverBackend):
            pytest.skip("not a DriverBackend: its driver cannot be watched")
        return backend

    @pytest.fixture
    def hold(self, shell: DriverBackend) -> Iterator[DriverProbe]:
        """Watches the driver and holds its calls; whatever is still held is released afterwards."""
        probe = DriverProbe(shell.driver)
        yield probe
        probe.remove()
        assert probe.violations == []


def load_factory(spec: str) -> GPUBackend:
    """Call the ``"module:callable"`` of ``ConformanceBase.factory``."""
    module, _, name = spec.partition(":")
    return cast("GPUBackend", getattr(importlib.import_module(module), name)())


def payload(size: int, seed: int = 0) -> bytes:
    """``size`` random bytes, the same for the same seed."""
    return random.Random(seed).randbytes(size)


@asynccontextmanager
async def filled(backend: GPUBackend, device_id: str, content: bytes | bytearray) -> AsyncGenerator[MemoryHandle, None]:
    """An allocation that holds ``content``, freed at the end."""
    async with backend.allocation(device_id, len(content)) as handle:
        await backend.copy_to_device(content, handle)
        yield handle


def usage(backend: GPUBackend, device_id: str) -> Any:
    """The ledger's entry of one device; None where the backend has no ledger."""
    ledger = getattr(backend, "ledger", None)
    return None if ledger is None else ledger.usage(device_id)


def keeps_freed(backend: GPUBackend, device_id: str) -> bool:
    """A freed block stays with gpurt for the next allocation: the driver has no part in ``deallocate``."""
    statistics = getattr(backend, "pool_statistics", None)
    return statistics is not None and statistics(device_id).limit_bytes > 0


async def assert_nothing_live(backend: GPUBackend, probe: DriverProbe | None = None) -> None:
    """Ledger and driver agree that every allocation is gone. Detached work gets time to be undone first."""
    for device in backend.devices:
        await backend.synchronize(device.device_id)
    for device in backend.devices:
        if usage(backend, device.device_id) is not None:
            await until(
                lambda name=device.device_id: usage(backend, name).current_count == 0,
                f"{device.device_id}: ledger still counts live allocations",
            )
            await until(
                lambda name=device.device_id: usage(backend, name).reserved_bytes == 0,
                f"{device.device_id}: ledger still reserves memory for calls that are over",
            )
            assert usage(backend, device.device_id).current_bytes == 0
    await backend.trim()
    if probe is not None:
        await until(lambda: probe.live == 0, f"the driver still holds {probe.live} allocations")


async def shutdown_quietly(backend: GPUBackend) -> None:
    """Shut down a backend that may have live handles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        await backend.shutdown()
