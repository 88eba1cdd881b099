"""A plan for people: a table of stages, a bar for every device, and what it all comes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
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
_LEAST_BAR: Final = 8
_NAME_WIDTH: Final = 44
_BACK: Final = "back"


def render(plan: Plan, inventory: Inventory, width: int) -> Iterator[RenderableType]:
    """What to print, in order, in lines of ``width`` characters. A figure with a ``~`` rests on a table or an
    assumption."""
    yield _line(_title(plan), "bold")
    simulated = inventory.simulated & set(plan.devices)
    if len(simulated) == len(plan.devices):
        yield _line("all devices are simulated", "bold")
        simulated = frozenset[str]()  # said once, and not of each
    yield _stages(plan, inventory, simulated)
    if len(plan.stages) > 1:
        yield _line(f"{_BACK}: the way of a token from the last stage to the first, for the next token", "dim")
    yield _line("")
    yield from _bars(plan, simulated, width)
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


def _stages(plan: Plan, inventory: Inventory, simulated: Set[str]) -> Table:
    from rich.table import Table

    table = Table(header_style="bold")
    for heading in ("stage", "device", "node", "layers"):
        table.add_column(heading, overflow="fold")
    for heading in ("weights", "KV", "activations", "time", "to next"):
        table.add_column(heading, justify="right", no_wrap=True)
    devices = {device.id: device for device in inventory.devices}
    names = {device.id: device.name for device in inventory.devices}
    for number, stage in enumerate(plan.stages):
        mark = ESTIMATED if is_estimated(stage, devices) else ""
        first = (str(number + 1), f"{stage.start}-{stage.end - 1} ({stage.layers})")
        last = (f"{mark}{time_words(stage.seconds)}", _way(plan, number))
        for held in stage.held:
            name = _label(held, stage, names, simulated)
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
    last = number == len(plan.stages) - 1
    return f"{ESTIMATED if hop.estimated else ''}{time_words(hop.seconds)}" + (f" {_BACK}" if last else "")


def _label(held: DeviceBytes, stage: Stage, names: Mapping[str, str], simulated: Set[str]) -> str:
    """Without the node, which has a column of its own; with what people call the device."""
    words = [held.device.removeprefix(f"{stage.node}/")]
    if names.get(held.device):
        words.append(names[held.device])
    if held.device in simulated:
        words.append("(simulated)")
    return " ".join(words)


def _bars(plan: Plan, simulated: Set[str], line_width: int) -> Iterator[Text]:
    """Used and usable memory of each device of the plan, in its order."""
    rows = [held for stage in plan.stages for held in stage.held]
    told = [_figures(held, simulated) for held in rows]
    rest = line_width - max(map(len, told)) - len("  ")
    names = [printable(held.device) for held in rows]
    width = min(_NAME_WIDTH, max(map(len, names)), max(_LEAST_BAR, rest - _LEAST_BAR))
    bar = max(_LEAST_BAR, min(_BAR_WIDTH, rest - width))
    for held, name, figures in zip(rows, names, told, strict=True):
        shown = name if len(name) <= width else "…" + name[1 - width :]
        line = _line(f"{shown:<{width}} ")
        for letter, style in _filled(held, bar):
            line.append(letter, style=style)
        line.append(f" {figures}")
        yield line
    letters = ", ".join(f"{letter} {name}" for name, letter, _ in _PARTS)
    yield _line(f"{'':<{width}} {letters}, {_FREE} free, {_KEPT} kept free", "dim")


def _figures(held: DeviceBytes, simulated: Set[str]) -> str:
    used = held.weights + held.kv + held.activations
    mark = " (simulated)" if held.device in simulated else ""
    return f"{size_words(used)} / {size_words(held.usable)}, {size_words(held.reserve)} kept free{mark}"


def _filled(held: DeviceBytes, width: int) -> Iterator[tuple[str, str]]:
    """The bar of a device, letter by letter with its colour. Rounded so that something is never nothing."""
    sizes = [int(getattr(held, name)) for name, _, _ in _PARTS]
    scale = width / max(1, held.usable)
    drawn = 0
    for (_, letter, style), size in zip(_PARTS, sizes, strict=True):
        number = min(width - drawn, max(1, round(size * scale)) if size else 0)
        drawn += number
        yield letter * number, style
    kept = min(width - drawn, round(held.reserve * scale))
    yield _FREE * (width - drawn - kept), "dim"
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
