"""A stand-in for CuPy's runtime module as it is built for ROCm, and the machine that it runs on.

It differs from CUDA's as HIP does: no UUID among the properties, instruction sets in place of compute capabilities,
versions counted otherwise, and none of the calls for asynchronous pools.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

from gpurt.sources.amd import read_amd
from tests.support.fake_cuda import MIB, FakeRuntime

FIXTURES = Path(__file__).parents[1] / "fixtures"
NODES = "sys/class/kfd/kfd/topology/nodes"


class FakeHip(FakeRuntime):
    """The GPUs of the tree below ``root``, in the order of its nodes.

    What is allocated is counted in the tree, as the kernel does.
    """

    def __init__(self, root: Path, *, capacity: int | None = None, peers: bool = True) -> None:
        cards = [card for card in read_amd(root).devices if card.rocm_index is not None]
        self._gfx = [card.gfx for card in cards]
        self._addresses = [(card.pci_address or "")[4:] for card in cards]
        whole = capacity or max((card.memory.total_bytes or 0 for card in cards), default=0) or 64 * MIB
        super().__init__(devices=len(cards), capacity=whole, peers=peers, is_hip=True)
        self.driver_version = 70051831
        self._used_files = [
            root / f"sys/class/drm/card{card.card}/device/mem_info_vram_used" for card in cards if card.card is not None
        ]

    def _properties(self, index: int) -> dict[str, Any]:
        return {
            "name": b"AMD Instinct MI210",
            "totalGlobalMem": self.capacity,
            "multiProcessorCount": 104,
            "major": 9,
            "minor": 0,
            "maxThreadsPerBlock": 1024,
            "clockRate": 1700000,
            "memoryClockRate": 1600000,
            "memoryBusWidth": 4096,
            "integrated": 0,
            "gcnArch": 910,
            "gcnArchName": (self._gfx[index] or "gfx000").encode() + b":sramecc+:xnack-",
        }

    def deviceGetPCIBusId(self, index: int) -> str:
        self._check_index(index)
        return self._addresses[index]

    def malloc(self, size: int) -> int:
        with self._lock:
            address = super().malloc(size)
            self._count(self.live[address].device)
            return address

    def free(self, address: int) -> None:
        with self._lock:
            owner = self._owner(address, 1)
            super().free(address)
            self._count(owner)

    def _count(self, device: int | None) -> None:
        if device is None or device >= len(self._used_files):
            return
        used = self.used_bytes(device)
        # In place and always as long: a reader must never find the file empty.
        with open(self._used_files[device], "r+b", buffering=0) as file:
            file.write(f"{used:<20}\n".encode())

    def _no_pools(self, *_: Any) -> NoReturn:
        raise RuntimeError("HIP does not support memory_async")

    mallocAsync = freeAsync = mallocFromPoolAsync = deviceGetDefaultMemPool = memPoolCreate = _no_pools


def recorded(name: str, root: Path) -> Path:
    """A copy of the recorded machine ``name`` in ``root``, with device nodes that may be opened."""
    return Path(shutil.copytree(FIXTURES / name / "root", root, dirs_exist_ok=True))


def two_cards(root: Path, capacity: int) -> Path:
    """The recorded MI210 and a second one like it in the next slot, of ``capacity`` bytes each."""
    recorded("amd-mi210", root)
    drm = root / "sys/class/drm"
    for place in (drm / "card1/device/mem_info_vram_total", drm / "card1/device/mem_info_vram_used"):
        place.write_text(f"{capacity if place.name.endswith('total') else 0:<20}\n")
    shutil.copytree(drm / "card1", drm / "card2")
    _change(drm / "card2/device/uevent", "0000:03:00.0", "0000:04:00.0")
    _change(drm / "card2/device/unique_id", "93bb3629c01aea1c", "93bb3629c01aea1d")
    _change(drm / "card2/device/serial_number", "692231000131", "692231000132")
    os.rename(drm / "card2/device/drm/renderD130", drm / "card2/device/drm/renderD131")
    (root / "dev/dri/renderD131").touch()
    shutil.copytree(root / NODES / "2", root / NODES / "3")
    _change(root / NODES / "3/properties", "location_id 768", "location_id 1024")
    _change(root / NODES / "3/properties", "drm_render_minor 130", "drm_render_minor 131")
    _change(root / NODES / "3/properties", "unique_id 10645161697164847644", "unique_id 10645161697164847645")
    return root


def _change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text, f"{file} has no {old!r}"
    file.write_text(text.replace(old, new))
