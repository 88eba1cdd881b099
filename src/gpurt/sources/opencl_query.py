"""From ``pyopencl`` to the table that :func:`gpurt.sources.opencl_properties.read_opencl` understands.

Loads every OpenCL driver of the computer: any of them may hang or crash, so call it in a probe's process. Makes no
context, and allocates no memory on a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpurt.errors import ReasonCode
from gpurt.sources.table import Absence, absent_driver, load_package

# cl.h and cl_ext.h
_VARIABLES: Final = ("OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "OPENCL_VENDOR_PATH")
"""Where the loaders look for drivers, in place of their own folders."""

_DEVICE_NOT_FOUND: Final = -1
_INVALID_VALUE: Final = -30
_PLATFORM_NOT_FOUND: Final = -1001
_TOPOLOGY_PCIE: Final = 1  # CL_DEVICE_TOPOLOGY_TYPE_PCIE_AMD

_ATTRIBUTES: Final[Mapping[str, str]] = {
    "name": "name",
    "vendor": "vendor",
    "vendor_id": "vendor_id",
    "version": "version",
    "driver_version": "driver_version",
    "type": "type",
    "global_memory_bytes": "global_mem_size",
    "max_allocation_bytes": "max_mem_alloc_size",
    "compute_units": "max_compute_units",
    "clock_mhz": "max_clock_frequency",
    "available": "available",
    "board_name": "board_name_amd",
}
"""Our keys and pyopencl's attributes, the values being the same."""


def query_opencl(cl: Any = None) -> dict[str, Any]:
    """The table of this computer. Blocking, half a second and more. Raises nothing that the package may raise.

    Args:
        cl: default: the package ``pyopencl``.
    """
    cl = load_package("pyopencl") if cl is None else cl
    if isinstance(cl, Absence):
        return cl.as_table()
    try:
        platforms = list(cl.get_platforms())
    except Exception as exc:  # pyopencl's errors share no base but this one
        if getattr(exc, "code", None) == _PLATFORM_NOT_FOUND:
            return absent_driver(_VARIABLES, "no OpenCL driver is installed").as_table()
        return Absence(ReasonCode.ERROR, f"OpenCL cannot list platforms: {exc}").as_table()
    if not platforms:
        return absent_driver(_VARIABLES, "no OpenCL driver is installed").as_table()
    return {"platforms": [_platform(platform) for platform in platforms]}


def _platform(platform: Any) -> dict[str, Any]:
    row, errors = _values(platform, {name: name for name in ("name", "vendor", "version")})
    row["devices"] = []
    try:
        row["devices"] = [_device(device) for device in platform.get_devices()]
    except Exception as exc:
        if getattr(exc, "code", None) != _DEVICE_NOT_FOUND:
            row["problem"] = f"cannot list devices: {exc}"
    return {**row, "errors": errors} if errors else row


def _device(device: Any) -> dict[str, Any]:
    row, errors = _values(device, _ATTRIBUTES)
    more, reasons = _values(device, _VENDOR_ATTRIBUTES)
    row |= _location(more)
    # NVIDIA's own word first: the common one was taken out of the standard again.
    unified = more.get("integrated_nv", more.get("unified"))
    row["unified_memory"] = None if unified is None else bool(unified)
    free = more.get("free_amd")
    row["free_memory_kib"] = free[0] if isinstance(free, (list, tuple)) and free else free  # pyright: ignore[reportUnknownVariableType]
    errors |= {key: reasons[name] for key, name in _TOLD_BY.items() if name in reasons and row.get(key) is None}
    return {**row, "errors": errors} if errors else row


_VENDOR_ATTRIBUTES: Final[Mapping[str, str]] = {
    "unified": "host_unified_memory",
    "integrated_nv": "integrated_memory_nv",
    "domain_nv": "pci_domain_id_nv",
    "bus_nv": "pci_bus_id_nv",
    "slot_nv": "pci_slot_id_nv",
    "topology_amd": "topology_amd",
    "free_amd": "global_free_memory_amd",
}
_TOLD_BY: Final = {"unified_memory": "unified", "pci_domain": "domain_nv", "free_memory_kib": "free_amd"}


def _location(told: Mapping[str, Any]) -> dict[str, Any]:
    """Place on the PCI bus by one of two vendors' extensions, or nothing."""
    bus, slot, topology = told.get("bus_nv"), told.get("slot_nv"), told.get("topology_amd")
    if isinstance(bus, int) and isinstance(slot, int):
        # The number of the device, of which GPUs have one function that computes: seen on an H100 at 00:06.0, which
        # tells 6. That it has the function in its lowest three bits, as others read it, was true of none seen here.
        return {"pci_domain": told.get("domain_nv"), "pci_bus": bus, "pci_device": slot, "pci_function": 0}
    if getattr(topology, "type", None) != _TOPOLOGY_PCIE:
        return {}
    # Signed characters in the C structure: bus 0xc1 comes as -63.
    octets = {f"pci_{name}": getattr(topology, name, None) for name in ("bus", "device", "function")}
    return {key: value & 0xFF if isinstance(value, int) else None for key, value in octets.items()}


def _values(source: Any, attributes: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of attributes, and reasons for those that cannot be had."""
    row: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for key, attribute in attributes.items():
        try:
            row[key] = getattr(source, attribute)
        except AttributeError:
            errors[key] = "unsupported"  # an older pyopencl
        except Exception as exc:
            errors[key] = "unsupported" if getattr(exc, "code", None) == _INVALID_VALUE else "error"
    return row, errors
