"""Which physical device a record speaks of: one spelling for PCI addresses, UUIDs and identity keys."""

from __future__ import annotations

import re
import uuid as _uuid

from gpurt.types import DeviceIdentity

_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([01][0-9a-f])\.([0-7])", re.ASCII)
_UUID = re.compile(r"((?:[A-Za-z]{2,8}-)*)([0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12})((?:/\d+)*)", re.ASCII | re.I)


def normalize_pci_address(text: str | bytes | None) -> str | None:
    """``dddddddd:bb:dd.f`` in lower case, or None for anything that is not a PCI address.

    Accepts four- to eight-digit domains and none (domain 0), which is how sysfs, NVML and lspci write it.
    """
    match = _PCI.fullmatch(_text(text).lower())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{(domain or '0').zfill(8)}:{bus}:{device}.{function}"


def normalize_uuid(value: str | bytes | None, *, prefix: str = "GPU-") -> str | None:
    """The vendor's spelling ``GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx``, or None for anything else.

    Accepts 16 raw bytes (CUDA and Vulkan), 32 hexadecimal digits with or without dashes, and text that has a
    prefix already (``GPU-``, ``MIG-``, ``MIG-GPU-…/gi/ci``), which is kept; bare values get ``prefix``. All zeros
    are what libraries give for "none".
    """
    if isinstance(value, bytes) and len(value) == 16:
        return None if not any(value) else f"{prefix}{_uuid.UUID(bytes=value)}"
    match = _UUID.fullmatch(_text(value))
    if match is None:
        return None
    own_prefix, digits, suffix = match.groups()
    number = _uuid.UUID(digits)
    return f"{own_prefix.upper() or prefix}{number}{suffix}" if number.int else None


def device_identity(
    *,
    uuid: str | None = None,
    pci_address: str | None = None,
    partition: str | None = None,
    serial: str | None = None,
    fallback: str,
) -> DeviceIdentity:
    """The identity whose key is the best that is known.

    ``uuid`` as the vendor prints it; ``pci_address`` in any spelling. ``partition`` names a part of the device
    (MIG ``gi/ci``) and is added to the key, unless ``uuid`` is the partition's own. ``fallback`` is the key when
    neither is known, and is flagged ``stable=False``.
    """
    address = normalize_pci_address(pci_address)
    base = uuid or (f"pci:{address}" if address else None)
    key = base or fallback
    # Interfaces that show a partition by its own UUID often do not tell its number: both must give one key.
    if partition and not key.startswith("MIG-"):
        key = f"{key}/{partition}"
    return DeviceIdentity(
        key=key, stable=base is not None, uuid=uuid, pci_address=address, partition=partition, serial=serial
    )


def _text(value: str | bytes | None) -> str:
    if isinstance(value, bytes):
        # Libraries hand out fixed C arrays: what follows the first NUL is left over.
        value = value.split(b"\0", 1)[0].decode("ascii", "replace")
    return (value or "").strip()


def luid_identity(luid: str, fallback: str) -> DeviceIdentity:
    """Of an adapter of Windows of which no more is told: the same for every interface, until the next boot."""
    return device_identity(fallback=fallback).model_copy(update={"key": f"luid:{luid}", "uuid": f"LUID-{luid}"})
