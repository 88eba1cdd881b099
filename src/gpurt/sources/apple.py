"""GPUs of Apple's computers from what macOS's tools and MLX say. Pure; :func:`read_apple` runs anywhere.

The table, made by :func:`gpurt.sources.apple_query.query_apple` or by hand, has up to four entries, each of which may
say instead why it is not there (``{"error": {"reason": …, "message": …}}``)::

    {"sysctl": "hw.memsize: 137438953472\\n…",       # text
     "system_profiler": "{\\"SPDisplaysDataType\\": …}",  # JSON
     "ioreg": "<?xml …><plist …>",                   # property list
     "mlx": {"available": true, "memory_size": …, "max_recommended_working_set_size": …, …}}

Memory of Apple's own GPUs is the host's. How much of it one process may use is Metal's recommended working set, which
already reflects the administrator's setting ``iogpu.wired_limit_mb``; all of the memory is never taken for it.
Temperature, power and clock cannot be read without root, and are not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from gpurt.errors import ReasonCode
from gpurt.sources.apple_parse import Accelerator, Display, parse_accelerators, parse_displays, parse_sysctl
from gpurt.sources.sysfs import Skipped
from gpurt.sources.table import Absence, Row, absence_of, as_mapping
from gpurt.types import DeviceKind

_MOST_BYTES: Final = 2**50


@dataclass(frozen=True, slots=True)
class AppleGpu:
    """One GPU. Bytes, percent; None is "not told", and ``unavailable`` says why."""

    name: str | None
    vendor: str | None
    """``apple``; ``amd`` and ``intel`` in older computers, which MLX cannot use."""
    kind: DeviceKind
    architecture: str | None
    """Metal's name for it, e.g. ``applegpu_g13s``."""
    cores: int | None
    metal_version: int | None
    unified_memory: bool
    memory_total_bytes: int | None
    """The host's, for a GPU that has none of its own."""
    working_set_bytes: int | None
    """The most that one process should use."""
    working_set_source: Literal["metal", "sysctl"] | None
    max_buffer_bytes: int | None
    """The largest single allocation."""
    memory_used_bytes: int | None
    """By all processes."""
    utilization_percent: float | None
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class AppleInventory:
    """Every GPU of this computer, and what could not be had or understood."""

    gpus: tuple[AppleGpu, ...] = ()
    metal: Absence | None = None
    """Why MLX cannot use a GPU here; None when it can."""
    model: str | None = None
    """E.g. ``Mac16,5``."""
    os_version: str | None = None
    virtual_machine: bool | None = None
    host_memory_bytes: int | None = None
    wired_limit_bytes: int | None = None
    """What an administrator set with ``iogpu.wired_limit_mb``. 0: nothing, the system's own limit holds."""
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])
    absences: Mapping[str, Absence] = field(default_factory=dict[str, Absence])
    """Sources that did not answer, by name. The others stood in where they could."""
    skipped: tuple[Skipped, ...] = ()


def read_apple(table: object) -> AppleInventory:
    """GPUs of a recorded table. Whatever cannot be understood costs its own field, or is in ``skipped``."""
    whole = as_mapping(table)
    if whole is None:
        why = Absence(ReasonCode.ERROR, "nothing was asked")
        return AppleInventory(metal=why, skipped=(Skipped("apple", f"not a table but {type(table).__name__}"),))
    absences: dict[str, Absence] = {}
    skipped: list[Skipped] = []
    host = Row(_host(_text(whole, "sysctl", absences, skipped)))
    displays, lost = _displays(_text(whole, "system_profiler", absences, skipped))
    accelerators, lost_too = _accelerators(_text(whole, "ioreg", absences, skipped))
    skipped.extend((*lost, *lost_too))
    mlx, metal = _mlx(whole, absences)
    memory = host.integer("host_memory_bytes", 1, _MOST_BYTES, "hw.memsize")
    wired = host.integer("wired_limit_bytes", 0, _MOST_BYTES >> 20, "iogpu.wired_limit_mb")
    if wired is not None and memory is not None and wired << 20 > memory:
        wired = host.missing("wired_limit_bytes", "invalid")
    limit = None if wired is None else wired << 20
    # What keeps these two from being known keeps it from the GPU as well.
    why = {theirs: host.unavailable[ours] for ours, theirs in _FROM_HOST.items() if ours in host.unavailable}
    gpus, unclear = _gpus(_Facts(memory, limit, why), displays, accelerators, mlx)
    skipped.extend(unclear)
    return AppleInventory(
        gpus=gpus,
        metal=metal,
        model=host.text("model", "hw.model"),
        os_version=host.text("os_version", "kern.osproductversion"),
        virtual_machine=host.flag("virtual_machine", "kern.hv_vmm_present"),
        host_memory_bytes=memory,
        wired_limit_bytes=limit,
        unavailable=host.unavailable,
        absences=absences,
        skipped=tuple(skipped),
    )


