"""Bare ONNX Runtime: ``OrtValue.update_inplace`` and ``numpy``."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

from gpurt.backends.directml.adapters import DxgiAdapters
from gpurt.benchmarks.library_raw import TensorRaw
from gpurt.types import DeviceKind

if TYPE_CHECKING:
    from gpurt.benchmarks.raw import Bytes


class RawONNXRuntime(TensorRaw):
    copy_name = "OrtValue"
    allocation_name = "ortvalue_from_shape_and_type"

    def _open(self) -> None:
        runtime: Any = importlib.import_module("onnxruntime")
        place = ("cpu", 0) if self.device.kind is DeviceKind.SOFTWARE else ("dml", _ordinal(self.index))
        self._make_value = partial(_value, runtime.OrtValue.ortvalue_from_shape_and_type, place)

    def _make(self, nbytes: int) -> Any:
        return self._make_value(nbytes)

    def _drop(self, tensor: Any) -> None: ...

    def _write(self, tensor: Any, src: Bytes) -> None:
        tensor.update_inplace(src)

    def _read(self, tensor: Any, dst: Bytes) -> None:
        import numpy as np

        np.copyto(dst, tensor.numpy())

    def _copy(self, src: Any, dst: Any, nbytes: int) -> None:
        dst.update_inplace(src.numpy())


def _value(make: Any, place: tuple[str, int], nbytes: int) -> Any:
    import numpy as np

    return make([nbytes], np.uint8, *place)


def _ordinal(index: int) -> int:
    """What the library calls the device that is gpurt's ``directml:index``."""
    from gpurt.sources.dxgi_com import open_dxgi

    adapters = DxgiAdapters(open_dxgi)
    adapters.open("")
    try:
        return adapters.ordinal(index)
    finally:
        adapters.close()
