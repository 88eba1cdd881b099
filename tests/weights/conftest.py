from __future__ import annotations

import pytest

from gpurt.backend import GPUBackend
from tests.weights.support import load_file


@pytest.fixture(autouse=True)
def _file_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(GPUBackend, "load_file"):
        monkeypatch.setattr(GPUBackend, "load_file", load_file, raising=False)
