"""One resolver for every variable that hides devices.

A vendor's own variables are about the device, whatever interface shows it: a card that ``CUDA_VISIBLE_DEVICES`` hides
is hidden from Vulkan, too. ``GGML_VK_VISIBLE_DEVICES`` and ``GPU_DEVICE_ORDINAL`` are about one interface: people set
them to -1 to turn that interface off, not to give up their GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpurt.visibility.amd import resolve_amd
from gpurt.visibility.candidates import Candidate
from gpurt.visibility.intel import resolve_intel
from gpurt.visibility.lists import ggml_vulkan_list
from gpurt.visibility.nvidia import resolve_nvidia, resolve_nvidia_names
from gpurt.visibility.outcome import Outcome
from gpurt.visibility.variables import GGML_VK_VISIBLE_DEVICES

_VENDORS: Final = ("nvidia", "amd", "intel")
"""Those with variables of their own."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """What a process with that environment may use. All keys and values are the candidates' ``device_id``."""

    visible: tuple[str, ...] = ()
    """Devices that no mask hides; those of one vendor in the order in which a process counts them."""
    hidden: Mapping[str, str] = field(default_factory=dict[str, str])
    """Device → why, in a sentence that names the variable."""
    uncertain: Mapping[str, str] = field(default_factory=dict[str, str])
    """Device → why nobody can tell. Neither visible nor hidden: guessing would use the wrong card."""
    order: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """By interface (``cuda rocm level_zero vulkan amd_opencl``): the devices that one process sees there; the
    position is the number. Missing where it cannot be told."""
    hidden_from: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """By interface: devices that are visible, but not through it → why."""
    warnings: tuple[str, ...] = ()
    """What a person probably did not mean."""


def resolve(environ: Mapping[str, str], candidates: Sequence[Candidate], *, nvidia_present: bool = False) -> Visibility:
    """Applies every visibility variable in ``environ`` to the devices of a host. Never raises.

    Args:
        candidates: all devices of the machine, each once, in their vendor's own order: see :class:`Candidate`. A
            number in a variable counts the devices that are missing here as well.
        nvidia_present: the host has a device of NVIDIA's, also if none is among the candidates.
    """
    by_vendor: dict[str, list[Candidate]] = {}
    loose: list[Candidate] = []
    for candidate in candidates:
        if candidate.numbered or candidate.vendor not in _VENDORS:
            by_vendor.setdefault(candidate.vendor, []).append(candidate)
        else:
            loose.append(candidate)
    nvidia_present = nvidia_present or any(c.vendor == "nvidia" for c in candidates)
    outcomes = [
        resolve_nvidia(environ, by_vendor.pop("nvidia", [])),
        resolve_amd(environ, by_vendor.pop("amd", []), alone=not nvidia_present),
        resolve_intel(environ, by_vendor.pop("intel", [])),
        resolve_nvidia_names(environ, [c for c in loose if c.vendor == "nvidia"]),
        Outcome(visible=tuple(c.device_id for c in loose if c.vendor != "nvidia")),
    ]
    others = tuple(c.device_id for rest in by_vendor.values() for c in rest)
    total = Outcome(visible=others)
    for outcome in outcomes:
        total = total.joined(outcome)
    total = total.joined(_vulkan(environ, candidates, total))
    only_vulkan = {c.device_id for rest in by_vendor.values() for c in rest if set(c.ordinals) == {"vulkan"}}
    # What has no other interface is gone with this one.
    gone = {device: why for device, why in total.hidden_from.get("vulkan", {}).items() if device in only_vulkan}
    return Visibility(
        visible=tuple(device for device in total.visible if device not in gone),
        hidden={**total.hidden, **gone},
        uncertain=total.uncertain,
        order=total.order,
        hidden_from=total.hidden_from,
        warnings=total.warnings,
    )


def _vulkan(environ: Mapping[str, str], candidates: Sequence[Candidate], so_far: Outcome) -> Outcome:
    """Vulkan counts all devices by itself; masks of vendors take theirs away afterwards."""
    # Records that claim the same number are a mistake of whoever counted, and no reason to drop one of them.
    numbered: dict[int, list[str]] = {}
    for candidate in candidates:
        if "vulkan" in candidate.ordinals:
            numbered.setdefault(candidate.ordinals["vulkan"], []).append(candidate.device_id)
    if not numbered:
        return Outcome()
    value = environ.get(GGML_VK_VISIBLE_DEVICES)
    numbers: Sequence[int] = sorted(numbered)
    warning: str | None = None
    if value is not None:
        chosen = ggml_vulkan_list(GGML_VK_VISIBLE_DEVICES, value, max(numbered) + 1)
        numbers, warning = chosen.order, chosen.warning
    shown = [device for number in numbers for device in numbered.get(number, ())]
    why = f"{GGML_VK_VISIBLE_DEVICES} does not name it"
    known = [device for devices in numbered.values() for device in devices]
    away = {device: why for device in known if device not in shown and device not in so_far.hidden}
    uncertain = any(device in so_far.uncertain for device in shown)
    order = {} if uncertain else {"vulkan": tuple(device for device in shown if device not in so_far.hidden)}
    return Outcome(
        order=order,
        hidden_from={"vulkan": away} if away else {},
        warnings=(warning,) if warning else (),
    )