_FROM_HOST: Final = {"host_memory_bytes": "memory_total_bytes", "wired_limit_bytes": "working_set_bytes"}


@dataclass(frozen=True, slots=True)
class _Facts:
    """What concerns every GPU."""

    memory_bytes: int | None
    wired_limit_bytes: int | None
    unavailable: Mapping[str, str]


def _gpus(
    facts: _Facts, displays: Sequence[Display], accelerators: Sequence[Accelerator], mlx: Row | None
) -> tuple[tuple[AppleGpu, ...], list[Skipped]]:
    """GPUs of Apple's as the first source that lists any does it, completed by the others, and all of other vendors."""
    drivers = [accelerator for accelerator in accelerators if (accelerator.driver or "").startswith("AGX")]
    apples = [display for display in displays if display.vendor == "apple"]
    # Only where there is one of each is it clear that they are the same.
    driver = drivers[0] if len(drivers) == 1 else None
    gpus = [
        _other(display)
        if display.vendor != "apple"
        else _own(facts, display, driver, mlx)
        if len(apples) == 1
        else _own(facts, display, None, None)
        for display in displays
    ]
    if not apples:
        if drivers:
            gpus += [_own(facts, None, one, mlx if driver else None) for one in drivers]
        elif mlx is not None:
            gpus.append(_own(facts, None, None, mlx))
    skipped = [
        Skipped("ioreg", f"{one.driver or 'a driver without a name'}: system_profiler alone tells about its GPU")
        for one in accelerators
        if one not in drivers and not displays
    ]
    if apples and drivers and (len(drivers) != 1 or len(apples) != 1):
        why = f"which of {len(drivers)} drivers of Apple's is of which of {len(apples)} GPUs is not told"
        skipped.append(Skipped("ioreg", why))
    return tuple(gpus), skipped


def _own(facts: _Facts, display: Display | None, driver: Accelerator | None, mlx: Row | None) -> AppleGpu:
    """A GPU of Apple's, which has the host's memory."""
    told = Row({}) if mlx is None else mlx
    named = (display.name if display else None, driver.name if driver else None, told.text("name", "device_name"))
    cores = (display.cores if display else None, driver.cores if driver else None)
    total = told.integer("memory_total_bytes", 1, _MOST_BYTES, "memory_size") or facts.memory_bytes
    most = _MOST_BYTES if total is None else total
    budget = told.integer("working_set_bytes", 1, most, "max_recommended_working_set_size")
    source: Literal["metal", "sysctl"] | None = "metal" if budget is not None else None
    # Without either, nothing is guessed: the system's own share of the memory differs by model and version.
    wired = facts.wired_limit_bytes
    if budget is None and wired:
        if wired <= most:
            budget, source = wired, "sysctl"
        else:
            told.missing("working_set_bytes", "invalid")
    used = driver.memory_used_bytes if driver else None
    gpu = AppleGpu(
        name=next((name for name in named if name is not None), None),
        vendor="apple",
        kind=DeviceKind.INTEGRATED_GPU,
        architecture=told.text("architecture"),
        cores=next((count for count in cores if count is not None), None),
        metal_version=display.metal_version if display else None,
        unified_memory=True,
        memory_total_bytes=total,
        working_set_bytes=budget,
        working_set_source=source,
        max_buffer_bytes=told.integer("max_buffer_bytes", 1, _MOST_BYTES, "max_buffer_length"),
        memory_used_bytes=used if used is None or used <= most else None,
        utilization_percent=driver.utilization_percent if driver else None,
    )
    reasons: list[Mapping[str, str]] = [told.unavailable]
    if driver is not None:
        reasons.append(driver.unavailable)
        if gpu.memory_used_bytes != used:
            reasons.append({"memory_used_bytes": "invalid"})
    if display is not None:
        reasons.append(display.unavailable)
    return _explained(gpu, *reasons, facts.unavailable)


