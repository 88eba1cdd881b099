"""Backends that gpurt knows and has no driver for yet: they refuse with a truthful reason and what to do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from gpurt.backends.undriven import refusal
from gpurt.driver import Driver
from gpurt.errors import BackendUnavailable
from gpurt.types import GPUDevice, Telemetry


class UnavailableDriver(Driver):
    """A driver whose ``open`` always refuses. Subclasses set ``name``, one of :mod:`gpurt.backends.undriven`."""

    def __init__(self, *, platform: str = sys.platform, root: Path = Path("/")) -> None:
        self._platform = platform
        self._root = root

    def open(self) -> Sequence[GPUDevice]:
        raise self._refusal()

    def _refusal(self) -> BackendUnavailable:
        return refusal(self.name, platform=self._platform, root=self._root)

    # Never reached, because nothing opens; they say the same if somebody does call them.

    def _refuse(self) -> NoReturn:
        raise self._refusal()

    def attach(self, index: int) -> None:
        self._refuse()

    def alloc(self, index: int, nbytes: int) -> Any:
        self._refuse()

    def free(self, index: int, mem: Any) -> None:
        self._refuse()

    def write(self, index: int, mem: Any, offset: int, src: memoryview) -> None:
        self._refuse()

    def read(self, index: int, mem: Any, offset: int, dst: memoryview) -> None:
        self._refuse()

    def copy(
        self, src_index: int, src: Any, src_offset: int, dst_index: int, dst: Any, dst_offset: int, nbytes: int
    ) -> None:
        self._refuse()

    def sync(self, index: int) -> None:
        self._refuse()

    def telemetry(self, index: int) -> Telemetry:
        self._refuse()

    def close(self) -> None:
        """Nothing is open."""
