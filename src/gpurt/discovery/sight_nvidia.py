"""NVIDIA's cards as NVML shows them, and what a cuda probe's answer rests on. Opens no CUDA.

Also those that CUDA cannot use or may not show. First all that identifies them, then how they are: a sensor of a
broken card may never answer, and then at least the cards are known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpurt.discovery.line import ProbeLine, Sighting
from gpurt.discovery.sight_names import NVML
from gpurt.discovery.sight_record import View, doing, failure_line, sighted_device, sighted_line, skipped_notes
from gpurt.discovery.signature import cuda_signature
from gpurt.errors import DeviceLost, GPUError, ReasonCode
from gpurt.identity import device_identity
from gpurt.sources.parallel import ask_each
from gpurt.sources.table import Absence
from gpurt.types import DeviceKind, DeviceState, GPUDevice

if TYPE_CHECKING:
    from gpurt.health import Finding, HealthPolicy
    from gpurt.sources.nvml import NvmlSession
    from gpurt.sources.nvml_device import NvmlDevice
    from gpurt.sources.nvml_table import NvmlInventory

_log = logging.getLogger("gpurt.discovery")

_HEAT: Final = "too_hot"
"""The finding that passes by itself: a card need not be verified anew when it has cooled down."""


def look(view: View) -> Iterator[ProbeLine]:
    """The cards, then the cards with their condition."""
    yield doing("asking NVML")
    if view.tables is not None:
        from gpurt.sources.nvml_table import read_nvml

        recorded = read_nvml(view.table(NVML, dict))
        yield failure_line(recorded.absence) if recorded.absence is not None else _judged(view, recorded)
        return
    from gpurt.sources.nvml import open_session
    from gpurt.sources.nvml_table import NvmlInventory

    try:
        with open_session() as session:
            seen = NvmlInventory(session.devices(view.root), session.driver_version)
            first = _line(view, seen, {})
            yield first
            if seen.devices:
                yield doing("asking NVML for the condition of its devices")
                judged = _judged(view, _with_conditions(session, seen, view))
                if judged != first:  # where nothing is wrong there is nothing to add
                    yield judged
    except Exception as exc:
        yield failure_line(exc)


def _with_conditions(session: NvmlSession, seen: NvmlInventory, view: View) -> NvmlInventory:
    conditions, temperatures = dict(seen.conditions), dict(seen.temperatures)

    def examine(device: NvmlDevice) -> NvmlDevice:
        name = device.pci_address or device.uuid  # a Jetson's GPU is on no bus
        if name is None or device.state is DeviceState.LOST:
            return device
        try:
            conditions[device.index] = session.condition(name)
            celsius = session.telemetry(name, view.root).temperature_c
        except DeviceLost as exc:
            return replace(device, state=DeviceState.LOST, reason=exc.message)
        except Exception as exc:  # it is known which card it is; how it is must not cost that
            _log.info("NVML does not tell how the GPU %s is: %s: %s", name, type(exc).__name__, exc)
            return device
        if celsius is not None:
            temperatures[device.index] = celsius
        return device

    devices = ask_each(examine, seen.devices)
    return replace(seen, devices=tuple(devices), conditions=conditions, temperatures=temperatures)


def _judged(view: View, inventory: NvmlInventory) -> ProbeLine:
    from gpurt.health import Evidence, HealthPolicy, findings

    notes: list[str] = []
    try:
        policy: HealthPolicy = HealthPolicy.from_environ(view.environ)
    except GPUError as exc:
        policy = HealthPolicy()
        notes.append(str(exc))
    found = {
        device.index: findings(
            policy,
            Evidence(
                condition=inventory.conditions.get(device.index),
                temperature_c=inventory.temperatures.get(device.index),
            ),
        )
        for device in inventory.devices
    }
    for index, items in found.items():
        notes.extend(f"{NVML}:{index}: {item.text}" for item in items if item.state is DeviceState.HEALTHY)
    return _line(view, inventory, found, notes)


def _line(
    view: View, inventory: NvmlInventory, found: Mapping[int, tuple[Finding, ...]], notes: list[str] | None = None
) -> ProbeLine:
    if not inventory.devices:
        return sighted_line(
            (),
            none=Absence(ReasonCode.NO_DEVICE, "the NVIDIA driver shows no device"),
            notes=skipped_notes(inventory.skipped),
        )
    version = inventory.driver_version
    # What passes by itself does not make an answer of before worth less.
    sound = [_with_findings(each, found.get(each.index, ()), heat=False) for each in inventory.devices]
    cards = [_with_findings(each, found.get(each.index, ()), heat=True) for each in inventory.devices]
    seen = [pair for card in cards for pair in sighted_devices(card, version, view)]
    return sighted_line(
        [device for device, _ in seen],
        about={device.device_id: about for device, about in seen},
        notes=[*(notes or ()), *skipped_notes(inventory.skipped)],
        signature=None if view.tables is not None else cuda_signature(sound, version, view.environ, root=view.root),
    )


def _with_findings(device: NvmlDevice, found: tuple[Finding, ...], *, heat: bool) -> NvmlDevice:
    """``device`` in the worst state of its own and of what was found."""
    bad = [each for each in found if each.state is not DeviceState.HEALTHY and (heat or each.code != _HEAT)]
    if not bad:
        return device
    from gpurt.health.evidence import SEVERITY

    worst = max((each.state for each in bad), key=SEVERITY.index)
    if SEVERITY.index(worst) <= SEVERITY.index(device.state):
        return device
    return replace(device, state=worst, reason="; ".join(each.text for each in bad))


def sighted_devices(
    record: NvmlDevice, driver_version: str | None, view: View
) -> tuple[tuple[GPUDevice, Sighting], ...]:
    """The records of a card that NVML shows: the card, or its partitions where it is cut into some."""
    fallback = f"{NVML}:{record.name}:{record.index}"
    card = sighted_device(
        # NVML counts in PCI order, CUDA by its own rules: "cuda:0" would be a guess.
        device_id=f"{NVML}:{record.index}",
        name=record.name or "NVIDIA device",
        vendor="nvidia",
        backend="cuda",
        source=NVML,
        identity=device_identity(uuid=record.uuid, pci_address=record.pci_address, fallback=fallback),
        root=view.root,
        kind=DeviceKind.INTEGRATED_GPU if record.unified_memory else DeviceKind.GPU,
        architecture=record.compute_capability,
        memory_bytes=record.memory_total_bytes,
        memory_available=record.memory_free_bytes,
        compute_units=record.multiprocessor_count,
        clock_rate_mhz=record.max_clock_mhz,
        bandwidth_gbps=record.memory_bandwidth_gbps,
        driver_version=driver_version,
        state=record.state,
        state_reason=record.reason,
        unified_memory=record.unified_memory,
        numa_node=record.numa_node,
    )
    if not record.partitions:
        return ((card, Sighting(numbered=True)),)
    parts: list[tuple[GPUDevice, Sighting]] = []
    for position, part in enumerate(record.partitions):
        update: dict[str, Any] = {
            "device_id": f"{card.device_id}/{part.partition or position}",
            "name": part.name or card.name,
            "memory_bytes": part.memory_total_bytes,
            "memory_available": part.memory_free_bytes,
            "compute_units": part.multiprocessor_count,
            "identity": device_identity(
                uuid=part.uuid,
                pci_address=record.pci_address,
                partition=part.partition or str(position),
                fallback=fallback,
            ),
        }
        parts.append((card.model_copy(update=update), Sighting(numbered=True, parent_uuid=record.uuid)))
    return tuple(parts)
