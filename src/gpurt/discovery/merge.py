"""One record per physical device, from the records of every backend. Pure.

Records of different drivers are the same device when they agree on PCI address and partition; else, where one lacks
the address, on UUID; else, where one has no identity at all, on name and memory. Records of one driver are never
merged: a key that two of them share says nothing there and is ignored. Two records without identity are never
merged either, but a vendor's only such record joins that vendor's only device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from gpurt.discovery.sight_names import MANAGEMENT
from gpurt.errors import ReasonCode
from gpurt.types import DeviceIdentity, DeviceKind, DeviceState, GPUDevice

MEMORY_TOLERANCE: Final = 0.05
"""APIs differ in what they count as total: reserved memory, ECC, firmware."""
MEMORY_TOLERANCE_BYTES: Final = 512 << 20

_FILLED: Final = (
    "compute_capability",
    "memory_bytes",
    "memory_available",
    "compute_units",
    "clock_rate_mhz",
    "bandwidth_gbps",
    "driver_version",
    "numa_node",
)
"""Fields that any source may fill."""

_HIDDEN: Final = ReasonCode.HIDDEN_BY_ENVIRONMENT.value

_NOT_PHYSICAL: Final = frozenset({DeviceKind.CPU, DeviceKind.SOFTWARE})


@dataclass(slots=True)
class _Record:
    device: GPUDevice
    source: tuple[str, str]
    pci: tuple[str, str | None] | None
    uuid: str | None

    @property
    def anonymous(self) -> bool:
        return self.pci is None and self.uuid is None


def merge(
    backends: Iterable[Sequence[GPUDevice]], *, priority: Sequence[str], hidden: Set[str] = frozenset()
) -> tuple[GPUDevice, ...]:
    """Merge the records of all backends, one sequence for each.

    Args:
        priority: backend names, the preferred one first; others come after them.
        hidden: stable ids that no backend may show as usable.

    Returns the devices in order of priority, then of their backend.
    """
    rank = {name: position for position, name in enumerate(priority)}
    sources = sorted(
        (source for devices in backends for source in _by_source(devices)),
        # What only the system shows comes last: it must not be the face of a usable device.
        key=lambda source: (rank.get(source[0].source[0], len(rank)), source[0].source[1] in MANAGEMENT),
    )
    groups: list[list[_Record]] = []
    for source in sources:
        _place(source, groups)
    merged = [_merged(group, hidden) for group in groups]
    return tuple(sorted(merged, key=lambda device: rank.get(device.backend, len(rank))))


def _by_source(devices: Sequence[GPUDevice]) -> list[list[_Record]]:
    """Records by driver, with the keys that collide inside one driver taken away."""
    by_source: dict[tuple[str, str], list[_Record]] = {}
    for device in devices:
        source = (device.backend, device.backend_name)
        by_source.setdefault(source, []).append(_record(device, source))
    for records in by_source.values():
        pcis = Counter(record.pci for record in records)
        uuids = Counter(record.uuid for record in records)
        for record in records:
            record.pci = record.pci if pcis[record.pci] == 1 else None
            record.uuid = record.uuid if uuids[record.uuid] == 1 else None
    return list(by_source.values())


def _record(device: GPUDevice, source: tuple[str, str]) -> _Record:
    identity = device.identity
    if identity is None or device.kind in _NOT_PHYSICAL:
        return _Record(device, source, None, None)
    pci = (identity.pci_address, identity.partition) if identity.pci_address else None
    return _Record(device, source, pci, _bare(identity.uuid))


def _bare(uuid: str | None) -> str | None:
    """Vulkan gives the 16 bytes that NVML prints as ``GPU-…``. A partition's UUID is its own."""
    return re.sub(r"^gpu-|-", "", uuid.lower()) if uuid else None


def _place(records: Sequence[_Record], groups: list[list[_Record]]) -> None:
    """Put each record of one driver into the group of its device, or into a new one."""
    older = list(groups)
    taken: set[int] = set()
    for record in records:
        if record.device.kind in _NOT_PHYSICAL:
            candidates: list[int] = []
        elif record.anonymous:
            candidates = _by_appearance(record, records, older)
        else:
            candidates = [i for i, group in enumerate(older) if _same_key(record, group)]
            if not candidates:
                candidates = [
                    i
                    for i, group in enumerate(older)
                    if all(other.anonymous for other in group)
                    and _is_physical(group)
                    and _looks_alike(record.device, group[0].device)
                    and sum(_looks_alike(other.device, group[0].device) for other in records) == 1
                ]
        free = [i for i in candidates if i not in taken]
        if len(free) == 1:
            taken.add(free[0])
            older[free[0]].append(record)
        else:
            groups.append([record])


