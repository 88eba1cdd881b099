"""Backends without a driver: importable anywhere, and they refuse with the reason that is true."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from gpurt.backend import GPUBackend
from gpurt.backends.unavailable import UnavailableDriver
from gpurt.discovery.gate import gate
from gpurt.errors import BackendUnavailable, ReasonCode

BACKENDS = [
    ("rocm_backend", "ROCmBackend", "rocm", "linux", "darwin"),
    ("metal_backend", "MetalBackend", "metal", "darwin", "linux"),
    ("directml_backend", "DirectMLBackend", "directml", "win32", "linux"),
    ("vulkan_backend", "VulkanBackend", "vulkan", "linux", None),
    ("tflite_gpu_backend", "TFLiteGPUBackend", "tflite", "android", None),
]
each = pytest.mark.parametrize(("module", "cls", "name", "here", "elsewhere"), BACKENDS)


def refusal(module: str, platform: str, root: Path) -> BackendUnavailable:
    namespace = importlib.import_module(f"gpurt.backends.{module}")
    [driver] = [
        value
        for value in vars(namespace).values()
        if inspect.isclass(value) and issubclass(value, UnavailableDriver) and value is not UnavailableDriver
    ]
    with pytest.raises(BackendUnavailable) as caught:
        driver(platform=platform, root=root).open()
    return caught.value


@each
async def test_backend_refuses_and_stays_closed(
    module: str, cls: str, name: str, here: str, elsewhere: str | None
) -> None:
    namespace = importlib.import_module(f"gpurt.backends.{module}")
    backend: GPUBackend = namespace.create()
    assert type(backend) is getattr(namespace, cls)
    assert backend.name == name
    for _ in range(2):
        with pytest.raises(BackendUnavailable) as caught:
            await backend.initialize()
        assert caught.value.backend == name
    await backend.shutdown()
    assert backend.devices == ()


@each
def test_no_driver_yet_comes_without_a_command(
    module: str, cls: str, name: str, here: str, elsewhere: str | None, tmp_path: Path
) -> None:
    # tmp_path has no bus, so nobody knows whether there is an AMD device.
    error = refusal(module, here, tmp_path)
    assert error.reason is ReasonCode.NOT_IMPLEMENTED
    assert error.message.startswith("this version of gpurt has no ")
    assert error.hint is None
    assert error.install_hint is None
    failure = gate(name, platform=here, root=tmp_path)
    assert failure is not None
    assert (failure.reason, failure.message) == (error.reason, error.message)


@each
def test_wrong_platform_comes_first(
    module: str, cls: str, name: str, here: str, elsewhere: str | None, tmp_path: Path
) -> None:
    if elsewhere is None:
        assert refusal(module, "an-os-of-the-future", tmp_path).reason is ReasonCode.NOT_IMPLEMENTED
        return
    error = refusal(module, elsewhere, tmp_path)
    assert error.reason is ReasonCode.WRONG_PLATFORM
    assert elsewhere in error.message
    assert error.install_hint is None


def test_without_an_amd_device_that_comes_first(tmp_path: Path) -> None:
    vendor = tmp_path / "sys/bus/pci/devices/0000:01:00.0/vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x10de\n")
    error = refusal("rocm_backend", "linux", tmp_path)
    assert error.reason is ReasonCode.NO_DEVICE
    assert "no AMD device" in error.message
    assert "no ROCm driver yet" in error.message
    vendor.write_text("0x1002\n")
    assert refusal("rocm_backend", "linux", tmp_path).reason is ReasonCode.NOT_IMPLEMENTED
    vendor.write_text("0x10de\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert refusal("rocm_backend", "linux", tmp_path).reason is ReasonCode.NOT_IMPLEMENTED
