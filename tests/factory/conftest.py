from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpurt import plugins
from gpurt.factory import GPUBackendFactory
from gpurt.settings import BACKEND_VARIABLES, FALLBACK_VARIABLES, PLUGINS_VARIABLES
from tests.factory.toy import Shelf

REFUSING = ("cuda", "rocm", "vulkan", "directml", "metal", "tflite")


@pytest.fixture(autouse=True)
def clean_factory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in (*BACKEND_VARIABLES, *FALLBACK_VARIABLES, *PLUGINS_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(plugins, "_registered", {})
    yield
    GPUBackendFactory.clear_backend_override()


@pytest.fixture
def shelf() -> Shelf:
    """Every accelerator backend has no device, cpu has one."""
    from tests.factory.toy import ToyBackend

    shelf = Shelf()
    for name in REFUSING:
        shelf.put(name, lambda: ToyBackend(()))
    shelf.put("cpu")
    return shelf
