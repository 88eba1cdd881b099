"""What a plan would be with more of one thing: solved again, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from gpurt.placement.arguments import check_kind
from gpurt.placement.constraints import Constraints
from gpurt.placement.devices import PlacementDevice
from gpurt.placement.errors import InfeasiblePlacement, PlacementCancelled, PlacementTimeout
from gpurt.placement.inputs import check_types
from gpurt.placement.plan import Plan
from gpurt.placement.record import PlacementRecord
from gpurt.placement.solver import ConstraintSatisfactionPlacement
from gpurt.placement.spec import ModelSpec
from gpurt.placement.topology import LinkTable, Topology

GOOD_ENOUGH: Final = 0.01
"""Gap at which such a question counts as answered: it is about what is worth buying, not about the last percent."""


class WhatIf(PlacementRecord):
    """One change, and the best plan that was found with it."""

    change: str
    plan: Plan
    gain: float
    """Share of the objective that it saves; 0 where nothing better was found than the plan that there is."""


def what_ifs(
    model: ModelSpec,
    devices: Sequence[PlacementDevice],
    topology: Topology,
    constraints: Constraints,
    plan: Plan,
    *,
    time_budget: float = 1.0,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[WhatIf, ...]:
    """Twice the memory everywhere, links twice as fast, half of the context: the greatest gain first.

    Blocks for up to ``time_budget`` seconds for each. A change whose plan was not found in that time is left out, and
    so are all after ``cancelled()`` became true.

    Raises: InvalidPlacementInput, where an argument is of another kind.
    """
    check_types(model, devices, topology, constraints)
    check_kind(plan, Plan, "plan")
    found: list[WhatIf] = []
    for change, others, links, rules in _changes(devices, topology, constraints):
        if cancelled():
            break
        try:
            other = ConstraintSatisfactionPlacement().solve_placement(
                model,
                others,
                links,
                rules,
                objective=plan.objective,
                time_budget=time_budget,
                target_gap=GOOD_ENOUGH,
                seed=plan.seed,
                cancelled=cancelled,
            )
        except (PlacementTimeout, PlacementCancelled, InfeasiblePlacement):
            continue
        gain = max(0.0, 1 - other.value / plan.value) if plan.value > 0 else 0.0
        found.append(WhatIf(change=change, plan=other, gain=gain))
    return tuple(sorted(found, key=lambda each: -each.gain))


def _changes(
    devices: Sequence[PlacementDevice], topology: Topology, constraints: Constraints
) -> Iterator[tuple[str, Sequence[PlacementDevice], Topology, Constraints]]:
    larger = [each.model_copy(update={"usable_bytes": each.usable_bytes + each.budget_bytes}) for each in devices]
    yield "twice the free memory on every device", larger, topology, constraints
    yield "links twice as fast", devices, _faster(topology), constraints
    context = constraints.workload.context_tokens
    if context > 1:
        work = constraints.workload.model_copy(update={"context_tokens": context // 2})
        half = constraints.model_copy(update={"workload": work})
        yield f"a context of {context // 2:,} tokens", devices, topology, half


def _faster(topology: Topology) -> Topology:
    """Half the latency and twice the bandwidth."""
    links = tuple(
        link.model_copy(update={"latency_seconds": link.latency_seconds / 2, "bandwidth": link.bandwidth * 2})
        for link in topology.links
    )
    classes = {
        locality: assumed
        and assumed.model_copy(
            update={"latency_seconds": assumed.latency_seconds / 2, "bandwidth": assumed.bandwidth * 2}
        )
        for locality, assumed in topology.classes.items()
    }
    table = topology.table and LinkTable(
        names=topology.table.names,
        latency_seconds=topology.table.latency_seconds / 2,
        bandwidth=topology.table.bandwidth * 2,
    )
    return topology.model_copy(update={"links": links, "classes": classes, "table": table})
