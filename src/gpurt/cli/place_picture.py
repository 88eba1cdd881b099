"""A plan for people: a table of stages, a bar for every device, and what it all comes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from gpurt.placement.explanation import is_estimated
from gpurt.placement.plan import DeviceBytes, Plan, Stage
from gpurt.placement.words import counted, size_words, time_words
from gpurt.printable import MAX_LINE, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from gpurt.placement.inventory import Inventory

ESTIMATED: Final = "~"
_PARTS: Final = (("weights", "#", "cyan"), ("kv", "+", "magenta"), ("activations", "*", "yellow"))
"""What fills a device, the letter of each where a bar has no colours, and its colour."""
_FREE: Final = "."
_KEPT: Final = "-"
_BAR_WIDTH: Final = 32
_NAME_WIDTH: Final = 44


def render(plan: Plan, inventory: Inventory) -> Iterator[RenderableType]:
    """What to print, in order. A figure with a ``~`` rests on a table or an assumption."""
    yield _line(_title(plan), "bold")
    yield _stages(plan, inventory)
    yield _line("")
    yield from _bars(plan, inventory)
    yield _line("")
    for text in totals(plan):
        yield _line(text)
    if plan.predicted.estimated:
        yield _line(f"{ESTIMATED} not measured: from a table, or assumed by where the devices are", "dim")


def totals(plan: Plan) -> Iterator[str]:
    """Time, proof and solver, each in a line."""
    told = plan.predicted
    mark = ESTIMATED if told.estimated else ""
    yield (
        f"{mark}{time_words(told.latency_seconds)} per token: {time_words(told.compute_seconds)} compute, "
        f"{time_words(told.memory_seconds)} memory, {time_words(told.link_seconds)} links, "
        f"{time_words(told.overhead_seconds)} fixed"
    )
    batch = plan.workload.batch
    if told.bottleneck_seconds > 0:
        rate = batch / told.bottleneck_seconds
        yield (
            f"{mark}{time_words(told.bottleneck_seconds)} per step of a full pipeline: "
            f"{rate:.4g} {'token' if rate == 1 else 'tokens'} a second"
        )
    bound = "no bound is known" if plan.bound is None else f"no plan is below {time_words(plan.bound)}"
    gap = "" if plan.gap is None else f", gap {plan.gap:.2%}"
    yield f"{plan.status.value}: {plan.objective.value} {time_words(plan.value)}, {bound}{gap}"
    yield f"solved in {time_words(plan.solve_seconds)} by {plan.solver}, seed {plan.seed}"


def _title(plan: Plan) -> str:
    work = plan.workload
    context = f"{work.context_tokens:,} tokens of context" if work.context_tokens else "no cache counted"
    return (
        f"{plan.model}: {counted(plan.layer_count, 'layer')} in {counted(len(plan.stages), 'stage')} on "
        f"{counted(len(plan.devices), 'device')}, {context}, batch {work.batch}"
    )


def _stages(plan: Plan, inventory: Inventory) -> Table:
    from rich.table import Table

    table = Table(header_style="bold")
    for heading in ("stage", "device", "node", "layers"):
        table.add_column(heading, overflow="fold")
    for heading in ("weights", "KV", "activations", "time", "to next"):
        table.add_column(heading, justify="right", no_wrap=True)
    devices = {device.id: device for device in inventory.devices}
    for number, stage in enumerate(plan.stages):
        mark = ESTIMATED if is_estimated(stage, devices) else ""
        first = (str(number + 1), f"{stage.start}-{stage.end - 1} ({stage.layers})")
        last = (f"{mark}{time_words(stage.seconds)}", _way(plan, number))
        for held in stage.held:
            name = _label(held, stage, inventory)
            sizes = (size_words(held.weights), size_words(held.kv), size_words(held.activations))
            cells = (first[0], name, stage.node, first[1], *sizes, *last)
            table.add_row(*(_cell(text) for text in cells))
            first, last = ("", "shared"), ("", "")
    return table


def _way(plan: Plan, number: int) -> str:
    """The way from a stage to the next one, or back to the first; nothing where there is one stage alone."""
    if len(plan.stages) == 1:
        return ""
    hop = plan.hops[number]
    return f"{ESTIMATED if hop.estimated else ''}{time_words(hop.seconds)}"


def _label(held: DeviceBytes, stage: Stage, inventory: Inventory) -> str:
    """Without the node, which has a column of its own; with what people call the device."""
    known = {device.id: device.name for device in inventory.devices}
    words = [held.device.removeprefix(f"{stage.node}/")]
    if known.get(held.device):
        words.append(known[held.device])
    if held.device in inventory.simulated:
        words.append("(simulated)")
    return " ".join(words)


def _bars(plan: Plan, inventory: Inventory) -> Iterator[Text]:
    """Used and usable memory of each device of the plan, in its order."""
    rows = [(held, stage) for stage in plan.stages for held in stage.held]
    width = min(_NAME_WIDTH, max(len(held.device) for held, _ in rows))
    for held, _ in rows:
        simulated = " (simulated)" if held.device in inventory.simulated else ""
        used = held.weights + held.kv + held.activations
        name = printable(held.device)
        name = name if len(name) <= width else "…" + name[1 - width :]
        line = _line(f"{name:<{width}} ")
        for letter, style in _filled(held):
            line.append(letter, style=style)
        line.append(f" {size_words(used)} / {size_words(held.usable)}, {size_words(held.reserve)} kept free{simulated}")
        yield line
    letters = ", ".join(f"{letter} {name}" for name, letter, _ in _PARTS)
    yield _line(f"{'':<{width}} {letters}, {_FREE} free, {_KEPT} kept free", "dim")


def _filled(held: DeviceBytes) -> Iterator[tuple[str, str]]:
    """The bar of a device, letter by letter with its colour. Rounded so that something is never nothing."""
    sizes = [int(getattr(held, name)) for name, _, _ in _PARTS]
    scale = _BAR_WIDTH / max(1, held.usable)
    drawn = 0
    for (_, letter, style), size in zip(_PARTS, sizes, strict=True):
        number = min(_BAR_WIDTH - drawn, max(1, round(size * scale)) if size else 0)
        drawn += number
        yield letter * number, style
    kept = min(_BAR_WIDTH - drawn, round(held.reserve * scale))
    yield _FREE * (_BAR_WIDTH - drawn - kept), "dim"
    yield _KEPT * kept, "dim"


def _cell(text: str) -> Text:
    from rich.text import Text

    # Text, not str: "[…]" in a name must not be read as markup.
    return Text(printable(text))


def _line(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text, MAX_LINE), style=style)


def render_lines(lines: Sequence[str]) -> Iterator[Text]:
    """Sentences; terminals wrap them."""
    return map(_line, lines)
