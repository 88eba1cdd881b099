"""What a probe's answer rests on, in one short text.

While it stays the same, an answer that was verified once still holds, and no driver has to be opened to say so:
``cuInit`` and the contexts of a host with eight GPUs take seconds. Everything here is read from the file system, the
environment and NVML; no vendor library is loaded.

Not covered are faults of which neither NVML nor the system knows. Hence the boot is part of it, and hence
``verify=True`` of :meth:`gpurt.discovery.service.GPUDiscoveryService.discover_all_devices`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpurt.sources.host_identity import boot_id, host_fingerprint
from gpurt.types import DeviceState

if TYPE_CHECKING:
    from gpurt.sources.nvml import NvmlDevice

_PREFIXES: Final = ("CUDA_", "NVIDIA_")
"""Which devices CUDA shows and in what order, MPS, forward compatibility."""
_VARIABLES: Final = frozenset({"LD_LIBRARY_PATH", "LD_PRELOAD"})
"""Which libcuda is found."""


def cuda_signature(
    cards: Sequence[NvmlDevice], driver_version: str | None, environ: Mapping[str, str], *, root: Path = Path("/")
) -> str | None:
    """Of a cuda probe with this environment, or None when it cannot be answered without opening CUDA.

    That is when NVML shows no card, one that is not healthy, or one of which it tells neither identity nor free
    memory; or when CuPy is not installed.
    """
    library = package_stamp("cupy_backends")
    if library is None or not cards or not all(map(_is_known_well, cards)):
        return None
    return _digest(
        root,
        cards=sorted(_card(card) for card in cards),
        driver=driver_version,
        library=library,
        environ=sorted((k, v) for k, v in environ.items() if k.startswith(_PREFIXES) or k in _VARIABLES),
        # NVML works without /dev/nvidia-uvm, CUDA does not.
        nodes=sorted(str(node) for node in (root / "dev").glob("nvidia*") if os.access(node, os.R_OK | os.W_OK)),
    )


def cpu_signature(*, root: Path = Path("/")) -> str | None:
    """Of a cpu probe, or None when NumPy is not installed."""
    library = package_stamp("numpy")
    return None if library is None else _digest(root, library=library)


def package_stamp(module: str) -> list[Any] | None:
    """What changes when the package that holds ``module`` is installed anew, or None without it. Imports nothing.

    Its place, the time and size of its first file, and the metadata folders beside it that are named alike, which
    have name and version in their names (``cupy_cuda12x-13.6.0.dist-info``).
    """
    spec = importlib.util.find_spec(module)
    if spec is None:
        return None
    place = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    if place is None:
        return None
    first = os.stat(place)
    beside = Path(place).parent.parent if spec.origin else Path(place).parent
    stem = module.partition("_")[0]
    metadata = sorted(
        name
        for name in os.listdir(beside)
        if name.lower().startswith(stem) and name.endswith((".dist-info", ".egg-info"))
    )
    return [place, first.st_mtime_ns, first.st_size, metadata]


def _is_known_well(card: NvmlDevice) -> bool:
    parts = card.partitions or (card,)
    told = all(part.memory_free_bytes is not None and (part.uuid or card.pci_address) for part in parts)
    return told and card.state is DeviceState.HEALTHY


def _card(card: NvmlDevice) -> list[Any]:
    parts = sorted([part.uuid or "", part.partition or ""] for part in card.partitions)
    return [card.uuid or "", card.pci_address or "", parts]


def _digest(root: Path, **basis: Any) -> str:
    from gpurt import __version__

    basis |= {
        "gpurt": __version__,
        "python": sys.version,
        "host": host_fingerprint(root),
        "boot": boot_id(root),
    }
    return hashlib.sha256(json.dumps(basis, sort_keys=True).encode()).hexdigest()[:32]
