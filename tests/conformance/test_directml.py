"""The conformance kits over DirectML's class: on ONNX Runtime's CPU memory, and on a Windows of recorded tables."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpurt.backend import GPUBackend
from gpurt.backends.directml.runtime import load
from gpurt.backends.directml_backend import DirectMLDriver
from gpurt.driver import Driver
from gpurt.testing import BackendConformance, DriverConformance
from gpurt.testing.kit.base import load_factory, shutdown_quietly
from tests.support.directml_backends import recorded, windows


class DirectMLConformance(BackendConformance):
    one_loop = True
    large_bytes = 64 << 20

    @pytest.fixture
    async def backend(self) -> AsyncIterator[GPUBackend]:
        assert self.factory is not None
        backend = load_factory(self.factory)
        await backend.initialize()
        yield backend
        await shutdown_quietly(backend)


class TestDirectMLOnCPU(DirectMLConformance):
    factory = "tests.support.directml_backends:cpu"
    runs_kernels = False


@pytest.mark.slow
class TestDirectMLOnCPUAsUsersHaveIt(DirectMLConformance):
    factory = "tests.support.directml_backends:cpu_as_users_have_it"
    runs_kernels = False


@pytest.mark.gpu
class TestDirectML(DirectMLConformance):
    factory = "gpurt.backends.directml_backend:create"
    runs_kernels = False


class TestDirectMLDriverOnCPU(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        load("cpu")  # or there is nothing to be tested
        return DirectMLDriver(device_type="cpu", devices=2)


class TestDirectMLDriverOfTinyChunks(DriverConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        load("cpu")
        return DirectMLDriver(device_type="cpu", devices=2, largest_chunk=256)


class TestDirectMLDriverOnRecordedWindows(DriverConformance):
    """What a real GPU would do is not shown by this; that the driver asks for it as it should is."""

    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> Driver:
        rows: list[dict[str, Any]] = recorded("windows-rtx-4090")["adapters"]
        second = rows[0] | {"luid": "000000000000d3a2", "pci_bus": 2}
        return windows(monkeypatch, [*rows, second])[0]
