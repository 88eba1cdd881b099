"""An answer that was verified, kept for as long as what it rests on stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from gpurt.discovery.assemble import BackendAnswer, same_card
from gpurt.discovery.wire import ProbeOutcome
from gpurt.types import DeviceState, GPUDevice

MAX_ANSWERS: Final = 8
"""Per backend. Workers of one host that have a card each, by CUDA_VISIBLE_DEVICES, share a registry: with one answer
they would drive out each other's."""


class Remembered(BaseModel):
    """One backend's devices under one signature (:mod:`gpurt.discovery.signature`)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    signature: str = Field(min_length=1)
    devices: tuple[GPUDevice, ...] = Field(min_length=1)
    """As the driver described them when they passed verification."""


def worth_remembering(name: str, outcome: ProbeOutcome, answer: BackendAnswer) -> Remembered | None:
    """What to keep of a probe: something only if every device is verified and usable, or hidden on purpose."""
    if outcome.signature is None or not outcome.verified:
        return None
    if not all(_is_sound(device) or device.stable_id in answer.hidden for device in answer.devices):
        return None
    if not all(_can_refresh(name, device, outcome.sighted) for device in outcome.verified):
        return None
    return Remembered(signature=outcome.signature, devices=outcome.verified)


def refreshed(name: str, devices: Sequence[GPUDevice], sighted: Sequence[GPUDevice]) -> tuple[GPUDevice, ...] | None:
    """Remembered devices with the figures of now; None if they are not told for all of them.

    For ``cpu`` reads files under ``/proc`` and ``/sys``.
    """
    if not all(_can_refresh(name, device, sighted) for device in devices):
        return None
    return tuple(_of_host(device) if name == "cpu" else _of_card(device, sighted) for device in devices)


def _can_refresh(name: str, device: GPUDevice, sighted: Sequence[GPUDevice]) -> bool:
    if name == "cpu":
        # Of our own driver only: another's record of the processor may mean other figures.
        return device.backend_name == "numpy"
    return any(same_card(device, card) and card.memory_available is not None for card in sighted)


def _is_sound(device: GPUDevice) -> bool:
    known = device.identity is not None and device.identity.stable and not device.simulated
    # A device without free memory is usable and carries the reason why it could not be verified.
    return known and device.usable and device.state is DeviceState.HEALTHY and not device.state_reason


def _of_card(device: GPUDevice, sighted: Sequence[GPUDevice]) -> GPUDevice:
    card = next(card for card in sighted if same_card(device, card))
    free = card.memory_available
    if free is not None and device.memory_bytes is not None:
        # NVML counts in its total, and so in what is free, what the driver keeps for itself. CUDA does not.
        free = min(free, device.memory_bytes)
    update = {"memory_available": free, "driver_version": card.driver_version or device.driver_version}
    if device.memory_usable_source == "driver":
        update["memory_usable_bytes"] = free
    return device.model_copy(update=update)


def _of_host(device: GPUDevice) -> GPUDevice:
    from gpurt.sources.host import cpu_count, memory_budget

    memory = memory_budget()
    return device.model_copy(
        update={
            "memory_bytes": memory.total_bytes,
            "memory_available": memory.usable_bytes,
            "memory_usable_bytes": memory.usable_bytes,
            "memory_usable_source": memory.source,
            "compute_units": cpu_count(),
        }
    )
