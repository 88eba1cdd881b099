"""The environment for a child process that is to see exactly some of the devices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from gpurt.errors import DeviceNotFound, Unsupported
from gpurt.types import GPUDevice
from gpurt.visibility.candidates import Candidate
from gpurt.visibility.found import candidates_of, hidden_among, unmasked
from gpurt.visibility.intel import COMPOSITE, in_level_zero_order, is_composite
from gpurt.visibility.nvidia import PCI_BUS_ID, by_pci, physical
from gpurt.visibility.resolver import resolve
from gpurt.visibility.variables import (
    CUDA_DEVICE_ORDER,
    CUDA_VISIBLE_DEVICES,
    GGML_VK_VISIBLE_DEVICES,
    GPU_DEVICE_ORDINAL,
    HIP_VISIBLE_DEVICES,
    ROCR_VISIBLE_DEVICES,
    ZE_AFFINITY_MASK,
    ZE_FLAT_DEVICE_HIERARCHY,
)

_NONE = "-1"
"""What every one of the libraries takes for "no device"; an empty value is "not set" to some of them."""


@runtime_checkable
class HasDevices(Protocol):
    """:class:`gpurt.discovery.result.DiscoveryResult`, or anything with its devices."""

    @property
    def devices(self) -> Sequence[GPUDevice]: ...


def env_for(
    device_ids: Sequence[str],
    devices: HasDevices | Iterable[GPUDevice] | Iterable[Candidate],
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """``environ`` with the visibility variables that show a child the given devices, in that order, and no others.

    The variables of every vendor whose devices are there are set at once. Devices are named by UUID where they have
    one. Numbers that the child counts with are its own: the first of ``device_ids`` is its device 0 (Level Zero and
    Vulkan keep their own order).

    Args:
        device_ids: of the devices, or their stable ids (``identity.key``), each device once; none hides every GPU. The
            processor and software adapters are there for every child.
        devices: all devices of the machine: a :class:`~gpurt.discovery.result.DiscoveryResult`, its devices, or
            candidates as for :func:`gpurt.visibility.resolve`.
        environ: the environment to change; None is this process's own. What it hides stays hidden. With the devices
            of a discovery it is the one under which they were found, or one with fewer of them.

    Raises:
        DeviceNotFound: there is no such device (the message names those that there are), or ``environ`` hides it.
        ValueError: a device is named twice.
        TypeError: ``device_ids`` is a text, or ``devices`` are none.
        Unsupported: no variable can say it: two MIG devices in one process, a device without a name of its own, a
            simulated one, or that a GPU of a vendor without variables be hidden.
    """
    if isinstance(device_ids, str):
        raise TypeError(f"device_ids must be a sequence of device ids, such as [{device_ids!r}], not a text")
    environ = os.environ if environ is None else environ
    candidates, records = _described(devices)
    wanted_ids = _known_ids(device_ids, candidates, records)
    if records:
        hidden = hidden_among(records, candidates, environ)
        _check_records(wanted_ids, records)
    else:
        hidden = dict(resolve(environ, candidates).hidden)
    for device_id in wanted_ids:
        if device_id in hidden:
            raise DeviceNotFound(f"hidden: {hidden[device_id]}", device_id=device_id, operation="env_for")
    known = {candidate.device_id: candidate for candidate in candidates}
    wanted = [known[device_id] for device_id in wanted_ids]

    def of(vendor: str) -> tuple[list[Candidate], list[Candidate]]:
        return [c for c in wanted if c.vendor == vendor], [c for c in candidates if c.vendor == vendor]

    # A record does not tell whether others of its vendor were counted before it. A mask is a sign that they were not.
    masked = [name for name in (CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES) if name in environ]
    child = dict(environ)
    # AMD's first: HIP reads CUDA's variable where its own is not set, and NVIDIA's part sets both right.
    _amd(child, *of("amd"), counted=not records or (not masked and len(of("amd")[1]) == 1))
    _nvidia(child, *of("nvidia"), counted=not records or not masked)
    if records and of("intel")[1]:
        # How many tiles a card has is not in its record. So its child counts cards.
        child[ZE_FLAT_DEVICE_HIERARCHY] = COMPOSITE
    _intel(child, *of("intel"))
    if any("vulkan" in candidate.ordinals for candidate in candidates):
        numbers = [str(c.ordinals["vulkan"]) for c in wanted if "vulkan" in c.ordinals]
        child[GGML_VK_VISIBLE_DEVICES] = ",".join(numbers) or _NONE
    return child


def _described(
    devices: HasDevices | Iterable[GPUDevice] | Iterable[Candidate],
) -> tuple[list[Candidate], tuple[GPUDevice, ...]]:
    """Candidates, and the records that they were made of, if any."""
    listed: Iterable[object] = devices.devices if isinstance(devices, HasDevices) else devices
    each = tuple(listed)
    candidates = [device for device in each if isinstance(device, Candidate)]
    records = tuple(device for device in each if isinstance(device, GPUDevice))
    if (candidates and records) or len(candidates) + len(records) != len(each):
        kinds = ", ".join(sorted({type(device).__name__ for device in each}))
        raise TypeError(f"devices must be a DiscoveryResult, its devices or candidates, not {kinds}")
    return candidates or candidates_of(records), records


def _known_ids(device_ids: Sequence[str], candidates: Sequence[Candidate], records: Sequence[GPUDevice]) -> list[str]:
    """What was asked for, by device id."""
    by_name = {record.stable_id: record.device_id for record in records}
    by_name |= {each.device_id: each.device_id for each in (*records, *candidates)}
    for device_id in device_ids:
        if device_id not in by_name:
            there_are = ", ".join(dict.fromkeys(by_name.values())) or "none"
            raise DeviceNotFound(
                f"there is no device {device_id!r}; there are: {there_are}", device_id=device_id, operation="env_for"
            )
    wanted = [by_name[device_id] for device_id in device_ids]
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"a device is named twice: {', '.join(device_ids)}")
    return wanted


def _check_records(wanted: Sequence[str], records: Sequence[GPUDevice]) -> None:
    simulated = next((r for r in records if r.simulated and r.device_id in wanted), None)
    if simulated is not None:
        raise Unsupported(
            "a simulated device is not of this machine, so no variable shows it",
            device_id=simulated.device_id,
            operation="env_for",
            hint="let the child make its own: gpurt.testing.create_simulated",
        )
    shown = unmasked(records, wanted)
    if shown is not None:
        raise Unsupported(
            f"no variable hides a GPU of vendor {shown.vendor}, so the child would see {shown.device_id}, too",
            device_id=shown.device_id,
            operation="env_for",
            hint=f"name {shown.device_id} as well, or let the child choose its backend by GPURT_BACKEND",
        )


def _nvidia(
    child: dict[str, str], wanted: Sequence[Candidate], all_of_them: Sequence[Candidate], *, counted: bool
) -> None:
    if not all_of_them:
        return
    if len(wanted) > 1 and any(c.partition is not None for c in wanted):
        raise Unsupported(
            f"CUDA shows one process one MIG device and nothing else, not {len(wanted)} devices",
            operation="env_for",
            hint="start one child for each of them",
        )
    names = [_cuda_name(c, all_of_them) for c in wanted]
    nameless = next((c for c, name in zip(wanted, names, strict=True) if name is None), None)
    if nameless is not None:
        unplaced = any(c.pci_address is None for c in all_of_them)
        if not counted or unplaced or any(c.partition is not None for c in wanted):
            raise Unsupported(
                "no variable can name a device without a UUID of its own, unless all have PCI addresses",
                device_id=nameless.device_id,
                operation="env_for",
            )
        cards = by_pci(physical(all_of_them))
        names = [str(next(i for i, card in enumerate(cards) if c in card)) for c in wanted]
        child[CUDA_DEVICE_ORDER] = PCI_BUS_ID
    child[CUDA_VISIBLE_DEVICES] = ",".join(filter(None, names)) or _NONE


def _cuda_name(candidate: Candidate, others: Sequence[Candidate]) -> str | None:
    """A name that no other device answers to."""
    if candidate.uuid is not None:
        return candidate.uuid if [c.uuid for c in others].count(candidate.uuid) == 1 else None
    if candidate.partition is not None and candidate.parent_uuid is not None:
        return f"MIG-{candidate.parent_uuid}/{candidate.partition}"
    return None


def _amd(
    child: dict[str, str], wanted: Sequence[Candidate], all_of_them: Sequence[Candidate], *, counted: bool
) -> None:
    if not all_of_them:
        return
    child.pop(CUDA_VISIBLE_DEVICES, None)
    uuids = [c.uuid for c in all_of_them]
    nameless = next((c for c in wanted if c.uuid is None or uuids.count(c.uuid) != 1), None)
    unique = nameless is None
    if nameless is not None and not counted:
        raise Unsupported(
            "ROCm tells no UUID of its own for this device, and its number is not in the records",
            device_id=nameless.device_id,
            operation="env_for",
            hint="give candidates in the order of rocminfo: gpurt.visibility.Candidate",
        )
    names = [c.uuid or "" for c in wanted] if unique else [str(list(all_of_them).index(c)) for c in wanted]
    child[ROCR_VISIBLE_DEVICES] = ",".join(names) or _NONE
    child[HIP_VISIBLE_DEVICES] = child[GPU_DEVICE_ORDINAL] = ",".join(str(n) for n in range(len(wanted))) or _NONE


def _intel(child: dict[str, str], wanted: Sequence[Candidate], all_of_them: Sequence[Candidate]) -> None:
    if not all_of_them:
        return
    numbers: list[str] = []
    number = 0
    for candidate in in_level_zero_order(child, all_of_them):
        count = 1 if is_composite(child) else max(1, candidate.tiles)
        if candidate in wanted:
            numbers.extend(str(n) for n in range(number, number + count))
        number += count
    child[ZE_AFFINITY_MASK] = ",".join(numbers) or _NONE
