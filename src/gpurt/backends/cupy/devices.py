"""How devices are found through CuPy's binding of the runtime, whoever made them."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from gpurt.backends.cupy.loading import load_runtime, said_first
from gpurt.backends.cupy.record import Answers
from gpurt.driver import Driver
from gpurt.errors import BackendUnavailable
from gpurt.identity import normalize_pci_address
from gpurt.types import GPUDevice, Telemetry

log = logging.getLogger("gpurt.cupy")


class Contexts(Protocol):
    """Makes device contexts ahead of CuPy, which holds the GIL while it does."""

    def prepare(self) -> None: ...
    def properties(self, index: int) -> dict[str, Any] | None: ...
    def retain(self, index: int) -> None: ...
    def release(self) -> None: ...


class CuPyDevices(Driver):
    """Opens the runtime and asks it about its devices; a vendor says whom to ask besides, and why there are none."""

    hip: ClassVar[bool]
    """Whether CuPy must be built for AMD's HIP; else for CUDA."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self._runtime: Any = None
        self.recent = 0
        """The device that was selected last, by any thread."""

    def open(self) -> Sequence[GPUDevice]:
        try:
            self._runtime = load_runtime(self.name, hip=self.hip, install_hint=self.install_hint())
        except BackendUnavailable as exc:
            first = self.trouble()
            if first is None:
                raise
            raise said_first(first, exc) from exc
        try:
            self.look()
            self._contexts.prepare()
            try:
                count: int = self._runtime.getDeviceCount()
            except self._runtime.CUDARuntimeError as exc:
                raise self.refusal(exc) from exc
            if not count:
                raise self.refusal(None)
            devices = tuple(self.describe(index) for index in range(count))
            self.opened(devices)
            return devices
        except BaseException:
            self.close()
            raise

    # What vendors tell

    @abstractmethod
    def install_hint(self) -> str:
        """The command that installs CuPy here."""

    def look(self) -> None:
        """Ask the system's own sources about the devices, once CuPy is loaded and before it counts them."""

    @abstractmethod
    def trouble(self) -> BackendUnavailable | None:
        """What the system has against every library. Asked where CuPy cannot be loaded, without ``look``."""

    @abstractmethod
    def refusal(self, exc: Any) -> BackendUnavailable:
        """What it means that the runtime refuses to count devices with ``exc``, or counts none: ``exc`` is None."""

    @abstractmethod
    def describe(self, index: int) -> GPUDevice:
        """The record of a device. What the runtime raises for it makes it unusable, and is not raised."""

    @abstractmethod
    def opened(self, devices: Sequence[GPUDevice]) -> None:
        """Everything worked; ``devices`` are in index order."""

    # For vendors

    def ask(self, index: int) -> Answers:
        """What the runtime says of a device, before anything is done with it. Makes no context."""
        runtime = self._runtime
        address: str | None = None
        properties: dict[str, Any] = {}
        try:
            address = normalize_pci_address(runtime.deviceGetPCIBusId(index))
            properties = self._contexts.properties(index) or runtime.getDeviceProperties(index)
        except runtime.CUDARuntimeError as exc:
            return Answers(address, properties, failure=str(exc))
        return Answers(address, properties)

    def memory_at_open(self, index: int, total: int | None, free: int | None) -> tuple[int | None, int | None]:
        """Total and free bytes of a device that answers. ``free`` is what other sources say: the runtime is asked only
        where they do not, because asking it makes a context."""
        if free is None:
            try:
                free, _ = self.memory_info(index)
            except self._runtime.CUDARuntimeError as exc:
                log.warning("%s:%d does not tell its free memory: %s", self.name, index, exc)
                return total, None
        # Others count what the driver keeps for itself in their totals, the runtime does not.
        return total, free if total is None else min(free, total)

    def memory_info(self, index: int) -> tuple[int, int]:
        """Free and total bytes of a device. Makes its context."""
        free, total = self.select(index).memGetInfo()
        return free, total

    def plain_telemetry(self, index: int) -> Telemetry:
        """A reading of what the runtime alone tells, its memory. Makes its context."""
        fields = self.memory_fields(index)
        others = sorted(self.capabilities.telemetry - fields.keys())
        return Telemetry(**fields, unavailable=dict.fromkeys(others, "unsupported"))

    def memory_fields(self, index: int) -> dict[str, int]:
        """Of :class:`Telemetry`, as the runtime tells them to this process."""
        free, total = self.memory_info(index)
        return {"memory_total_bytes": total, "memory_used_bytes": total - free, "memory_free_bytes": free}

    def select(self, index: int) -> Any:
        """Make ``index`` the calling thread's device; returns the runtime."""
        self._contexts.retain(index)
        self._runtime.setDevice(index)
        self.recent = index
        return self._runtime
