"""Names of AMD's instruction sets: ``gfx90a`` from the kernel's number, and what an override makes of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

OVERRIDE: Final = "HSA_OVERRIDE_GFX_VERSION"
"""Read by ROCm's thunk library; with ``_<KFD node>`` appended for one node alone."""

_VERSION: Final = re.compile(r"\s*([0-9]{1,2})\.([0-9]{1,2})\.([0-9]{1,2})\s*")

# LLVM, User Guide for AMDGPU Backend, table of processors: which are parts of a processor (APU), which are cards.
# gfx942 is both MI300X and MI300A and therefore in neither.
APUS: Final = frozenset(
    {
        "gfx801", "gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1037", "gfx1103",
        "gfx1150", "gfx1151", "gfx1152", "gfx1153",
    }
)  # fmt: skip
CARDS: Final = frozenset(
    {
        "gfx701", "gfx802", "gfx803", "gfx805", "gfx900", "gfx904", "gfx906", "gfx908", "gfx90a", "gfx950", "gfx1010",
        "gfx1011", "gfx1012", "gfx1030", "gfx1031", "gfx1032", "gfx1034", "gfx1100", "gfx1101", "gfx1102", "gfx1200",
        "gfx1201",
    }
)  # fmt: skip


def gfx_name(version: int | None) -> str | None:
    """``gfx90a`` for KFD's ``gfx_target_version`` 90010; None for None, 0 (a CPU) and what no such number can be.

    Two decimal digits each for minor and stepping, which the name writes in hexadecimal (kfd_device.c).
    """
    if version is None or not 10_000 <= version < 1_000_000:
        return None
    minor, stepping = version // 100 % 100, version % 100
    if minor > 15 or stepping > 15:
        return None
    return f"gfx{version // 10_000}{minor:x}{stepping:x}"


def effective_gfx(gfx: str | None, environ: Mapping[str, str], node: int | None) -> str | None:
    """What ROCm takes the device for in a process with that environment: ``gfx`` unless it is overridden.

    Never part of an identity: the card is what it is. ``node`` is the device's KFD node number.
    """
    for name in (f"{OVERRIDE}_{node}", OVERRIDE):
        match = _VERSION.fullmatch(environ.get(name, ""))
        if match:
            major, minor, stepping = (int(part) for part in match.groups())
            return gfx_name(major * 10_000 + minor * 100 + stepping) or gfx
    return gfx
