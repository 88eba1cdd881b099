"""Which way copies between two devices take, from what the backend has found and what NVML knows."""

from __future__ import annotations

from dataclasses import dataclass

from gpurt.backend import GPUBackend
from gpurt.errors import BackendUnavailable
from gpurt.registry.records import LinkType
from gpurt.runtime.protocols import KnowsPeers
from gpurt.types import GPUDevice


@dataclass(frozen=True, slots=True)
class Way:
    """The part of a :class:`~gpurt.registry.records.Link` that is asked and not measured."""

    link_type: LinkType
    link_reason: str | None = None
    wiring: str | None = None
    peer_access: bool | None = None


def peer_access(backend: GPUBackend, src_device_id: str, dst_device_id: str) -> bool | None:
    """What the backend's driver knows after a copy; None where it does not tell."""
    return backend.peer_access(src_device_id, dst_device_id) if isinstance(backend, KnowsPeers) else None


def way_between(src: GPUDevice, dst: GPUDevice, peers: bool | None) -> Way:
    """The way from ``src`` to ``dst``, whose direct access is as told. Blocks: asks NVML."""
    if src.device_id == dst.device_id:
        return Way(LinkType.SAME, peer_access=True)
    kind, wiring, silence = _wiring(src, dst)
    if peers is None:
        return Way(LinkType.UNKNOWN, "the backend does not tell whether its copies go directly", wiring)
    if not peers:
        return Way(LinkType.HOST, "the devices do not reach each other's memory", wiring, False)
    return Way(kind, silence, wiring, True)


def _wiring(src: GPUDevice, dst: GPUDevice) -> tuple[LinkType, str | None, str | None]:
    """What direct copies would take, for people, and why that is not known."""
    addresses = [device.identity.pci_address if device.identity else None for device in (src, dst)]
    if src.simulated or dst.simulated:
        return LinkType.UNKNOWN, None, "simulated devices have no wires"
    if {src.vendor, dst.vendor} != {"nvidia"}:
        return LinkType.UNKNOWN, None, "only NVIDIA's library tells what lies between two devices"
    if addresses[0] is None or addresses[1] is None:
        return LinkType.UNKNOWN, None, "a device does not tell its PCI address"
    from gpurt.sources.nvml_links import read_link

    try:
        link = read_link(addresses[0], addresses[1])
    except BackendUnavailable as exc:
        return LinkType.UNKNOWN, None, f"NVML: {exc.message}"
    if link.nvlink:
        count = link.nvlink_count
        return LinkType.NVLINK, f"{count} NVLink{'s' * (count != 1)}" if count else "NVLink", None
    if link.nvlink is None:
        return LinkType.UNKNOWN, link.ancestor, f"NVML does not tell of NVLinks: {link.unavailable['nvlink']}"
    return LinkType.PCIE, link.ancestor, None
