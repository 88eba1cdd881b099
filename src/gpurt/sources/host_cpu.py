"""The host's processor: how many CPUs this process may keep busy, what they are called, and what they can do."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpurt.sources.host_cgroup import cpu_quota, cpuset
from gpurt.sources.host_files import HostFiles
from gpurt.sources.host_isa import ARM_IMPLEMENTERS, ARM_PARTS, CPU_VENDORS, architecture_of, features_of, widest
from gpurt.sources.sysfs import Skipped, parse_number

_ROOT = Path("/")

Sysctl = Callable[[str], str | None]
"""Answers for a name of sysctl(3), such as ``machdep.cpu.brand_string``; None where there is none."""


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """The first processor of this host: ``vendor`` is ``unknown`` and ``instruction_set`` the machine where untold."""

    name: str
    vendor: str
    instruction_set: str


@dataclass(frozen=True, slots=True)
class CpuBudget:
    """How many CPUs this process may keep busy.

    Attributes:
        count: the smallest of all below, the quota rounded up; at least 1.
        allowed: CPUs that its affinity, its group's cpuset and what is online leave.
        quota: share of CPU time that the tightest cgroup grants, in CPUs; None without a limit.
        source: what decided ``count``: ``quota``, ``cpuset``, ``affinity``, or ``os`` where no file tells.
        skipped: files that are there and could not be understood.
    """

    count: int
    allowed: int
    quota: float | None
    source: str
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """What the processor can do.

    Attributes:
        architecture: ``x86_64 arm64 riscv64 …``, as the files tell it, else as Python does.
        flags: features under their names in Linux's ``/proc/cpuinfo``, whatever system told them; None if none did.
        level: ``x86-64-v1`` to ``x86-64-v4`` of the x86-64 psABI; None elsewhere and where it is not told.
    """

    architecture: str
    flags: frozenset[str] | None
    level: str | None


def darwin_sysctl(name: str) -> str | None:
    """Text under a name of sysctlbyname(3) on macOS; None elsewhere, or where there is no such name."""
    if sys.platform != "darwin":
        return None
    import ctypes  # 15 ms that Linux does not need

    call = ctypes.CDLL(None).sysctlbyname
    size = ctypes.c_size_t()
    if call(name.encode(), None, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    buffer = ctypes.create_string_buffer(size.value)
    if call(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    return buffer.value.decode(errors="replace").strip() or None


def cpu_budget(root: Path = _ROOT) -> CpuBudget:
    """CPUs that this process may keep busy, with what decided."""
    files = HostFiles(root)
    status = root / "proc/self/status"
    listed = files.fields(status).get("cpus_allowed_list")
    affinity = files.cpu_list(status, listed) if listed else None
    allowed, source = affinity, "affinity"
    online = files.cpus(root / "sys/devices/system/cpu/online")
    if allowed and online and allowed & online:
        allowed &= online  # affinity may name CPUs that could be plugged in
    group = cpuset(root, files)
    if group and (allowed is None or (allowed & group and not allowed <= group)):
        allowed, source = (group if allowed is None else allowed & group), "cpuset"
    if not allowed:
        count, source = os.cpu_count() or 1, "os"
    else:
        count = len(allowed)
    quota = cpu_quota(root, files)
    result = count
    if quota is not None and math.ceil(quota) < count:
        result, source = max(1, math.ceil(quota)), "quota"
    return CpuBudget(result, count, quota, source, tuple(files.skipped))


def cpu_count(root: Path = _ROOT) -> int:
    """CPUs this process may keep busy: the smaller of affinity and cgroup quota, the quota rounded up."""
    return cpu_budget(root).count


def cpu_info(root: Path = _ROOT, sysctl: Sysctl = darwin_sysctl) -> CpuInfo:
    """Name, vendor and widest vector instruction set of the processor.

    Args:
        sysctl: asked where there is no ``/proc``.
    """
    files = HostFiles(root)
    fields = files.fields(root / "proc/cpuinfo")
    machine = architecture_of(fields) or platform.machine().lower() or "unknown"
    brand = None if fields else sysctl("machdep.cpu.brand_string")
    if brand is not None:
        return _by_brand(brand, sysctl, machine)
    flags = features_of(fields) or frozenset()
    vendor = CPU_VENDORS.get(fields.get("vendor_id", ""), "unknown")
    part = None
    implementer = parse_number(fields.get("cpu implementer", ""))
    if implementer is not None:
        vendor = ARM_IMPLEMENTERS.get(implementer, "unknown")
        part = ARM_PARTS.get((implementer, parse_number(fields.get("cpu part", "")) or 0))
    name = (
        fields.get("model name")
        or (files.text(root / "proc/device-tree/model") or "").strip("\0")
        or part
        or fields.get("hardware")
        or fields.get("uarch")
        or fields.get("cpu")
        or platform.processor()
        or f"{machine} CPU"
    )
    return CpuInfo(name, vendor, widest(flags) or machine)


def cpu_name(root: Path = _ROOT) -> str:
    """Name of the processor as the system prints it."""
    return cpu_info(root).name


def cpu_features(root: Path = _ROOT, sysctl: Sysctl = darwin_sysctl) -> CpuFeatures:
    """What the processor can do. Arguments as of :func:`cpu_info`."""
    fields = HostFiles(root).fields(root / "proc/cpuinfo")
    machine = architecture_of(fields) or platform.machine().lower() or "unknown"
    flags = features_of(fields) if fields else _by_sysctl(sysctl)
    return CpuFeatures(machine, flags, _level(flags) if flags and machine in _X86_64 else None)


_X86_64: Final = ("x86_64", "amd64")

# x86-64 psABI, "Micro-architecture levels"; names as in Linux's cpufeatures.h.
_LEVELS: Final[Mapping[str, frozenset[str]]] = {
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}),
    "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
}


def _level(flags: frozenset[str]) -> str:
    level = "x86-64-v1"
    for name, needed in _LEVELS.items():
        if not needed <= flags:
            break
        level = name
    return level


def _by_brand(brand: str, sysctl: Sysctl, machine: str) -> CpuInfo:
    flags = _by_sysctl(sysctl) or frozenset()
    if brand.startswith(("Apple", "VirtualApple")):
        return CpuInfo(brand, "apple", widest(flags) or ("neon" if machine in ("arm64", "aarch64") else machine))
    vendor = next(
        (ours for theirs, ours in (("Intel", "intel"), ("AMD", "amd")) if brand.startswith(theirs)), "unknown"
    )
    return CpuInfo(brand, vendor, widest(flags) or machine)


# What macOS calls features of x86, where it is not Linux's name in capitals.
_MACOS_NAMES: Final = {
    "avx1.0": "avx",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "sse3": "pni",
    "lzcnt": "abm",
    "lahf": "lahf_lm",
}

# hw.optional.arm.FEAT_… and their names in Linux's hwcaps.
_ARM_FEATURES: Final = {
    "AdvSIMD": "asimd",
    "FEAT_BF16": "bf16",
    "FEAT_DotProd": "asimddp",
    "FEAT_FP16": "asimdhp",
    "FEAT_I8MM": "i8mm",
    "FEAT_SME": "sme",
    "FEAT_SME2": "sme2",
}


def _by_sysctl(sysctl: Sysctl) -> frozenset[str] | None:
    """Features as macOS tells them: words for Intel, one name each for Apple."""
    words = " ".join(
        sysctl(f"machdep.cpu.{name}") or "" for name in ("features", "leaf7_features", "extfeatures")
    ).lower()
    if words.strip():
        return frozenset(_MACOS_NAMES.get(word, word) for word in words.split())
    # These are integers: darwin_sysctl gives their bytes as text, and other readers their digits.
    told = {ours: sysctl(f"hw.optional.arm.{theirs}") for theirs, ours in _ARM_FEATURES.items()}
    flags = frozenset(name for name, value in told.items() if value in ("1", "\x01"))
    return flags or None
