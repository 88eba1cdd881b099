"""ROCm: known, not yet driven. Refuses with the reason that holds here."""

from __future__ import annotations

from typing import Any, ClassVar

from gpurt.backend import GPUBackend
from gpurt.backends.unavailable import UnavailableDriver
from gpurt.shell import DriverBackend


class ROCmDriver(UnavailableDriver):
    name: ClassVar[str] = "rocm"


class ROCmBackend(DriverBackend):
    """``initialize`` raises ``BackendUnavailable``; ``options`` are those of :class:`DriverBackend`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(ROCmDriver(), **options)


def create() -> GPUBackend:
    """What the factory calls."""
    return ROCmBackend()
