"""Bare LiteRT: ``TensorBuffer.write`` and ``read`` on the tensors of a compiled model."""

from __future__ import annotations

import importlib
import tempfile
from typing import TYPE_CHECKING, Any

from gpurt.backends.tflite.model import ROW_BYTES, model_of
from gpurt.benchmarks.library_raw import TensorRaw
from gpurt.types import DeviceKind

if TYPE_CHECKING:
    from gpurt.benchmarks.raw import Bytes


class RawLiteRT(TensorRaw):
    copy_name = "TensorBuffer"
    allocation_name = "create_input_buffers, destroy"
    _environment: Any = None

    def _open(self) -> None:
        litert = self._litert = importlib.import_module("ai_edge_litert.compiled_model")
        wanted: Any = litert.HardwareAccelerator
        self._hardware = wanted.CPU if self.device.kind is DeviceKind.SOFTWARE else wanted.GPU
        self._models: dict[int, Any] = {}
        # Where it finds them, it loads every vendor's compiler for each model.
        self._no_plugins = tempfile.TemporaryDirectory(prefix="gpurt-bench-")
        nowhere = self._no_plugins.name
        options = litert.EnvironmentOptions(compiler_plugin_path=nowhere, dispatch_library_path=nowhere)
        self._environment = litert.Environment.create(options=options)

    def _close(self) -> None:
        super()._close()
        if self._environment is not None:
            while self._models:
                self._models.popitem()[1].close()
            self._environment.close()
            self._environment = None
            self._no_plugins.cleanup()

    def _make(self, nbytes: int) -> Any:
        size = -(-nbytes // ROW_BYTES) * ROW_BYTES
        if size not in self._models:
            self._models[size] = self._litert.CompiledModel.from_buffer(
                model_of(size), hardware_accel=self._hardware, environment=self._environment
            )
        [buffer] = self._models[size].create_input_buffers(0)
        return buffer

    def _drop(self, tensor: Any) -> None:
        tensor.destroy()

    def _write(self, tensor: Any, src: Bytes) -> None:
        tensor.write(src)

    def _read(self, tensor: Any, dst: Bytes) -> None:
        import numpy as np

        np.copyto(dst, tensor.read(dst.nbytes, np.uint8))

    def _copy(self, src: Any, dst: Any, nbytes: int) -> None:
        import numpy as np

        dst.write(src.read(nbytes, np.uint8))
