"""DirectML's class on what runs here: ONNX Runtime's CPU memory, and a Windows made of recorded tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurt.backend import GPUBackend
from gpurt.backends.directml.runtime import load
from gpurt.backends.directml_backend import DirectMLBackend, DirectMLDriver
from gpurt.runtime.backend import DriverBackend
from gpurt.sources.dxgi_calls import DESCRIBED, DxgiError

FIXTURES = Path(__file__).parents[1] / "fixtures"


def cpu() -> GPUBackend:
    """Two devices; without a pool, which would hide the driver from the kit. Smaller chunks than users have, so that
    the kit's copies cross their borders and can be cancelled between two."""
    return DriverBackend(DirectMLDriver(device_type="cpu", devices=2, largest_chunk=512 << 10), pool_bytes=0)


def cpu_as_users_have_it() -> GPUBackend:
    return DirectMLBackend(device_type="cpu")


def recorded(name: str) -> dict[str, Any]:
    """The table of a recorded Windows machine."""
    return json.loads((FIXTURES / name / "tables/dxgi.json").read_text())


class RecordedAdapter:
    """:class:`gpurt.sources.dxgi_calls.DxgiAdapterCalls` over a row of a table."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row, self.closed = row, 0

    def description(self) -> Mapping[str, int | str]:
        return {key: self.row[key] for key in DESCRIBED if key in self.row}

    def memory(self, group: int) -> tuple[int, int]:
        kind = ("local", "non_local")[group]
        return self._told(f"{kind}_budget_bytes"), self._told(f"{kind}_usage_bytes")

    def pci_location(self) -> tuple[int, int, int]:
        return self._told("pci_bus"), self._told("pci_device"), self._told("pci_function")

    def driver_version(self) -> str:
        return self.row["driver_version"]

    def close(self) -> None:
        self.closed += 1

    def _told(self, key: str) -> int:
        if key not in self.row:
            raise DxgiError(key, 0x887A0004)  # DXGI_ERROR_UNSUPPORTED
        return self.row[key]


class RecordedDxgi:
    """:class:`gpurt.sources.dxgi_calls.DxgiCalls` over a table. Its rows may be changed meanwhile."""

    size_bits = 64

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows
        self.opened: list[RecordedAdapter] = []
        self.factories = 0

    def __call__(self) -> RecordedDxgi:
        self.factories += 1
        return self

    def adapter(self, index: int) -> RecordedAdapter | None:
        if index >= len(self.rows):
            return None
        self.opened.append(RecordedAdapter(self.rows[index]))
        return self.opened[-1]

    def preferred(self, index: int, preference: int) -> RecordedAdapter | None:
        return self.adapter(index)

    def close(self) -> None:
        self.factories -= 1

    @property
    def left_open(self) -> int:
        return sum(adapter.closed != 1 for adapter in self.opened)


class FakeTensor:
    """A tensor in DirectML's memory: ONNX Runtime's own, on the CPU, but `numpy()` is a copy, as it is there."""

    def __init__(self, real: Any, ordinal: int) -> None:
        self.real, self.ordinal = real, ordinal

    def numpy(self) -> Any:
        return self.real.numpy().copy()

    def update_inplace(self, content: Any) -> None:
        self.real.update_inplace(content)


class FakeRuntime:
    """``onnxruntime-directml`` as far as a driver sees it; bytes and sessions are those of the real CPU library.

    Args:
        sick: ordinals of adapters on which no session can be made.
        silent: make sessions on the CPU, whatever is asked for.
    """

    __version__ = "1.24.4"

    def __init__(self, *, sick: Sequence[int] = (), silent: bool = False, providers: Sequence[str] | None = None):
        self.sick, self.silent = sick, silent
        self.providers = list(providers or ("DmlExecutionProvider", "CPUExecutionProvider"))
        self.sessions: list[int] = []
        self.made: list[tuple[int, int]] = []
        self.copied: list[int] = []
        self.failure: Exception | None = None
        self.OrtValue = SimpleNamespace(ortvalue_from_shape_and_type=self._tensor)
        self.real = load("cpu")
        self.SessionOptions = self.real.SessionOptions
        self.ExecutionMode = self.real.ExecutionMode
        self.GraphOptimizationLevel = self.real.GraphOptimizationLevel

    def get_available_providers(self) -> list[str]:
        return self.providers

    def _tensor(self, shape: list[int], dtype: Any, device_type: str, ordinal: int) -> FakeTensor:
        assert device_type == "dml"
        if self.failure is not None:
            raise self.failure
        self.made.append((ordinal, shape[0]))
        return FakeTensor(self.real.OrtValue.ortvalue_from_shape_and_type(shape, dtype, "cpu", 0), ordinal)

    def InferenceSession(self, model: bytes, options: Any, *, providers: Any, enable_fallback: int) -> Any:
        [(provider, settings)] = providers
        assert provider == "DmlExecutionProvider"
        assert (options.enable_mem_pattern, options.execution_mode.name, enable_fallback) == (
            False,
            "ORT_SEQUENTIAL",
            0,
        )
        ordinal = int(settings["device_id"])
        if ordinal in self.sick:
            raise RuntimeError(f"D:\\a\\_work\\1\\s\\dml_provider_factory.cc(90): 80070057 adapter {ordinal}\nand more")
        self.sessions.append(ordinal)
        return FakeSession(self, model, options, ordinal)


class FakeSession:
    def __init__(self, runtime: FakeRuntime, model: bytes, options: Any, ordinal: int) -> None:
        self._runtime, self._ordinal = runtime, ordinal
        self._real = runtime.real.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"] if self._runtime.silent else self._runtime.providers

    def io_binding(self) -> Any:
        real, ordinal = self._real.io_binding(), self._ordinal

        def bound(bind: Any) -> Any:
            def call(name: str, tensor: FakeTensor) -> None:
                assert tensor.ordinal == ordinal, "a tensor of another adapter"
                bind(name, tensor.real)

            return call

        return SimpleNamespace(
            real=real,
            bind_ortvalue_input=bound(real.bind_ortvalue_input),
            bind_ortvalue_output=bound(real.bind_ortvalue_output),
            synchronize_outputs=real.synchronize_outputs,
            clear_binding_inputs=real.clear_binding_inputs,
            clear_binding_outputs=real.clear_binding_outputs,
        )

    def run_with_iobinding(self, binding: Any) -> None:
        self._runtime.copied.append(self._ordinal)
        self._real.run_with_iobinding(binding.real)


def windows(
    monkeypatch: pytest.MonkeyPatch, rows: Sequence[dict[str, Any]], runtime: FakeRuntime | None = None, **options: Any
) -> tuple[DirectMLDriver, FakeRuntime, RecordedDxgi]:
    """A driver on a Windows with those adapters, and what it runs on."""
    runtime, dxgi = runtime or FakeRuntime(), RecordedDxgi(rows)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    return DirectMLDriver(platform="win32", wheels="win-amd64", open_dxgi=dxgi, **options), runtime, dxgi
