"""Installed packages that decide what discovery finds, and combinations of them that cannot work."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, Final

RELEVANT: Final = re.compile(
    r"gpurt|cupy(-.*)?|nvidia-.*|pynvml|torch|jax(lib)?|numpy|pydantic(-core)?|anyio|psutil|rich|platformdirs|filelock|"
    r"eclipse-zenoh|mlx(-.*)?|onnxruntime(-.*)?|ai-edge-litert|tensorflow(-.*)?|tflite-runtime|vulkan|pyopencl|amdsmi|"
    r"pyamdgpuinfo|safetensors|uvloop|cuda-(python|bindings)|pytest(-.*)?"
)
"""Names as PyPI normalises them."""

_CUPY_WHEEL: Final = re.compile(r"cupy(-cuda\d+x?|-rocm.*)?")
_ONNX_WHEEL: Final = re.compile(r"onnxruntime(-directml|-gpu|-rocm|-openvino)?")


def normalized(name: str) -> str:
    """A name as PyPI compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packages() -> dict[str, Any]:
    """``installed``: versions by name, and ``traps``: sentences, each with the command that helps. Blocking."""
    installed: dict[str, str] = {}
    providers: dict[str, list[str]] = {}
    for distribution in metadata.distributions():
        # Of a distribution that is half removed there may be neither.
        name: str | None = distribution.metadata["Name"] if distribution.metadata else None
        if name is None:
            continue
        installed.setdefault(normalized(name), distribution.version)
    for module, names in metadata.packages_distributions().items():
        if module in ("pynvml", "cupy", "onnxruntime"):
            providers[module] = sorted(set(map(normalized, names)))
    relevant = {name: version for name, version in sorted(installed.items()) if RELEVANT.fullmatch(name)}
    return {"installed": relevant, "traps": traps(installed, providers, _origin("pynvml"))}


def traps(
    installed: Iterable[str], providers: Mapping[str, Sequence[str]], pynvml_origin: str | None = None
) -> list[str]:
    """Combinations that break discovery. Pure.

    Args:
        installed: normalised names of distributions.
        providers: by module, the distributions that brought it.
        pynvml_origin: the file that ``import pynvml`` would load.
    """
    names = sorted(installed)
    found: list[str] = []
    cupy = [name for name in names if _CUPY_WHEEL.fullmatch(name)]
    if len(cupy) > 1:
        found.append(
            f"{' and '.join(cupy)} are both installed and overwrite each other's files: "
            f"pip uninstall -y {' '.join(cupy)}, then install the one that fits the driver"
        )
    onnx = [name for name in names if _ONNX_WHEEL.fullmatch(name)]
    if len(onnx) > 1:
        found.append(
            f"{' and '.join(onnx)} are both installed and overwrite each other's files: "
            f"pip uninstall -y {' '.join(onnx)}, then install one of them"
        )
    shadows = [name for name in providers.get("pynvml", ()) if name != "nvidia-ml-py"]
    if shadows:
        found.append(
            f"the module pynvml comes from {' and '.join(shadows)} and shadows NVIDIA's own: "
            f"pip uninstall -y {' '.join(shadows)} && pip install --force-reinstall nvidia-ml-py"
        )
    elif pynvml_origin is not None and "pynvml" not in providers:
        found.append(
            f"the module pynvml at {pynvml_origin} belongs to no installed package and shadows NVIDIA's own: "
            "remove or rename that file"
        )
    return found


def _origin(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin
