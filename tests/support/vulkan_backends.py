"""Vulkan on lavapipe, Mesa's software device, as the conformance kit runs over it. Importable in child processes.

One device shown twice gives two VkDevices, each with memory of its own, between which the library copies nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

from gpurt.backend import GPUBackend
from gpurt.backends.vulkan_backend import VulkanDriver
from gpurt.errors import BackendUnavailable
from gpurt.runtime.backend import DriverBackend


class StandIn:
    """The package ``vulkan`` with other values under some of its names."""

    def __init__(self, **others: Any) -> None:
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("vulkan"), name)


def twice() -> StandIn:
    """Every device of the computer is shown as two."""

    def enumerate_twice(instance: Any) -> list[Any]:
        physical = list(importlib.import_module("vulkan").vkEnumeratePhysicalDevices(instance))
        return [*physical, *physical]

    return StandIn(vkEnumeratePhysicalDevices=enumerate_twice)


def driver(*, mapped: bool = True) -> VulkanDriver:
    """Two devices; ``mapped`` as for :class:`VulkanDriver`. A missing package is refused by ``open``."""
    try:
        importlib.import_module("vulkan")
    except (ImportError, OSError):
        return VulkanDriver(mapped=mapped)
    return VulkanDriver(vk=twice(), mapped=mapped)


def mapped() -> GPUBackend:
    return _in_small_chunks(driver())


def staged() -> GPUBackend:
    return _in_small_chunks(driver(mapped=False))


def _in_small_chunks(driver: VulkanDriver) -> GPUBackend:
    """A backend without a pool, whose copies are cut often enough for what the kit tests between two chunks."""
    driver.capabilities = driver.capabilities.model_copy(update={"chunk_bytes": 1 << 20})
    return DriverBackend(driver, pool_bytes=0)


def available() -> bool:
    """Whether there is any Vulkan device here."""
    one = driver()
    try:
        one.open()
    except BackendUnavailable:
        return False
    one.close()
    return True
