"""What this backend asks of a TFLite runtime: the memory of tensors, because none of them has an allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from gpurt.backends.advice import INSTALL
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.platforms import Platform

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

Accelerator = Literal["gpu", "cpu"]
ImportModule = Callable[[str], Any]
"""As :func:`importlib.import_module`."""

BACKEND: Final = "tflite"
_NO_WHEEL: Final = (
    "PyPI has no LiteRT for {platform}: build the Python package ai_edge_litert or tflite_runtime of LiteRT's sources "
    "for this app and ship it with it; until then use the processor (backend cpu)"
)


class Chunk(Protocol):
    """The memory of one tensor. Ranges are inside it; arrays are flat, contiguous and of unsigned bytes."""

    def write(self, start: int, src: Bytes) -> None:
        """Copy ``src`` to ``start``; the rest of the chunk stays as it is."""
        ...

    def read(self, start: int, dst: Bytes) -> None:
        """Fill ``dst`` from ``start``."""
        ...

    def free(self) -> None:
        """Give it back. Nothing uses it afterwards."""
        ...


class TensorRuntime(Protocol):
    """One runtime on one accelerator, proved by running a model on it. One thread uses it."""

    name: str
    version: str | None
    chunk_bytes: int
    """Allocations are lists of chunks of this size, the last one shorter."""
    accelerated: bool
    """The runtime says that all of a model runs on the GPU."""
    on_host: bool
    """Tensors are plain host memory. Of others the runtime keeps a copy in host memory, made by the first access."""

    def capacity(self, nbytes: int) -> int:
        """How large a chunk it makes for ``nbytes``, at most ``chunk_bytes``."""
        ...

    def chunk(self, nbytes: int) -> Chunk:
        """Memory of ``nbytes``, which is a ``capacity``. Contents are unspecified."""
        ...

    def close(self) -> None:
        """Let go of it. All chunks have been freed."""
        ...


def no_library(text: str, platform: Platform) -> BackendUnavailable:
    """The refusal that a package is missing or unusable, with what to do about it on ``platform``."""
    on_phone = platform in ("android", "ios")
    return BackendUnavailable(
        text,
        reason=ReasonCode.NO_LIBRARY,
        backend=BACKEND,
        install_hint=None if on_phone else INSTALL["tflite"],
        hint=_NO_WHEEL.format(platform={"android": "Android", "ios": "iOS"}[platform]) if on_phone else None,
    )


def failed(text: str, exc: Exception, hint: str, reason: ReasonCode = ReasonCode.NO_DEVICE) -> BackendUnavailable:
    """The refusal that the accelerator cannot be used, with what the library said."""
    return BackendUnavailable(f"{text}: {said(exc)}", reason=reason, backend=BACKEND, hint=hint)


def said(exc: Exception) -> str:
    """What a message of LiteRT says, on one line, without the places in its sources that make up most of it."""
    lines = (line.lstrip("└ ") for line in str(exc).splitlines())
    words = [line for line in lines if line and not (line.startswith("ERROR: [") and line.endswith("]"))]
    return " ".join(words) or "it gives no reason but on stderr"
