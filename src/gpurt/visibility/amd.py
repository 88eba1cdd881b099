"""``ROCR_VISIBLE_DEVICES``, then ``HIP_VISIBLE_DEVICES`` or what stands in for it, over AMD's devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpurt.visibility.candidates import Candidate
from gpurt.visibility.lists import hip_list, rocr_list
from gpurt.visibility.outcome import Outcome
from gpurt.visibility.variables import (
    CUDA_VISIBLE_DEVICES,
    GPU_DEVICE_ORDINAL,
    HIP_VISIBLE_DEVICES,
    ROCR_VISIBLE_DEVICES,
)


def resolve_amd(environ: Mapping[str, str], candidates: Sequence[Candidate], *, alone: bool) -> Outcome:
    """Which of AMD's candidates ROCm may use, and in which order HIP and OpenCL count them.

    ROCR takes devices away and counts the rest anew; HIP's numbers are of that rest. HIP reads
    ``CUDA_VISIBLE_DEVICES`` where its own variable is not set.

    Args:
        alone: the host has no NVIDIA device, so that ``CUDA_VISIBLE_DEVICES`` is meant for AMD's. Where it has one,
            HIP still obeys the variable, but nobody has said that AMD's devices are to be hidden.
    """
    if not candidates:
        return Outcome()
    warnings: list[str | None] = []
    left = list(candidates)
    rocr = environ.get(ROCR_VISIBLE_DEVICES)
    if rocr is not None:
        picked = rocr_list(ROCR_VISIBLE_DEVICES, rocr, [c.uuid for c in left])
        warnings.append(picked.warning)
        left = [left[position] for position in picked.order]
    hidden = {c.device_id: f"{ROCR_VISIBLE_DEVICES} does not name it" for c in candidates if c not in left}

    name, value = _hip(environ)
    shown = left
    visible = left
    if value:
        picked = hip_list(name, value, [c.uuid for c in left])
        shown = [left[position] for position in picked.order]
        own = name == HIP_VISIBLE_DEVICES
        if own or alone:
            visible = shown
            hidden |= {c.device_id: f"{name} does not name it" for c in left if c not in shown}
            warnings.append(_renumbered(picked.warning, rocr, left, len(candidates)))
        elif shown != left:
            warnings.append(
                f"HIP obeys {name}, too: with it a process sees {len(shown)} of {len(left)} AMD devices; "
                f"set {HIP_VISIBLE_DEVICES}"
            )
    elif HIP_VISIBLE_DEVICES in environ:
        warnings.append(f"{HIP_VISIBLE_DEVICES} is empty, which HIP takes for not set; -1 hides every device")

    opencl = environ.get(GPU_DEVICE_ORDINAL)
    by_opencl = left
    if opencl:
        picked = hip_list(GPU_DEVICE_ORDINAL, opencl, [c.uuid for c in left])
        warnings.append(picked.warning)
        by_opencl = [left[position] for position in picked.order]
    why = f"{GPU_DEVICE_ORDINAL} does not name it"
    away = {c.device_id: why for c in visible if c not in by_opencl}
    return Outcome(
        visible=tuple(c.device_id for c in visible),
        hidden=hidden,
        order={
            "rocm": tuple(c.device_id for c in shown),
            "amd_opencl": tuple(c.device_id for c in by_opencl if c.device_id not in hidden),
        },
        hidden_from={"amd_opencl": away} if away else {},
        warnings=tuple(filter(None, warnings)),
    )


def _hip(environ: Mapping[str, str]) -> tuple[str, str | None]:
    """The variable that HIP goes by, and its value. An empty one is none."""
    own = environ.get(HIP_VISIBLE_DEVICES)
    return (HIP_VISIBLE_DEVICES, own) if own else (CUDA_VISIBLE_DEVICES, environ.get(CUDA_VISIBLE_DEVICES))


def _renumbered(warning: str | None, rocr: str | None, left: Sequence[Candidate], count: int) -> str | None:
    """Adds what people overlook when they set both variables to the same number."""
    if warning is None or rocr is None or len(left) == count:
        return warning
    return f"{warning}: {ROCR_VISIBLE_DEVICES} leaves {len(left)} of {count} devices, counted anew from 0"
