"""What ``CUDA_VISIBLE_DEVICES`` leaves visible, as the CUDA runtime reads it. Pure.

The list ends at the first entry that is not valid, it is never skipped. A device that is named twice empties the
list. Order is meaning: the first entry becomes device 0. Numbers are read as C's ``strtoul`` does, so ``"1gpu2"``
is 1 and ``"0-2"`` is 0; UUIDs may be shortened as long as they are unique.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CUDA_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
CUDA_DEVICE_ORDER: Final = "CUDA_DEVICE_ORDER"

_NUMBER: Final = re.compile(r"\s*\+?(\d+)")


@dataclass(frozen=True, slots=True)
class Visible:
    """Positions of the visible devices, in their visible order."""

    order: tuple[int, ...]
    by_index: bool = False
    """The value names positions, which CUDA counts by its own order unless CUDA_DEVICE_ORDER is PCI_BUS_ID."""
    warning: str | None = None
    """What a person probably did not mean."""


def cuda_visible(value: str | None, uuids: Sequence[str | None]) -> Visible:
    """Which of the devices with ``uuids`` (None where unknown) a process with that value of the variable sees."""
    if value is None:
        return Visible(tuple(range(len(uuids))))
    if value.startswith(("GPU-", "MIG-")):
        return _by_uuid(value, uuids)
    return _by_index(value, len(uuids))


def _by_uuid(value: str, uuids: Sequence[str | None]) -> Visible:
    order: list[int] = []
    kind = value[:4].lower()
    for entry in value.split(","):
        wanted = entry.rstrip().lower()
        matches = [i for i, uuid in enumerate(uuids) if uuid is not None and uuid.lower().startswith(wanted)]
        # The first entry decides between whole devices and partitions; a list cannot have both.
        if not wanted.startswith(kind) or len(matches) != 1:
            warning = f"{CUDA_VISIBLE_DEVICES}: {entry!r} names {len(matches)} devices; the list ends there"
            return Visible(tuple(order), warning=warning)
        if matches[0] in order:
            return Visible((), warning=f"{CUDA_VISIBLE_DEVICES}: {entry!r} is named twice, which hides every device")
        order.append(matches[0])
    return Visible(tuple(order))


def _by_index(value: str, count: int) -> Visible:
    order: list[int] = []
    warning: str | None = None
    for entry in value.split(","):
        match = _NUMBER.match(entry)
        if match is None or int(match[1]) >= count:
            if value.strip() not in ("", "-1"):
                warning = f"{CUDA_VISIBLE_DEVICES}: {entry!r} is no device; the list ends there"
            break
        index = int(match[1])
        if index in order:
            warning = f"{CUDA_VISIBLE_DEVICES}: device {index} is named twice, which hides every device"
            return Visible((), by_index=True, warning=warning)
        if entry[match.end() :].strip():
            warning = f"{CUDA_VISIBLE_DEVICES}: {entry!r} counts as {index}; ranges are not understood"
        order.append(index)
    return Visible(tuple(order), by_index=True, warning=warning)
