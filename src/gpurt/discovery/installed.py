"""What is installed for a backend, as far as it shows without loading anything.

When this changes, somebody has installed, updated or removed a driver or a library, and every reason for not asking
the backend is out of date: a crash is remembered for the driver that crashed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gpurt.discovery.signature import package_stamp

_KERNEL_FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "cuda": ("proc/driver/nvidia/version", "sys/module/nvidia/version"),
    "rocm": ("sys/module/amdgpu/version", "sys/module/amdgpu/srcversion", "dev/kfd"),
    "vulkan": ("sys/module/nvidia/version", "sys/module/amdgpu/srcversion", "sys/module/i915/srcversion"),
}
_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "cuda": ("cupy_backends", "pynvml"),
    "rocm": ("cupy_backends",),
    "metal": ("mlx",),
    "directml": ("onnxruntime",),
    "tflite": ("ai_edge_litert", "tflite_runtime", "tensorflow"),
    "vulkan": ("vulkan",),
    "opencl": ("pyopencl",),
}


def installed_mark(name: str, *, root: Path = Path("/")) -> str:
    """A short text that stays the same while nothing is installed or removed. Blocking, under a millisecond.

    Args:
        root: where ``/proc``, ``/sys`` and ``/dev`` are found.
    """
    importlib.invalidate_caches()  # or a package that was installed a moment ago is not seen
    basis: dict[str, Any] = {
        "kernel": platform.release(),
        "files": [_content(root / file) for file in _KERNEL_FILES.get(name, ())],
        "packages": [_stamp(module) for module in _MODULES.get(name, ())],
    }
    return hashlib.sha256(json.dumps(basis, sort_keys=True).encode()).hexdigest()[:16]


def _content(file: Path) -> str | None:
    try:
        return file.read_text(errors="replace")[:512] if file.is_file() else str(file.exists())
    except OSError as exc:
        return type(exc).__name__


def _stamp(module: str) -> list[Any] | str | None:
    try:
        return package_stamp(module)
    except (ImportError, ValueError, OSError) as exc:  # half removed, or in the middle of being installed
        return type(exc).__name__
