"""``ZE_AFFINITY_MASK`` over Intel's devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gpurt.visibility.candidates import Candidate
from gpurt.visibility.lists import level_zero_list
from gpurt.visibility.outcome import Outcome
from gpurt.visibility.variables import ZE_AFFINITY_MASK, ZE_ENABLE_PCI_ID_DEVICE_ORDER, ZE_FLAT_DEVICE_HIERARCHY

COMPOSITE: Final = "COMPOSITE"


def resolve_intel(environ: Mapping[str, str], candidates: Sequence[Candidate]) -> Outcome:
    """Which of Intel's candidates Level Zero may use. A device of which one tile is named is visible."""
    if not candidates:
        return Outcome()
    counted = in_level_zero_order(environ, candidates)
    value = environ.get(ZE_AFFINITY_MASK)
    warning: str | None = None
    shown = counted
    if value and value != "default":
        tiles = [c.tiles for c in counted]
        picked = level_zero_list(ZE_AFFINITY_MASK, value, tiles, composite=is_composite(environ))
        shown, warning = [counted[position] for position in picked.order], picked.warning
    why = f"{ZE_AFFINITY_MASK} does not name it"
    ids = tuple(c.device_id for c in shown)
    return Outcome(
        visible=ids,
        hidden={c.device_id: why for c in counted if c not in shown},
        order={"level_zero": ids},
        warnings=(warning,) if warning else (),
    )


def in_level_zero_order(environ: Mapping[str, str], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Cards before GPUs inside processors, each by PCI address; or by address alone."""
    by_address = environ.get(ZE_ENABLE_PCI_ID_DEVICE_ORDER, "0") not in ("", "0")
    return sorted(candidates, key=lambda c: (not by_address and c.integrated, c.pci_address or ""))


def is_composite(environ: Mapping[str, str]) -> bool:
    """Level Zero counts devices, not their tiles."""
    return environ.get(ZE_FLAT_DEVICE_HIERARCHY) == COMPOSITE
