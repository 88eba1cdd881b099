"""Which host and which boot this is, and where on it a PCI device is."""

from __future__ import annotations

import hashlib
import socket
import uuid
from pathlib import Path

from gpurt.identity import normalize_pci_address
from gpurt.sources.sysfs import parse_number, read

_ROOT = Path("/")


def pci_numa_node(pci_address: str, root: Path = _ROOT) -> int | None:
    """NUMA node next to the PCI device at ``dddddddd:bb:dd.f``, or None where the system does not tell."""
    address = normalize_pci_address(pci_address)
    if address is None:
        return None
    domain, rest = address.split(":", 1)
    # sysfs prints domains with at least four digits.
    node = parse_number(read(root / f"sys/bus/pci/devices/{int(domain, 16):04x}:{rest}/numa_node")[0] or "")
    return node if node is not None and node >= 0 else None


def boot_id(root: Path = _ROOT) -> str | None:
    """Identifier of this boot of the kernel, or None where the system has none."""
    return read(root / "proc/sys/kernel/random/boot_id")[0] or None


def host_fingerprint(root: Path = _ROOT) -> str:
    """16 hexadecimal digits that stay the same for this host across reboots.

    Derived from ``/etc/machine-id``, which must not be published itself (machine-id(5)); where there is none,
    from host name and, if the host has one, hardware network address.
    """
    source = read(root / "etc/machine-id")[0]
    if not source:
        node = uuid.getnode()
        # With the multicast bit set it is a random number of this process, not an address (RFC 9562).
        source = socket.gethostname() + ("" if node >> 40 & 1 else f"/{node:012x}")
    return hashlib.sha256(f"gpurt host {source}".encode()).hexdigest()[:16]
