"""How each library reads the value of its variable: entries to positions. Pure.

The rules are those of the libraries, mistakes included, because a process sees what its library makes of the value:
CUDA's as PyTorch and reports of real machines show them, ROCm's of amd_filter_device.cpp (ROCR) and rocdevice.cpp
(HIP), Level Zero's of execution_environment.cpp (compute-runtime), ggml's of ggml-vulkan.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpurt.printable import quoted, shortened

# C's strtoul and strtol: blanks, a sign, digits, and whatever follows.
_NUMBER: Final = re.compile(r"[ \t\n\v\f\r]*\+?([0-9]+)")
_ANY_BASE: Final = re.compile(r"\+?(0[xX][0-9a-fA-F]+|[0-9]+)")
_DIGITS: Final = re.compile(r"[0-9]+")
_NO_UUID: Final = "GPU-XX"
"""What ROCm calls a device that has none."""
_LONGEST: Final = 18
"""Digits. Longer numbers are no device's, and Python refuses to convert very long ones."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a value leaves: positions in the order in which the process will count them."""

    order: tuple[int, ...]
    by_index: bool = False
    """The value names devices by number, which only means something with the library's own count."""
    warning: str | None = None
    """What a person probably did not mean."""


@dataclass(frozen=True, slots=True)
class Named:
    """What an entry of CUDA's variable may call one position: a device's UUID, or the two spellings of a partition."""

    position: int
    names: tuple[str, ...]


def cuda_list(name: str, value: str, count: int, named: Sequence[Named]) -> Chosen:
    """CUDA: the list ends at the first entry that is not valid; an entry that comes twice empties the list.

    Numbers are read as ``strtoul`` does: ``1gpu2`` is 1 and ``0-2`` is 0. UUIDs may be shortened as long as they are
    unique; the first entry decides between devices and partitions. ``count`` bounds the numbers.
    """
    if value.startswith(("GPU-", "MIG-")):
        return _cuda_by_uuid(name, value, named)
    order: list[int] = []
    warning: str | None = None
    for entry in value.split(","):
        match = _NUMBER.match(entry)
        index = _index(match[1], count) if match else None
        if match is None or index is None:
            if value.strip() not in ("", "-1"):
                warning = f"{name}: {quoted(entry)} is no device; the list ends there"
            break
        if index in order:
            return Chosen((), True, f"{name}: device {index} is named twice, which hides every device")
        if entry[match.end() :].strip():
            warning = f"{name}: {quoted(entry)} counts as {index}; ranges are not understood"
        order.append(index)
    return Chosen(tuple(order), True, warning)


def rocr_list(name: str, value: str, uuids: Sequence[str | None]) -> Chosen:
    """ROCR: UUIDs, unique beginnings of them, or numbers in any base. Ends at what is not valid or comes twice."""
    order: list[int] = []
    by_index = False
    for entry in value.split(",") if value else ():
        token = entry.strip().upper()
        if token.startswith("G"):
            found = _prefixed(token, [None if uuid is None else uuid.upper() for uuid in uuids])
        else:
            by_index = True
            match = _ANY_BASE.fullmatch(token)
            found = _index(match[1], len(uuids), any_base=True) if match else None
        if found is None:
            ended = None if value.strip() == "-1" else f"{name}: {quoted(entry)} is no device; the list ends there"
            return Chosen(tuple(order), by_index, ended)
        if found in order:
            return Chosen(tuple(order), by_index, f"{name}: {quoted(entry)} is named twice; the list ends there")
        order.append(found)
    return Chosen(tuple(order), by_index)


def hip_list(name: str, value: str, uuids: Sequence[str | None]) -> Chosen:
    """HIP and AMD's OpenCL: numbers as they are printed, or parts of UUIDs, the first match. Twice is once.

    ``value`` is not empty: an empty variable is none to HIP.
    """
    order: list[int] = []
    by_index = False
    entries = value.split(",")
    if entries[-1] == "":
        del entries[-1]  # HIP stops at the end of the text
    for entry in entries:
        if "GPU-" in entry:
            found = next((i for i, uuid in enumerate(uuids) if entry in (uuid or _NO_UUID)), None)
        else:
            by_index = True
            found = _index(entry, len(uuids)) if _DIGITS.fullmatch(entry) else None
            found = found if str(found) == entry else None
        if found is None:
            ended = None if value == "-1" else f"{name}: {quoted(entry)} is no device; the list ends there"
            return Chosen(tuple(order), by_index, ended)
        if found not in order:
            order.append(found)
    return Chosen(tuple(order), by_index)


