"""The stages of a plan as a table that fits the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Final, NamedTuple

from gpurt.placement.explanation import is_estimated
from gpurt.placement.plan import DeviceBytes, Plan, Stage
from gpurt.placement.words import size_words, time_words
from gpurt.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

    from gpurt.placement.inventory import Inventory

ESTIMATED: Final = "~"
BACK: Final = "back"
_LEAST_DEVICE: Final = 16
_LEAST_NODE: Final = 8
_AROUND: Final = 3
"""Characters that a column takes beside its text: a space on either side, and a line."""


class _Column(NamedTuple):
    heading: str
    cells: Sequence[str]
    right: bool = False
    least: int | None = None
    """Characters to which it may be folded; None: it is never folded."""

    @property
    def needs(self) -> int:
        from rich.cells import cell_len

        most = max(cell_len(text) for text in (self.heading, *self.cells))
        return most if self.least is None else min(most, self.least)


def stages_table(plan: Plan, inventory: Inventory, simulated: Set[str], width: int) -> Table:
    """In lines of ``width`` characters: what does not fit there is left to the bars below it, which say it too."""
    columns = _columns(plan, inventory, simulated)
    if sum(each.needs + _AROUND for each in columns) + 1 > width:
        columns = [each for each in columns if each.heading not in ("node", "KV", "activations")]
    return _drawn(columns)


def way_words(plan: Plan, number: int) -> str:
    """The way from a stage to the next one, or back to the first; nothing where there is one stage alone."""
    if len(plan.stages) == 1:
        return ""
    hop = plan.hops[number]
    last = number == len(plan.stages) - 1
    return f"{ESTIMATED if hop.estimated else ''}{time_words(hop.seconds)}" + (f" {BACK}" if last else "")


def _columns(plan: Plan, inventory: Inventory, simulated: Set[str]) -> list[_Column]:
    devices = {device.id: device for device in inventory.devices}
    names = {device.id: device.name for device in inventory.devices}
    rows: list[tuple[str, ...]] = []
    for number, stage in enumerate(plan.stages):
        mark = ESTIMATED if stage.link_estimated or is_estimated(stage, devices) else ""
        layers = str(stage.start) if stage.layers == 1 else f"{stage.start}-{stage.end - 1}"
        first = (str(number + 1), f"{layers} ({stage.layers})")
        last = (f"{mark}{time_words(stage.seconds)}", way_words(plan, number))
        for held in stage.held:
            name = _label(held, stage, names, simulated)
            sizes = (size_words(held.weights), size_words(held.kv), size_words(held.activations))
            rows.append((first[0], name, stage.node, first[1], *sizes, *last))
            first, last = ("", "shared"), ("", "")
    told = [[printable(text) for text in column] for column in zip(*rows, strict=True)]
    return [
        _Column("stage", told[0]),
        _Column("device", told[1], least=_LEAST_DEVICE),
        _Column("node", told[2], least=_LEAST_NODE),
        _Column("layers", told[3]),
        *(
            _Column(heading, cells, right=True)
            for heading, cells in zip(("weights", "KV", "activations", "time", "to next"), told[4:], strict=True)
        ),
    ]


def _drawn(columns: Sequence[_Column]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold")
    for each in columns:
        table.add_column(
            each.heading,
            justify="right" if each.right else "left",
            overflow="fold",
            no_wrap=each.least is None,
        )
    for row in zip(*(each.cells for each in columns), strict=True):
        # Text, not str: "[…]" in a name must not be read as markup.
        table.add_row(*(Text(text) for text in row))
    return table


def _label(held: DeviceBytes, stage: Stage, names: Mapping[str, str], simulated: Set[str]) -> str:
    """Without the node, which has a column of its own; with what people call the device."""
    words = [held.device.removeprefix(f"{stage.node}/")]
    if names.get(held.device):
        words.append(names[held.device])
    if held.device in simulated:
        words.append("(simulated)")
    return " ".join(words)
