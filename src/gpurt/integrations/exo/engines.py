"""Which of exo's backends a node has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gpurt.integrations.exo.figures import computes
from gpurt.integrations.exo.inputs import CPU_BACKEND
from gpurt.types import GPUDevice

_ENGINES: Final = {"cuda": frozenset({"MlxCuda", "Vllm"}), "metal": frozenset({"MlxMetal"})}
"""Values of exo's ``Backend`` by the backend that shows the device."""


def backends(devices: Iterable[GPUDevice]) -> set[str]:
    """Values of exo's ``Backend`` (``MlxCpu MlxMetal MlxCuda Vllm``) for a node with these devices.

    ``MlxCpu`` is always there. A device counts under every backend that shows it, as long as it is well.
    """
    found = {CPU_BACKEND}
    for device in devices:
        if computes(device):
            for name in (device.backend, *device.backends):
                found |= _ENGINES.get(name, frozenset())
    return found