def level_zero_list(name: str, value: str, tiles: Sequence[int], *, composite: bool) -> Chosen:
    """Level Zero: a set, not a list: devices keep their own order, and entries that name none are passed over.

    ``tiles`` by device. With ``composite`` an entry is ``device`` or ``device.tile``; else every tile is a device.
    """
    owners = [device for device, count in enumerate(tiles) for _ in range(1 if composite else max(1, count))]
    visible: set[int] = set()
    warning: str | None = None
    for entry in value.split(","):
        device, dot, tile = entry.strip().partition(".")
        index = _index(device, len(owners)) if _DIGITS.fullmatch(device) else None
        known = index is not None
        if known and dot:
            known = composite and bool(_DIGITS.fullmatch(tile)) and _index(tile, max(1, tiles[index or 0])) is not None
        if known and index is not None:
            visible.add(owners[index])
        elif entry.strip() != "-1":
            warning = f"{name}: {quoted(entry)} is no device and has no effect"
    return Chosen(tuple(sorted(visible)), True, warning)


def ggml_vulkan_list(name: str, value: str, count: int) -> Chosen:
    """ggml's Vulkan: numbers between commas or blanks. One that is too large disables Vulkan altogether."""
    order: list[int] = []
    for entry in value.replace(",", " ").split():
        match = _NUMBER.match(entry)
        if match is None and not entry.startswith("-"):
            return Chosen(tuple(order), True, f"{name}: {quoted(entry)} is no number; the list ends there")
        index = _index(match[1], count) if match else None
        if index is None:
            ended = (
                None
                if value.strip() == "-1"
                else f"{name}: there is no device {shortened(entry)}, which disables Vulkan"
            )
            return Chosen((), True, ended)
        if index not in order:
            order.append(index)
    return Chosen(tuple(order), True)


def _cuda_by_uuid(name: str, value: str, named: Sequence[Named]) -> Chosen:
    order: list[int] = []
    kind = value[:4].lower()
    for entry in value.split(","):
        wanted = entry.rstrip().lower()
        exact = {item.position for item in named if any(_is_named(wanted, n.lower()) for n in item.names)}
        matches = exact or {item.position for item in named if any(n.lower().startswith(wanted) for n in item.names)}
        # The first entry decides between whole devices and partitions; a list cannot have both.
        # Nor does a bare "GPU-" mean the only device: seen with driver 580, where PyTorch's own count is 1.
        if not wanted.startswith(kind) or len(wanted) == len(kind) or len(matches) != 1:
            warning = f"{name}: {quoted(entry)} names {len(matches)} devices; the list ends there"
            return Chosen(tuple(order), warning=warning)
        (position,) = matches
        if position in order:
            return Chosen((), warning=f"{name}: {quoted(entry)} is named twice, which hides every device")
        order.append(position)
    return Chosen(tuple(order))


def _is_named(wanted: str, name: str) -> bool:
    # CUDA looks no further than the UUID is long: seen with driver 580, where PyTorch's own count is 0.
    return wanted == name or (name.startswith("gpu-") and wanted.startswith(name))


def _prefixed(token: str, uuids: Sequence[str | None]) -> int | None:
    """Position of the only UUID that begins with ``token``. ROCR takes 5 to 20 characters."""
    if not 5 <= len(token) <= 20:
        return None
    matches = [i for i, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(token)]
    return matches[0] if len(matches) == 1 else None


def _index(digits: str, count: int, *, any_base: bool = False) -> int | None:
    base = 10
    if any_base and digits[:1] == "0":
        base = 16 if digits[1:2] in ("x", "X") else 8
    significant = digits[2:] if base == 16 else digits
    significant = significant.lstrip("0") or "0"
    if len(significant) > _LONGEST or (base == 8 and not set(significant) <= set("01234567")):
        return None
    index = int(significant, base)
    return index if index < count else None
