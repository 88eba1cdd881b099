"""What exo needs of a device, without exo's types: JSON scalars, sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self

from gpurt.discovery.events import MEMORY_QUANTUM, MEMORY_QUANTUM_BYTES
from gpurt.errors import ReasonCode
from gpurt.types import DeviceKind, DeviceState, GPUDevice

REASON_CHARACTERS = 200
"""Reasons are for people and may quote a driver at length; every node of a cluster keeps this record."""


class HasFigures(Protocol):
    """A device as exo's master has it: :class:`DeviceFigures` or ``NodeDevice``."""

    @property
    def backend(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def unified(self) -> bool: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def memory_total_bytes(self) -> int | None: ...
    @property
    def memory_usable_bytes(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """One device. What nobody knows is None."""

    device_id: str
    """Today's name, ``cuda:0``."""
    stable_id: str
    backend: str
    kind: str
    """``gpu igpu cpu accelerator software unknown``."""
    vendor: str
    name: str
    memory_total_bytes: int | None
    memory_usable_bytes: int | None
    memory_pool_id: str | None
    """Devices of one node with equal ids share this memory."""
    unified: bool
    """Its memory is the host's."""
    healthy: bool
    """An engine may compute on it."""
    reason: str | None
    """Why not."""
    compute_capability: str | None
    bandwidth_gbps: float | None
    """Peak memory bandwidth, GB/s."""
    driver_version: str | None
    uuid: str | None
    pci_address: str | None

    @classmethod
    def of(cls, device: GPUDevice) -> Self:
        identity = device.identity
        healthy = computes(device)
        return cls(
            device_id=device.device_id,
            stable_id=device.stable_id,
            backend=device.backend,
            kind=device.kind.value,
            vendor=device.vendor,
            name=device.name,
            memory_total_bytes=device.memory_bytes,
            memory_usable_bytes=device.memory_usable_bytes,
            memory_pool_id=device.memory_pool_id,
            unified=device.unified_memory,
            healthy=healthy,
            reason=None if healthy else (device.state_reason or device.state.value)[:REASON_CHARACTERS],
            compute_capability=device.compute_capability,
            bandwidth_gbps=device.bandwidth_gbps,
            driver_version=device.driver_version,
            uuid=identity and identity.uuid,
            pci_address=identity and identity.pci_address,
        )

    def differs(self, other: Self | None) -> bool:
        """Whether that is news: anything but a change of usable memory below 64 MiB and 1 % of the whole."""
        if other is None:
            return True
        mine, theirs = self.memory_usable_bytes, other.memory_usable_bytes
        if mine is not None and theirs is not None:
            quantum = max(MEMORY_QUANTUM_BYTES, MEMORY_QUANTUM * (self.memory_total_bytes or 0))
            if abs(mine - theirs) >= quantum:
                return True
        elif mine != theirs:
            return True
        return any(
            getattr(self, name) != getattr(other, name) for name in self.__slots__ if name != "memory_usable_bytes"
        )


def computes(device: GPUDevice) -> bool:
    """Whether exo's engines may compute on it.

    A card that gpurt itself cannot use because its library (CuPy, for example) is not installed counts: exo brings
    libraries of its own, and everything else is known to be well. Simulated devices and software adapters do not.
    """
    if device.simulated or device.kind is DeviceKind.SOFTWARE or device.state is not DeviceState.HEALTHY:
        return False
    return device.usable or (device.state_reason or "").startswith(ReasonCode.NO_LIBRARY.value)


def changed(now: Iterable[DeviceFigures], before: Iterable[DeviceFigures] | None) -> bool:
    """Whether there is something to tell. Devices are recognised by their stable ids; None: nothing was told yet."""
    if before is None:
        return True
    present = {each.stable_id: each for each in now}
    told = {each.stable_id: each for each in before}
    return present.keys() != told.keys() or any(each.differs(told[name]) for name, each in present.items())
