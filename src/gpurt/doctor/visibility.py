"""Which variables hide or order devices here, and what each of them comes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gpurt.doctor.explanation import Explanation
from gpurt.doctor.variables import unknown_variables
from gpurt.printable import quoted
from gpurt.types import DeviceKind, GPUDevice
from gpurt.visibility.candidates import Candidate, candidate_of
from gpurt.visibility.resolver import Visibility, resolve
from gpurt.visibility.variables import VARIABLES

_CONTAINER: Final = "NVIDIA_VISIBLE_DEVICES"
_OURS: Final[Mapping[str, str]] = {
    "GPURT_BACKEND": "create_backend() uses this backend and no other; discovery asks all the same",
    "GPURT_FALLBACK": "decides whether create_backend() falls back to the processor",
    "GPURT_HEALTH_XIDS": "changes what NVIDIA's Xid errors say about a device",
    "GPURT_THERMAL_LIMIT": "a device of so many °C gets no new work",
}
_LOADERS: Final[Mapping[str, str]] = {
    "VK_DRIVER_FILES": "Vulkan's loader takes the drivers of these files and no others",
    "VK_ICD_FILENAMES": "Vulkan's loader takes the drivers of these files and no others",
    "VK_LOADER_DRIVERS_DISABLE": "Vulkan's loader leaves these drivers out",
    "VK_LOADER_DRIVERS_SELECT": "Vulkan's loader takes these drivers and no others",
    "OCL_ICD_VENDORS": "OpenCL's loader looks for drivers there and nowhere else",
    "OCL_ICD_FILENAMES": "OpenCL's loader takes these drivers, too",
    "POCL_DEVICES": "PoCL shows these devices and no others",
}
_OFF: Final = frozenset({"0", "false", "no", "off"})


def unset_command(variable: str, platform: str) -> str:
    """How a person takes a variable away."""
    return f"set {variable}=" if platform == "win32" else f"unset {variable}"


def explain_visibility(
    devices: Sequence[GPUDevice], environ: Mapping[str, str], platform: str, *, recorded: bool = False
) -> Iterator[Explanation]:
    """A sentence for each variable that is set; one when none is.

    Args:
        recorded: ``environ`` is that of a recording.
    """
    candidates = _candidates(devices)
    names = {candidate.device_id: candidate.uuid or candidate.pci_address for candidate in candidates}
    set_here = [name for name in VARIABLES if name in environ]
    for name in set_here:
        yield _variable(name, environ, candidates, platform)
    if len(set_here) > 1:
        yield from _together(resolve(environ, candidates), set_here, names)
    if _CONTAINER in environ:
        text = (
            f"{_CONTAINER}={quoted(environ[_CONTAINER])} was read by the container runtime at the start of the "
            "container: cards that it did not pass in cannot be seen from here at all."
        )
        todo = "start the container with --gpus all, or name the cards there" if environ[_CONTAINER] != "all" else None
        yield Explanation("visibility", _CONTAINER, "container", text, todo)
    for name, meaning in _OURS.items():
        if environ.get(name):
            yield Explanation("visibility", name, "choice", f"{name}={quoted(environ[name])}: {meaning}.")
    loaders = [name for name in _LOADERS if environ.get(name)]
    for name in loaders:
        text = f"{name}={quoted(environ[name])}: {_LOADERS[name]}."
        yield Explanation("visibility", name, "loader", text, f"to have all drivers: {unset_command(name, platform)}")
    if plugins := environ.get("GPURT_PLUGINS"):
        loaded = "no third-party backend is loaded" if _is_off(plugins) else "third-party backends are loaded"
        yield Explanation("visibility", "GPURT_PLUGINS", "choice", f"GPURT_PLUGINS={quoted(plugins)}: {loaded}.")
    for name, meant in unknown_variables(environ).items():
        text = f"{name} is no variable of gpurt's, and does nothing unless a plug-in reads it."
        yield Explanation("visibility", name, "no effect", text, f"write {meant}" if meant else None)
    if not set_here and not loaders and _CONTAINER not in environ:
        where = "In the recorded environment" if recorded else "In the environment"
        text = f"{where}: no variable that hides or orders devices is set."
        yield Explanation("visibility", "environment", "nothing hidden", text)


def _is_off(text: str) -> bool:
    return text.strip().lower() in _OFF


def _candidates(devices: Sequence[GPUDevice]) -> list[Candidate]:
    """Every accelerator in its vendor's own order, which is that of the bus."""
    physical = [device for device in devices if device.kind not in (DeviceKind.CPU, DeviceKind.SOFTWARE)]

    def place(device: GPUDevice) -> tuple[bool, str, str]:
        address = device.identity.pci_address if device.identity else None
        return (address is None, address or "", device.device_id)

    return [candidate_of(device) for device in sorted(physical, key=place)]


