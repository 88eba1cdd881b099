"""Names of processors' makers, cores and instruction sets, by what ``/proc/cpuinfo`` has of them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

CPU_VENDORS: Final[Mapping[str, str]] = {
    "GenuineIntel": "intel",
    "AuthenticAMD": "amd",
    "HygonGenuine": "hygon",
    "CentaurHauls": "zhaoxin",
}

# Linux arch/arm64/include/asm/cputype.h
ARM_IMPLEMENTERS: Final[Mapping[int, str]] = {
    0x41: "arm",
    0x42: "broadcom",
    0x46: "fujitsu",
    0x48: "hisilicon",
    0x4E: "nvidia",
    0x51: "qualcomm",
    0x53: "samsung",
    0x61: "apple",
    0xC0: "ampere",
}

# The same file; names as Arm's, for servers and boards, whose firmware often gives the machine no name.
ARM_PARTS: Final[Mapping[tuple[int, int], str]] = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD42): "Cortex-A78AE",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD83): "Neoverse-V3AE",
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD85): "Cortex-X925",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x4E, 0x004): "Carmel",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}

# Widest first: flag or feature of /proc/cpuinfo, and our name for it.
_WIDEST: Final = (
    ("avx512f", "avx512"),
    ("avx2", "avx2"),
    ("avx", "avx"),
    ("sse4_2", "sse4.2"),
    ("sve2", "sve2"),
    ("sve", "sve"),
    ("asimd", "neon"),
    ("neon", "neon"),
    ("v", "rvv"),
)


def widest(flags: Collection[str]) -> str | None:
    """Our name for the widest vector instructions among ``flags``, or None without any that we know."""
    return next((ours for flag, ours in _WIDEST if flag in flags), None)


def architecture_of(fields: Mapping[str, str]) -> str | None:
    """``x86_64 i686 arm64 arm riscv64 riscv32 ppc64`` by the first block of ``/proc/cpuinfo``, or None."""
    if "cpu implementer" in fields:
        return "arm64" if "asimd" in fields.get("features", "").split() else "arm"
    isa = fields.get("isa", "")
    if isa.startswith(("rv64", "rv32")):
        return f"riscv{isa[2:4]}"
    if "flags" in fields:
        return "x86_64" if "lm" in fields["flags"].split() else None
    return "ppc64" if fields.get("cpu", "").startswith("POWER") else None


def features_of(fields: Mapping[str, str]) -> frozenset[str] | None:
    """Features by the first block of ``/proc/cpuinfo``; None where it tells none."""
    isa = fields.get("isa", "")
    if isa.startswith(("rv64", "rv32")):
        single, *named = isa[4:].split("_")
        return frozenset((*single, *named))
    text = fields.get("flags") or fields.get("features")
    return frozenset(text.split()) if text else None
