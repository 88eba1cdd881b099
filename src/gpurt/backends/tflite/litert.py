"""LiteRT's compiled models (``ai_edge_litert`` 2): tensor buffers where the accelerator wants them.

Facts of version 2.3: a buffer outlives its model; making one takes 3 µs, compiling its model 0.5 ms and a line of log
on stderr, which no switch turns off; ``read`` and ``write`` have no offset; they hold the GIL, 0.1 ms for a MiB.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from gpurt.backends.tflite.model import ROW_BYTES, is_output, model_of, sample
from gpurt.backends.tflite.runtime import Accelerator, Chunk, ImportModule, failed
from gpurt.errors import ReasonCode
from gpurt.platforms import Platform
from gpurt.runtime.allocator import size_class

if TYPE_CHECKING:
    from gpurt.backends.tflite.runtime import Bytes

_HOST_MEMORY: Final = 1
"""``kLiteRtTensorBufferTypeHostMemory``, ``litert/c/litert_tensor_buffer_types.h``."""

_HERE: Final = os.path.dirname(os.path.abspath(__file__))
_NO_PLUGINS: Final = _HERE if os.path.isdir(_HERE) else ""
"""Where LiteRT looks for vendors' NPU compilers: a folder without any. In its own it finds and loads them all, again
for each model, with 30 lines of log; and it looks there when it is told none, which is all that is left in an archive.
"""

_HINTS: Final = {
    "linux": "it needs a Vulkan driver that Dawn accepts, which Mesa's software ones are not; its reason is in what "
    "`python -m gpurt.discovery.probe_child tflite` writes to stderr",
    "android": "it needs the device's OpenCL: declare <uses-native-library> libOpenCL.so in the app's manifest",
}
_HINT: Final = "update the GPU's driver; the reason is in what LiteRT writes to stderr"


class LiteRT:
    """A :class:`gpurt.backends.tflite.runtime.TensorRuntime`.

    Raises:
        ImportError: not installed, or older than 2.0. BackendUnavailable: the accelerator cannot be used.
    """

    name = "ai_edge_litert"
    # Writing in such pieces is as fast as in one, in smaller ones up to 15 % slower. Reading is twice as fast, because
    # what is read is new memory, which stays in the cache. The GIL is held for half a millisecond.
    chunk_bytes = 4 << 20

    def __init__(self, accelerator: Accelerator, platform: Platform, import_module: ImportModule) -> None:
        self._module = import_module("ai_edge_litert.compiled_model")
        self.version = _version()
        wanted = self._module.HardwareAccelerator
        self._hardware = wanted.GPU if accelerator == "gpu" else wanted.CPU
        self._models: dict[int, Any] = {}
        self._environment: Any = None
        try:
            options = self._module.EnvironmentOptions(
                compiler_plugin_path=_NO_PLUGINS, dispatch_library_path=_NO_PLUGINS
            )
            self._environment = self._module.Environment.create(options=options)
            try:
                works = self._run()
            except RuntimeError as exc:
                text = f"LiteRT's {accelerator.upper()} accelerator cannot be used"
                raise failed(text, exc, _HINTS.get(platform, _HINT)) from exc
            if not works:
                wrong = RuntimeError("it computes something else than the model says")
                text = f"LiteRT's {accelerator.upper()} accelerator is wrong"
                raise failed(text, wrong, _HINT, ReasonCode.UNSUPPORTED_DEVICE)
            model = self._model(ROW_BYTES)
            self.accelerated = accelerator == "gpu" and bool(model.is_fully_accelerated())
            kinds = model.get_input_buffer_requirements(0).get("supported_types")
            self.on_host = bool(kinds) and kinds[0] == _HOST_MEMORY
        except BaseException:
            self.close()
            raise

    def capacity(self, nbytes: int) -> int:
        # A model for each size would be compiled for each size: these are 80, and waste an eighth of a chunk at most.
        return min(size_class(nbytes), self.chunk_bytes)

    def chunk(self, nbytes: int) -> Chunk:
        [buffer] = self._model(nbytes).create_input_buffers(0)
        return PrefixChunk(buffer, nbytes, whole=not self.on_host)

    def close(self) -> None:
        for model in self._models.values():
            model.close()
        self._models.clear()
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    def _model(self, nbytes: int) -> Any:
        model = self._models.get(nbytes)
        if model is None:
            model = self._module.CompiledModel.from_buffer(
                model_of(nbytes), hardware_accel=self._hardware, environment=self._environment
            )
            self._models[nbytes] = model
        return model

    def _run(self) -> bool:
        """Whether the smallest model gives what it should: a driver may compile what it cannot run."""
        import numpy as np

        model = self._model(ROW_BYTES)
        [source], [target] = model.create_input_buffers(0), model.create_output_buffers(0)
        try:
            x = sample(ROW_BYTES)
            source.write(x)
            model.run_by_index(0, [source], [target])
            return is_output(x, target.read(ROW_BYTES, np.uint8))
        finally:
            source.destroy()
            target.destroy()


class PrefixChunk:
    """A tensor buffer that is read and written from its beginning only.

    Args:
        whole: a write must be of all ``nbytes``. Buffers that are not host memory are locked for writing without
            being fetched, and sent whole when unlocked: what a shorter write left out would be overwritten.
    """

    __slots__ = ("_buffer", "_nbytes", "_whole")

    def __init__(self, buffer: Any, nbytes: int, *, whole: bool) -> None:
        self._buffer, self._nbytes, self._whole = buffer, nbytes, whole

    def write(self, start: int, src: Bytes) -> None:
        import numpy as np

        end = self._nbytes if self._whole else start + src.nbytes
        if src.nbytes != end:
            merged = self._buffer.read(end, np.uint8)
            np.copyto(merged[start : start + src.nbytes], src)
            src = merged
        self._buffer.write(src)

    def read(self, start: int, dst: Bytes) -> None:
        import numpy as np

        np.copyto(dst, self._buffer.read(start + dst.nbytes, np.uint8)[start:])

    def free(self) -> None:
        self._buffer.destroy()


def _version() -> str | None:
    try:
        return version("ai-edge-litert")
    except PackageNotFoundError:  # an app's own build
        return None