def _variable(name: str, environ: Mapping[str, str], candidates: Sequence[Candidate], platform: str) -> Explanation:
    """What one variable does by itself."""
    seen = resolve({name: environ[name]}, candidates)
    hidden = [*seen.hidden, *(device for devices in seen.hidden_from.values() for device in devices)]
    whole = f"{name}={quoted(environ[name])}"
    warning = f" {_sentence('; '.join(seen.warnings))}" if seen.warnings else ""
    if not candidates:
        text = f"{whole} is set, and there is no device here that it could hide or order.{warning}"
        return Explanation("visibility", name, "no effect", text)
    unclear = (
        f" Of {', '.join(seen.uncertain)} it cannot be told: {_sentence(next(iter(seen.uncertain.values())))}"
        if (seen.uncertain)
        else ""
    )
    order = "".join(
        f" {interface} counts {_counted(ids)}."
        for interface, ids in seen.order.items()
        if ids and interface in _READS[name]
    )
    if not hidden:
        return Explanation(
            "visibility", name, "nothing hidden", f"{whole} hides nothing here.{order}{unclear}{warning}"
        )
    left = ", ".join(device for device in seen.visible if device not in hidden) or "no device"
    text = f"{whole} hides {', '.join(dict.fromkeys(hidden))} and leaves {left}.{order}{unclear}{warning}"
    return Explanation("visibility", name, "hides", text, f"to see all devices: {unset_command(name, platform)}")


_READS: Final[Mapping[str, tuple[str, ...]]] = {
    "CUDA_VISIBLE_DEVICES": ("cuda", "rocm"),
    "CUDA_DEVICE_ORDER": ("cuda",),
    "ROCR_VISIBLE_DEVICES": ("rocm",),
    "HIP_VISIBLE_DEVICES": ("rocm",),
    "GPU_DEVICE_ORDINAL": ("amd_opencl",),
    "GGML_VK_VISIBLE_DEVICES": ("vulkan",),
    "ZE_AFFINITY_MASK": ("level_zero",),
    "ZE_FLAT_DEVICE_HIERARCHY": ("level_zero",),
    "ZE_ENABLE_PCI_ID_DEVICE_ORDER": ("level_zero",),
}
"""The interfaces that each variable speaks to."""


def _together(seen: Visibility, variables: Sequence[str], names: Mapping[str, str | None]) -> Iterator[Explanation]:
    """What is left when all of them hold, which is not always what each leaves by itself."""
    left = ", ".join(seen.visible) or "no device"
    whys = "".join(f" {device} is hidden: {_sentence(why)}" for device, why in seen.hidden.items() if device in names)
    text = f"Together {', '.join(variables)} leave {left}.{whys}"
    yield Explanation("visibility", "environment", "hides" if seen.hidden else "nothing hidden", text)


def _counted(ids: Sequence[str]) -> str:
    return ", ".join(f"{device} as {number}" for number, device in enumerate(ids))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
