"""The environment for a child process that is to see exactly some of the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpurt.errors import DeviceNotFound, Unsupported
from gpurt.visibility.candidates import Candidate
from gpurt.visibility.intel import in_level_zero_order, is_composite
from gpurt.visibility.nvidia import PCI_BUS_ID, by_pci, physical
from gpurt.visibility.resolve import resolve
from gpurt.visibility.variables import (
    CUDA_DEVICE_ORDER,
    CUDA_VISIBLE_DEVICES,
    GGML_VK_VISIBLE_DEVICES,
    GPU_DEVICE_ORDINAL,
    HIP_VISIBLE_DEVICES,
    ROCR_VISIBLE_DEVICES,
    ZE_AFFINITY_MASK,
)

_NONE = "-1"
"""What every one of the libraries takes for "no device"; an empty value is "not set" to some of them."""


def env_for(device_ids: Sequence[str], candidates: Sequence[Candidate], environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with the visibility variables that show a child the given devices, in that order, and no others.

    Devices are named by UUID where they have one. Numbers that the child counts with are its own: the first of
    ``device_ids`` is its device 0 (Level Zero and Vulkan keep their own order).

    Args:
        device_ids: ``device_id`` of candidates, each once; none hides every GPU. Devices of vendors that have no
            variable cannot be hidden.
        candidates: all devices of the machine, as for :func:`gpurt.visibility.resolve`.
        environ: the environment to change, usually this process's own. What it hides stays hidden.

    Raises:
        DeviceNotFound: no candidate has that id, or ``environ`` hides it.
        ValueError: a device is named twice.
        Unsupported: no variable can say it: two MIG devices in one process, a device without a name of its own.
    """
    if len(set(device_ids)) != len(device_ids):
        raise ValueError(f"a device is named twice: {', '.join(device_ids)}")
    hidden = resolve(environ, candidates).hidden
    known = {candidate.device_id: candidate for candidate in candidates}
    for device_id in device_ids:
        if device_id not in known:
            raise DeviceNotFound(f"there is no device {device_id!r}", device_id=device_id, operation="env_for")
        if device_id in hidden:
            raise DeviceNotFound(f"hidden: {hidden[device_id]}", device_id=device_id, operation="env_for")
    wanted = [known[device_id] for device_id in device_ids]
    child = dict(environ)
    # AMD's first: HIP reads CUDA's variable where its own is not set, and NVIDIA's part sets both right.
    _amd(child, [c for c in wanted if c.vendor == "amd"], [c for c in candidates if c.vendor == "amd"])
    _nvidia(child, [c for c in wanted if c.vendor == "nvidia"], [c for c in candidates if c.vendor == "nvidia"])
    _intel(child, [c for c in wanted if c.vendor == "intel"], [c for c in candidates if c.vendor == "intel"])
    if any("vulkan" in candidate.ordinals for candidate in candidates):
        numbers = [str(c.ordinals["vulkan"]) for c in wanted if "vulkan" in c.ordinals]
        child[GGML_VK_VISIBLE_DEVICES] = ",".join(numbers) or _NONE
    return child


def _nvidia(child: dict[str, str], wanted: Sequence[Candidate], all_of_them: Sequence[Candidate]) -> None:
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
        if any(c.partition is not None for c in wanted) or any(c.pci_address is None for c in all_of_them):
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


def _amd(child: dict[str, str], wanted: Sequence[Candidate], all_of_them: Sequence[Candidate]) -> None:
    if not all_of_them:
        return
    child.pop(CUDA_VISIBLE_DEVICES, None)
    uuids = [c.uuid for c in all_of_them]
    unique = all(c.uuid is not None and uuids.count(c.uuid) == 1 for c in wanted)
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
