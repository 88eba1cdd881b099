"""TFLite's interpreter (``tflite_runtime``, ``tensorflow``): tensors in host memory, and a delegate for the GPU.

A tensor stays in host memory whatever delegate runs the model: memory that is given out here is never the GPU's own,
and ``accelerated`` never claimed. The delegate is asked for once, to see that there is a GPU which it can use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpurt.backends.tflite.model import ROW_BYTES, is_output, model_of, sample
from gpurt.backends.tflite.runtime import Accelerator, Chunk, ImportModule, failed
from gpurt.errors import ReasonCode
from gpurt.platforms import Platform

if TYPE_CHECKING:
    from gpurt.backends.tflite.runtime import Bytes

_DELEGATES: Final = {
    "win32": "tensorflowlite_gpu_delegate.dll",
    "darwin": "libtensorflowlite_gpu_delegate.dylib",
    "ios": "libtensorflowlite_gpu_delegate.dylib",
}
_DELEGATE: Final = "libtensorflowlite_gpu_delegate.so"


def tflite_runtime(
    accelerator: Accelerator, platform: Platform, import_module: ImportModule, delegate: str | None
) -> TFLiteInterpreter:
    """Of the package ``tflite_runtime``.

    Raises:
        ImportError: not installed. BackendUnavailable: as of :class:`TFLiteInterpreter`.
    """
    module = import_module("tflite_runtime.interpreter")
    found = getattr(import_module("tflite_runtime"), "__version__", None)
    runtime = TFLiteInterpreter("tflite_runtime", found, module.Interpreter)
    if accelerator == "gpu":
        runtime.prove(module.load_delegate, delegate or _DELEGATES.get(platform, _DELEGATE))
    return runtime


def tensorflow(
    accelerator: Accelerator, platform: Platform, import_module: ImportModule, delegate: str | None
) -> TFLiteInterpreter:
    """Of the package ``tensorflow``. Raises what :func:`tflite_runtime` does."""
    module = import_module("tensorflow")
    runtime = TFLiteInterpreter("tensorflow", getattr(module, "__version__", None), module.lite.Interpreter)
    if accelerator == "gpu":
        runtime.prove(module.lite.experimental.load_delegate, delegate or _DELEGATES.get(platform, _DELEGATE))
    return runtime


class TFLiteInterpreter:
    """A :class:`gpurt.backends.tflite.runtime.TensorRuntime`. An interpreter a chunk, which takes about 0.2 ms."""

    chunk_bytes = 64 << 20
    accelerated = False
    on_host = True

    def __init__(self, name: str, version: str | None, interpreter: Any) -> None:
        self.name, self.version, self._interpreter = name, version, interpreter

    def prove(self, load_delegate: Any, library: str) -> None:
        """Run the smallest model by the GPU delegate: one that can be made may still fail when it is used.

        Raises:
            BackendUnavailable: it is not there, or does not work.
        """
        import ctypes

        import numpy as np

        try:
            # load_delegate itself leaves an object behind whose finaliser fails, and Python says so on stderr.
            ctypes.CDLL(library)
            delegate = load_delegate(library)
        except (OSError, ValueError) as exc:
            hint = "build TFLite's GPU delegate for this platform and give its path (TFLiteGPUDriver(delegate=…))"
            reason = ReasonCode.NO_LIBRARY if isinstance(exc, OSError) else ReasonCode.NO_DEVICE
            raise failed(f"{self.name} cannot load its GPU delegate", exc, hint, reason) from exc
        hint = "use another backend, or another build of the delegate"
        try:
            interpreter = self._made(ROW_BYTES, [delegate])
            x = sample(ROW_BYTES)
            np.copyto(_memory(interpreter, interpreter.get_input_details()), x)
            interpreter.invoke()
            works = is_output(x, _memory(interpreter, interpreter.get_output_details()))
        except (RuntimeError, ValueError) as exc:
            text = f"{self.name}'s GPU delegate cannot run a model"
            raise failed(text, exc, hint, ReasonCode.UNSUPPORTED_DEVICE) from exc
        if not works:
            wrong = RuntimeError("it computes something else than the model says")
            raise failed(f"{self.name}'s GPU delegate is wrong", wrong, hint, ReasonCode.UNSUPPORTED_DEVICE)

    def capacity(self, nbytes: int) -> int:
        return -(-nbytes // ROW_BYTES) * ROW_BYTES

    def chunk(self, nbytes: int) -> Chunk:
        try:
            # The memory of the other tensor, y, is of the same size and never touched, so it takes none.
            interpreter = self._made(nbytes, None)
        except RuntimeError as exc:
            # With no text, or not: there is nothing else in this model that could fail.
            raise MemoryError(f"{self.name} has no memory for a tensor of {nbytes:,} bytes") from exc
        return HostChunk(_memory(interpreter, interpreter.get_input_details()))

    def close(self) -> None:
        """Interpreters end with their chunks."""

    def _made(self, nbytes: int, delegates: list[Any] | None) -> Any:
        interpreter = self._interpreter(model_content=model_of(nbytes), experimental_delegates=delegates)
        interpreter.allocate_tensors()
        return interpreter


class HostChunk:
    """A tensor of an interpreter, which lives as long as an array over it does."""

    __slots__ = ("_memory",)

    def __init__(self, memory: Bytes) -> None:
        self._memory: Bytes | None = memory

    def write(self, start: int, src: Bytes) -> None:
        import numpy as np

        assert self._memory is not None
        np.copyto(self._memory[start : start + src.nbytes], src)

    def read(self, start: int, dst: Bytes) -> None:
        import numpy as np

        assert self._memory is not None
        np.copyto(dst, self._memory[start : start + dst.nbytes])

    def free(self) -> None:
        self._memory = None


def _memory(interpreter: Any, details: Any) -> Bytes:
    """The tensor's memory, not a copy: ``tensor`` gives a function that gives the array."""
    import numpy as np

    [tensor] = details
    return interpreter.tensor(tensor["index"])().reshape(-1).view(np.uint8)
