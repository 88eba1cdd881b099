"""From the ``vulkan`` package to the table that :func:`gpurt.sources.vulkan_properties.read_vulkan` understands.

Makes an instance, which loads every Vulkan driver of the computer: any of them may hang or crash, so call it in a
probe's process. Makes no device, and allocates no memory on one.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from gpurt.errors import ReasonCode
from gpurt.sources.table import Absence, absent_driver, load_package

_VARIABLES: Final = (
    "VK_DRIVER_FILES",
    "VK_ICD_FILENAMES",
    "VK_LOADER_DRIVERS_DISABLE",
    "VK_LOADER_DRIVERS_SELECT",
)
"""Where the loader looks for drivers, in place of its own folders."""

_1_1: Final = 1 << 22 | 1 << 12
_1_2: Final = 1 << 22 | 2 << 12

_PORTABILITY_ENUMERATION: Final = "VK_KHR_portability_enumeration"
_PORTABILITY_FLAG: Final = 1  # VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR

_log = logging.getLogger("gpurt.sources")

# Extensions without which a structure stays as we made it, and would be read as an answer.
_PCI_EXTENSION: Final = "VK_EXT_pci_bus_info"
_BUDGET_EXTENSION: Final = "VK_EXT_memory_budget"
_DRIVER_EXTENSION: Final = "VK_KHR_driver_properties"

_DEVICE_LOCAL: Final = 1  # VK_MEMORY_HEAP_DEVICE_LOCAL_BIT


def query_vulkan(vk: Any = None) -> dict[str, Any]:
    """The table of this computer. Blocking, 50 ms and more. Raises nothing that the package may raise.

    Args:
        vk: default: the package ``vulkan``.
    """
    vk = load_package("vulkan", library="Vulkan loader") if vk is None else vk
    if isinstance(vk, Absence):
        return vk.as_table()
    try:
        instance = _instance(vk)
    except Exception as exc:  # the package's errors share no base but this one
        return _no_instance(exc).as_table()
    try:
        physical = list(vk.vkEnumeratePhysicalDevices(instance))
        if not physical:
            return Absence(ReasonCode.NO_DEVICE, "the Vulkan drivers show no device").as_table()
        return {"devices": [_device(vk, device) for device in physical]}
    except Exception as exc:
        return Absence(ReasonCode.ERROR, f"Vulkan cannot list devices: {_text(exc)}").as_table()
    finally:
        vk.vkDestroyInstance(instance, None)


def _instance(vk: Any) -> Any:
    offered = {extension.extensionName for extension in vk.vkEnumerateInstanceExtensionProperties(None)}
    # Without it MoltenVK, which is not a complete Vulkan, is not shown.
    portable = _PORTABILITY_ENUMERATION in offered
    application = vk.VkApplicationInfo(pApplicationName="gpurt", apiVersion=_1_1)
    return vk.vkCreateInstance(
        vk.VkInstanceCreateInfo(
            flags=_PORTABILITY_FLAG if portable else 0,
            pApplicationInfo=application,
            ppEnabledExtensionNames=[_PORTABILITY_ENUMERATION] if portable else [],
        ),
        None,
    )


def _no_instance(exc: Exception) -> Absence:
    name = type(exc).__name__
    if name == "VkErrorIncompatibleDriver":
        return absent_driver(_VARIABLES, "no Vulkan driver is installed, or none of version 1.1")
    if name == "VkErrorInitializationFailed":
        return Absence(ReasonCode.NO_DRIVER, "no Vulkan driver could be initialised")
    return Absence(ReasonCode.ERROR, f"Vulkan does not start: {_text(exc)}")


def _device(vk: Any, physical: Any) -> dict[str, Any]:
    """All that one device tells. What fails costs its own keys."""
    row: dict[str, Any] = {}
    errors: dict[str, str] = {}
    try:
        row |= _core(vk.vkGetPhysicalDeviceProperties(physical))
        extensions = {item.extensionName for item in vk.vkEnumerateDeviceExtensionProperties(physical, None)}
    except Exception as exc:
        _log.info("a Vulkan device does not tell its properties: %s", _text(exc))
        errors |= dict.fromkeys((*_CORE, *_IDENTITY), "error")
        extensions = None
    modern = extensions is not None and row["api_version"] >= _1_1
    if modern and extensions is not None:
        try:
            row |= _identity(vk, physical, extensions, row["api_version"])
        except Exception as exc:
            _log.info("a Vulkan device does not tell its identity: %s", _text(exc))
            errors |= dict.fromkeys(_IDENTITY, "error")
    try:
        row["heaps"] = _heaps(vk, physical, budgets=modern and _BUDGET_EXTENSION in (extensions or ()))
    except Exception as exc:
        _log.info("a Vulkan device does not tell its memory: %s", _text(exc))
        errors["heaps"] = "error"
    return {**row, "errors": errors} if errors else row


_CORE: Final = ("name", "vendor_id", "device_id", "device_type", "api_version", "driver_version_code")


def _core(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.deviceName,
        "vendor_id": properties.vendorID,
        "device_id": properties.deviceID,
        "device_type": properties.deviceType,
        "api_version": properties.apiVersion,
        "driver_version_code": properties.driverVersion,
    }


_IDENTITY: Final = (
    "device_uuid",
    "driver_uuid",
    "device_luid",
    "max_allocation_bytes",
    "driver_id",
    "driver_name",
    "driver_info",
    "pci_domain",
    "pci_bus",
    "pci_device",
    "pci_function",
)


def _identity(vk: Any, physical: Any, extensions: set[str], api_version: int) -> dict[str, Any]:
    """What Vulkan 1.1 and three extensions tell in one call."""
    chain = _Chain(vk)
    ids = chain.add("VkPhysicalDeviceIDProperties", "PHYSICAL_DEVICE_ID_PROPERTIES")
    limits = chain.add("VkPhysicalDeviceMaintenance3Properties", "PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES")
    driver = pci = None
    if api_version >= _1_2 or _DRIVER_EXTENSION in extensions:
        driver = chain.add("VkPhysicalDeviceDriverProperties", "PHYSICAL_DEVICE_DRIVER_PROPERTIES")
    if _PCI_EXTENSION in extensions:
        pci = chain.add("VkPhysicalDevicePCIBusInfoPropertiesEXT", "PHYSICAL_DEVICE_PCI_BUS_INFO_PROPERTIES_EXT")
    vk.vkGetPhysicalDeviceProperties2(
        physical, chain.add("VkPhysicalDeviceProperties2", "PHYSICAL_DEVICE_PROPERTIES_2")
    )
    row: dict[str, Any] = {
        "device_uuid": bytes(ids.deviceUUID).hex(),
        "driver_uuid": bytes(ids.driverUUID).hex(),
        "device_luid": bytes(ids.deviceLUID).hex() if ids.deviceLUIDValid else None,
        "max_allocation_bytes": limits.maxMemoryAllocationSize,
    }
    if driver is not None:
        row |= {
            "driver_id": driver.driverID,
            "driver_name": vk.ffi.string(driver.driverName).decode(errors="replace"),
            "driver_info": vk.ffi.string(driver.driverInfo).decode(errors="replace"),
        }
    if pci is not None:
        row |= {
            "pci_domain": pci.pciDomain,
            "pci_bus": pci.pciBus,
            "pci_device": pci.pciDevice,
            "pci_function": pci.pciFunction,
        }
    return row


def _heaps(vk: Any, physical: Any, *, budgets: bool) -> list[dict[str, Any]]:
    if not budgets:
        memory, budget = vk.vkGetPhysicalDeviceMemoryProperties(physical), None
    else:
        chain = _Chain(vk)
        budget = chain.add("VkPhysicalDeviceMemoryBudgetPropertiesEXT", "PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT")
        asked = chain.add("VkPhysicalDeviceMemoryProperties2", "PHYSICAL_DEVICE_MEMORY_PROPERTIES_2")
        vk.vkGetPhysicalDeviceMemoryProperties2(physical, asked)
        memory = asked.memoryProperties
    return [
        {
            "size_bytes": memory.memoryHeaps[i].size,
            "device_local": bool(memory.memoryHeaps[i].flags & _DEVICE_LOCAL),
            "budget_bytes": None if budget is None else budget.heapBudget[i],
            "usage_bytes": None if budget is None else budget.heapUsage[i],
        }
        for i in range(memory.memoryHeapCount)
    ]


class _Chain:
    """Structures linked by ``pNext``, each added before those that were added earlier. Keeps them alive."""

    def __init__(self, vk: Any) -> None:
        self._vk = vk
        self._links: list[Any] = []

    def add(self, type_name: str, structure: str) -> Any:
        link = self._vk.ffi.new(f"{type_name}*")
        link.sType = getattr(self._vk, f"VK_STRUCTURE_TYPE_{structure}")
        if self._links:
            link.pNext = self._links[-1]
        self._links.append(link)
        return link


def _text(exc: Exception) -> str:
    """The package's own errors have no text but their names."""
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
