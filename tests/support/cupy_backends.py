"""CUDA and ROCm over stand-in runtimes, for the conformance kit: here and, by name, in child processes."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from gpurt.backend import GPUBackend
from gpurt.backends.cuda_backend import CUDADriver
from gpurt.backends.cupy.driver import CuPyDriver
from gpurt.backends.rocm_backend import ROCmDriver
from gpurt.runtime.backend import DriverBackend
from tests.support.fake_cuda import MIB, FakeRuntime, LiveNvml, install, install_nvml, installed
from tests.support.fake_hip import FakeHip, two_cards
from tests.support.fake_nvrtc import install_compiler

CAPACITY = 256 * MIB
CHUNK_BYTES = 1 * MIB


def stand_in_cuda(monkeypatch: pytest.MonkeyPatch, *, peers: bool = True) -> FakeRuntime:
    """CuPy's binding of CUDA, and NVML, over two cards in host memory."""
    runtime = install(monkeypatch, FakeRuntime(capacity=CAPACITY, peers=peers))
    install_nvml(monkeypatch, LiveNvml(runtime))
    install_compiler(monkeypatch, runtime)
    runtime.attributes = {75: 9, 76: 0}  # the compute capability that a kernel is compiled for
    return runtime


def stand_in_hip(monkeypatch: pytest.MonkeyPatch, *, peers: bool = True) -> FakeRuntime:
    """CuPy's binding of HIP over two cards in host memory, which :func:`hip_root` shows."""
    runtime = install(monkeypatch, FakeHip(hip_root(), peers=peers))
    install_compiler(monkeypatch, runtime)
    return runtime


def hip_root() -> Path:
    """The files of a host with two cards of AMD's; one tree per process."""
    return Path(_tree().name)


@functools.cache
def _tree() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="gpurt-amd-")
    two_cards(Path(directory.name), CAPACITY)
    return directory


def cuda() -> GPUBackend:
    if installed() is None:  # in a child process
        stand_in_cuda(pytest.MonkeyPatch())
    return _backend(CUDADriver(environ={}))


def cuda_pooled() -> GPUBackend:
    if installed() is None:
        stand_in_cuda(pytest.MonkeyPatch())
    return DriverBackend(CUDADriver(environ={}))


def hip() -> GPUBackend:
    if installed() is None:
        stand_in_hip(pytest.MonkeyPatch())
    return _backend(ROCmDriver(environ={}, root=hip_root()))


def real_hip() -> GPUBackend:
    """Over the CuPy for ROCm that this process finds, without any file of the kernel's: all figures are HIP's own."""
    return _backend(ROCmDriver(environ={}, root=Path("/nonexistent")))


def _backend(driver: CuPyDriver) -> GPUBackend:
    """Without a pool, which would hide the driver; with a limit, and chunks of which a quick test can have many."""
    driver.capabilities = driver.capabilities.model_copy(update={"chunk_bytes": CHUNK_BYTES})
    return DriverBackend(driver, pool_bytes=0, memory_limit=CAPACITY - 16 * MIB)
