"""Which TFLite runtime the backend takes: the first that is installed and works with the accelerator, in this order.

1. ``ai_edge_litert``, Google's LiteRT (:mod:`gpurt.backends.tflite.litert`): tensors of compiled models, which lie
   where the accelerator wants them, and an answer to whether all of a model runs there.
2. ``tflite_runtime``, then ``tensorflow``, with the interpreter of old (:mod:`gpurt.backends.tflite.interpreter`):
   tensors in host memory, and a delegate that takes them to the GPU while a model runs.
"""

from __future__ import annotations

from collections.abc import Callable

from gpurt.backends.tflite.interpreter import tensorflow, tflite_runtime
from gpurt.backends.tflite.litert import LiteRT
from gpurt.backends.tflite.runtime import BACKEND, Accelerator, ImportModule, TensorRuntime, no_library
from gpurt.errors import BackendUnavailable
from gpurt.platforms import Platform


def load(
    accelerator: Accelerator, *, platform: Platform, import_module: ImportModule, delegate: str | None
) -> TensorRuntime:
    """The first runtime that is installed and works with ``accelerator``.

    Args:
        delegate: shared library of the GPU delegate for the runtimes that need one; None is TFLite's own name for it.

    Raises:
        BackendUnavailable: ``no_library``: none is installed, or none can be loaded; else what the preferred one of
            those that are installed has against the accelerator.
    """
    makers: tuple[tuple[str, Callable[[], TensorRuntime]], ...] = (
        ("ai_edge_litert", lambda: LiteRT(accelerator, platform, import_module)),
        ("tflite_runtime", lambda: tflite_runtime(accelerator, platform, import_module, delegate)),
        ("tensorflow", lambda: tensorflow(accelerator, platform, import_module, delegate)),
    )
    refusals: list[BackendUnavailable] = []
    for package, make in makers:
        try:
            return make()
        except BackendUnavailable as exc:
            refusals.append(exc)
        except ModuleNotFoundError as exc:
            if exc.name != package:
                refusals.append(_broken(package, exc, platform))
        except Exception as exc:  # whatever a module raises that was built for another Python or NumPy
            refusals.append(_broken(package, exc, platform))
    if not refusals:
        text = "neither LiteRT (ai_edge_litert) nor tflite_runtime nor TensorFlow is installed"
        raise no_library(text, platform)
    first = refusals[0]
    raise BackendUnavailable(
        "; ".join(refusal.message for refusal in refusals),
        reason=first.reason,
        backend=BACKEND,
        install_hint=first.install_hint,
        hint=first.hint,
    ) from first


def _broken(package: str, exc: Exception, platform: Platform) -> BackendUnavailable:
    first_line = next(iter(str(exc).strip().splitlines()), "")
    text = f"{package} is installed and cannot be loaded: {type(exc).__name__}: {first_line}"
    return no_library(text, platform)
