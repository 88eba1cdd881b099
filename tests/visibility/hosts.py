"""Hosts for the resolver: the devices that a test speaks of, in their vendors' own order."""

from __future__ import annotations

from gpurt.visibility.candidates import Candidate

A = "GPU-1a1a1a1a-0000-1111-2222-333333333333"
B = "GPU-2b2b2b2b-0000-1111-2222-444444444444"
MIG = "MIG-5e5e5e5e-0000-1111-2222-777777777777"
H100 = "GPU-7c7c7c7c-0000-1111-2222-888888888888"


def nvidia(*uuids: str | None, model: str = "NVIDIA H100") -> list[Candidate]:
    """Cards of one model."""
    return [
        Candidate(f"nvml:{n}", "nvidia", uuid=uuid, pci_address=f"00000000:{n + 1:02x}:00.0", model=model)
        for n, uuid in enumerate(uuids)
    ]


def mig(parent: str = H100, bus: int = 9) -> list[Candidate]:
    """The partitions of one H100 as captured: 3g.40gb, 2g.20gb and two of 1g.10gb."""
    return [
        Candidate(
            f"nvml:9/{gi}/0",
            "nvidia",
            uuid=f"MIG-0000000{n}-0000-1111-2222-999999999999",
            pci_address=f"00000000:{bus:02x}:00.0",
            partition=f"{gi}/0",
            parent_uuid=parent,
            model="NVIDIA H100",
        )
        for n, gi in enumerate((2, 3, 9, 10), start=1)
    ]


def amd(count: int, *, uuids: bool = True) -> list[Candidate]:
    return [
        Candidate(
            f"amd:{n}",
            "amd",
            uuid=f"GPU-{0x93BB_0000_0000_0000 + (n << 32):016x}" if uuids else None,
            pci_address=f"00000000:{0x41 + n:02x}:00.0",
        )
        for n in range(count)
    ]


def intel(*tiles: int, integrated: bool = True) -> list[Candidate]:
    """Cards with that many tiles each, after the GPU of the processor."""
    inside = [Candidate("intel:0", "intel", pci_address="00000000:00:02.0", integrated=True)] if integrated else []
    return inside + [
        Candidate(f"intel:{n}", "intel", pci_address=f"00000000:{0x80 + n:02x}:00.0", tiles=count)
        for n, count in enumerate(tiles, start=1)
    ]
