"""AMD GPUs through CuPy for ROCm, with identity, memory and sensors from files of the kernel."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from gpurt.backend import GPUBackend
from gpurt.backends.cupy.driver import CuPyDriver
from gpurt.backends.cupy.hip_context import HipContexts
from gpurt.backends.cupy.rocm_cards import RocmCards
from gpurt.backends.cupy.rocm_record import rocm_record
from gpurt.backends.cupy.rocm_refusals import check_system, install_hint, kernel_trouble, not_counted
from gpurt.backends.cupy.tuning_file import TuningFile
from gpurt.errors import BackendUnavailable
from gpurt.runtime.backend import DriverBackend
from gpurt.sources.amd_telemetry import read_amd_telemetry
from gpurt.types import GPUDevice, Telemetry


class ROCmDriver(CuPyDriver):
    """HIP's devices in HIP's own order, which ROCm's variables decide. Windows needs a CuPy that its user has built.

    ``environ`` explains that order and an empty list (default: the process's own); it selects nothing. ``root`` is
    where ``/sys``, ``/dev`` and ``/proc`` are read from, ``system`` what stands for ``sys.platform``; ``tunings`` is as
    for :class:`CuPyDriver`.
    """

    name: ClassVar[str] = "rocm"
    hip: ClassVar[bool] = True

    def __init__(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        tunings: TuningFile | None = None,
        root: Path = Path("/"),
        system: str = sys.platform,
    ) -> None:
        super().__init__(HipContexts(), tunings)
        self._cards, self._system = RocmCards(root, os.environ if environ is None else environ), system

    def open(self) -> Sequence[GPUDevice]:
        check_system(self._system)
        self._cards.read()
        return super().open()

    def install_hint(self) -> str:
        return install_hint(self._system)

    def trouble(self) -> BackendUnavailable | None:
        return kernel_trouble(self._cards)

    def refusal(self, exc: Any) -> BackendUnavailable:
        return not_counted(exc, self._cards)

    def describe(self, index: int) -> GPUDevice:
        answers = self.ask(index)
        card = self._cards.find(index, answers.pci_address)
        return rocm_record(self, index, answers, card, self._runtime.driverGetVersion(), self._cards.root)

    def telemetry(self, index: int) -> Telemetry:
        card = self._cards.found.get(index)
        return self.plain_telemetry(index) if card is None else read_amd_telemetry(self._cards.root, card)


class ROCmBackend(DriverBackend):
    """AMD GPUs; ``registry_path`` and ``options`` are as for :class:`gpurt.backends.cuda_backend.CUDABackend`."""

    def __init__(self, *, registry_path: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__(ROCmDriver(tunings=TuningFile(registry_path)), **options)


def create() -> GPUBackend:
    """What the factory calls."""
    return ROCmBackend()
