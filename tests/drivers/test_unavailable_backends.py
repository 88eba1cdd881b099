"""Backends without a driver: importable anywhere, and they refuse with the reason that is true."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

import pytest

from gpurt.backend import GPUBackend
from gpurt.backends.unavailable import UnavailableDriver
from gpurt.errors import BackendUnavailable, ReasonCode

BACKENDS = [
    ("rocm_backend", "ROCmBackend", "rocm", "linux", "darwin"),
    ("metal_backend", "MetalBackend", "metal", "darwin", "linux"),
    ("directml_backend", "DirectMLBackend", "directml", "win32", "linux"),
    ("vulkan_backend", "VulkanBackend", "vulkan", "linux", None),
    ("tflite_gpu_backend", "TFLiteGPUBackend", "tflite", "android", None),
]
each = pytest.mark.parametrize(("module", "cls", "name", "here", "elsewhere"), BACKENDS)


def refusal(module: str, platform: str) -> BackendUnavailable:
    namespace = importlib.import_module(f"gpurt.backends.{module}")
    [driver] = [
        value
        for value in vars(namespace).values()
        if inspect.isclass(value) and issubclass(value, UnavailableDriver) and value is not UnavailableDriver
    ]
    with pytest.raises(BackendUnavailable) as caught:
        driver(platform=platform).open()
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
def test_missing_library_comes_with_its_command(
    module: str, cls: str, name: str, here: str, elsewhere: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    error = refusal(module, here)
    assert error.reason is ReasonCode.NO_LIBRARY
    assert error.install_hint is not None
    assert error.install_hint.startswith(f"pip install 'gpurt[{name}]'")


@each
def test_present_library_is_not_blamed(
    module: str, cls: str, name: str, here: str, elsewhere: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda library: found.append(library) or object())
    error = refusal(module, here)
    assert error.reason is ReasonCode.NOT_IMPLEMENTED
    assert found[0] in error.message
    assert error.hint is None


@each
def test_wrong_platform_comes_first(
    module: str, cls: str, name: str, here: str, elsewhere: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    if elsewhere is None:
        assert refusal(module, "an-os-of-the-future").reason is ReasonCode.NO_LIBRARY
        return
    error = refusal(module, elsewhere)
    assert error.reason is ReasonCode.WRONG_PLATFORM
    assert elsewhere in error.message
    assert error.install_hint is None
