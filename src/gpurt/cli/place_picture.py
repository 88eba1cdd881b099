"""A plan for people: a table of stages, a bar for every device, and what it all comes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING, Final

from gpurt.cli.place_stages import BACK, ESTIMATED, stages_table
from gpurt.placement.plan import DeviceBytes, Plan
from gpurt.placement.words import counted, size_words, time_words
from gpurt.printable import MAX_LINE, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from gpurt.placement.inventory import Inventory
    from gpurt.placement.replicated import ReplicatedPlan

_PARTS: Final = (
    ("weights", "weights", "#", "cyan"),
    ("kv", "KV", "+", "magenta"),
    ("activations", "activations", "*", "yellow"),
)
"""What fills a device: its field, its name, the letter of it where a bar has no colours, and its colour."""
_FREE: Final = "."
_KEPT: Final = "-"
_BAR_WIDTH: Final = 32
_LEAST_BAR: Final = 8
_NAME_WIDTH: Final = 44


def render(plan: Plan, inventory: Inventory, width: int) -> Iterator[RenderableType]:
    """What to print, in order, the table and the bars in lines of ``width`` characters. A figure with a ``~`` rests on
    a table or an assumption."""
    yield _line(_title(plan), "bold")
    simulated = inventory.simulated & set(plan.devices)
    if len(simulated) == len(plan.devices):
        yield _line("all devices are simulated", "bold")
        simulated = frozenset[str]()  # said once, and not of each
    yield from _devices(plan, inventory, simulated, width)
    for text in totals(plan):
        yield _line(text)
    yield from _footnote(estimated=plan.predicted.estimated)


def render_replicas(found: ReplicatedPlan, inventory: Inventory, width: int) -> Iterator[RenderableType]:
    """Each replica as :func:`render` shows a plan, and what they come to together."""
    work = found.plans[0]
    names = set(found.devices)
    yield _line(
        f"{work.model}: {counted(len(found.plans), 'replica')} on {counted(len(names), 'device')}, {_work(work)} each",
        "bold",
    )
    simulated = inventory.simulated & names
    if len(simulated) == len(names):
        yield _line("all devices are simulated", "bold")
        simulated = frozenset[str]()
    for number, plan in enumerate(found.plans):
        yield _line("")
        yield _line(f"replica {number + 1}: {_extent(plan)}", "bold")
        yield from _devices(plan, inventory, simulated, width)
        yield from map(_line, _times(plan))
    yield _line("")
    yield from map(_line, totals_of_replicas(found))
    yield from _footnote(estimated=any(plan.predicted.estimated for plan in found.plans))


def totals(plan: Plan) -> Iterator[str]:
    """Time, proof and solver, each in a line."""
    yield from _times(plan)
    bound = "no bound is known" if plan.bound is None else f"no plan is below {time_words(plan.bound)}"
    yield f"{plan.status.value}: {plan.objective.value} {time_words(plan.value)}, {bound}{_gap(plan.gap)}"
    yield f"solved in {time_words(plan.solve_seconds)} by {plan.solver}, seed {plan.seed}"


def totals_of_replicas(found: ReplicatedPlan) -> Iterator[str]:
    """Rate of all together, and proof."""
    times = [plan.predicted.bottleneck_seconds for plan in found.plans]
    if all(times):
        rate = sum(plan.workload.batch / time for plan, time in zip(found.plans, times, strict=True))
        mark = ESTIMATED if any(plan.predicted.estimated for plan in found.plans) else ""
        yield f"all replicas together, pipelines full: {mark}{_rate(rate)}"
    bound = "no bound is known" if found.bound is None else f"no replicas are below {time_words(found.bound)}"
    yield f"{found.objective.value} {time_words(found.value)}, {bound}{_gap(found.gap)}"


def _times(plan: Plan) -> Iterator[str]:
    told = plan.predicted
    mark = ESTIMATED if told.estimated else ""
    yield (
        f"{mark}{time_words(told.latency_seconds)} per token: {time_words(told.compute_seconds)} compute, "
        f"{time_words(told.memory_seconds)} memory, {time_words(told.link_seconds)} links, "
        f"{time_words(told.overhead_seconds)} fixed"
    )
    if told.bottleneck_seconds > 0:
        rate = _rate(plan.workload.batch / told.bottleneck_seconds)
        yield f"{mark}{time_words(told.bottleneck_seconds)} per step of a full pipeline: {rate}"


def _rate(rate: float) -> str:
    return f"{rate:.4g} {'token' if rate == 1 else 'tokens'} a second"


def _gap(gap: float | None) -> str:
    return "" if gap is None else f", gap {gap:.2%}"


def _title(plan: Plan) -> str:
    return f"{plan.model}: {_extent(plan)}, {_work(plan)}"


def _extent(plan: Plan) -> str:
    return (
        f"{counted(plan.layer_count, 'layer')} in {counted(len(plan.stages), 'stage')} on "
        f"{counted(len(plan.devices), 'device')}"
    )


def _work(plan: Plan) -> str:
    work = plan.workload
    context = f"{work.context_tokens:,} tokens of context" if work.context_tokens else "no cache counted"
    return f"{context}, batch {work.batch}"


def _devices(plan: Plan, inventory: Inventory, simulated: Set[str], width: int) -> Iterator[RenderableType]:
    yield stages_table(plan, inventory, simulated, width)
    if len(plan.stages) > 1:
        yield _line(f"{BACK}: the way of a token from the last stage to the first, for the next token", "dim")
    yield _line("")
    yield from _bars(plan, simulated, width)
    yield _line("")


def _footnote(*, estimated: bool) -> Iterator[Text]:
    if estimated:
        yield _line(f"{ESTIMATED} not measured: from a table, or assumed by where the devices are", "dim")


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
    legend = ", ".join(f"{letter} {name}" for _, name, letter, _ in _PARTS)
    legend += f", {_FREE} free, {_KEPT} kept free"
    # Below the bars, or as far to the left as it has to be.
    yield _line(f"{'':<{max(0, min(width + 1, line_width - len(legend)))}}{legend}", "dim")


def _figures(held: DeviceBytes, simulated: Set[str]) -> str:
    used = held.weights + held.kv + held.activations
    mark = " (simulated)" if held.device in simulated else ""
    return f"{size_words(used)} / {size_words(held.usable)}, {size_words(held.reserve)} kept free{mark}"


def _filled(held: DeviceBytes, width: int) -> Iterator[tuple[str, str]]:
    """The bar of a device, letter by letter with its colour. Rounded so that something is never nothing."""
    sizes = [int(getattr(held, field)) for field, _, _, _ in _PARTS]
    scale = width / max(1, held.usable)
    drawn = 0
    for (_, _, letter, style), size in zip(_PARTS, sizes, strict=True):
        number = min(width - drawn, max(1, round(size * scale)) if size else 0)
        drawn += number
        yield letter * number, style
    kept = min(width - drawn, round(held.reserve * scale))
    yield _FREE * (width - drawn - kept), "dim"
    yield _KEPT * kept, "dim"


def _line(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text, MAX_LINE), style=style)


def render_lines(lines: Sequence[str]) -> Iterator[Text]:
    """Sentences; terminals wrap them."""
    return map(_line, lines)