def _other(display: Display) -> AppleGpu:
    """A GPU of another vendor, of which ``system_profiler`` alone tells."""
    kind = DeviceKind.UNKNOWN
    if display.memory_shared:
        kind = DeviceKind.INTEGRATED_GPU
    elif display.memory_bytes is not None:
        kind = DeviceKind.GPU
    gpu = AppleGpu(
        name=display.name,
        vendor=display.vendor,
        kind=kind,
        architecture=None,
        cores=display.cores,
        metal_version=display.metal_version,
        unified_memory=display.memory_shared,
        memory_total_bytes=display.memory_bytes,
        working_set_bytes=None,
        working_set_source=None,
        max_buffer_bytes=None,
        memory_used_bytes=None,
        utilization_percent=None,
    )
    why = display.unavailable.get("memory_bytes")
    return _explained(gpu, display.unavailable, {} if why is None else {"memory_total_bytes": why})


def _explained(gpu: AppleGpu, *told: Mapping[str, str]) -> AppleGpu:
    """``gpu`` with a reason for each field that is empty: the most telling of what the sources say."""
    reasons: dict[str, str] = {}
    for item in fields(gpu):
        if getattr(gpu, item.name) is None:
            said = [source[item.name] for source in told if item.name in source]
            reasons[item.name] = next((reason for reason in said if reason != "unsupported"), "unsupported")
    return replace(gpu, unavailable=reasons)


def _mlx(whole: Mapping[Any, Any], absences: dict[str, Absence]) -> tuple[Row | None, Absence | None]:
    values = as_mapping(whole.get("mlx"))
    if values is None:
        why = Absence(ReasonCode.ERROR, "MLX was not asked")
        absences["mlx"] = why
        return None, why
    why = absence_of(values)
    if why is not None:
        absences["mlx"] = why
        return None, why
    row = Row(values)
    available = row.flag("available")
    if available:
        return row, None
    text = "MLX finds no Metal device: this computer, or the virtual machine, has none"
    if available is None:
        return None, Absence(ReasonCode.ERROR, "MLX does not say whether there is a Metal device")
    return None, Absence(ReasonCode.NO_DEVICE, text)


def _text(whole: Mapping[Any, Any], name: str, absences: dict[str, Absence], skipped: list[Skipped]) -> str | None:
    """The text of a tool, or None with the reason noted."""
    value: object = whole.get(name)
    if isinstance(value, str):
        return value
    table = as_mapping(value)
    why = None if table is None else absence_of(table)
    absences[name] = why or Absence(ReasonCode.ERROR, f"{name} was not asked")
    if value is not None and why is None:
        skipped.append(Skipped(name, f"not a text but {type(value).__name__}"))
    return None


def _host(text: str | None) -> dict[str, str]:
    return {} if text is None else parse_sysctl(text)


def _displays(text: str | None) -> tuple[Sequence[Display], Sequence[Skipped]]:
    return ((), ()) if text is None else parse_displays(text)


def _accelerators(text: str | None) -> tuple[Sequence[Accelerator], Sequence[Skipped]]:
    return ((), ()) if text is None else parse_accelerators(text.encode(errors="replace"))
