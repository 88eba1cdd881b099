"""Which names of vendors and backends there are, so that a misspelt one is not taken for one that nobody has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Final

from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InvalidPlacementInput
from gpurt.printable import quoted

VENDORS: Final = frozenset(
    {
        "amd", "ampere", "apple", "arm", "broadcom", "fujitsu", "google", "hisilicon", "imagination", "intel",
        "mediatek", "mesa", "microsoft", "nvidia", "qualcomm", "rockchip", "samsung", "unisoc", "unknown",
    }
)  # fmt: skip
"""All that gpurt's own backends call a vendor. A plug-in's devices may have others, which their records tell."""


def check_known(
    names: Iterable[str],
    known: Iterable[str],
    devices: Sequence[PlacementDevice],
    of: Callable[[PlacementDevice], str],
    field: str,
) -> None:
    """
    Raises:
        InvalidPlacementInput: a name, for vendors in lower case, is neither among ``known`` nor what a device has.
    """
    strange = [name for name in names if name not in known]
    if not strange:
        return
    there = {of(device) for device in devices} | {of(device).lower() for device in devices}
    for name in strange:
        if name not in there:
            near = get_close_matches(name, [*known, *there], 1)
            raise InvalidPlacementInput(
                f"{quoted(name)} is known to nobody, and no device has it",
                field=field,
                hint=f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted({*known, *there}))}",
            )
