from __future__ import annotations

import pytest

from gpurt.backend import GPUBackend
from gpurt.shell import DriverBackend
from tests.weights.support import load_file


@pytest.fixture(autouse=True)
def _file_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    if DriverBackend.load_file is GPUBackend.load_file:
        monkeypatch.setattr(DriverBackend, "load_file", load_file)
