"""A Vulkan instance that stays open: its devices, and what they tell at any moment.

Nothing is read here that :mod:`gpurt.sources.vulkan_query` reads already: it gets stand-ins for the package that
differ from it in who makes the instance and how long it lives.
"""

from __future__ import annotations

from typing import Any

from gpurt.errors import ReasonCode
from gpurt.sources.table import Absence
from gpurt.sources.vulkan_properties import VulkanDevice, VulkanInventory, read_vulkan
from gpurt.sources.vulkan_query import query_vulkan


class VulkanInstance:
    """The instance, its physical devices and their properties, both in the loader's order."""

    def __init__(self, vk: Any, handle: Any, physical: list[Any], inventory: VulkanInventory) -> None:
        self.vk = vk
        self.physical = physical
        self.inventory = inventory
        self._handle = handle

    @classmethod
    def open(cls, vk: Any) -> VulkanInstance | Absence:
        """Load every Vulkan driver of the computer. Blocking, 10 to 50 ms; the first time in a process 0.3 s."""
        keeping = _Keeping(vk)
        inventory = read_vulkan(query_vulkan(keeping))
        instance = cls(vk, keeping.instance, keeping.physical, inventory)
        if inventory.absence is None and len(inventory.devices) == len(keeping.physical):
            return instance
        instance.close()
        return inventory.absence or Absence(ReasonCode.ERROR, "Vulkan's list of devices cannot be understood")

    def read(self, index: int) -> VulkanDevice | None:
        """One device as it is now, or None where it does not tell any more. Any thread; 1.5 ms."""
        found = read_vulkan(query_vulkan(_Asking(self.vk, self._handle, self.physical[index]))).devices
        return found[0] if found else None

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self.vk.vkDestroyInstance(handle, None)


class _Keeping:
    """The package for a query whose instance lives on."""

    def __init__(self, vk: Any) -> None:
        self._vk = vk
        self.instance: Any = None
        self.physical: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vk, name)

    def vkCreateInstance(self, info: Any, allocator: Any) -> Any:
        self.instance = self._vk.vkCreateInstance(info, allocator)
        return self.instance

    def vkEnumeratePhysicalDevices(self, instance: Any) -> list[Any]:
        self.physical = list(self._vk.vkEnumeratePhysicalDevices(instance))
        return self.physical

    def vkDestroyInstance(self, instance: Any, allocator: Any) -> None:
        """Later, by whoever asked."""


class _Asking:
    """The package for a query about one device of an instance that is there."""

    def __init__(self, vk: Any, instance: Any, physical: Any) -> None:
        self._vk = vk
        self._instance = instance
        self._physical = physical

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vk, name)

    def vkEnumerateInstanceExtensionProperties(self, layer: Any) -> tuple[Any, ...]:
        return ()

    def vkCreateInstance(self, info: Any, allocator: Any) -> Any:
        return self._instance

    def vkEnumeratePhysicalDevices(self, instance: Any) -> list[Any]:
        return [self._physical]

    def vkDestroyInstance(self, instance: Any, allocator: Any) -> None:
        """It is not this query's."""
