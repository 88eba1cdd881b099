"""The ``vulkan`` package (cffi): how to load it, what its errors mean, and why it cannot be used here."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from gpurt.backends.advice import DRIVER, INSTALL, PERMISSION
from gpurt.errors import BackendUnavailable, DeviceLost, GPUError, OutOfMemory, ReasonCode
from gpurt.sources.device_nodes import check_node, may_open
from gpurt.sources.table import Absence, load_package

NAME: Final = "vulkan"

LOADER_HINTS: Final[Mapping[str, str]] = {
    "linux": "apt install libvulkan1  # elsewhere: vulkan-loader, vulkan-icd-loader",
    "win32": "install the GPU vendor's driver, which brings vulkan-1.dll",
    "darwin": "brew install vulkan-loader molten-vk",
    "android": "use Android 7 or newer, which has libvulkan.so",
}

_OLDEST_LOADER: Final = 1 << 22 | 1 << 12
"""1.1, as Vulkan packs it: what identifies a device came with it."""

_MEANINGS: Final[Mapping[str, str]] = {
    "VkErrorOutOfDeviceMemory": "the device has not enough memory left",
    "VkErrorOutOfHostMemory": "the driver has not enough host memory left",
    "VkErrorTooManyObjects": "the driver can hold no more allocations",
    "VkErrorOutOfPoolMemory": "a pool of the driver is full",
    "VkErrorMemoryMapFailed": "the memory cannot be mapped into this process",
    "VkErrorDeviceLost": "the device is lost",
    "VkErrorInitializationFailed": "the driver could not initialise the device",
    "VkErrorFeatureNotPresent": "the device lacks a feature",
    "VkErrorExtensionNotPresent": "the driver lacks an extension",
    "VkErrorUnknown": "the driver does not say why",
}
_OUT_OF_MEMORY: Final = frozenset(
    {
        "VkErrorOutOfDeviceMemory",
        "VkErrorOutOfHostMemory",
        "VkErrorTooManyObjects",
        "VkErrorOutOfPoolMemory",
        "VkErrorMemoryMapFailed",
    }
)


def kind_of(exc: BaseException) -> type[GPUError] | None:
    """Which error of gpurt an exception of the package means; by name, so that it needs no package."""
    name = type(exc).__name__
    if name in _OUT_OF_MEMORY:
        return OutOfMemory
    return DeviceLost if name == "VkErrorDeviceLost" else None


@contextmanager
def telling(what: str) -> Generator[None]:
    """Give the errors of the package, which come without a text, one that says what was tried and what it means."""
    try:
        yield
    except Exception as exc:
        name = type(exc).__name__
        if not exc.args and name.startswith("Vk"):
            exc.args = (f"{what}: {_MEANINGS.get(name, 'the driver refused')} ({name})",)
        raise


def load_library(vk: Any, platform: str) -> Any:
    """The package, its loader being new enough. Runs no code of a driver.

    Args:
        vk: what to take in place of the package, or None.

    Raises:
        BackendUnavailable: package or loader missing, or the loader too old.
    """
    if vk is None:
        vk = load_package("vulkan", library="Vulkan loader")
    if isinstance(vk, Absence):
        # A package that is there and does not load misses the shared library, which pip does not have.
        installed = vk.message.startswith("the Vulkan loader")
        hint = LOADER_HINTS.get(platform) if installed else INSTALL[NAME]
        raise _unavailable(vk.message, vk.reason, hint, install_hint=hint)
    if not hasattr(vk, "vkCreateInstance"):
        text = f"the module vulkan at {getattr(vk, '__file__', None) or '?'} is not the package of that name"
        raise _unavailable(text, ReasonCode.NO_LIBRARY, None, install_hint=INSTALL[NAME])
    try:
        version: int = vk.vkEnumerateInstanceVersion()
    except AttributeError:  # a loader of version 1.0 has no such function
        version = 1 << 22
    if version < _OLDEST_LOADER:
        hint = LOADER_HINTS.get(platform)
        text = f"the Vulkan loader is of version {version >> 22}.{version >> 12 & 0x3FF}; 1.1 is needed"
        raise _unavailable(text, ReasonCode.DRIVER_MISMATCH, hint, install_hint=hint)
    return vk


def refusal(
    absence: Absence, *, platform: str, root: Path = Path("/"), may: Callable[[Path], bool] = may_open
) -> BackendUnavailable:
    """What it means that Vulkan lists nothing. Looks at the device nodes below ``root``.

    Args:
        may: whether this process may open a node.
    """
    if absence.reason not in (ReasonCode.NO_DRIVER, ReasonCode.NO_DEVICE):
        return _unavailable(absence.message, absence.reason, None)
    closed = closed_nodes(root, may)
    if closed:
        # Mesa's drivers pass over what they cannot open, and then there seems to be nothing.
        text = f"{absence.message}; {'; '.join(closed)}"
        return _unavailable(text, ReasonCode.NO_PERMISSION, PERMISSION[NAME])
    hint = DRIVER[NAME].get(platform)
    if absence.reason is ReasonCode.NO_DRIVER:
        return _unavailable(absence.message, absence.reason, hint, install_hint=hint)
    return _unavailable(absence.message, absence.reason, None)


def closed_nodes(root: Path, may: Callable[[Path], bool] = may_open) -> list[str]:
    """Graphics nodes that this process may not open, each in a sentence. Opens none of them."""
    names = sorted(f"dev/dri/{path.name}" for path in (root / "dev/dri").glob("renderD*"))
    accesses = [check_node(root, name, may) for name in names]
    return [access.message for access in accesses if access.reason is ReasonCode.NO_PERMISSION]


def hidden(why: str) -> BackendUnavailable:
    """Every device is hidden by a variable; ``why`` names it."""
    return _unavailable(
        f"the environment hides every Vulkan device: {why}",
        ReasonCode.HIDDEN_BY_ENVIRONMENT,
        "unset the variable, or name the devices to use in it",
    )


def _unavailable(
    text: str, reason: ReasonCode, hint: str | None, *, install_hint: str | None = None
) -> BackendUnavailable:
    return BackendUnavailable(text, backend=NAME, reason=reason, hint=hint, install_hint=install_hint)
