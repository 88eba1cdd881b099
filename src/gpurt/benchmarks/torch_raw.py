"""PyTorch's copies, where it is installed and has the device: one more ordinary way. Blocking."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from gpurt.benchmarks.raw import Blocking

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NAMES = {"cpu": "cpu", "cuda": "cuda", "rocm": "cuda"}
"""What PyTorch calls the devices of a backend."""


class TorchCopies:
    """A tensor as large as ``host`` on a device, and copies between the two."""

    def __init__(self, torch: Any, device: str, host: NDArray[np.uint8]) -> None:
        self._torch = torch
        self._on_gpu = not device.startswith("cpu")
        self._device = device
        self._host = torch.from_numpy(host)
        self._tensor = torch.empty(host.nbytes, dtype=torch.uint8, device=device)

    def writer(self) -> Blocking:
        return lambda: self._copy(self._tensor, self._host)

    def reader(self) -> Blocking:
        return lambda: self._copy(self._host, self._tensor)

    def close(self) -> None:
        del self._tensor
        if self._on_gpu:
            self._torch.cuda.empty_cache()

    def _copy(self, to: Any, of: Any) -> None:
        to.copy_(of)
        if self._on_gpu:
            self._torch.cuda.synchronize(self._device)


def load_torch(backend: str) -> Any | None:
    """PyTorch, or None where it is not installed or cannot use the devices of ``backend``. Takes seconds."""
    if backend not in NAMES or importlib.util.find_spec("torch") is None:
        return None
    torch: Any = importlib.import_module("torch")
    return torch if backend == "cpu" or torch.cuda.is_available() else None


def torch_device(backend: str, device_id: str) -> str:
    """PyTorch's name of a device; ``backend`` is one of ``NAMES``."""
    return "cpu" if backend == "cpu" else f"{NAMES[backend]}:{device_id.rpartition(':')[2]}"


def torch_copies(backend: str, device_id: str, host: NDArray[np.uint8]) -> TorchCopies | None:
    torch = load_torch(backend)
    return None if torch is None else TorchCopies(torch, torch_device(backend, device_id), host)


def empty_cache(backend: str) -> None:
    """Let go of what PyTorch keeps on the devices of ``backend``, if it was used."""
    torch = sys.modules.get("torch")
    if torch is not None and NAMES.get(backend) == "cuda":
        torch.cuda.empty_cache()