def _same_key(record: _Record, group: Sequence[_Record]) -> bool:
    for other in group:
        if record.pci and other.pci:
            if record.pci == other.pci:
                return True
        elif record.uuid and record.uuid == other.uuid:
            return True
    return False


def _by_appearance(record: _Record, records: Sequence[_Record], groups: Sequence[Sequence[_Record]]) -> list[int]:
    """Groups that an anonymous record may belong to: exactly one, or it stays alone."""
    known = [i for i, group in enumerate(groups) if _is_physical(group) and not all(other.anonymous for other in group)]
    alike = [i for i in known if _looks_alike(record.device, groups[i][0].device)]
    rivals = [other for other in records if other.anonymous and _looks_alike(other.device, record.device)]
    if len(alike) == 1 and len(rivals) == 1:
        return alike
    vendor = record.device.vendor
    of_vendor = [i for i in known if groups[i][0].device.vendor == vendor]
    nameless = [other for other in records if other.anonymous and other.device.vendor == vendor]
    return of_vendor if vendor != "unknown" and len(of_vendor) == 1 and len(nameless) == 1 else []


def _is_physical(group: Sequence[_Record]) -> bool:
    return group[0].device.kind not in _NOT_PHYSICAL


def _looks_alike(a: GPUDevice, b: GPUDevice) -> bool:
    if _plain_name(a.name) != _plain_name(b.name) or a.memory_bytes is None or b.memory_bytes is None:
        return False
    tolerance = max(MEMORY_TOLERANCE_BYTES, MEMORY_TOLERANCE * max(a.memory_bytes, b.memory_bytes))
    return abs(a.memory_bytes - b.memory_bytes) <= tolerance


def _plain_name(name: str) -> str:
    """Without what drivers add: ``NVIDIA GeForce RTX 3090 (NVK)``, ``AMD Radeon RX 7900 XTX (RADV NAVI31)``."""
    plain = re.sub(r"\([^)]*\)", "", name).lower()
    return " ".join(word for word in plain.split() if word not in ("nvidia", "amd", "intel", "corporation"))


def _merged(group: Sequence[_Record], hidden: Set[str]) -> GPUDevice:
    devices = [record.device for record in group]
    face = next((device for device in devices if device.usable), devices[0])
    update: dict[str, Any] = {"backends": tuple(dict.fromkeys(device.backend for device in (face, *devices)))}
    for field in _FILLED:
        if getattr(face, field) is None:
            # A later source may know what the first does not. 0 is never known, so it cannot win here.
            update[field] = next((value for device in devices if (value := getattr(device, field))), None)
    if face.kind is DeviceKind.UNKNOWN:
        update["kind"] = next((device.kind for device in devices if device.kind is not face.kind), face.kind)
    update["identity"] = _identity(face, devices)
    unfit = next(filter(_is_unfit, devices), None)
    if unfit is not None:
        update |= {"usable": False, "state": unfit.state, "state_reason": unfit.state_reason}
    masked = [device for device in devices if device.stable_id in hidden]
    if masked:
        # The record that was hidden knows why; others of the same name may not.
        told = min(masked, key=lambda device: not (device.state_reason or "").startswith(_HIDDEN))
        update |= {"usable": False, "state_reason": told.state_reason}
    return face.model_copy(update=update)


def _is_unfit(device: GPUDevice) -> bool:
    """Broken, whoever uses it. That one interface failed in its verification says nothing about the others."""
    broken = device.state in (DeviceState.LOST, DeviceState.DEGRADED)
    return broken and not (device.state_reason or "").startswith("failed verification")


def _identity(face: GPUDevice, devices: Sequence[GPUDevice]) -> DeviceIdentity | None:
    """The vendor's own name for the device, else the face's, else any that lasts; with the address if anybody tells."""
    known = [device.identity for device in devices if device.identity is not None]
    named = [each for each in known if each.stable and each.uuid is not None and each.key.startswith(each.uuid)]
    own = [face.identity] if face.identity is not None and face.identity.stable else []
    best = next(iter((*named[:1], *own, *(each for each in known if each.stable))), face.identity)
    if best is None or best.pci_address is not None:
        return best
    return best.model_copy(update={"pci_address": next((each.pci_address for each in known if each.pci_address), None)})
