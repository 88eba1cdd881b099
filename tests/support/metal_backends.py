"""The Metal backend where there is no Metal: on MLX's CPU device, and on a Mac out of a recording. Importable in child
processes, hence functions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from gpurt.backend import GPUBackend
from gpurt.backends.metal.host import Computer, load_mlx
from gpurt.backends.metal_backend import MetalDriver
from gpurt.errors import ReasonCode
from gpurt.runtime.backend import DriverBackend
from gpurt.sources.apple_tools import ToolAnswer
from gpurt.sources.table import Absence

M4_MAX = Path(__file__).parents[1] / "fixtures/apple-m4-max"
MAC = Computer("darwin", "arm64", os_version="26.1")

_ROOTS = TemporaryDirectory(prefix="gpurt-mac-")


def mac_root(fixture: Path = M4_MAX) -> Path:
    """Where the computer's files are; with the memory that psutil would show there."""
    root = Path(_ROOTS.name) / fixture.name
    if not root.exists():
        shutil.copytree(fixture / "root", root)
        (root / "proc").mkdir()
        (root / "proc/meminfo").write_text("MemTotal: 134217728 kB\nMemAvailable: 120000000 kB\n")
    return root


def recorded(fixture: Path = M4_MAX) -> dict[str, Any]:
    """What macOS's tools and MLX said on that computer."""
    return json.loads((fixture / "tables/apple.json").read_text())


class RecordedTools:
    """Answers for macOS's tools."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._table = table
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str], deadline_s: float, *, partial: bool = False) -> ToolAnswer:
        name = Path(argv[0]).name
        self.asked.append(name)
        text = self._table.get(name)
        if isinstance(text, str):
            return ToolAnswer(text.encode())
        return ToolAnswer(None, Absence(ReasonCode.NO_LIBRARY, f"there is no {argv[0]}"))


class EmulatedMLX:
    """``mlx.core`` of a Mac: the real one here, whose CPU device poses as the GPU that was recorded.

    Raises:
        BackendUnavailable: MLX is not installed.
    """

    def __init__(self, told: Mapping[str, Any]) -> None:
        self._real = load_mlx(Computer("linux", "x86_64"))
        self._told = {key: value for key, value in told.items() if key != "available"}
        self.gpu = self._real.cpu
        self.metal = SimpleNamespace(is_available=lambda: bool(told.get("available")))

    def device_info(self, device: Any) -> Mapping[str, Any]:
        assert device == self.gpu
        return self._told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def emulated_driver(fixture: Path = M4_MAX, **mlx: Any) -> MetalDriver:
    """The driver on a Mac out of a recording; ``mlx`` replaces what MLX said there."""
    table = recorded(fixture)
    told = table["mlx"] | mlx
    return MetalDriver(root=mac_root(fixture), computer=MAC, run=RecordedTools(table), mx=EmulatedMLX(told))


def cpu_driver() -> MetalDriver:
    """The driver on MLX's CPU device, not opened.

    Raises:
        BackendUnavailable: MLX is not installed.
    """
    load_mlx(Computer.this())
    return MetalDriver("cpu")


def _in_small_chunks(driver: MetalDriver) -> GPUBackend:
    # Of chunks as large as the driver's own the kit tests nothing that takes several.
    driver.capabilities = driver.capabilities.model_copy(update={"chunk_bytes": 1 << 20})
    return DriverBackend(driver)


def cpu() -> GPUBackend:
    return _in_small_chunks(MetalDriver("cpu"))


def emulated() -> GPUBackend:
    return _in_small_chunks(emulated_driver())
