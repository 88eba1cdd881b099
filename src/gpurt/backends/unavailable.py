"""Backends that gpurt knows and has no driver for yet: they refuse with a truthful reason and what to do."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from gpurt.driver import Driver
from gpurt.errors import BackendUnavailable, ReasonCode
from gpurt.types import GPUDevice, Telemetry


class UnavailableDriver(Driver):
    """A driver whose ``open`` always refuses. Subclasses set the four names below."""

    title: ClassVar[str]
    """What people call it: ``ROCm``."""
    library: ClassVar[str]
    """The top-level Python module that it will use."""
    install_hint: ClassVar[str]
    platforms: ClassVar[tuple[str, ...]] = ()
    """Values of ``sys.platform`` on which it can exist at all; empty: everywhere."""

    def __init__(self, *, platform: str = sys.platform) -> None:
        self._platform = platform

    def open(self) -> Sequence[GPUDevice]:
        raise self._refusal()

    def _refusal(self) -> BackendUnavailable:
        if self.platforms and self._platform not in self.platforms:
            return BackendUnavailable(
                f"{self.title} does not exist on {self._platform}, only on {' and '.join(self.platforms)}",
                reason=ReasonCode.WRONG_PLATFORM,
                backend=self.name,
            )
        if importlib.util.find_spec(self.library) is None:
            return BackendUnavailable(
                f"the Python module {self.library} that {self.title} needs is not installed, and this version of "
                f"gpurt has no {self.title} driver yet",
                reason=ReasonCode.NO_LIBRARY,
                install_hint=self.install_hint,
                backend=self.name,
            )
        return BackendUnavailable(
            f"{self.library} is installed, but this version of gpurt has no {self.title} driver yet",
            reason=ReasonCode.NOT_IMPLEMENTED,
            backend=self.name,
        )

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
