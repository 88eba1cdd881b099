"""What NVML knows of the way between two GPUs: NVLinks, and what they share of the PCI tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from gpurt.identity import normalize_pci_address
from gpurt.sources.nvml import open_session
from gpurt.sources.nvml_fields import FieldReader

# nvml.h: nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t, nvmlIntNvLinkDeviceType_t
_P2P_NVLINK, _P2P_OK = 2, 0
_REMOTE_GPU, _REMOTE_SWITCH = 0, 2
_LINKS: Final = 36
"""NVML_NVLINK_MAX_LINKS. Asking for a link that a GPU has not is harmless."""

# nvmlGpuTopologyLevel_t
_ANCESTORS: Final[Mapping[int, str]] = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "one NUMA node",
    50: "several NUMA nodes",
}


@dataclass(frozen=True, slots=True)
class NvmlLink:
    """None is "not told", and ``unavailable`` says why: ``unsupported no_permission error invalid``."""

    nvlink: bool | None = None
    """Whether the GPUs reach each other over NVLink, directly or through switches."""
    nvlink_count: int | None = None
    """Links of the first GPU that are up and lead to the second, or into a switch."""
    ancestor: str | None = None
    """The smallest thing that contains both GPUs, for people: ``one PCIe switch``."""
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])


def read_link(src_address: str, dst_address: str) -> NvmlLink:
    """The way from one GPU to another, by PCI addresses of any spelling. Blocks for microseconds; any thread.

    A GPU that is not there, or lost, costs the answer and not the caller: all of it is unavailable.

    Raises:
        BackendUnavailable: NVML cannot be used.
    """
    with open_session():
        nvml: Any = import_module("pynvml")  # initialised by the session
        fields = FieldReader(nvml)
        src = _handle(fields, src_address)
        dst = _handle(fields, dst_address)
        if src is None or dst is None:
            reason = fields.unavailable["handle"]
            return NvmlLink(unavailable=dict.fromkeys(("nvlink", "nvlink_count", "ancestor"), reason))
        status = fields.read("nvlink", "nvmlDeviceGetP2PStatus", src, dst, _P2P_NVLINK)
        level = fields.read("ancestor", "nvmlDeviceGetTopologyCommonAncestor", src, dst)
        if level is not None and level not in _ANCESTORS:
            fields.unavailable["ancestor"] = "invalid"
        direct, switched = _count(nvml, src, dst_address, fields)
        nvlink = None if status is None else status == _P2P_OK
        if nvlink is None and direct:
            nvlink = True  # a driver too old to be asked
            del fields.unavailable["nvlink"]
        # A GPU has all its links to switches or all to GPUs.
        count = None if direct is None or switched is None else direct or switched
        return NvmlLink(nvlink, count, _ANCESTORS.get(-1 if level is None else level), fields.unavailable)


def _handle(fields: FieldReader, address: str) -> Any:
    normal = normalize_pci_address(address) or address
    return fields.read("handle", "nvmlDeviceGetHandleByPciBusId", normal.encode())


def _count(nvml: Any, src: Any, dst_address: str, fields: FieldReader) -> tuple[int | None, int | None]:
    """Active links to the other GPU, and into switches; None where it is not told what is at their ends."""
    told, direct, switched = False, 0, 0
    wanted = normalize_pci_address(dst_address)
    for number in range(_LINKS):
        link = FieldReader(nvml)
        up = link.read("state", "nvmlDeviceGetNvLinkState", src, number)
        told = told or up is not None
        if not up:
            continue  # down, or none of that number
        kind = link.read("kind", "nvmlDeviceGetNvLinkRemoteDeviceType", src, number)
        if kind == _REMOTE_SWITCH:
            switched += 1
            continue
        remote = link.read("remote", "nvmlDeviceGetNvLinkRemotePciInfo", src, number) if kind == _REMOTE_GPU else None
        address = normalize_pci_address(getattr(remote, "busId", None))
        if address is None:
            fields.unavailable["nvlink_count"] = link.unavailable.get("kind") or link.unavailable.get(
                "remote", "unsupported"
            )
            return None, None
        direct += address == wanted
    if not told:
        fields.unavailable["nvlink_count"] = "unsupported"
        return None, None
    return direct, switched
